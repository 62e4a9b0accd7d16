"""Train mode and running statistics, on executors and over rounds, against plain torch loops."""

import copy
import pickle
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsieve.config import Correction, Local, Optimizer
from fedsieve.errors import FedsieveError
from fedsieve.federation.distributed import Begin, Train
from fedsieve.federation.executors import Cohort, Sequential, Stacked, Task, make_executor
from fedsieve.federation.local import local_clients
from fedsieve.federation.maskbook import MaskBook
from fedsieve.federation.memory import ClientMemory
from fedsieve.federation.server import Rounds
from fedsieve.federation.state import ServerState
from fedsieve.federation.team import Desk
from fedsieve.federation.work import Draws, local_work
from fedsieve.model.space import ParamSpace
from fedsieve.runner.federated import make_context
from fedsieve.runner.prepare import prepare
from fedsieve.runner.progress import Display
from fedsieve.train.feed import tensor_feed
from fedsieve.train.modes import RunningStatistics
from fedsieve.train.objectives import Recipe
from fedsieve.wire.ledger import lines

SIZES = [8, 6, 12]


class Net(nn.Module):
    def __init__(self, drop=0.0, norm=True) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6) if norm else nn.Identity()
        self.drop, self.out = nn.Dropout(drop), nn.Linear(6, 10)

    def forward(self, images):
        return self.out(self.drop(self.norm(self.conv(images)).relu().mean((2, 3))))


def made(recipe, drop=0.0, norm=True):
    """A task on a network in double precision, and the works of three clients."""
    torch.manual_seed(0)
    model = Net(drop, norm).double().eval()
    count = sum(SIZES)
    feed = tensor_feed((2 + torch.randn(count, 3, 6, 6, dtype=torch.float64), torch.arange(count) % 10))
    space = ParamSpace.of(model)
    theta = space.bind(model)
    task = Task(model, space, theta, feed, Optimizer(lr=0.1, momentum=0.0), Correction(), nullcontext, recipe=recipe)
    bounds = np.cumsum([0, *SIZES])
    works = [
        local_work(client, np.arange(*bounds[client : client + 2]), Local(epochs=2), 4, Draws(feed, 1, ("stage", 0)))
        for client in range(len(SIZES))
    ]
    return task, works


def train(task, works, **more):
    start = task.theta.detach().clone()
    return list(Sequential(task, None).train(Cohort(works, start, **more), 0.1))


def by_hand(task, work, statistics):
    """A plain torch loop of one client; gives how far its weights went, and its buffers."""
    model = copy.deepcopy(task.model)
    model.train()
    if statistics == "frozen":
        model.norm.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in work.examples:
        inputs, labels = task.feed.batch(rows[rows >= 0])
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    moved = task.space.read(model) - task.theta.detach()
    return moved, torch.cat([model.norm.running_mean, model.norm.running_var])


@pytest.mark.parametrize("statistics", ["frozen", "batch", "federated", "local"])
def test_a_client_trains_as_a_plain_loop_in_train_mode_and_leaves_the_model_as_it_was(statistics):
    task, works = made(Recipe(mode="train", statistics=statistics))
    before = copy.deepcopy(task.model.state_dict())
    expected = [by_hand(task, work, statistics) for work in works]
    random = torch.get_rng_state()
    for found, (moved, buffers) in zip(train(task, works), expected, strict=True):
        torch.testing.assert_close(found.moved[0], moved)
        if statistics in ("federated", "local"):
            torch.testing.assert_close(found.statistics[0], buffers)
        else:
            assert found.statistics is None
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())
    assert not any(module.training for module in task.model.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_clients_begin_with_the_statistics_that_they_are_given():
    task, works = made(Recipe(mode="train", statistics="federated"))
    running = RunningStatistics(task.model)
    rows = torch.rand(3, running.space.size, dtype=torch.float64)
    expected = []
    for work, row in zip(works, rows, strict=True):
        with running.set_to(row):
            expected.append(by_hand(task, work, "federated")[1])
    alone = [trained.statistics[0] for trained in train(task, works, statistics=rows)]
    torch.testing.assert_close(alone, expected)
    together = [trained.statistics[0] for trained in train(task, works[:1], statistics=rows[0])]
    assert torch.equal(together[0], alone[0])


def test_dropout_draws_by_address_whatever_ran_before():
    task, works = made(Recipe(mode="train"), drop=0.5)
    whole = [trained.moved[0] for trained in train(task, works)]
    torch.manual_seed(99)
    backwards = [trained.moved[0] for trained in train(task, works[::-1])]
    assert all(torch.equal(one, two) for one, two in zip(whole, backwards[::-1], strict=True))
    still, _ = made(Recipe(), drop=0.5)
    assert not torch.equal(whole[0], train(still, works)[0].moved[0])
    later = [replace(work, address=(1, "stage", 1)) for work in works]
    assert not torch.equal(whole[0], train(task, later)[0].moved[0])


@pytest.mark.parametrize(
    ("recipe", "drop", "why"),
    [
        (Recipe(mode="train"), 0.1, "layers draw random numbers"),
        (Recipe(mode="train", statistics="batch"), 0.0, "running statistics"),
        (Recipe(statistics="local"), 0.0, "running statistics"),
        (Recipe(mode="train"), 0.0, ""),
        (Recipe(), 0.1, ""),
    ],
)
def test_networks_that_must_train_one_client_at_a_time_say_so_and_others_are_stacked(recipe, drop, why):
    task, works = made(recipe, drop)
    expected = [trained.moved[0] for trained in train(task, works)]
    with pytest.warns(UserWarning, match=why) if why else nullcontext():
        executor = make_executor("stacked", task, None, 2, 4, lambda _: None)
    assert isinstance(executor, Sequential if why else Stacked)
    found = list(executor.train(Cohort(works, task.theta.detach().clone()), 0.1))
    torch.testing.assert_close(torch.cat([trained.moved for trained in found]), torch.stack(expected))
    assert not any(module.training for module in task.model.modules())


def test_statistics_do_not_matter_to_a_network_without_any():
    task, works = made(Recipe(mode="train", statistics="federated"), norm=False)
    assert train(task, works)[0].statistics is None
    assert isinstance(make_executor("stacked", task, None, 2, 4, lambda _: None), Stacked)


def test_a_batch_of_one_example_without_statistics_is_explained():
    task, works = made(Recipe(mode="train", statistics="batch"))
    lone = replace(works[0], examples=np.array([[0, -1, -1, -1]]))
    task.model.conv = nn.Conv2d(3, 6, 6).double()  # one place per channel
    with pytest.raises(FedsieveError, match="client 0 has a batch of one example"):
        train(replace(task, model=task.model), [lone])


@pytest.mark.parametrize("statistics", ["federated", "local"])
def test_another_rank_gives_the_same_bits_and_is_sent_no_function(statistics):
    recipe = Recipe(
        lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="none"), {}, True, "train", statistics
    )
    task, works = made(recipe, drop=0.3)
    own = torch.rand(3, 12, dtype=torch.float64) if statistics == "local" else torch.rand(12, dtype=torch.float64)
    expected = train(task, works, statistics=own)
    other, _ = made(recipe, drop=0.3)
    desk = Desk(other.model, other.feed, nullcontext, "eager", 0, recipe)
    begin, ask = (
        pickle.loads(pickle.dumps(request))
        for request in (
            Begin.like(Sequential(task, None)),
            Train(works, task.theta.detach().clone(), None, None, 0.1, own),
        )
    )
    assert not list(begin.perform(desk))
    for found, (moved, sums, gradients, ended) in zip(expected, ask.perform(desk), strict=True):
        assert torch.equal(found.moved, moved) and torch.equal(found.sums, sums) and gradients is None
        assert torch.equal(found.statistics, ended)


# --- over rounds -----------------------------------------------------------------------------------------------------


class Own:
    """A stage of rounds with a network of the test's own."""

    def __init__(self, experiment, folder, recipe, drop=0.0) -> None:
        self.experiment, self.folder, self.recipe, self.drop = experiment, folder, recipe, drop
        self.stage = experiment.stages[0]

    def rounds(self, saved=None):
        """Its rounds, from the beginning or from a state and the versions of the clients' memory."""
        setup = prepare(self.experiment, Display.silent())
        torch.manual_seed(0)
        model = Net(self.drop).eval()
        initial = {name: tensor.clone() for name, tensor in model.named_parameters()}
        inputs = torch.cat([inputs for inputs, _ in setup.train.in_order(100)])
        self.feed = tensor_feed((inputs, setup.train.labels))
        context = make_context(setup, {}, self.folder, "", {})
        self.context = replace(
            context,
            model=model,
            initial=initial,
            train=self.feed,
            recipe=self.recipe,
            memory=ClientMemory(self.folder / "clients", saved[1] if saved else None),
        )
        self.began = copy.deepcopy(model)
        self.model, self.space = model, ParamSpace.of(model)
        task = Task(
            model,
            self.space,
            self.space.bind(model),
            self.feed,
            self.stage.optimizer,
            Correction(),
            nullcontext,
            recipe=self.recipe,
        )
        restored = ServerState.restore(*saved[0], torch.device("cpu")) if saved else None
        self.state = restored or ServerState(task.theta.detach().clone())
        book = MaskBook(self.context, self.stage, task.space, task.theta, self.state.masks)
        clients = local_clients(self.context, task, book, self.state.clients_at_once)
        return Rounds(self.context, self.stage, book, clients, self.state)

    def saved(self):
        """All that a checkpoint holds."""
        tensors = {name: tensor.clone() for name, tensor in self.state.tensors().items()}
        return (copy.deepcopy(self.state.numbers()), tensors), self.context.memory.write(self.state.round)


OWN = (
    "stages.all.rounds=4",
    "data.val_fraction=0",
    "stages.all.schedule=constant",
    "stages.all.optimizer={lr: 0.1, momentum: 0}",
)


@pytest.mark.parametrize("statistics", ["federated", "local"])
def test_rounds_equal_plain_ones_written_out(federated, tmp_path, statistics):
    """The reference averages whole state dicts, and puts back the buffers of each client where these are its own."""
    own = Own(federated(*OWN), tmp_path, Recipe(mode="train", statistics=statistics))
    list(own.rounds().rounds())
    server, people, kept = own.began, own.context.population, {}
    for number in range(4):
        every, weights = [], []
        for client in people.cohort("all", number).tolist():
            model = copy.deepcopy(server).train()
            model.norm.load_state_dict(kept.get(client, {}), strict=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            examples = people.examples(client)
            work = local_work(client, examples, own.stage.local, 16, Draws(own.feed, 2, ("all", number)))
            for rows in work.examples:
                inputs, labels = own.feed.batch(rows[rows >= 0])
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            every.append(model.state_dict())
            if statistics == "local":
                kept[client] = {name: value for name, value in model.norm.named_buffers() if value.dim()}
            weights.append(len(examples))
        mean = {
            name: sum(w * one[name] for w, one in zip(weights, every, strict=True)) / sum(weights)
            for name, tensor in server.state_dict().items()
            if tensor.is_floating_point()
        }
        if statistics == "local":
            mean |= dict(own.began.norm.named_buffers(prefix="norm"))
        server.load_state_dict(mean, strict=False)
    for name, tensor in own.model.state_dict().items():
        torch.testing.assert_close(tensor, server.state_dict()[name], rtol=1e-4, atol=1e-6)
    own.context.ledger.sync()
    counted = [line for line in lines(own.context.ledger.path) if line.what == "statistics"]
    if statistics == "local":
        assert not counted and kept
        for client, buffers in kept.items():
            found = own.context.memory.get(client)["statistics"]
            torch.testing.assert_close(found, torch.cat([buffers["running_mean"], buffers["running_var"]]))
        return
    assert not torch.equal(own.model.norm.running_mean, torch.zeros(6))
    assert {(line.direction, line.round) for line in counted} == {
        (way, n) for way in ("up", "down") for n in (1, 2, 3, 4)
    }
    assert all(line.size >= 4 * 12 for line in counted)


@pytest.mark.parametrize("statistics", ["frozen", "batch", "federated", "local"])
def test_a_resumed_stage_ends_with_the_same_bits(federated, tmp_path, statistics):
    recipe = Recipe(mode="train", statistics=statistics)
    whole = Own(federated(*OWN), tmp_path / "whole", recipe, drop=0.3)
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    list(whole.rounds().rounds())
    parts, saved = Own(federated(*OWN), tmp_path / "parts", recipe, drop=0.3), None
    for _ in range(4):
        next(parts.rounds(saved).rounds())
        saved = parts.saved()
    assert all(torch.equal(one, parts.model.state_dict()[name]) for name, one in whole.model.state_dict().items())
    kept = [own.context.memory.get(client) for own in (whole, parts) for client in range(8)]
    for one, two in zip(kept[:8], kept[8:], strict=True):
        assert one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())
    assert any(kept) is (statistics == "local")


@pytest.mark.parametrize("statistics", ["federated", "local"])
def test_refused_updates_change_no_statistics(federated, tmp_path, statistics):
    recipe = Recipe(mode="train", statistics=statistics)
    own = Own(federated(*OWN, "federation.failures={corrupt: 0.999999}"), tmp_path, recipe)
    records = [tick.record for tick in own.rounds().rounds()]
    assert all(record.replies == 0 for record in records)
    assert all(torch.equal(t, own.began.state_dict()[name]) for name, t in own.model.state_dict().items())
    assert not any(own.context.memory.get(client) for client in range(8))


def test_a_round_of_too_few_replies_changes_no_statistics(federated, tmp_path):
    recipe = Recipe(mode="train", statistics="federated")
    own = Own(federated(*OWN, "federation.minimum_replies=3", "federation.failures={crash: 0.5}"), tmp_path, recipe)
    rounds, before = own.rounds(), torch.cat([torch.zeros(6), torch.ones(6)])
    seen = set()
    for tick in rounds.rounds():
        now = own.state.statistics.clone()
        assert torch.equal(now, before) is (tick.record.replies < 3)
        seen.add(tick.record.replies < 3)
        before = now
    assert True in seen

"""Personal models at the end of a run, and evaluation on images that clients keep to themselves."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.federation.conftest import SPARSE

import fedsieve.runner.testing
from fedsieve import resume, run
from fedsieve.config import parse_config
from fedsieve.data.partitions import Shards, client_accuracies, label_weights
from fedsieve.errors import FedsieveError
from fedsieve.federation.calibrate import client_masks
from fedsieve.federation.clients import Replies
from fedsieve.federation.personal import PersonalModels, norm_names, spread
from fedsieve.federation.population import Population
from fedsieve.federation.server import Rounds
from fedsieve.federation.work import Draws, local_work
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.model.weights import digest
from fedsieve.runner.model_files import load_model
from fedsieve.runner.preflight import preflight
from fedsieve.train.feed import Feed
from fedsieve.train.loop import predict
from fedsieve.wire.ledger import lines, totals

PERSONAL = "federation.personal={local: {epochs: 2}, batch_size: 16, optimizer: {lr: 0.1, weight_decay: 1e-2}}"
ALL = "federation.personal.methods=[local, head, norms, mask, blend]"


class Watched(PersonalModels):
    """Personal models that keep the weights they are tested with."""

    def _accuracy(self, client, test):
        self.weights = {**getattr(self, "weights", {}), client: weights_of(self.model)}
        return super()._accuracy(client, test)


def personal(found, clients=range(8), mask=None) -> Watched:
    return Watched(found.context, np.array(clients), mask, found.setup.test_feed())


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(before, after) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("method", ["local", "head"])
def test_a_client_adapts_as_plain_torch_would(federated, running, method):
    """All weights through images, and the head through features that are computed once."""
    found = running(federated(PERSONAL, "stages.all.rounds=1"))
    model, feed, client = found.setup.model, found.setup.train, 5
    models = personal(found, [2, client])
    accuracy = models.accuracies(method)
    names = [name for name, _ in model.named_parameters() if method == "local" or name.startswith("head.")]
    parameters = [parameter for name, parameter in model.named_parameters() if name in names]
    model.requires_grad_()
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)
    mine = found.context.population.examples(client)
    settings = found.experiment.federation.personal
    work = local_work(client, mine, settings.local, settings.batch_size, Draws(feed, 2, ("personal", method)))
    assert sorted(np.unique(work.examples[work.examples >= 0])) == sorted(mine)
    for rows in work.examples:
        inputs, labels = feed.batch(rows[rows >= 0])
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(models.weights[client][name], parameter.detach(), rtol=1e-3, atol=1e-5)
    test = found.setup.test_feed()
    right = (predict(model, test, found.setup.autocast).argmax(1) == test.labels).numpy()
    held = np.unique(feed.labels.numpy()[mine], return_counts=True)
    by_class = [right[test.labels.numpy() == label].mean() for label in held[0]]
    assert accuracy[1] == pytest.approx(np.average(by_class, weights=held[1]), abs=1e-9)


@pytest.mark.parametrize(
    ("methods", "overrides"), [(("local", "mask"), SPARSE), (("local",), ()), (("head", "norms"), SPARSE)]
)
def test_clients_may_train_on_as_the_stage_did(federated, running, methods, overrides):
    """What the stage trained moves at the stage's rate, all else at the rate that was given."""
    given = "federation.personal={local: {steps: 1}, as_trained: true, optimizer: {lr: %g}}"
    found = {lr: running(federated(*overrides, given % lr, "stages.all.rounds=1")) for lr in (0.0001, 0.5)}
    for method in methods:
        models = {lr: personal(run, [2]) for lr, run in found.items()}
        for one in models.values():
            one.accuracies(method)
        first, second = (one.weights[2] for one in models.values())
        assert bool(changed(first, second)) == (method in ("head", "norms"))


def test_a_weighted_test_is_what_drawn_test_sets_give_on_average(federated, running):
    found = running(federated(PERSONAL, "stages.all.rounds=2", "federation.partition={kind: dirichlet, alpha: 0.5}"))
    models, counts = personal(found, [0, 3]), found.context.population.counts
    test, rng = models.test, np.random.default_rng(0)
    right = (predict(found.setup.model, test, found.setup.autocast).argmax(1) == test.labels).numpy()
    labels = test.labels.numpy()
    for client in (0, 3):
        mine = found.setup.train.labels.numpy()[found.context.population.shards.client(client)]
        drawn = [right[rng.choice(np.flatnonzero(labels == label))] for label in rng.choice(mine, 20_000)]
        accuracy = models._accuracy(client, test)
        assert accuracy == pytest.approx(np.mean(drawn), abs=0.015)
        assert accuracy == pytest.approx(client_accuracies(right, labels, counts, 8)[client], abs=1e-12)
        assert accuracy == pytest.approx(label_weights(counts, client, labels) @ right, abs=1e-12)


METHODS = {
    "local": lambda name: True,
    "head": lambda name: name.startswith("head."),
    "norms": lambda name: "norm" in name,
    "mask": lambda name: True,
}


@pytest.mark.parametrize("executor", ["sequential", "stacked"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_moves_what_it_says_and_leaves_the_model_as_it_was(federated, running, method, executor):
    at_once = ["clients_at_once=3"] if executor == "stacked" else []
    found = running(federated(*SPARSE, PERSONAL, "stages.all.rounds=1", f"executor={executor}", *at_once))
    model, mask = found.setup.model, Mask(found.space, found.state.masks.mask.numpy())
    before = weights_of(model)
    models = personal(found, mask=mask)
    accuracy = models.accuracies(method)
    assert changed(before, weights_of(model)) == set()
    assert ((accuracy >= 0) & (accuracy <= 1)).all() and len(accuracy) == 8
    for client, weights in models.weights.items():
        moved = changed(before, weights)
        assert moved and all(METHODS[method](name) for name in moved)
        if method == "norms":
            assert moved == set(norm_names(model)) and len(moved) == 10
        apart = found.space.flatten(weights) != found.space.flatten(before)
        if method == "local":
            assert not apart[~mask.to_bool()].any() and apart.any()
        if method == "mask":
            own = next(client_masks(found.context, found.experiment.mask, found.space, [client], "personal"))
            assert own != mask and not apart[~own.to_bool()].any()
    other = personal(found, [3, 6], mask)
    assert other.accuracies(method).tolist() == pytest.approx(accuracy[[3, 6]].tolist())
    for client in (3, 6):  # a client's model does not hinge on who else has one
        for name, tensor in other.weights[client].items():
            torch.testing.assert_close(tensor, models.weights[client][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overrides", [[], ["data.transform=crop_flip"], [*SPARSE, "mask.scope=client"]])
def test_executors_make_the_same_personal_models(federated, running, overrides):
    found = {}
    for executor in ("sequential", "stacked"):
        running_one = running(federated(PERSONAL, "stages.all.rounds=1", *overrides, f"executor={executor}"))
        for method in ("local", "head"):
            models = personal(running_one)
            models.accuracies(method)
            found[executor, method] = models.weights
    for method in ("local", "head"):
        for client, weights in found["sequential", method].items():
            for name, tensor in weights.items():
                torch.testing.assert_close(found["stacked", method][client][name], tensor, rtol=1e-3, atol=1e-4)


def test_clients_with_masks_of_their_own_keep_them(federated, running):
    found = running(federated(*SPARSE, PERSONAL, "mask.scope=client", "stages.all.rounds=2"))
    before = found.space.read(found.setup.model)
    models = personal(found)
    models.accuracies("local")
    known = 0
    for client, weights in models.weights.items():
        bits = found.context.memory.get(client).get("all.mask")
        known += bits is not None
        if bits is not None:
            mask = Mask(found.space, bits.numpy())
        else:
            mask = next(client_masks(found.context, found.experiment.mask, found.space, [client], "personal"))
        apart = found.space.flatten(weights) != before
        assert apart.any() and not apart[~mask.to_bool()].any()
    assert 0 < known < 8


@pytest.mark.parametrize("sparse", [(), SPARSE])
def test_a_blend_is_the_clients_own_share_of_its_own_weights(federated, running, sparse):
    found = running(federated(*sparse, PERSONAL, "federation.blend=true", "stages.all.rounds=2"))
    before = found.space.read(found.setup.model)
    mask = Mask(found.space, found.state.masks.mask.numpy()) if sparse else None
    support = slice(None) if mask is None else mask.indices()
    models = personal(found, mask=mask)
    models.accuracies("blend")
    mixed = 0
    for client, weights in models.weights.items():
        memory, expected = found.context.memory.get(client), before.clone()
        if "all.own" in memory:
            share, own = memory["all.share"].float(), memory["all.own"].float()
            expected[support] = share * own + (1 - share) * before[support]
            mixed += 1
        torch.testing.assert_close(found.space.flatten(weights), expected)
    assert 0 < mixed < 8


def test_a_clients_share_compares_mean_squared_gradients_not_sums(federated, running):
    """Reference: one backward pass per image at the initial weights. Clients hold very different numbers of images."""
    found = running(
        federated(
            "mask={rule: high_magnitude, sparsity: 0.8, fisher: {samples: 1000, labels: true}}",
            "stages.all={name: all, sparse: true, rounds: 1, local: {steps: 1}}",
            "federation={clients: 4, cohort: 1, blend: true, partition: {kind: quantity, alpha: 0.5}}",
            "data.val_fraction=0.9",
        )
    )
    people, feed, model = found.context.population, found.setup.train, found.setup.model
    found.space.write(model, found.start)
    parameters = [model.get_parameter(name).requires_grad_() for name in found.space.names]
    sensitivity = torch.zeros(4, found.space.size)
    for client in range(4):
        for image in people.examples(client):
            inputs, labels = feed.batch(np.array([image]))
            gradients = torch.autograd.grad(F.cross_entropy(model(inputs), labels), parameters)
            sensitivity[client] += torch.cat([gradient.flatten() for gradient in gradients]).square()
        sensitivity[client] /= len(people.examples(client))
    active = Mask(found.space, found.state.masks.mask.numpy()).indices()
    total = sensitivity.sum(0)[active]
    assert np.ptp(people.sizes) > 20 and (total > 0).float().mean() > 0.9
    for client in range(4):
        share = torch.where(total > 0, sensitivity[client, active] / total, 0)
        torch.testing.assert_close(found.context.memory.get(client)["all.share"].float(), share, rtol=0, atol=2e-3)


def test_a_model_that_diverged_is_right_about_nothing(federated, running):
    found = running(federated(PERSONAL, "federation.personal.optimizer.lr=1e30", "stages.all.rounds=1"))
    assert personal(found, [0, 1]).accuracies("local").tolist() == [0, 0]


def test_a_run_reports_personal_models_and_strangers_apart_and_ends_with_the_same_model(federated, tmp_path):
    shared = [*SPARSE, "federation.held_out=0.25", "federation.blend=true", "stages.all.rounds=2"]
    run(federated(*shared), tmp_path / "plain")
    experiment = federated(*shared, PERSONAL, ALL, "federation.personal.clients=7")
    summary, again = (run(experiment, tmp_path / name) for name in ("run", "again"))
    assert summary["personal"] == again["personal"]
    assert digest(load_model(tmp_path / "plain")[1]) == digest(load_model(tmp_path / "run")[1])
    ledgers = [(tmp_path / name / "ledger.csv").read_text() for name in ("plain", "run")]
    assert ledgers[0] == ledgers[1]  # nothing is sent
    with np.load(tmp_path / "run" / "personal.npz") as file:
        methods, clients, strangers, accuracy = (file[key] for key in ("methods", "clients", "strangers", "accuracy"))
    assert methods.tolist() == ["global", "local", "head", "norms", "mask", "blend"]
    assert accuracy.shape == (6, 7) and len(clients) == 7 and set(strangers) <= set(clients) and len(strangers) > 0
    strange = np.isin(clients, strangers)
    for method, found in zip(methods, accuracy, strict=True):
        told = dict(summary["personal"][method])
        assert told.pop("strangers") == spread(found[strange])
        assert told == spread(found[~strange]) and told["clients"] == 7 - len(strangers)
    with np.load(tmp_path / "run" / "clients.npz") as file:
        np.testing.assert_allclose(accuracy[0], file["accuracy"][clients])
    blend = methods.tolist().index("blend")
    assert accuracy[blend][strange].tolist() == pytest.approx(
        accuracy[0][strange].tolist()
    )  # it has nothing of its own
    assert summary["personal"]["local"]["mean"] > summary["personal"]["global"]["mean"]


@pytest.mark.parametrize("scope", [[], ["mask.refresh=1", "federation.blend=false"], ["mask.scope=client"]])
def test_a_run_killed_among_personal_models_makes_them_again(federated, tmp_path, monkeypatch, scope):
    experiment = federated(
        *SPARSE, PERSONAL, *scope, "stages.all.rounds=2", "federation.personal.methods=[head, local]"
    )
    whole = run(experiment, tmp_path / "whole")

    def killed(self, method):
        if method == "local":
            raise KeyboardInterrupt
        return PersonalModels.accuracies(self, method)

    with monkeypatch.context() as patch:
        patch.setattr(fedsieve.runner.testing, "PersonalModels", type("_", (PersonalModels,), {"accuracies": killed}))
        with pytest.raises(FedsieveError, match="resume"):
            run(experiment, tmp_path / "cut")
    assert not (tmp_path / "cut" / "summary.json").exists()
    assert resume(tmp_path / "cut")["personal"] == whole["personal"]


def test_a_ridge_head_can_be_adapted_too(federated, tmp_path):
    ridge = "stages=[{name: head, train: head, method: ridge}]"
    summary = run(federated(ridge, PERSONAL, "federation.client_validation=0.2"), tmp_path / "run")
    assert summary["personal"]["local"]["clients"] == 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["federation.personal={methods: [blend]}"], "needs federation.blend: true"),
        (["federation.personal={methods: [mask]}"], "no stage has any"),
        (["federation.personal={methods: [head, head]}"], "named twice"),
        (
            ["federation.personal={methods: [head], as_trained: true}"],
            "as_trained needs the methods local and mask",
        ),
        (["federation.personal={methods: []}"], "federation.personal.methods"),
        (["federation.client_validation=1.0"], "client_validation"),
        (
            [
                "federation={clients: 8, blend: true, personal: {methods: [blend]}}",
                "stages=[{name: head, train: head, method: ridge}]",
            ],
            "not solved by ridge",
        ),
    ],
)
def test_what_cannot_be_is_refused(federated, overrides, message):
    with pytest.raises(FedsieveError, match=message):
        federated(*overrides)


def test_a_network_without_norms_is_refused_before_anything_is_loaded(federated):
    plain = ["model.backbone=vgg11", "model.options={}", "data.size=32", "federation.personal={methods: [norms]}"]
    with pytest.raises(FedsieveError, match="no norm layers"):
        preflight(federated(*plain))


# --- images that clients keep for validation -------------------------------------------------------------------------

HELD = "federation.client_validation=0.2"


@pytest.mark.parametrize("overrides", [[], [*SPARSE, "federation.blend=true"], [*SPARSE, "mask.scope=client"]])
def test_clients_keep_images_that_they_never_train_on(federated, running, monkeypatch, overrides):
    """Neither steps nor scores see them: what they read of the training images is noted."""
    read = set()
    fetch = Feed.fetch

    def noting(self, examples, draws=None):
        read.update(self.rows[examples].tolist())
        return fetch(self, examples, draws)

    with monkeypatch.context() as patch:
        patch.setattr(Feed, "fetch", noting)
        patch.setattr(Rounds, "measure", lambda *_: {})
        found = running(federated(HELD, *overrides, "data.val_fraction=0"))
    population, rows = found.context.population, found.setup.train.rows
    seen = {client: {row for row in rows[population.shards.client(client)] if row in read} for client in range(8)}
    for client in range(8):
        mine, kept = population.examples(client), population.validation(client)
        assert sorted([*mine, *kept]) == sorted(population.shards.client(client))
        assert len(mine) == population.sizes[client] and len(kept) == population.held[client]
        assert seen[client] <= set(rows[mine])
    assert sum(map(bool, seen.values())) >= 3


def test_clients_count_by_the_images_that_they_train_on(federated, running, monkeypatch):
    weights, pull = [], Replies.__iter__

    def noting(replies):
        for update in pull(replies):
            weights.append(update.weight)
            yield update

    monkeypatch.setattr(Replies, "__iter__", noting)
    population = running(federated(HELD, "stages.all.rounds=1")).context.population
    assert weights == population.sizes[population.cohort("all", 0)].tolist()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_one_image_is_left_to_train_on_and_one_to_validate(federated, share):
    settings, sizes = federated(f"federation.client_validation={share}").federation, np.array([1, 2, 3, 10, 100])
    shards = Shards(np.random.default_rng(0).permutation(sizes.sum()), np.cumsum([0, *sizes]))
    population = Population(settings, 0, shards, None, np.array([], dtype=int))
    assert population.held.tolist() == [
        0 if size == 1 or share == 0 else min(max(1, round(share * size)), size - 1) for size in sizes.tolist()
    ]
    assert (population.sizes >= 1).all()


@pytest.mark.parametrize("executor", ["sequential", "stacked"])
def test_the_next_clients_measure_the_model_that_they_receive(federated, running, executor):
    found = running(federated(HELD, f"executor={executor}", "stages.all.rounds=2", "data.val_fraction=0"))
    population, feed, model = found.context.population, found.setup.train, found.setup.model
    assert found.records[1]["client_val_accuracy"] <= found.state.chosen["client_val_accuracy"]
    at = found.state.best_at
    found.space.write(model, found.state.best)
    rows = np.concatenate([population.validation(client) for client in population.cohort("all", at).tolist()])
    inputs, labels = feed.batch(rows)
    with torch.no_grad():
        logits = model(inputs)
    record = found.records[at - 1]
    assert record["client_val_accuracy"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    assert record["client_val_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert "val_accuracy" not in record
    assert record["client_val_accuracy"] == max(record["client_val_accuracy"] for record in found.records)


def test_what_clients_measure_is_in_the_ledger(federated, running):
    plain = running(federated("federation.cohort=4"))
    found = running(federated("federation.cohort=4", HELD, "federation.evaluate_every=2"))
    found.context.ledger.sync()
    up, down = totals(found.context.ledger.path)["all"]
    assert up.tolist() == [record["bytes_up"] for record in found.records]
    assert down.tolist() == [record["bytes_down"] for record in found.records]
    said = [line for line in lines(found.context.ledger.path) if line.what == "metrics"]
    population = found.context.population
    for number in (2, 3):  # after the second round and, as the last, after the third
        assert [line.client for line in said if line.round == number] == population.cohort("all", number).tolist()
    assert len(said) == 8 and {line.size for line in said} == {68 + 16} and {line.direction for line in said} == {"up"}
    model = 4 * (4 * found.space.size + 68)
    more = [one["bytes_down"] - other["bytes_down"] for one, other in zip(found.records, plain.records, strict=True)]
    # Who measured the second model need not be sent it for the third round; the third is sent only to be measured.
    assert more == [0, model, 0]


@pytest.mark.parametrize("fraction", [0.2, 0.0])
def test_server_validation_chooses_where_there_is_any(federated, running, monkeypatch, fraction):
    """The clients are made to like the first round best."""
    monkeypatch.setattr(Rounds, "measure", lambda self, record: {"client_val_accuracy": 1 / self.state.round})
    found = running(federated(HELD, "stages.all.rounds=4", f"data.val_fraction={fraction}"))
    accuracies = [record.get("val_accuracy", record["client_val_accuracy"]) for record in found.records]
    assert found.state.best_at == 1 + int(np.argmax(accuracies))
    assert (found.state.best_at == 1) == (fraction == 0)
    assert found.state.chosen["client_val_accuracy"] == 1 / found.state.best_at


def test_failing_clients_measure_nothing(federated, running):
    found = running(federated(HELD, "data.val_fraction=0", "federation.failures={unavailable: 0.999999}"))
    assert all("client_val_accuracy" not in record for record in found.records)
    assert found.state.best_at == 3
    late = running(federated(HELD, "federation.failures={corrupt: 0.999999}"))
    assert all("client_val_accuracy" not in record for record in late.records)
    late.context.ledger.sync()
    said = {line.status for line in lines(late.context.ledger.path) if line.what == "metrics"}
    assert said and "ok" not in said


@pytest.mark.parametrize("lr", ["1e30", "1e4"])
def test_clients_do_not_hide_that_a_stage_diverged(federated, running, lr):
    with pytest.raises(FedsieveError, match="diverged in round"):
        running(federated(HELD, f"stages.all.optimizer.lr={lr}", "stages.all.rounds=9"))


def test_a_stage_can_stop_early_by_what_clients_measure(federated, tmp_path):
    early = [
        "stages.all.rounds=30",
        "stages.all.early_stopping=1",
        "stages.all.optimizer.lr=1e-9",
        "data.val_fraction=0",
    ]
    with pytest.raises(FedsieveError, match="early_stopping needs validation data"):
        federated(*early)
    summary = run(federated(*early, HELD, PERSONAL), tmp_path / "run")
    stage = summary["stages"]["all"]
    assert stage["rounds"] < 30 and stage["val_accuracy"] is None and 0 <= stage["client_val_accuracy"] <= 1
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert stage["client_val_accuracy"] == max(record["client_val_accuracy"] for record in records)


def test_a_space_of_norms_is_that_of_the_layers(federated, running):
    found = running(federated("stages.all.rounds=1"))
    names = norm_names(found.setup.model)
    layers = {path for path, module in found.setup.model.named_modules() if isinstance(module, torch.nn.LayerNorm)}
    assert {name.rpartition(".")[0] for name in names} == layers
    assert ParamSpace.of(found.setup.model, names).size == 2 * 16 * len(layers)


def test_defaults_read_back():
    text = "stages: [{name: a, rounds: 1}]\nfederation: {personal: {}}\n"
    experiment = parse_config(text)
    assert experiment.federation.personal.methods == ["local"] and experiment.federation.client_validation == 0

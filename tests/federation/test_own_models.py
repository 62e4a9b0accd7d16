"""Users' own models, tensors and objectives on the executors, against plain torch loops."""

import copy
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsieve.config import Correction, Local, Optimizer
from fedsieve.errors import FedsieveError
from fedsieve.federation.executors import Cohort, Sequential, Stacked, Task, make_executor
from fedsieve.federation.work import Draws, local_work
from fedsieve.model.space import ParamSpace
from fedsieve.train.feed import tensor_feed
from fedsieve.train.objectives import Objective, Recipe, checked, cross_entropy, mean_squared_error

SIZES = [7, 3, 9]  # examples of each client
EXAMPLES = sum(SIZES)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(*shape, below=11, seed=0):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, inputs):
        return self.out(self.hidden(inputs).tanh())


class Pair(nn.Module):
    """Takes a tuple: two views of an example."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, inputs):
        left, right = inputs
        return self.left(left) + self.right(right)


class Tagger(nn.Module):
    """Takes a dict, and gives each token a class; its embeddings are frozen unless they train too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.out = nn.Embedding(11, 8, padding_idx=2), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, inputs):
        seen = self.words(inputs["words"]) * inputs["mask"][..., None]
        return self.out(self.norm(seen + seen.mean(1, keepdim=True)))


MASK = (tokens(EXAMPLES, 6, below=4, seed=3) > 0).double()
CASES = {
    "regression": (
        Regression,
        random(EXAMPLES, 4),
        random(EXAMPLES, seed=1),
        Recipe(mean_squared_error, accuracy=False),
    ),
    "tuple": (Pair, (random(EXAMPLES, 4), random(EXAMPLES, 2)), tokens(EXAMPLES, below=3), Recipe()),
    "smoothed": (
        Pair,
        (random(EXAMPLES, 4), random(EXAMPLES, 2)),
        tokens(EXAMPLES, below=3),
        Recipe(partial(cross_entropy, smoothing=0.2)),
    ),
    "dict of tokens": (
        Tagger,
        {"words": tokens(EXAMPLES, 6), "mask": MASK},
        tokens(EXAMPLES, 6, below=5).where(MASK > 0, -100),
        Recipe(),
    ),
}


def made(case, recipe=None, train=lambda name: not name.startswith("words")):
    """A task, its executor's cohort, and a copy of its model as it began."""
    kind, inputs, labels, found = CASES[case]
    torch.manual_seed(0)
    model = kind().double().eval()
    space = ParamSpace.of(model, [name for name, _ in model.named_parameters() if train(name)])
    began = copy.deepcopy(model)
    theta = space.bind(model)
    feed, optimizer = tensor_feed((inputs, labels)), Optimizer(lr=0.1, momentum=0.0)
    task = Task(model, space, theta, feed, optimizer, Correction(), nullcontext, recipe=recipe or found)
    bounds = np.cumsum([0, *SIZES])
    works = [
        local_work(client, np.arange(*bounds[client : client + 2]), Local(steps=4), 4, Draws(feed, 1, ("stage", 0)))
        for client in range(len(SIZES))
    ]
    return task, Cohort(works, theta.detach().clone()), began


def by_hand(case, task, cohort, began, loss):
    """Each client's update, by torch's own optimizer on a plain copy."""
    _, inputs, labels, _ = CASES[case]
    moved = []
    for work in cohort.works:
        model = copy.deepcopy(began)
        optimizer = torch.optim.SGD([model.get_parameter(name) for name in task.space.names], lr=0.1)
        for step in work.examples:
            rows = torch.from_numpy(step[step >= 0])
            if isinstance(inputs, dict):
                batch = {name: tensor[rows] for name, tensor in inputs.items()}
            else:
                batch = tuple(tensor[rows] for tensor in inputs) if isinstance(inputs, tuple) else inputs[rows]
            optimizer.zero_grad()
            loss(model, batch, labels[rows]).backward()
            optimizer.step()
        moved.append(task.space.read(model) - task.space.read(began))
    return torch.stack(moved)


def trained(executor, cohort):
    results = list(executor.train(cohort, 0.1))
    return torch.cat([result.moved for result in results]), torch.cat([result.sums for result in results])


def mean_by_example(model, batch, labels):
    return torch.stack([F.cross_entropy(row, own) for row, own in zip(model(batch), labels, strict=True)]).mean()


LOSSES = {
    "regression": lambda model, batch, labels: F.mse_loss(model(batch)[:, 0], labels),
    "tuple": lambda model, batch, labels: F.cross_entropy(model(batch), labels),
    "smoothed": lambda model, batch, labels: F.cross_entropy(model(batch), labels, label_smoothing=0.2),
    "dict of tokens": mean_by_example,
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_own_models_train_as_in_a_plain_loop(case, stacked):
    task, cohort, began = made(case)
    expected = by_hand(case, task, cohort, began, LOSSES[case])
    executor = make_executor("stacked" if stacked else "sequential", task, None, 2, 4, lambda _: None)
    assert isinstance(executor, Stacked if stacked else Sequential)
    moved, sums = trained(executor, cohort)
    torch.testing.assert_close(moved, expected)
    assert sums.shape == (3, 3 if task.recipe.accuracy else 2)
    assert sums[:, -1].tolist() == [sum(int((step >= 0).sum()) for step in work.examples) for work in cohort.works]


@pytest.mark.parametrize("stacked", [False, True])
def test_embeddings_train_as_in_a_plain_loop_and_padding_stays(stacked):
    task, cohort, began = made("dict of tokens", train=lambda name: True)
    expected = by_hand("dict of tokens", task, cohort, began, mean_by_example)
    executor = make_executor("stacked" if stacked else "sequential", task, None, 2, 4, lambda _: None)
    assert isinstance(executor, Stacked if stacked else Sequential)
    moved, _ = trained(executor, cohort)
    torch.testing.assert_close(moved, expected)
    words = task.space.view(moved, "words.weight")
    assert (words[:, 2] == 0).all() and (words != 0).any(2).any(0).sum() > 5


@pytest.mark.parametrize("case", CASES)
def test_both_executors_report_the_same_sums(case):
    found = [trained(kind, cohort)[1] for kind, cohort in _both(case)]
    torch.testing.assert_close(*found)


def _both(case):
    for kind in (Sequential, lambda task, support: Stacked(task, support, 3, 4)):
        task, cohort, _ = made(case)
        yield kind(task, None), cohort


class Distilled(Objective):
    """Stays near what the model was, where each example is."""

    def __init__(self, teacher, mean) -> None:
        self.teacher, self.mean = teacher, mean

    def __call__(self, model, inputs, labels):
        outputs = model(inputs)
        losses = cross_entropy(outputs, labels) + (outputs - self.teacher(inputs).detach()).square().sum(1)
        return losses.mean() if self.mean else losses


@pytest.mark.parametrize("mean", [False, True])
def test_an_objective_that_needs_the_model_trains_one_client_at_a_time_and_says_so(mean):
    torch.manual_seed(1)
    objective = Distilled(Pair().double(), mean)
    task, cohort, began = made("tuple", Recipe(objective))
    expected = by_hand("tuple", task, cohort, began, lambda *batch: objective(*batch).mean())
    with pytest.warns(UserWarning, match="objective Distilled needs the model.*one after another"):
        executor = make_executor("stacked", task, None, 3, 4, lambda _: None)
    moved, sums = trained(executor, cohort)
    torch.testing.assert_close(moved, expected)
    assert sums.shape == (3, 2) and (sums[:, 0] > 0).all()


def reducing(outputs, labels):
    return F.cross_entropy(outputs, labels)


def failing(outputs, labels):
    return outputs @ labels


def changing(outputs, labels):
    with torch.no_grad():
        outputs += 1
    return cross_entropy(outputs, labels)


def detached(outputs, labels):
    return cross_entropy(outputs.detach(), labels)


def undefined(outputs, labels):
    return cross_entropy(outputs, labels) / 0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (reducing, "objective reducing gave shape"),
        (failing, r"objective failing failed on tensors of shapes \(2, 3\), \(2,\): RuntimeError"),
        (changing, "objective changing changes its arguments"),
        (detached, "objective detached gave losses without a gradient"),
        (undefined, "objective undefined gave .*inf"),
    ],
)
def test_a_users_function_that_cannot_work_is_named_before_training(function, said):
    task, _, _ = made("tuple")
    with pytest.raises(FedsieveError, match=said):
        checked(Recipe(function), task.model, task.feed)
    with pytest.raises(FedsieveError, match="the metric own failed"):
        checked(Recipe(metrics={"own": failing}), task.model, task.feed)


@pytest.mark.parametrize("case", CASES)
def test_accuracy_is_found_to_apply_by_trying(case):
    task, _, _ = made(case)
    assert checked(Recipe(task.recipe.objective), task.model, task.feed).accuracy is (case != "regression")

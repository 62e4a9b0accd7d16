"""The central loop on users' modules: train mode, running statistics and objectives, against a plain torch loop."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsieve.config import Optimizer, Stage
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.train.feed import tensor_feed
from fedsieve.train.loop import CentralTask, StageState, evaluate, train_stage
from fedsieve.train.objectives import Objective, Recipe, mean_squared_error

STAGE = Stage(
    name="own",
    epochs=3,
    batch_size=8,
    schedule="constant",
    optimizer=Optimizer(lr=0.05, momentum=0.0, weight_decay=0.0),
)
INPUTS = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.cumsum(1)[:, :2] + 1
FEED = tensor_feed((INPUTS, TARGETS))


class Absolute(Objective):
    def __call__(self, model, inputs, labels):
        return (model(inputs) - labels).abs().mean(1)


def network(drop=0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(drop), nn.Linear(6, 2)).eval()


def task_of(recipe, drop=0.0):
    model = network(drop)
    theta = ParamSpace.of(model).bind(model)
    return CentralTask(STAGE, model, theta, FEED, 5, nullcontext, recipe=recipe)


def run(task, state=None, steps=None):
    state = state or StageState.start(task.theta.detach().clone())

    def validate():
        return evaluate(task.model, FEED, nullcontext, task.recipe)

    ticks = itertools.islice(train_stage(task, state, validate), steps)
    *_, last = ticks
    return state, last.record


@pytest.mark.parametrize("statistics", ["frozen", "batch", "federated"])
@pytest.mark.parametrize(("objective", "loss"), [(mean_squared_error, F.mse_loss), (Absolute(), F.l1_loss)])
def test_a_stage_equals_a_plain_loop(statistics, objective, loss):
    task = task_of(Recipe(objective, accuracy=False, mode="train", statistics=statistics))
    state, record = run(task)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, best = [], None
    for epoch in range(3):
        model.train()
        if statistics == "frozen":
            model[1].eval()
        order = generator(5, "order", "own", epoch).permutation(20)
        for rows in torch.from_numpy(order).split(8):
            optimizer.zero_grad()
            loss(model(INPUTS[rows]), TARGETS[rows]).backward()
            optimizer.step()
            if statistics == "batch":
                model[1].reset_running_stats()
        model.eval()
        losses.append(loss(model(INPUTS), TARGETS).item())
        if losses[-1] == min(losses):
            best = copy.deepcopy(model.state_dict())
    assert record.val_loss == pytest.approx(losses[-1], rel=1e-5)
    assert record.train_accuracy is None and record.val_accuracy is None and record.train_loss > 0
    for name, tensor in task.model.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, best[name], rtol=1e-4, atol=1e-5)
    assert state.best_at == 1 + losses.index(min(losses))


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_a_resumed_stage_ends_with_the_same_bits(steps):
    recipe = Recipe(mean_squared_error, accuracy=False, mode="train", statistics="federated")
    whole = task_of(recipe, drop=0.4)
    run(whole)
    state, _ = run(task_of(recipe, drop=0.4), steps=steps)
    tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
    torch.manual_seed(77)
    rest = task_of(recipe, drop=0.4)
    run(rest, StageState.restore(copy.deepcopy(state.numbers()), tensors, torch.device("cpu")))
    for name, tensor in whole.model.state_dict().items():
        if tensor.is_floating_point():
            assert torch.equal(tensor, rest.model.state_dict()[name]), name

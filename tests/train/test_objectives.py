"""Objectives and metrics against torch's own functions, and what a user's wrong function is told."""

import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsieve.config import ObjectiveChoice
from fedsieve.errors import FedsieveError
from fedsieve.train.feed import tensor_feed
from fedsieve.train.loop import evaluate, measure_each
from fedsieve.train.objectives import Objective, Recipe, counts_accuracy, cross_entropy, mean_squared_error


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_cross_entropy_of_classes_is_torchs_to_the_bit():
    outputs, labels = drawn(7, 5), torch.arange(7) % 5
    assert torch.equal(cross_entropy(outputs, labels), F.cross_entropy(outputs, labels, reduction="none"))
    assert torch.equal(Recipe().mean(outputs, labels), F.cross_entropy(outputs, labels))


def test_an_example_of_tokens_has_the_mean_loss_of_the_tokens_that_count():
    outputs, labels = drawn(4, 6, 9), torch.randint(0, 9, (4, 6), generator=torch.Generator().manual_seed(1))
    labels[0, 2:], labels[3] = -100, -100
    found = cross_entropy(outputs, labels)
    for one in range(3):
        torch.testing.assert_close(found[one], F.cross_entropy(outputs[one], labels[one]))
    assert found[3] == 0
    right = Recipe().values(outputs, labels)["accuracy"]
    torch.testing.assert_close(right[0], (outputs[0, :2].argmax(-1) == labels[0, :2]).double().mean())
    assert right[3] == 0


def test_smoothing_is_torchs_and_travels_between_processes():
    outputs, labels = drawn(7, 5), torch.arange(7) % 5
    expected = F.cross_entropy(outputs, labels, reduction="none", label_smoothing=0.1)
    assert torch.equal(
        pickle.loads(pickle.dumps(ObjectiveChoice(kind="cross_entropy", label_smoothing=0.1).made()))(outputs, labels),
        expected,
    )
    assert ObjectiveChoice(kind="cross_entropy", label_smoothing=0.0).made() is cross_entropy
    with pytest.raises(FedsieveError, match="label_smoothing: should be less than 1"):
        ObjectiveChoice(kind="cross_entropy", label_smoothing=1.0).made()


def test_mean_squared_error_takes_a_last_axis_of_one_and_no_silent_broadcast():
    outputs, labels = drawn(7, 1), drawn(7, seed=1)
    assert torch.equal(mean_squared_error(outputs, labels), (outputs[:, 0] - labels).square())
    with pytest.raises(ValueError, match="differ in shape"):
        mean_squared_error(drawn(7, 2), labels)
    pairs = drawn(7, 2), drawn(7, 2, seed=2)
    torch.testing.assert_close(Recipe(mean_squared_error).mean(*pairs), F.mse_loss(*pairs))


@pytest.mark.parametrize(
    ("outputs", "labels", "counts"),
    [
        (torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), True),
        (torch.zeros(3, 4, 5), torch.zeros(3, 4, dtype=torch.int32), True),
        (torch.zeros(3, 5), torch.zeros(3), False),
        (torch.zeros(3, 5), torch.zeros(3, 5, dtype=torch.int64), False),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), False),
        ({"logits": torch.zeros(3, 5)}, torch.zeros(3, dtype=torch.int64), False),
    ],
)
def test_accuracy_is_counted_only_of_classes_among_the_outputs(outputs, labels, counts):
    assert counts_accuracy(outputs, labels) is counts


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs):
        return self.layer(inputs)


class Distance(Objective):
    def __init__(self, mean: bool) -> None:
        self.mean = mean

    def __call__(self, model, inputs, labels):
        losses = (model(inputs) - labels).abs().sum(1)
        return losses.mean() if self.mean else losses


@pytest.mark.parametrize("count", [5, 700])
def test_evaluation_is_the_mean_over_examples_whatever_the_batches(count):
    torch.manual_seed(0)
    model, inputs, targets = Straight(), drawn(count, 3), drawn(count, 2, seed=1)
    feed = tensor_feed((inputs, targets))
    metrics = {"worst": lambda outputs, labels: (outputs - labels).abs().amax(1), "size": lambda o, _: float(len(o))}
    for recipe in (Recipe(Distance(False), metrics, accuracy=False), Recipe(Distance(True), metrics, accuracy=False)):
        found = evaluate(model, feed, torch.no_grad, recipe, "test")
        difference = (model(inputs) - targets).abs()
        assert found["test_loss"] == pytest.approx(difference.sum(1).mean().item(), rel=1e-5)
        assert found["test_worst"] == pytest.approx(difference.amax(1).mean().item(), rel=1e-5)
        assert set(found) == {"test_loss", "test_worst", "test_size"}
    assert evaluate(model, feed.take(torch.arange(0).numpy()), torch.no_grad, recipe) == {}
    assert measure_each(model, feed, torch.no_grad, recipe).shape == (count, 3)


def test_a_users_function_of_a_wrong_shape_is_named():
    def focal(outputs, labels):
        return F.cross_entropy(outputs, labels)

    outputs, labels = drawn(7, 5), torch.arange(7) % 5
    for objective in (focal, functools.partial(focal)):
        with pytest.raises(FedsieveError, match=r"objective focal gave shape \(\) for 7 examples"):
            Recipe(objective).losses(outputs, labels)
    with pytest.raises(FedsieveError, match=r"metric half gave shape \(3,\) for 7 examples"):
        Recipe(metrics={"half": lambda outputs, labels: labels[:3]}).values(outputs, labels)

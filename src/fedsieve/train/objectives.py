"""Objectives and metrics: what training lowers, and what evaluation measures.

An objective on outputs gives one loss per example, and is computed for all clients at once. An `Objective` has the model and
its inputs, and is computed one client at a time.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsieve.errors import FedsieveError
from fedsieve.model.calling import Inputs
from fedsieve.train.feed import Autocast, Examples

IGNORED = -100  # a label that does not count, as in torch

OnOutputs = Callable[[Any, Tensor], Tensor]  # (outputs, labels) -> losses, whose first axis is examples
Metric = Callable[[Any, Tensor], Tensor | float]  # (outputs, labels) -> a value per example, or one for the batch


class Objective:
    """A loss that needs the model itself: derive from it, and give one loss per example, or the mean as a scalar."""

    def __call__(self, model: nn.Module, inputs: Inputs, labels: Tensor) -> Tensor:
        raise NotImplementedError


def cross_entropy(outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The cross-entropy of each example: outputs (B, ..., V), labels (B, ...) of integers.

    Labels of -100 do not count. With further axes, such as tokens, an example's loss is the mean over its labels that count.
    """
    flat = outputs.flatten(0, -2)
    losses = F.cross_entropy(
        flat, labels.flatten(), reduction="none", ignore_index=IGNORED, label_smoothing=smoothing
    ).view_as(labels)
    return losses if labels.dim() == 1 else _mean_counted(losses, labels)


def mean_squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """The squared error of each example, averaged over its values: outputs and labels (B, ...) of one shape.

    Outputs (B, 1) also fit labels (B,).
    """
    if outputs.dim() == labels.dim() + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    if outputs.shape != labels.shape:
        raise ValueError(f"outputs {tuple(outputs.shape)} and labels {tuple(labels.shape)} differ in shape")
    return (outputs - labels.to(outputs.dtype)).square()


OBJECTIVES: Mapping[str, OnOutputs] = {"cross_entropy": cross_entropy, "mean_squared_error": mean_squared_error}


def counts_accuracy(outputs: Any, labels: Tensor) -> bool:
    """Whether labels are classes among the outputs."""
    whole = not labels.is_floating_point() and not labels.is_complex() and labels.dtype != torch.bool
    return whole and isinstance(outputs, Tensor) and outputs.shape[:-1] == labels.shape


def correct(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether each example is right, (B,); with further axes, the share of its labels that are."""
    right = outputs.argmax(-1) == labels
    return right if labels.dim() == 1 else _mean_counted(right.to(torch.float64), labels)


def widened(outputs: Any) -> Any:
    """Outputs in single precision at least."""
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        return outputs
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def _mean_counted(values: Tensor, labels: Tensor) -> Tensor:
    """The mean over each example's labels that count; 0 where none does."""
    counted = (labels != IGNORED).flatten(1)
    return torch.where(counted, values.flatten(1), 0).sum(1) / counted.sum(1).clamp(min=1)


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a stage trains and what is measured of it, apart from its optimizer."""

    objective: OnOutputs | Objective = cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # measured in evaluation only
    accuracy: bool = True  # whether labels are classes among the outputs
    mode: Literal["eval", "train"] = "eval"  # of modules while they train
    statistics: Literal["frozen", "batch", "federated", "local"] = "frozen"  # running ones, as of BatchNorm

    @property
    def on_outputs(self) -> bool:
        """Whether outputs and labels are all that the objective needs."""
        return not isinstance(self.objective, Objective)

    @property
    def training_columns(self) -> int:
        """Sums that training leaves for each client: loss, right answers where they are counted, examples."""
        return 3 if self.accuracy and self.on_outputs else 2

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of what evaluation measures."""
        return ("loss", *(("accuracy",) if self.accuracy else ()), *self.metrics)

    def exact(self, outputs: Any) -> Any:
        """Outputs as a loss is measured of them: in double precision, where the objective is a built-in one."""
        built_in = getattr(self.objective, "func", self.objective) in OBJECTIVES.values()
        return outputs.double() if built_in else outputs

    def losses(self, outputs: Any, labels: Tensor) -> Tensor:
        """The loss of each example, (B,), of an objective on outputs."""
        objective: Any = self.objective
        return self._per_example(objective(outputs, labels), labels)

    def mean(self, outputs: Any, labels: Tensor) -> Tensor:
        """The mean loss of a batch, of an objective on outputs."""
        if self.objective is cross_entropy and labels.dim() == 1:
            return F.cross_entropy(outputs, labels)  # whose last digits are its own
        return self.losses(outputs, labels).mean()

    def model_losses(self, model: nn.Module, inputs: Inputs, labels: Tensor) -> Tensor:
        """The loss of each example, (B,), or their mean, of an objective that needs the model."""
        objective: Any = self.objective
        found = objective(model, inputs, labels)
        return found if isinstance(found, Tensor) and found.dim() == 0 else self._per_example(found, labels)

    def values(self, outputs: Any, labels: Tensor) -> dict[str, Tensor]:
        """What evaluation measures of outputs, but for the loss: values (B,) by name."""
        found = {"accuracy": correct(outputs, labels)} if self.accuracy else {}
        for name, metric in self.metrics.items():
            value = torch.as_tensor(metric(outputs, labels), dtype=torch.float64, device=labels.device)
            if value.dim() and len(value) != len(labels):
                raise FedsieveError(
                    f"the metric {name} gave shape {tuple(value.shape)} for {len(labels)} examples. It must give one value for "
                    "each, or one for all"
                )
            found[name] = value.flatten(1).mean(1) if value.dim() > 1 else value.expand(len(labels))
        return found

    def _per_example(self, losses: Any, labels: Tensor) -> Tensor:
        if not isinstance(losses, Tensor) or not losses.dim() or len(losses) != len(labels):
            what = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            or_mean = "" if self.on_outputs else ", or their mean as a scalar"
            raise FedsieveError(
                f"the objective {named(self.objective)} gave {what} for {len(labels)} examples. It must give a tensor whose "
                f"first axis is examples{or_mean}: no reduction over the batch"
            )
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


PLAIN = Recipe()


@torch.enable_grad()
def checked(recipe: Recipe, model: nn.Module, feed: Examples, autocast: Autocast = nullcontext) -> Recipe:
    """The recipe, tried on two examples: with accuracy where it can be counted; a function that cannot work is refused."""
    inputs, labels = feed.batch(np.arange(min(2, len(feed))))
    with autocast(), torch.no_grad():
        outputs = model(inputs)
    recipe = replace(recipe, accuracy=counts_accuracy(outputs, labels))
    what = f"the objective {named(recipe.objective)}"
    if recipe.on_outputs:
        outputs = widened(outputs)
        given = outputs.requires_grad_() if isinstance(outputs, Tensor) and outputs.is_floating_point() else outputs
        losses = _tried(what, recipe.losses, given, labels)
    else:
        with autocast():
            losses = _tried(what, partial(recipe.model_losses, model), inputs, labels)
        given = None
    if not losses.requires_grad and (given is None or isinstance(given, Tensor)):
        raise FedsieveError(
            f"{what} gave losses without a gradient. Compute them of the outputs with torch, undetached"
        )
    sound = given is None or not isinstance(given, Tensor) or bool(given.isfinite().all())
    if sound and not bool(losses.isfinite().all()):
        raise FedsieveError(f"{what} gave {losses.tolist()} on the first examples: losses must be finite")
    with torch.no_grad():
        for name, metric in recipe.metrics.items():
            one = replace(recipe, metrics={name: metric}, accuracy=False)
            _tried(f"the metric {name}", one.values, outputs, labels)
    return recipe


def _tried(what: str, function: Callable[..., Any], given: Any, labels: Tensor) -> Any:
    """The result of a user's function; one that fails, or changes what it is given, is refused."""
    before = [tensor.detach().clone() for tensor in _tensors(given, labels)]
    try:
        found = function(given, labels)
    except FedsieveError:
        raise
    except Exception as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in before)
        first = (str(error).splitlines() or [""])[0]
        raise FedsieveError(f"{what} failed on tensors of shapes {shapes}: {type(error).__name__}: {first}") from error
    if not all(
        torch.equal(one.nan_to_num(), two.nan_to_num())
        for one, two in zip(before, _tensors(given, labels), strict=True)
    ):
        raise FedsieveError(f"{what} changes its arguments in place: let it work on a copy")
    return found


def _tensors(given: Any, labels: Tensor) -> list[Tensor]:
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple) else [given]
    return [tensor for tensor in (*parts, labels) if isinstance(tensor, Tensor)]


def named(function: Any) -> str:
    """The name of a user's function or object."""
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)

"""A user's own model and data, in place of those that a config names."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from fedsieve.config import Experiment
from fedsieve.errors import FedsieveError, did_you_mean
from fedsieve.model.calling import Outputs, prepared
from fedsieve.runner.environment import choose_device, make_autocast, set_deterministic
from fedsieve.runner.run_cache import RunCache
from fedsieve.runner.setup import Setup
from fedsieve.train.feed import Examples, TensorFeed, tensor_feed
from fedsieve.train.objectives import Metric, Recipe, checked

MODES = ("train", "eval")
STATISTICS = ("frozen", "batch", "federated", "local")

Names = str | Sequence[str] | Callable[[str], bool]


@dataclass(frozen=True, eq=False)
class Material:
    """What a user brings. The model is copied and never changed."""

    model: nn.Module
    train: Any  # (inputs, labels), a torch Dataset or a datasets.Dataset
    validation: Any = None
    test: Any = None
    columns: tuple[Sequence[str] | str, str] | None = None  # of a datasets.Dataset: inputs, label
    trains: Names | None = None  # which parameters train; None: all
    outputs: Outputs = None  # which tensor of the model's output counts
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    mode: str = "train"
    statistics: str = "frozen"

    def setup(self, experiment: Experiment, say: Callable[[str], None]) -> Setup:
        """Everything that the stages of an experiment share."""
        self._check(experiment)
        device = choose_device(experiment.device)
        set_deterministic(experiment.deterministic)
        train = self._feed("train", self.train, device)
        first, _ = train.batch(np.arange(min(2, len(train))))
        model = prepared(copy.deepcopy(self.model).to(device), first, self.outputs)
        given = {name: getattr(self, name) for name in ("validation", "test")}
        nothing = train.take(np.arange(0))
        held = {name: nothing if data is None else self._feed(name, data, device) for name, data in given.items()}
        autocast = make_autocast(experiment, device)
        options: dict[str, Any] = {"mode": self.mode, "statistics": self.statistics}
        recipe = Recipe(objective=experiment.stages[0].objective.made(), metrics=self.metrics, **options)
        return Setup(
            experiment=experiment,
            device=device,
            autocast=autocast,
            train=train,
            validation=held["validation"],
            open_test=lambda: held["test"],
            class_names=_classes(train),
            data_fingerprint=train.fingerprint,
            model=model,
            say=say,
            cache=RunCache(keep=False),
            recipe=checked(recipe, model, train, autocast),
            trains=chooser(self.trains, model),
        )

    def _check(self, experiment: Experiment) -> None:
        """Refuse words that do not exist, and statistics that would leave a client unprotected."""
        for key, word, allowed in (("mode", self.mode, MODES), ("statistics", self.statistics, STATISTICS)):
            if word not in allowed:
                near = did_you_mean(str(word), allowed)
                raise FedsieveError(f"{key}: {word!r} is not allowed.{near} Allowed: {', '.join(allowed)}")
        if not isinstance(self.metrics, Mapping) or any(name in ("loss", "accuracy") for name in self.metrics):
            raise FedsieveError("metrics: give a dict of functions by name; the names loss and accuracy are taken")
        privacy = experiment.privacy
        if self.statistics == "federated" and (privacy.aggregation != "plain" or privacy.dp is not None):
            cause = "privacy.dp does not account for" if privacy.dp else f"{privacy.aggregation} does not hide"
            raise FedsieveError(
                f"statistics: federated sends a second vector for each client, its running statistics, which {cause}. Use frozen, "
                "batch or local"
            )

    def _feed(self, name: str, data: Any, device: torch.device) -> TensorFeed:
        try:
            return tensor_feed(data, device, self.columns)
        except FedsieveError as error:
            raise FedsieveError(f"{name}: {error}") from None


def _classes(train: Examples) -> list[str]:
    """Names for the classes, where labels are classes."""
    labels = train.labels
    if labels.is_floating_point() or labels.dim() != 1:
        return []
    return [str(number) for number in range(int(labels.max()) + 1)] if len(labels) else []


def class_labels(train: Examples) -> np.ndarray:
    """The label of each example (N,), where it is a class; 0 for all where it is not."""
    if _classes(train) and bool((train.labels >= 0).all()):
        return train.labels.cpu().numpy()
    return np.zeros(len(train), dtype=np.int64)


def chooser(trains: Names | None, model: nn.Module) -> Callable[[str], bool]:
    """A predicate on the names of parameters: those with a prefix, in a list, or by the user's own.

    By default all that require a gradient train.
    """
    names = [name for name, _ in model.named_parameters()]
    if trains is None:
        wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not wanted:
            raise FedsieveError("model: it has no parameter that requires a gradient, so nothing can train")
        return wanted.__contains__
    if isinstance(trains, str):
        prefix = trains
        chosen = {name for name in names if name.startswith(prefix)}
        problem = f"no parameter's name begins with {prefix!r}.{did_you_mean(prefix, names)}"
    elif callable(trains):
        chosen = {name for name in names if trains(name)}
        problem = "the function chooses no parameter."
    else:
        chosen = set(trains)
        unknown = sorted(chosen - set(names))
        problem = "the list is empty."
        if unknown:
            raise FedsieveError(f"trains: the model has no parameter {unknown[0]!r}.{did_you_mean(unknown[0], names)}")
    if not chosen:
        shown = ", ".join(names[:5]) + (", ..." if names[5:] else "")
        raise FedsieveError(f"trains: {problem} The model's parameters: {shown}")
    return chosen.__contains__

"""The axes of a sweep: `KEY=VALUES`, where values are a list to choose from or a range to draw from."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedsieve.config import Experiment, apply_overrides, override_place, parse_config, parse_yaml, read_config
from fedsieve.errors import FedsieveError

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"(log:)?({NUMBER}):({NUMBER})(?::({NUMBER}))?")
FORMS = "0.5,0.9,0.99 (these values), 0.1:0.9 (a range), log:1e-3:1 (a range by orders of magnitude), log:1e-3:1:4 (4 points of it)"
MOST = 10_000  # combinations of a grid
# What decides on which images, and by which luck, a trial's accuracy is measured.
JUDGES = ("source", "subset", "revision", "label_column", "train_split", "classes", "val_fraction", "stratified")
Values = dict[str, Any]
Method = Literal["grid", "bayes"]


@dataclass(frozen=True)
class Axis:
    """One setting that varies: over its `choices`, or where there are none from `low` to `high`."""

    key: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False  # only whole numbers
    points: int = 0  # of the range, that shall become its choices

    @property
    def ends(self) -> tuple[Any, ...]:
        """All choices, or the two ends of the range."""
        return self.choices or (self.tidy(self.low), self.tidy(self.high))

    def tidy(self, value: float) -> float:
        """A drawn number as a person would write it: four digits, or a whole number."""
        return round(value) if self.whole else min(max(float(f"{value:.4g}"), self.low), self.high)

    def pointed(self) -> "Axis":
        """With its points as choices, if it is to have any."""
        if not self.points:
            return self
        between = (np.geomspace if self.log else np.linspace)(self.low, self.high, self.points)
        return replace(self, choices=tuple(dict.fromkeys(self.tidy(value) for value in between.tolist())))

    @property
    def numeric(self) -> bool:
        """True where the values are numbers, in order."""
        return all(isinstance(choice, (int, float)) and not isinstance(choice, bool) for choice in self.choices)

    def position(self, value: Any) -> float:
        """Where a value lies from 0 to 1: choices evenly, ranges by value or by its logarithm."""
        if self.choices:
            return self.choices.index(value) / max(len(self.choices) - 1, 1)
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return min(max((at - low) / (high - low), 0.0), 1.0)

    def at_end(self, value: Any) -> bool:
        """True where a number lies at an end of what was searched, so that a better one may lie beyond."""
        return self.numeric and len(self.choices) != 2 and abs(self.position(value) - 0.5) > 0.45


def label(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def brief(keys: Sequence[str]) -> list[str]:
    """The shortest ends of dotted keys that tell them apart, such as lr."""
    found = []
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
        found.append(next((end for end in ends if sum(f".{k}".endswith(f".{end}") for k in keys) == 1), key))
    return found


def spelled(values: Mapping[str, Any]) -> list[str]:
    """The values as overrides of a config."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]  # JSON is YAML


def combinations(choices: Mapping[str, Sequence[Any]]) -> list[Values]:
    """Every combination of the choices for some settings."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def parse_axis(text: str) -> Axis:
    """`KEY=VALUES` from the command line."""
    key, equals, spec = (part.strip() for part in text.partition("="))
    if not equals or not key or not spec:
        raise FedsieveError(f'--vary: "{text}" is not of the form KEY=VALUES, where VALUES is one of {FORMS}')
    if found := RANGE.fullmatch(spec):
        return _range(key, *found.groups())
    if re.match(r"(log|lin|linear|int|float|uniform):", spec):
        raise FedsieveError(f'--vary {key}: "{spec}" is not understood. Values are one of {FORMS}')
    choices = parse_yaml(f"[{spec}]", f"--vary {key}")
    if len(choices) == 1 and isinstance(choices[0], list):
        choices = choices[0]  # someone wrote the brackets
    if len(choices) < 2:
        raise FedsieveError(f"--vary {key}: {spec} is one value, which varies nothing. Say {key}={spec} to set it")
    if len({label(choice) for choice in choices}) < len(choices):
        raise FedsieveError(f"--vary {key}: {spec} names a value twice")
    axis = Axis(key, tuple(choices))
    return replace(axis, choices=tuple(sorted(choices))) if axis.numeric else axis


def _range(key: str, log: str | None, low_text: str, high_text: str, points: str | None) -> Axis:
    low, high = float(low_text), float(high_text)
    if not low < high:
        raise FedsieveError(f"--vary {key}: the range {low_text}:{high_text} is empty: the lower end comes first")
    if log and low <= 0:
        raise FedsieveError(
            f"--vary {key}: log:{low_text}:{high_text} must lie above 0. Leave log: away, or raise the lower end"
        )
    if points is not None and not (points.isdigit() and 2 <= int(points) <= MOST):
        raise FedsieveError(f"--vary {key}: a range has from 2 to {MOST:,} points, got {points}")
    return Axis(key, (), low, high, bool(log), f"{low_text}{high_text}".isdigit(), int(points or 0))


class Space:
    """The space that a sweep searches: the settings in `vary` around one experiment, checked before anything runs."""

    def __init__(self, config: str | Path, vary: Sequence[str], method: Method, overrides: Sequence[str] = ()) -> None:
        self.where, self.method, self.overrides = str(config), method, list(overrides)
        self.text = read_config(Path(config))  # once: what is changed meanwhile is for the next sweep
        axes = [parse_axis(text) for text in vary]
        keys = [axis.key for axis in axes]
        if not keys:
            raise FedsieveError(
                "sweep: nothing varies. Name settings as `--vary stages.0.optimizer.lr=log:1e-3:1` or "
                "`--vary mask.sparsity=0.5,0.9`"
            )
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise FedsieveError(f"--vary {twice[0]}: given twice")
        first = {axis.key: axis.ends[0] for axis in axes}
        self._check_names(first)
        self.axes = [self._with_fractions(axis, first).pointed() for axis in axes]
        first = {axis.key: axis.ends[0] for axis in self.axes}
        self.grid = self._combinations() if method == "grid" else []
        self.base = self.configure(first)
        federation = self.base.federation
        if not self.base.data.val_fraction and not (federation and federation.client_validation):
            raise FedsieveError(
                f"{self.where}: data.val_fraction is 0, so there is no validation data to choose settings by. Set a fraction; "
                "the test set is never used for it"
            )
        judged = _judged_by(self.base)
        for values in self.grid or (first | {axis.key: end} for axis in self.axes for end in axis.ends):
            for name, value in _judged_by(self.configure(values)).items():
                if value != judged[name]:
                    raise FedsieveError(
                        f"--vary: {name} differs between trials, which must be judged alike. Fix it, and run best.yaml with "
                        "several seeds once the sweep is over"
                    )

    def configure(self, values: Values, final: bool = False) -> Experiment:
        """The experiment with these values: of a trial, which leaves the test set closed, or the final one."""
        closed = [] if final else ["test=false", "test_curve=false"]
        return parse_config(self.text, [*self.overrides, *spelled(values), *closed], self.where)

    def _check_names(self, first: Values) -> None:
        """Refuse what a later --vary sets again, perhaps under another name: it would do nothing."""
        tree = parse_yaml(self.text, self.where)
        before: dict[str, tuple[str, ...]] = {}
        for override in self.overrides:
            before[override] = override_place(tree, override)
            tree = apply_overrides(tree, [override])
        for key, value in first.items():
            place = override_place(tree, key)
            for name, there in before.items():
                if there[: len(place)] == place:
                    raise FedsieveError(
                        f"command line: {name} would do nothing: --vary {key} sets it too. Leave one of them away"
                    )
            before[f"--vary {key}"] = place
            tree = apply_overrides(tree, spelled({key: value}))

    def _combinations(self) -> list[Values]:
        for axis in self.axes:
            if not axis.choices:
                raise FedsieveError(
                    f"--vary {axis.key}: a grid needs points. Put their number behind the range, as in log:1e-3:1:4, list "
                    "the values, or search with --method bayes"
                )
        if (size := math.prod(len(axis.choices) for axis in self.axes)) > MOST:
            raise FedsieveError(
                f"sweep: a grid of {size:,} combinations; at most {MOST:,}. Vary less, or --method bayes"
            )
        return combinations({axis.key: axis.choices for axis in self.axes})

    def _with_fractions(self, axis: Axis, first: Values) -> Axis:
        """0:1 is a range of fractions where the setting takes them, and of whole numbers where it does not."""
        if not axis.whole:
            return axis
        try:
            self.configure(first | {axis.key: (axis.low + axis.high) / 2})
        except FedsieveError:
            return axis
        return replace(axis, whole=False)

    def distributions(self) -> dict[str, Any]:
        """The space in Optuna's terms. Choices go by their texts: it stores no lists or mappings."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        found: dict[str, Any] = {}
        for axis in self.axes:
            if axis.choices:
                found[axis.key] = CategoricalDistribution([label(choice) for choice in axis.choices])
            elif axis.whole:
                found[axis.key] = IntDistribution(int(axis.low), int(axis.high), log=axis.log)
            else:
                found[axis.key] = FloatDistribution(axis.low, axis.high, log=axis.log)
        return found

    def params(self, values: Values) -> dict[str, Any]:
        """Values in Optuna's terms."""
        return {axis.key: label(values[axis.key]) if axis.choices else values[axis.key] for axis in self.axes}

    def values(self, params: Mapping[str, Any]) -> Values:
        """Values from Optuna's terms, as they go into a config."""
        found = {}
        for axis in self.axes:
            texts = {label(choice): choice for choice in axis.choices}
            found[axis.key] = texts[params[axis.key]] if axis.choices else axis.tidy(params[axis.key])
        return found


def _judged_by(experiment: Experiment) -> Values:
    shared = experiment.federation.client_validation if experiment.federation else 0.0
    return {"seed": experiment.seed, "federation.client_validation": shared} | {
        f"data.{name}": getattr(experiment.data, name) for name in JUDGES
    }

"""The page that sets runs side by side: seeds of one config as one line, how far their differences can be trusted, and by
name whatever has no result."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.errors import FedsieveError
from fedsieve.report import figures
from fedsieve.report.folder import RunFolder, read_run
from fedsieve.report.html import duration, figure, flatten, render, save, text, tick
from fedsieve.report.intervals import Interval, matched, paired, unpaired
from fedsieve.report.traffic import of_dense, read_traffic, so_far

# What may differ between runs that are still repeats of one another.
INCIDENTAL = ("name", "seed", "device", "tracking", "checkpoint", "data.cache", "data.placement")
EVERY_PAIR = 12  # up to so many experiments each is compared with each
DRAWN = 30  # differences in the picture
FAR = 20  # times longer than another run: on a log scale
MEASURES = {"test_accuracy": "test accuracy", "validation": "validation accuracy"}
SPLITS = {"validation": ("val", "client_val"), "test": ("test",)}  # the clients' where the server holds no images
Curve = tuple[int, np.ndarray, np.ndarray]  # number of the group, x, y


@dataclass(frozen=True)
class Group:
    """Runs of one config that differ in their seeds only."""

    label: str
    config: dict[str, Any]  # by dotted path
    runs: list[RunFolder]

    @property
    def size(self) -> int:
        return len(self.runs)

    def mean(self, field: str) -> float | None:
        values = self.values(field)
        return float(values.mean()) if len(values) else None

    def spread(self, field: str) -> float | None:
        """Standard deviation over the seeds; one seed has none."""
        values = self.values(field)
        return float(values.std(ddof=1)) if len(values) > 1 else None

    @property
    def federated(self) -> bool:
        return self.runs[0].experiment.federation is not None

    @cached_property
    def of_dense(self) -> float | None:
        """All bytes as a share of dense fp32, mean over the seeds."""
        shares = [of_dense(read_traffic(run)) for run in self.runs]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if known and len(known) == len(shares) else None

    def values(self, field: str) -> np.ndarray:
        """A field of the summaries, for every run in turn."""
        values = [
            reduce(lambda part, name: getattr(part, name, None), field.split("."), run.summary) for run in self.runs
        ]
        # A mean over some of the seeds would pass for one over all of them.
        return np.array([] if None in values else values, dtype=np.float64)

    def by_seed(self, field: str) -> dict[int, float]:
        return dict(zip((run.experiment.seed for run in self.runs), self.values(field).tolist(), strict=False))


@dataclass(frozen=True)
class Difference:
    """How far one group's accuracy lies above another's, as fractions."""

    one: Group
    two: Group
    value: float
    interval: Interval | None
    over: str  # what the interval is over, or why there is none

    @property
    def clear(self) -> bool:
        """Whether the interval leaves no doubt about the sign."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, best first."""

    groups: list[Group]
    missing: list[tuple[str, str]]  # folder, reason
    measure: str  # what they are ordered and compared by

    @property
    def judged(self) -> list[Group]:
        return [group for group in self.groups if group.mean(self.measure) is not None]

    @cached_property
    def behind(self) -> list[Difference]:
        """Of every other group to the best."""
        return [difference(group, self.judged[0], self.measure) for group in self.judged[1:]]


def compare(folders: list[Path]) -> Comparison:
    """Read the runs in these folders, which may be run folders, or folders of them."""
    if not folders:
        raise FedsieveError("comparison: no run folders given. Name at least one, such as runs/first runs/second")
    runs, missing = _read(find_runs(folders))
    groups = _group(runs)
    tested = [group for group in groups if group.mean("test_accuracy") is not None]
    return Comparison(groups, missing, "test_accuracy" if tested or not groups else "validation")


def find_runs(folders: list[Path]) -> list[Path]:
    """Run folders, where some may be named by the folder, the sweep or the study that they lie in, at any depth."""
    return [run for folder in folders for run in _runs_in(folder) or [folder]]


def _runs_in(folder: Path) -> list[Path]:
    if _is_run(folder) or not folder.is_dir():
        return []
    return [run for part in sorted(folder.iterdir()) for run in ([part] if _is_run(part) else _runs_in(part))]


def _is_run(folder: Path) -> bool:
    """Whether a run lies there, be it one that lost its config: it is named as damaged then."""
    return any((folder / name).exists() for name in ("config.yaml", "summary.json"))


def difference(one: Group, two: Group, measure: str) -> Difference:
    """One minus two, by seeds in pairs where two or more are shared, by seeds apart where both have several.

    A single seed says nothing of other seeds; then the interval is over the test images that both answered, if they did.
    """
    a, b = one.by_seed(measure), two.by_seed(measure)
    shared = sorted(a.keys() & b.keys())
    if len(shared) > 1:
        pairs = [a[seed] for seed in shared], [b[seed] for seed in shared]
        value = float(np.mean(pairs[0]) - np.mean(pairs[1]))
        return Difference(one, two, value, paired(*pairs), f"{len(shared)} seeds, in pairs")
    value = float(np.mean(list(a.values())) - np.mean(list(b.values())))
    if len(a) > 1 and len(b) > 1:
        interval = unpaired(list(a.values()), list(b.values()))
        return Difference(one, two, value, interval, f"{len(a)} and {len(b)} seeds, apart")
    seeds = (shared[0], shared[0]) if shared else (min(a), min(b))
    first, second = (
        next(run.predictions for run in group.runs if run.experiment.seed == seed)
        for group, seed in zip((one, two), seeds, strict=True)
    )
    same = first and second and np.array_equal(first.labels, second.labels)
    if not (first and second and same and measure == "test_accuracy"):
        return Difference(one, two, value, None, "one seed: no interval")
    right, other = (found.predicted == found.labels for found in (first, second))
    only, lost = int((right & ~other).sum()), int((~right & other).sum())
    n = len(right)
    named = f"seed {seeds[0]}" if shared else f"seeds {seeds[0]} and {seeds[1]}"
    return Difference(one, two, (only - lost) / n, matched(only, lost, n), f"{n:,} test images, {named}")


def write_comparison(folders: list[Path] | Comparison, out: Path) -> Path:
    """Writes the page comparing the run folders to `out` (a .html file, or a folder for comparison.html)."""
    found = folders if isinstance(folders, Comparison) else compare(folders)
    groups = found.groups
    drawings, on, without = _curves(groups)
    told = [row for row in found.behind if row.interval]
    if told:
        drawings["differences"] = figures.differences(
            [row.one.label for row in told[:DRAWN]],
            [(100 * row.value, 100 * row.interval[0], 100 * row.interval[1]) for row in told[:DRAWN] if row.interval],
            f"difference in {MEASURES[found.measure]} to {found.judged[0].label}, points",
        )
    pairs = []
    if 2 < len(found.judged) <= EVERY_PAIR:
        pairs = [difference(one, two, found.measure) for one, two in combinations(found.judged, 2)]
    page = render(
        "comparison.html",
        groups=groups,
        missing=found.missing,
        measure=MEASURES[found.measure],
        settings=settings_that_differ(groups),
        behind=found.behind,
        told=told,
        pairs=pairs,
        best=found.judged[0] if found.judged else None,
        pens=[figures.pen(number) for number in range(len(groups))],
        curves={name: figure(svg, name) for name, svg in drawings.items()},
        curves_on=on,
        without_curve=without,
    )
    return save(out if out.suffix == ".html" else out / "comparison.html", page)


# --- curves ----------------------------------------------------------------------------------------------------------


def _curves(groups: list[Group]) -> tuple[dict[str, str], str, list[str]]:
    """Accuracy and loss of every run by epoch or round, by bytes and by seconds, on what, and the groups without.

    On validation data; where no run has any, on test data if every run watched it.
    """
    drawn: dict[str, str] = {}
    units = sorted({run.unit for group in groups for run in group.runs})
    by, count = " or ".join(units), " or ".join(f"{unit}s so far" for unit in units)  # numbers begin anew with a stage
    on, accuracy = "validation", _lines(groups, "validation", "accuracy", _index)
    if not accuracy:
        watched = _lines(groups, "test", "accuracy", _index)
        if len(watched) == sum(group.size for group in groups):
            on, accuracy = "test", watched
    if accuracy:
        drawn[f"{on} accuracy by {by}"] = _overlay(groups, accuracy, f"{on} accuracy, %", count)
    if loss := _lines(groups, on, "loss", _index):
        drawn[f"{on} loss by {by}"] = _overlay(groups, loss, f"{on} loss", count)
    if sent := _lines(groups, on, "accuracy", lambda run: so_far(run.records, read_traffic(run)).astype(np.float64)):
        drawn[f"{on} accuracy by bytes"] = _overlay(groups, sent, f"{on} accuracy, %", "bytes sent so far", tick)
    if timed := _lines(groups, on, "accuracy", _seconds):
        ends = [x[-1] for _, x, _ in timed]
        far = max(ends) > FAR * min(ends)
        drawn[f"{on} accuracy by seconds"] = _overlay(
            groups,
            timed,
            f"{on} accuracy, %",
            "time so far" if far else "seconds so far",
            (lambda value: duration(value).replace(".0 ", " ")) if far else None,
            whole=False,
        )
    shown = {number for number, _, _ in accuracy}
    return drawn, on, [group.label for number, group in enumerate(groups) if number not in shown]


def _index(run: RunFolder) -> np.ndarray:
    return figures.column(run.records, "index")


def _seconds(run: RunFolder) -> np.ndarray:
    return np.nancumsum(figures.column(run.records, "seconds"))


def _lines(groups: list[Group], on: str, metric: str, along: Callable[[RunFolder], np.ndarray]) -> list[Curve]:
    """A line for every run, of what was evaluated `on` validation or test data: accuracies in per cent."""
    found = []
    for number, group in enumerate(groups):
        for run in group.runs:
            known = [figures.column(run.records, f"{split}_{metric}") for split in SPLITS[on]]
            values = next((values for values in known if np.isfinite(values).any()), known[0])
            x = along(run) if len(values) else values
            shown = np.isfinite(values) & (x > 0)
            if shown.any():
                found.append((number, x[shown], values[shown] * (100 if metric == "accuracy" else 1)))
    return found


def _overlay(
    groups: list[Group],
    lines: list[Curve],
    label: str,
    below: str,
    amount: Callable[[float], str] | None = None,
    whole: bool = True,
) -> str:
    """Groups of several seeds as their mean, with the seeds behind it."""
    means, seeds = [], []
    for number in range(len(groups)):
        own = [(x, y) for mine, x, y in lines if mine == number]
        if not own:
            continue
        length = min(len(x) for x, _ in own)  # a seed may have stopped early
        x, y = (np.mean([part[axis][:length] for part in own], axis=0) for axis in (0, 1))
        means.append((number, x, y))
        seeds += [(number, *part) for part in own if len(own) > 1]
    return figures.overlay(means, label, below, amount, seeds, whole)


# --- reading ---------------------------------------------------------------------------------------------------------


def _read(folders: list[Path]) -> tuple[list[RunFolder], list[tuple[str, str]]]:
    """The runs with a result, and (folder, reason) for the rest."""
    runs: list[RunFolder] = []
    missing: list[tuple[str, str]] = []
    seen: dict[tuple[str, int], Path] = {}
    for folder in folders:
        try:
            run = read_run(folder)
        except FedsieveError as error:
            missing.append((str(folder), str(error).removeprefix(f"{folder}: ")))
            continue
        identity = (repr(_config(run)), run.experiment.seed)
        if lost := run.missing or run.torn or _unanswered(run):
            missing.append((str(folder), lost))
        elif identity in seen:
            # The same seed twice is one measurement, and would make the spread look smaller than it is.
            missing.append((str(folder), f"left out: same config and seed as {seen[identity]}"))
        else:
            seen[identity] = folder
            runs.append(run)
    return runs, missing


def _unanswered(run: RunFolder) -> str | None:
    """Why the answers to test images are not there, though the run gave some; intervals may be made of them."""
    tested = run.experiment.test and run.experiment.data.source != "none"  # else only sites have test images
    if run.predictions or not tested:
        return None
    return run.unreadable("predictions.npz") or "predictions.npz is missing"


def _config(run: RunFolder, exclude_defaults: bool = False) -> dict[str, Any]:
    tree = flatten(run.experiment.model_dump(mode="json", exclude_defaults=exclude_defaults))
    return {key: value for key, value in tree.items() if not any(f"{key}.".startswith(f"{i}.") for i in INCIDENTAL)}


def _group(runs: list[RunFolder]) -> list[Group]:
    """Runs of one config together, best test accuracy first."""
    by_config: dict[str, list[RunFolder]] = {}
    for run in runs:
        by_config.setdefault(repr(_config(run)), []).append(run)
    names = [", ".join(dict.fromkeys(run.experiment.name for run in members)) for members in by_config.values()]
    groups = []
    for name, members in zip(names, by_config.values(), strict=True):
        label = name if names.count(name) == 1 else f"{name} ({members[0].path})"
        groups.append(Group(label, _config(members[0]), sorted(members, key=lambda run: run.experiment.seed)))
    return sorted(
        groups,
        key=lambda group: tuple(-math.inf if (m := group.mean(f)) is None else m for f in MEASURES),
        reverse=True,
    )


def settings_that_differ(groups: list[Group]) -> dict[str, list[str]]:
    """What each group has where not all have the same, by dotted path, in the order of the configs.

    Of a section that some have not, such as a federation, only what is not as it would be by default.
    """
    keys = dict.fromkeys(key for group in groups for key in group.config)
    chosen = {key for group in groups for key in _config(group.runs[0], exclude_defaults=True)}
    differing = [
        key
        for key in keys
        if len({repr(group.config.get(key, ...)) for group in groups}) > 1
        and (key in chosen or all(key in group.config for group in groups))
    ]
    shown = [key for key in differing if not any(other.startswith(f"{key}.") for other in differing)]
    return {key: [_setting(group, key) for group in groups] for key in shown}


def _setting(group: Group, key: str) -> str:
    if key in group.config:
        return text(group.config[key])
    return "by default" if any(other.startswith(f"{key}.") for other in group.config) else "–"

"""The page that sets runs side by side: seeds of one config as one line, and by name whatever has no result."""

from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.errors import FedsieveError
from fedsieve.report import figures
from fedsieve.report.folder import RunFolder, read_run
from fedsieve.report.html import figure, flatten, render, save, tick
from fedsieve.report.traffic import of_dense, read_traffic, so_far

# What may differ between runs that are still repeats of one another.
INCIDENTAL = ("name", "seed", "tracking", "checkpoint", "data.cache")


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
        values = self._values(field)
        return float(values.mean()) if len(values) else None

    def spread(self, field: str) -> float | None:
        """Standard deviation over the seeds; one seed has none."""
        values = self._values(field)
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

    def _values(self, field: str) -> np.ndarray:
        values = [
            reduce(lambda part, name: getattr(part, name, None), field.split("."), run.summary) for run in self.runs
        ]
        # A mean over some of the seeds would pass for one over all of them.
        return np.array([] if None in values else values, dtype=np.float64)


def write_comparison(folders: list[Path], out: Path) -> Path:
    """Writes the page comparing the run folders to `out` (a .html file, or a folder for comparison.html)."""
    if not folders:
        raise FedsieveError("comparison: no run folders given. Name at least one, such as runs/first runs/second")
    runs, missing = _read(folders)
    groups = _group(runs)
    keys = _differences(groups)
    lines = {metric: _lines(groups, metric) for metric in ("accuracy", "loss")}
    units = sorted({run.unit for run in runs})
    below = " or ".join(units) or "epoch"
    drawn = {
        f"validation {metric}": figures.overlay(shown, _axis(metric), below) for metric, shown in lines.items() if shown
    }
    if by_bytes := _by_bytes(groups):
        drawn["validation accuracy by bytes"] = figures.overlay(by_bytes, _axis("accuracy"), "bytes sent so far", tick)
    page = render(
        "comparison.html",
        groups=groups,
        missing=missing,
        keys=keys,
        absent="–",
        below=below,
        pens=[figures.pen(number) for number in range(len(groups))],
        curves={name: figure(svg, f"{name} of every run by {below}") for name, svg in drawn.items()},
        without_curve=[
            group.label for number, group in enumerate(groups) if number not in {n for n, _, _ in lines["accuracy"]}
        ],
    )
    return save(out if out.suffix == ".html" else out / "comparison.html", page)


def _axis(metric: str) -> str:
    return f"validation {metric}" + ", %" * (metric == "accuracy")


def _lines(groups: list[Group], metric: str) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """A line (number of the group, epochs or rounds, values) for every run, of what was evaluated."""
    found = []
    for number, group in enumerate(groups):
        for run in group.runs:
            rows = [row for row in run.records if row.get(f"val_{metric}") is not None]
            values = figures.column(rows, f"val_{metric}")
            if np.isfinite(values).any():
                found.append((number, figures.column(rows, "index"), values * (100 if metric == "accuracy" else 1)))
    return found


def _by_bytes(groups: list[Group]) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """A line (number of the group, bytes sent so far, validation accuracy in per cent) for every federated run."""
    found = []
    for number, group in enumerate(groups):
        for run in group.runs:
            sums = so_far(run.records, read_traffic(run))
            accuracy = 100 * figures.column(run.records, "val_accuracy")
            shown = np.isfinite(accuracy) & (sums > 0)
            if shown.any():
                found.append((number, sums[shown], accuracy[shown]))
    return found


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
        if run.missing:
            missing.append((str(folder), run.missing))
        elif identity in seen:
            # The same seed twice is one measurement, and would make the spread look smaller than it is.
            missing.append((str(folder), f"left out: same config and seed as {seen[identity]}"))
        else:
            seen[identity] = folder
            runs.append(run)
    return runs, missing


def _config(run: RunFolder) -> dict[str, Any]:
    tree = flatten(run.experiment.model_dump(mode="json"))
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
    return sorted(groups, key=lambda group: -(group.mean("test_accuracy") or 0.0))


def _differences(groups: list[Group]) -> list[str]:
    """The dotted paths whose values are not the same everywhere, in the order of the configs."""
    keys = dict.fromkeys(key for group in groups for key in group.config)
    return [key for key in keys if len({repr(group.config.get(key, ...)) for group in groups}) > 1]

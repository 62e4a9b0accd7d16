"""The page that sets runs side by side: seeds of one config as one line, and by name whatever has no result."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.errors import FedsieveError
from fedsieve.report import figures
from fedsieve.report.folder import RunFolder, read_run
from fedsieve.report.html import figure, flatten, render, save

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

    def _values(self, field: str) -> np.ndarray:
        values = [getattr(run.summary, field) for run in self.runs]
        # A mean over some of the seeds would pass for one over all of them.
        return np.array([] if None in values else values, dtype=np.float64)


def write_comparison(folders: list[Path], out: Path) -> Path:
    """Writes the page comparing the run folders to `out` (a .html file, or a folder for comparison.html)."""
    if not folders:
        raise FedsieveError("comparison: no run folders given. Name at least one, such as runs/first runs/second")
    runs, missing = _read(folders)
    groups = _group(runs)
    keys = _differences(groups)
    lines = {
        metric: [
            (number, figures.column(run.epochs, "index"), scale * figures.column(run.epochs, f"val_{metric}"))
            for number, group in enumerate(groups)
            for run in group.runs
            if np.isfinite(figures.column(run.epochs, f"val_{metric}")).any()
        ]
        for metric, scale in (("accuracy", 100.0), ("loss", 1.0))
    }
    drawn = {
        f"validation {metric}": figures.overlay(shown, f"validation {metric}" + ", %" * (metric == "accuracy"))
        for metric, shown in lines.items()
        if shown
    }
    page = render(
        "comparison.html",
        groups=groups,
        missing=missing,
        keys=keys,
        absent="–",
        pens=[figures.pen(number) for number in range(len(groups))],
        curves={name: figure(svg, f"{name} of every run by epoch") for name, svg in drawn.items()},
        without_curve=[
            group.label for number, group in enumerate(groups) if number not in {n for n, _, _ in lines["accuracy"]}
        ],
    )
    return save(out if out.suffix == ".html" else out / "comparison.html", page)


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

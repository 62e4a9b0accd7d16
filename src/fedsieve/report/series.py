"""Figures of several runs: measured with the spread over seeds, reported as hollow marks."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedsieve.report.figures import BLUE, GRID, INK, MUTED, ORANGE, PANEL, SERIES, drawn, log_scale, pen, short
from fedsieve.report.folder import RunFolder, read_masks
from fedsieve.report.html import duration, size, tick
from fedsieve.report.masks import block_labels, mask_rows
from fedsieve.report.measures import form, label

Text = Callable[[float], str]


class Point(NamedTuple):
    """A row in a figure. Means over its seeds; None: not measured, or not reported."""

    x: Any
    mean: float | None
    spread: float | None = None
    reported: float | None = None


class Scale(NamedTuple):
    """One direction of a figure."""

    label: str
    text: Text | None = None  # writes its numbers; None: as they are
    log: bool = False


@drawn
def lines(series: Mapping[str, Sequence[Point]], below: str, left: Scale) -> Figure:
    """One line for every series over the values of a setting, numbers in their order, words in the order given."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    values = list(dict.fromkeys(point.x for points in series.values() for point in points))
    numbers = all(isinstance(value, (int, float)) for value in values)
    values = sorted(values) if numbers else values
    for number, (name, points) in enumerate(series.items()):
        colour, dash = pen(number)
        points = sorted(points, key=lambda point: values.index(point.x))
        found = [(values.index(point.x), point.mean, point.spread or 0.0) for point in points if point.mean is not None]
        told = [(values.index(point.x), point.reported) for point in points if point.reported is not None]
        axes.plot([], [], color=colour, ls=dash, marker="o", ms=4, label=name)
        if found:
            x, y, errors = zip(*found, strict=True)
            axes.errorbar(x, y, errors, color=colour, ls=dash, marker="o", ms=4, capsize=2.5, elinewidth=1)
        if told:
            axes.plot(*zip(*told, strict=True), ls=":", lw=1.1, marker="D", ms=4.5, mfc="none", color=colour)
    if any(point.reported is not None for points in series.values() for point in points):
        axes.plot([], [], ls=":", lw=1.1, marker="D", ms=4.5, mfc="none", color=MUTED, label="reported")
    axes.set_xticks(range(len(values)), [f"{value:g}" if numbers else str(value) for value in values])
    axes.set_xlim(-0.3, len(values) - 0.7)
    axes.grid(axis="x", visible=False)
    return _finish(figure, axes, Scale(below), left)


@drawn
def dots(names: Sequence[str], points: Sequence[Point], below: Scale, text: Text) -> Figure:
    """One dot for every row, first on top, with its value, its spread, and a diamond for what was reported."""
    figure = Figure(figsize=(PANEL[0], max(1.5, 0.85 + 0.23 * len(names))), layout="constrained")
    axes = figure.add_subplot()
    axes.hlines(range(len(names)), 0, 1, transform=axes.get_yaxis_transform(), color=GRID, lw=0.8)
    known = [(row, point.mean, point.spread or 0.0) for row, point in enumerate(points) if point.mean is not None]
    rows, means, spreads = zip(*known, strict=True)
    axes.errorbar(means, rows, xerr=spreads, fmt="o", ms=5.5, color=BLUE, ecolor=BLUE, elinewidth=1.4, capsize=2.5)
    axes.plot([], [], "o", ms=5.5, color=BLUE, label="measured")
    told = [(point.reported, row) for row, point in enumerate(points) if point.reported is not None]
    if told:
        axes.plot(*zip(*told, strict=True), "D", ms=5, mfc="none", mec=ORANGE, mew=1.4, label="reported")
    right: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
    for row, point in enumerate(points):
        word = "not run" if point.mean is None else text(point.mean)
        place: Any = {"va": "center", "color": MUTED, "fontsize": 7.5, "annotation_clip": False}
        axes.annotate(word, (1, row), (4, 0), **right, **place)
    axes.set_yticks(range(len(names)), [short(name, 40) for name in names], color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y", visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return _finish(figure, axes, below, Scale(""))


@drawn
def curves(series: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]], below: Scale, left: Scale) -> Figure:
    """A line for every row by epoch or round, or by cost: the mean of its seeds' curves, and their range."""
    figure = Figure(figsize=(PANEL[0], PANEL[1] + 0.16 * len(series)), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, runs) in enumerate(series.items()):
        colour, dash = pen(number)
        x = runs[0][0]
        if all(np.array_equal(x, other) for other, _ in runs):
            y = np.stack([values for _, values in runs])
            if len(runs) > 1:
                axes.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.14, lw=0)
            runs = [(x, y.mean(0))]
        for place, (x, values) in enumerate(runs):  # seeds that stopped at different rounds are drawn one by one
            style: dict[str, Any] = {"marker": "o" if len(x) <= 5 else None, "ms": 3, "lw": 1.4}
            axes.plot(x, values, color=colour, ls=dash, label=short(name, 60) if place == 0 else None, **style)
    if not below.log:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(figure, axes, below, left, "outside lower left")


@drawn
def scatter(series: Mapping[str, Sequence[tuple[str, Point]]], below: Scale, left: Scale) -> Figure:
    """Rows by two measures, named points in a colour for each series; with their names where there is room."""
    figure = Figure(figsize=(PANEL[0] * 1.25, PANEL[1] * 1.3), layout="constrained")
    axes = figure.add_subplot()
    crowded = sum(map(len, series.values())) > 16
    for number, (title, rows) in enumerate(series.items()):
        x, y, errors = zip(*((point.x, point.mean, point.spread or 0.0) for _, point in rows), strict=True)
        colour = SERIES[number % len(SERIES)]
        axes.errorbar(x, y, errors, fmt="o", ms=5, color=colour, capsize=2, elinewidth=1, alpha=0.9, label=title)
        for name, point in rows if not crowded else []:
            axes.annotate(short(name, 26), point[:2], (5, 4), textcoords="offset points", fontsize=7, color=MUTED)
    return _finish(figure, axes, below, left)


def overlap(rows: Mapping[str, Sequence[RunFolder]]) -> str | None:
    """How far clients' own masks agree by block: the mean Jaccard index of all pairs; None where no run has any."""
    series, chance, names = {}, np.zeros(0), list[str]()
    for name, runs in rows.items():
        if found := [run.client_pairs for run in runs if run.client_pairs]:
            names = found[0].block_names
            with np.errstate(all="ignore"):
                series[name] = _means(np.transpose([_means(one.blocks) for one in found]))
                chance = np.full(len(names), np.mean([np.nanmean(one.chance) for one in found]))
    return _depths(series, chance, names) if series else None


def _means(values: np.ndarray) -> np.ndarray:
    """Means over the last of (blocks, m), pairs or runs; nan where none has a value."""
    return np.array([np.nanmean(row) if np.isfinite(row).any() else np.nan for row in values])


def blocks(rows: Mapping[str, Sequence[RunFolder]]) -> str | None:
    """The share of each block that the last stage's first shared mask lets train, in the first of a row's runs."""
    series = {}
    for name, run in ((name, run) for name, runs in rows.items() for run in runs[:1]):
        own = read_masks(run, []).get(run.experiment.stages[-1].name)
        if mask := own.at(1) if own else None:
            labels = block_labels([row.block for row in mask_rows(mask)])
            series[name] = [Point(label, row.share) for label, row in zip(labels, mask_rows(mask), strict=True)]
    return lines(series, "block", Scale("share that trains")) if series else None


@drawn
def _depths(series: Mapping[str, np.ndarray], chance: np.ndarray, names: Sequence[str]) -> Figure:
    """Mean Jaccard indices by block (blocks,) for every series, and by chance."""
    figure = Figure(figsize=(PANEL[0] * 1.3, PANEL[1] * 1.15), layout="constrained")
    axes = figure.add_subplot()
    x, labels = np.arange(len(names)), block_labels(names)
    for number, (name, values) in enumerate(series.items()):
        colour, dash = pen(number)
        axes.plot(x, values, color=colour, ls=dash, marker="o", ms=3.5, label=name)
    axes.plot(x, chance, color=MUTED, ls="--", lw=1.2, label="by chance, at this density")
    axes.set_xticks(x, labels, rotation=90 if max(map(len, labels)) > 2 else 0)
    axes.set_ylim(0, 1.05)
    axes.grid(axis="x", visible=False)
    return _finish(figure, axes, Scale("block"), Scale("Jaccard index, mean over pairs"))


def _finish(figure: Figure, axes: Axes, below: Scale, left: Scale, place: Any = "outside upper left") -> Figure:
    """Write the numbers, the labels, and the names of series in as many columns as there is room for."""
    for scale, axis in ((below, axes.xaxis), (left, axes.yaxis)):
        if scale.log:
            log_scale(axes, scale.text or "{:g}".format, "x" if scale is below else "y")
        elif scale.text:
            axis.set_major_formatter(FuncFormatter(lambda value, _, text=scale.text: text(value)))
    axes.set(xlabel=below.label, ylabel=left.label)
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        longest = max(map(len, labels))
        columns = 1 if longest > 30 else 2 if longest > 16 else 3
        figure.legend(handles, labels, loc=place, ncols=columns, fontsize=7.5)
    return figure


# --- measures --------------------------------------------------------------------------------------------------------


def written(value: float | None, measure: str, sign: bool = False) -> str:
    """A value without its unit, which the head of its column has."""
    if value is None or not math.isfinite(value):
        return "–"
    plus = "+" if sign and value > 0 else ""
    match form(measure):
        case "percent":
            return f"{plus}{100 * value:.2f}"
        case "bytes":
            return plus + size(value)
        case "seconds":
            return plus + (duration(value) if value >= 0 else f"-{duration(-value)}")
        case "whole":
            return f"{plus}{value:,.0f}"
    return f"{plus}{value:.3f}" if 0.01 <= abs(value) < 1000 else f"{plus}{value:.2g}"


def scale(measure: str, log: bool = False) -> Scale:
    """The scale of a measure."""
    texts: dict[str, Text] = {"percent": lambda value: f"{100 * value:g}", "bytes": tick, "seconds": "{:g} s".format}
    return Scale(label(measure), texts.get(form(measure)), log)

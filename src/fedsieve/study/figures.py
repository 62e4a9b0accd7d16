"""The figures of a study: measured with the spread over seeds, reported as hollow marks beside it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedsieve.report.figures import BLUE, GRID, INK, MUTED, ORANGE, PANEL, SERIES, drawn, log_scale, pen, short

Text = Callable[[float], str]


@dataclass(frozen=True)
class Point:
    """A row in a figure. Means over its seeds; None: not measured, or not reported."""

    x: Any
    mean: float | None
    spread: float | None
    reported: float | None


@drawn
def lines(series: Mapping[str, Sequence[Point]], below: str, beside: str, text: Text | None, log: bool) -> Figure:
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
    _scale(axes, text, log)
    axes.set(xlabel=below, ylabel=beside)
    _legend(figure, axes)
    return figure


@drawn
def dots(
    names: Sequence[str], points: Sequence[Point], below: str, text: Callable[[float], str], ticks: Text | None
) -> Figure:
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
        _legend(figure, axes)
    for row, point in enumerate(points):
        word = "not run" if point.mean is None else text(point.mean)
        right: dict[str, Any] = {
            "xycoords": axes.get_yaxis_transform(),
            "textcoords": "offset points",
            "annotation_clip": False,
        }
        axes.annotate(word, (1, row), (4, 0), va="center", color=MUTED, fontsize=7.5, **right)
    axes.set_yticks(range(len(names)), [short(name, 40) for name in names], color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.08)
    if ticks:
        axes.xaxis.set_major_formatter(lambda value, _: ticks(value))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y", visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(below)
    return figure


@drawn
def curves(
    series: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]], below: str, beside: str, text: Text | None, log: bool
) -> Figure:
    """A line for every row by epoch or round: the mean of its seeds' curves, and their range."""
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
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _scale(axes, text, log)
    axes.set(xlabel=below, ylabel=beside)
    _legend(figure, axes, "outside lower left")
    return figure


@drawn
def scatter(
    series: Mapping[str, Sequence[tuple[str, float, Point]]], below: str, beside: str, amount: Text, text: Text | None
) -> Figure:
    """Rows by two measures, (name, x, y) in a colour for each series; names stand beside them where there is room."""
    figure = Figure(figsize=(PANEL[0] * 1.25, PANEL[1] * 1.3), layout="constrained")
    axes = figure.add_subplot()
    crowded = sum(map(len, series.values())) > 16
    for number, (label, rows) in enumerate(series.items()):
        x, y = [place for _, place, _ in rows], [point.mean or 0.0 for _, _, point in rows]
        errors = [point.spread or 0.0 for _, _, point in rows]
        colour = SERIES[number % len(SERIES)]
        axes.errorbar(x, y, errors, fmt="o", ms=5, color=colour, capsize=2, elinewidth=1, alpha=0.9, label=label)
        for name, place, point in rows if not crowded else []:
            where = (place, point.mean or 0.0)
            axes.annotate(short(name, 26), where, (5, 4), textcoords="offset points", fontsize=7, color=MUTED)
    log_scale(axes, amount, "x")
    _scale(axes, text, log=False)
    axes.set(xlabel=below, ylabel=beside)
    _legend(figure, axes)
    return figure


@drawn
def depths(series: Mapping[str, np.ndarray], chance: np.ndarray, blocks: Sequence[str]) -> Figure:
    """How far clients' masks agree by block: mean Jaccard index (blocks,) for every rule, and what chance gives."""
    figure = Figure(figsize=(PANEL[0] * 1.3, PANEL[1] * 1.15), layout="constrained")
    axes = figure.add_subplot()
    x = np.arange(len(blocks))
    for number, (name, values) in enumerate(series.items()):
        colour, dash = pen(number)
        axes.plot(x, values, color=colour, ls=dash, marker="o", ms=3.5, label=name)
    axes.plot(x, chance, color=MUTED, ls="--", lw=1.2, label="by chance, at this density")
    axes.set_xticks(x, blocks, rotation=90 if max(map(len, blocks)) > 2 else 0)
    axes.set_ylim(0, 1.05)
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="block", ylabel="Jaccard index, mean over pairs")
    _legend(figure, axes)
    return figure


def _scale(axes: Axes, text: Text | None, log: bool) -> None:
    if log:
        log_scale(axes, text or (lambda value: f"{value:g}"))
    elif text:
        axes.yaxis.set_major_formatter(lambda value, _: text(value))


def _legend(figure: Figure, axes: Axes, place: Any = "outside upper left") -> None:
    """Names in as many columns as there is room for."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        longest = max(map(len, labels))
        columns = 1 if longest > 30 else 2 if longest > 16 else 3
        figure.legend(handles, labels, loc=place, ncols=columns, fontsize=7.5)

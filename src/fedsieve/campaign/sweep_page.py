"""The page of a sweep: which settings were best, how sure that is, and what each of them does."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedsieve.campaign.axes import Axis, Space, Values, brief, label
from fedsieve.campaign.engine import best_of
from fedsieve.report.figures import BLUE, CARD, INK, MUTED, ORANGE, PANEL, RED, bars, drawn, log_scale, short
from fedsieve.report.html import figure, render, save
from fedsieve.report.intervals import wilson
from fedsieve.report.masks import WIDE

LISTED = 20  # trials in the first table


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. `accuracy` is on validation; of a trial that was stopped, what it had reached."""

    number: int
    folder: Path
    values: Values
    state: str = "running"  # complete, stopped (early), diverged, failed
    accuracy: float | None = None
    seconds: float | None = None
    best_at: int | None = None
    images: int | None = None  # in the validation split
    note: str = ""

    @property
    def score(self) -> float | None:
        return self.accuracy if self.state == "complete" else None

    @property
    def outcome(self) -> dict[str, Any]:
        """Its fields that are known when it is over."""
        return {name: value for name, value in vars(self).items() if name not in ("number", "folder", "values")}

    @property
    def percent(self) -> float:
        return 100 * (self.accuracy or 0.0)


@dataclass(frozen=True)
class Standing:
    """How a sweep stands."""

    trials: list[Trial]
    best: Trial | None
    page: Path
    hints: list[str]


def write_page(folder: Path, space: Space, trials: list[Trial], importance: Mapping[str, float]) -> Standing:
    """Writes sweep.html, and its figures under figures/, into the sweep folder."""
    axes, best = space.axes, best_of(trials)
    names = dict(zip((axis.key for axis in axes), brief([axis.key for axis in axes]), strict=True))
    ended = [trial for trial in trials if trial.score is not None]
    drawings: dict[str, str] = {}
    if trials:
        drawings["history"] = history(trials)
    if importance:
        keys = sorted(importance, key=lambda key: -importance[key])
        shares = np.array([100 * importance[key] for key in keys])
        drawings["importance"] = bars([names[key] for key in keys], shares, "share of the variance explained, %")
    if len(ended) > 1:
        drawings["parallel"] = parallel(axes, list(names.values()), ended)
        drawings |= {f"by-{names[axis.key]}": by_setting(axis, names[axis.key], ended) for axis in axes}
    for part, svg in drawings.items():
        save(folder / "figures" / f"{part}.svg", svg)
    edges = [axis.key for axis in axes if best and axis.at_end(best.values[axis.key])]
    interval = wilson(best.accuracy, best.images) if best and best.accuracy is not None and best.images else None
    page = render(
        "sweep.html",
        name=space.base.name,
        folder=folder,
        method={"grid": "grid", "bayes": "Bayesian search"}[space.method],
        axes=axes,
        names=names,
        order=sorted(trials, key=lambda trial: (trial.state != "complete", -trial.percent, trial.number)),
        listed=LISTED,
        best=best,
        counts=Counter(trial.state for trial in trials),
        interval=interval,
        # Luck with the validation images could have put these first.
        near=sum(trial is not best and trial.percent >= 100 * interval[0] for trial in ended) if interval else 0,
        edges=edges,
        seconds=sum(trial.seconds or 0.0 for trial in trials),
        svg={part: figure(svg, f"{part} of the sweep") for part, svg in drawings.items()},
        label=label,
    )
    hints = [
        f"{key}: the best value, {label(best.values[key])}, lies at the end of what was searched; a better one may lie beyond"
        for key in edges
        if best
    ]
    return Standing(trials, best, save(folder / "sweep.html", page), hints)


@drawn
def history(trials: Sequence[Trial]) -> Figure:
    """Validation accuracy in the order of the trials, the best so far, and below what has none."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    if ended := [(trial.number, trial.percent) for trial in trials if trial.state == "complete"]:
        x, y = zip(*ended, strict=True)
        axes.plot(x, y, "o", ms=4, color=BLUE, label="trial")
        axes.step(x, np.maximum.accumulate(y), where="post", color=ORANGE, lw=1.4, label="best so far")
    if stopped := [(t.number, t.percent) for t in trials if t.state == "stopped" and t.accuracy is not None]:
        axes.plot(*zip(*stopped, strict=True), "o", ms=4, mfc="none", color=MUTED, label="stopped early")
    if lost := [(trial.number, 0.03) for trial in trials if trial.state in ("diverged", "failed")]:
        below: Any = {"transform": axes.get_xaxis_transform(), "label": "no result"}
        axes.plot(*zip(*lost, strict=True), "x", ms=5, color=RED, **below)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="trial", ylabel="validation accuracy, %")
    axes.margins(y=0.12)
    if axes.lines:
        figure.legend(loc="outside upper left", ncols=4)
    return figure


@drawn
def by_setting(axis: Axis, name: str, ended: Sequence[Trial]) -> Figure:
    """Validation accuracy by one setting, whatever the others were; the best of each choice joined."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    values = [trial.values[axis.key] for trial in ended]
    y = np.array([trial.percent for trial in ended])
    x = np.array([axis.choices.index(value) for value in values] if axis.choices else values, dtype=np.float64)
    axes.plot(x, y, "o", ms=4.5, color=BLUE, alpha=0.55, mew=0)
    if axis.choices:
        present = np.unique(x)
        tops = [y[x == place].max() for place in present]
        axes.plot(present, tops, color=ORANGE, lw=1.4, ls="-" if axis.numeric else "", marker="_", ms=12, mew=2)
        texts = [short(label(choice), 16) for choice in axis.choices]
        turned: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(len(texts)), texts, **(turned if sum(map(len, texts)) > 46 else {}))
        axes.set_xlim(-0.5, len(texts) - 0.5)
        axes.grid(axis="x", visible=False)
    else:
        axes.plot(x[y.argmax()], y.max(), "o", ms=7, mfc="none", mec=ORANGE, mew=1.6)
        if axis.log:
            log_scale(axes, way="x")
    axes.set(xlabel=name, ylabel="validation accuracy, %")
    return figure


@drawn
def parallel(axes: Sequence[Axis], names: Sequence[str], ended: Sequence[Trial]) -> Figure:
    """A line for every trial through its settings to its accuracy: the better the stronger, the best in orange."""
    figure = Figure(figsize=(WIDE, 3.9), layout="constrained")
    panel = figure.add_subplot()
    accuracy = np.array([trial.percent for trial in ended])
    low, high = accuracy.min(), accuracy.max()
    height = (accuracy - low) / (high - low) if high > low else np.full(len(accuracy), 0.5)
    for place in np.argsort(height, kind="stable"):
        trial = ended[place]
        y = [*(axis.position(trial.values[axis.key]) for axis in axes), height[place]]
        style: dict[str, Any] = {"color": BLUE, "lw": 1.2, "alpha": 0.12 + 0.7 * height[place] ** 2}
        if place == int(np.argmax(height)):
            style = {"color": ORANGE, "lw": 2.2}
        panel.plot(range(len(y)), y, **style)
    panel.set_ylim(-0.06, 1.06)
    panel.set_xlim(-0.3, len(axes) + 0.3)
    for place, axis in enumerate(axes):
        panel.axvline(place, color=MUTED, lw=0.9, ymin=0.05, ymax=0.95)
        for value in _ticks(axis):
            _note(panel, place, axis.position(value), short(f"{value:g}" if not axis.choices else label(value), 16))
    panel.axvline(len(axes), color=MUTED, lw=0.9, ymin=0.05, ymax=0.95)
    for share in (0.0, 0.5, 1.0):
        _note(panel, len(axes), share if high > low else 0.5, f"{low + share * (high - low):.1f}")
    panel.set_xticks(range(len(axes) + 1), [*(short(name, 26) for name in names), "validation, %"], color=INK)
    panel.set_yticks([])
    panel.grid(False)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    return figure


def _note(panel: Any, x: float, y: float, text: str) -> None:
    style = {"textcoords": "offset points", "va": "center", "color": INK, "fontsize": 7.5, "zorder": 5}
    panel.annotate(
        text, (x, y), (5, 0), bbox={"facecolor": CARD, "edgecolor": "none", "pad": 1.2, "alpha": 0.85}, **style
    )


def _ticks(axis: Axis) -> list[Any]:
    """Values worth a mark on an axis."""
    if axis.choices:
        return list(axis.choices)
    if axis.log:
        decades = range(math.ceil(math.log10(axis.low) - 1e-9), math.floor(math.log10(axis.high) + 1e-9) + 1)
        marks = [float(f"1e{power}") for power in decades]
        return marks if len(marks) > 1 else [axis.tidy(axis.low), axis.tidy(axis.high)]
    marks = np.asarray(MaxNLocator(5, integer=axis.whole).tick_values(axis.low, axis.high)).tolist()
    return [float(f"{mark:.6g}") for mark in marks if axis.low <= mark <= axis.high]

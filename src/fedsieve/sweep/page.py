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

from fedsieve.report.figures import BLUE, CARD, INK, MUTED, ORANGE, PANEL, RED, bars, drawn, log_scale, short
from fedsieve.report.html import figure, render, save
from fedsieve.report.intervals import wilson
from fedsieve.report.masks import WIDE
from fedsieve.sweep.space import Axis, brief, label

LISTED = 20  # trials in the first table


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. `accuracy` is on validation; of a trial that was stopped, what it had reached."""

    number: int
    folder: Path
    values: dict[str, Any]
    state: str  # complete, stopped (early), diverged, failed, running
    accuracy: float | None = None
    seconds: float | None = None
    best_at: int | None = None
    images: int | None = None  # in the validation split
    note: str = ""


def write_page(
    folder: Path,
    name: str,
    method: str,
    axes: Sequence[Axis],
    trials: Sequence[Trial],
    best: Trial | None,
    importance: Mapping[str, float],
) -> Path:
    """Writes sweep.html, and its figures under figures/, into the sweep folder; returns the page."""
    names = dict(zip((axis.key for axis in axes), brief([axis.key for axis in axes]), strict=True))
    ended = [trial for trial in trials if trial.state == "complete"]
    drawings: dict[str, str] = {}
    if trials:
        drawings["history"] = history(trials)
    if importance:
        keys = sorted(importance, key=lambda key: -importance[key])
        shares = np.array([100 * importance[key] for key in keys])
        drawings["importance"] = bars([names[key] for key in keys], shares, "share of the variance explained, %")
    if len(ended) > 1:
        drawings["parallel"] = parallel(axes, list(names.values()), ended)
        for axis in axes:
            drawings[f"by-{names[axis.key]}"] = by_setting(axis, names[axis.key], ended)
    for part, svg in drawings.items():
        save(folder / "figures" / f"{part}.svg", svg)
    order = sorted(trials, key=lambda trial: (trial.state != "complete", -(trial.accuracy or 0.0), trial.number))
    page = render(
        "sweep.html",
        name=name,
        folder=folder,
        method={"grid": "grid", "bayes": "Bayesian search"}[method],
        axes=axes,
        names=names,
        order=order,
        listed=LISTED,
        best=best,
        counts=Counter(trial.state for trial in trials),
        interval=wilson(best.accuracy, best.images) if best and best.accuracy is not None and best.images else None,
        near=near(best, ended),
        edges=[axis.key for axis in axes if best and axis.at_end(best.values[axis.key])],
        seconds=sum(trial.seconds or 0.0 for trial in trials),
        svg={part: figure(svg, f"{part} of the sweep") for part, svg in drawings.items()},
        label=label,
    )
    return save(folder / "sweep.html", page)


def near(best: Trial | None, ended: Sequence[Trial]) -> int:
    """How many other trials lie within the best one's interval over validation images: luck could have put them first."""
    if best is None or best.accuracy is None or not best.images:
        return 0
    low = wilson(best.accuracy, best.images)[0]
    return sum(trial is not best and (trial.accuracy or 0.0) >= low for trial in ended)


@drawn
def history(trials: Sequence[Trial]) -> Figure:
    """Validation accuracy in the order of the trials, the best so far, and below what has none."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    ended = [trial for trial in trials if trial.state == "complete"]
    x = np.array([trial.number for trial in ended])
    y = np.array([100 * (trial.accuracy or 0.0) for trial in ended])
    if len(ended):
        axes.plot(x, y, "o", ms=4, color=BLUE, label="trial")
        axes.step(x, np.maximum.accumulate(y), where="post", color=ORANGE, lw=1.4, label="best so far")
    stopped = [trial for trial in trials if trial.state == "stopped" and trial.accuracy is not None]
    if stopped:
        at, reached = [t.number for t in stopped], [100 * (t.accuracy or 0.0) for t in stopped]
        axes.plot(at, reached, "o", ms=4, mfc="none", color=MUTED, label="stopped early")
    lost = [trial.number for trial in trials if trial.state in ("diverged", "failed")]
    if lost:
        axes.plot(
            lost, [0.03] * len(lost), "x", ms=5, color=RED, transform=axes.get_xaxis_transform(), label="no result"
        )
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
    y = np.array([100 * (trial.accuracy or 0.0) for trial in ended])
    x = np.array([axis.choices.index(value) for value in values] if axis.choices else values, dtype=np.float64)
    axes.plot(x, y, "o", ms=4.5, color=BLUE, alpha=0.55, mew=0)
    if axis.choices:
        present = np.unique(x)
        tops = [y[x == place].max() for place in present]
        axes.plot(present, tops, color=ORANGE, lw=1.4, ls="-" if axis.numeric else "", marker="_", ms=12, mew=2)
        texts = [short(label(choice), 16) for choice in axis.choices]
        turned: dict[str, Any] = {}
        if sum(map(len, texts)) > 46:
            turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(len(texts)), texts, **turned)
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
    accuracy = np.array([100 * (trial.accuracy or 0.0) for trial in ended])
    low, high = accuracy.min(), accuracy.max()
    height = (accuracy - low) / (high - low) if high > low else np.full(len(accuracy), 0.5)
    for place in np.argsort(height, kind="stable"):
        trial = ended[place]
        y = [*(axis.position(trial.values[axis.key]) for axis in axes), height[place]]
        first = place == int(np.argmax(height))
        colour = ORANGE if first else BLUE
        panel.plot(
            range(len(y)),
            y,
            color=colour,
            lw=2.2 if first else 1.2,
            alpha=1 if first else 0.12 + 0.7 * height[place] ** 2,
        )
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
    ground = {"facecolor": CARD, "edgecolor": "none", "pad": 1.2, "alpha": 0.85}
    panel.annotate(
        text, (x, y), (5, 0), textcoords="offset points", va="center", color=INK, fontsize=7.5, bbox=ground, zorder=5
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

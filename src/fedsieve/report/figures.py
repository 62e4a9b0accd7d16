"""Figures in one style, each returned as SVG text that stands alone and also fits a light or a dark page."""

import functools
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, ParamSpec

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from PIL import Image
from scipy.stats import chi2

P = ParamSpec("P")

INK, MUTED, GRID, CARD = "#3b434d", "#76808c", "#e1e5ea", "#fefefe"
BLUE, ORANGE, GREEN, RED = "#4178d6", "#d9772b", "#2e9e6b", "#d64550"
SERIES = [BLUE, ORANGE, GREEN, "#8f63d2", RED, "#1f9aa8", "#c9569c", "#9a8433"]
STYLE: dict[Any, Any] = {
    "font.size": 8.5,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "text.parse_math": False,  # a class may be named "$5"
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.4,
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the font of the page
    "svg.hashsalt": "fedsieve",  # the same run gives the same file
}
PANEL = (4.7, 3.0)  # inches; two stand side by side on a wide page, one fills a phone
LABELLED_CLASSES = 30  # more names than this on an axis cannot be read
SPLITS = {
    "train": ("train", MUTED, "-"),
    "val": ("validation", BLUE, "-"),
    "client_val": ("clients' validation", GREEN, "-"),
    "test": ("test, watched {},\nnever used to select", ORANGE, ":"),
}


def drawn(draw: Callable[P, Figure]) -> Callable[P, str]:
    """Runs `draw` in the shared style and returns its figure as SVG."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> str:
        with matplotlib.rc_context(STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # the browser has what matplotlib's font lacks
            buffer = io.StringIO()
            draw(*args, **kwargs).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        return re.sub(r'<g id="[^"]*"', "<g", buffer.getvalue())  # ids that would repeat from figure to figure

    return drawn


def inline(svg: str, label: str) -> str:
    """The SVG for the inside of a page: its ink follows the page's colours, and `label` is read to those who listen."""
    svg = svg[svg.index("<svg") :]
    for colour, variable in ((INK, "--ink"), (MUTED, "--muted"), (GRID, "--line"), (CARD, "--card")):
        svg = svg.replace(colour, f"var({variable})")
    quoted = label.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{quoted}" ', 1)


def short(name: str, length: int = 20) -> str:
    """A name that fits beside an axis, on one line and without control characters, which SVG forbids."""
    name = "".join(letter if letter.isprintable() else " " for letter in name)
    return name if len(name) <= length else name[: length - 1] + "…"


def column(rows: Sequence[Mapping[str, Any]], field: str) -> np.ndarray:
    """One field of the records as numbers; NaN where it is absent."""
    values = [row.get(field) for row in rows]
    return np.array([value if isinstance(value, (int, float)) else np.nan for value in values], dtype=np.float64)


# --- curves over epochs or rounds ------------------------------------------------------------------------------------


@drawn
def curves(
    rows: Sequence[Mapping[str, Any]],
    metric: str,
    chosen: Sequence[int] = (),
    scale: float = 1.0,
    watched: str = "every epoch",
) -> Figure:
    """`metric` ("accuracy" or "loss") of each split by epoch or round; `chosen` are the indices of those that were kept.

    `watched` says how often test data was looked at, where it was.
    """
    figure, axes = panel(rows)
    for split, (label, colour, line) in SPLITS.items():
        by_stage(axes, rows, f"{split}_{metric}", scale, label=label.format(watched), color=colour, linestyle=line)
    kept = [row for row in rows if row["index"] in chosen]
    # Where the server holds no validation data, the clients' decides.
    by, colour = ("val", BLUE) if any("val_accuracy" in row for row in rows) else ("client_val", GREEN)
    values = scale * column(kept, f"{by}_{metric}")
    axes.plot(column(kept, "index"), values, "o", ms=7, mfc="none", mec=colour, mew=1.6, label="chosen")
    handles = [
        line for line in axes.lines if not str(line.get_label()).startswith("_") and np.isfinite(line.get_ydata()).any()
    ]
    if handles:
        figure.legend(handles=handles, loc="outside upper left", ncols=4)
    axes.set_ylabel("accuracy, %" if metric == "accuracy" else metric)
    return figure


@drawn
def by_index(
    rows: Sequence[Mapping[str, Any]], field: str, label: str, log: bool = False, height: float = 2.2
) -> Figure:
    """One field by epoch or round; `log` allows a log scale where one stage would flatten the other."""
    figure, axes = panel(rows, height)
    by_stage(axes, rows, field, 1.0, color=BLUE)
    stages = [column(list(stage), field) for _, stage in groupby(rows, lambda row: row.get("stage"))]
    peaks = [np.nanmax(values) for values in stages if np.isfinite(values).any()]
    if log and min(peaks, default=0) > 0 and max(peaks) > 5 * min(peaks):
        log_scale(axes)
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    return figure


def log_scale(
    axes: Axes, text: Callable[[float], str] = lambda value: f"{value:g}", way: Literal["x", "y"] = "y"
) -> None:
    """A log scale of what is drawn, vertical unless `way` is x; `text` writes its numbers."""
    axes.set(**{f"{way}scale": "log"})
    low, high = axes.get_xlim() if way == "x" else axes.get_ylim()
    axis = axes.xaxis if way == "x" else axes.yaxis
    if high < 30 * low:  # powers of ten would be one or none
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 5 * low else MaxNLocator(nbins=4))
    axis.set_major_formatter(lambda value, _: text(value))  # the usual ones write formulas
    axis.set_minor_formatter(NullFormatter())


@drawn
def overlay(
    lines: Sequence[tuple[int, np.ndarray, np.ndarray]],
    label: str,
    below: str = "epoch",
    amount: Callable[[float], str] | None = None,
    faint: Sequence[tuple[int, np.ndarray, np.ndarray]] = (),
    whole: bool = True,
) -> Figure:
    """Lines (number, x, y) in one panel; the page's legend names the numbers, each drawn in its `pen`.

    `below` names what x counts, from 1 if `whole`, else from 0; with `amount`, which writes its numbers, it has a log
    scale. `faint` lines lie behind.
    """
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    for number, x, y in faint:
        axes.plot(x, y, color=pen(number)[0], lw=0.8, alpha=0.4)
    for number, x, y in lines:
        colour, dash = pen(number)
        axes.plot(x, y, color=colour, linestyle=dash, lw=1.4, marker=_marker(x), ms=3)
    if amount:
        log_scale(axes, amount, "x")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=whole))
        axes.set_xlim(left=0.5 if whole else 0)
    axes.set(xlabel=below, ylabel=label)
    return figure


@drawn
def differences(names: Sequence[str], values: Sequence[tuple[float, float, float]], label: str) -> Figure:
    """Differences (value, low, high) to what lies at zero, first on top; grey where an interval holds zero."""
    figure = Figure(figsize=(2 * PANEL[0], 0.7 + 0.27 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0, color=ORANGE, lw=1.4)
    for row, (value, low, high) in enumerate(values):
        colour = MUTED if low <= 0 <= high else BLUE
        axes.plot([low, high], [row, row], color=colour, lw=2)
        axes.plot(value, row, "o", ms=6, color=colour)
    axes.set_yticks(range(len(names)), [short(name, 40) for name in names], color=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(label)
    return figure


def pen(number: int) -> tuple[str, str]:
    """Colour and dash of the line with this number: 24 that can be told apart."""
    return SERIES[number % len(SERIES)], ("solid", "dashed", "dotted")[number // len(SERIES) % 3]


def panel(rows: Sequence[Mapping[str, Any]], height: float = PANEL[1]) -> tuple[Figure, Axes]:
    """Empty axes over the epochs or rounds, the stages marked off."""
    figure = Figure(figsize=(PANEL[0], height), layout="constrained")
    axes = figure.add_subplot()
    number_below(axes, rows)
    axes.set_xlim(rows[0]["index"] - 0.5, rows[-1]["index"] + 0.5)
    stages = [(str(name), list(stage)) for name, stage in groupby(rows, lambda row: row.get("stage"))]
    for number, (name, stage) in enumerate(stages if len(stages) > 1 else []):
        start = stage[0]["index"] - 0.5
        if number:
            axes.axvline(start, color=MUTED, lw=0.8, ls=(0, (3, 3)))
        if len(stage) > len(rows) * 0.025 * len(name):  # else it would run into the next
            axes.text(start, 1.02, f" {short(name)}", transform=axes.get_xaxis_transform(), color=MUTED, fontsize=8)
    return figure, axes


def number_below(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Numbers below an axis over all stages: epochs or rounds of their own stage, from 1, as they are counted everywhere."""
    unit = "round" if any("round" in row for row in rows) else "epoch"
    ends = MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True).tick_values(0, max(len(rows), 1))
    shown = [row for row in rows if isinstance(row.get(unit), int) and row[unit] % round(ends[1] - ends[0]) == 0]
    axes.set_xticks([row["index"] for row in shown], [str(row[unit]) for row in shown])
    axes.set_xlabel(unit)


def by_stage(axes: Axes, rows: Sequence[Mapping[str, Any]], field: str, scale: float, **style: Any) -> None:
    """A line for every stage: what joins the end of one to the start of the next was never measured.

    Rounds without the field were not evaluated, and the line passes over them.
    """
    for _, stage in groupby(rows, lambda row: row.get("stage")):
        part = [row for row in stage if row.get(field) is not None]
        if not part:
            continue
        x = column(part, "index")
        axes.plot(x, scale * column(part, field), **style, marker=_marker(x), ms=3)
        style.pop("label", None)


def _marker(x: np.ndarray) -> str | None:
    return "o" if len(x) <= 5 else None


# --- classes ---------------------------------------------------------------------------------------------------------


@drawn
def bars(names: Sequence[str], values: np.ndarray, label: str, top: float | None = None, digits: int = 1) -> Figure:
    """Horizontal bars in the given order, first on top, each with its value."""
    figure = Figure(figsize=(PANEL[0], max(PANEL[1], 0.6 + 0.2 * len(names))), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(len(names)), values, color=BLUE, height=0.66, alpha=0.85)
    for row, value in enumerate(values):
        text = f"{value:,.{digits}f}"
        axes.annotate(text, (value, row), (3, 0), textcoords="offset points", va="center", color=MUTED, fontsize=7.5)
    axes.set_yticks(range(len(names)), [short(name) for name in names], color=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, (top or max(values.max(initial=0), 1e-9)) * 1.12)
    axes.grid(axis="y", visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(label)
    return figure


@drawn
def ranked(values: np.ndarray, label: str) -> Figure:
    """One thin bar for each of many classes, in the given order."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    axes.bar(np.arange(1, len(values) + 1), values, width=1.0, color=BLUE, alpha=0.85)
    axes.set_xlim(0.5, len(values) + 0.5)
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="classes, in order", ylabel=label)
    return figure


@drawn
def histogram(values: np.ndarray, label: str) -> Figure:
    """How a number is spread over the classes."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    axes.hist(values, bins=min(20, max(5, len(values) // 4)), color=BLUE, alpha=0.85, rwidth=0.92)
    flag(axes, values.mean(), "mean")
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel=label, ylabel="classes")
    return figure


def flag(axes: Axes, x: float, label: str) -> None:
    axes.axvline(x, color=ORANGE, lw=1.4, ls="--")
    axes.text(x, 1.02, label, transform=axes.get_xaxis_transform(), color=ORANGE, fontsize=8, ha="center")


@drawn
def sureness(confidence: np.ndarray, right: np.ndarray) -> Figure:
    """How sure the model was (n,) where it was right and where it was wrong (n,)."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    bins = [5.0 * edge for edge in range(21)]
    parts = [100 * confidence[right], 100 * confidence[~right]]
    axes.hist(parts, bins=bins, stacked=True, color=[BLUE, ORANGE], label=["right", "wrong"], alpha=0.85, rwidth=0.92)
    figure.legend(loc="outside upper left", ncols=2)
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="confidence, %", ylabel="images")
    return figure


@drawn
def confusion(shares: np.ndarray, names: Sequence[str]) -> Figure:
    """Shares (C, C) of each true class (row) by prediction: right in blue, wrong in orange, errors drawn out."""
    right = np.eye(len(shares), dtype=bool)
    cells = tint(BLUE, shares)
    cells[~right] = tint(ORANGE, np.sqrt(shares))[~right]  # an error of 5 % must be seen beside hits of 90 %
    figure, axes = _matrix(cells, names)
    if len(names) <= 12:
        for (row, col), share in np.ndenumerate(shares):
            if share >= 0.0005:
                colour = "white" if cells[row, col, 3] > 0.75 else INK
                axes.text(col, row, f"{100 * share:.1f}", ha="center", va="center", color=colour, fontsize=7.5)
    axes.set(xlabel="predicted", ylabel="true")
    return figure


@drawn
def closeness(distances: np.ndarray, names: Sequence[str]) -> Figure:
    """Distances (C, C) between classes: the closer, the stronger; nothing on the diagonal."""
    apart = np.where(np.eye(len(distances), dtype=bool), np.nan, distances)
    finite = apart[np.isfinite(apart)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    cells = tint(BLUE, np.nan_to_num((high - apart) / (high - low) if high > low else apart * 0))
    return _matrix(cells, names)[0]


def tint(colour: str, strength: np.ndarray) -> np.ndarray:
    """One colour, as transparent as `strength` (0 to 1) is low: right on any background."""
    cells = np.empty((*strength.shape, 4))
    cells[..., :3] = matplotlib.colors.to_rgb(colour)
    cells[..., 3] = strength
    return cells


def _matrix(cells: np.ndarray, names: Sequence[str]) -> tuple[Figure, Axes]:
    """Square cells (C, C, 4) with class names where they fit, else class numbers by tens."""
    count = len(names)
    figure = Figure(figsize=(6.2, 6.2), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(cells, interpolation="none")
    ticks = range(count) if count <= LABELLED_CLASSES else range(0, count, max(10, count // 100 * 10))
    labels = [short(names[i], 16) if count <= LABELLED_CLASSES else str(i) for i in ticks]
    upright: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
    axes.set_xticks(ticks, labels, **(upright if max(map(len, labels), default=0) > 2 else {}))
    axes.set_yticks(ticks, labels)
    axes.tick_params(length=0 if count <= LABELLED_CLASSES else 3)
    axes.grid(False)
    axes.spines[:].set_visible(True)
    return figure, axes


@drawn
def outlier_law(squared: np.ndarray, degrees: int, threshold: float) -> Figure:
    """Histogram of squared Mahalanobis distances against the chi-squared density they would follow if normal."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    end = max(2 * threshold, 1.0)  # the tail beyond is long, thin, and counted in the text
    weights = np.full(len(squared), 60 / end / len(squared))
    heights, _, _ = axes.hist(squared, bins=60, range=(0, end), weights=weights, color=BLUE, alpha=0.55)
    if degrees:
        x = np.linspace(end / 200, end, 200)
        axes.plot(x, chi2.pdf(x, degrees), color=INK, lw=1.2)
        flag(axes, threshold, "threshold")
        axes.set_ylim(0, 1.1 * np.max(heights))  # the density of one or two degrees has no upper bound
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="squared Mahalanobis distance of the mean colour", ylabel="density")
    return figure


# --- images ----------------------------------------------------------------------------------------------------------


def sheet(images: np.ndarray, frames: Sequence[str], columns: int = 12, side: int = 96) -> Image.Image:
    """Images (m, 3, h, w) side by side, enlarged without blur, each in a frame of its colour."""
    gap, border = 6, 4
    cell = side + 2 * border + gap
    rows = -(-len(images) // columns)
    page = Image.new("RGB", (gap + cell * min(columns, max(len(images), 1)), gap + cell * max(rows, 1)), "white")
    for number, (image, colour) in enumerate(zip(images, frames, strict=True)):
        left, top = gap + number % columns * cell, gap + number // columns * cell
        page.paste(colour, (left, top, left + side + 2 * border, top + side + 2 * border))
        page.paste(picture(image, side), (left + border, top + border))
    return page


def picture(image: np.ndarray, side: int) -> Image.Image:
    """An image (3, h, w) uint8 made to fit a square: enlarged crisp, reduced smooth."""
    opened = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
    resample = Image.Resampling.NEAREST if max(opened.size) < side else Image.Resampling.BOX
    scale = side / max(opened.size)
    small = opened.resize([max(1, round(length * scale)) for length in opened.size], resample)
    square = Image.new("RGB", (side, side), "white")
    square.paste(small, ((side - small.width) // 2, (side - small.height) // 2))
    return square

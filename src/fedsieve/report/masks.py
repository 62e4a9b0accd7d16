"""Pictures of masks: where the active weights lie, and how far several masks agree, beside what chance would give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.mask.overlap import AROUND, block_of, blocks, expected_jaccard, jaccard_table
from fedsieve.report.figures import BLUE, GRID, INK, LABELLED_CLASSES, MUTED, ORANGE, PANEL, drawn, pen, short
from fedsieve.report.html import figure, render, save

WIDE = 9.9  # inches: a figure over the whole page, with letters as large as in two side by side
CELL = 0.235  # inches: the height of a row of cells
NUMBERED_COLUMNS = 16  # more cells than this in a row are too narrow for numbers
NUMBERED_MASKS = 12
LISTED = 40  # tensors around the blocks that are drawn; the table has them all
EVERY_MASK = 8  # up to so many masks each has its own pictures, and its own column
FEW = 10  # active weights: fewer make a Jaccard index that jumps


class MaskRow(NamedTuple):
    """One block of a mask."""

    block: str
    tensors: int
    weights: int
    active: int
    share: float
    emptied: int  # tensors emptied but for the floor
    frozen: int  # tensors without any active weight


class DiffRow(NamedTuple):
    """One block of two masks: active weights in both, in one only, their Jaccard index, and that of chance."""

    block: str
    both: int
    only_a: int
    only_b: int
    jaccard: float  # nan where neither has an active weight
    chance: float


class TensorRow(NamedTuple):
    """One tensor of a mask."""

    name: str
    block: str
    shape: tuple[int, ...]
    weights: int
    active: int
    share: float
    state: str  # "active", "emptied" but for the floor, or "frozen"


# --- numbers ---------------------------------------------------------------------------------------------------------


def tensor_rows(mask: Mask, floor: int = 1) -> list[TensorRow]:
    """The tensors of a mask, in its order. `emptied`: at most `floor` active weights, and not all of the tensor's."""
    rows = []
    for (name, active), shape, weights in zip(mask.counts().items(), mask.space.shapes, _sizes(mask), strict=True):
        emptied = active <= floor and active < weights
        state = "frozen" if not active else "emptied" if emptied else "active"
        rows.append(TensorRow(name, block_of(name), shape, weights, active, active / max(weights, 1), state))
    return rows


def mask_rows(mask: Mask, floor: int = 1) -> list[MaskRow]:
    """The blocks of a mask, in depth order."""
    tensors = tensor_rows(mask, floor)
    rows = []
    for block, indices in blocks(mask.space).items():
        own = [tensors[index] for index in indices]
        weights, active = sum(row.weights for row in own), sum(row.active for row in own)
        states = [row.state for row in own]
        share = active / max(weights, 1)
        rows.append(MaskRow(block, len(own), weights, active, share, states.count("emptied"), states.count("frozen")))
    return rows


def diff_rows(a: Mask, b: Mask) -> list[DiffRow]:
    """What two masks share in each block, in depth order. Chance: independent masks of the two densities there."""
    common, indices = (a & b).counts(), jaccard_table([a, b]).blocks
    rows = []
    for in_a, in_b in zip(mask_rows(a), mask_rows(b), strict=True):
        both = sum(common[a.space.names[index]] for index in blocks(a.space)[in_a.block])
        chance = expected_jaccard(in_a.share, in_b.share)
        index = float(indices[in_a.block][0, 1])
        rows.append(DiffRow(in_a.block, both, in_a.active - both, in_b.active - both, index, chance))
    return rows


@dataclass(frozen=True)
class Held:
    """How many masks hold each weight: counted tensor by tensor."""

    exactly: np.ndarray  # (tensors, n + 1): weights that exactly j of n masks hold
    only: np.ndarray  # (tensors, n): weights that this mask alone holds


def held(masks: Sequence[Mask]) -> Held:
    """How many of the masks hold each weight."""
    space = masks[0].space
    exactly = np.zeros((len(space.names), len(masks) + 1), dtype=np.int64)
    only = np.zeros((len(space.names), len(masks)), dtype=np.int64)
    for index, weights in enumerate(_sizes(masks[0])):
        parts = [mask.tensor_bits(index) for mask in masks]
        holders: np.ndarray = np.zeros(8 * len(parts[0]), dtype=np.uint16)
        for part in parts:
            holders += np.unpackbits(part)
        exactly[index] = np.bincount(holders, minlength=len(masks) + 1)
        exactly[index, 0] += weights - len(holders)  # the bytes at both ends also cover the neighbours
        alone = np.packbits(holders == 1)
        only[index] = [np.bitwise_count(part & alone).sum(dtype=np.int64) for part in parts]
    return Held(exactly, only)


@dataclass(frozen=True)
class Pairs:
    """Jaccard indices of all pairs of masks, m = n (n - 1) / 2, and what chance would give; nan where both are empty."""

    block_names: list[str]
    total: np.ndarray  # (m,)
    chance: np.ndarray  # (m,) at the overall densities
    allocated: np.ndarray  # (m,) by chance with the same share of every tensor
    blocks: np.ndarray  # (blocks, m)
    blocks_chance: np.ndarray
    tensors: np.ndarray  # (tensors, m)
    tensors_chance: np.ndarray


def pairs(masks: Sequence[Mask]) -> Pairs:
    """Every pair of masks, in the order of itertools.combinations."""
    space, upper = masks[0].space, np.triu_indices(len(masks), k=1)
    overlap = jaccard_table(masks)
    sizes = np.array(_sizes(masks[0]))
    counts = np.array([list(mask.counts().values()) for mask in masks]).reshape(len(masks), -1)
    shares = counts / np.maximum(sizes, 1)
    per_block = np.array([[row.share for row in mask_rows(mask)] for mask in masks])
    # What two random masks share when every tensor keeps its own count.
    both = [float(sizes @ (shares[i] * shares[j])) for i, j in combinations(range(len(masks)), 2)]
    either = [masks[i].count + masks[j].count - both[m] for m, (i, j) in enumerate(combinations(range(len(masks)), 2))]
    return Pairs(
        block_names=list(overlap.blocks),
        total=overlap.total[upper],
        chance=_chances(np.array([[mask.density] for mask in masks]))[0],
        allocated=np.array([b / e if e else np.nan for b, e in zip(both, either, strict=True)]),
        blocks=np.array([index[upper] for index in overlap.blocks.values()]),
        blocks_chance=_chances(per_block),
        tensors=np.array([overlap.tensors[name][upper] for name in space.names]),
        tensors_chance=_chances(shares),
    )


def _chances(shares: np.ndarray) -> np.ndarray:
    """Expected Jaccard indices (parts, m) of all pairs of n masks, from their densities (n, parts)."""
    return np.array([[expected_jaccard(a, b) for a, b in combinations(part, 2)] for part in shares.T.tolist()])


def holders_by_chance(densities: Sequence[float]) -> np.ndarray:
    """The shares (n + 1,) of weights that exactly j of n independent random masks of these densities hold."""
    shares = np.ones(1)
    for density in densities:
        shares = np.convolve(shares, [1 - density, density])
    return shares


def _sizes(mask: Mask) -> list[int]:
    return [end - start for start, end in pairwise(mask.space.offsets)]


# --- figures ---------------------------------------------------------------------------------------------------------


def allocation_figures(mask: Mask, floor: int = 1) -> dict[str, str]:
    """Where the active weights of a mask lie, as SVG: `tensors` (a map of every tensor) and `blocks` (bars)."""
    return {"tensors": tensor_map(tensor_rows(mask, floor)), "blocks": block_bars(mask_rows(mask, floor), mask.density)}


@drawn
def tensor_map(rows: Sequence[TensorRow]) -> Figure:
    """The active share of each tensor in per cent: blocks are columns, kinds of tensors are rows, the rest is a list."""
    inside = [row for row in rows if row.block not in AROUND]
    around = _largest([row for row in rows if row.block in AROUND], LISTED)
    columns = {block: number for number, block in enumerate(dict.fromkeys(row.block for row in inside))}
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(_kind(row) for row in inside))}
    labels = block_labels(list(columns))
    tall = max(map(len, labels), default=0) > 3
    height = 0.75 + CELL * max(len(kinds), len(around), 1) + (0.8 if tall else 0.2)
    figure = Figure(figsize=(WIDE, height), layout="constrained")
    wide = len(columns) <= NUMBERED_COLUMNS
    ratios = [max(len(columns), 1) * (1.0 if wide else 16 / len(columns)), 1.0]
    if columns and around:
        left, right = figure.subplots(1, 2, width_ratios=ratios)
    else:
        left = right = figure.subplots()
    if columns:
        _cells(left, [(columns[row.block], kinds[_kind(row)], row) for row in inside], numbered=wide)
        turned: dict[str, Any] = {"rotation": 90, "va": "top"} if tall else {}
        left.set_xticks(range(len(columns)), labels, **turned)
        left.set_yticks(range(len(kinds)), [short(kind, 32) for kind in kinds], color=INK)
        left.set_xlim(-0.5, len(columns) - 0.5)
        left.set_xlabel("block")
    if around:
        _cells(right, [(0, number, row) for number, row in enumerate(around)], numbered=True)
        right.yaxis.tick_right()
        right.set_xticks([])
        right.set_yticks(range(len(around)), [short(_plain(row.name), 32) for row in around], color=INK)
        right.set_xlim(*((-0.5, 0.5) if columns else (-0.5, 9.5)))
    for axes in {left, right}:
        axes.set_ylim(max(len(kinds), len(around), 1) - 0.5, -0.5)
        axes.tick_params(length=0)
        axes.grid(False)
        axes.spines[:].set_visible(False)
    _state_legend(figure, rows)
    return figure


def _cells(axes: Axes, cells: Sequence[tuple[int, int, TensorRow]], numbered: bool) -> None:
    gap = 0.05
    for column, line, row in cells:
        # The square root lets 1 % be seen beside 100 %.
        strength = row.share**0.5
        look: dict[str, Any] = {
            "active": {"facecolor": BLUE, "alpha": strength, "lw": 0},
            "emptied": {"facecolor": ORANGE, "alpha": 0.45, "lw": 0},
            "frozen": {"facecolor": "none", "edgecolor": MUTED, "lw": 0.5},
        }[row.state]
        axes.add_patch(Rectangle((column - 0.5 + gap, line - 0.5 + gap), 1 - 2 * gap, 1 - 2 * gap, **look))
        if numbered and row.state == "active":
            colour = "white" if strength > 0.75 else INK
            axes.text(
                column, line, _cell_text(row.share), ha="center", va="center_baseline", color=colour, fontsize=7.5
            )


def _cell_text(share: float) -> str:
    return "100" if share > 0.9995 else "<0.1" if share < 0.0005 else f"{100 * share:.1f}"


def _state_legend(figure: Figure, rows: Sequence[TensorRow]) -> None:
    states = [row.state for row in rows]
    handles = [
        Patch(facecolor=BLUE, alpha=0.6, label="active share, %"),
        Patch(facecolor=ORANGE, alpha=0.45, label=f"emptied but for the floor: {_tensors(states.count('emptied'))}"),
        Patch(facecolor="none", edgecolor=MUTED, lw=0.5, label=f"wholly frozen: {_tensors(states.count('frozen'))}"),
    ]
    present = [True, "emptied" in states, "frozen" in states]
    figure.legend(
        handles=[handle for handle, shown in zip(handles, present, strict=True) if shown],
        loc="outside upper left",
        ncols=3,
        handlelength=1.0,
        handleheight=1.0,
    )


@drawn
def block_bars(rows: Sequence[MaskRow], density: float) -> Figure:
    """Active weights of each block, and where every bar would end at the overall density."""
    figure, axes = _over_blocks([row.block for row in rows], height=4.4)  # as tall as the table beside it
    bars = axes.bar(range(len(rows)), [row.active for row in rows], width=0.72, color=BLUE, alpha=0.85, label="active")
    even = [density * row.weights for row in rows]
    label = f"at {100 * density:.3g} % in every block"
    x = np.arange(len(rows))
    level = axes.hlines(even, x - 0.45, x + 0.45, color=ORANGE, lw=1.6, label=label)
    figure.legend(handles=[bars, level], loc="outside upper left", ncols=2)
    axes.yaxis.set_major_formatter(lambda value, _: _amount(value))
    axes.set_ylabel("active weights")
    return figure


@drawn
def block_shares(shares: np.ndarray, names: Sequence[str]) -> Figure:
    """The active share (n, blocks) of every block in each mask; the page's legend names the masks."""
    figure, axes = _over_blocks(names)
    for number, line in enumerate(shares):
        colour, dash = pen(number)
        axes.plot(range(len(names)), 100 * line, color=colour, linestyle=dash, lw=1.4, marker="o", ms=3)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("active share, %")
    return figure


@drawn
def depth_curve(values: np.ndarray, chance: np.ndarray, names: Sequence[str]) -> Figure:
    """Jaccard indices (blocks, m) of m pairs by block: their mean, their range, and chance."""
    figure, axes = _over_blocks(names)
    x = np.arange(len(names))
    if values.shape[1] > 1:
        axes.fill_between(x, _reduced(np.nanmin, values), _reduced(np.nanmax, values), color=BLUE, alpha=0.16, lw=0)
    label = "Jaccard" if values.shape[1] == 1 else "Jaccard, mean and range of the pairs"
    axes.plot(x, _reduced(np.nanmean, values), color=BLUE, marker="o", ms=3.5, label=label)
    axes.plot(x, _reduced(np.nanmean, chance), color=ORANGE, ls="--", lw=1.4, label="by chance")
    figure.legend(loc="outside upper left", ncols=2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("Jaccard index")
    return figure


@drawn
def tensor_depths(values: np.ndarray, chance: np.ndarray, names: Sequence[str], few: np.ndarray) -> Figure:
    """Jaccard indices (tensors, m) of every tensor in depth order; those of `few` active weights are drawn hollow."""
    figure = Figure(figsize=(WIDE, 3.1), layout="constrained")
    axes = figure.add_subplot()
    x = np.arange(len(names))
    mean, expected = _reduced(np.nanmean, values), _reduced(np.nanmean, chance)
    if values.shape[1] > 1:
        low, high = _reduced(np.nanmin, values), _reduced(np.nanmax, values)
        axes.vlines(x[~few], low[~few], high[~few], color=BLUE, lw=1.2, alpha=0.35)
    size = 4.2 if len(names) <= 200 else 2.5
    label = "Jaccard, mean and range of the pairs" if values.shape[1] > 1 else "Jaccard"
    axes.plot(x[~few], mean[~few], "o", ms=size, color=BLUE, label=label)
    if few.any():
        label = f"fewer than {FEW} active weights in one"
        axes.plot(x[few], mean[few], "o", ms=0.7 * size, mfc="none", mec=MUTED, mew=0.7, label=label)
    axes.hlines(expected[~few], x[~few] - 0.6, x[~few] + 0.6, color=ORANGE, lw=1.4, label="by chance", zorder=3)
    axes.hlines(expected[few], x[few] - 0.5, x[few] + 0.5, color=ORANGE, lw=0.8, alpha=0.6)
    _mark_blocks(axes, [block_of(name) for name in names])
    figure.legend(loc="outside upper left", ncols=3)
    axes.set_ylim(-0.02 * axes.get_ylim()[1], None)
    axes.set(ylabel="Jaccard index", xlabel="tensors in depth order, by block")
    return figure


@drawn
def holder_bars(shares: np.ndarray, chance: np.ndarray) -> Figure:
    """The shares of weights that exactly 1, 2, ... n masks hold (n + 1,), and those of chance. None is left out."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    x = np.arange(1, len(shares))
    bars = axes.bar(x, 100 * shares[1:], width=0.72, color=BLUE, alpha=0.85, label="weights")
    level = axes.hlines(100 * chance[1:], x - 0.45, x + 0.45, color=ORANGE, lw=1.6, label="by chance")
    figure.legend(handles=[bars, level], loc="outside upper left", ncols=2)
    axes.set_xticks(x if len(x) <= 20 else x[:: len(x) // 10])
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="held by exactly so many masks", ylabel="share of all weights, %")
    return figure


@drawn
def pair_map(jaccard: np.ndarray, chance: np.ndarray, names: Sequence[str]) -> Figure:
    """Jaccard indices of the m pairs of n masks above the diagonal, those of chance below it."""
    n = len(names)
    figure = Figure(figsize=(PANEL[0], PANEL[0]), layout="constrained")
    axes = figure.add_subplot()
    size = 7.5 if n <= 6 else 6.5
    for (i, j), real, expected in zip(combinations(range(n), 2), jaccard, chance, strict=True):
        for row, column, value, colour in ((i, j, real, BLUE), (j, i, expected, ORANGE)):
            strength = 0.0 if np.isnan(value) else float(value) ** 0.5
            cell = Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, facecolor=colour, alpha=strength, lw=0)
            axes.add_patch(cell)
            if n <= NUMBERED_MASKS:
                text = "–" if np.isnan(value) else f"{value:.2f}" if n > 6 else f"{value:.3f}"
                ink = "white" if strength > 0.75 else INK
                axes.text(column, row, text, ha="center", va="center_baseline", color=ink, fontsize=size)
    ticks = range(n) if n <= LABELLED_CLASSES else range(0, n, 10)
    labels = [short(names[i], 16) if n <= LABELLED_CLASSES else str(i + 1) for i in ticks]
    turned: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
    axes.set_xticks(ticks, labels, **(turned if max(map(len, labels)) > 2 else {}))
    axes.set_yticks(ticks, labels)
    axes.set(xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5), aspect="equal")
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure


def _over_blocks(names: Sequence[str], height: float = PANEL[1]) -> tuple[Figure, Axes]:
    """Empty axes over the blocks in depth order."""
    figure = Figure(figsize=(PANEL[0], height), layout="constrained")
    axes = figure.add_subplot()
    labels = block_labels(names)
    step = -(-len(labels) // 30)  # more labels than this run into each other
    turned: dict[str, Any] = {"rotation": 90, "va": "top"} if max(map(len, labels), default=0) > 2 else {}
    axes.set_xticks(range(0, len(labels), step), labels[::step], **turned)
    axes.set_xlim(-0.7, len(labels) - 0.3)
    axes.grid(axis="x", visible=False)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("block")
    return figure, axes


def _mark_blocks(axes: Axes, owners: Sequence[str]) -> None:
    """Shade every other block behind tensors in depth order, and name each below its middle."""
    names = list(dict.fromkeys(owners))
    spans = [(owners.index(name), len(owners) - owners[::-1].index(name)) for name in names]
    for number, (start, end) in enumerate(spans):
        if number % 2:
            axes.axvspan(start - 0.5, end - 0.5, color=GRID, alpha=0.35, lw=0, zorder=0)
    labels = block_labels(names)
    # A label needs about 1 % of the width for each letter.
    shown = [end - start > 0.009 * len(owners) * len(label) for (start, end), label in zip(spans, labels, strict=True)]
    middles = [(start + end - 1) / 2 for start, end in spans]
    axes.set_xticks(
        [middle for middle, fits in zip(middles, shown, strict=True) if fits],
        [label for label, fits in zip(labels, shown, strict=True) if fits],
    )
    axes.set_xlim(-0.8, len(owners) - 0.2)
    axes.grid(axis="x", visible=False)
    axes.tick_params(axis="x", length=0)


def _reduced(reduce: Any, values: np.ndarray) -> np.ndarray:
    """`reduce` over the pairs (parts, m); nan where no pair has a value."""
    return np.array([reduce(row) if np.isfinite(row).any() else np.nan for row in values])


def block_labels(names: Sequence[str]) -> list[str]:
    """`blocks.3` is plainly 3 where all blocks are so named."""
    inside = [name for name in names if name not in AROUND]
    stems = {name.rpartition(".")[0] for name in inside}
    plain = len(stems) == 1 and all(name.rpartition(".")[2].isdigit() for name in inside)
    return [name.rpartition(".")[2] if plain else short(name, 20) for name in names]


def _kind(row: TensorRow) -> str:
    return _plain(row.name).removeprefix(f"{row.block}.")


def _plain(name: str) -> str:
    return name.removeprefix("backbone.")


def _largest(rows: Sequence[TensorRow], count: int) -> list[TensorRow]:
    kept = {row.name for row in sorted(rows, key=lambda row: -row.weights)[:count]}
    return [row for row in rows if row.name in kept]


def _amount(value: float) -> str:
    return f"{value / 1e6:g} M" if abs(value) >= 1e6 else f"{value / 1e3:g} k" if abs(value) >= 1e3 else f"{value:g}"


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' * (count != 1)}"


# --- pages -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Allocation:
    """One mask as a page shows it."""

    name: str
    mask: Mask
    floor: int = 1

    @cached_property
    def tensors(self) -> list[TensorRow]:
        return tensor_rows(self.mask, self.floor)

    @cached_property
    def blocks(self) -> list[MaskRow]:
        return mask_rows(self.mask, self.floor)

    @cached_property
    def drawings(self) -> dict[str, str]:
        return allocation_figures(self.mask, self.floor)

    @property
    def figures(self) -> dict[str, str]:
        return {name: figure(svg, f"active share of the {name} of {self.name}") for name, svg in self.drawings.items()}

    @property
    def emptied(self) -> int:
        return sum(row.emptied for row in self.blocks)

    @property
    def frozen(self) -> int:
        return sum(row.frozen for row in self.blocks)


def write_mask_page(masks: Mapping[str, Mask], out: Path, floor: int = 1) -> Path:
    """Writes the page of one mask, or of several side by side, to `out` (a .html file, or a folder for masks.html).

    Tensors with at most `floor` active weights are shown as emptied: the masks' min_active_per_tensor.
    """
    if not masks:
        raise FedsieveError("mask: no masks given. Name at least one file that calibration has saved")
    first = next(iter(masks))
    for name, mask in masks.items():
        try:
            mask.check(masks[first].space)
        except FedsieveError as error:
            raise FedsieveError(f"{name} and {first} cannot be compared: {error}") from None
    shown = [Allocation(name, mask, floor) for name, mask in masks.items()]
    equal = _equal(masks)
    distinct = len({mask.id for mask in masks.values()})
    page = render(
        "masks.html",
        shown=shown,
        equal=equal,
        distinct=distinct,
        space=masks[first].space,
        pens=[pen(number) for number in range(len(shown))],
        each=len(shown) <= EVERY_MASK,
        comparison=comparison(masks) if distinct > 1 else None,
    )
    return save(out if out.suffix == ".html" else out / "masks.html", page)


def _equal(masks: Mapping[str, Mask]) -> list[list[str]]:
    """The names of masks that are the same, together."""
    same: dict[str, list[str]] = {}
    for name, mask in masks.items():
        same.setdefault(mask.id, []).append(name)
    return [names for names in same.values() if len(names) > 1]


def comparison(masks: Mapping[str, Mask]) -> dict[str, Any]:
    """Everything the page says of several masks together."""
    names, values = list(masks), list(masks.values())
    space, owners = values[0].space, blocks(values[0].space)
    paired, counted = pairs(values), held(values)
    exactly = counted.exactly.sum(0)
    chance = holders_by_chance([mask.density for mask in values])
    shares = np.array([[row.share for row in mask_rows(mask)] for mask in values])
    counts = np.array([list(mask.counts().values()) for mask in values])
    drawings = {
        "shares": block_shares(shares, list(owners)),
        "by block": depth_curve(paired.blocks, paired.blocks_chance, list(owners)),
        "by tensor": tensor_depths(paired.tensors, paired.tensors_chance, space.names, counts.min(0) < FEW),
        "held": holder_bars(exactly / max(space.size, 1), chance),
    }
    if len(values) > 2:
        drawings["pairs"] = pair_map(paired.total, paired.chance, names)
    return {
        "drawings": drawings,
        "figures": {name: figure(svg, f"overlap of the masks: {name}") for name, svg in drawings.items()},
        "jaccard": float(np.nanmean(paired.total)),
        "range": (float(np.nanmin(paired.total)), float(np.nanmax(paired.total))),
        "chance": float(np.nanmean(paired.chance)),
        "allocated": float(np.nanmean(paired.allocated)),
        "pairs": len(paired.total),
        "exactly": [int(count) for count in exactly],
        "by_chance": [float(share) for share in chance],
        "diff": diff_rows(*values) if len(values) == 2 else [],
        "only": [int(count) for count in counted.only.sum(0)],
        "only_blocks": [
            (block, int(counted.exactly[own, -1].sum()), [int(count) for count in counted.only[own].sum(0)])
            for block, own in owners.items()
        ],
    }

"""Exact selection by score: which k of the active weights, or which groups of them, stay active.

Everything is computed on the host, so that a CPU and a GPU choose the same weights, ties included.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.errors import FedsieveError
from fedsieve.mask.overlap import blocks
from fedsieve.model.space import ParamSpace

Allocation = Literal["global", "tensor", "block"]
Granularity = Literal["weight", "row", "attention_head", "block"]

# An allocation gives each unit its own budget, so no group may reach over two of them.
_COARSER: dict[str, tuple[str, ...]] = {"global": (), "tensor": ("attention_head", "block"), "block": ("block",)}


def select(
    scores: Tensor,
    active: Tensor,
    k: int,
    space: ParamSpace,
    *,
    lowest: bool,
    allocation: Allocation = "global",
    granularity: Granularity = "weight",
    min_active_per_tensor: int = 1,
    maskable: Tensor | None = None,
    heads: Mapping[str, int] | None = None,
) -> Tensor:
    """The weights among `active` that stay active: bool (D,) on the device of `scores`, a subset of `active`.

    `weight` keeps exactly k, those of the lowest (or highest) scores, of equal ones the lower index. The best
    `min_active_per_tensor` active weights of each tensor are reserved first, then one threshold decides. The other
    granularities keep whole groups in the order of their mean score over active members, passing over those that no
    longer fit: at most k weights, and no further group would fit. Floors do not apply to them, since a wholly frozen
    tensor is what saves arithmetic; weights in no group are frozen.

    Allocation `tensor` and `block` give each tensor or block the same density of its `maskable` weights (default: of
    the active ones), by largest remainder, within floors and what is active.
    """
    check_request(allocation, granularity)
    chosen, among = _host(active, space), _host(active if maskable is None else maskable, space)
    if granularity != "weight":
        ids = group_ids(space, granularity, heads)
        keep = _select_groups(_values(scores, space, lowest), chosen & (ids >= 0), among, k, space, allocation, ids)
    else:
        keep = _select_weights(
            _values(scores, space, lowest), chosen, among, k, space, allocation, min_active_per_tensor
        )
    return torch.from_numpy(keep).to(scores.device)


def check_request(allocation: str, granularity: str) -> None:
    """Refuse an allocation whose units the groups would reach over."""
    if allocation not in _COARSER:
        raise FedsieveError(f'mask.allocation: "{allocation}" is not one of {", ".join(_COARSER)}')
    if granularity in _COARSER[allocation]:
        raise FedsieveError(
            f"mask.allocation: {allocation} does not go with granularity {granularity}: a group must lie inside one "
            f"{allocation}. Use allocation: global"
        )


def check_feasible(k: int, active: Tensor, space: ParamSpace, floor: int) -> None:
    """Refuse a k that cannot leave each tensor with its floor of active weights."""
    _check_floors(k, _floors(_host(active, space), space, floor), int(active.sum()), floor)


def apportion(k: int, sizes: Sequence[int], least: Sequence[int], most: Sequence[int]) -> list[int]:
    """k seats at one density of `sizes`, each unit between its `least` and `most`: exact, by largest remainder.

    The density d solves sum_i clip(d * sizes_i, least_i, most_i) = k, in whole fractions; what rounding down leaves
    goes to the largest remainders, of equal ones to the first. Needs sum(least) <= k <= sum(most).
    """
    units = [(size, low, high) for size, low, high in zip(sizes, least, most, strict=True) if high]

    def shares(density: Fraction) -> list[Fraction]:
        return [min(max(density * size, Fraction(low)), Fraction(high)) for size, low, high in units]

    # The total grows with the density and is linear between the points where a unit meets its bounds.
    points = sorted({Fraction(bound, size) for size, *bounds in units for bound in bounds})
    if not points:
        return [0] * len(sizes)
    right = bisect.bisect_left(points, k, key=lambda density: sum(shares(density)))
    density = points[right]
    if (excess := sum(shares(density)) - k) > 0:
        slope = (k + excess - sum(shares(points[right - 1]))) / (density - points[right - 1])
        density -= excess / slope
    exact = shares(density)
    seats = [math.floor(share) for share in exact]
    order = sorted(range(len(seats)), key=lambda unit: seats[unit] - exact[unit])
    for unit in order[: k - sum(seats)]:
        seats[unit] += 1
    filled = iter(seats)
    return [next(filled) if high else 0 for high in most]


def attention_heads(model: nn.Module) -> dict[str, int]:
    """The number of heads of each attention module with a joint `qkv` and a `proj` layer, by module name."""
    return {
        name: int(module.num_heads)  # type: ignore[arg-type]
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in ("num_heads", "qkv", "proj"))
    }


def group_ids(space: ParamSpace, granularity: Granularity, heads: Mapping[str, int] | None = None) -> np.ndarray:
    """The number of the group each weight belongs to, int64 (D,); -1 where it belongs to none.

    `row`: one output of a tensor (its first axis); each entry of a bias or norm is a row of its own.
    `attention_head`: a head's rows of q, k and v (weight and bias) and its input columns of the projection, together.
    Everything else, the projection's bias included, serves all heads and belongs to no group.
    `block`: a transformer block; what lies before and after makes groups of its own (`embed`, `norm`, `head`).
    """
    if granularity == "row":
        rows = [shape[0] if shape else 1 for shape in space.shapes]
        starts = np.cumsum([0, *rows])
        parts = [
            np.repeat(np.arange(start, start + count), math.prod(shape[1:]))
            for start, count, shape in zip(starts, rows, space.shapes, strict=False)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    ids = np.full(space.size, -1, dtype=np.int64)
    if granularity == "block":
        for number, indices in enumerate(blocks(space).values()):
            for index in indices:
                ids[space.offsets[index] : space.offsets[index + 1]] = number
        return ids
    if granularity != "attention_head":
        raise FedsieveError(f'mask.granularity: "{granularity}" is not one of weight, row, attention_head, block')
    first = 0
    for prefix, count in (heads or {}).items():
        for name, lead in ((f"{prefix}.qkv.weight", 3), (f"{prefix}.qkv.bias", 3), (f"{prefix}.proj.weight", 0)):
            if name not in space.names:
                continue
            index = space.names.index(name)
            shape, part = space.shapes[index], ids[space.offsets[index] : space.offsets[index + 1]]
            # (q k v, head, the rest) for qkv; (output, head, the head's inputs) for the projection.
            outer = lead or shape[0]
            if part.size % (outer * count):
                raise FedsieveError(f"mask.granularity: {name} of shape {shape} does not divide into {count} heads")
            part.reshape(outer, count, -1)[:] = np.arange(first, first + count)[:, None]
        first += count
    if (ids < 0).all():
        raise FedsieveError(
            "mask.granularity: attention_head finds no attention with joint qkv and proj layers among the trained "
            "weights. Use row, block or weight"
        )
    return ids


def _select_weights(
    values: np.ndarray, active: np.ndarray, among: np.ndarray, k: int, space: ParamSpace, allocation: str, floor: int
) -> np.ndarray:
    _check_number(values, active)
    counts, floors = _per_tensor(active, space), _floors(active, space, floor)
    _check_floors(k, floors, int(sum(counts)), floor)
    if k > sum(counts):
        raise FedsieveError(f"{k:,} weights cannot stay active where only {sum(counts):,} are")
    units = _units(space, allocation)
    sizes = [_per_tensor(among, space), floors, counts]
    seats = apportion(k, *([sum(per[index] for index in unit) for unit in units] for per in sizes))
    keep = np.zeros(space.size, dtype=np.bool_)
    for unit, number in zip(units, seats, strict=True):
        spans = [slice(*space.offsets[index : index + 2]) for index in unit]
        parts = [values[span][active[span]] for span in spans]
        kept = [_lowest(part, floors[index]) for part, index in zip(parts, unit, strict=True)]
        joined, reserved = np.concatenate(parts), np.concatenate(kept)
        free = ~reserved
        reserved[free] = _lowest(joined[free], number - sum(floors[index] for index in unit))
        for span, part in zip(spans, np.split(reserved, np.cumsum([len(part) for part in parts])[:-1]), strict=True):
            keep[span][active[span]] = part
    return keep


def _select_groups(
    values: np.ndarray,
    active: np.ndarray,
    among: np.ndarray,
    k: int,
    space: ParamSpace,
    allocation: str,
    ids: np.ndarray,
) -> np.ndarray:
    _check_number(values, active)
    members = ids[active]
    sizes = np.bincount(members)
    means = np.bincount(members, weights=values[active]) / np.maximum(sizes, 1)
    units = _units(space, allocation)
    unit_of = np.zeros(len(sizes), dtype=np.int64)
    for number, unit in enumerate(units):
        for index in unit:
            span = slice(*space.offsets[index : index + 2])
            unit_of[ids[span][active[span]]] = number
    counts, base = _per_tensor(active, space), _per_tensor(among & (ids >= 0), space)
    room = apportion(
        min(k, sum(counts)),
        [sum(base[index] for index in unit) for unit in units],
        [0] * len(units),
        [sum(counts[index] for index in unit) for unit in units],
    )
    kept = np.zeros(len(sizes), dtype=np.bool_)
    for group in np.argsort(means, kind="stable"):
        if 0 < sizes[group] <= room[unit_of[group]]:
            kept[group] = True
            room[unit_of[group]] -= sizes[group]
    if not kept.any():
        smallest = min(sizes[sizes > 0], default=0)
        raise FedsieveError(
            f"{k:,} weights are too few for any group: the smallest has {smallest:,}. Use a lower sparsity"
        )
    keep = np.zeros(space.size, dtype=np.bool_)
    keep[active] = kept[members]
    return keep


def _lowest(values: np.ndarray, k: int) -> np.ndarray:
    """The k lowest of `values`, of equal ones the first, as bools (n,)."""
    if k <= 0 or k >= len(values):
        return np.full(len(values), k > 0)
    threshold = _kth(values, k)
    keep = values < threshold
    keep[np.flatnonzero(values == threshold)[: k - np.count_nonzero(keep)]] = True
    return keep


def _kth(values: np.ndarray, k: int) -> np.generic:
    """The k-th lowest value (from 1), found 16 bits at a time.

    Linear for any input: quickselects are slow on the many equal scores of real models (np.partition: 10 times).
    """
    width = values.itemsize * 8
    bits = values.view(f"u{values.itemsize}")
    sign = bits.dtype.type(1 << (width - 1))
    # In this form floats are ordered as whole numbers are.
    keys = np.where(bits & sign, ~bits, bits | sign)
    for shift in range(width - 16, -1, -16):
        digits = (keys >> bits.dtype.type(shift)).astype(np.uint16)
        below = np.cumsum(np.bincount(digits, minlength=1 << 16))
        digit = int(np.searchsorted(below, k))
        k -= int(below[digit - 1]) if digit else 0
        keys = keys[digits == digit]
    key = keys[:1]
    return np.where(key & sign, key ^ sign, ~key).view(values.dtype)[0]


def _units(space: ParamSpace, allocation: str) -> list[list[int]]:
    """The tensors that share one budget."""
    if allocation == "block":
        return list(blocks(space).values())
    everything = range(len(space.names))
    return [[index] for index in everything] if allocation == "tensor" else [list(everything)]


def _per_tensor(active: np.ndarray, space: ParamSpace) -> list[int]:
    return [int(np.count_nonzero(active[a:b])) for a, b in zip(space.offsets, space.offsets[1:], strict=False)]


def _floors(active: np.ndarray, space: ParamSpace, floor: int) -> list[int]:
    return [min(floor, count) for count in _per_tensor(active, space)]


def _check_floors(k: int, floors: list[int], total: int, floor: int) -> None:
    if k < (need := sum(floors)):
        raise FedsieveError(
            f"{k:,} active weights are fewer than the {need:,} that min_active_per_tensor: {floor} reserves in "
            f"{np.count_nonzero(floors)} tensors; the smallest feasible density is {math.ceil(need / total * 1e6) / 1e6:g}. "
            "Use a lower sparsity or a lower floor"
        )


def _check_number(values: np.ndarray, active: np.ndarray) -> None:
    if wrong := np.count_nonzero(np.isnan(values) & active):
        raise FedsieveError(
            f"the scores of {wrong:,} active weights are not numbers (NaN); the model or the data is broken", 1
        )


def _host(active: Tensor, space: ParamSpace) -> np.ndarray:
    if active.dtype != torch.bool or tuple(active.shape) != (space.size,):
        raise FedsieveError(
            f"active weights are a bool vector of {space.size:,}, not {active.dtype} of shape {tuple(active.shape)}"
        )
    return active.detach().cpu().numpy()


def _values(scores: Tensor, space: ParamSpace, lowest: bool) -> np.ndarray:
    """The scores on the host, the wanted end first."""
    if tuple(scores.shape) != (space.size,):
        raise FedsieveError(f"scores of shape {tuple(scores.shape)} do not fit a space of {space.size:,} weights")
    scores = scores.detach().cpu()
    values = (scores if scores.dtype == torch.float64 else scores.float()).numpy()
    return values if lowest else -values

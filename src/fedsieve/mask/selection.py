"""Exact selection by score: which k of the active weights, or which groups of them, stay active.

A CPU and a GPU choose the same weights from the same scores, ties included.
"""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config import Allocation, Granularity
from fedsieve.errors import FedsieveError
from fedsieve.mask.overlap import blocks
from fedsieve.model.space import ParamSpace

# An allocation gives each unit its own budget, so no group may reach over two of them.
_COARSER: dict[str, tuple[str, ...]] = {"global": (), "tensor": ("attention_head", "block"), "block": ("block",)}
# timm modules whose qkv is ordered by head without saying so (`head_first`).
_BY_HEAD = ("tiny_vit", "efficientformer")
# Above this many bits (128 MiB), filling a budget exactly is given up.
_MOST_BITS = 1 << 30


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
    granularities keep whole groups, ordered by their mean score over active members: as many weights up to k as whole
    groups can have (see `fill`), of the best groups that give so many. Floors do not apply to them, since a wholly
    frozen tensor is what saves arithmetic; weights in no group are frozen.

    Allocation `tensor` and `block` give each tensor or block the same density of its `maskable` weights (default: of
    the active ones), by largest remainder, within floors and what is active.
    """
    check_request(allocation, granularity)
    values, chosen = _values(scores, space, lowest), _checked(active, space).to(scores.device)
    among = chosen if maskable is None else chosen | _checked(maskable, space).to(scores.device)
    _check_number(values, chosen)
    if granularity == "weight":
        return _select_weights(values, chosen, among, k, space, allocation, min_active_per_tensor)
    ids = group_ids(space, granularity, heads)
    host = [tensor.cpu().numpy() for tensor in (values, chosen, among)]
    keep = _select_groups(host[0], host[1] & (ids >= 0), host[2], k, space, allocation, ids)
    return torch.from_numpy(keep).to(scores.device)


def check_request(allocation: str, granularity: str) -> None:
    """Refuse an allocation whose units the groups would reach over."""
    if allocation not in _COARSER:
        raise FedsieveError(f'mask.allocation: "{allocation}" is not one of {", ".join(_COARSER)}')
    if granularity in _COARSER[allocation]:
        reason = (
            "a block is kept or frozen whole, so blocks cannot all have the same density"
            if granularity == allocation
            else f"a group must lie inside one {allocation}"
        )
        raise FedsieveError(
            f"mask.allocation: {allocation} does not go with granularity {granularity}: {reason}. Use allocation: global"
        )


def can_last(
    k: int,
    active: Tensor,
    space: ParamSpace,
    *,
    granularity: Granularity = "weight",
    min_active_per_tensor: int = 1,
    heads: Mapping[str, int] | None = None,
) -> Tensor:
    """The active weights that can still be so when k are left; refused where k is too small for any choice.

    A group of more than k weights cannot last. Kept for a while it would only crowd out those that can, until at the
    end nothing fits. A block that cannot last and holds most of the weights is refused: what is left is no model to
    choose from, and often the names tell no blocks apart.
    """
    if granularity == "weight":
        floors = _floors(_per_tensor(_checked(active, space), space), min_active_per_tensor)
        _check_floors(k, floors, int(active.count_nonzero()), min_active_per_tensor)
        return active
    chosen = _checked(active, space).cpu().numpy()
    ids = group_ids(space, granularity, heads)
    sizes = np.bincount(ids[chosen & (ids >= 0)], minlength=ids.max(initial=-1) + 1)
    # The last entry answers for -1, no group.
    lasting = chosen & np.append(sizes <= k, False)[ids]
    if not lasting.any():
        _refuse_groups(k, sizes)
    largest = int(sizes.argmax())
    if granularity == "block" and sizes[largest] > max(k, sizes.sum() / 2):
        share = f"{sizes[largest] / sizes.sum():.0%}".replace("%", " %")
        raise FedsieveError(
            f'mask.granularity: block: the group "{list(blocks(space))[largest]}" holds {share} of the maskable weights, '
            f"more than the {k:,} that may stay active, so most of the model could never train. "
            "Use granularity: row or weight, or a lower sparsity"
        )
    return torch.from_numpy(lasting)


def apportion(k: int, sizes: Sequence[int], least: Sequence[int], most: Sequence[int]) -> list[int]:
    """k seats at one density of `sizes`, each unit between its `least` and `most`: exact, by largest remainder.

    The density d solves sum_i clip(d * sizes_i, least_i, most_i) = k, in whole fractions; what rounding down leaves
    goes to the largest remainders, of equal ones to the first. Needs sum(least) <= k <= sum(most).
    """
    units = [(size, low, high) for size, low, high in zip(sizes, least, most, strict=True) if high]

    def shares(density: Fraction) -> list[Fraction]:
        return [min(max(density * size, Fraction(low)), Fraction(high)) for size, low, high in units]

    def total(density: Fraction) -> Fraction:
        return sum(shares(density), start=Fraction(0))

    # The total grows with the density and is linear between the points where a unit meets its bounds.
    points = sorted({Fraction(bound, size) for size, *bounds in units for bound in bounds})
    if not points:
        return [0] * len(sizes)
    right = bisect.bisect_left(points, Fraction(k), key=total)
    density = points[right]
    if (excess := total(density) - k) > 0:
        slope = (k + excess - total(points[right - 1])) / (density - points[right - 1])
        density -= excess / slope
    exact = shares(density)
    seats = [math.floor(share) for share in exact]
    order = sorted(range(len(seats)), key=lambda unit: seats[unit] - exact[unit])
    for unit in order[: k - sum(seats)]:
        seats[unit] += 1
    filled = iter(seats)
    return [next(filled) if high else 0 for high in most]


def fill(sizes: Sequence[int], room: int) -> list[int]:
    """The places of groups, given best first, that together come as near to `room` as any can without passing it.

    Of all such choices the one with the best group, then the next best, and so on. Exact, by the sums that the groups
    still to come can reach, kept as the bits of one number for each group. Where these are too many (a large model's
    rows), groups are taken in order, passing over those that no longer fit: with many small groups little stays empty.
    """
    unit = math.gcd(*sizes) or 1
    sizes, room = [size // unit for size in sizes], room // unit
    exact = len(sizes) * room <= _MOST_BITS
    reach = [1]
    for size in reversed(sizes if exact else []):
        reach.append((reach[-1] | reach[-1] << size) & ((2 << room) - 1) if size <= room else reach[-1])
    left = reach.pop().bit_length() - 1 if exact else room
    kept = []
    for place, size in enumerate(sizes):
        rest = reach.pop() if exact else -1  # every bit of -1 is set
        if size <= left and rest >> (left - size) & 1:
            kept.append(place)
            left -= size
    return kept


def attention_heads(model: nn.Module) -> dict[str, int]:
    """The number of heads of each attention module with a joint `qkv` and a `proj` layer, by module name.

    Modules that order the joint layer by head (timm's `head_first`, and some that do not say so) are left out, as are
    those whose joint layer is not q, k and v of equal size: their rows lie elsewhere.
    """
    return {name: int(module.num_heads) for name, module in model.named_modules() if _splits_in_three(module)}


def _splits_in_three(module: nn.Module) -> bool:
    """Whether the outputs of `qkv` are (q k v, head, the rest)."""
    layers = [getattr(module, name, None) for name in ("qkv", "proj")]
    # LoRA keeps the layer it stands beside one name further down.
    qkv, proj = (getattr(getattr(layer, "base_layer", layer), "weight", None) for layer in layers)
    if not hasattr(module, "num_heads") or not isinstance(qkv, Tensor) or not isinstance(proj, Tensor):
        return False
    by_head = getattr(module, "head_first", False) or type(module).__module__.rpartition(".")[2] in _BY_HEAD
    return not by_head and proj.ndim > 1 and len(qkv) == 3 * proj.shape[1]


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
    # LoRA keeps the layer it stands beside one name further down.
    places = {name.replace(".base_layer.", "."): index for index, name in enumerate(space.names)}
    first = 0
    for prefix, count in (heads or {}).items():
        for suffix in ("qkv.weight", "qkv.bias", "proj.weight"):
            if (name := f"{prefix}.{suffix}") not in places:
                continue
            index = places[name]
            shape, part = space.shapes[index], ids[space.offsets[index] : space.offsets[index + 1]]
            outputs, features = (shape[0], shape[1]) if suffix == "proj.weight" else (3, shape[0] // 3)
            if features % count:
                raise FedsieveError(f"mask.granularity: {name} of shape {shape} does not divide into {count} heads")
            # (q k v, head, the rest) for qkv; (output, head, the head's inputs) for the projection.
            part.reshape(outputs, count, -1)[:] = np.arange(first, first + count)[:, None]
        first += count
    if (ids < 0).all():
        raise FedsieveError(
            "mask.granularity: attention_head finds no attention with joint qkv and proj layers among the trained "
            "weights. Use row, block or weight"
        )
    return ids


def _select_weights(
    values: Tensor, active: Tensor, among: Tensor, k: int, space: ParamSpace, allocation: str, floor: int
) -> Tensor:
    counts = _per_tensor(active, space)
    floors = _floors(counts, floor)
    _check_floors(k, floors, int(among.count_nonzero()), floor)
    if k > sum(counts):
        raise FedsieveError(f"{k:,} weights cannot stay active where only {sum(counts):,} are")
    units = _units(space, allocation)
    sizes = [_per_tensor(among, space), floors, counts]
    seats = apportion(k, *([sum(per[index] for index in unit) for unit in units] for per in sizes))
    keep = torch.zeros_like(active)
    for unit, number in zip(units, seats, strict=True):
        # Places, not bools: gathering by them is several times faster.
        parts = [slice(*space.offsets[index : index + 2]) for index in unit]
        whole = len(unit) == len(counts)
        places = true_places(active) if whole else torch.cat([true_places(active[p]).add_(p.start) for p in parts])
        lengths, least = ([per[index] for index in unit] for per in (counts, floors))
        keep.index_fill_(0, places[_best_with_floors(values.index_select(0, places), number, lengths, least)], True)
    return keep


def _best_with_floors(values: Tensor, k: int, lengths: Sequence[int], floors: Sequence[int]) -> Tensor:
    """The places of the best k values after the best of each of the parts they lie in, as many as its floor says.

    Where the best of all leave no part below its floor, they are the answer. Otherwise the best of those parts that were are
    reserved, and only theirs: the others' are among the best of the rest anyway.
    """
    ends = list(itertools.accumulate(lengths, initial=0))
    reserved: dict[int, Tensor] = {}
    while True:
        kept = torch.zeros_like(values, dtype=torch.bool)
        for places in reserved.values():
            kept.index_fill_(0, places, True)
        free = true_places(~kept) if reserved else None
        best = _best(values, free, k - sum(map(len, reserved.values())))
        kept.index_fill_(0, best, True)
        host = kept.cpu().numpy()
        short = [
            part for part, floor in enumerate(floors) if np.count_nonzero(host[slice(*ends[part : part + 2])]) < floor
        ]
        if not short:
            return true_places(kept)
        for part in short:
            first, last = ends[part : part + 2]
            reserved[part] = _best(values[first:last], None, floors[part]).add_(first)


def _select_groups(
    values: np.ndarray,
    active: np.ndarray,
    among: np.ndarray,
    k: int,
    space: ParamSpace,
    allocation: str,
    ids: np.ndarray,
) -> np.ndarray:
    members = ids[active]
    sizes = np.bincount(members)
    means = np.bincount(members, weights=values[active]) / np.maximum(sizes, 1)
    units = _units(space, allocation)
    unit_of = np.zeros(len(sizes), dtype=np.int64)
    for number, unit in enumerate(units[1:], start=1):
        for index in unit:
            span = slice(*space.offsets[index : index + 2])
            unit_of[ids[span][active[span]]] = number
    counts, base = (_per_tensor(torch.from_numpy(part), space) for part in (active, among & (ids >= 0)))
    room = apportion(
        min(k, sum(counts)),
        [sum(base[index] for index in unit) for unit in units],
        [0] * len(units),
        [sum(counts[index] for index in unit) for unit in units],
    )
    kept = np.zeros(len(sizes), dtype=np.bool_)
    order = np.argsort(means, kind="stable")
    order = order[sizes[order] > 0]
    for number, budget in enumerate(room):
        mine = order[unit_of[order] == number]
        kept[mine[fill(sizes[mine].tolist(), budget)]] = True
    if not kept.any():
        _refuse_groups(k, sizes)
    keep = np.zeros(space.size, dtype=np.bool_)
    keep[active] = kept[members]
    return keep


def _best(scores: Tensor, places: Tensor | None, k: int) -> Tensor:
    """Of `places` (default: all), the k where the scores are lowest, of equal ones the first."""
    values = scores if places is None else scores.index_select(0, places)
    if k <= 0 or k >= len(values):
        found = torch.arange(len(values) if k > 0 else 0, device=scores.device)
    else:
        threshold = values.min() if k == 1 else kth(values, k)
        below = true_places(values < threshold)
        found = torch.cat([below, true_places(values == threshold)[: k - len(below)]])
    return found if places is None else places.index_select(0, found)


def true_places(chosen: Tensor) -> Tensor:
    """Where a bool vector is true, ascending."""
    if chosen.is_cuda:
        return chosen.nonzero().flatten()
    return torch.from_numpy(np.flatnonzero(chosen.numpy()))  # several times faster than torch's own


def kth(scores: Tensor, k: int) -> Tensor:
    """The k-th lowest value (from 1); on a CPU found 16 bits at a time.

    Linear for any input: quickselects are slow on the many equal scores of real models (np.partition: 10 times).
    """
    if scores.is_cuda:
        return scores.sort().values[k - 1]  # kthvalue has one block of threads look at all of them
    values = scores.numpy()
    keys = ordered(values)
    for shift in range(values.itemsize * 8 - 16, -1, -16):
        digits = (keys >> keys.dtype.type(shift)).astype(np.uint16)
        below = np.cumsum(np.bincount(digits, minlength=1 << 16))
        digit = int(np.searchsorted(below, k))
        k -= int(below[digit - 1]) if digit else 0
        places = np.flatnonzero(digits == digit)
        values, keys = values[places], keys[places]
    return torch.from_numpy(values)[0]


def ordered(values: np.ndarray) -> np.ndarray:
    """Floats as unsigned whole numbers of the same width in the same order (-0 before 0)."""
    bits = values.view(f"i{values.itemsize}")
    # Negative floats count backwards: all their bits flip. Positive ones only need to come after: the sign flips.
    sign = np.iinfo(bits.dtype).min
    return (bits ^ (bits >> (values.itemsize * 8 - 1) | sign)).view(f"u{values.itemsize}")


def _units(space: ParamSpace, allocation: str) -> list[list[int]]:
    """The tensors that share one budget."""
    if allocation == "block":
        return list(blocks(space).values())
    everything = range(len(space.names))
    return [[index] for index in everything] if allocation == "tensor" else [list(everything)]


def _per_tensor(active: Tensor, space: ParamSpace) -> list[int]:
    host = active.cpu().numpy()
    return [int(np.count_nonzero(host[a:b])) for a, b in zip(space.offsets, space.offsets[1:], strict=False)]


def _floors(counts: list[int], floor: int) -> list[int]:
    return [min(floor, count) for count in counts]


def _check_floors(k: int, floors: list[int], total: int, floor: int) -> None:
    if k < (need := sum(floors)):
        raise FedsieveError(
            f"{k:,} active weights are fewer than the {need:,} that min_active_per_tensor: {floor} reserves in "
            f"{np.count_nonzero(floors)} tensors; the smallest feasible density is {math.ceil(need / total * 1e6) / 1e6:g}. "
            "Use a lower sparsity or a lower floor"
        )


def _refuse_groups(k: int, sizes: np.ndarray) -> NoReturn:
    smallest = min(sizes[sizes > 0], default=0)
    raise FedsieveError(
        f"{k:,} active weights are too few for any group: the smallest has {smallest:,}. "
        "Use a lower sparsity or a finer granularity"
    )


def _check_number(values: Tensor, active: Tensor) -> None:
    if wrong := int((values.isnan() & active).count_nonzero()):
        raise FedsieveError(
            f"the scores of {wrong:,} active weights are not numbers (NaN); the model or the data is broken", 1
        )


def _checked(active: Tensor, space: ParamSpace) -> Tensor:
    if active.dtype != torch.bool or tuple(active.shape) != (space.size,):
        raise FedsieveError(
            f"active weights are a bool vector of {space.size:,}, not {active.dtype} of shape {tuple(active.shape)}"
        )
    return active.detach()


def _values(scores: Tensor, space: ParamSpace, lowest: bool) -> Tensor:
    """The scores, the wanted end first."""
    if tuple(scores.shape) != (space.size,):
        raise FedsieveError(f"scores of shape {tuple(scores.shape)} do not fit a space of {space.size:,} weights")
    # Whole numbers above 2**24 would be rounded together in float32.
    narrow = scores.dtype != torch.float64 and scores.dtype.is_floating_point
    values = scores.detach().float() if narrow else scores.detach().double()
    return values if lowest else -values

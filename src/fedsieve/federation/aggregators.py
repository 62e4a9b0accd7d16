"""Robust aggregation: what a server makes of updates when some of its clients are hostile or broken.

Median and trimmed mean (Yin et al. 2018), Krum and multi-Krum (Blanchard et al. 2017), the geometric median (Pillutla
et al. 2022) and norm bounding (Sun et al. 2019), each also after mixing nearest neighbours (Allouah et al. 2023), which
brings honest clients that hold different data together. Updates are a (C, k) tensor or a sequence of C rows, in the memory of
any device or in mapped files, and are read in blocks of coordinates: beside them there is room for the result and, on a
GPU, half a gigabyte. The geometric median and norm bounding heed the clients' weights. The other rules count every
client once, since a hostile one may claim any number of examples.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedsieve.errors import FedsieveError, did_you_mean

Kind = Literal["median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "norm_bound"]
Rows = Tensor | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Mixed:
    """C updates that are means of others: `shares`, (C, C), times these. They are made block by block, and never kept."""

    updates: Rows
    shares: Tensor

    def __len__(self) -> int:
        return len(self.updates)


Updates = Rows | Mixed


@dataclass(frozen=True)
class Robust:
    """What the rules can be told."""

    share: float = 0.2  # trimmed_mean: of the clients, left out at either end of each coordinate
    f: int = 1  # krum, multi_krum: how many clients may be hostile
    m: int | None = None  # multi_krum: how many updates are averaged; default: all but f
    mix: int | None = None  # any rule: how many clients may be hostile, where updates are mixed first
    limit: float | Literal["median"] = "median"  # norm_bound: the largest norm; default: the median of all norms


def aggregate(kind: str, rows: Rows, weights: Tensor, settings: Robust = Robust()) -> Tensor:
    """One update, (k,) in float64, from those of C clients with weights (C,). NaN and infinity are refused."""
    check(kind, len(rows), settings)
    updates: Updates = rows if settings.mix is None else mixed(rows, settings.mix)
    match kind:
        case "median":
            return median(updates)
        case "trimmed_mean":
            return trimmed_mean(updates, settings.share)
        case "krum":
            return krum(updates, settings.f)
        case "multi_krum":
            return multi_krum(updates, settings.f, settings.m)
        case "geometric_median":
            return geometric_median(updates, weights)
        case _:
            return norm_bound(updates, weights, settings.limit)


def check(kind: str, count: int, settings: Robust) -> None:
    """Refuse a rule that does not exist, or that cannot work with `count` updates."""
    if kind not in get_args(Kind):
        allowed = get_args(Kind)
        raise FedsieveError(f'"{kind}" is no robust rule.{did_you_mean(kind, allowed)} Allowed: {", ".join(allowed)}')
    if count == 0:
        raise FedsieveError(f"{kind}: there are no updates", 1)
    if settings.mix is not None and count < 2 * settings.mix + 1:
        raise FedsieveError(
            f"{kind}: mix = {settings.mix} hostile clients take at least 2 mix + 1 = {2 * settings.mix + 1} updates: the honest "
            f"ones must be more. With {count} mix up to {(count - 1) // 2} works"
        )
    if kind == "trimmed_mean" and 2 * _dropped(settings.share, count) >= count:
        raise FedsieveError(
            f"trimmed_mean: share {settings.share:g} leaves out {_dropped(settings.share, count)} of {count} updates "
            f"at either end, so that none is left. With {count} updates a share up to "
            f"{math.floor(100 * ((count - 1) // 2) / count) / 100:g} works; median leaves out the most"
        )
    if kind in ("krum", "multi_krum") and count < 2 * settings.f + 3:
        works = f"f up to {(count - 3) // 2} works" if count >= 3 else "neither krum nor multi_krum works"
        raise FedsieveError(
            f"{kind}: f = {settings.f} hostile clients take at least 2 f + 3 = {2 * settings.f + 3} updates. With "
            f"{count} {works}; median takes any number"
        )
    if kind == "multi_krum" and not 1 <= (settings.m or 1) <= count - settings.f:
        raise FedsieveError(
            f"multi_krum: m = {settings.m} of {count} updates would take in some of the f = {settings.f} hostile ones. "
            f"m from 1 to {count - settings.f} works"
        )


def kept_out(kind: str, count: int, settings: Robust) -> int:
    """How many hostile ones among `count` updates a rule, as it is set, can leave aside; norm bounding only shortens them."""
    most = (count - 1) // 2 if settings.mix is None else settings.mix
    match kind:
        case "trimmed_mean":
            return min(most, _dropped(settings.share, count))
        case "krum":
            return min(most, settings.f)
        case "multi_krum":
            return min(most, count - (settings.m or count - settings.f))
        case "norm_bound":
            return 0
        case _:
            return most


def mixed(updates: Rows, f: int) -> Mixed:
    """For every update the mean of the C - f nearest to it, itself among them; ties go to the first.

    Honest clients that differ by their data come to lie close together, so that a rule that looks for a crowd finds their
    mean instead of the most usual of them. A mean of C - f holds at most as many hostile updates as lie that near.
    """
    count = len(updates)
    nearest = _squared_distances(_products(updates)).sort(dim=1, stable=True).indices[:, : count - f]
    shares = torch.zeros(count, count, dtype=torch.float64).scatter_(1, nearest, 1 / (count - f))
    return Mixed(updates, shares)


def median(updates: Updates) -> Tensor:
    """The median of each coordinate; of an even number, the mean of the middle two."""
    return _without_ends(updates, (len(updates) - 1) // 2)


def trimmed_mean(updates: Updates, share: float) -> Tensor:
    """The mean of each coordinate without its lowest and its highest values, a `share` of all (rounded up) each."""
    return _without_ends(updates, _dropped(share, len(updates)))


def krum(updates: Updates, f: int) -> Tensor:
    """The update with the least sum of squared distances to its C - f - 2 nearest others; ties go to the first."""
    return multi_krum(updates, f, 1)


def multi_krum(updates: Updates, f: int, m: int | None = None) -> Tensor:
    """The mean of the m updates that Krum ranks first; default: of all but f."""
    count = len(updates)
    squares = _squared_distances(_products(updates)).fill_diagonal_(math.inf)
    scores = squares.sort(1).values[:, : count - f - 2].sum(1)
    chosen = scores.sort(stable=True).indices[: m or count - f]
    return _combined(updates, torch.zeros(count, dtype=torch.float64).scatter_(0, chosen, 1 / len(chosen)))


def geometric_median(updates: Updates, weights: Tensor) -> Tensor:
    """The point with the least weighted mean distance to all updates.

    Newton's steps lead there, with distances smoothed half as much at each. It is the nearest update if that weighs more
    than all others pull (Vardi and Zhang 2000); if not, distances are smooth around it, and a few plain steps end there.
    Every step ends in a sum of updates, so it is known by C coefficients, and its distances follow from the updates'
    scalar products: the updates are read twice, however many steps there are.
    """
    products, shares = _products(updates), _shares(weights)
    norms = products.diagonal().sqrt()
    typical = _weighted_median(norms, shares).clamp(min=1e-100)
    coefficients = _shares(shares / norms.maximum(typical))  # a start that no minority can carry away
    for halvings in range(24):
        coefficients = _newton(products, shares, coefficients, 0.5**halvings * typical)
    nearest = torch.zeros_like(shares)
    nearest[_around(products, coefficients).diagonal().argmin()] = 1
    around = _around(products, nearest)
    distances = around.diagonal().clamp(min=0).sqrt()
    pulls = torch.where(distances > 1e-7 * typical, shares / distances, 0)
    if pulls @ around @ pulls < (1 - 1e-9) * shares[pulls == 0].sum() ** 2:
        return _combined(updates, nearest)
    for _ in range(4):
        coefficients = _newton(products, shares, coefficients, 1e-8 * typical)
    return _combined(updates, coefficients)


def norm_bound(updates: Updates, weights: Tensor, limit: float | Literal["median"] = "median") -> Tensor:
    """The weighted mean of updates that are first shortened to the L2 norm `limit`."""
    squares = torch.zeros(len(updates), dtype=torch.float64)
    for _, block in _blocks(updates):
        squares += block.double().square().sum(1).cpu()
    norms = squares.sqrt()
    bound = norms.median().item() if limit == "median" else limit
    return _combined(updates, _shares(weights) * torch.where(norms > bound, bound / norms, 1.0))


def _dropped(share: float, count: int) -> int:
    return math.ceil(share * count - 1e-9)  # 0.1 * 30 is a little more than 3


def _shares(weights: Tensor) -> Tensor:
    weights = weights.double().cpu()
    return weights / weights.sum()


def _weighted_median(values: Tensor, shares: Tensor) -> Tensor:
    """The least of the values that at least half of the weight does not exceed."""
    ascending, order = values.sort()
    return ascending[(shares[order].cumsum(0) < 0.5 - 1e-9).sum()]


def _around(products: Tensor, coefficients: Tensor) -> Tensor:
    """The scalar products, with the sum of updates times `coefficients` as the origin."""
    toward = products @ coefficients
    return products - toward[:, None] - toward + coefficients @ toward


def _newton(products: Tensor, shares: Tensor, coefficients: Tensor, smoothing: Tensor) -> Tensor:
    """Where the mean distance (squares of distances and `smoothing` add up) is less: a step of Newton's, or a part of it."""
    around = _around(products, coefficients)
    distances = (around.diagonal().clamp(min=0) + smoothing**2).sqrt()
    pulls = shares / distances
    cosines = around / distances / distances[:, None]
    hessian = pulls.sum() * torch.eye(len(pulls), dtype=torch.float64) * (1 + 1e-9) - pulls[:, None] * cosines
    step = torch.linalg.solve(hessian, shares) / distances
    along = around @ step
    sizes = 0.5 ** torch.arange(40, dtype=torch.float64)[:, None]
    changes = sizes**2 * (step @ along) - 2 * sizes * along  # of squared distances
    rises = changes / (distances + (distances**2 + changes).clamp(min=0).sqrt()) @ shares
    size = sizes[(rises <= rises.min() + 1e-4 * smoothing).int().argmax()]  # the largest that is as good as any
    return coefficients + size * (step - step.sum() * coefficients)


def _without_ends(updates: Updates, dropped: int) -> Tensor:
    kept = slice(dropped, len(updates) - dropped)
    return _by_block(updates, lambda block: _sorted(block)[kept].mean(0, dtype=torch.float64))


def _sorted(block: Tensor) -> Tensor:
    """Each coordinate's values in ascending order."""
    if block.device.type == "cpu":  # numpy sorts many short columns eight times as fast
        return torch.from_numpy(np.sort(block.numpy(), axis=0))
    return block.sort(0).values


def _combined(updates: Updates, coefficients: Tensor) -> Tensor:
    """The sum of the updates times their coefficients."""
    coefficients = coefficients.to(_first(updates).device, torch.float64)
    return _by_block(updates, lambda block: coefficients @ block.double())


def _products(updates: Updates) -> Tensor:
    """All scalar products, (C, C).

    In float64: a huge hostile update can then neither overflow nor take digits from what honest ones have among them,
    and distances between updates that are nearly the same survive the difference of two products.
    """
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for _, block in _blocks(updates):
        block = block.double()
        total += (block @ block.T).cpu()
    return total


def _squared_distances(products: Tensor) -> Tensor:
    norms = products.diagonal()
    return (norms[:, None] + norms - 2 * products).clamp(min=0)


def _by_block(updates: Updates, rule: Callable[[Tensor], Tensor]) -> Tensor:
    """What a rule makes of (C, w) values at a time, (k,) in all."""
    result = torch.empty_like(_first(updates), dtype=torch.float64)
    for part, block in _blocks(updates):
        result[part] = rule(block)
    return result


def _blocks(updates: Updates, values: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Some coordinates at a time, and what all updates have there, (C, w): so many values in all."""
    updates, shares = (updates.updates, updates.shares) if isinstance(updates, Mixed) else (updates, None)
    first = updates[0]
    values = values or (2**20 if first.device.type == "cpu" else 2**24)  # near a CPU's caches, or to keep a GPU busy
    width = max(1, values // len(updates))
    for start in range(0, len(first), width):
        part = slice(start, start + width)
        block = updates[:, part] if isinstance(updates, Tensor) else torch.stack([row[part] for row in updates])
        finite = block.abs().amax(1).isfinite()
        if not finite.all():
            rows = ", ".join(map(str, (~finite).nonzero().flatten().tolist()))
            raise FedsieveError(f"NaN or infinity in update {rows}: such replies are to be refused before", 1)
        yield part, block if shares is None else shares.to(block.device) @ block.double()


def _first(updates: Updates) -> Tensor:
    return updates.updates[0] if isinstance(updates, Mixed) else updates[0]

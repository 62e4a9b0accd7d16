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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.config import AggregatorChoice, dropped
from fedsieve.errors import FedsieveError
from fedsieve.foreign import called, expect

Rows = Tensor | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Mixed:
    """C updates that are means of others: `shares`, (C, C), times these. They are made block by block, and never kept."""

    updates: Rows
    shares: Tensor

    def __len__(self) -> int:
        return len(self.updates)


Updates = Rows | Mixed


class Aggregator:
    """Makes one update of those of a round, one by one. Subclass it to write your own.

    An update has `values`, `places` (which of the k values the client holds; None: all), `weight` and `client`.
    """

    def init(self, k: int) -> Any:
        """The state before the first update of k values."""

    def add(self, state: Any, update: Any) -> Any:
        """Add an update. Returns the new state; None leaves the state as it is."""

    def finish(self, state: Any, server: Any) -> Tensor:
        """The server's update (k,). `server.update(data)` is the update that a client with this data would send."""
        raise NotImplementedError


def aggregate(rule: AggregatorChoice, rows: Rows, weights: Tensor) -> Tensor:
    """One update, (k,) in float64, from those of C clients with weights (C,). NaN and infinity are refused."""
    check(rule, len(rows))
    if rule.foreign:
        return foreign(rule, rows, weights)
    mix = getattr(rule, "mix", None)
    return rule.made()(rows if mix is None else mixed(rows, mix), weights)


def check(rule: AggregatorChoice, count: int) -> None:
    """Refuse a rule that cannot work with `count` updates."""
    if sentence := next(rule.refuse(count), None):
        raise FedsieveError(f"{rule.kind}: {sentence}", 1 if count == 0 else 2)


def foreign(rule: AggregatorChoice, rows: Rows, weights: Tensor) -> Tensor:
    """The result of a function from outside on a copy of a matrix of updates (C, k)."""
    updates = rows if isinstance(rows, Tensor) else torch.stack(list(rows))
    result = called(rule.made(), f"federation.aggregator: {rule.kind}", updates, weights.to(updates.device))
    expect(result, (updates.shape[1],), f"federation.aggregator: {rule.kind}", "one update (k,)")
    return result.double()


def mixed(updates: Rows, f: int) -> Mixed:
    """For every update the mean of the C - f nearest to it, itself among them; ties go to the first.

    Honest clients that differ by their data come to lie close together, so that a rule that looks for a crowd finds their
    mean instead of the most usual of them. A mean of C - f holds at most as many hostile updates as lie that near.
    """
    count = len(updates)
    nearest = _squared_distances(_products(updates)).sort(dim=1, stable=True).indices[:, : count - f]
    shares = torch.zeros(count, count, dtype=torch.float64).scatter_(1, nearest, 1 / (count - f))
    return Mixed(updates, shares)


def median(updates: Updates, weights: Tensor) -> Tensor:
    """The median of each coordinate; of an even number, the mean of the middle two."""
    return _without_ends(updates, (len(updates) - 1) // 2)


def trimmed_mean(updates: Updates, weights: Tensor, *, share: float = 0.2) -> Tensor:
    """The mean of each coordinate without its lowest and its highest values, a `share` of all (rounded up) each."""
    return _without_ends(updates, dropped(share, len(updates)))


def krum(updates: Updates, weights: Tensor, *, f: int = 1) -> Tensor:
    """The update with the least sum of squared distances to its C - f - 2 nearest others; ties go to the first."""
    return multi_krum(updates, weights, f=f, m=1)


def multi_krum(updates: Updates, weights: Tensor, *, f: int = 1, m: int | None = None) -> Tensor:
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


def norm_bound(updates: Updates, weights: Tensor, *, limit: float | None = None) -> Tensor:
    """The weighted mean of updates that are first shortened to the L2 norm `limit`; default: their median norm."""
    squares = torch.zeros(len(updates), dtype=torch.float64)
    for _, block in _blocks(updates):
        squares += block.double().square().sum(1).cpu()
    norms = squares.sqrt()
    bound = norms.median().item() if limit is None else limit
    return _combined(updates, _shares(weights) * torch.where(norms > bound, bound / norms, 1.0))


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
    """The result (k,) of a rule that takes (C, w) values at a time."""
    result = torch.empty_like(_first(updates), dtype=torch.float64)
    for part, block in _blocks(updates):
        result[part] = rule(block)
    return result


def _blocks(updates: Updates, values: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield some coordinates at a time, with the values (C, w) of all updates there."""
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

"""Which client holds which training examples, and how clients with labels of their own are tested.

Label skew is by a fixed number of classes per client or by Dirichlet shares (Hsu et al. 2019, "Measuring the effects
of non-identical data distribution for federated visual classification"; Li et al. 2022, "Federated learning on
non-IID data silos"). Time and memory grow with examples and with clients times nc; there is no table of all clients
by all classes, and no draw is repeated until it fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedsieve.config import Partition
from fedsieve.errors import FedsieveError

# Each trade leaves a client about half of what it had: of where it started, one part in a million.
TRADES = 20


@dataclass(frozen=True, eq=False)
class Shards:
    """The examples of every client: `order` (N,) is client after client, `offsets` (K+1,) says where each begins.

    Within a client the order is random. That every example is there once is checked whenever one is built.
    """

    order: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        count = len(self.order)
        if self.offsets[0] != 0 or self.offsets[-1] != count or (np.diff(self.offsets) < 0).any():
            raise ValueError(f"the offsets do not cut {count} examples into clients")
        if not (np.bincount(self.order, minlength=count) == 1).all():
            raise ValueError("the shards do not hold every example exactly once")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def client(self, k: int) -> np.ndarray:
        """The examples of client k, as a view."""
        return self.order[self.offsets[k] : self.offsets[k + 1]]

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)


class ClassCounts(NamedTuple):
    """How many examples of a class a client holds, where it holds any; by client, then by class."""

    client: np.ndarray
    label: np.ndarray
    examples: np.ndarray


def make_partition(
    settings: Partition,
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    groups: np.ndarray | None = None,
) -> Shards:
    """Deal the examples with these labels (N,) to clients, none of which stays empty.

    `groups` (N,) belongs to `natural`: each of its values is a client, in sorted order, and `clients` does not matter.
    """
    if settings.kind == "natural":
        if groups is None or len(groups) != len(labels):
            raise ValueError("a natural partition needs the group of every example")
        names, holder = np.unique(groups, return_inverse=True)
        return _gather(holder, len(names), rng)
    dealt = settings.made()(labels, clients, rng)
    if settings.foreign and not (isinstance(dealt, np.ndarray) and dealt.ndim == 1):
        return shards_of(dealt, len(labels), f"federation.partition: {settings.kind}")
    return _gather(dealt, clients, rng)


def shards_of(lists: Sequence[np.ndarray], count: int, where: str) -> Shards:
    """Shards from one array of example numbers per client; `where` names what gave them in error messages."""
    given = [np.asarray(part) for part in lists]
    if wrong := [part.dtype for part in given if part.ndim != 1 or (len(part) and part.dtype.kind not in "iu")]:
        raise FedsieveError(f"{where}: give one array of example numbers per client, not of {wrong[0]}")
    parts = [part.astype(np.int64) for part in given]
    order = np.concatenate([*parts, np.arange(0)])
    empty = [number for number, part in enumerate(parts) if not len(part)]
    found = np.bincount(order[(order >= 0) & (order < count)], minlength=count)
    problem = ""
    if not parts:
        problem = "there is no client"
    elif empty:
        problem = f"client {empty[0]} has no examples"
    elif len(outside := order[(order < 0) | (order >= count)]):
        problem = f"example {outside[0]} does not exist: they are numbered from 0 to {count - 1}"
    elif (found > 1).any():
        problem = f"example {int(found.argmax())} is given to {int(found.max())} clients"
    elif (found == 0).any():
        problem = f"{int((found == 0).sum()):,} of {count:,} examples belong to nobody, such as {int(found.argmin())}"
    if problem:
        raise FedsieveError(
            f"{where}: {problem}. Give one array of example numbers per client; each example is in one of them"
        )
    return Shards(order, _starts(np.array([len(part) for part in parts])))


# --- kinds: the client (N,) that holds each example ------------------------------------------------------------------


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Shuffled and split evenly."""
    _check_sizes(clients, 1, len(labels))
    return rng.permutation(np.arange(len(labels)) % clients)


def by_classes(labels: np.ndarray, clients: int, rng: np.random.Generator, *, nc: int) -> np.ndarray:
    """Exactly `nc` classes for each client."""
    _check_sizes(clients, 1, len(labels))
    return _deal_to_owners(_by_class(labels, rng), labels, clients, rng, nc)


def dirichlet(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float,
    min_size: int = 1,
    nc: int | None = None,
) -> np.ndarray:
    """Class by class, by Dirichlet shares; among the owners of a class where clients hold at most `nc`."""
    _check_sizes(clients, min_size, len(labels))
    rows = _by_class(labels, rng)
    if nc is not None and nc < len(rows):
        return _deal_to_owners(rows, labels, clients, rng, nc, (alpha, min_size))
    holder = np.empty(len(labels), dtype=np.int64)
    for mine in rows:
        holder[mine] = _draw(alpha, len(mine), clients, rng)
    _fill_up(holder, clients, min_size, rng)
    return holder


def quantity(
    labels: np.ndarray, clients: int, rng: np.random.Generator, *, alpha: float, min_size: int = 1
) -> np.ndarray:
    """Sizes by Dirichlet shares, whatever the class."""
    _check_sizes(clients, min_size, len(labels))
    holder = rng.permutation(_draw(alpha, len(labels), clients, rng))
    _fill_up(holder, clients, min_size, rng)
    return holder


def class_counts(shards: Shards, labels: np.ndarray) -> ClassCounts:
    """The entries of the class-by-client table that are not zero."""
    classes = int(labels.max(initial=0)) + 1
    client = np.repeat(np.arange(len(shards)), shards.sizes)
    cells, count = np.unique(client * classes + labels[shards.order], return_counts=True)
    return ClassCounts(cells // classes, cells % classes, count)


# --- testing on a client's own labels --------------------------------------------------------------------------------


def label_weights(counts: ClassCounts, client: int, test_labels: np.ndarray) -> np.ndarray:
    """A weight (T,) for every test example, with which the test set has the client's shares of classes.

    A mean with these weights is the expectation over all test sets drawn with those shares. Classes without a test
    example are left out; if that leaves none, the weights are NaN.
    """
    mine = slice(*np.searchsorted(counts.client, [client, client + 1]))
    tested = np.bincount(test_labels, minlength=int(counts.label.max()) + 1)
    shares = np.zeros(len(tested))
    shares[counts.label[mine]] = counts.examples[mine]
    weights = shares[test_labels] / tested[test_labels]
    with np.errstate(invalid="ignore"):
        return weights / weights.sum()


def client_accuracies(correct: np.ndarray, test_labels: np.ndarray, counts: ClassCounts, clients: int) -> np.ndarray:
    """The accuracy (K,) of one model for every client, `correct` (T,) being what it got right.

    Equal to the mean of `correct` with each client's `label_weights`, at the cost of one pass over tests and counts.
    """
    classes = int(counts.label.max()) + 1
    tested = np.bincount(test_labels, minlength=classes)
    accuracy = np.bincount(test_labels, weights=correct, minlength=classes) / np.maximum(tested, 1)
    weight = counts.examples * (tested[counts.label] > 0)
    total = np.bincount(counts.client, weights=weight, minlength=clients)
    with np.errstate(invalid="ignore"):
        return np.bincount(counts.client, weights=weight * accuracy[counts.label], minlength=clients) / total


# --- dealing ---------------------------------------------------------------------------------------------------------


def _gather(holder: np.ndarray, clients: int, rng: np.random.Generator) -> Shards:
    """Shards from the client (N,) that holds each example."""
    return Shards(_grouped(holder, rng), _starts(np.bincount(holder, minlength=clients)))


def _grouped(keys: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Positions by ascending key, in random order where keys are equal."""
    order = rng.permutation(len(keys))
    return order[np.argsort(keys[order], kind="stable")]


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)])


def _by_class(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """The rows of each class there is, shuffled."""
    sizes = np.bincount(labels)
    return np.split(_grouped(labels, rng), np.cumsum(sizes[sizes > 0])[:-1])


def _draw(alpha: float, count: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """The client (count,), ascending, of `count` examples dealt by Dirichlet shares."""
    # Within these bounds, far past any visible effect, numpy's draw neither underflows nor overflows.
    shares = rng.dirichlet(np.full(clients, min(max(alpha, 1e-100), 1e12)))
    # From a random start the expected number is exactly share * count; from 0, the last client would gain.
    places = (np.arange(count) + rng.random()) / count
    return np.minimum(np.searchsorted(np.cumsum(shares), places, side="right"), clients - 1)


def _fill_up(holder: np.ndarray, clients: int, min_size: int, rng: np.random.Generator) -> None:
    """Bring clients below `min_size` up to it, in place, by random examples of the largest."""
    sizes = np.bincount(holder, minlength=clients)
    need = np.maximum(min_size - sizes, 0)
    if not need.any():
        return
    give = np.maximum(sizes - _level(sizes, min_size, need.sum()), 0)
    # What is too much is less than one for each giver.
    give[rng.choice(np.flatnonzero(give), give.sum() - need.sum(), replace=False)] -= 1
    place = np.arange(len(holder)) - np.repeat(_starts(sizes)[:-1], sizes)
    moved = _grouped(holder, rng)[place < np.repeat(give, sizes)]
    holder[rng.permutation(moved)] = np.repeat(np.arange(clients), need)


def _level(sizes: np.ndarray, low: int, need: int) -> int:
    """The highest size to which the largest clients can be cut so that `need` examples come free, at least `low`."""
    high = int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        if np.maximum(sizes - middle, 0).sum() >= need:
            low = middle
        else:
            high = middle - 1
    return low


# --- owners of classes -----------------------------------------------------------------------------------------------


def _deal_to_owners(
    rows: list[np.ndarray],
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    nc: int,
    skew: tuple[float, int] | None = None,
) -> np.ndarray:
    """The client (N,) of each example, where a client holds exactly nc classes or, with `skew`, at most nc.

    `skew` is the alpha and the min_size of a Dirichlet partition. A slot is one of the nc places for a class that every
    client has.
    """
    sizes = np.array([len(mine) for mine in rows])
    _check_owners(clients, nc, len(sizes))
    if skew is None:
        _check_rows(clients, nc, sizes, labels)
    owned = _draw_owners(_owner_counts(sizes, clients * nc, rng), clients, nc, rng).ravel()
    slots = _grouped(owned, rng)
    owned, client, owners = owned[slots], slots // nc, np.bincount(owned)
    if skew is None:
        place = np.arange(len(slots)) - np.repeat(_starts(owners)[:-1], owners)
        counts = (sizes // owners)[owned] + (place < (sizes % owners)[owned])
    else:
        drawn = [_draw(skew[0], size, n, rng) for size, n in zip(sizes, owners, strict=True)]
        counts = np.concatenate([np.bincount(mine, minlength=n) for mine, n in zip(drawn, owners, strict=True)])
        counts = _fill_up_slots(counts, owned, client, clients, skew[1])
    holder = np.empty(len(labels), dtype=np.int64)
    holder[np.concatenate(rows)] = np.repeat(client, counts)
    return holder


def _owner_counts(sizes: np.ndarray, slots: int, rng: np.random.Generator) -> np.ndarray:
    """How many owners each class has: all the same to within one, the one first where there is an example for it."""
    base, more = divmod(slots, len(sizes))
    counts = np.full(len(sizes), base)
    counts[_grouped(sizes <= base, rng)[:more]] += 1
    return counts


def _draw_owners(counts: np.ndarray, clients: int, nc: int, rng: np.random.Generator) -> np.ndarray:
    """nc different classes (K, nc) for every client, class c occurring counts[c] <= K times.

    Dealt out class after class, round and round the clients, no client meets a class twice, but neighbours hold the
    same ones. So clients then meet in random pairs and redistribute at random the classes that only one of them
    holds (Carstens et al. 2018, "Parallel and I/O-efficient randomisation of massive networks using global
    curveball trades"): every state on the way is as valid, and all become equally likely.
    """
    classes = rng.permutation(len(counts)).astype(np.int32)
    owned = np.repeat(classes, counts[classes]).reshape(nc, clients).T.copy()
    for _ in range(TRADES):
        pairs = rng.permutation(clients)[: clients // 2 * 2].reshape(-1, 2)
        pool = np.sort(owned[pairs].reshape(-1, 2 * nc), axis=1)
        both = pool[:, 1:] == pool[:, :-1]
        key = rng.random(pool.shape, dtype=np.float32)
        key[:, :-1][both] = -1  # one of a class that both hold goes to the first,
        key[:, 1:][both] = 2  # the other to the second
        owned[pairs] = np.take_along_axis(pool, np.argsort(key, axis=1), axis=1).reshape(-1, 2, nc)
    return owned


def _fill_up_slots(
    counts: np.ndarray, owned: np.ndarray, client: np.ndarray, clients: int, min_size: int
) -> np.ndarray:
    """Counts of slots with every client at `min_size` or above, moved only between owners of a class.

    A maximum flow from clients with more than they need, through classes, to clients below: it finds a way where
    there is one. The largest give first, as long as that is enough.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    sizes = np.bincount(client, weights=counts, minlength=clients).astype(np.int64)
    need = np.maximum(min_size - sizes, 0)
    low, source, sink = np.flatnonzero(need), clients + owned.max() + 1, clients + owned.max() + 2
    some = np.flatnonzero(counts)
    level = _level(sizes, min_size, need.sum())
    while len(low):
        give = np.flatnonzero(sizes > level)
        edges = [
            (np.full(len(give), source), give, sizes[give] - level),
            (client[some], clients + owned[some], counts[some]),
            (clients + owned, client, np.full(len(client), need.sum())),
            (low, np.full(len(low), sink), need[low]),
        ]
        start, end, most = (np.concatenate(part) for part in zip(*edges, strict=True))
        network = csr_array((most.astype(np.int32), (start, end)), shape=(sink + 1, sink + 1))
        result = maximum_flow(network, source, sink)
        if result.flow_value == need.sum():
            return counts + result.flow[clients + owned, client]
        if level == min_size:
            raise FedsieveError(
                f"federation.partition: with at most nc classes per client, {need.sum() - result.flow_value:,} examples are "
                f"missing to give each of {clients:,} clients min_size = {min_size}: some classes are too small for "
                "their owners. Lower min_size or federation.clients, or raise nc"
            )
        level = (level + min_size) // 2
    return counts


# --- refusals --------------------------------------------------------------------------------------------------------


def _check_sizes(clients: int, min_size: int, count: int) -> None:
    if clients > count:
        raise FedsieveError(
            f"federation.clients: {clients:,} clients cannot share {count:,} examples. Set {count:,} at most"
        )
    if clients * min_size > count:
        raise FedsieveError(
            f"federation.partition.min_size: {clients:,} clients with {min_size:,} examples each need "
            f"{clients * min_size:,}, and there are {count:,}. Set min_size to {count // clients:,} at most, "
            f"or federation.clients to {count // min_size:,}"
        )


def _check_owners(clients: int, nc: int, classes: int) -> None:
    if nc > classes:
        raise FedsieveError(f"federation.partition.nc: {nc} is more than the {classes} classes there are")
    if clients * nc < classes:
        raise FedsieveError(
            f"federation.partition.nc: {clients} clients with {nc} classes each leave some of the {classes} classes to "
            f"nobody. Set nc to {-(-classes // clients)} at least, or federation.clients to {-(-classes // nc)}"
        )


def _check_rows(clients: int, nc: int, sizes: np.ndarray, labels: np.ndarray) -> None:
    """Every owner of a class needs an example of it."""
    fewest = int(sizes.min())
    slots = len(sizes) * fewest + int((sizes > fewest).sum())  # the most that can be filled
    if clients * nc <= slots:
        return
    fits = [
        f"{name} to {slots // other:,} at most"
        for name, other in (("nc", clients), ("federation.clients", nc))
        if slots // other * other >= len(sizes)
    ]
    label = np.unique(labels)[sizes.argmin()]
    raise FedsieveError(
        f"federation.partition.nc: {clients:,} clients with {nc} classes each make {clients * nc / len(sizes):,.1f} "
        f"owners per class, but class {label} has only {fewest:,} examples, and every owner needs one. "
        f"Set {', or '.join(fits) or f'nc to 1 and federation.clients to {slots:,} at most'}"
    )

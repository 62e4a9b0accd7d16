"""What one client does in one round, drawn on the host: which images, in which order, changed in which way."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsieve.config import Local
from fedsieve.randomness import generator
from fedsieve.train.feed import Examples


@dataclass(frozen=True)
class Work:
    """One client's local steps. A step with fewer images than the batch holds is filled up with -1."""

    client: int
    examples: np.ndarray  # (steps, batch) positions in the feed
    draws: np.ndarray | None  # (steps, batch, P), the transform's random parameters; None where nothing is random
    address: tuple[int | str, ...] = ()  # of the round's draws: the seed first

    @property
    def steps(self) -> int:
        return len(self.examples)


@dataclass(frozen=True, eq=False)
class Draws:
    """The feed that work is drawn from, and the address of the draws, such as (stage, round)."""

    feed: Examples
    seed: int
    address: tuple[int | str, ...]


def local_work(
    client: int, examples: np.ndarray, local: Local, batch_size: int, draws: Draws, share: float = 1.0
) -> Work:
    """The work of a client that holds `examples`, drawn at (seed, purpose, *address, client).

    Epochs go through all images in a new order each; single steps take batches from as many epochs as they need. `share`
    cuts the number of steps, to one at least.
    """
    size = len(examples)
    batch = min(batch_size, size)
    per_epoch = -(-size // batch)
    steps = max(1, round(share * (local.steps or per_epoch * (local.epochs or 1))))
    order = generator(draws.seed, "order", *draws.address, client)
    rows = np.full((-(-steps // per_epoch), per_epoch * batch), -1)
    for epoch in rows:
        epoch[:size] = order.permutation(examples)
    rows = rows.reshape(-1, batch)[:steps]
    changes = draws.feed.changes(generator(draws.seed, "augment", *draws.address, client), rows.size)
    changes = None if changes is None else changes.reshape(*rows.shape, -1)
    return Work(client, rows, changes, (draws.seed, *draws.address))


def side_by_side(works: Sequence[Work], clients: int, batch: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The works of several clients as (steps, clients, batch) positions, filled up with -1, and their draws."""
    examples = np.full((max(work.steps for work in works), clients, batch), -1)
    draws = None
    if (first := works[0].draws) is not None:
        # Filled up with some valid draw: nothing that is thrown away later may be NaN.
        draws = np.tile(first[0, 0], (*examples.shape, 1))
    for number, work in enumerate(works):
        steps, size = work.examples.shape
        examples[:steps, number, :size] = work.examples
        if draws is not None:
            draws[:steps, number, :size] = work.draws
    return examples, draws

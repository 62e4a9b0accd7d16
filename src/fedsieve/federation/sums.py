"""Where the vectors of many clients become one: the mean of updates, and sums of scores and statistics.

Both add up in float64, in the order of the clients, one at a time, so that memory does not grow with a cohort.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsieve.federation.channel import Reply
from fedsieve.wire.codec import MessageError


@dataclass(frozen=True)
class Update:
    """What the server got from one client: how far some values moved, and how much that counts."""

    client: int
    values: Tensor  # (k,), or one for each of `places`
    weight: float
    places: Tensor | None = None  # which of the k values the client holds; None: all


def weighted_mean(
    updates: Iterable[Update], k: int, device: torch.device | str, divide_by: Literal["holders", "all"] = "holders"
) -> tuple[Tensor, int]:
    """The mean update (k,), float64, and of how many clients it is.

    Where clients hold different values, each is divided by the weight of those who hold it, or of all; values that nobody
    holds stay where they are.
    """
    total = torch.zeros(k, dtype=torch.float64, device=device)
    weight, count = 0.0, 0
    holders: Tensor | None = None  # weight by value
    for update in updates:
        places = update.places
        if places is None:
            for part in parts(k, total.device):
                total[part].add_(update.values[part].double(), alpha=update.weight)
            if holders is not None:
                holders += update.weight
        else:
            if holders is None:  # those who came before held everything
                holders = torch.full_like(total, weight)
            total.index_add_(0, places, update.values.double(), alpha=update.weight)
            holders.index_add_(0, places, torch.full_like(places, update.weight, dtype=torch.float64))
        weight, count = weight + update.weight, count + 1
    if divide_by == "holders" and holders is not None:
        return torch.where(holders > 0, total / holders.clamp(min=1e-300), 0.0), count
    return total / (weight or 1.0), count


def parts(count: int, device: torch.device, start: int = 0) -> Iterator[slice]:
    """`count` places from `start` on in pieces that, in float64, stay in a CPU's cache: copies of all of them would take
    longer to find memory for than to add up."""
    step = 2**18 if device.type == "cpu" else max(count, 1)
    end = start + count
    return (slice(first, min(first + step, end)) for first in range(start, end, step))


def sum_over_clients(replies: Iterable[Reply], k: int, device: torch.device | str) -> tuple[Tensor, int]:
    """The sum of all clients' values (k,), float64, and of their n. It is of all or of none: a refused reply is raised."""
    total, n = torch.zeros(k, dtype=torch.float64, device=device), 0
    for reply in replies:
        if isinstance(reply, MessageError):
            raise reply
        total += reply.values.double()
        n += reply.n
    return total, n

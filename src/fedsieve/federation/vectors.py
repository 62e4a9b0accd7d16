"""Long vectors on a CPU: float64 in pieces that stay in its cache."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

Span = tuple[str, int, int]  # a block, and where some of its weights begin and end among the k that train


def zeros(k: int, device: torch.device) -> Tensor:
    """Float64; on a CPU of numpy, which asks for large pages: small ones take longer to get than to add up in."""
    return torch.from_numpy(np.zeros(k)) if device.type == "cpu" else torch.zeros(k, dtype=torch.float64, device=device)


def pieces(count: int, device: torch.device, start: int = 0) -> Iterator[slice]:
    """`count` places from `start` on in pieces that, in float64, stay in a CPU's cache: copies of all of them would take
    longer to find memory for than to add up."""
    step = 2**18 if device.type == "cpu" else max(count, 1)
    end = start + count
    return (slice(first, min(first + step, end)) for first in range(start, end, step))


def squares_by_span(moved: Tensor, spans: Sequence[Span]) -> Tensor:
    """The squared distance that clients (clients, k) moved in each span: (spans, clients), float64."""
    return torch.stack([_squares(moved, first, last) for _, first, last in spans])


def _squares(moved: Tensor, first: int, last: int) -> Tensor:
    """The sum of squares of columns first to last of (clients, k), in float64."""
    return torch.stack(
        [
            moved[:, part].to(torch.float64, copy=True).square_().sum(1)
            for part in pieces(last - first, moved.device, first)
        ]
    ).sum(0)

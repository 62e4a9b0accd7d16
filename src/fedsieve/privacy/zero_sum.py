"""The secure report's sum: each client adds Gaussian noise to n * update, and over the whole cohort the noise is zero.

Kept for comparison. It hides nothing from a server that knows the seeds, and anyone can: they are the client's number
plus an offset. It does not survive a dropout either: without one client's pad the others' do not cancel, and the round
must be refused. `secagg` is the protocol without these two faults.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.randomness import generator


class PadsRemain(FedsieveError):
    """The pads of those who answered do not cancel: the round is lost."""


def padded(
    weighted: Tensor,
    client: int,
    cohort: Collection[int],
    *address: int | str,
    offset: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """What a client sends: `weighted` (k,), which is n times its update of k active weights, and its pad; in float64.

    The pad is drawn anew for each address, such as (stage, round). The cohort's last client takes what makes up for all
    the others.
    """
    total = weighted.double().clone()
    last = max(cohort)
    for member in sorted(cohort) if client == last else [client]:
        if member != last:
            rng = generator(member + offset, "zero sum", *address)
            noise = torch.from_numpy(rng.standard_normal(len(weighted))).to(weighted.device)
            total.add_(noise, alpha=-scale if client == last else scale)
    return total


def total(received: Mapping[int, Tensor], cohort: Collection[int]) -> Tensor:
    """The sum of n * update over the cohort, (k,) in float64, from what its clients sent; refused unless all did."""
    missing = len(set(cohort) - set(received))
    if missing:
        raise PadsRemain(
            f"zero_sum: {missing} of {len(cohort)} clients did not answer, and without their pads the others' do not "
            "cancel: the round cannot be used. privacy.aggregation: secagg survives dropouts",
            1,
        )
    result = torch.zeros_like(received[min(cohort)], dtype=torch.float64)
    for client in sorted(cohort):
        result += received[client]
    return result

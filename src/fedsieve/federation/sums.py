"""Where the vectors of many clients become one: the mean of updates, and sums of scores and statistics.

Plain ones add up in float64, in the order of the clients, one at a time, so that memory does not grow with a cohort.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsieve.config import Aggregator, Experiment
from fedsieve.errors import FedsieveError
from fedsieve.federation.aggregators import Robust, aggregate, check
from fedsieve.federation.channel import EXACT, Channel, Part, Reply, Told
from fedsieve.federation.secure import sum_at_64_bits
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.privacy.dp import Account, clipped
from fedsieve.privacy.fixed_point import FixedPoint
from fedsieve.wire.codec import Coding, MessageError

PRECISION = {"fp32": torch.float32, "fp64": torch.float64}  # in which scores and statistics are sent
IN_MEMORY = 2**31  # bytes of updates


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
    total = _zeros(k, torch.device(device))
    weight, count = 0.0, 0
    holders: Tensor | None = None  # weight by value
    for update in updates:
        places = update.places
        if places is None:
            for part in pieces(k, total.device):
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
    return total.div_(weight or 1.0), count


def _zeros(k: int, device: torch.device) -> Tensor:
    """Float64; on a CPU of numpy, which asks for large pages: small ones take longer to get than to add up in."""
    return torch.from_numpy(np.zeros(k)) if device.type == "cpu" else torch.zeros(k, dtype=torch.float64, device=device)


def pieces(count: int, device: torch.device, start: int = 0) -> Iterator[slice]:
    """`count` places from `start` on in pieces that, in float64, stay in a CPU's cache: copies of all of them would take
    longer to find memory for than to add up."""
    step = 2**18 if device.type == "cpu" else max(count, 1)
    end = start + count
    return (slice(first, min(first + step, end)) for first in range(start, end, step))


def robust_mean(updates: Iterable[Update], rule: Aggregator, most: int, folder: Path) -> tuple[Tensor | None, int]:
    """What a robust rule makes of all updates, each counted once, (k,), float64; None where they are too few for it.

    At `most` so many come. Where they would take gigabytes of a host's memory they lie in a mapped file in `folder`.
    """
    rows: list[Tensor] = []
    mapped: Tensor | None = None
    for update in updates:
        values = update.values
        if values.device.type == "cpu" and mapped is None and most * values.nbytes > IN_MEMORY:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".updates") as file:  # gone with the mapping
                size = most * len(values)
                mapped = torch.from_file(file.name, shared=True, size=size, dtype=values.dtype).view(most, -1)
        if mapped is not None:
            mapped[len(rows)] = values
            values = mapped[len(rows)]
        rows.append(values)
    try:
        check(rule.kind, len(rows), robust(rule))
    except FedsieveError:
        return None, len(rows)
    return aggregate(rule.kind, rows, torch.ones(len(rows)), robust(rule)), len(rows)


def check_numbers(experiment: Experiment, cohort: int, trainers: int) -> None:
    """Refuse, before anything is read, what cannot work with so many clients in a round, and in all."""
    settings, privacy = experiment.federation, experiment.privacy
    assert settings is not None
    if settings.aggregator.kind != "mean":
        check(settings.aggregator.kind, cohort, robust(settings.aggregator))
    if privacy.dp is not None and privacy.dp.delta * trainers >= 1:
        raise FedsieveError(
            f"privacy.dp.delta: {privacy.dp.delta:g} lets one client in {1 / privacy.dp.delta:g} be given away outright, and there "
            f"are {trainers:,}. Choose one far below {1 / trainers:.2g}"
        )
    if privacy.aggregation != "secagg":
        return
    sieves = [sieve for sieve in map(experiment.mask_of, experiment.stages) if sieve is not None]
    summed = {"federation.cohort": cohort}
    if any(stage.method == "ridge" for stage in experiment.stages):
        summed["federation.clients"] = trainers
    for sieve in sieves:
        if sieve.scored and sieve.scope == "shared":
            summed["mask.clients"] = sieve.clients or cohort
    for key, count in summed.items():
        if count < 3:
            raise FedsieveError(
                f"{key}: a secure sum needs at least 3 clients, not {count}: one has nothing to hide in, and of two each learns "
                "what the other sent"
            )
    FixedPoint(privacy.bits, cohort, privacy.bound)


def robust(rule: Aggregator) -> Robust:
    """What a robust rule is told."""
    return Robust(rule.share, rule.f, rule.m, rule.mix, "median" if rule.limit is None else rule.limit)


def private_mean(
    updates: Iterable[Update], k: int, device: torch.device | str, account: Account, stage: str, round: int
) -> tuple[Tensor, int]:
    """The mean of clipped updates with noise, (k,), float64, whoever answered; and of how many clients it is."""
    total, count = torch.zeros(k, dtype=torch.float64, device=device), 0
    for update in updates:
        values = clipped(update.values, account.settings.clip_norm)
        if update.places is None:
            total += values
        else:
            total.index_add_(0, update.places, values)
        count += 1
    return account.mean(total, stage, round), count


def sum_over_clients(
    channel: Channel,
    what: str,
    round: int,
    over: Mask | ParamSpace,
    parts: Iterable[Part],
    coding: Coding = EXACT,
    fates: Mapping[int, str] | None = None,
    *,
    clients: Sequence[int] = (),
    told: Told = lambda _: {},
) -> tuple[Tensor, int]:
    """The sum of what clients send, (k,), float64, and of their n; in secret, or with noise, where privacy asks for it.

    Without `fates` it is of all or of none: a refused reply is raised. With noise every client counts once, and n is
    their number. Where `clients` are elsewhere they are asked, and `parts` is left alone.
    """
    k = over.count if isinstance(over, Mask) else over.size
    if channel.privacy.aggregation == "secagg":
        sizes = list(over.counts().values()) if isinstance(over, Mask) else np.diff(over.offsets).tolist()
        made = channel.gathered(what, clients, round, parts, fates, told)
        exact = ((client, values.to(PRECISION[coding.format]), n) for client, values, n in made)
        return sum_at_64_bits(channel, what, round, exact, sizes, fates or {})
    replies = channel.collect(what, clients, round, over, coding, parts, fates, told)
    if channel.account is not None:
        return _noisy_sum(channel.account, what, replies, k)
    total, seen = torch.zeros(k, dtype=torch.float64, device=channel.device), 0
    for reply in replies:
        if not isinstance(reply, MessageError):
            total += reply.values.double()
            seen += reply.n
        elif fates is None:
            raise reply
    return total, seen


def _noisy_sum(account: Account, what: str, replies: Iterable[Reply], k: int) -> tuple[Tensor, int]:
    settings = account.settings.scores if what == "scores" else account.settings.statistics
    assert settings is not None  # the config sees to it
    count = 0

    def values() -> Iterator[Tensor]:
        nonlocal count
        for reply in replies:
            if isinstance(reply, MessageError):
                raise reply
            count += 1
            yield reply.values

    return account.total(values(), k, settings), count

"""Means of updates: plain, robust, private, secure. All are called in the same way.

Plain ones add up in float64, in the order of the clients, one at a time, so that memory does not grow with a cohort.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedsieve.config import AggregatorChoice, Experiment
from fedsieve.errors import FedsieveError
from fedsieve.federation.aggregators import Aggregator, aggregate, check
from fedsieve.federation.channel import Tally
from fedsieve.federation.clients import Clients, Replies, Update
from fedsieve.federation.maskbook import MaskBook
from fedsieve.federation.secure import SecureSums
from fedsieve.federation.state import ServerContext
from fedsieve.federation.vectors import pieces, zeros
from fedsieve.foreign import called, expect
from fedsieve.privacy import zero_sum
from fedsieve.privacy.dp import Account, clipped
from fedsieve.privacy.fixed_point import FixedPoint

IN_MEMORY = 2**31  # bytes of updates
PADS_REMAIN = "pads remain"


class Mean(Protocol):
    """Makes one update of those of a round."""

    def __call__(self, replies: Replies, round: int) -> Tensor | None:
        """The mean update (k,), float64, of the replies; None where they are too few for the rule."""


@dataclass(frozen=True, eq=False)
class PlainMean:
    """FedAvg's mean, weighted by what each update counts."""

    book: MaskBook
    divide_by: Literal["holders", "all"]

    def __call__(self, replies: Replies, round: int) -> Tensor | None:
        return weighted_mean(replies, self.book.count, self.book.device, self.divide_by)[0]


@dataclass(frozen=True, eq=False)
class RobustMean:
    """A rule that needs all updates at once. Built-in ones count every update once."""

    rule: AggregatorChoice
    most: int  # updates in a round
    folder: Path  # for mapped files

    def __call__(self, replies: Replies, round: int) -> Tensor | None:
        return robust_mean(replies, self.rule, self.most, self.folder)[0]


@dataclass(frozen=True, eq=False)
class StreamingMean:
    """An aggregator from outside that takes updates one by one."""

    rule: AggregatorChoice
    k: int
    clients: Clients

    def __call__(self, replies: Replies, round: int) -> Tensor | None:
        aggregator: Aggregator = self.rule.made()
        where = f"federation.aggregator: {self.rule.kind}"
        state = called(aggregator.init, where, self.k)
        for update in replies:
            changed = called(lambda _, now=state, one=update: aggregator.add(now, one), where, update.values)
            state = state if changed is None else changed
        if not replies.count:
            return None
        result = called(aggregator.finish, where, state, self.clients)
        expect(result, (self.k,), where, "one update (k,)")
        return result.double()


def streams(rule: AggregatorChoice) -> bool:
    """True where an aggregator takes updates one by one."""
    piece = rule.piece if rule.foreign else None
    return isinstance(piece, Aggregator) or (isinstance(piece, type) and issubclass(piece, Aggregator))


@dataclass(frozen=True, eq=False)
class PrivateMean:
    """The mean of clipped updates with noise, whoever answered."""

    account: Account
    book: MaskBook

    def __call__(self, replies: Replies, round: int) -> Tensor | None:
        book, account = self.book, self.account
        total = torch.zeros(book.count, dtype=torch.float64, device=book.device)
        for update in replies:
            values = clipped(update.values, account.settings.clip_norm)
            if update.places is None:
                total += values
            else:
                total.index_add_(0, update.places, values)
        return account.mean(total, book.stage.name, round)


@dataclass(frozen=True, eq=False)
class SecureMean:
    """The mean of a secure sum. Updates stay with the clients."""

    sums: SecureSums
    clients: Clients
    book: MaskBook

    def __call__(self, replies: Replies, round: int) -> Tensor | None:
        replies.finish()
        if not (kept := self.clients.kept()):
            return None
        people = self.book.context.population
        bound = int(people.sizes.max()) if people.settings.weighting == "examples" else 1
        over_all = people.settings.divide_by == "all"
        mean, outcome = self.sums.mean(round, self.book.count, self.book.segments(kept), bound, over_all)
        replies.settle(outcome.survivors, outcome.refused)
        return mean


@dataclass(frozen=True, eq=False)
class ZeroSumMean:
    """The mean of padded updates, whose pads cancel if all are there (see `privacy.zero_sum`)."""

    tally: Tally

    def __call__(self, replies: Replies, round: int) -> Tensor | None:
        updates = {update.client: update for update in replies}
        if any(why not in ("unavailable", "crash") for why in replies.refused.values()):  # others never had pads
            self.tally.silence("update", replies.taken, round, "up", PADS_REMAIN)
            replies.settle([], dict.fromkeys(replies.taken, PADS_REMAIN))
        if not replies.taken:
            return None
        total = zero_sum.total({client: update.values for client, update in updates.items()}, updates)
        return total / sum(update.weight for update in updates.values())


def choose_mean(context: ServerContext, clients: Clients, book: MaskBook, sums: SecureSums, tally: Tally) -> Mean:
    """The mean that an experiment asks for."""
    settings, mode = context.population.settings, context.experiment.privacy.aggregation
    if mode == "secagg":
        return SecureMean(sums, clients, book)
    if mode == "zero_sum":
        return ZeroSumMean(tally)
    if context.account is not None:
        return PrivateMean(context.account, book)
    if streams(settings.aggregator):
        return StreamingMean(settings.aggregator, book.count, clients)
    if settings.aggregator.kind != "mean":
        return RobustMean(settings.aggregator, context.population.cohort_size, context.ledger.path.parent)
    return PlainMean(book, settings.divide_by)


def weighted_mean(
    updates: Iterable[Update], k: int, device: torch.device | str, divide_by: Literal["holders", "all"] = "holders"
) -> tuple[Tensor, int]:
    """The mean update (k,), float64, and of how many clients it is.

    Where clients hold different values, each is divided by the weight of those who hold it, or of all; values that nobody
    holds stay where they are.
    """
    total = zeros(k, torch.device(device))
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


def robust_mean(
    updates: Iterable[Update], rule: AggregatorChoice, most: int, folder: Path
) -> tuple[Tensor | None, int]:
    """The result (k,), float64, of a robust rule, which counts every update once; None where they are too few for it.

    At `most` this many updates come. If they would fill gigabytes of memory, they go to a mapped file in `folder`.
    """
    rows: list[Tensor] = []
    weights: list[float] = []
    mapped: Tensor | None = None
    for update in updates:
        values = update.values
        weights.append(update.weight if rule.foreign else 1.0)
        if values.device.type == "cpu" and mapped is None and most * values.nbytes > IN_MEMORY:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".updates") as file:  # gone with the mapping
                size = most * len(values)
                mapped = torch.from_file(file.name, shared=True, size=size, dtype=values.dtype).view(most, -1)
        if mapped is not None:
            mapped[len(rows)] = values
            values = mapped[len(rows)]
        rows.append(values)
    try:
        check(rule, len(rows))
    except FedsieveError:
        return None, len(rows)
    together = rows if mapped is None or not rule.foreign else mapped[: len(rows)]
    return aggregate(rule, together, torch.tensor(weights)), len(rows)


def check_numbers(experiment: Experiment, cohort: int, trainers: int) -> None:
    """Refuse settings that cannot work with this cohort or this many trainers, before anything is read."""
    settings, privacy = experiment.federation, experiment.privacy
    assert settings is not None
    if settings.aggregator.kind != "mean":
        check(settings.aggregator, cohort)
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
        if sieve.rule.scored and sieve.scope == "shared":
            summed["mask.clients"] = sieve.clients or cohort
    for key, count in summed.items():
        if count < 3:
            raise FedsieveError(
                f"{key}: a secure sum needs at least 3 clients, not {count}: one has nothing to hide in, and of two each learns "
                "what the other sent"
            )
    FixedPoint(privacy.bits, cohort, privacy.bound)

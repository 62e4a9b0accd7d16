"""Secure sums in a federation: updates at the asked width, scores and statistics at 64 bits with a scale per tensor.

The scale is public, so clients agree on it by a secure sum too: of how many have their largest value below which power of
two. What goes wrong with clients takes them out of the protocol at one of its phases, drawn by the seed.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.config import Privacy
from fedsieve.federation.channel import Tally
from fedsieve.federation.clients import Ask, Clients, SecretSum
from fedsieve.model.space import Layout
from fedsieve.privacy.fixed_point import FixedPoint
from fedsieve.privacy.secagg import PHASES, Aborted, Sent, SumServer, conduct, threshold_of
from fedsieve.randomness import generator
from fedsieve.wire.codec import MessageError

PAD = PHASES.index("pad")
ABORTED, ASTRAY, FEW_HOLDERS = "aborted", "not finite", "too few holders"
MOST = 100  # clients in one sum, whose cost grows with the square of their number; more are summed in groups
EXPONENTS = range(-126, 130)  # of a tensor's largest value, as powers of two; the first also stands for zero

Departures = Mapping[int, tuple[int, str]]  # the phase in which a client is lost, and why


def departures(seed: int, stage: str, round: int, fates: Mapping[int, str]) -> Departures:
    """The phase in which each client with a bad fate is lost: it crashes before it, or its answer is late or damaged."""

    def phase(client: int) -> int:
        return int(generator(seed, "phase", stage, round, client).integers(len(PHASES)))

    return {
        client: (PAD if fate == "late" else phase(client), fate)
        for client, fate in fates.items()
        if fate in ("crash", "late", "corrupt")
    }


@dataclass
class SumResult:
    """The total of a secure sum (None: it was aborted), the clients in it, and why others are not."""

    total: np.ndarray | None = None
    survivors: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)


class SecureSums:
    """Leads the secure sums of one stage, and counts every message of every phase."""

    def __init__(self, clients: Clients, privacy: Privacy, tally: Tally, device: torch.device | str = "cpu") -> None:
        self.clients, self.privacy, self.tally, self.device = clients, privacy, tally, device

    def mean(
        self,
        round: int,
        k: int,
        segments: Iterable[tuple[np.ndarray, list[int]]],
        weight_bound: int,
        over_all: bool = False,
    ) -> tuple[Tensor | None, SumResult]:
        """The mean update (k,), float64, of the clients that stayed; None where it was aborted.

        `segments` are places among the k values with the clients that hold them, all clients the first. `over_all` divides
        by the weight of all clients, not of those who hold a value. A segment that fewer hold than are needed for a sum of
        all stays as it is: the fewer they are, the more a sum says of each.
        """
        mean, everyone, least = torch.zeros(k, dtype=torch.float64, device=self.device), 0, 0
        whole: SumResult | None = None
        for places, holders in segments:
            if len(holders) < least:
                self.tally.silence("update", holders, round, "up", FEW_HOLDERS)
                continue
            total, weight, outcome = self.weighted_sum(round, places, holders, weight_bound)
            if whole is None:
                whole, everyone, least = outcome, weight, threshold_of(self.privacy.threshold, len(holders))
                if outcome.total is None:
                    return None, outcome
            if weight:
                mean[torch.from_numpy(places).to(mean.device)] = total / (everyone if over_all else weight)
        assert whole is not None
        return mean, whole

    def weighted_sum(
        self, round: int, places: np.ndarray, clients: Sequence[int], weight_bound: int
    ) -> tuple[Tensor, int, SumResult]:
        """The sum, float64, of weight * update at `places` over the clients that stayed, and their weight: 0 if aborted."""
        point = update_point(self.privacy, len(clients), weight_bound)
        terms = {"clients": len(clients), "weight_bound": weight_bound}
        threshold = threshold_of(self.privacy.threshold, len(clients))
        count = len(places) + point.digits
        secret = SecretSum("update", round, clients, self.privacy.bits, count, threshold, terms, places)
        outcome = self.take(secret)
        total, weight = (np.zeros(len(places)), 0) if outcome.total is None else point.decode(outcome.total)
        return torch.from_numpy(total).to(self.device), weight, outcome

    def at_64_bits(self, ask: Ask, clients: Sequence[int]) -> tuple[Tensor, int]:
        """The sum (k,), float64, of what clients kept for a question, and of their n; many clients in groups of `MOST`.

        A group that loses too many clients is left out.
        """
        sizes = [size for size in ask.over.tensor_counts if size] + [1]
        total, groups = np.zeros(sum(sizes)), -(-len(clients) // MOST)
        for number in range(groups):
            total += self._group(ask, sorted(clients)[number::groups], sizes)
        return torch.from_numpy(total[:-1]).to(self.device), int(np.rint(total[-1]))

    def _group(self, ask: Ask, clients: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        threshold, count = threshold_of(self.privacy.threshold, len(clients)), len(sizes) * len(EXPONENTS)
        terms: dict[str, Any] = {"clients": len(clients)}
        scale = self.take(SecretSum(f"{ask.what}.scale", ask.round, clients, 16, count, threshold, terms))
        if scale.total is None:
            return np.zeros(sum(sizes))
        seen = scale.total.reshape(len(sizes), len(EXPONENTS)) > 0
        largest = EXPONENTS[-1] - seen[:, ::-1].argmax(1)
        point = point_at(len(clients), largest, sizes)
        terms |= {"largest": largest.tolist()}
        width = sum(sizes) + point.digits
        outcome = self.take(SecretSum(ask.what, ask.round, scale.survivors, 64, width, threshold, terms))
        return np.zeros(sum(sizes)) if outcome.total is None else point.decode(outcome.total)[0]

    def take(self, secret: SecretSum) -> SumResult:
        """The sum of the integers of all clients that are not lost on the way."""
        outcome, traffic, why = SumResult(), list[Sent](), dict[int, str]()
        if len(secret.clients) >= secret.threshold:
            exchange = self.clients.exchange(secret)
            why |= exchange.why
            try:
                leader = SumServer(secret.clients, secret.threshold, secret.bits, secret.count, secret.round)
                outcome.survivors, outcome.total, traffic = conduct(leader, exchange)
            except Aborted as aborted:
                traffic = aborted.traffic
        for sent in traffic:
            status = ABORTED if outcome.total is None and sent.status == "ok" else sent.status
            self.tally.note(secret.round, sent.client, sent.direction, f"{secret.what}.{sent.phase}", sent.size, status)
            if sent.status != "ok":
                why[sent.client] = sent.status
        outcome.refused = {
            client: why.get(client, ABORTED) for client in secret.clients if client not in outcome.survivors
        }
        if not traffic:
            self.tally.silence(secret.what, secret.clients, secret.round, "up", ABORTED)
        return outcome


@dataclass(frozen=True, eq=False)
class Kept:
    """One client's values for a secure sum: an update and its weight, or an answer, whose last value is its n."""

    row: np.ndarray
    sizes: Sequence[int] = ()  # of the tensors that an answer's values belong to, and 1 for n
    weight: int = 1

    @classmethod
    def answer(cls, over: Layout, values: Tensor, n: int) -> "Kept":
        """The answer to a question."""
        row = np.append(values.double().cpu().numpy(), n)
        return cls(row, [size for size in over.tensor_counts if size] + [1])


class Inputs:
    """Turns clients' kept values into the integers that they add to secure sums of a stage."""

    def __init__(self, privacy: Privacy, seed: int, stage: str) -> None:
        self.privacy, self.seed, self.stage = privacy, seed, stage
        self.clipped = self.seen = 0  # values of updates: how many were clipped, and how many there were
        self.warned = False

    def of(self, secret: SecretSum, client: int, kept: "Kept") -> np.ndarray:
        """The integers of one client, by the terms of the sum."""
        terms, what, round = secret.terms, secret.what, secret.round
        if what == "update":
            point = update_point(self.privacy, terms["clients"], terms["weight_bound"])
            row = kept.row if secret.places is None else kept.row[secret.places]
            return self.update(round, client, row, kept.weight, point)
        if what.endswith(".scale"):
            return scale_input(kept.row, kept.sizes)
        point = point_at(terms["clients"], terms["largest"], kept.sizes)
        return point.encode(kept.row, 1, self.uniforms(round, what, client, count=len(kept.row)))

    def update(self, round: int, client: int, row: np.ndarray, weight: int, point: FixedPoint) -> np.ndarray:
        """An update. Values beyond the bound are clipped, and counted."""
        bound = self.privacy.bound
        self.clipped += int(np.count_nonzero(np.abs(row).astype(np.float32) > np.float32(bound)))
        self.seen += len(row)
        cut = np.clip(row, -bound, bound, dtype=np.float64)  # in float32 the bound may round up
        return point.encode(cut, weight, self.uniforms(round, "update", client, count=len(row)))

    def uniforms(self, *address: int | str, count: int) -> np.ndarray:
        """The numbers that fixed point rounds by: public, since they say nothing that the sum does not."""
        return generator(self.seed, "rounding", self.stage, *address).random(count)

    def warn(self, whose: str = "") -> None:
        """Say once that values of updates were clipped, and which share of them."""
        if not self.clipped or self.warned:
            return
        self.warned = True
        share, bound = self.clipped / self.seen, self.privacy.bound
        warnings.warn(
            f'{whose}stage "{self.stage}": {100 * share:.2g} % of the values of updates are beyond privacy.bound '
            f"({bound:g}) and were clipped to it. Raise privacy.bound, or lower stages.{self.stage}.optimizer.lr",
            stacklevel=2,
        )


def update_point(privacy: Privacy, clients: int, weight_bound: int) -> FixedPoint:
    """The fixed-point format for updates of this many clients."""
    return FixedPoint(privacy.bits, clients, privacy.bound * weight_bound, weight_bound)


def point_at(clients: int, largest: Sequence[int] | np.ndarray, sizes: Sequence[int]) -> FixedPoint:
    """The fixed-point format for tensors of these `sizes`, whose values stay below these powers of two."""
    return FixedPoint(64, clients, np.repeat(2.0 ** np.asarray(largest), sizes))


def scale_input(row: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """A client's input to the preliminary sum that agrees on each tensor's scale: one of 256 powers of two per tensor."""
    largest = np.maximum.reduceat(np.abs(row), np.cumsum([0, *sizes[:-1]]))
    if not (largest < 2.0 ** EXPONENTS[-1]).all():
        raise MessageError(ASTRAY, "scores or statistics that are not finite cannot be summed")
    powers = np.where(largest > 0, np.frexp(largest)[1], EXPONENTS[0]).clip(EXPONENTS[0])
    places = np.zeros((len(largest), len(EXPONENTS)), "<u2")
    places[np.arange(len(largest)), powers - EXPONENTS[0]] = 1
    return places.ravel()

"""Secure sums in a federation: updates at the asked width, scores and statistics at 64 bits with a scale per tensor.

The scale is public, so clients agree on it by a secure sum too: of how many have their largest value below which power of
two. What goes wrong with clients takes them out of the protocol at one of its phases, drawn by the seed.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsieve.config import Privacy
from fedsieve.federation.channel import EXACT, Channel
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.privacy import zero_sum
from fedsieve.privacy.fixed_point import FixedPoint
from fedsieve.privacy.secagg import PHASES, Aborted, Sent, Server, conduct, secure_sum, threshold_of
from fedsieve.randomness import generator
from fedsieve.wire.codec import MessageError

PAD = PHASES.index("pad")
ABORTED, ASTRAY, PADS_REMAIN, FEW_HOLDERS = "aborted", "not finite", "pads remain", "too few holders"
MOST = 100  # clients in one sum, whose cost grows with the square of their number; more are summed in groups
EXPONENTS = range(-126, 130)  # of a tensor's largest value, as powers of two; the first also stands for zero

Losses = Mapping[int, tuple[int, str]]  # the phase in which a client is lost, and why


def losses(seed: int, stage: str, round: int, fates: Mapping[int, str]) -> Losses:
    """When clients with a bad fate are lost: they crash before a phase, or their answer is late or damaged in one."""

    def phase(client: int) -> int:
        return int(generator(seed, "phase", stage, round, client).integers(len(PHASES)))

    return {
        client: (PAD if fate == "late" else phase(client), fate)
        for client, fate in fates.items()
        if fate in ("crash", "late", "corrupt")
    }


@dataclass
class Taken:
    """What came of a secure sum: the total (None: it was aborted), who is in it, and why others are not."""

    total: np.ndarray | None = None
    survivors: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)


def take(
    channel: Channel,
    what: str,
    round: int,
    clients: Sequence[int],
    bits: int,
    count: int,
    make: Callable[[int], np.ndarray],
    threshold: int,
    lost: Losses,
    terms: Mapping[str, Any],
) -> Taken:
    """The sum of clients' integers, every message of every phase counted; those `lost` fall out on the way.

    `make` gives the `count` integers of a client that is at hand; one elsewhere makes them itself, by the `terms`.
    """
    drops = {client: phase for client, (phase, why) in lost.items() if why not in ("late", "corrupt")}

    def deliver(client: int, phase: int, answer: bytes) -> bytes:
        if lost.get(client) == (phase, "late"):
            raise MessageError("late", f"client {client} answered after the deadline")
        return channel.damaged(answer, round, what, client) if lost.get(client) == (phase, "corrupt") else answer

    found, traffic = Taken(), list[Sent]()
    if len(clients) >= threshold:
        try:
            if (exchange := channel.secret_exchange(what, round, terms)) is not None:
                result = conduct(Server(clients, threshold, bits, count, round), exchange)
            else:
                result = secure_sum({client: make(client) for client in clients}, threshold, drops, round, deliver)
            found.survivors, found.total, traffic = result
        except Aborted as aborted:
            traffic = aborted.traffic
    why = {client: lost[client][1] for client in drops}
    for sent in traffic:
        status = ABORTED if found.total is None and sent.status == "ok" else sent.status
        channel.note(round, sent.client, sent.direction, f"{what}.{sent.phase}", sent.size, status)
        if sent.status != "ok":
            why[sent.client] = sent.status
    found.refused = {client: why.get(client, ABORTED) for client in clients if client not in found.survivors}
    if not traffic:
        channel.silence(what, clients, round, "up", ABORTED)
    return found


# --- updates ---------------------------------------------------------------------------------------------------------


def secure_mean(
    channel: Channel,
    round: int,
    k: int,
    segments: Iterable[tuple[np.ndarray, list[int]]],
    rows: Mapping[int, np.ndarray],
    weights: Mapping[int, int],
    weight_bound: int,
    lost: Losses,
    divide_by: Literal["holders", "all"],
) -> tuple[Tensor | None, Taken]:
    """The mean update (k,), float64, of those who stayed; None where it was aborted.

    `segments` are places among the k values with the clients that hold them, all clients the first. A segment that fewer
    hold than are needed for a sum of all stays as it is: the fewer they are, the more a sum says of each.
    """
    mean, everyone, least = torch.zeros(k, dtype=torch.float64, device=channel.device), 0, 0
    whole: Taken | None = None
    for places, holders in segments:
        if len(holders) < least:
            channel.silence("update", holders, round, "up", FEW_HOLDERS)
            continue
        mine = {client: rows[client][places] for client in holders if client in rows}
        total, weight, found = weighted_sum(channel, round, len(places), holders, mine, weights, weight_bound, lost)
        if whole is None:
            whole, everyone, least = found, weight, threshold_of(channel.privacy.threshold, len(holders))
            if found.total is None:
                return None, found
        if weight:
            divisor = weight if divide_by == "holders" else everyone
            mean[torch.from_numpy(places).to(mean.device)] = total / divisor
    assert whole is not None
    return mean, whole


def weighted_sum(
    channel: Channel,
    round: int,
    k: int,
    asked: Sequence[int],
    rows: Mapping[int, np.ndarray],
    weights: Mapping[int, int],
    weight_bound: int,
    lost: Losses,
) -> tuple[Tensor, int, Taken]:
    """The sum (k,), float64, of weight * update over those who were `asked` and stayed, and their weight: 0 if aborted.

    Values beyond the bound are clipped. Who has no row is lost before it would be sent, and whose row is not finite is then.
    """
    privacy, gone = channel.privacy, dict(lost)
    point = update_point(privacy, len(asked), weight_bound)
    for client, row in rows.items():
        if not np.isfinite(row).all() and gone.get(client, (PAD, ""))[0] >= PAD:
            gone[client] = PAD, ASTRAY
            channel.silence("update", [client], round, "up", ASTRAY)

    def make(client: int) -> np.ndarray:
        row = rows.get(client)
        if row is None or not np.isfinite(row).all():
            return np.zeros(k + point.digits, f"<u{privacy.bits // 8}")
        return update_input(channel, round, client, row, weights[client], point)

    terms, threshold = (
        {"clients": len(asked), "weight_bound": weight_bound},
        threshold_of(privacy.threshold, len(asked)),
    )
    before = channel.clipped
    found = take(channel, "update", round, asked, privacy.bits, k + point.digits, make, threshold, gone, terms)
    if channel.clipped and not before:
        warnings.warn(clipping(channel), stacklevel=2)
    total, weight = (np.zeros(k), 0) if found.total is None else point.decode(found.total)
    return torch.from_numpy(total).to(channel.device), weight, found


def clipping(channel: Channel) -> str:
    """A warning with the share of values that were clipped."""
    share, bound = channel.clipped / channel.summed, channel.privacy.bound
    return (
        f'stage "{channel.stage}": {100 * share:.2g} % of the values of updates are beyond privacy.bound ({bound:g}) '
        f"and were clipped to it. Raise privacy.bound, or lower stages.{channel.stage}.optimizer.lr"
    )


def update_point(privacy: Privacy, clients: int, weight_bound: int) -> FixedPoint:
    """How updates of so many clients are written as integers."""
    return FixedPoint(privacy.bits, clients, privacy.bound * weight_bound, weight_bound)


def update_input(
    channel: Channel, round: int, client: int, row: np.ndarray, weight: int, point: FixedPoint
) -> np.ndarray:
    """What a client puts into the sum of updates. Values beyond the bound are clipped, and counted."""
    bound = channel.privacy.bound
    channel.clipped += int(np.count_nonzero(np.abs(row).astype(np.float32) > np.float32(bound)))
    channel.summed += len(row)
    cut = np.clip(row, -bound, bound, dtype=np.float64)  # in float32 the bound may round up
    return point.encode(cut, weight, channel.uniforms(round, "update", client, count=len(row)))


def zero_sum_mean(
    channel: Channel,
    round: int,
    over: Mask | ParamSpace,
    rows: Mapping[int, Tensor],
    weights: Mapping[int, int],
) -> tuple[Tensor | None, dict[int, str]]:
    """The mean update (k,), float64, of all clients from what they sent padded; None, and why, where one is missing."""
    privacy, received, refused = channel.privacy, dict[int, Tensor](), dict[int, str]()
    for client, row in rows.items():
        sent = zero_sum.padded(
            row,
            weights[client],
            client,
            rows.keys(),
            channel.stage,
            round,
            offset=privacy.pad_offset,
            scale=privacy.pad_scale,
        )
        (reply,) = channel.up("update", [client], round, over, sent.float()[None], EXACT, [weights[client]])
        if isinstance(reply, MessageError):
            refused[client] = reply.reason
        else:
            received[client] = reply.values
    if refused:  # which `zero_sum.total` would not take either
        channel.silence("update", list(received), round, "up", PADS_REMAIN)
        return None, dict.fromkeys(received, PADS_REMAIN) | refused
    return zero_sum.total(received, rows.keys()) / sum(weights[client] for client in rows), {}


# --- other sums ------------------------------------------------------------------------------------------------------


def sum_at_64_bits(
    channel: Channel,
    what: str,
    round: int,
    parts: Iterable[tuple[int, Tensor, int]],
    sizes: Sequence[int],
    fates: Mapping[int, str],
) -> tuple[Tensor, int]:
    """The sum (k,), float64, of clients' values and of their n; with many clients, in groups of at most `MOST`.

    `sizes` are those of the tensors that the k values belong to. A group that loses too many clients is left out.
    """
    rows = {client: np.append(values.double().cpu().numpy(), n) for client, values, n in parts}
    lost = losses(channel.seed, channel.stage, round, fates)
    total, groups = np.zeros(sum(sizes) + 1), -(-len(rows) // MOST)
    for number in range(groups):
        members = {client: rows[client] for client in sorted(rows)[number::groups]}
        total += _sum_of_group(channel, what, round, members, [size for size in sizes if size] + [1], lost)
    return torch.from_numpy(total[:-1]).to(channel.device), int(np.rint(total[-1]))


def _sum_of_group(
    channel: Channel,
    what: str,
    round: int,
    rows: Mapping[int, np.ndarray],
    sizes: Sequence[int],
    lost: Losses,
) -> np.ndarray:
    threshold, count = threshold_of(channel.privacy.threshold, len(rows)), len(sizes) * len(EXPONENTS)
    terms: dict[str, Any] = {"clients": len(rows)}
    scale = take(
        channel,
        f"{what}.scale",
        round,
        list(rows),
        16,
        count,
        lambda client: scale_input(rows[client], sizes),
        threshold,
        lost,
        terms,
    )
    if scale.total is None:
        return np.zeros(sum(sizes))
    seen = scale.total.reshape(len(sizes), len(EXPONENTS)) > 0
    largest = EXPONENTS[-1] - seen[:, ::-1].argmax(1)
    point = point_at(len(rows), largest, sizes)
    terms |= {"largest": largest.tolist()}
    found = take(
        channel,
        what,
        round,
        scale.survivors,
        64,
        sum(sizes) + point.digits,
        lambda client: scaled_input(channel, what, round, client, rows[client], point),
        threshold,
        {},
        terms,
    )
    return np.zeros(sum(sizes)) if found.total is None else point.decode(found.total)[0]


def point_at(clients: int, largest: Sequence[int] | np.ndarray, sizes: Sequence[int]) -> FixedPoint:
    """How tensors of these `sizes` are written as integers, if their values stay below these powers of two."""
    return FixedPoint(64, clients, np.repeat(2.0 ** np.asarray(largest), sizes))


def scaled_input(
    channel: Channel, what: str, round: int, client: int, row: np.ndarray, point: FixedPoint
) -> np.ndarray:
    """What a client puts into a sum at 64 bits."""
    return point.encode(row, 1, channel.uniforms(round, what, client, count=len(row)))


def scale_input(row: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """And into the sum before it, by which the scale of each tensor is agreed on."""
    return _exponents(np.maximum.reduceat(np.abs(row), np.cumsum([0, *sizes[:-1]])))


def _exponents(largest: np.ndarray) -> np.ndarray:
    """For each tensor, the power of two that its values stay below: a 1 in one of 256 places."""
    if not (largest < 2.0 ** EXPONENTS[-1]).all():
        raise MessageError(ASTRAY, "scores or statistics that are not finite cannot be summed")
    powers = np.where(largest > 0, np.frexp(largest)[1], EXPONENTS[0]).clip(EXPONENTS[0])
    places = np.zeros((len(largest), len(EXPONENTS)), "<u2")
    places[np.arange(len(largest)), powers - EXPONENTS[0]] = 1
    return places.ravel()

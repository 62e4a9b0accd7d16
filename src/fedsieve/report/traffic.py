"""What a federated run sent, in bytes and in weights, beside dense fp32 and beside the information limit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from fedsieve.config import Stage
from fedsieve.report.folder import RunFolder, StageMasks
from fedsieve.wire.bits import entropy
from fedsieve.wire.codec import OVERHEAD, Coding
from fedsieve.wire.values import BITS

# One message of these is what dense FedAvg would send: one to and one from every client in every round.
EXCHANGES = {"up": ("update", "update.pad", "statistics", "statistics.pad"), "down": ("model",)}
OF_WEIGHTS = {"up": ("update", "update.pad", "control"), "down": ("model", "control")}


@dataclass(frozen=True)
class Kind:
    """All messages of one kind in one direction."""

    direction: str
    what: str
    messages: int
    bytes: int
    weights: int | None  # values of weights in them; None where they hold none, or it cannot be told
    limit: float | None  # bytes that no code could do without


@dataclass(frozen=True)
class Traffic:
    """What one stage sent. Arrays are over its rounds."""

    stage: str
    rounds: np.ndarray  # (R,) numbers of the rounds, from 1
    up: np.ndarray  # (R,) bytes
    down: np.ndarray
    dense: float | None  # bytes of all weights in fp32: the stage's, or the backbone's where LoRA or adapters train
    sent_up: np.ndarray  # (R,) messages that dense FedAvg would send as well
    sent_down: np.ndarray
    limit_up: np.ndarray  # (R,) bytes that updates could not do without; NaN where it cannot be told
    limit_down: np.ndarray
    kinds: list[Kind]
    counted: bool  # from the ledger; otherwise from the records, which leave calibration out

    @property
    def bytes_up(self) -> int:
        return int(self.up.sum())

    @property
    def bytes_down(self) -> int:
        return int(self.down.sum())

    @property
    def total(self) -> int:
        return self.bytes_up + self.bytes_down

    @property
    def messages(self) -> int:
        """Messages that dense FedAvg would send as well, both ways."""
        return int(self.sent_up.sum() + self.sent_down.sum())

    @property
    def dense_total(self) -> float | None:
        """The same messages with all weights in fp32."""
        return None if self.dense is None else self.dense * self.messages

    @property
    def per_client(self) -> float | None:
        """Bytes to and from one client in one round, on average."""
        up, down = int(self.sent_up.sum()), int(self.sent_down.sum())
        return self.bytes_up / up + self.bytes_down / down if up and down else None

    @property
    def weights(self) -> int | None:
        """Values of weights in updates, models and control variates."""
        known = [kind.weights for kind in self.kinds if kind.what in (*OF_WEIGHTS["up"], *OF_WEIGHTS["down"])]
        return sum(filter(None, known)) if known and None not in known else None

    @property
    def dense_weights(self) -> float | None:
        return None if self.dense is None else self.dense / 4 * self.messages


def read_traffic(run: RunFolder, masks: Mapping[str, StageMasks] | None = None) -> list[Traffic]:
    """What every stage of a federated run sent so far; weights and limits only where the run's `masks` are given."""
    if run.experiment.federation is None:
        return []
    found = []
    for stage in run.experiment.stages:
        own = (masks or {}).get(stage.name, StageMasks())
        size = _stage_size(run, stage, own)
        if run.messages is not None:
            mine = Counter({key[1:]: count for key, count in run.messages.items() if key[0] == stage.name})
            if mine:
                found.append(_from_ledger(run, stage, mine, size, None if masks is None else own))
        elif any(row.get("stage") == stage.name and "bytes_up" in row for row in run.records):
            found.append(_from_records(run, stage, size))
    return found


def of_dense(traffic: Sequence[Traffic]) -> float | None:
    """All bytes as a share of what the same messages take with all weights in fp32."""
    dense = [part.dense_total for part in traffic]
    if not dense or None in dense or not sum(filter(None, dense)):
        return None
    return sum(part.total for part in traffic) / sum(filter(None, dense))


def so_far(records: Sequence[Mapping[str, Any]], traffic: Sequence[Traffic]) -> np.ndarray:
    """The bytes of all stages, both ways, up to the end of each record's round; zeros where nothing was counted."""
    sent = {
        (part.stage, number): int(part.up[place] + part.down[place])
        for part in traffic
        for place, number in enumerate(part.rounds.tolist())
    }
    return np.cumsum([sent.get((str(row.get("stage")), row.get("round")), 0) for row in records])


def _stage_size(run: RunFolder, stage: Stage, masks: StageMasks) -> int | None:
    """How many weights the stage's space has."""
    for mask in (*masks.shared.values(), *masks.clients.values()):
        return mask.space.size
    told = run.summary.stages.get(stage.name) if run.summary else None
    return told.trained if told else None


def _dense(run: RunFolder, stage: Stage, size: int | None) -> float | None:
    """What dense FedAvg would send of a stage, in fp32."""
    told = run.summary.stages.get(stage.name) if run.summary else None
    if told and told.dense is not None:
        return 4.0 * told.dense
    return None if size is None or {"lora", "adapter"} & {str(part) for part in stage.parts} else 4.0 * size


def _from_ledger(
    run: RunFolder,
    stage: Stage,
    messages: Counter[tuple[int, str, str, int]],
    size: int | None,
    masks: StageMasks | None,
) -> Traffic:
    rounds = max(number for number, *_ in messages)
    sums = {way: np.zeros(rounds, dtype=np.int64) for way in ("up", "down")}
    sent = {way: np.zeros(rounds, dtype=np.int64) for way in ("up", "down")}
    limits = {way: np.zeros(rounds) for way in ("up", "down")}
    kinds: dict[tuple[str, str], Kind] = {}
    reader = _Reader(run, stage, size, masks) if masks is not None else None
    for (number, way, what, length), count in sorted(messages.items()):
        place = number - 1
        sums[way][place] += count * length
        sent[way][place] += count * (what in EXCHANGES[way])
        if what in ("statistics", "statistics.pad"):  # where FedAvg trains a head, it sends it to these clients too
            sent["down"][place] += count
        weights, limit = reader.read(number, way, what, length) if reader else (None, None)
        if what in OF_WEIGHTS[way]:
            limits[way][place] += np.nan if limit is None else count * limit
        old = kinds.get((way, what), Kind(way, what, 0, 0, 0, 0.0))
        kinds[way, what] = Kind(
            way,
            what,
            old.messages + count,
            old.bytes + count * length,
            None if weights is None or old.weights is None else old.weights + count * weights,
            None if limit is None or old.limit is None else old.limit + count * limit,
        )
    size = reader.size if reader and size is None else size
    return Traffic(
        stage=stage.name,
        rounds=np.arange(1, rounds + 1),
        up=sums["up"],
        down=sums["down"],
        dense=_dense(run, stage, size),
        sent_up=sent["up"],
        sent_down=sent["down"],
        limit_up=np.where(limits["up"] > 0, limits["up"], np.nan),
        limit_down=np.where(limits["down"] > 0, limits["down"], np.nan),
        kinds=sorted(kinds.values(), key=lambda kind: -kind.bytes),
        counted=True,
    )


def _from_records(run: RunFolder, stage: Stage, size: int | None) -> Traffic:
    rows = [row for row in run.records if row.get("stage") == stage.name and "bytes_up" in row]

    def numbers(field: str) -> np.ndarray:
        return np.array([int(row.get(field) or 0) for row in rows], dtype=np.int64)

    return Traffic(
        stage=stage.name,
        rounds=numbers("round"),
        up=numbers("bytes_up"),
        down=numbers("bytes_down"),
        dense=_dense(run, stage, size),
        sent_up=numbers("replies"),
        sent_down=numbers("cohort"),
        limit_up=np.full(len(rows), np.nan),
        limit_down=np.full(len(rows), np.nan),
        kinds=[],
        counted=False,
    )


class _Reader:
    """How many weights a message holds, told from its length and the masks of its stage."""

    def __init__(self, run: RunFolder, stage: Stage, size: int | None, masks: StageMasks) -> None:
        message, settings = run.experiment.message, run.experiment.federation
        self.up = Coding(message.up, message.group, message.top_k)
        self.down = Coding(message.down, message.group)
        self.masks, self.size, self.bits = masks, size, run.experiment.privacy.bits
        sieve = run.experiment.mask_of(stage)
        self.sparse, self.own = sieve is not None, sieve is not None and sieve.scope == "client"
        self.shares = sorted({device.density for device in settings.devices} if settings else ()) or [1.0]
        self.moved: dict[int, int] = {}

    def read(self, number: int, way: str, what: str, length: int) -> tuple[int | None, float | None]:
        """The values of weights in a message, and the bytes it could not do without."""
        if what not in OF_WEIGHTS[way]:
            return None, None
        coding, known = (self.up, self._trained(number)) if way == "up" else (self.down, self._moved(number))
        if what == "update.pad":  # fixed point; tiers send a part in each of several sums
            return (known[0], known[0] * self.bits / 8) if len(known) == 1 else (None, None)
        k = self._count(length, coding, known, enclosing=self.own and way == "up")
        if k is None:
            return None, None
        if not self.sparse and self.size is None:
            self.size = k
        kept = coding.kept(k)
        bits = kept * BITS[coding.format] + (entropy([kept], [k]) if kept < k else 0.0)
        return kept, bits / 8

    def _trained(self, number: int) -> list[int]:
        """How many weights a client may train: one number for every kind of device, or client."""
        if self.own:
            return sorted(set(self.masks.sizes))
        mask = self.masks.at(number)
        if mask is None:
            return [self.size] if self.size is not None and not self.sparse else []
        return [mask.count if share == 1 else max(1, round(share * mask.count)) for share in self.shares]

    def _moved(self, number: int) -> list[int]:
        """How many weights the server may have moved, and so sends: those of all its masks so far."""
        if self.own or not self.masks.shared:
            return [] if self.sparse or self.size is None else [self.size]
        begun = max((first for first in self.masks.shared if first <= number), default=None)
        if begun is None:
            return []
        if begun not in self.moved:
            self.moved[begun] = reduce(or_, (mask for first, mask in self.masks.shared.items() if first <= begun)).count
        return [self.moved[begun]]

    def _count(self, length: int, coding: Coding, known: list[int], enclosing: bool) -> int | None:
        plain = coding.top_k is None and coding.format != "coo"
        fits = [k for k in known if plain and OVERHEAD + coding.size(k) == length]
        if fits:
            return fits[0]
        if enclosing:  # the mask lies in the message, and clients' masks hardly differ in size
            return round(float(np.mean(known))) if known else None
        if len(known) == 1 and not plain:
            return known[0]
        return inverse(length - OVERHEAD, coding) if plain else None


def inverse(size: int, coding: Coding) -> int | None:
    """The most values that take exactly `size` bytes; None where no number does."""
    low, high = 0, max(0, 8 * size) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if coding.size(middle) <= size else (low, middle)
    return low if coding.size(low) == size else None

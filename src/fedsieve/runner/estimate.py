"""Estimates for a run: the images it trains on, and the bytes that a federated stage would send."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fedsieve.config import Experiment, Sieve, Stage
from fedsieve.federation.least_squares import SCALES, statistics_space
from fedsieve.federation.population import Population
from fedsieve.federation.secure import EXPONENTS, MOST
from fedsieve.mask.calibration import densities
from fedsieve.model.space import ParamSpace
from fedsieve.privacy.secagg import bytes_of
from fedsieve.wire.bits import entropy
from fedsieve.wire.codec import OVERHEAD, Coding, dense_bytes


@dataclass(frozen=True)
class People:
    """The numbers of clients: in all, those that may train, and those that train in a round."""

    clients: int
    trainers: int
    cohort: int
    rate: float  # the share of trainers in a round
    shuffled: bool = False  # nobody comes twice before all came once

    @classmethod
    def of(cls, population: Population) -> "People":
        shuffled = population.settings.sampling == "shuffled"
        return cls(len(population), population.trainers, population.cohort_size, population.rate, shuffled)

    def met(self, rounds: float) -> float:
        """The expected number of different clients in this many rounds."""
        if self.shuffled:
            return min(self.trainers, rounds * self.cohort)
        return self.trainers * (1 - (1 - self.cohort / self.trainers) ** rounds)


@dataclass(frozen=True)
class Estimate:
    """Bytes of a stage in which no client fails."""

    message_up: float  # one client's, in an ordinary round
    message_down: float
    values_up: int  # in such a message
    values_down: int
    at_most: bool  # the server sends the union of several masks, which is not known before
    extra_up: float  # all that does not come with every round: scores, masks, what earlier stages changed
    extra_down: float
    exchanges: int  # messages each way over all rounds
    dense: int  # bytes of all weights in fp32: the stage's, or the backbone's where LoRA or adapters train

    @property
    def total(self) -> float:
        up, down = self.exchanges * self.message_up, self.exchanges * self.message_down
        return up + down + self.extra_up + self.extra_down

    @property
    def dense_total(self) -> int:
        return 2 * self.exchanges * self.dense


def context_bytes(changed: Mapping[str, float], space: ParamSpace) -> float:
    """The message of what earlier stages changed: a number of weights of each tensor of `space`."""
    counts = [round(changed.get(name, 0)) for name in space.names]
    if not any(counts):
        return 0.0
    return OVERHEAD + 4 * sum(counts) + entropy(counts, [math.prod(shape) for shape in space.shapes]) / 8


@dataclass(frozen=True)
class Sizes:
    """The number of weights of a stage that are sent, or could be."""

    space: ParamSpace  # all that the stage trains
    taking: int  # how many may be in a mask
    dense: int  # how many dense training would send
    before: float  # bytes of what earlier stages changed


@dataclass(frozen=True)
class _Masks:
    """The masks of a stage, in numbers."""

    made: int  # how many
    k: int  # active weights of each
    moved: int  # weights that may be active in one of them
    taking: int  # weights that may be in a mask


def estimate(experiment: Experiment, stage: Stage, people: People, sizes: Sizes) -> Estimate:
    """The bytes that a stage would send."""
    settings, space, taking = experiment.federation, sizes.space, sizes.taking
    assert settings is not None
    if stage.method == "ridge":
        return _ridge(experiment, stage, space, people, sizes.before)
    sieve, rounds = experiment.mask_of(stage), stage.length
    k = space.size if sieve is None else round((1 - sieve.sparsity) * taking)
    share = sum(device.share * device.density for device in settings.devices) or 1.0
    own = sieve is not None and sieve.scope == "client"
    masks = 1 + (rounds - 1) // sieve.refresh if sieve and sieve.refresh else 1
    moved = min(taking, people.trainers * k) if own else min(taking, masks * k) if sieve else k
    message = experiment.message
    up, down = Coding(message.up, message.group, message.top_k), Coding(message.down, message.group)
    kept = up.kept(max(1, round(share * k)))
    positions = entropy([kept], [round(share * k)]) / 8 if up.top_k else 0.0
    both = 2 if settings.correction.kind == "scaffold" else 1
    secure = experiment.privacy.aggregation == "secagg"
    tensors = len(space.names) if secure else 0
    made = _Masks(masks, k, moved, taking)
    extra_up, extra_down = _mask_bytes(sieve, people, made, rounds, tensors) if sieve else (0.0, 0.0)
    message_down = OVERHEAD + down.size(moved) + _indices(down, space, moved)
    joined = people.met(rounds)
    if settings.client_validation:
        joined = people.met(rounds + 1)
        measured, protocol = sum_bytes(people.cohort, 2, 8, int(secure))
        times = people.cohort * math.ceil(rounds / settings.evaluate_every)
        extra_up += times * measured
        extra_down += times * protocol + people.cohort * message_down  # the last model, which no round follows
    if settings.blend:
        joined = people.trainers
        shares, protocol = sum_bytes(people.trainers, k, 4, tensors)
        extra_up += people.trainers * shares
        extra_down += people.trainers * (protocol + OVERHEAD + 4 * k)
    extra_down += joined * sizes.before
    message_up, message_down = (
        both * (OVERHEAD + up.size(kept) + positions + _indices(up, space, kept)),
        both * message_down,
    )
    if secure:
        message_up, protocol = bytes_of(people.cohort, kept * experiment.privacy.bits // 8)
        message_down += protocol
    return Estimate(
        message_up=message_up,
        message_down=message_down,
        values_up=both * kept,
        values_down=both * moved,
        at_most=own or masks > 1,
        extra_up=extra_up,
        extra_down=extra_down,
        exchanges=rounds * people.cohort,
        dense=4 * sizes.dense,
    )


def _indices(coding: Coding, space: ParamSpace, k: int) -> float:
    """Bytes of the indices of k weights in coo, spread evenly over the tensors."""
    if coding.format != "coo":
        return 0.0
    places = sum(len(shape) * math.prod(shape) for shape in space.shapes)
    return 8 * k * places / max(space.size, 1)


def sum_bytes(clients: int, values: int, width: int, tensors: int) -> tuple[float, float]:
    """Bytes up and down of one client in a sum of values of so many bytes; a secure one where `tensors` are given.

    Before that goes a secure sum of the tensors' scales.
    """
    if not tensors:
        return OVERHEAD + width * values, 0.0
    group = round(clients / -(-clients // MOST))
    scale, sums = bytes_of(group, 2 * len(EXPONENTS) * (tensors + 1)), bytes_of(group, 8 * (values + 1))
    return scale[0] + sums[0], scale[1] + sums[1]


def _mask_bytes(sieve: Sieve, people: People, masks: _Masks, rounds: int, tensors: int) -> tuple[float, float]:
    """Bytes up and down that making masks and sending them takes; of secure sums where `tensors` are given."""
    k, taking = masks.k, masks.taking
    size = OVERHEAD + entropy([k], [taking]) / 8
    if sieve.scope == "client":
        # Each client's mask goes up once; the union goes down again whenever it has grown, and costs most when half full.
        union = OVERHEAD + entropy([min(masks.moved, taking // 2)], [taking]) / 8
        return people.met(rounds) * size, rounds * people.cohort * union
    travels = people.met(rounds / masks.made) * size if sieve.rule.evidence else 0.0
    if sieve.scope == "public" or not sieve.rule.scored:
        return 0.0, masks.made * travels
    scoring = sieve.clients or people.cohort
    shares = densities(sieve.sparsity, sieve.calibration_rounds, sieve.schedule)[:-1]
    active = [taking, *(round(share * taking) for share in shares)]
    scores, protocol = np.sum([sum_bytes(scoring, count, 4, tensors) for count in active], axis=0).tolist()
    steps = sum(OVERHEAD + entropy([new], [old]) / 8 for old, new in pairwise(active))
    scores *= len(sieve.rule.sums)
    return masks.made * scoring * scores, masks.made * (travels + scoring * (steps + protocol))


def _ridge(experiment: Experiment, stage: Stage, space: ParamSpace, people: People, before: float) -> Estimate:
    """A closed-form head: every client sends its sums once, and losses where nothing else can fit a temperature."""
    classes, width = space.shapes[space.names.index("head.weight")]
    size = statistics_space(width, classes).size
    asks = stage.ridge.temperature is None and experiment.data.val_fraction == 0
    secure = experiment.privacy.aggregation == "secagg"
    up, down = sum_bytes(people.trainers, size, 8, 2 if secure else 0)
    if asks:
        losses, protocol = sum_bytes(people.trainers, len(SCALES), 8, int(secure))
        up, down = up + losses, down + protocol + OVERHEAD + dense_bytes(space)
    return Estimate(
        message_up=up,
        message_down=down,
        values_up=size,
        values_down=space.size if asks else 0,
        at_most=False,
        extra_up=0.0,
        extra_down=people.trainers * before,
        exchanges=people.trainers,
        dense=dense_bytes(space),
    )


def images_trained(experiment: Experiment, images: float) -> float:
    """Roughly how many images a run trains on, of `images` there are to train on."""
    return sum(_images(experiment, stage, images) for stage in experiment.stages)


def _images(experiment: Experiment, stage: Stage, images: float) -> float:
    if stage.train == "head" and (stage.method == "ridge" or experiment.data.transform == "resize"):
        return images / 3  # one pass without a backward one
    federation = experiment.federation
    if federation is None:
        return stage.length * images
    clients = federation.clients or 100
    cohort = federation.cohort if isinstance(federation.cohort, int) else max(1, round(federation.cohort * clients))
    local = stage.local.steps * stage.batch_size if stage.local.steps else (stage.local.epochs or 1) * images / clients
    return stage.length * cohort * local

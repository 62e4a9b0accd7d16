"""Masks across clients: one from their summed scores, one that the server scores, one of each client's own; their tiers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config import Device, Sieve
from fedsieve.errors import FedsieveError
from fedsieve.federation.distributed import spread
from fedsieve.federation.state import Context
from fedsieve.federation.team import Batch, Desk, Request
from fedsieve.mask.mask import Mask
from fedsieve.mask.selection import attention_heads, can_last, select
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.train.feed import Examples
from fedsieve.train.sieve import Measure, Scoring, taking_part


def sieve_at(sieve: Sieve, generation: int, rounds: int) -> Sieve:
    """The settings of a stage's n-th mask: with `start_sparsity`, the sparsity moves with each new one."""
    if sieve.start_sparsity is None or sieve.refresh is None:
        return sieve
    share = min(1.0, generation / max(1, (rounds - 1) // sieve.refresh))
    now = sieve.start_sparsity + share * (sieve.sparsity - sieve.start_sparsity)
    return sieve.model_copy(update={"sparsity": now})


@dataclass(frozen=True, eq=False)
class Calibration:
    """Makes one mask for all clients of a stage, at the model's current weights."""

    context: Context
    stage: str
    space: ParamSpace
    sieve: Sieve
    generation: int = 0  # masks made before

    @property
    def address(self) -> tuple[int | str, ...]:
        """The address of the calibration's draws."""
        return (self.stage, self.generation) if self.generation else (self.stage,)

    def mask(self, measure: Measure) -> tuple[Mask, Tensor]:
        """The new mask, and the last scores (D,) it was made by."""
        context, sieve, space = self.context, self.sieve, self.space
        scoring = self._scoring(context.train)
        score = scoring.scores(measure, *self.address)
        last: list[Tensor] = []

        def noting(active: Mask, number: int) -> Tensor:
            last[:] = [score(active, number)]
            return last[0]

        def said(number: int, mask: Mask) -> None:
            context.say(
                f"{self.stage}: calibration round {number + 1} of {sieve.calibration_rounds}, "
                f"{mask.count:,} of {space.size:,} weights active"
            )

        return scoring.calibrated(noting, said), last[0].cpu()

    def public(self, what: str, active: Mask, number: int) -> Tensor:
        """Scores on images that the server holds: validation where there is some, training otherwise."""
        context, seed = self.context, self.context.experiment.seed
        held = context.validation if len(context.validation) else context.train
        rows = generator(seed, "fisher rows", *self.address).permutation(len(held))[: self.sieve.fisher.samples]
        return self._scoring(held).measure(rows, *self.address)(what, active, number)

    def _scoring(self, feed: Examples) -> Scoring:
        context = self.context
        return Scoring(self.sieve, context.model, self.space, feed, context.autocast, context.experiment.seed)

    def scoring(self) -> list[int]:
        """The clients that score for a shared mask."""
        people = self.context.population
        rng = generator(self.context.experiment.seed, "calibration cohort", *self.address)
        count = self.sieve.clients or people.cohort_size
        return people.trainer(np.sort(rng.choice(people.trainers, count, replace=False))).tolist()


def unscored(what: str, active: Mask, number: int) -> Tensor:
    """The measure for rules that do not ask for any."""
    raise FedsieveError("this rule scores no images")


Asked = tuple[np.ndarray, tuple[int | str, ...]]  # of a client: the images it scores, and the address of its draws


@dataclass(frozen=True)
class Score(Request):
    """Sum up gradients of the active weights, or their squares, over some clients' images."""

    what: str
    names: tuple[str, ...]
    sieve: Sieve
    active: np.ndarray  # the bits of a mask
    number: int
    asked: Sequence[Asked]

    def perform(self, desk: Desk) -> Iterator[Batch]:
        scoring = _at(desk, self.sieve, self.names)
        active = Mask(scoring.space, self.active)
        places = active.indices().to(desk.train.labels.device)
        for rows, address in self.asked:
            part, count = scoring.summed(self.what, active, self.number, rows, *address)
            yield part[None, places], torch.tensor([count], device=part.device)


@dataclass(frozen=True)
class Calibrate(Request):
    """Make some clients masks of their own."""

    names: tuple[str, ...]
    sieve: Sieve
    asked: Sequence[Asked]

    def perform(self, desk: Desk) -> Iterator[Batch]:
        scoring = _at(desk, self.sieve, self.names)
        for rows, address in self.asked:
            score = scoring.scores(scoring.measure(rows, *address), *address)
            yield (torch.from_numpy(scoring.calibrated(score).bits.copy()).to(desk.train.labels.device)[None],)


def _at(desk: Desk, sieve: Sieve, names: tuple[str, ...]) -> Scoring:
    """Scoring with what a rank has."""
    space = ParamSpace.of(desk.model, names)
    return Scoring(sieve, desk.model, space, desk.train, desk.autocast, desk.seed)


def client_scores(
    context: Context, what: str, sieve: Sieve, active: Mask, number: int, asked: Sequence[Asked]
) -> Iterator[tuple[Tensor, int]]:
    """Of each client, the sum of gradients of the active weights, or their squares, (k,) float64, and how many were added."""

    def request(places: list[int]) -> Score:
        return Score(what, active.space.names, sieve, active.bits, number, [asked[place] for place in places])

    for _, (part, count) in spread(context, [len(rows) for rows, _ in asked], request, 8 * active.count):
        assert part is not None and count is not None
        yield part[0], int(count)


def client_masks(
    context: Context, sieve: Sieve, space: ParamSpace, clients: Sequence[int], *address: int | str
) -> Iterator[Mask]:
    """The masks that clients calibrate on their own images, at the weights that the model has."""
    asked = [(scored_rows(context, client, sieve.fisher.samples, *address), (*address, client)) for client in clients]

    def request(places: list[int]) -> Calibrate:
        return Calibrate(space.names, sieve, [asked[place] for place in places])

    for _, (bits,) in spread(context, [len(rows) for rows, _ in asked], request, space.size):
        assert bits is not None
        yield Mask(space, bits[0].cpu().numpy())


def scored_rows(context: Context, client: int, count: int, *address: int | str) -> np.ndarray:
    """The images that a client scores."""
    rng = generator(context.experiment.seed, "fisher rows", *address, client)
    return rng.permutation(context.population.examples(client))[:count]


def nested_tiers(context: Context, sieve: Sieve, mask: Mask, ranks: Tensor) -> dict[float, Mask]:
    """By density, the parts of a shared mask that smaller devices train: each within the next larger one.

    `ranks` (k,) are the scores of the mask's weights.
    """
    scores = torch.zeros(mask.space.size)
    scores[mask.indices()] = ranks.cpu().float()
    inside, tiers = mask, {}
    heads = attention_heads(context.model) if sieve.granularity == "attention_head" else None
    for share in tier_densities(context.population.settings.devices):
        k = max(1, round(share * mask.count))
        try:
            kept = select(
                scores,
                inside.to_bool(),
                k,
                mask.space,
                lowest=sieve.rule.lowest,
                granularity=sieve.granularity,
                min_active_per_tensor=0,
                maskable=taking_part(sieve, context.model, mask.space),
                heads=heads,
            )
        except FedsieveError as error:
            raise _too_small(sieve, share, k, error) from None
        inside = tiers[share] = Mask.from_bool(mask.space, kept)
    return tiers


def tier_densities(devices: Sequence[Device]) -> list[float]:
    """The densities below 1, from the largest on."""
    return sorted({device.density for device in devices if device.density < 1}, reverse=True)


def check_tiers(sieve: Sieve, devices: Sequence[Device], model: nn.Module, space: ParamSpace) -> None:
    """Refuse devices too small for one whole group of the mask."""
    if sieve.granularity == "weight":
        return
    taking = taking_part(sieve, model, space)
    heads = attention_heads(model) if sieve.granularity == "attention_head" else None
    for share in tier_densities(devices):
        k = round(share * (1 - sieve.sparsity) * int(taking.sum()))
        try:
            can_last(k, taking, space, granularity=sieve.granularity, heads=heads)
        except FedsieveError as error:
            raise _too_small(sieve, share, k, error) from None


def _too_small(sieve: Sieve, share: float, k: int, error: FedsieveError) -> FedsieveError:
    return FedsieveError(
        f"federation.devices: density {share:g} leaves {k:,} of the mask's weights, and it trains whole groups "
        f"({sieve.granularity}): {error}"
    )

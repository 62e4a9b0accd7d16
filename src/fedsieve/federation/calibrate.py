"""Masks across clients: one from their summed scores, one that the server scores, one of each client's own; their tiers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config import Device, Sieve
from fedsieve.errors import FedsieveError
from fedsieve.federation.channel import Channel, Part
from fedsieve.federation.distributed import spread
from fedsieve.federation.state import Context, ServerState
from fedsieve.federation.sums import sum_over_clients
from fedsieve.federation.team import Batch, Desk, Request
from fedsieve.mask.calibration import RULES
from fedsieve.mask.mask import Mask
from fedsieve.mask.selection import attention_heads, can_last, select
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.train.sieve import Sensitivity, calibrated, scorer, squared_gradients, taking_part


def is_due(sieve: Sieve, state: ServerState) -> bool:
    """Whether a shared or public mask is to be made before the next round."""
    if state.mask is None:
        return True
    # The first mask is that of round 0, the next that of round `refresh`.
    return sieve.refresh is not None and state.generation <= state.round // sieve.refresh


def sieve_at(sieve: Sieve, generation: int, rounds: int) -> Sieve:
    """The settings of a stage's n-th mask: with `start_sparsity`, the sparsity moves with each new one."""
    if sieve.start_sparsity is None or sieve.refresh is None:
        return sieve
    share = min(1.0, generation / max(1, (rounds - 1) // sieve.refresh))
    now = sieve.start_sparsity + share * (sieve.sparsity - sieve.start_sparsity)
    return sieve.model_copy(update={"sparsity": now})


def one_mask(
    context: Context,
    channel: Channel,
    space: ParamSpace,
    sieve: Sieve,
    state: ServerState,
    inform: Callable[[Sequence[int]], None],
) -> tuple[Mask, Tensor]:
    """A new mask for all clients at the weights that the model has, and the last scores (D,) it was made by.

    `inform` brings clients that score up to date.
    """
    seed = context.experiment.seed
    address = (channel.stage, state.generation) if state.generation else (channel.stage,)
    sensitivity = (
        _public_scores(context, space, sieve, address)
        if sieve.scope == "public"
        else _summed_scores(context, channel, space, sieve, state.round, address, inform)
    )
    score = scorer(sieve, context.model, space, sensitivity, seed, *address)
    last: list[Tensor] = []

    def noting(active: Mask, number: int) -> Tensor:
        last[:] = [score(active, number)]
        return last[0]

    def said(number: int, mask: Mask) -> None:
        context.say(
            f"{channel.stage}: calibration round {number + 1} of {sieve.calibration_rounds}, "
            f"{mask.count:,} of {space.size:,} weights active"
        )

    return calibrated(sieve, context.model, space, noting, said), last[0].cpu()


def _summed_scores(
    context: Context,
    channel: Channel,
    space: ParamSpace,
    sieve: Sieve,
    round: int,
    address: tuple[int | str, ...],
    inform: Callable[[Sequence[int]], None],
) -> Sensitivity:
    """Scores as sums over some clients, who hear before each calibration round what is left to score."""
    people = context.population
    count = sieve.clients or people.cohort_size
    rng = generator(context.experiment.seed, "calibration cohort", *address)
    scoring = people.trainer(np.sort(rng.choice(people.trainers, count, replace=False))).tolist()
    asked = [
        (scored_rows(context, client, -(-sieve.fisher.samples // count), *address), (*address, client))
        for client in scoring
    ]
    known: Mask | None = None

    def sensitivity(active: Mask, number: int) -> Tensor:
        nonlocal known
        if number:
            channel.down("mask", scoring, round, active, enclose=True, within=known)
        else:
            inform(scoring)
        known, places = active, active.indices()

        def parts() -> Iterator[Part]:
            found = client_scores(context, space, sieve, active, number, asked)
            for client, (part, n) in zip(scoring, found, strict=True):
                yield client, part.float(), n

        told = {"number": number, "among": count, "address": address, "over": active.id}
        total, seen = sum_over_clients(channel, "scores", round, active, parts(), clients=scoring, told=lambda _: told)
        scores = torch.zeros(space.size, device=total.device)
        return scores.index_copy_(0, places.to(total.device), (total / seen).float())

    return sensitivity


def _public_scores(context: Context, space: ParamSpace, sieve: Sieve, address: tuple[int | str, ...]) -> Sensitivity:
    """Scores on images that the server holds: validation where there is some, training otherwise."""
    held = context.validation if len(context.validation) else context.train
    rows = generator(context.experiment.seed, "fisher rows", *address).permutation(len(held))[: sieve.fisher.samples]

    def sensitivity(active: Mask, number: int) -> Tensor:
        part, seen = squared_gradients(
            sieve, context.model, space, held, active, number, rows, context.autocast, context.experiment.seed, *address
        )
        return (part / seen).float()

    return sensitivity


Asked = tuple[np.ndarray, tuple[int | str, ...]]  # of a client: the images it scores, and the address of its draws


@dataclass(frozen=True)
class Score(Request):
    """Sum up the squared gradients of the active weights over some clients' images."""

    names: tuple[str, ...]
    sieve: Sieve
    active: np.ndarray  # the bits of a mask
    number: int
    asked: Sequence[Asked]

    def perform(self, desk: Desk) -> Iterator[Batch]:
        space = ParamSpace.of(desk.model, self.names)
        active = Mask(space, self.active)
        places = active.indices().to(desk.train.labels.device)
        for rows, address in self.asked:
            part, count = squared_gradients(
                self.sieve, desk.model, space, desk.train, active, self.number, rows, desk.autocast, desk.seed, *address
            )
            yield part[None, places], torch.tensor([count], device=part.device)


@dataclass(frozen=True)
class Calibrate(Request):
    """Make some clients masks of their own."""

    names: tuple[str, ...]
    sieve: Sieve
    asked: Sequence[Asked]

    def perform(self, desk: Desk) -> Iterator[Batch]:
        sieve, model, space, seed = self.sieve, desk.model, ParamSpace.of(desk.model, self.names), desk.seed
        for rows, address in self.asked:

            def sensitivity(active: Mask, number: int, rows: np.ndarray = rows, address: Any = address) -> Tensor:
                part, seen = squared_gradients(
                    sieve, model, space, desk.train, active, number, rows, desk.autocast, seed, *address
                )
                return (part / seen).float()

            mask = calibrated(sieve, model, space, scorer(sieve, model, space, sensitivity, seed, *address))
            yield (torch.from_numpy(mask.bits.copy()).to(desk.train.labels.device)[None],)


def client_scores(
    context: Context, space: ParamSpace, sieve: Sieve, active: Mask, number: int, asked: Sequence[Asked]
) -> Iterator[tuple[Tensor, int]]:
    """Of each client, the sum of squared gradients of the active weights (k,), float64, and how many were added."""

    def request(places: list[int]) -> Score:
        return Score(space.names, sieve, active.bits, number, [asked[place] for place in places])

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
                lowest=RULES[sieve.rule].lowest,
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

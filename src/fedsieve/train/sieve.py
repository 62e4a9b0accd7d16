"""From an experiment's words to a mask: score training images by the rule, calibrate, keep what may train."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config import Fisher, Sieve
from fedsieve.errors import FedsieveError
from fedsieve.mask.calibration import LAYERS, calibrate, maskable, random_scores
from fedsieve.mask.mask import Mask
from fedsieve.mask.rules import Evidence, scores_of
from fedsieve.mask.scores import fisher_sum, gradient_sum, shrunk
from fedsieve.mask.selection import attention_heads, can_last, check_request, group_ids
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.train.feed import Autocast, Examples

CHUNK = 64  # images that are transformed at a time; how many are differentiated at a time follows from memory


Measure = Callable[
    [str, Mask, int], Tensor
]  # "fisher" or "gradient" of the weights still active, in a calibration round: (D,)
Score = Callable[[Mask, int], Tensor]


@dataclass(frozen=True, eq=False)
class Scoring:
    """Scores the weights of `space` in `model` for the rule of `sieve`, on images of `feed`."""

    sieve: Sieve
    model: nn.Module
    space: ParamSpace
    feed: Examples
    autocast: Autocast
    seed: int

    def mask(self, stage: str, on_round: Callable[[int, Mask], None] = lambda *_: None) -> Mask:
        """The mask of a stage, scored on as many images as the sieve asks for."""
        order = generator(self.seed, "fisher rows", stage).permutation(len(self.feed))
        measure = self.measure(order[: self.sieve.fisher.samples], stage)
        return self.calibrated(self.scores(measure, stage), on_round)

    def summed(
        self, what: str, active: Mask, number: int, examples: np.ndarray, *address: int | str
    ) -> tuple[Tensor, int]:
        """Squared gradients ("fisher"), or gradients, summed over some examples: (D,) float64, and how many were added."""
        settings, draws = self.sieve.fisher, None
        if not settings.labels:
            draws = generator(self.seed, "fisher labels", *address, number).random(len(examples))
        frozen = taking_part(self.sieve, self.model, self.space) & ~active.to_bool()
        with shrunk(self.model, self.space, frozen, self.sieve.shrink if number else 1.0):
            if what == "gradient":
                return gradient_sum(self.model, self.space, _batches(self.feed, examples, settings))
            return fisher_sum(
                self.model,
                self.space,
                _batches(self.feed, examples, settings),
                draws,
                per=settings.per,
                target=settings.target,
                autocast=self.autocast,
            )

    def measure(self, examples: np.ndarray, *address: int | str) -> Measure:
        """Means of gradients or their squares over some examples of the feed."""

        def mean(what: str, active: Mask, number: int) -> Tensor:
            total, count = self.summed(what, active, number, examples, *address)
            return (total / count).float()

        return mean

    def scores(self, measure: Measure, *address: int | str) -> Score:
        """The scores that the rule gives."""

        def score(active: Mask, number: int) -> Tensor:
            evidence = Evidence(
                self.sieve,
                active.to_bool(),
                self.space.read(self.model),
                lambda: random_scores(self.space, self.seed, *address),
                lambda what: measure(what, active, number),
            )
            return scores_of(self.sieve.rule, evidence)

        return score

    def calibrated(self, score: Score, on_round: Callable[[int, Mask], None] = lambda *_: None) -> Mask:
        """The mask that the sieve's calibration rounds end in."""
        sieve = self.sieve
        return calibrate(
            score,
            self.space,
            sparsity=sieve.sparsity,
            lowest=sieve.rule.lowest,
            rounds=sieve.calibration_rounds,
            schedule=sieve.schedule,
            maskable=taking_part(sieve, self.model, self.space),
            allocation=sieve.allocation,
            granularity=sieve.granularity,
            min_active_per_tensor=sieve.min_active_per_tensor,
            heads=attention_heads(self.model) if sieve.granularity == "attention_head" else None,
            on_round=on_round,
        )


def taking_part(sieve: Sieve, model: nn.Module, space: ParamSpace) -> Tensor:
    """The weights of the space that may be in the mask, bool (D,): of the asked kinds, and in groups of the asked kind."""
    taking = maskable(space, model, LAYERS if sieve.kinds == "default" else sieve.kinds)
    if sieve.granularity == "weight":
        return taking
    heads = attention_heads(model) if sieve.granularity == "attention_head" else None
    return taking & torch.from_numpy(group_ids(space, sieve.granularity, heads) >= 0)


def reached_sparsity(mask: Mask, sieve: Sieve, model: nn.Module) -> float:
    """The share of maskable weights that a mask freezes: what was asked for, or a little more where groups are whole."""
    taking = int(taking_part(sieve, model, mask.space).sum())
    return 1 - mask.count / taking if taking else 0.0


def starting_mask(sieve: Sieve, model: nn.Module, space: ParamSpace) -> Mask:
    """What calibration begins with: all weights that can be in the mask in the end."""
    taking = taking_part(sieve, model, space)
    heads = attention_heads(model) if sieve.granularity == "attention_head" else None
    k = round((1 - sieve.sparsity) * int(taking.sum()))
    lasting = can_last(
        k, taking, space, granularity=sieve.granularity, min_active_per_tensor=sieve.min_active_per_tensor, heads=heads
    )
    return Mask.from_bool(space, lasting)


def check_sieve(sieve: Sieve, model: nn.Module, space: ParamSpace) -> None:
    """Refuse a mask that cannot be made, before anything is scored: too sparse for its floors or its groups."""
    check_request(sieve.allocation, sieve.granularity)
    taking = taking_part(sieve, model, space)
    heads = attention_heads(model) if sieve.granularity == "attention_head" else None
    k = round((1 - sieve.sparsity) * int(taking.sum()))
    if k < 1:
        raise FedsieveError(
            f"mask.sparsity: {sieve.sparsity:g} of {int(taking.sum()):,} maskable weights leaves none to train"
        )
    can_last(
        k, taking, space, granularity=sieve.granularity, min_active_per_tensor=sieve.min_active_per_tensor, heads=heads
    )


def _batches(feed: Examples, examples: np.ndarray, settings: Fisher) -> Iterator[tuple[Any, Tensor]]:
    """The examples as in evaluation; with `per: batch` a batch is what is squared, otherwise only what is loaded."""
    size = settings.batch_size if settings.per == "batch" else CHUNK
    for start in range(0, len(examples), size):
        yield feed.batch(examples[start : start + size])

"""From an experiment's words to a mask: score training images by the rule, calibrate, keep what may train."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config import Fisher, Sieve
from fedsieve.errors import FedsieveError
from fedsieve.mask.calibration import LAYERS, RULES, calibrate, hybrid, maskable, random_scores
from fedsieve.mask.mask import Mask
from fedsieve.mask.scores import fisher, magnitude, shrunk
from fedsieve.mask.selection import attention_heads, can_last, check_request, group_ids
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.train.feed import Autocast, Feed

CHUNK = 64  # images that are transformed at a time; how many are differentiated at a time follows from memory


def make_mask(
    sieve: Sieve,
    model: nn.Module,
    space: ParamSpace,
    feed: Feed,
    seed: int,
    stage: str,
    autocast: Autocast,
    on_round: Callable[[int, Mask], None] = lambda *_: None,
) -> Mask:
    """The mask of a stage: the weights of `space` that its rule lets train, scored on examples of `feed`."""
    rule = RULES[sieve.rule]
    taking = taking_part(sieve, model, space)

    def sensitivity(active: Mask, number: int) -> Tensor:
        frozen = taking & ~active.to_bool()
        draws = None if sieve.fisher.labels else generator(seed, "fisher labels", stage, number).random(count)
        with shrunk(model, space, frozen, sieve.shrink if number else 1.0):
            return fisher(
                model,
                space,
                _batches(feed, examples, sieve.fisher),
                draws,
                per=sieve.fisher.per,
                target=sieve.fisher.target,
                autocast=autocast,
            ).cpu()

    def score(active: Mask, number: int) -> Tensor:
        if rule.score == "random":
            return random_scores(space, seed, stage)
        weights = magnitude(space.read(model)).cpu()
        if rule.score == "magnitude":
            return weights
        if rule.score == "fisher":
            return sensitivity(active, number)
        return hybrid(
            sensitivity(active, number), weights, alpha=sieve.alpha, scale=sieve.scale, among=active.to_bool()
        )

    examples = generator(seed, "fisher rows", stage).permutation(len(feed))[: sieve.fisher.samples]
    count = len(examples)
    return calibrate(
        score,
        space,
        sparsity=sieve.sparsity,
        lowest=rule.lowest,
        rounds=sieve.calibration_rounds,
        schedule=sieve.schedule,
        maskable=taking,
        allocation=sieve.allocation,
        granularity=sieve.granularity,
        min_active_per_tensor=sieve.min_active_per_tensor,
        heads=attention_heads(model) if sieve.granularity == "attention_head" else None,
        on_round=on_round,
    )


def taking_part(sieve: Sieve, model: nn.Module, space: ParamSpace) -> Tensor:
    """The weights of the space that may be in the mask, bool (D,)."""
    return maskable(space, model, LAYERS if sieve.kinds == "default" else sieve.kinds)


def check_sieve(sieve: Sieve, model: nn.Module, space: ParamSpace) -> None:
    """Refuse a mask that cannot be made, before anything is scored: too sparse for its floors or its groups."""
    taking = taking_part(sieve, model, space)
    check_request(sieve.allocation, sieve.granularity)
    heads = attention_heads(model) if sieve.granularity == "attention_head" else None
    if sieve.granularity != "weight":
        taking = taking & torch.from_numpy(group_ids(space, sieve.granularity, heads) >= 0)
    k = round((1 - sieve.sparsity) * int(taking.sum()))
    if k < 1:
        raise FedsieveError(
            f"mask.sparsity: {sieve.sparsity:g} of {int(taking.sum()):,} maskable weights leaves none to train"
        )
    can_last(
        k, taking, space, granularity=sieve.granularity, min_active_per_tensor=sieve.min_active_per_tensor, heads=heads
    )


def _batches(feed: Feed, examples: np.ndarray, settings: Fisher) -> Iterator[tuple[Tensor, Tensor]]:
    """The examples as in evaluation; with `per: batch` a batch is what is squared, otherwise only what is loaded."""
    size = settings.batch_size if settings.per == "batch" else CHUNK
    for start in range(0, len(examples), size):
        yield feed.batch(examples[start : start + size])

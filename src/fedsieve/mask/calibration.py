"""Calibration: rounds of score, freeze, score again that end in a mask of the asked sparsity.

The schedule is that of iterative pruning by sensitivity (SynFlow, Tanaka et al. 2020; TaLoS, Iurada et al. 2025): the
density after calibration round r of R is keep^((r+1)/R).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config import Allocation, Granularity, Rule
from fedsieve.errors import FedsieveError, did_you_mean
from fedsieve.mask.mask import Mask
from fedsieve.mask.selection import can_last, check_request, group_ids, select, true_places
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator

Schedule = Literal["exponential", "linear"]
Scale = Literal["ranks", "max", "none"]
KINDS = ("linear", "attention", "norm", "conv", "bias", "other")
# Weights and biases of every layer; tokens and position embeddings stay frozen.
LAYERS = ("linear", "attention", "norm", "conv")


def densities(sparsity: float, rounds: int, schedule: Schedule = "exponential") -> list[float]:
    """The density after each calibration round; the last is 1 - sparsity."""
    if not 0 <= sparsity < 1:
        raise FedsieveError(
            f"mask.sparsity: {sparsity:g} is not in [0, 1): it is the fraction of maskable weights frozen"
        )
    if rounds < 1:
        raise FedsieveError(f"mask.calibration_rounds: {rounds} is not 1 or more")
    steps = [(number + 1) / rounds for number in range(rounds)]
    if schedule == "exponential":
        return [(1 - sparsity) ** step for step in steps]
    if schedule == "linear":
        return [1 - sparsity * step for step in steps]
    raise FedsieveError(f'mask.schedule: "{schedule}" is not one of exponential, linear')


def maskable(space: ParamSpace, model: nn.Module, kinds: Literal["all"] | Sequence[str] = LAYERS) -> Tensor:
    """The weights that take part, bool (D,); the others stay frozen.

    A layer kind takes the weights and biases of its layers: `linear` (outside attention), `attention` (its
    projections), `norm`, `conv`. `bias` takes the biases of all of them, `other` what no layer owns: tokens, position
    embeddings, scales. `all` takes everything; the default everything but `other`. LoRA and adapters are linear
    layers like others. While LoRA's B is still zero, A has no gradient and scores zero; so does an adapter's `down` while
    `up` is zero.
    """
    wanted = set(KINDS if kinds == "all" else [kinds] if isinstance(kinds, str) else kinds)
    for kind in sorted(wanted - set(KINDS)):
        raise FedsieveError(
            f'mask.kinds: "{kind}" is not a kind.{did_you_mean(kind, KINDS)} Allowed: all, {", ".join(KINDS)}'
        )
    found = _kinds(model)
    for name in space.names:
        if name not in found:
            raise FedsieveError(f"mask.kinds: the model has no parameter {name}")
    chosen = np.array([bool(found[name] & wanted) for name in space.names], dtype=np.bool_)
    taking = torch.from_numpy(chosen.repeat(np.diff(space.offsets)))
    if space.size and not taking.any():
        raise FedsieveError(f"mask.kinds: no trained weight is of kind {', '.join(sorted(wanted))}")
    return taking


def calibrate(
    score: Tensor | Callable[[Mask, int], Tensor],
    space: ParamSpace,
    *,
    sparsity: float,
    lowest: bool | None = None,
    rule: str | None = None,
    rounds: int = 1,
    schedule: Schedule = "exponential",
    maskable: Tensor | None = None,
    allocation: Allocation = "global",
    granularity: Granularity = "weight",
    min_active_per_tensor: int = 1,
    heads: Mapping[str, int] | None = None,
    on_round: Callable[[int, Mask], None] | None = None,
) -> Mask:
    """The mask in which `sparsity` of the maskable weights (default: of all) is frozen, by `rounds` rounds of `score`.

    `score` are the scores (D,), or a function: `score(mask, round)` gives those of the weights still active in `mask`, and
    what it does with the frozen ones (shrink them, say) is its own affair. `rule` says which end of them may train, as
    `lowest` does in other words. Round r leaves round(density_r * D_maskable) weights, exactly at weight
    granularity and as many as whole groups allow otherwise; frozen stays frozen. Under `attention_head` only weights
    that belong to one head are maskable. `on_round(round, mask)` hears of each result.
    """
    check_request(allocation, granularity)
    if (rule is None) == (lowest is None):
        raise FedsieveError("calibrate: give either rule, such as least_sensitive, or lowest")
    if rule is not None and rule not in Rule.words:
        words = Rule.words
        raise FedsieveError(f'mask.rule: "{rule}" is no rule.{did_you_mean(rule, words)} Allowed: {", ".join(words)}')
    end = Rule.named(rule).lowest if rule is not None else bool(lowest)
    scores_of = score if callable(score) else lambda *_: score
    taking = torch.ones(space.size, dtype=torch.bool) if maskable is None else maskable.cpu()
    if granularity != "weight":
        taking = taking & torch.from_numpy(group_ids(space, granularity, heads) >= 0)
    total = int(taking.sum())
    targets = [round(density * total) for density in densities(sparsity, rounds, schedule)]
    if targets[-1] < 1:
        raise FedsieveError(f"mask.sparsity: {sparsity:g} of {total:,} maskable weights leaves none to train")
    # What cannot work is refused before the first, costly scoring.
    lasting = can_last(
        targets[-1],
        taking,
        space,
        granularity=granularity,
        min_active_per_tensor=min_active_per_tensor,
        heads=heads,
    )
    active = Mask.from_bool(space, lasting)
    for number, k in enumerate(targets):
        kept = select(
            scores_of(active, number),
            active.to_bool(),
            k,
            space,
            lowest=end,
            allocation=allocation,
            granularity=granularity,
            min_active_per_tensor=min_active_per_tensor,
            maskable=taking,
            heads=heads,
        )
        active = Mask.from_bool(space, kept)
        if on_round:
            on_round(number, active)
    return active


def random_scores(space: ParamSpace, seed: int, *address: int | str) -> Tensor:
    """Uniform scores (D,), the same in every calibration round: more rounds then give the same mask."""
    return torch.from_numpy(generator(seed, "mask", *address).random(space.size, dtype=np.float32))


def hybrid(
    fisher: Tensor, magnitude: Tensor, among: Tensor | None = None, alpha: float = 0.5, scale: Scale = "ranks"
) -> Tensor:
    """alpha * fisher + (1 - alpha) * magnitude, both brought to [0, 1] over the weights in `among`; float64 (D,).

    `ranks`: 0 for the lowest to 1 for the highest, equal scores sharing the mean of their ranks. `max`: divided by the
    largest. Weights outside `among` (bool (D,); default: all are inside) score 0. float64, since float32 cannot tell
    22 M ranks apart.
    """
    if not 0 <= alpha <= 1:
        raise FedsieveError(f"mask.alpha: {alpha:g} is not in [0, 1]")
    if scale not in ("ranks", "max"):
        raise FedsieveError(f'mask.scale: "{scale}" is not one of ranks, max')
    inside = torch.ones_like(fisher, dtype=torch.bool) if among is None else among.to(fisher.device)
    places = true_places(inside)
    parts = [scores.detach().to(fisher.device).float().index_select(0, places) for scores in (fisher, magnitude)]
    if any(part.isnan().any() for part in parts):
        raise FedsieveError("some scores are not numbers (NaN); the model or the data is broken", 1)
    ours, theirs = map({"ranks": _ranks, "max": _over_max, "none": Tensor.double}[scale], parts)
    combined = torch.zeros(len(fisher), dtype=torch.float64, device=fisher.device)
    return combined.index_copy_(0, places, ours.mul_(alpha).add_(theirs.mul_(1 - alpha)))


def _ranks(values: Tensor) -> Tensor:
    """Mean ranks scaled to [0, 1], float64."""
    # Zero has two signs and one rank. Floats as whole numbers in the same order: torch sorts those five times as fast on a CPU.
    bits = (values + 0.0).view(torch.int32)
    scores, places = (bits ^ (bits >> 31 & 0x7FFFFFFF)).sort()
    ranks = torch.arange(len(values), dtype=torch.float64, device=values.device)
    again = torch.zeros(len(values) + 1, dtype=torch.bool, device=values.device)  # whether a score is that before it
    torch.eq(scores[1:], scores[:-1], out=again[1:-1])
    tied = true_places(again[:-1] | again[1:])
    starts = true_places(~again.index_select(0, tied))
    lengths = starts.diff(append=starts.new_tensor([len(tied)]))
    ranks.index_copy_(0, tied, ((2 * tied[starts] + lengths - 1).double() / 2).repeat_interleave(lengths))
    most = ranks.new_tensor(max(len(values) - 1, 1))  # by a number of Python's a GPU would multiply with its inverse
    return torch.empty_like(ranks).index_copy_(0, places, ranks.div_(most))


def _over_max(values: Tensor) -> Tensor:
    values = values.double()
    return values / largest if len(values) and (largest := values.amax()) > 0 else values


def _kinds(model: nn.Module) -> dict[str, set[str]]:
    """The kinds of each parameter: its layer's, and `bias` where it is one."""
    found = {}
    for path, module in model.named_modules():
        attention = "attn" in path or "attention" in f"{path}.{type(module).__name__}".lower()
        for name, _ in module.named_parameters(recurse=False):
            kind = _layer_kind(module, attention, name)
            bias = kind != "other" and (name == "bias" or name.endswith("_bias"))
            found[f"{path}.{name}".lstrip(".")] = {kind, "bias"} if bias else {kind}
    return found


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _layer_kind(module: nn.Module, attention: bool, name: str) -> str:
    if "norm" in type(module).__name__.lower():
        return "norm"
    if isinstance(module, CONVOLUTIONS):
        return "conv"
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":  # which is GPT-2's linear layer
        return "attention" if attention else "linear"
    # Some attention modules own the joint projection or its bias themselves.
    return "attention" if attention and name.endswith(("proj_weight", "_bias")) else "other"

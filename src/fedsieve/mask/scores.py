"""Scores: one number per weight of a ParamSpace, larger = more sensitive.

The diagonal Fisher information is the mean over samples of the squared gradient of log p(y|x), y drawn from the
model's own softmax (Kunstner et al. 2019, "Limitations of the empirical Fisher approximation", say why not the
data's label). TaLoS (Iurada et al. 2025) backpropagates the sampled raw logit and shrinks frozen weights between
calibration rounds; both are here.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from fedsieve.errors import FedsieveError
from fedsieve.model.scheme import WAYS, Way
from fedsieve.model.space import ParamSpace
from fedsieve.model.stack import Stack, computed_in

Batches = Iterable[tuple[Tensor, Tensor]]
Autocast = Callable[[], AbstractContextManager]
Objective = Callable[[Tensor, Tensor], Tensor]  # of logits (..., B, C) and answers (..., B)
# Of groups (G, B, ...) and their answers (G, B): by name, the sums of their squared gradients; and what was differentiated.
Squares = Callable[[Tensor, Tensor], tuple[Mapping[str, Tensor], Tensor]]


def fisher(
    model: nn.Module,
    space: ParamSpace,
    batches: Batches,
    draws: np.ndarray | Tensor | np.random.Generator | None,
    *,
    per: Literal["sample", "batch"] = "sample",
    target: Literal["log_prob", "logit"] = "log_prob",
    memory: int | None = None,
    autocast: Autocast = nullcontext,
) -> Tensor:
    """The diagonal Fisher information of the space's weights, (D,) float32. Arguments as in `fisher_sum`."""
    total, count = fisher_sum(model, space, batches, draws, per=per, target=target, memory=memory, autocast=autocast)
    return (total / count).float()


@torch.no_grad()  # torch.func differentiates all the same; the weights outside the space then leave no graph behind
def fisher_sum(
    model: nn.Module,
    space: ParamSpace,
    batches: Batches,
    draws: np.ndarray | Tensor | np.random.Generator | None,
    *,
    per: Literal["sample", "batch"] = "sample",
    target: Literal["log_prob", "logit"] = "log_prob",
    memory: int | None = None,
    autocast: Autocast = nullcontext,
) -> tuple[Tensor, int]:
    """The sum of squared gradients over samples, (D,) float64, and the number of samples: what a client sends.

    `batches` gives (inputs, labels), already on the model's device. `draws` holds one uniform number in [0, 1) per
    sample, in order, or is a generator of them, and picks y from the model's softmax; None takes the data's labels instead.
    `per="batch"` squares the mean gradient of each of `batches`, and counts it for each sample in the batch: cheaper, and
    biased low.

    What is squared by itself, a sample or a batch, is a copy of the network in a `Stack`, so that many are differentiated at a
    time. `memory` bounds the bytes of their gradients (512 MiB on a CPU, 8 GiB on a GPU); activations come on top.
    Squares are added in float32 among those and in float64 beyond. `autocast` wraps the forward pass of `per="batch"`; per-sample
    gradients are computed in the weights' own precision.
    """
    for name, value, allowed in (("per", per, ("sample", "batch")), ("target", target, ("log_prob", "logit"))):
        if value not in allowed:
            raise FedsieveError(f"scores: {name} is {value!r}. Allowed: {', '.join(allowed)}")
    if ParamSpace.of(model, space.names) != space:
        raise FedsieveError(
            "scores: the space is not one of this model: the order or the shapes of its parameters differ"
        )
    if isinstance(draws, np.ndarray | Tensor):
        draws = torch.as_tensor(draws, dtype=torch.float64)
        if not ((draws >= 0) & (draws < 1)).all():
            raise FedsieveError("scores: draws must lie in [0, 1)")
    single, device = per == "sample", next(model.parameters()).device
    on_host = device.type == "cpu"
    most = (memory or (512 * 2**20 if on_host else 8 * 2**30)) // max(1, 4 * space.size)
    objective = functools.partial(_objective, target, draws is not None)
    total = torch.zeros(space.size, dtype=torch.float64, device=device)
    sums = space.unflatten(total)
    healthy = torch.ones((), dtype=torch.bool, device=device)
    squares: Squares | None = None
    count = 0
    with _eval_mode(model):
        for groups, answers in _groups(_answered(model, batches, draws), single, max(1, most), 64 if on_host else 256):
            if squares is None:
                # A sample alone is too small for a loop; whole batches are not, and on a CPU a loop is faster than mapping.
                way = _way(model, space, groups[0, :1], WAYS if single or not on_host else ("rules",))
                make = functools.partial(_stacked, way) if way else _looped
                squares = make(model, space, objective, nullcontext if single else autocast)
            healthy &= _add(sums, squares, groups, answers)
            count += answers.numel()
    if not (healthy & total.isfinite().all()):
        raise FedsieveError(
            "scores: a gradient is not finite. The weights or the inputs hold NaN or infinity, or overflow: "
            "check model.weights, lower the previous stage's lr, or set precision: fp32",
            1,
        )
    return total, count


def gradient_sum(model: nn.Module, space: ParamSpace, batches: Batches) -> tuple[Tensor, int]:
    """The sum over samples of the gradient of their cross-entropy, (D,) float64, and the number of samples."""
    parameters = dict(model.named_parameters())
    bound = [parameters[name] for name in space.names]
    required = [parameter.requires_grad for parameter in bound]
    total, count = torch.zeros(space.size, dtype=torch.float64, device=bound[0].device), 0
    try:
        for parameter in bound:
            parameter.requires_grad_(True)
        with _eval_mode(model), torch.enable_grad():
            for inputs, labels in batches:
                loss = nn.functional.cross_entropy(model(inputs).float(), labels, reduction="sum")
                gradients = torch.autograd.grad(loss, bound, allow_unused=True)
                found = {
                    name: torch.zeros_like(parameter) if gradient is None else gradient
                    for name, parameter, gradient in zip(space.names, bound, gradients, strict=True)
                }
                total += space.flatten(found).double()
                count += len(labels)
    finally:
        for parameter, before in zip(bound, required, strict=True):
            parameter.requires_grad_(before)
    if not total.isfinite().all():
        raise FedsieveError(
            "scores: a gradient is not finite. Check model.weights, or lower the previous stage's lr", 1
        )
    return total, count


def _answered(
    model: nn.Module, batches: Batches, draws: Tensor | np.random.Generator | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches with what tells their classes: the data's labels, or draws that pick them from the softmax."""
    seen = classes = 0
    for inputs, labels in batches:
        answers = labels
        if draws is None and not seen:
            classes = model(inputs[:1]).shape[-1]
        if draws is None and not ((labels >= 0) & (labels < classes)).all():
            raise FedsieveError(f"scores: a label is not among the model's {classes} classes")
        if isinstance(draws, np.random.Generator):
            answers = torch.from_numpy(draws.random(len(inputs)))
        elif draws is not None:
            answers = draws[seen : seen + len(inputs)]
        if len(answers) != len(inputs):
            raise FedsieveError(f"scores: {'labels' if draws is None else 'draws'} are missing for some samples")
        yield inputs, answers.to(inputs.device)
        seen += len(inputs)
    if isinstance(draws, Tensor) and seen != len(draws):
        raise FedsieveError(f"scores: {len(draws):,} draws for {seen:,} samples; each sample needs one")
    if not seen:
        raise FedsieveError("scores: there are no samples to score with")


def _groups(batches: Batches, single: bool, most: int, images: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What is squared by itself, samples or batches, side by side: (G, B, ...) and (G, B).

    At most `most` of them, and of more than one no more than so many `images`.
    """
    held: list[tuple[Tensor, Tensor]] = []
    for pair in batches:
        held += zip(*(part.split(1) for part in pair), strict=True) if single else [pair]
        while held and (ready := _ready(held, most, images)):
            yield torch.stack([inputs for inputs, _ in held[:ready]]), torch.stack([one for _, one in held[:ready]])
            del held[:ready]
    if held:
        yield torch.stack([inputs for inputs, _ in held]), torch.stack([answers for _, answers in held])


def _ready(held: list[tuple[Tensor, Tensor]], most: int, images: int) -> int:
    """How many of those held are enough to go on with; 0: more may come."""
    size = len(held[0][0])
    enough = max(1, min(most, images // size))
    alike = next((number for number, (inputs, _) in enumerate(held) if len(inputs) != size), len(held))
    return enough if alike >= enough else alike if alike < len(held) else 0


def _objective(target: str, drawn: bool, logits: Tensor, answers: Tensor) -> Tensor:
    """The target's mean over (..., B, C) logits, summed over the rest; answers are labels, or draws that pick them."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = sample_classes(logits.detach(), answers) if drawn else answers
    # A product, because vmap cannot index by a value it maps over.
    chosen = torch.arange(logits.shape[-1], device=logits.device) == labels[..., None]
    values = logits if target == "logit" else logits.log_softmax(-1)
    return (values * chosen).sum(-1).mean(-1).sum()


def _add(sums: Mapping[str, Tensor], squares: Squares, groups: Tensor, answers: Tensor) -> Tensor:
    """Add the squared gradients of groups, each for all its samples, in parts where memory does not suffice.

    Gives whether all is finite.
    """
    with contextlib.suppress(torch.cuda.OutOfMemoryError) if len(groups) > 1 else nullcontext():
        found, value = squares(groups, answers)
        for name, part in found.items():
            sums[name].add_(part.view_as(sums[name]), alpha=groups.shape[1])
        return value.isfinite().all()
    # Here and not where it failed: the error would hold on to all that was computed.
    halves = zip(groups.chunk(2), answers.chunk(2), strict=True)
    return torch.stack([_add(sums, squares, *half) for half in halves]).all()


def _way(model: nn.Module, space: ParamSpace, inputs: Tensor, ways: Sequence[Way]) -> Way | None:
    """The first of the ways to run copies of the network as one that is right for it, if any is."""
    for way in ways:
        with contextlib.suppress(FedsieveError):
            Stack(model, space, None, 2, alike=True, way=way).check(inputs)
            return way
    return None


def _stacked(way: Way, model: nn.Module, space: ParamSpace, objective: Objective, autocast: Autocast) -> Squares:
    """Groups as copies of one network, all at once."""
    stacks, cast = dict[int, Stack](), computed_in(autocast, next(model.parameters()).device)

    @torch.enable_grad()
    def squares(groups: Tensor, answers: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        count = len(groups)
        if count not in stacks:
            stacks[count] = Stack(model, space, None, count, cast, alike=True, way=way)
        with autocast():
            logits = stacks[count](groups.flatten(0, 1))
        value = objective(logits.unflatten(0, (count, -1)), answers)
        return _squared(zip(space.names, stacks[count].gradients(value), strict=True)), value.detach()

    return squares


def _looped(model: nn.Module, space: ParamSpace, objective: Objective, autocast: Autocast) -> Squares:
    """Groups one after the other."""
    weights, differentiate = _differentiated(model, space, objective, autocast)

    def squares(groups: Tensor, answers: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        sums, values = dict[str, Tensor](), []
        for pair in zip(groups, answers, strict=True):
            gradients, value = differentiate(weights, *pair)
            values.append(value)
            for name, square in _squared((name, gradient[None]) for name, gradient in gradients.items()).items():
                sums[name] = sums[name] + square if name in sums else square
        return sums, torch.stack(values)

    return squares


def _differentiated(
    model: nn.Module, space: ParamSpace, objective: Objective, autocast: Autocast
) -> tuple[dict[str, Tensor], Callable[..., tuple[dict[str, Tensor], Tensor]]]:
    """The space's weights, and the gradients of one group's objective by them."""

    # The names of a parameter in all modules that it is tied to. torch's own tying also takes a module that is used in two
    # places for two: it swaps its parameters twice, and leaves the model changed.
    tied: dict[Tensor, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            tied.setdefault(parameter, []).append(name)
    names = {name: tied[model.get_parameter(name)] for name in space.names}

    def value(weights: dict[str, Tensor], inputs: Tensor, answers: Tensor) -> Tensor:
        everywhere = {place: weight for name, weight in weights.items() for place in names[name]}
        with autocast():
            logits = functional_call(model, everywhere, (inputs,), tie_weights=False)
        return objective(logits, answers)

    return {name: model.get_parameter(name).detach() for name in space.names}, grad_and_value(value)


def _squared(gradients: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Of gradients (G, ...), the sums of their squares over the groups."""
    return {
        name: gradient.to(torch.promote_types(gradient.dtype, torch.float32)).square().sum(0)
        for name, gradient in gradients
    }


def sample_classes(logits: Tensor, draws: Tensor) -> Tensor:
    """Classes (B,) drawn from the softmax of `logits` (B, C): the first whose cumulative probability exceeds the draw."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    # The last class takes what rounding left of the cumulative sum.
    return (cumulative[..., :-1] <= draws[..., None]).sum(-1)


@contextmanager
def shrunk(model: nn.Module, space: ParamSpace, frozen: Tensor, factor: float) -> Iterator[None]:
    """Multiply the frozen weights, where `frozen` (D,) is true, by `factor` inside the block; restore them bit for bit."""
    if factor == 1:
        yield
        return
    theta = space.read(model)
    space.write(model, torch.where(frozen.to(theta.device), theta * factor, theta))
    try:
        yield
    finally:
        space.write(model, theta)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the block; every module back in its own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode

"""Scores: one number per weight of a ParamSpace, larger = more sensitive.

The diagonal Fisher information is the mean over samples of the squared gradient of log p(y|x), y drawn from the
model's own softmax (Kunstner et al. 2019, "Limitations of the empirical Fisher approximation", say why not the
data's label). TaLoS (Iurada et al. 2025) backpropagates the sampled raw logit and shrinks frozen weights between
calibration rounds; both are here.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedsieve.errors import FedsieveError
from fedsieve.model.space import ParamSpace

Batches = Iterable[tuple[Tensor, Tensor]]


def fisher(
    model: nn.Module,
    space: ParamSpace,
    batches: Batches,
    draws: np.ndarray | Tensor | np.random.Generator | None,
    *,
    per: Literal["sample", "batch"] = "sample",
    target: Literal["log_prob", "logit"] = "log_prob",
    memory: int | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
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
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[Tensor, int]:
    """The sum of squared gradients, (D,) float64, and how many were added: what a client sends.

    `batches` gives (inputs, labels), already on the model's device. `draws` holds one uniform number in [0, 1) per
    sample, in order, or is a generator of them, and picks y from the model's softmax; None takes the data's labels instead.
    `per="batch"` squares the mean gradient of each of `batches`: cheaper, and biased low.

    `memory` bounds the bytes of per-sample gradients that exist at once (512 MiB on a CPU, 8 GiB on a GPU);
    activations come on top. Squares are added in float32 inside such a chunk and in float64 across chunks.
    `autocast` wraps the forward pass of `per="batch"`; per-sample gradients are computed in the weights' own precision.
    """
    for name, value, allowed in (("per", per, ("sample", "batch")), ("target", target, ("log_prob", "logit"))):
        if value not in allowed:
            raise FedsieveError(f"scores: {name} is {value!r}. Allowed: {', '.join(allowed)}")
    if ParamSpace.of(model, space.names) != space:
        raise FedsieveError(
            "scores: the space is not one of this model: the order or the shapes of its parameters differ"
        )
    inside = set(space.names)
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters() if name in inside}
    device = next(model.parameters()).device
    rng = draws if isinstance(draws, np.random.Generator) else None
    if isinstance(draws, np.random.Generator):
        draws = np.zeros(0)  # drawn batch by batch below
    uniforms = None if draws is None else torch.as_tensor(draws, dtype=torch.float64)
    if uniforms is not None and not ((uniforms >= 0) & (uniforms < 1)).all():
        raise FedsieveError("scores: draws must lie in [0, 1)")

    def objective(weights: dict[str, Tensor], inputs: Tensor, answers: Tensor) -> Tensor:
        """The mean of the target over (B, ...) inputs; answers (B,) are labels, or the draws that pick them."""
        with autocast():
            logits = functional_call(model, weights, (inputs,))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = answers if uniforms is None else sample_classes(logits.detach(), answers)
        # A product, because vmap cannot index by a value it maps over.
        chosen = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
        values = logits if target == "logit" else logits.log_softmax(-1)
        return (values * chosen).sum(-1).mean()

    differentiate = grad_and_value(objective)
    chunk = None
    if per == "sample":  # the gradients of batches of one, side by side
        bytes_each = sum(tensor.numel() * tensor.element_size() for tensor in parameters.values())
        budget = memory if memory is not None else 512 * 2**20 if device.type == "cpu" else 8 * 2**30
        chunk = max(1, budget // max(1, bytes_each))
        differentiate = vmap(differentiate, in_dims=(None, 0, 0))

    total = torch.zeros(space.size, dtype=torch.float64, device=device)
    sums = space.unflatten(total)
    healthy = torch.ones((), dtype=torch.bool, device=device)
    count = samples = 0
    # vmap has no rules for fused attention (it loops, with a warning), nor for mixed-precision attention and LayerNorm.
    attention = sdpa_kernel(SDPBackend.MATH) if chunk else nullcontext()
    if chunk:
        autocast = nullcontext
    with _eval_mode(model), attention:
        for inputs, labels in batches:
            first, samples = samples, samples + len(inputs)
            if rng is not None and uniforms is not None:
                uniforms = torch.cat([uniforms, torch.from_numpy(rng.random(len(inputs)))])
            answers = labels if uniforms is None else uniforms[first:samples].to(inputs.device)
            if uniforms is None and not first:
                classes = functional_call(model, parameters, (inputs[:1],)).shape[-1]
            if uniforms is None and not ((labels >= 0) & (labels < classes)).all():
                raise FedsieveError(f"scores: a label is not among the model's {classes} classes")
            if len(answers) != len(inputs):
                raise FedsieveError(f"scores: {'labels' if uniforms is None else 'draws'} are missing for some samples")
            if chunk is None:
                pieces: Iterable[tuple[Tensor, Tensor]] = [(inputs, answers)]
            else:
                pieces = zip(inputs.unsqueeze(1).split(chunk), answers.unsqueeze(1).split(chunk), strict=True)
            for piece in pieces:
                gradients, values = differentiate(parameters, *piece)
                healthy &= values.isfinite().all()
                for name, gradient in gradients.items():
                    squares = gradient.square()
                    sums[name] += squares if chunk is None else squares.sum(0)
                del gradients  # before the next chunk's are made
                count += 1 if chunk is None else len(piece[0])
    if uniforms is not None and samples != len(uniforms):
        raise FedsieveError(f"scores: {len(uniforms):,} draws for {samples:,} samples; each sample needs one")
    if not count:
        raise FedsieveError("scores: there are no samples to score with")
    if not (healthy & total.isfinite().all()):
        raise FedsieveError(
            "scores: a gradient is not finite. The weights or the inputs hold NaN or infinity, or overflow: "
            "check model.weights, lower the previous stage's lr, or set precision: fp32",
            1,
        )
    return total, count


def sample_classes(logits: Tensor, draws: Tensor) -> Tensor:
    """Classes (B,) drawn from the softmax of `logits` (B, C): the first whose cumulative probability exceeds the draw."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    # The last class takes what rounding left of the cumulative sum.
    return (cumulative[..., :-1] <= draws[..., None]).sum(-1)


def magnitude(theta: Tensor) -> Tensor:
    """|w|, (D,)."""
    return theta.detach().abs()


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

"""SparseSGDM and SparseAdamW: optimizers that know only the active weights of a mask.

Masking the gradient and then calling SGD is not enough: weight decay and old momentum still move frozen weights.
Here the active weights are gathered, stepped by torch's own arithmetic in torch's own order, and scattered back, so
frozen weights keep their bits, the state has k entries, and a mask of ones (or none) gives torch.optim's bits.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace

Params = nn.Module | Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
Correction = Literal["reset", "scale", "keep"]


class StateBytes(NamedTuple):
    """What an optimizer holds: its own state, and the index of active weights that optimizers of one mask can share."""

    state: int
    shared_index: int


class _Sparse(torch.optim.Optimizer):
    """Gather the active entries, let `_update` step them, scatter them back."""

    # What `momentum_correction: scale` multiplies.
    _momentum: str

    def __init__(self, params: Params, mask: Mask | None, defaults: dict[str, Any]) -> None:
        for name in ("rescale", "clip_norm"):
            if (value := defaults[name]) is not None and not value > 0:
                raise FedsieveError(f"{name} must be above 0 or None, not {value!r}")
        for name in ("lr", "weight_decay"):
            if not 0 <= defaults[name] < math.inf:
                raise FedsieveError(f"{name} must be 0 or above, not {defaults[name]!r}")
        if defaults["momentum_correction"] not in ("reset", "scale", "keep"):
            raise FedsieveError(
                f"momentum_correction is {defaults['momentum_correction']!r}. Allowed: reset, scale, keep"
            )
        self._space: ParamSpace | None = None  # of the first mask: others must fit it
        self._indices: list[Tensor | None]  # one per parameter, places inside it; None: all of it
        super().__init__(_matched(params, mask), defaults | {"mask": None if mask is None else mask.id})
        self._indices = self._places(mask)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group: the mask spans all parameters."""
        if self.param_groups:
            raise FedsieveError("a sparse optimizer has one group of parameters, which its mask spans")
        super().add_param_group(param_group)

    @property
    def _params(self) -> list[Tensor]:
        return self.param_groups[0]["params"]

    def _places(self, mask: Mask | None) -> list[Tensor | None]:
        if mask is None:
            return [None] * len(self._params)
        if tuple(tuple(tensor.shape) for tensor in self._params) not in (mask.space.shapes, ((mask.space.size,),)):
            raise FedsieveError(
                f"the parameters do not match the mask's {len(mask.space.names)} tensors of {mask.space.size:,} weights. "
                "Give a model, its named_parameters(), or one bound vector"
            )
        bound = [getattr(tensor, "fedsieve_space", mask.space.id) for tensor in self._params[:1]]
        if self._space is not None:
            mask.check(self._space)
        elif bound != [mask.space.id][: len(bound)]:
            raise FedsieveError("the mask belongs to another space than the vector's, though they are of one size")
        self._space = mask.space
        index, ends = mask.indices(), torch.tensor([tensor.numel() for tensor in self._params]).cumsum(0)
        parts = index.tensor_split(torch.searchsorted(index, ends)[:-1])
        starts = [0, *ends.tolist()]
        return [
            (part - start if start else part).to(tensor.device)
            for part, start, tensor in zip(parts, starts, self._params, strict=False)
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the active weights. Gradients are read, never written."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        work = [
            (tensor, index, tensor.grad if index is None else tensor.grad.take(index))
            for tensor, index in zip(self._params, self._indices, strict=True)
            if tensor.grad is not None
        ]
        factor = self._factor([gradient for _, _, gradient in work])
        for tensor, index, gradient in work:
            if factor is not None:
                gradient = gradient * factor
            if index is None:
                self._update(tensor, gradient, self.state[tensor], group)
                continue
            weights = tensor.take(index)
            self._update(weights, gradient, self.state[tensor], group)
            tensor.view(-1).index_copy_(0, index, weights)
        return loss

    def _factor(self, gradients: list[Tensor]) -> Tensor | None:
        """What the active gradients are multiplied by: rescaled to the dense norm first, clipped then. No host sync."""
        rescale, clip_norm = self.param_groups[0]["rescale"], self.param_groups[0]["clip_norm"]
        if not gradients or (rescale is None and clip_norm is None):
            return None
        dense = None
        if rescale is not None:
            dense = _norm([tensor.grad for tensor in self._params if tensor.grad is not None])
        return gradient_factor(_norm(gradients), dense, rescale, clip_norm)

    def _update(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Step `weights` in place."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients in place: those of a bound vector are views, and must stay what backward writes to."""
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def set_mask(self, mask: Mask | None) -> None:
        """Train the weights of `mask` from here on. Weights new to it start with no state.

        Weights in both masks lose their state too (`reset`), keep it (`keep`), or keep the fraction of their momentum
        that is the share of the new mask they make up (`scale`): the more the mask changed, the less old steps count.
        """
        correction = self.param_groups[0]["momentum_correction"]
        old, new = self._indices, self._places(mask)
        self._indices, self.param_groups[0]["mask"] = new, None if mask is None else mask.id
        if correction == "reset":
            self.state.clear()
            return
        kept = size = 0
        for tensor, before, after in zip(self._params, old, new, strict=True):
            everything = torch.arange(tensor.numel(), device=tensor.device)
            before, after = everything if before is None else before, everything if after is None else after
            place = torch.searchsorted(before, after).clamp(max=max(0, len(before) - 1))
            found = before[place] == after if len(before) else torch.zeros_like(after, dtype=torch.bool)
            kept, size = kept + int(found.sum()), size + len(after)
            state = self.state.get(tensor, {})
            for name, value in state.items():
                if value.dim():
                    carried = value.new_zeros(len(after))
                    carried[found] = value.reshape(-1)[place[found]]
                    state[name] = carried.view_as(tensor) if mask is None else carried
        if correction == "scale":
            for state in self.state.values():
                if self._momentum in state:
                    state[self._momentum] *= kept / max(1, size)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`; one of another mask is refused."""
        if state_dict["param_groups"][0].get("mask") != self.param_groups[0]["mask"]:
            raise FedsieveError("the optimizer's state belongs to another mask than the one it is loaded under")
        super().load_state_dict(state_dict)

    def state_bytes(self) -> StateBytes:
        """Bytes of the state (4 per active weight and buffer in float32), and apart from it of the index."""
        held = [value for state in self.state.values() for value in state.values() if value.dim()]
        return StateBytes(_bytes(held), _bytes([index for index in self._indices if index is not None]))


class SparseSGDM(_Sparse):
    """SGD with momentum on the active weights of `mask` (None: all).

    `params` is a bound vector (`ParamSpace.bind`), a model or named parameters (those of the mask's space train), or
    parameters in the order of the mask's space. `rescale` multiplies the masked gradient by ||g|| / ||m*g||, at most
    by `rescale`; `clip_norm` then bounds its L2 norm. `momentum_correction` says what `set_mask` does to the momentum.
    """

    _momentum = "momentum_buffer"

    def __init__(
        self,
        params: Params,
        mask: Mask | None = None,
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        rescale: float | None = None,
        clip_norm: float | None = None,
        momentum_correction: Correction = "reset",
    ) -> None:
        if not 0 <= momentum < 1 or (nesterov and not momentum):
            raise FedsieveError(f"momentum must lie in [0, 1), and above 0 with nesterov, not {momentum!r}")
        super().__init__(
            params,
            mask,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "rescale": rescale,
                "clip_norm": clip_norm,
                "momentum_correction": momentum_correction,
            },
        )

    def _update(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        sgd_update(weights, gradient, state, group)


class SparseAdamW(_Sparse):
    """AdamW (Loshchilov & Hutter 2019) on the active weights of `mask` (None: all). The rest as in `SparseSGDM`.

    Unless the momentum is reset, `set_mask` keeps the step count too, so the bias of weights new to the mask is not
    corrected: their first steps are up to (1 - beta1) / sqrt(1 - beta2) times as long.
    """

    _momentum = "exp_avg"

    def __init__(
        self,
        params: Params,
        mask: Mask | None = None,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        rescale: float | None = None,
        clip_norm: float | None = None,
        momentum_correction: Correction = "reset",
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise FedsieveError(f"betas must lie in [0, 1), not {betas!r}")
        super().__init__(
            params,
            mask,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "rescale": rescale,
                "clip_norm": clip_norm,
                "momentum_correction": momentum_correction,
            },
        )

    def _update(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        adamw_update(weights, gradient, state, group)


# --- the arithmetic, elementwise, on tensors of any shape ------------------------------------------------------------


def sgd_update(weights: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """One step of SGD with momentum on `weights`, in place, in torch's own order of operations."""
    if group["weight_decay"]:
        gradient = gradient.add(weights, alpha=group["weight_decay"])
    if momentum := group["momentum"]:
        if (buffer := state.get("momentum_buffer")) is None:
            buffer = state["momentum_buffer"] = gradient.clone()
        else:
            buffer.mul_(momentum).add_(gradient)
        gradient = gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer
    weights.add_(gradient, alpha=-group["lr"])


def adamw_update(weights: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """One step of AdamW on `weights`, in place, in torch's own order of operations."""
    if not state:
        # The step stays on the host, so that reading it never waits for the device.
        state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(weights)}
        state["exp_avg_sq"] = torch.zeros_like(weights)
    lr, (beta1, beta2) = group["lr"], group["betas"]
    state["step"] += 1
    step = state["step"].item()
    if group["weight_decay"]:
        weights.mul_(1 - lr * group["weight_decay"])
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (1 - beta2**step) ** 0.5
    denominator = (state["exp_avg_sq"].sqrt() / scale).add_(group["eps"])
    weights.addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - beta1**step))


def gradient_factor(norm: Tensor, dense: Tensor | None, rescale: float | None, clip_norm: float | None) -> Tensor:
    """What active gradients of L2 `norm` are multiplied by: rescaled to the `dense` norm first, clipped then."""
    factor = torch.ones_like(norm)
    if rescale is not None and dense is not None:
        # 0 / 0 where no active weight has a gradient: any factor does.
        factor = (dense / norm).nan_to_num(nan=1.0, posinf=rescale).clamp(max=rescale)
    if clip_norm is not None:
        # As torch.nn.utils.clip_grad_norm_ has it.
        factor = factor * (clip_norm / (norm * factor + 1e-6)).clamp(max=1.0)
    return factor


def _matched(params: Params, mask: Mask | None) -> list[Tensor]:
    """The tensors to train; named ones in the order of the mask's space."""
    if isinstance(params, nn.Module):
        params = [(name, tensor) for name, tensor in params.named_parameters() if tensor.requires_grad]
    items: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    if items and isinstance(items[0], tuple):
        named = dict(items)
        names = tuple(named) if mask is None else mask.space.names
        if missing := [name for name in names if name not in named]:
            raise FedsieveError(f"the mask covers {missing[0]}, which is not among the parameters that train")
        items = [named[name] for name in names]
    tensors: list[Tensor] = [item for item in items if isinstance(item, Tensor)]
    if len(tensors) != len(items):
        raise FedsieveError("a sparse optimizer takes tensors or (name, tensor) pairs in one group: its mask spans all")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise FedsieveError("a sparse optimizer needs contiguous parameters; call .contiguous() on the weights first")
    return tensors


def _norm(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of all entries."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

"""Modules of any kind for many clients at once: their own forward pass under `torch.vmap`, differentiated from outside.

It knows every layer that vmap knows, and so more than rules do. It is slower where vmap launches more and smaller kernels.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten


class _Bound(nn.Module):
    """A module by the forward pass that it had when this was made: a stack replaces the one it shows."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.call = module, module.forward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.call(*inputs, **named)


def mapped(module: nn.Module, leaves: Mapping[str, Tensor], clients: int) -> Callable[..., Any]:
    """The module's forward pass for the batches of `clients` clients, one after the other.

    `leaves` gives some of its parameters, by their names in it, as (clients, ...). Among its inputs, those as long as the first tensor
    hold the clients' batches, and all clients share the others. Each of its outputs holds the clients' batches.
    """
    bound = _Bound(module)
    weights = {f"module.{name}": leaf for name, leaf in leaves.items()}

    def forward(*inputs: Any, **named: Any) -> Any:
        given, form = tree_flatten((inputs, named))
        length = next(len(value) for value in given if isinstance(value, Tensor))
        dealt = [
            n for n, value in enumerate(given) if isinstance(value, Tensor) and value.dim() and len(value) == length
        ]
        shape: list[Any] = []

        def one(mine: dict[str, Tensor], *batches: Tensor) -> tuple[Tensor, ...]:
            for place, batch in zip(dealt, batches, strict=True):
                given[place] = batch
            inputs, named = tree_unflatten(given, form)
            with _Attention():
                found, into = tree_flatten(functional_call(bound, mine, inputs, named, tie_weights=False))
            shape[:] = into, found
            return tuple(value for value in found if isinstance(value, Tensor))

        batches = [given[place].unflatten(0, (clients, -1)) for place in dealt]
        outputs = iter(torch.vmap(one)(weights, *batches))
        into, found = shape
        return tree_unflatten(
            [next(outputs).flatten(0, 1) if isinstance(value, Tensor) else value for value in found], into
        )

    return forward


class _Attention(TorchFunctionMode):
    """Fused attention for all clients at once: vmap has no rule for it, and would take them one by one."""

    def __torch_function__(
        self, function: Any, types: Any, inputs: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function is F.multi_head_attention_forward:  # it calls fused attention where no mode sees it
            with sdpa_kernel(SDPBackend.MATH):
                return function(*inputs, **named)
        given = (
            dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), inputs, strict=False)) | named
        )
        if function is not F.scaled_dot_product_attention or given["query"].dim() < 3:
            return function(*inputs, **named)
        tensors = [given.pop(name, None) for name in ("query", "key", "value", "attn_mask")]
        return _Fused.apply(*tensors, tuple(sorted(given.items())))


class _Fused(torch.autograd.Function):
    """Attention whose clients vmap lays into its batch axis."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, more: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, **dict(more))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved: vmap calls what is below, and torch differentiates that."""

    @staticmethod
    def vmap(info: Any, dims: Any, *given: Any) -> Any:
        query, key, value, mask, more = given

        def laid(tensor: Tensor, dim: int | None) -> Tensor:
            whole = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            return whole.flatten(0, 1)

        query, key, value = (laid(tensor, dim) for tensor, dim in zip((query, key, value), dims[:3], strict=True))
        if mask is not None and (dims[3] is not None or (mask.dim() == query.dim() and len(mask) > 1)):
            own = mask.movedim(dims[3], 0) if dims[3] is not None else mask.expand(info.batch_size, *mask.shape)
            own = own[:, *[None] * (query.dim() + 1 - own.dim())]  # (clients, batch or 1, ..., rows, columns)
            batch = len(query) // info.batch_size
            mask = own.expand(len(own), batch, *own.shape[2:]).flatten(0, 1)
        attended = F.scaled_dot_product_attention(query, key, value, mask, **dict(more))
        return attended.unflatten(0, (info.batch_size, -1)), 0

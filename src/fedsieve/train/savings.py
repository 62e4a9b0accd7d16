"""Arithmetic that a mask makes unnecessary.

A tensor that is frozen whole needs no gradient, and where the first blocks are frozen whole autograd never walks back
through them. A linear layer of which only some rows train needs the weight gradient of those rows alone. Masks scattered
over single weights save neither: their gradients are computed dense and then sieved.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsieve.mask.mask import Mask

# Above this share of active rows, gathering them costs more than it saves.
WORTHWHILE = 0.75


def spare_frozen(model: nn.Module, mask: Mask) -> Callable[[], None]:
    """Let `model` skip what `mask` freezes; gives the function that undoes it.

    The model's parameters must be bound to the mask's space. Gradients of active weights stay the same; those of frozen
    weights become zero or absent.
    """
    parameters = dict(model.named_parameters())
    counts = mask.counts()
    for name, count in counts.items():
        parameters[name].requires_grad_(count > 0)
    spared: list[nn.Module] = []
    for path, module in model.named_modules():
        name = f"{path}.weight"
        if isinstance(module, nn.Linear) and 0 < counts.get(name, 0) < module.weight.numel():
            rows = mask.tensor(name).any(1).nonzero().squeeze(1)
            if len(rows) <= WORTHWHILE * module.out_features:
                _spare_rows(module, rows.to(module.weight.device))
                spared.append(module)

    def undo() -> None:
        for name in counts:
            parameters[name].requires_grad_()
        for module in spared:
            del module.forward  # the class's own shows again

    return undo


def _spare_rows(module: nn.Linear, rows: Tensor) -> None:
    def forward(inputs: Tensor) -> Tensor:
        weight, bias = module.weight, module.bias
        kind = inputs.dtype
        if torch.is_autocast_enabled(inputs.device.type):
            # Autocast does not look inside a custom function.
            kind = torch.get_autocast_dtype(inputs.device.type)
        # The parameter goes in as it is, so that its gradient can be added to where it lies.
        return _RowLinear.apply(inputs.to(kind), weight, None if bias is None else bias.to(kind), rows, kind)

    module.forward = forward  # type: ignore[assignment, method-assign]


class _RowLinear(torch.autograd.Function):
    """A linear layer whose weight gradient is computed for some rows, and added to them in `weight.grad`."""

    @staticmethod
    def forward(ctx, inputs, weight, bias, rows, kind):  # type: ignore[no-untyped-def]
        cast = weight.to(kind)
        ctx.save_for_backward(inputs, cast, rows)
        ctx.parameter = weight
        return F.linear(inputs, cast, bias)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        inputs, cast, rows = ctx.saved_tensors
        to_inputs = gradient @ cast if ctx.needs_input_grad[0] else None
        flat = gradient.reshape(-1, cast.shape[0])
        if ctx.needs_input_grad[1]:
            part = _tall_product(flat.index_select(1, rows), inputs.reshape(-1, cast.shape[1]))
            ctx.parameter.grad.index_add_(0, rows, part.to(ctx.parameter.grad.dtype))
        to_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return to_inputs, None, to_bias, None, None


def _tall_product(a: Tensor, b: Tensor) -> Tensor:
    """a.T @ b of two tall matrices, in pieces added up: one product of so few rows would leave most of a GPU idle."""
    pieces = next((count for count in (16, 8, 4, 2) if len(a) % count == 0 and len(a) >= 512 * count), 1)
    if pieces == 1 or not a.is_cuda:
        return a.T @ b
    products = a.view(pieces, -1, a.shape[1]).mT @ b.view(pieces, -1, b.shape[1])
    return products.sum(0, dtype=torch.float32)

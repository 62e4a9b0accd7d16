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
WORTHWHILE = 0.2


def spare_frozen(model: nn.Module, mask: Mask, rows: bool = True) -> Callable[[], None]:
    """Let `model` skip what `mask` freezes; gives the function that undoes it. `rows` also skips frozen rows.

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
        if rows and isinstance(module, nn.Linear) and 0 < counts.get(name, 0) < module.weight.numel():
            active = mask.tensor(name).any(1).nonzero().squeeze(1)
            biases = active[:0]
            if counts.get(f"{path}.bias", 0):
                biases = mask.tensor(f"{path}.bias").nonzero().squeeze(1)
            if len(active) <= WORTHWHILE * module.out_features:
                _spare_rows(module, active.to(module.weight.device), biases.to(module.weight.device))
                spared.append(module)

    def undo() -> None:
        for name in counts:
            parameters[name].requires_grad_()
        for module in spared:
            del module.forward  # the class's own shows again

    return undo


def _spare_rows(module: nn.Linear, rows: Tensor, biases: Tensor) -> None:
    def forward(inputs: Tensor) -> Tensor:
        operands: list[Tensor | None] = [inputs, module.weight, module.bias]
        if torch.is_autocast_enabled(inputs.device.type):
            # Autocast does not look inside a custom function.
            kind = torch.get_autocast_dtype(inputs.device.type)
            operands = [None if operand is None else operand.to(kind) for operand in operands]
        return _RowLinear.apply(*operands, rows, biases)

    module.forward = forward  # type: ignore[assignment, method-assign]


class _RowLinear(torch.autograd.Function):
    """A linear layer whose gradients by weight and bias are computed for some rows, and zero for the others."""

    @staticmethod
    def forward(ctx, inputs, weight, bias, rows, biases):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inputs, weight, rows, biases)
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        inputs, weight, rows, biases = ctx.saved_tensors
        to_inputs = gradient @ weight if ctx.needs_input_grad[0] else None
        flat = gradient.reshape(-1, weight.shape[0])
        to_weight = to_bias = None
        if ctx.needs_input_grad[1]:
            part = flat.index_select(1, rows).T @ inputs.reshape(-1, weight.shape[1])
            to_weight = torch.zeros_like(weight).index_copy(0, rows, part)
        if ctx.needs_input_grad[2]:
            to_bias = weight.new_zeros(weight.shape[0]).index_copy(0, biases, flat.index_select(1, biases).sum(0))
        return to_inputs, to_weight, to_bias, None, None

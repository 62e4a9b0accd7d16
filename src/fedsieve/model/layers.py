"""The layers that a stack knows: each runs for many clients at once, with weights of their own.

A rule is found by a layer's exact type, since a subclass may compute something else, and it reads or refuses every attribute that
changes the layer's result.
"""

import functools
import math
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from fedsieve.model.stack import Stack

Forward = Callable[[Tensor], Tensor]


class LayerRule(NamedTuple):
    """How layers of one type are stacked."""

    make: Callable[..., Forward]  # of the layer, the stack, and the names of the layer's parameters in the model
    refuse: Callable[[Any], str] = lambda module: ""  # why a layer of the type is not stacked after all; empty if it is
    needs: Set[str] = frozenset({"weight"})  # the layer's parameters, but for a bias that it may have
    norm: bool = False  # its weights are normed or norm something: autocast leaves them in float32, and so does a stack


class _Product(torch.autograd.Function):
    """rows @ weight.T + bias for every client, with gradients made as a compiler and the optimizer want them.

    The gradient by the weight lies in memory as the weight does. That by the bias is a product with ones: a compiler that
    sees a sum fuses it with what made the gradient, and so makes that twice. Forward, the bias is not baddbmm's, which
    first writes it everywhere; a compiler moves the sum into what follows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        outputs = rows @ weight.mT
        return outputs if bias is None else outputs + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight), (gradient,) = ctx.saved_tensors, gradients
        by_rows, by_weight, by_bias = ctx.needs_input_grad
        return (
            gradient @ weight if by_rows else None,
            gradient.mT @ rows if by_weight else None,
            gradient.new_ones(len(gradient), 1, gradient.shape[1]) @ gradient if by_bias else None,
        )


def product(rows: Tensor, weight: Tensor, bias: Tensor | None, cast: torch.dtype | None) -> Tensor:
    """A linear layer on rows (clients, rows, features).

    Its weight is (clients, out, features) and its bias (clients, 1, out), or they are frozen ones that all clients share.
    Autocast, to `cast`, does not look inside a custom function.
    """
    kind = cast or weight.dtype
    return _Product.apply(rows.to(kind), weight.to(kind), None if bias is None else bias.to(kind))


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        wide = inputs.float()
        return (wide * _normal(wide)[0]).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inputs,), (gradient,) = ctx.saved_tensors, gradients
        wide = inputs.float()
        below, density = _normal(wide)
        return (gradient.float() * (below + wide * density)).to(gradient.dtype)


def gelu(inputs: Tensor) -> Tensor:
    """x times the share of the normal distribution below x, right to 1e-6 and so exact in half precision.

    Compiled, it is a shorter formula than torch's: a GPU computes here longer than it reads and writes the layer's values. Run as it
    is, every operation of the formula would read and write them, and it is torch's own.
    """
    return _Gelu.apply(inputs) if torch.compiler.is_compiling() else F.gelu(inputs)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The share of the normal distribution below x, to 1e-7 (Abramowitz and Stegun 1964, 7.1.26), and its density at x."""
    bell = torch.exp2(-0.5 * math.log2(math.e) * x * x)
    t = 1 / (1 + 0.3275911 * math.sqrt(0.5) * x.abs())
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t * bell / 2
    return torch.where(x < 0, tail, 1 - tail), bell / math.sqrt(2 * math.pi)


def as_rows(inputs: Tensor, clients: int) -> Tensor:
    """(clients * batch, ..., features) as (clients, rows, features).

    In two steps, as `as_images` is: a compiler that is to see through one sometimes copies instead, once for every use.
    """
    return inputs.unflatten(0, (clients, -1)).flatten(1, -2)


def as_images(rows: Tensor, like: Tensor) -> Tensor:
    """(clients, rows, features) in the shape of `like`, but for the features."""
    return rows.unflatten(1, (len(like) // len(rows), *like.shape[1:-1])).flatten(0, 1)


def _linear(module: nn.Linear, stack: "Stack", names: dict[str, str]) -> Forward:
    weight = stack.weight(names["weight"], 2)
    bias = stack.weight(names["bias"], 2) if "bias" in names else lambda: None

    def forward(inputs: Tensor) -> Tensor:
        return as_images(product(as_rows(inputs, stack.clients), weight(), bias(), stack.cast), inputs)

    return forward


def _last_axes(normalise: Callable[[Any, Tensor], Tensor]) -> Callable[..., Forward]:
    """The rule of a norm over the last axes (`normalized_shape`), from the norm without its weights."""

    def make(module: nn.LayerNorm, stack: "Stack", names: dict[str, str]) -> Forward:
        rank = 1 + len(module.normalized_shape)
        weight, bias = (stack.weight(names[name], rank) if name in names else None for name in ("weight", "bias"))

        def forward(inputs: Tensor) -> Tensor:
            normal = normalise(module, inputs)
            rows = normal.reshape(stack.clients, -1, *module.normalized_shape)
            rows = rows if weight is None else rows * weight()
            rows = rows if bias is None else rows + bias()
            return rows.view(inputs.shape)

        return forward

    return make


def _channels(
    normalise: Callable[[Any, Tensor], Tensor], after: Callable[[Any, Tensor], Tensor] | None = None
) -> Callable[..., Forward]:
    """The rule of a norm (or a plain scale) with one weight per channel of (N, C, ...), from the norm without its weights.

    `after` is what the layer does to its result.
    """

    def make(module: nn.Module, stack: "Stack", names: dict[str, str]) -> Forward:
        scale, shift = (stack.weight(names[name], 2) if name in names else None for name in ("weight", "bias"))

        def forward(inputs: Tensor) -> Tensor:
            images = normalise(module, inputs).unflatten(0, (stack.clients, -1))
            here = (..., *[None] * (inputs.dim() - 2))
            images = images if scale is None else images * scale()[here]
            outputs = (images if shift is None else images + shift()[here]).flatten(0, 1)
            return outputs if after is None else after(module, outputs)

        return forward

    return make


def _layer_norm(module: nn.LayerNorm, inputs: Tensor) -> Tensor:
    return F.layer_norm(inputs, module.normalized_shape, None, None, module.eps)


def _layer_norm_2d(module: nn.LayerNorm, inputs: Tensor) -> Tensor:
    return _layer_norm(module, inputs.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _rms_norm(module: nn.RMSNorm, inputs: Tensor) -> Tensor:
    return F.rms_norm(inputs, module.normalized_shape, None, module.eps)


def _rms_norm_2d(module: nn.RMSNorm, inputs: Tensor) -> Tensor:
    return _rms_norm(module, inputs.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _batch_norm(module: nn.BatchNorm2d, inputs: Tensor) -> Tensor:
    return F.batch_norm(inputs, module.running_mean, module.running_var, None, None, False, 0.0, module.eps)


def _group_norm(module: nn.GroupNorm, inputs: Tensor) -> Tensor:
    return F.group_norm(inputs, module.num_groups, None, None, module.eps)


def _drop_and_act(module: Any, outputs: Tensor) -> Tensor:
    return module.act(module.drop(outputs))


def _layer_scale_2d(module: nn.Module, stack: "Stack", names: dict[str, str]) -> Forward:
    return _channels(lambda _, inputs: inputs)(module, stack, {"weight": names["gamma"]})


def _standardised(module: Any, weight: Tensor, gain: Tensor | None) -> Tensor:
    """Weights (..., out, in, high, wide) with mean 0 and variance 1 in every filter, times `gain` and the layer's constant."""
    normal = F.layer_norm(weight, weight.shape[-3:], None, None, module.eps)
    return normal if gain is None else normal * (gain * module.scale)


def _same(module: Any, inputs: Tensor) -> Tensor:
    """Inputs padded as TensorFlow does, where timm's layer pads them."""
    from timm.layers.padding import pad_same

    padded = getattr(module, "same_pad", True)
    return pad_same(inputs, module.kernel_size, module.stride, module.dilation) if padded else inputs


def _conv(
    before: Callable[[Any, Tensor], Tensor] | None = None,
    filters: Callable[[Any, Tensor, Tensor | None], Tensor] | None = None,
) -> Callable[..., Forward]:
    """The rule of a convolution; `before` is done to its inputs, and `filters` makes what it convolves with of its weight and gain."""

    def make(module: nn.Conv2d, stack: "Stack", names: dict[str, str]) -> Forward:
        axes = len(module.kernel_size)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
        patches = axes == 2 and module.stride == module.kernel_size and module.padding == (0, 0)
        patches = patches and module.dilation == (1, 1) and module.groups == 1
        get_weight, get_gain = stack.weight(names["weight"], axes + 2), None
        if "gain" in names:
            get_gain = stack.weight(names["gain"], axes + 2)
        get_bias = stack.weight(names["bias"], 2) if "bias" in names else lambda: None  # (clients, 1, out) or (out,)

        def forward(inputs: Tensor) -> Tensor:
            clients, weight, bias = stack.clients, get_weight(), get_bias()
            if before is not None:
                inputs = before(module, inputs)
            if filters is not None:
                weight = filters(module, weight, get_gain and get_gain())
            weight = weight if weight.dim() == axes + 3 else weight.expand(clients, *weight.shape)
            if patches:  # a product of patches and weights
                high, wide = module.kernel_size
                if inputs.shape[-2] % high or inputs.shape[-1] % wide:  # what fills no patch is left out
                    inputs = inputs[..., : inputs.shape[-2] // high * high, : inputs.shape[-1] // wide * wide]
                tiles = inputs.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high))  # (N, in, rows, high, columns, wide)
                rows, columns = tiles.shape[2], tiles.shape[4]
                flat = tiles.permute(0, 2, 4, 1, 3, 5).reshape(clients, -1, weight[0, 0].numel())
                outputs = product(flat, weight.flatten(2), bias, stack.cast)
                return outputs.reshape(-1, rows, columns, weight.shape[1]).permute(0, 3, 1, 2)
            grouped = inputs.unflatten(0, (clients, -1)).transpose(0, 1).flatten(1, 2)
            outputs = convolve(
                grouped,
                weight.flatten(0, 1),
                None,
                module.stride,
                module.padding,
                module.dilation,
                module.groups * clients,
            )
            outputs = outputs.unflatten(1, (clients, -1)).transpose(0, 1)  # (clients, B, out, ...)
            here = (..., *[None] * axes)
            return (outputs if bias is None else outputs + bias[here]).flatten(0, 1)

        return forward

    return make


def _embedding(module: nn.Embedding, stack: "Stack", names: dict[str, str]) -> Forward:
    table, padding = stack.leaves[names["weight"]], module.padding_idx

    def forward(inputs: Tensor) -> Tensor:
        own = inputs.unflatten(0, (stack.clients, -1))
        first = torch.arange(stack.clients, device=inputs.device) * module.num_embeddings
        rows = own + first.view(-1, *[1] * inputs.dim())
        found = F.embedding(rows.flatten(0, 1), table.flatten(0, 1))
        # What stands for padding has no gradient.
        return found if padding is None else torch.where((inputs == padding)[..., None], found.detach(), found)

    return forward


def _plain_table(module: nn.Embedding) -> str:
    special = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    return "has max_norm, scale_grad_by_freq or sparse gradients" if special else ""


def _batch_statistics(module: Any) -> str:
    return "uses the statistics of its batch" if module.training or module.running_mean is None else ""


def _fast(module: Any) -> str:
    return "is set to timm's fast norm" if getattr(module, "_fast_norm", False) else ""


def _padding(module: Any) -> str:
    return "" if module.padding_mode == "zeros" else f"has padding_mode={module.padding_mode!r}"


@functools.cache
def rules() -> dict[type[nn.Module], LayerRule]:
    """The rule of every layer that has one, by its exact type."""
    from timm.layers import layer_scale, norm, norm_act, std_conv
    from timm.layers.conv2d_same import Conv2dSame
    from timm.layers.linear import Linear
    from torchvision.models.convnext import LayerNorm2d

    def normed(make: Callable[..., Forward], refuse: Callable[[Any], str] = _fast) -> LayerRule:
        return LayerRule(make, refuse, norm=True)

    linear, gain = LayerRule(_linear), frozenset({"weight", "gain"})
    plain, plain_2d = normed(_last_axes(_layer_norm)), normed(_channels(_layer_norm_2d))
    rms, rms_2d = normed(_last_axes(_rms_norm)), normed(_channels(_rms_norm_2d))
    batch = normed(_channels(_batch_norm), _batch_statistics)
    batch_act = normed(_channels(_batch_norm, _drop_and_act), _batch_statistics)
    group, group_act = normed(_channels(_group_norm)), normed(_channels(_group_norm, _drop_and_act))
    conv, conv_same = LayerRule(_conv(), _padding), LayerRule(_conv(_same), _padding)
    std, std_same = _conv(filters=_standardised), _conv(_same, _standardised)
    return {
        nn.Linear: linear,
        Linear: linear,
        nn.LayerNorm: plain,
        norm.LayerNorm: plain,
        norm.LayerNorm2d: plain_2d,
        norm_act.LayerNormAct2d: normed(_channels(_layer_norm_2d, _drop_and_act)),
        LayerNorm2d: plain_2d,
        nn.RMSNorm: rms,
        norm.RmsNorm: rms,
        norm.RmsNorm2d: rms_2d,
        nn.BatchNorm1d: batch,
        nn.BatchNorm2d: batch,
        nn.BatchNorm3d: batch,
        norm_act.BatchNormAct2d: batch_act,
        nn.GroupNorm: group,
        norm.GroupNorm: group,
        norm.GroupNorm1: group,
        norm_act.GroupNormAct: group_act,
        norm_act.GroupNorm1Act: group_act,
        layer_scale.LayerScale2d: LayerRule(_layer_scale_2d, needs=frozenset({"gamma"})),
        nn.Embedding: LayerRule(_embedding, _plain_table),
        nn.Conv1d: conv,
        nn.Conv2d: conv,
        nn.Conv3d: conv,
        Conv2dSame: conv_same,
        std_conv.StdConv2d: normed(std, _padding),
        std_conv.StdConv2dSame: normed(std_same, _padding),
        std_conv.ScaledStdConv2d: LayerRule(std, _padding, gain, norm=True),
        std_conv.ScaledStdConv2dSame: LayerRule(std_same, _padding, gain, norm=True),
    }


@functools.cache
def token_scales() -> tuple[type[nn.Module], ...]:
    """Modules whose only parameter is a scale (features,) of tokens (batch, tokens, features), used as it is."""
    from timm.layers.layer_scale import LayerScale

    return (LayerScale,)

"""Many copies of one network that differ in some weights, run as one network on all their batches at once.

The batch axis holds the clients' batches one after the other. Layers whose weights differ between clients are replaced by
batched products over a client axis; everything else (attention, activations, frozen layers) sees one large batch. It is
plain autograd, so fused attention, autocast, torch.compile and CUDA graphs work as for a single network.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedsieve.errors import FedsieveError
from fedsieve.model.calling import Inputs, mapped, tensors_of
from fedsieve.model.space import ParamSpace

# Outputs, and gradients by the name of what they are taken by.
Results = tuple[Tensor, dict[str, Tensor]]
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Where a network is checked: in the first of these types that it computes in, to this relative error.
PRECISIONS = ((torch.float64, 1e-5), (torch.float32, 1e-3))


class Stack:
    """`clients` copies of `model`, each with its own values of the weights in `support` (all of `space` when None).

    `support` holds ascending places in the space's vector. The values are given and their gradients taken as matrices
    (clients, k). With `cast`, weights are kept in that type but for those of norms, which autocast would not cast either;
    tokens and position embeddings too, so that what they are added to does not become twice as wide in memory.
    `whole` also takes the gradients of tensors outside the support, for their norms. With `alike`, all copies have the model's own
    weights, which take no memory then, and only their gradients differ. `compile` is what the network goes through.
    """

    def __init__(
        self,
        model: nn.Module,
        space: ParamSpace,
        support: Tensor | None,
        clients: int,
        cast: torch.dtype | None = None,
        whole: bool = False,
        alike: bool = False,
        compile: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = lambda network: network,
    ) -> None:
        self.model, self.space, self.support, self.clients, self.cast = model, space, support, clients, cast
        self.whole = whole
        self.network = compile(self._network)
        device = next(model.parameters()).device
        everything = torch.arange(space.size, device=device) if support is None else support
        bounds = torch.tensor(space.offsets, device=device)
        cuts = torch.searchsorted(everything, bounds).tolist()
        parameters = dict(model.named_parameters())
        self.parts: list[tuple[Tensor, Tensor | None, int, int]] = []  # leaf, places in it, its span of the k values
        self.leaves: dict[str, Tensor] = {}
        for name, start, first, last in zip(space.names, space.offsets, cuts, cuts[1:], strict=False):
            if first == last and not whole:
                continue
            if parameters[name]._backward_hooks:
                raise FedsieveError(f"{name} has a hook")
            weights = parameters[name].detach().to(self._type(name))
            leaf = weights.expand(clients, *weights.shape)
            leaf = leaf if alike else leaf.clone(memory_format=torch.contiguous_format)
            places = None if last - first == weights.numel() else everything[first:last] - start
            self.leaves[name] = leaf.requires_grad_()
            self.parts.append((leaf, places, first, last))
        self.forwards, self.bare = self._plan()

    @torch.no_grad()
    def refresh(self) -> None:
        """Give every copy the model's own weights again."""
        for name, leaf in self.leaves.items():
            leaf.copy_(self.model.get_parameter(name))

    @torch.no_grad()
    def load(self, values: Tensor) -> None:
        """Give every copy its own values, (clients, k)."""
        for leaf, places, first, last in self.parts:
            flat, part = leaf.view(self.clients, -1), values[:, first:last].to(leaf.dtype)
            if places is None:
                flat.copy_(part)
            else:
                flat.index_copy_(1, places, part)

    def gradients(self, total: Tensor) -> list[Tensor]:
        """The gradients of `total` by every leaf, (clients, numel) each, dense."""
        found = torch.autograd.grad(total, list(self.leaves.values()), allow_unused=True)
        pairs = zip(found, self.leaves.values(), strict=True)
        return [
            (torch.zeros_like(leaf) if gradient is None else gradient).reshape(self.clients, -1)
            for gradient, leaf in pairs
        ]

    def gather(self, gradients: list[Tensor], like: Tensor) -> Tensor:
        """Of dense gradients, the entries of the support, (clients, k) in the type of `like`."""
        pairs = zip(gradients, self.parts, strict=True)
        taken = [
            (gradient if places is None else gradient.index_select(1, places)).to(like.dtype)
            for gradient, (_, places, _, _) in pairs
        ]
        return torch.cat(taken, 1)

    def __call__(self, inputs: Inputs, network: Callable[..., Tensor] | None = None) -> Tensor:
        """The network's outputs for inputs (clients * batch, ...), client after client; `network` runs it, if given."""
        with self._patched():
            batch = len(tensors_of(inputs)[0]) // self.clients
            bare = [self._spread(name, batch) for name in self.bare]
            return (network or self.network)(inputs, *bare)

    def _network(self, inputs: Inputs, *bare: Tensor) -> Tensor:
        if not bare:
            return self.model(inputs)
        # Tying would swap a parameter twice whose module is used in two places, and leave the model changed.
        return functional_call(self.model, dict(zip(self.bare, bare, strict=True)), (inputs,), tie_weights=False)

    def _spread(self, name: str, batch: int) -> Tensor:
        """A parameter that its module uses bare (tokens, position embeddings, layer scales), one per image of the batch."""
        if name not in self.leaves:
            return self.model.get_parameter(name).detach().to(self._type(name))
        leaf = self.leaves[name]
        # Such a parameter is broadcast over the batch: (1, ...), or (features,) against (batch, tokens, features).
        one = leaf if leaf.dim() > 2 else leaf[:, None, None, :]
        return one.expand(self.clients, batch, *one.shape[2:]).flatten(0, 1)

    def _type(self, name: str) -> torch.dtype:
        """The type that a parameter is kept in."""
        owner = self.model.get_submodule(name.rpartition(".")[0])
        norm = isinstance(owner, (nn.LayerNorm, nn.BatchNorm2d))
        return self.model.get_parameter(name).dtype if self.cast is None or norm else self.cast

    def _plan(self) -> tuple[dict[nn.Module, Callable[[Tensor], Tensor]], list[str]]:
        """The layers to replace, and the parameters to replace that no layer of a known kind owns."""
        forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        bare: list[str] = []
        for path, module in self.model.named_modules():
            own = [name for name, _ in module.named_parameters(recurse=False)]
            names = {name: f"{path}.{name}".lstrip(".") for name in own}
            exact = type(module) is nn.GELU and module.approximate == "none" and "forward" not in vars(module)
            if self.cast is not None and exact:
                forwards[module] = self._gelu
                continue
            mine = [name for name in names.values() if name in self.leaves]
            if isinstance(module, (nn.Linear, nn.LayerNorm, nn.BatchNorm2d, nn.Conv2d, nn.Embedding)):
                if mine:
                    forwards[module] = self._layer(path, module, names)
                continue
            for name in mine:
                shape = self.leaves[name].shape[1:]
                if not shape or (len(shape) > 1 and shape[0] != 1):
                    raise FedsieveError(f"{name} of shape {tuple(shape)} cannot be stacked")
            bare += mine if self.cast is None else names.values()
        return forwards, bare

    def _layer(self, path: str, module: nn.Module, names: dict[str, str]) -> Callable[[Tensor], Tensor]:
        """The stacked forward pass of a layer, which must be all that calling it does."""
        make = layers().get(type(module))
        if make is None:
            raise FedsieveError(f"{path} ({type(module).__name__}) is no layer that stacking knows")
        if names.keys() not in ({"weight"}, {"weight", "bias"}):
            raise FedsieveError(f"{path} has {', '.join(names)} instead of a weight and a bias")
        if "forward" in vars(module) or any(getattr(module, hooks) for hooks in HOOKS):
            raise FedsieveError(f"{path} has a hook or a forward pass of its own")
        return make(module, self, names)

    def _gelu(self, inputs: Tensor) -> Tensor:
        """In the shape of the products before and behind, whose bias it is fused with."""
        return as_images(gelu(as_rows(inputs, self.clients)), inputs)

    def weight(self, name: str, rank: int) -> Callable[[], Tensor]:
        """Gives a parameter ready to broadcast against (clients, rows, ...): its stacked leaf, or the model's shared one.

        It knows the tensor and not its name, so that a compiler takes layers of the same shape for the same code.
        """
        if name not in self.leaves:
            shared = self.model.get_parameter(name)
            return lambda: shared.detach()
        leaf = self.leaves[name]
        return (lambda: leaf[:, None]) if leaf.dim() - 1 < rank else (lambda: leaf)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        for module, forward in self.forwards.items():
            module.forward = forward
        try:
            yield
        finally:
            for module in self.forwards:
                del module.forward  # the class's own shows again

    def check(self, inputs: Inputs) -> None:
        """Refuse a network that this way of stacking gets wrong. One network is tried once per shape of `inputs` (B, ...).

        Two copies, with random changes to their weights and random images of their own, must give the same outputs and
        gradients together as alone. Half precision would not tell: it puts sound networks off by a tenth.
        """
        known = _FAULTS.setdefault(self.model, {})
        first, *_ = tensors = tensors_of(inputs)
        key = (*self.leaves, *((tensor.dtype, tensor.shape[1:]) for tensor in tensors))
        if key not in known:
            # A network that draws random numbers must not move the caller's.
            with torch.enable_grad(), torch.random.fork_rng([first.device] if first.is_cuda else []):
                known[key] = self._fault(inputs)
        if known[key]:
            raise FedsieveError(known[key])

    def _fault(self, inputs: Inputs) -> str:
        """Why the network cannot be stacked; empty if it can."""
        fault = ""
        for kind, tolerance in PRECISIONS:
            try:
                pairs = self._twins(inputs, kind)
            except Exception as error:  # networks fail in their own ways
                fault = _does_not_stack(error)
                continue
            return next(filter(None, (_difference(*pair, tolerance) for pair in pairs)), "")
        return fault

    def _twins(self, inputs: Inputs, kind: torch.dtype) -> list[tuple[Results, Results]]:
        """What each of two copies in type `kind` gives when both run together, and when it runs alone."""
        model = copy.deepcopy(self.model).to(kind).requires_grad_(False)
        twins = Stack(model, self.space, self.support, clients=2, whole=self.whole)
        device = tensors_of(inputs)[0].device
        generator = torch.Generator(device).manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return 2 * torch.rand(shape, generator=generator, device=device).to(kind) - 1

        def examples(tensor: Tensor) -> Tensor:
            """Two for each copy: random numbers, or, of whole numbers such as tokens, the given ones."""
            return noise(4, *tensor.shape[1:]) if tensor.is_floating_point() else tensor[[0, -1, -1, 0]]

        for leaf in twins.leaves.values():
            leaf.data += (0.1 * leaf.detach().abs().mean() + 0.01) * noise(*leaf.shape)
        batch = mapped(inputs, examples)
        together = twins(batch).unflatten(0, (2, -1))
        directions = noise(*together.shape)
        gradients = twins.gradients((together * directions).sum())
        names, pairs = list(twins.leaves), []
        own = [model.get_parameter(name).requires_grad_() for name in names]
        for one in (0, 1):
            for weights, leaf in zip(own, twins.leaves.values(), strict=True):
                weights.data.copy_(leaf.detach()[one])
            mine = slice(2 * one, 2 * one + 2)
            alone = model(mapped(batch, itemgetter(mine)))
            if kind == torch.float64 and alone.dtype != kind:
                raise TypeError(f"it computes in {alone.dtype}")
            if alone.shape != together[one].shape:
                raise ValueError(f"its outputs are {tuple(together[one].shape)} instead of {tuple(alone.shape)}")
            slopes = torch.autograd.grad((alone * directions[one]).sum(), own, materialize_grads=True)
            stacked = together[one], {name: gradient[one] for name, gradient in zip(names, gradients, strict=True)}
            pairs.append((stacked, (alone, {n: slope.flatten() for n, slope in zip(names, slopes, strict=True)})))
        return pairs

    @torch.no_grad()
    def trial(self, inputs: Inputs) -> Tensor:
        """What every copy makes of `inputs` (B, ...): (clients, B, ...); refuses a network that it cannot be run on.

        Not compiled: that would take as long as for training, and serve nothing else.
        """
        try:
            together = mapped(inputs, lambda tensor: torch.cat([tensor] * self.clients))
            outputs = self(together, self._network)
        except Exception as error:  # networks fail in their own ways
            raise FedsieveError(_does_not_stack(error)) from None
        return outputs.unflatten(0, (self.clients, -1))


def _does_not_stack(error: Exception) -> str:
    return f"it does not stack: {(str(error) or type(error).__name__).splitlines()[0][:200]}"


@torch.no_grad()
def _difference(found: Results, expected: Results, tolerance: float) -> str:
    """What differs by more than `tolerance` of its norm; empty if nothing does.

    Some gradients are zero but for rounding, such as that of an attention's key bias: none counts as smaller than a
    thousandth of all.
    """
    (output, gradients), (right, slopes) = found, expected
    error = (output - right).norm() / right.norm()
    if not error <= tolerance:
        return f"its stacked output is off by {float(error):.2g} of its norm"
    whole = torch.stack([slope.norm() for slope in slopes.values()]).norm()
    for name, slope in slopes.items():
        error = (gradients[name] - slope).norm() / slope.norm().clamp(min=1e-3 * whole)
        if not error <= tolerance:
            return f"its stacked gradient by {name} is off by {float(error):.2g} of its norm"
    return ""


def computed_in(autocast: Callable[[], AbstractContextManager], device: torch.device) -> torch.dtype | None:
    """The type that products are computed in under `autocast`; None: that of their factors."""
    with autocast():
        return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


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


def _linear(module: nn.Linear, stack: Stack, names: dict[str, str]) -> Callable[[Tensor], Tensor]:
    weight = stack.weight(names["weight"], 2)
    bias = stack.weight(names["bias"], 2) if "bias" in names else lambda: None

    def forward(inputs: Tensor) -> Tensor:
        return as_images(product(as_rows(inputs, stack.clients), weight(), bias(), stack.cast), inputs)

    return forward


def _layer_norm(module: nn.LayerNorm, stack: Stack, names: dict[str, str]) -> Callable[[Tensor], Tensor]:
    if getattr(module, "_fast_norm", False):
        raise FedsieveError("timm's fast LayerNorm cannot be stacked")
    rank = 1 + len(module.normalized_shape)
    weight, bias = (stack.weight(names[name], rank) if name in names else None for name in ("weight", "bias"))

    def forward(inputs: Tensor) -> Tensor:
        normal = F.layer_norm(inputs, module.normalized_shape, None, None, module.eps)
        rows = normal.reshape(stack.clients, -1, *module.normalized_shape)
        rows = rows if weight is None else rows * weight()
        rows = rows if bias is None else rows + bias()
        return rows.view(inputs.shape)

    return forward


def _batch_norm(module: nn.BatchNorm2d, stack: Stack, names: dict[str, str]) -> Callable[[Tensor], Tensor]:
    if module.training or module.running_mean is None:
        raise FedsieveError("a BatchNorm that uses the statistics of its batch cannot be stacked")
    scale = stack.weight(names["weight"], 2)
    shift = stack.weight(names["bias"], 2) if "bias" in names else None

    def forward(inputs: Tensor) -> Tensor:
        normal = F.batch_norm(inputs, module.running_mean, module.running_var, None, None, False, 0.0, module.eps)
        images = normal.unflatten(0, (stack.clients, -1))
        images = images * scale()[..., None, None]
        return (images if shift is None else images + shift()[..., None, None]).flatten(0, 1)

    return forward


def _conv(module: nn.Conv2d, stack: Stack, names: dict[str, str]) -> Callable[[Tensor], Tensor]:
    if module.padding_mode != "zeros":
        raise FedsieveError(f"a convolution with padding_mode={module.padding_mode!r} cannot be stacked")
    patches = module.stride == module.kernel_size and module.padding == (0, 0)
    patches = patches and module.dilation == (1, 1) and module.groups == 1
    get_weight = stack.weight(names["weight"], 4)
    get_bias = stack.weight(names["bias"], 2) if "bias" in names else lambda: None  # (clients, 1, out) or (out,)

    def forward(inputs: Tensor) -> Tensor:
        clients, weight, bias = stack.clients, get_weight(), get_bias()
        weight = weight if weight.dim() == 5 else weight.expand(clients, *weight.shape)
        if patches:  # a product of patches and weights
            high, wide = module.kernel_size
            tiles = inputs.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high))  # (N, in, rows, high, columns, wide)
            rows, columns = tiles.shape[2], tiles.shape[4]
            flat = tiles.permute(0, 2, 4, 1, 3, 5).reshape(clients, -1, weight[0, 0].numel())
            outputs = product(flat, weight.flatten(2), bias, stack.cast)
            return outputs.reshape(-1, rows, columns, weight.shape[1]).permute(0, 3, 1, 2)
        grouped = inputs.unflatten(0, (clients, -1)).transpose(0, 1).flatten(1, 2)
        outputs = F.conv2d(
            grouped,
            weight.flatten(0, 1),
            None,
            module.stride,
            module.padding,
            module.dilation,
            module.groups * clients,
        )
        outputs = outputs.unflatten(1, (clients, -1)).transpose(0, 1)  # (clients, B, out, H, W)
        return (outputs if bias is None else outputs + bias[..., None, None]).flatten(0, 1)

    return forward


def _embedding(module: nn.Embedding, stack: Stack, names: dict[str, str]) -> Callable[[Tensor], Tensor]:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise FedsieveError("an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be stacked")
    table, padding = stack.leaves[names["weight"]], module.padding_idx

    def forward(inputs: Tensor) -> Tensor:
        own = inputs.unflatten(0, (stack.clients, -1))
        first = torch.arange(stack.clients, device=inputs.device) * module.num_embeddings
        rows = own + first.view(-1, *[1] * inputs.dim())
        found = F.embedding(rows.flatten(0, 1), table.flatten(0, 1))
        # What stands for padding has no gradient.
        return found if padding is None else torch.where((inputs == padding)[..., None], found.detach(), found)

    return forward


@functools.cache
def layers() -> dict[type[nn.Module], Callable[..., Callable[[Tensor], Tensor]]]:
    """What stacks a layer, by its exact type: a subclass may compute something else."""
    from timm.layers.linear import Linear
    from timm.layers.norm import LayerNorm

    return {
        nn.Linear: _linear,
        Linear: _linear,
        nn.LayerNorm: _layer_norm,
        LayerNorm: _layer_norm,
        nn.BatchNorm2d: _batch_norm,
        nn.Conv2d: _conv,
        nn.Embedding: _embedding,
    }


# Why networks cannot be stacked (empty: they can), by what of them is stacked and the shape of their inputs.
_FAULTS: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], str]] = WeakKeyDictionary()

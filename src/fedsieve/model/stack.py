"""Many copies of one network that differ in some weights, run as one network on all their batches at once.

The batch axis holds the clients' batches one after the other. Layers whose weights differ between clients are replaced by
batched products over a client axis; everything else (attention, activations, frozen layers) sees one large batch. It is
plain autograd, so fused attention, autocast, torch.compile and CUDA graphs work as for a single network.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsieve.errors import FedsieveError
from fedsieve.model import calling
from fedsieve.model.calling import Inputs, tensors_of
from fedsieve.model.layers import as_images, as_rows, gelu, rules
from fedsieve.model.mapped import mapped
from fedsieve.model.scheme import Scheme, Way
from fedsieve.model.space import ParamSpace

# Outputs, and gradients by the name of what they are taken by.
Results = tuple[Tensor, dict[str, Tensor]]
# Where a network is checked: in the first of these types that it computes in, to this relative error.
PRECISIONS = ((torch.float64, 1e-5), (torch.float32, 1e-3))


class Stack:
    """`clients` copies of `model`, each with its own values of the weights in `support` (all of `space` when None).

    `support` holds ascending places in the space's vector. The values are given and their gradients taken as matrices
    (clients, k). With `cast`, weights are kept in that type but for those of norms, which autocast would not cast either;
    tokens and position embeddings too, so that what they are added to does not become twice as wide in memory.
    `whole` also takes the gradients of tensors outside the support, for their norms. With `alike`, all copies have the model's own
    weights, which take no memory then, and only their gradients differ. `compile` is what the network goes through. `way` is for
    layers without a rule.
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
        way: Way = "rules",
    ) -> None:
        self.model, self.space, self.support, self.clients, self.cast = model, space, support, clients, cast
        self.whole, self.way = whole, way
        self.network = compile(self._network)
        device = next(model.parameters()).device
        everything = torch.arange(space.size, device=device) if support is None else support
        bounds = torch.tensor(space.offsets, device=device)
        cuts = torch.searchsorted(everything, bounds).tolist()
        parameters = dict(model.named_parameters())
        self.parts: list[tuple[Tensor, Tensor | None, int, int]] = []  # leaf, places in it, its span of the k values
        self.leaves: dict[str, Tensor] = {}
        spans = {
            name: (start, first, last)
            for name, start, first, last in zip(space.names, space.offsets, cuts, cuts[1:], strict=False)
            if first < last or whole
        }
        self.scheme = Scheme(model, spans, way)
        for name, (start, first, last) in spans.items():
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
            bare = [self._spread(name, batch) for name in self.bare.values()]
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
        path = name.rpartition(".")[0]
        owner = self.model.get_submodule(path)
        rule = rules().get(type(owner))
        kept = self.cast is None or (rule is not None and rule.norm) or self.scheme.region(path) is not None
        return self.model.get_parameter(name).dtype if kept else self.cast  # type: ignore[return-value]

    def _plan(self) -> tuple[dict[nn.Module, Callable[..., Any]], dict[str, str]]:
        """The modules to replace, and the parameters to replace that no layer of a known kind owns."""
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        bare: dict[str, str] = {}
        for path, module in self.model.named_modules():
            if (region := self.scheme.region(path)) is not None:
                if path == region:
                    inner = {name: self.leaves[home] for name, home in self.scheme.within(module).items()}
                    forwards[module] = mapped(module, inner, self.clients)
                continue
            exact = type(module) is nn.GELU and module.approximate == "none" and "forward" not in vars(module)
            if self.cast is not None and exact:
                forwards[module] = self._gelu
                continue
            names = self.scheme.own(module)
            mine = {f"{path}.{name}".lstrip("."): home for name, home in names.items() if home in self.leaves}
            rule = rules().get(type(module))
            layer: bool = isinstance(module, tuple(rules()))
            if layer:
                if rule and mine:
                    forwards[module] = rule.make(module, self, names)
                continue
            every = {f"{path}.{name}".lstrip("."): home for name, home in names.items()}
            bare |= mine if self.cast is None else every
        return forwards, bare

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
        before = {module: vars(module).get("forward") for module in self.forwards}
        for module, stacked in self.forwards.items():
            module.forward = stacked
        try:
            yield
        finally:
            for module, forward in before.items():
                del module.forward  # the class's own shows again
                if forward is not None:
                    module.forward = forward

    def check(self, inputs: Inputs) -> None:
        """Refuse a network that this way of stacking gets wrong. One network is tried once per shape of `inputs` (B, ...).

        Two copies, with random changes to their weights and random images of their own, must give the same outputs and
        gradients together as alone. Half precision would not tell: it puts sound networks off by a tenth.
        """
        known = _FAULTS.setdefault(self.model, {})
        first, *_ = tensors = tensors_of(inputs)
        key = (self.way, *self.leaves, *((tensor.dtype, tensor.shape[1:]) for tensor in tensors))
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
        twins = Stack(model, self.space, self.support, clients=2, whole=self.whole, way=self.way)
        device = tensors_of(inputs)[0].device
        generator = torch.Generator(device).manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return 2 * torch.rand(shape, generator=generator, device=device).to(kind) - 1

        def examples(tensor: Tensor) -> Tensor:
            """Two for each copy: random numbers, or, of whole numbers such as tokens, the given ones."""
            return noise(4, *tensor.shape[1:]) if tensor.is_floating_point() else tensor[[0, -1, -1, 0]]

        for leaf in twins.leaves.values():
            leaf.data += (0.1 * leaf.detach().abs().mean() + 0.01) * noise(*leaf.shape)
        batch = calling.mapped(inputs, examples)
        together = twins(batch).unflatten(0, (2, -1))
        directions = noise(*together.shape)
        gradients = twins.gradients((together * directions).sum())
        names, pairs = list(twins.leaves), []
        own = [model.get_parameter(name).requires_grad_() for name in names]
        for one in (0, 1):
            for weights, leaf in zip(own, twins.leaves.values(), strict=True):
                weights.data.copy_(leaf.detach()[one])
            mine = slice(2 * one, 2 * one + 2)
            alone = model(calling.mapped(batch, itemgetter(mine)))
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
            together = calling.mapped(inputs, lambda tensor: torch.cat([tensor] * self.clients))
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


# Why networks cannot be stacked (empty: they can), by what of them is stacked and the shape of their inputs.
_FAULTS: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], str]] = WeakKeyDictionary()

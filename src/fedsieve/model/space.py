"""ParamSpace: the trainable parameters of a model as one flat vector.

After the backward pass everything else (optimizer, mask, message, average, drift) is a function of vectors, and
none of it knows what a layer is.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from fedsieve.errors import FedsieveError


class Layout(Protocol):
    """The weights that a vector of k values belongs to: all of a `ParamSpace`, or the active ones of a `Mask`."""

    @property
    def space(self) -> "ParamSpace": ...

    @property
    def count(self) -> int:
        """k, the number of values."""

    @property
    def tensor_counts(self) -> list[int]:
        """The number of values of each tensor of the space."""

    @property
    def mask_id(self) -> str | None:
        """The id of the mask; None for a whole space."""

    def tensor(self, name: str) -> Tensor:
        """A bool tensor in the shape of one named tensor: which of its weights have a value."""


@dataclass(frozen=True)
class ParamSpace:
    """One fixed order of named tensors: `vector[offsets[i]:offsets[i+1]]` is the tensor `names[i]` of `shapes[i]`."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module, names: Iterable[str] | None = None) -> "ParamSpace":
        """The space of the named parameters, or of all, in the model's own order."""
        parameters = dict(model.named_parameters())
        wanted = set(parameters if names is None else names)
        if unknown := wanted - set(parameters):
            raise FedsieveError(f"the model has no parameter {', '.join(sorted(unknown)[:3])}")
        kept = [(name, tuple(parameter.shape)) for name, parameter in parameters.items() if name in wanted]
        return cls(tuple(name for name, _ in kept), tuple(shape for _, shape in kept))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts, and at last the size."""
        return (0, *itertools.accumulate(torch.Size(shape).numel() for shape in self.shapes))

    @property
    def size(self) -> int:
        """D, the number of weights."""
        return self.offsets[-1]

    @cached_property
    def id(self) -> str:
        """A digest of names, order and shapes: vectors of spaces with different ids do not mix."""
        return hashlib.blake2b(repr((self.names, self.shapes)).encode(), digest_size=8).hexdigest()

    mask_id = None

    @property
    def space(self) -> "ParamSpace":
        """The space itself, as a mask names its space."""
        return self

    @property
    def count(self) -> int:
        """D, as a mask counts its active weights."""
        return self.size

    @property
    def tensor_counts(self) -> list[int]:
        """The number of weights of each tensor."""
        return [end - start for start, end in itertools.pairwise(self.offsets)]

    def tensor(self, name: str) -> Tensor:
        """All weights of one named tensor, as a mask gives its active ones."""
        return torch.ones(self.shapes[self.names.index(name)], dtype=torch.bool)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector (D,) of the named tensors. Extra entries are ignored; a missing or misshapen one is refused."""
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name not in tensors:
                raise FedsieveError(f"parameter {name} is missing")
            if tuple(tensors[name].shape) != shape:
                raise FedsieveError(f"parameter {name} has shape {tuple(tensors[name].shape)}, not {shape}")
        if not self.names:
            return torch.zeros(0)
        return torch.cat([tensors[name].detach().reshape(-1) for name in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """The named tensors as views of `vector` (..., D); leading axes (clients, say) are kept."""
        self._check(vector)
        lead = vector.shape[:-1]
        return {
            name: vector[..., start:end].view((*lead, *shape))
            for name, shape, start, end in zip(self.names, self.shapes, self.offsets, self.offsets[1:], strict=False)
        }

    def view(self, vector: Tensor, name: str) -> Tensor:
        """One named tensor as a view of `vector` (..., D)."""
        self._check(vector)
        index = self.names.index(name)
        return vector[..., self.offsets[index] : self.offsets[index + 1]].view(
            (*vector.shape[:-1], *self.shapes[index])
        )

    def read(self, model: nn.Module) -> Tensor:
        """A copy of the model's weights as a vector."""
        return self.flatten(dict(model.named_parameters()))

    def write(self, model: nn.Module, vector: Tensor) -> None:
        """Set the model's weights to `vector`."""
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in self.unflatten(vector).items():
                parameters[name].copy_(value)

    def bind(self, model: nn.Module) -> Tensor:
        """Make the space's parameters views of one leaf vector, and their gradients views of its gradient.

        Returns the vector. Only its parameters require gradients afterwards; a change of the vector is a change of
        the model, and `backward` fills `vector.grad`.
        """
        theta = self.read(model)
        theta.fedsieve_space = self.id  # type: ignore[attr-defined]  # a mask of another space is refused by it
        theta.requires_grad_()
        theta.grad = torch.zeros_like(theta)
        values, gradients = self.unflatten(theta.detach()), self.unflatten(theta.grad)
        for name, parameter in model.named_parameters():
            inside = name in values
            parameter.requires_grad_(inside)
            parameter.grad = None
            if inside:
                parameter.data = values[name]
                parameter.grad = gradients[name]
        return theta

    def _check(self, vector: Tensor) -> None:
        if vector.shape[-1] != self.size:
            raise FedsieveError(f"a vector of {vector.shape[-1]:,} weights does not fit a space of {self.size:,}")

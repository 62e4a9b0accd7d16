"""How models are called: with one argument, whose structure is the user's, for one tensor."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsieve.errors import FedsieveError

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    """All tensors of inputs. The first axis of each is examples."""
    if isinstance(inputs, Tensor):
        return (inputs,)
    return tuple(inputs.values()) if isinstance(inputs, dict) else inputs


def mapped(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Inputs of the same structure, each tensor changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, dict):
        return {name: change(tensor) for name, tensor in inputs.items()}
    return tuple(change(tensor) for tensor in inputs)


Outputs = str | Callable[[Any], Any] | None  # a key or an attribute, or what picks the tensor


def prepared(model: nn.Module, inputs: Inputs, outputs: Outputs = None) -> nn.Module:
    """A copy of a user's model that takes `inputs` as one argument and gives one tensor; tried on them.

    A tuple becomes positional arguments, and a dict keyword arguments. `outputs` picks the tensor of what the model gives; by
    default that is the tensor itself, or its `logits`. Parameters keep their names, and the copy is in eval mode.
    """
    try:
        made = copy.deepcopy(model).eval()
    except Exception as error:  # modules fail in their own ways
        raise FedsieveError(f"the model cannot be copied: {_first_line(error)}") from error
    if not isinstance(inputs, Tensor):
        made.register_forward_pre_hook(_spread_out, with_kwargs=True)
    try:
        with torch.no_grad():
            found = made(inputs)
    except Exception as error:
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors_of(inputs))
        raise FedsieveError(f"the model fails on inputs {shapes}: {_first_line(error)}") from error
    if outputs is not None or not isinstance(found, Tensor):
        pick = Pick(outputs)
        pick(made, (), found)
        made.register_forward_hook(pick)
    return made


@dataclass(frozen=True)
class Pick:
    """A hook that makes one tensor of what a model gives."""

    outputs: Outputs

    def __call__(self, module: nn.Module, _: Any, found: Any) -> Any:
        if callable(self.outputs):
            return self.outputs(found)
        name = self.outputs or "logits"
        if isinstance(found, Mapping) and name in found:
            return found[name]
        if not isinstance(found, Tensor) and hasattr(found, name):
            return getattr(found, name)
        there = ", ".join(map(str, found)) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise FedsieveError(
            f"the model gives {there}, and outputs={self.outputs!r} finds no {name} there. Give outputs= a key, an attribute, or "
            "a function that picks the tensor, as in outputs=lambda found: found[0]"
        )


def _spread_out(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Make positional or keyword arguments of one structure; a call that is spread out already stays as it is."""
    if len(arguments) == 1 and not named:
        if isinstance(arguments[0], tuple):
            return arguments[0], {}
        if isinstance(arguments[0], dict):
            return (), arguments[0]
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"

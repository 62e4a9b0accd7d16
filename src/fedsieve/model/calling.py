"""How models are called: with one argument, whose structure is the user's, for one tensor."""

from collections.abc import Callable

from torch import Tensor

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

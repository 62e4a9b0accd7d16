"""Server optimizers (Reddi et al. 2021, "Adaptive federated optimization"), on the k values that move."""

import torch
from torch import Tensor

from fedsieve.config import Server

State = dict[str, Tensor]


def server_step(settings: Server, lr: float, delta: Tensor, state: State) -> Tensor:
    """How far the server moves, (k,), given the clients' mean update `delta`; `state` holds its buffers.

    No value depends on another, so that it can be called for some of them at a time, with these parts of the buffers.
    """
    if settings.optimizer == "sgd":
        return lr * delta
    if not state:
        state |= fresh(settings, delta, delta.dtype)
    if settings.optimizer == "momentum":
        momentum = state["momentum"]
        momentum.mul_(settings.momentum).add_(delta)
        return lr * momentum
    first, second = state["first"], state["second"]
    first.mul_(settings.momentum).add_(delta, alpha=1 - settings.momentum)
    square = delta.square()
    if settings.optimizer == "adam":
        second.mul_(settings.beta2).add_(square, alpha=1 - settings.beta2)
    elif settings.optimizer == "yogi":
        second.sub_((second - square).sign() * square, alpha=1 - settings.beta2)
    else:
        second.add_(square)
    return lr * first / (second.sqrt() + settings.tau)


def fresh(settings: Server, like: Tensor, dtype: torch.dtype) -> State:
    """The buffers before the first step, of the shape of `like`."""
    names = {"sgd": (), "momentum": ("momentum",)}.get(settings.optimizer, ("first", "second"))
    return {name: torch.full_like(like, settings.tau**2 if name == "second" else 0.0, dtype=dtype) for name in names}


def after_new_mask(settings: Server, state: State, old: Tensor, new: Tensor) -> State:
    """The buffers for the weights `new`, given those for `old`: what is known of a weight goes with it.

    `momentum_correction` says how much of the momentum does: the more the mask changed, the less old steps may count.
    """
    if settings.momentum_correction == "reset":
        return {}
    state = {
        name: carried(values, old, new, settings.tau**2 if name == "second" else 0.0) for name, values in state.items()
    }
    if settings.momentum_correction == "scale":
        share = torch.isin(new, old).double().mean().item()
        for name in {"momentum", "first"} & set(state):
            state[name] *= share
    return state


def carried(values: Tensor, old: Tensor | None, new: Tensor | None, fill: float = 0.0) -> Tensor:
    """Values of the places `old` (ascending; None: all) as values of the places `new`; `fill` where there were none."""
    if new is None or old is None:
        if old is None:
            return values if new is None else values[new]
        raise ValueError("values of some places cannot become values of all")
    result = values.new_full((len(new),), fill)
    if len(old):
        place = torch.searchsorted(old, new).clamp(max=len(old) - 1)
        found = old[place] == new
        result[found] = values[place[found]]
    return result

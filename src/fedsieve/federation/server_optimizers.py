"""Server optimizers (Reddi et al. 2021, "Adaptive federated optimization"), on the k values that move.

Each is a function of the clients' mean update and the state, whose buffers it changes. No value depends on another, so that
the engine may call it for some of them at a time.
"""

import torch
from torch import Tensor

from fedsieve.config import Server
from fedsieve.errors import FedsieveError
from fedsieve.foreign import called, expect

State = dict[str, Tensor]


class ServerOptimizer:
    """A server step with state. Subclass it to write your own; the state is saved and resumed."""

    def init(self, theta: Tensor) -> State:
        """The state before the first step; `theta` (k,) are the weights that move."""
        return {}

    def step(self, theta: Tensor, mean: Tensor, state: State, lr: float) -> Tensor:
        """The server's step (k,) for the clients' mean update. Changes `state` in place."""
        raise NotImplementedError


def sgd(delta: Tensor, state: State, lr: float) -> Tensor:
    """FedAvg with a rate."""
    return lr * delta


def momentum(delta: Tensor, state: State, lr: float, *, momentum: float = 0.9) -> Tensor:
    """FedAvgM (Hsu et al. 2019)."""
    return lr * state["momentum"].mul_(momentum).add_(delta)


def adam(
    delta: Tensor, state: State, lr: float, *, momentum: float = 0.9, tau: float = 1e-3, beta2: float = 0.99
) -> Tensor:
    """FedAdam."""
    state["second"].mul_(beta2).add_(delta.square(), alpha=1 - beta2)
    return _adaptive(delta, state, lr, momentum, tau)


def yogi(
    delta: Tensor, state: State, lr: float, *, momentum: float = 0.9, tau: float = 1e-3, beta2: float = 0.99
) -> Tensor:
    """FedYogi."""
    square, second = delta.square(), state["second"]
    second.sub_((second - square).sign() * square, alpha=1 - beta2)
    return _adaptive(delta, state, lr, momentum, tau)


def adagrad(delta: Tensor, state: State, lr: float, *, momentum: float = 0.9, tau: float = 1e-3) -> Tensor:
    """FedAdagrad."""
    state["second"].add_(delta.square())
    return _adaptive(delta, state, lr, momentum, tau)


def _adaptive(delta: Tensor, state: State, lr: float, momentum: float, tau: float) -> Tensor:
    first = state["first"].mul_(momentum).add_(delta, alpha=1 - momentum)
    return lr * first / (state["second"].sqrt() + tau)


def server_step(settings: Server, lr: float, delta: Tensor, state: State) -> Tensor:
    """The server's step (k,) for the clients' mean update `delta`; `state` holds its buffers."""
    if not state:
        state |= fresh(settings, delta, delta.dtype)
    return settings.piece(delta, state, lr, **settings.steps)


def foreign_step(settings: Server, lr: float, theta: Tensor, mean: Tensor, state: State) -> Tensor:
    """The step of a server optimizer from outside, from the weights `theta` (k,)."""
    optimizer, where = settings.made(), f"federation.server: {settings.kind}"
    if not isinstance(optimizer, ServerOptimizer):
        raise FedsieveError(f"{where}: give a subclass of fs.ServerOptimizer, with init and step")
    if not state:
        state |= called(optimizer.init, where, theta)
    step = called(lambda weights, moved: optimizer.step(weights, moved, state, lr), where, theta, mean)
    expect(step, mean.shape, where, "a step for each weight")
    return step


def fresh(settings: Server, like: Tensor, dtype: torch.dtype) -> State:
    """The buffers before the first step, of the shape of `like`."""
    return {name: torch.full_like(like, _start(settings, name), dtype=dtype) for name in settings.buffers}


def _start(settings: Server, name: str) -> float:
    return getattr(settings, "tau") ** 2 if name == "second" else 0.0  # noqa: B009


def after_new_mask(settings: Server, state: State, old: Tensor, new: Tensor) -> State:
    """The buffers for the weights `new`, given those for `old`: what is known of a weight stays with it.

    `momentum_correction` says how much of the momentum does: the more the mask changed, the less old steps may count.
    """
    correction = getattr(settings, "momentum_correction", "keep")
    if correction == "reset":
        return {}
    state = {name: carried(values, old, new, _start(settings, name)) for name, values in state.items()}
    if correction == "scale":
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

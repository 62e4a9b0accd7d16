"""The arithmetic of a client's local step, the same for one client and for many at once."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsieve.config import Correction, Optimizer
from fedsieve.errors import FedsieveError
from fedsieve.foreign import called, expect
from fedsieve.train.optimizers import gradient_factor


def settings_of(optimizer: Optimizer, lr: float) -> dict[str, Any]:
    """What the updates read."""
    return {
        "lr": lr,
        "momentum": optimizer.momentum,
        "weight_decay": optimizer.weight_decay,
        "eps": 1e-8,
        **optimizer.fields,
    }


def step_of(optimizer: Optimizer) -> Callable[..., None]:
    """What moves weights in place: (weights, gradient, state, settings)."""
    if not optimizer.foreign:
        return optimizer.piece
    step, where = optimizer.piece, f"optimizer: {optimizer.kind}"
    if inspect.isclass(step):
        raise FedsieveError(f"{where}: give fs.SGD, fs.AdamW, or a function (weights, gradient, state, group)")

    def move(weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        moved = called(lambda slope: step(weights, slope, state, group), where, gradient)
        if moved is not None:
            raise FedsieveError(f"{where}: the function must change the weights in place, and return nothing")

    return move


def corrected(
    gradient: Tensor, weights: Tensor, start: Tensor, correction: Correction, control: Tensor | None
) -> Tensor:
    """The gradient with a correction such as FedProx's, or with SCAFFOLD's control variates."""
    if correction.foreign:
        where, before = f"federation.correction: {correction.kind}", gradient
        gradient = called(correction.made(), where, gradient, weights, start)
        expect(gradient, before.shape, where, "a gradient", finite=False)
    elif correction.home is not None:
        gradient = correction.made()(gradient, weights, start)
    return gradient if control is None else gradient + control


def fedprox(gradient: Tensor, weights: Tensor, start: Tensor, *, mu: float = 0.01) -> Tensor:
    """A pull to the weights that the client received (Li et al. 2020)."""
    return gradient.add(weights - start, alpha=mu)


def bounded(gradient: Tensor, rest: Tensor | None, holds: Tensor | None, optimizer: Optimizer) -> Tensor:
    """Gradients (clients, k) held to what each client may move, rescaled and clipped client by client."""
    whole = gradient.square().sum(1)
    if holds is not None:
        gradient = torch.where(holds, gradient, 0)
    if optimizer.clip_norm is None and optimizer.rescale is None:
        return gradient
    norm = torch.linalg.vector_norm(gradient, dim=1)
    dense = None if rest is None else (whole + rest.clamp(min=0)).sqrt()
    return gradient * gradient_factor(norm, dense, optimizer.rescale, optimizer.clip_norm)[:, None]


def pulled(losses: Tensor, outputs: Tensor, labels: Tensor, distant: Tensor | None, correction: Correction) -> Tensor:
    """Losses; with FedNTD (Lee et al. 2022), plus the distance of the wrong answers' distribution."""
    if distant is None:
        return losses
    beta, tau = correction.fields["beta"], correction.fields["tau"]
    return losses + beta * tau**2 * not_true_distance(outputs, labels, distant, tau)


@torch.no_grad()
def sums_of(losses: Tensor, right: Tensor | None, there: Tensor) -> Tensor:
    """(clients, columns) float64, over the examples that are there (clients, batch): loss, right answers, and their number."""
    parts = [losses, *([] if right is None else [right])]
    columns = [*(torch.where(there, part.view_as(there), 0) for part in parts), there]
    return torch.stack([column.double().sum(1) for column in columns], 1)


def not_true_distance(outputs: Tensor, labels: Tensor, distant: Tensor, tau: float) -> Tensor:
    """How far the distribution of wrong answers is from that of `distant` outputs, (B,): FedNTD (Lee et al. 2022)."""
    true = F.one_hot(labels, outputs.shape[-1]).bool()
    ours, theirs = ((values / tau).masked_fill(true, -1e4).log_softmax(-1) for values in (outputs, distant))
    return (theirs.exp() * (theirs - ours)).masked_fill(true, 0).sum(-1)

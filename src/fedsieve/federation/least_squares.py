"""The arithmetic of a linear head in closed form (Fed3R, Fanì et al. 2024).

Clients send Phi^T Phi and Phi^T Y of their features; sums do not care how the images are spread. The server solves
(G + strength n I) W = B, and scales the logits by a temperature, since regression onto 0 and 1 gives nearly flat ones.
"""

import math

import numpy as np
import scipy.optimize
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsieve.model.space import ParamSpace

STRENGTHS = tuple(10.0**power for power in range(-6, 2))  # per image
DEFAULT_STRENGTH = 1e-3
SCALES = np.geomspace(0.5, 200, 61)  # of the logits, where they are fitted on clients' sums
LOSSES = ParamSpace(("losses",), ((len(SCALES),),))


def statistics_space(width: int, classes: int) -> ParamSpace:
    """The layout of a client's statistics in a message: half of a symmetric matrix, and a matrix."""
    return ParamSpace(("gram", "moment"), (((width + 1) * (width + 2) // 2,), (width + 1, classes)))


def statistics(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The statistics of some images, one float64 vector of `statistics_space`. The last feature is a constant 1."""
    phi = F.pad(features.double(), (0, 1), value=1.0)
    rows, columns = torch.triu_indices(phi.shape[1], phi.shape[1], device=phi.device)
    moment = phi.T @ F.one_hot(labels, classes).double()
    return torch.cat([(phi.T @ phi)[rows, columns], moment.flatten()])


def solve(total: Tensor, count: int, width: int, classes: int, strength: float) -> tuple[Tensor, Tensor]:
    """Weight (classes, width) and bias (classes,) of the ridge regression with these summed statistics; float64."""
    space = statistics_space(width, classes)
    gram = total.new_zeros(width + 1, width + 1)
    rows, columns = torch.triu_indices(width + 1, width + 1, device=total.device)
    gram[rows, columns] = space.view(total, "gram")
    gram = gram + gram.triu(1).T
    penalty = torch.full((width + 1,), strength * count, dtype=total.dtype, device=total.device)
    penalty[-1] = 0.0  # the bias is free
    solution = torch.linalg.solve(gram + penalty.diag(), space.view(total, "moment"))
    return solution[:-1].T.contiguous(), solution[-1].clone()


def fit_scale(logits: Tensor, labels: Tensor) -> float:
    """The factor on the logits that gives these labels the highest likelihood."""
    logits = logits.double()

    def loss(log_scale: float) -> float:
        return F.cross_entropy(logits * math.exp(log_scale), labels).item()

    found = scipy.optimize.minimize_scalar(loss, bounds=(math.log(SCALES[0]), math.log(SCALES[-1])), method="bounded")
    return math.exp(found.x)


def head_space(width: int, classes: int) -> ParamSpace:
    """The layout of a head in a message."""
    return ParamSpace(("weight", "bias"), ((classes, width), (classes,)))


def losses_at_scales(head: Tensor, features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The summed loss of a `head` (of `head_space`) at each of `SCALES`."""
    parts = head_space(features.shape[1], classes).unflatten(head.double())
    logits = features.double() @ parts["weight"].T + parts["bias"]
    return torch.stack([F.cross_entropy(logits * scale, labels, reduction="sum") for scale in SCALES])

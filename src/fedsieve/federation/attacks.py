"""What hostile clients send instead of their updates: simulated, on vectors of k values, drawn by address."""

import math

import numpy as np
import torch
from torch import Tensor

from fedsieve.randomness import generator


def hostile_clients(seed: int, clients: int, share: float) -> np.ndarray:
    """Which of the clients numbered below `clients` are hostile, ascending: the same ones for the whole experiment."""
    count = round(share * clients)
    return np.sort(generator(seed, "hostile").choice(clients, count, replace=False, shuffle=False))


def label_flip(labels: Tensor, classes: int) -> Tensor:
    """The labels that a hostile client trains on: the last class for the first, and so on (Fang et al. 2020)."""
    return classes - 1 - labels


def sign_flip(update: Tensor, factor: float = 10.0) -> Tensor:
    """The update, enlarged, the other way."""
    return -factor * update


def gaussian_noise(update: Tensor, scale: float, seed: int, *address: int | str) -> Tensor:
    """Noise in place of the update, with `scale` times its norm (Blanchard et al. 2017)."""
    noise = generator(seed, "attack", *address).standard_normal(len(update), dtype=np.float32)
    deviation = scale * update.double().norm().item() / math.sqrt(max(1, len(update)))
    return deviation * torch.from_numpy(noise).to(update)


def nan(update: Tensor) -> Tensor:
    """No numbers at all."""
    return torch.full_like(update, math.nan)


def stale_replay(update: Tensor, earlier: Tensor | None) -> Tensor:
    """What the client sent in an earlier round, once there is one."""
    return update if earlier is None else earlier

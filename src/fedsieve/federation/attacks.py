"""Simulated attacks: hostile clients replace their updates (k values), with draws by address."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsieve.randomness import generator


def hostile_clients(seed: int, clients: int, share: float) -> np.ndarray:
    """The hostile clients among those numbered below `clients`, ascending. They stay the same for the whole experiment."""
    count = round(share * clients)
    return np.sort(generator(seed, "hostile").choice(clients, count, replace=False, shuffle=False))


def label_flip(labels: Tensor, classes: int) -> Tensor:
    """The labels that a hostile client trains on: the last class for the first, and so on (Fang et al. 2020)."""
    return classes - 1 - labels


@dataclass(frozen=True)
class Scene:
    """The means of a hostile client besides its update."""

    rng: Callable[[], np.random.Generator]  # a generator of its own for this round
    first: Callable[[Tensor], Tensor]  # the first update that it ever had; the given one, if there is none yet


def sign_flip(update: Tensor, scene: Scene, *, factor: float = 10.0) -> Tensor:
    """The update, enlarged, the other way."""
    return -factor * update


def gaussian_noise(update: Tensor, scene: Scene, *, factor: float = 10.0) -> Tensor:
    """Noise in place of the update, with `factor` times its norm (Blanchard et al. 2017)."""
    noise = scene.rng().standard_normal(len(update), dtype=np.float32)
    deviation = factor * update.double().norm().item() / math.sqrt(max(1, len(update)))
    return deviation * torch.from_numpy(noise).to(update)


def nan(update: Tensor, scene: Scene) -> Tensor:
    """No numbers at all."""
    return torch.full_like(update, math.nan)


def stale_replay(update: Tensor, scene: Scene) -> Tensor:
    """The client's first update, again and again."""
    return scene.first(update)

"""The benchmarks by name."""

from collections.abc import Callable

import torch

from fedsieve.bench.data import data
from fedsieve.bench.loop import loop
from fedsieve.bench.result import Result

BENCHMARKS: dict[str, tuple[str, Callable[[torch.device, bool], Result]]] = {
    "loop": ("share of the training loop that is forward, backward and step", loop),
    "data": ("seconds to decode 60,000 images, and to load them from the cache", data),
}

"""The benchmarks by name."""

from collections.abc import Callable

import torch

from fedsieve.bench.data import data
from fedsieve.bench.distributed import distributed
from fedsieve.bench.loop import loop
from fedsieve.bench.mask import mask
from fedsieve.bench.optimizer import optimizer
from fedsieve.bench.result import Result
from fedsieve.bench.rounds import overhead, rounds
from fedsieve.bench.sparse import sparse

BENCHMARKS: dict[str, tuple[str, Callable[[torch.device, bool], Result]]] = {
    "loop": ("share of the training loop that is forward, backward and step", loop),
    "sparse": ("step time and memory with masks of each granularity against dense", sparse),
    "optimizer": ("the optimizer step at several densities against torch's fused dense one", optimizer),
    "mask": ("seconds of Fisher scores, per sample and per batch, and of calibration", mask),
    "round": ("images a second of whole federated rounds against the plain loop", rounds),
    "overhead": ("what a one-step round costs beyond its local steps", overhead),
    "distributed": ("rounds of 1,000 clients on two processes against one", distributed),
    "data": ("seconds to decode 60,000 images, and to load them from the cache", data),
}

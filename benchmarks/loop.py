"""How fast the training loop is, eager, recorded and compiled, and how much of it is forward, backward and step."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.limits import measure_limits, training_flops
from benchmarks.result import Result, alternate, columns, timed
from fedsieve.config import Data, Experiment, Model, Optimizer, Stage, Transform
from fedsieve.data.store import ImageStore
from fedsieve.data.transforms import HALF, make_transform
from fedsieve.model.build import build_classifier
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.runner.environment import make_autocast
from fedsieve.train.feed import Autocast, Feed
from fedsieve.train.loop import CentralTask, StageState, train_stage
from fedsieve.train.replay import Replay, Speed, compiled

SMALL = {"patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4}
TRANSFORMS: tuple[Transform, ...] = ("resize", "crop_flip")


@dataclass(frozen=True)
class Case:
    """A network, and images of `stored` pixels that it sees with `pixels`, `batch` at a time."""

    name: str
    options: dict[str, int]
    pixels: int
    stored: int
    batch: int

    @property
    def model(self) -> Model:
        return Model(backbone="vit_tiny_patch16_224", weights="none", options=self.options)


ON_CPU = (
    Case("demo network, 16 px", SMALL, 16, 8, 32),
    Case("ViT-Ti/16, 64 px", {}, 64, 32, 64),
    Case("ViT-Ti/16, 224 px", {}, 224, 32, 16),
)
ON_GPU = (Case("ViT-Ti/16, 128 px", {}, 128, 32, 128), Case("ViT-Ti/16, 224 px", {}, 224, 32, 128))


def loop(device: torch.device, smoke: bool) -> Result:
    """Whole steps of `train_stage` against the same arithmetic on a batch that is already there; on a GPU at every speed."""
    limits = measure_limits(device, smoke)
    result = Result(
        columns(
            "network | transform | compile | images/s | whole step, ms | arithmetic, ms | share | times eager | "
            "of a product's speed, % | first step, s"
        ),
        note="share = arithmetic / whole step: the part of the loop that is forward, backward and step. Everything of a network and "
        "transform took turns. `first step` includes compiling and recording; what was compiled is kept, so that only a "
        "network's first one is cold. CUDA graphs and torch.compile are measured on a GPU only.",
        limit=limits.sentence(),
    )
    speeds: Sequence[Speed] = ("eager", "graph", "blocks", "full") if device.type == "cuda" else ("eager",)
    cases: Sequence[Case] = ON_GPU if device.type == "cuda" else ON_CPU
    steps, repeats = (8, 7) if device.type == "cpu" else (20, 7)
    if smoke:
        cases, speeds, steps, repeats = ON_CPU[:1], speeds[:2], 3, 1
    for case, transform in itertools.product(cases, TRANSFORMS):
        calls: dict[str, Callable[[], None]] = {}
        first = {}
        for speed in speeds:
            first[speed], ways = _ways(case, transform, device, speed, steps, repeats)
            calls |= {f"{speed} {name}": call for name, call in ways.items()}
        taken = {name: seconds / steps for name, seconds in alternate(calls, device, repeats).items()}
        flops = training_flops(case.model, case.pixels, "all")
        for speed in speeds:
            whole, bare = taken[f"{speed} whole"], taken[f"{speed} bare"]
            rate, faster = case.batch / whole, taken["eager whole"] / whole
            used = None if smoke else 100 * rate * flops / limits.product  # a miniature product says nothing
            times = rate, 1e3 * whole, 1e3 * bare, bare / whole, faster, used
            result.rows.append((case.name, transform, speed, *times, first[speed]))
    return result


def _ways(
    case: Case, transform: Transform, device: torch.device, speed: Speed, steps: int, repeats: int
) -> tuple[float, dict[str, Callable[[], None]]]:
    """Seconds of the first step, and the two ways to do `steps` steps, for `repeats` turns and one before them."""
    config = Data(source="digits", size=case.pixels, transform=transform)
    model = build_classifier(case.model, classes=100, size=case.pixels, seed=0).to(device)
    rng = generator(0, "bench")
    count = case.batch * (2 + steps * (1 + repeats))  # the last step of an epoch validates; it is never reached
    images = torch.from_numpy(rng.integers(0, 256, (count, 3, case.stored, case.stored), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 100, count)).to(device)
    feed = Feed(ImageStore(images, device), make_transform(config, *HALF), np.arange(count), labels)
    stage = Stage(name="bench", epochs=1, batch_size=case.batch, optimizer=Optimizer(lr=1e-3))
    autocast = default_autocast(device)
    theta = ParamSpace.of(model).bind(model)
    state = StageState.start(theta.detach().clone())
    ticks = train_stage(CentralTask(stage, model, theta, feed, 0, autocast, speed=speed), state, dict)
    first = timed(lambda: next(ticks), device)
    *raw, labels = feed.fetch(np.arange(case.batch))
    batch = feed.inputs(*raw), labels
    optimizer = torch.optim.SGD([theta], lr=1e-3, momentum=0.9, fused=False)
    gradient = Replay(forward_backward(model, theta, autocast, speed), on=speed != "eager")

    def whole() -> None:
        for _ in range(steps):
            next(ticks)

    def bare() -> None:
        for _ in range(steps):
            gradient(*batch)
            optimizer.step()

    return first, {"whole": whole, "bare": bare}


def default_autocast(device: torch.device) -> Autocast:
    """The precision that an experiment has on a device where it names none."""
    return make_autocast(Experiment(stages=[Stage(name="bench", epochs=1)]), device)


def forward_backward(
    model: nn.Module, theta: torch.Tensor, autocast: Autocast, speed: Speed
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A function that fills the gradient of `theta` from a batch, as the training loop does."""
    network = compiled(model.__call__, speed, model)

    def differentiate(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        theta.grad.zero_()  # type: ignore[union-attr]
        with autocast():
            logits = network(inputs)
        F.cross_entropy(logits.float(), labels).backward()

    return differentiate

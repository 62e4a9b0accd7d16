"""How much of the training loop is forward, backward and step: the rest is batching, transforms and bookkeeping."""

import itertools
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from fedsieve.bench.result import Result, alternate
from fedsieve.config import Data, Experiment, Model, Optimizer, Stage, Transform
from fedsieve.data.store import ImageStore
from fedsieve.data.transforms import HALF, make_transform
from fedsieve.model.build import build_classifier
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.runner.environment import make_autocast
from fedsieve.train.feed import Feed
from fedsieve.train.loop import StageState, train_stage

SMALL = {"patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4}
# name, timm options, pixels of the model, pixels of the images, batch
TRANSFORMS: tuple[Transform, ...] = ("resize", "crop_flip")
CASES: tuple[tuple[str, dict[str, int], int, int, int], ...] = (
    ("demo network, 16 px", SMALL, 16, 8, 32),
    ("ViT-Ti/16, 64 px", {}, 64, 32, 64),
    ("ViT-Ti/16, 224 px", {}, 224, 32, 16),
)


def loop(device: torch.device, smoke: bool) -> Result:
    """Whole steps of `train_stage` against the same arithmetic on a batch that is already there."""
    result = Result(
        ("network", "transform", "images/s", "whole step, ms", "arithmetic, ms", "share"),
        note="share = arithmetic / whole step: the part of the loop that is forward, backward and step.",
    )
    cases = CASES[:1] if smoke else CASES
    steps, repeats = (3, 1) if smoke else (8, 7)
    for (name, options, size, pixels, batch), transform in itertools.product(cases, TRANSFORMS):
        taken = alternate(_calls(device, options, size, pixels, batch, transform, steps), device, repeats)
        whole, bare = taken["whole"] / steps, taken["bare"] / steps
        result.rows.append((name, transform, batch / whole, 1e3 * whole, 1e3 * bare, bare / whole))
    return result


def _calls(
    device: torch.device, options: dict[str, int], size: int, pixels: int, batch: int, transform: Transform, steps: int
) -> dict[str, Callable[[], None]]:
    """The two ways to do `steps` steps."""
    config = Data(source="digits", size=size, transform=transform)
    model = build_classifier(
        Model(backbone="vit_tiny_patch16_224", weights="none", options=options), classes=100, size=size, seed=0
    ).to(device)
    rng = generator(0, "bench")
    count = batch * (steps + 1)  # the last step of an epoch validates; it is never reached
    images = torch.from_numpy(rng.integers(0, 256, (count, 3, pixels, pixels), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 100, count)).to(device)
    feed = Feed(ImageStore(images, device), make_transform(config, *HALF), np.arange(count), labels)
    stage = Stage(name="bench", epochs=1, batch_size=batch, optimizer=Optimizer(lr=1e-3))
    autocast = make_autocast(Experiment(stages=[stage]), device)
    theta = ParamSpace.of(model).bind(model)
    inputs, targets = feed.batch(np.arange(batch))
    optimizer = torch.optim.SGD([theta], lr=1e-3, momentum=0.9, fused=False)

    def whole() -> None:
        ticks = train_stage(stage, model, theta, StageState.start(theta.detach().clone()), feed, dict, 0, autocast)
        for _ in itertools.islice(ticks, steps):
            pass

    def bare() -> None:
        for _ in range(steps):
            theta.grad.zero_()  # type: ignore[union-attr]
            with autocast():
                logits = model(inputs)
            F.cross_entropy(logits.float(), targets).backward()
            optimizer.step()

    return {"whole": whole, "bare": bare}

"""How long a mask takes: scores, per sample and per batch, and the calibration itself."""

from functools import partial
from typing import Literal

import torch

from benchmarks.limits import measure_limits, training_flops
from benchmarks.loop import default_autocast
from benchmarks.result import Result, alternate
from fedsieve.config import Model
from fedsieve.mask.calibration import calibrate, hybrid
from fedsieve.mask.mask import Mask
from fedsieve.mask.scores import fisher
from fedsieve.model.build import build_classifier
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator

SMALL = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
BATCH = 100


def mask(device: torch.device, smoke: bool) -> Result:
    """ViT-S/16 at 64 px: 5,000 images on a GPU, 100 on a CPU; then calibration of its 22 M weights there."""
    images = 20 if smoke else 5_000 if device.type == "cuda" else 100
    options = SMALL if smoke else {}
    name = "vit_small_patch16_224"
    model = build_classifier(Model(backbone=name, weights="none", options=options), classes=100, size=64, seed=0).to(
        device
    )
    space = ParamSpace.of(model)
    autocast = default_autocast(device)
    pixels = torch.randn(min(BATCH, images), 3, 64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.zeros(len(pixels), dtype=torch.int64, device=device)
    draws = generator(0, "bench").random(images)
    limits = measure_limits(device, smoke)
    flops = training_flops(Model(backbone=name, options=options), 64, "all")
    result = Result(
        ("what", "images", "seconds", "images/s", "ratio", "of a product's speed, %"),
        note=f"{name} at 64 px, {space.size:,} weights; per-sample gradients are computed in fp32, those of a batch in the "
        "training precision; calibration is ranking, selection and packing to sparsity 0.9, all of its rounds together, "
        "from scores that are there. Ratios, taken in turns: to Fisher per batch, and to one round with one score.",
        limit=limits.sentence(),
    )

    def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(pixels, labels)] * (images // len(pixels))

    ways: tuple[Literal["sample", "batch"], ...] = ("sample", "batch")
    calls: dict[str, partial[torch.Tensor]] = {
        per: partial(fisher, model, space, batches(), draws, per=per, autocast=autocast) for per in ways
    }
    taken = alternate(calls, device, 1 if smoke else 3)
    for per, seconds in taken.items():
        rate = images / seconds
        used = None if smoke else 100 * rate * flops / limits.product
        result.rows.append((f"Fisher per {per}", images, seconds, rate, seconds / taken["batch"], used))
    found = calls["batch"]()
    weights = space.read(model).abs()

    def ranked(active: Mask, _: int) -> torch.Tensor:
        return hybrid(found, weights, among=active.to_bool())

    scores = {"one score": lambda *_: found, "hybrid ranks": ranked}
    calibrations = {
        f"calibration, {rounds} round{'s' if rounds > 1 else ''}, {kind}": partial(
            calibrate, scored, space, sparsity=0.9, rule="least_sensitive", rounds=rounds
        )
        for kind, scored in scores.items()
        for rounds in (1, 4)
    }
    taken = alternate(calibrations, device, 1 if smoke else 3)
    reference = next(iter(taken.values()))
    result.rows += [(what, None, seconds, None, seconds / reference, None) for what, seconds in taken.items()]
    return result

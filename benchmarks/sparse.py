"""What a mask saves: step time and memory against dense training, by granularity and sparsity."""

import itertools
from collections.abc import Callable

import torch

from benchmarks.loop import default_autocast, forward_backward
from benchmarks.memory import peak_bytes
from benchmarks.result import Result, alternate, columns, keeping
from fedsieve.config import Granularity, Model, Optimizer
from fedsieve.errors import FedsieveError
from fedsieve.mask.calibration import calibrate, random_scores
from fedsieve.mask.mask import Mask
from fedsieve.mask.selection import attention_heads
from fedsieve.model.build import Classifier, build_classifier
from fedsieve.model.space import ParamSpace
from fedsieve.train.loop import make_optimizer
from fedsieve.train.replay import Replay, Speed
from fedsieve.train.savings import spare_frozen

SMALL = {"patch_size": 4, "embed_dim": 48, "depth": 12, "num_heads": 4}
GRANULARITIES: tuple[Granularity, ...] = ("weight", "row", "attention_head", "block")
SPARSITIES = (0.5, 0.9, 0.99)


def sparse(device: torch.device, smoke: bool) -> Result:
    """Whole training steps (forward, backward, optimizer) of ViT-S/16 at 224 px on a GPU, of a small ViT on a CPU."""
    large = device.type == "cuda" and not smoke
    name, options, pixels, batch = (
        ("vit_small_patch16_224", {}, 224, 64) if large else ("vit_tiny_patch16_224", SMALL, 32, 16)
    )
    result = Result(
        columns(
            "mask | sparsity | active, % | dense, ms | masked, ms | time ratio | memory ratio | optimizer state ratio"
        ),
        note=f"{name} at {pixels} px, batch {batch}; masks drawn at random. Steps are CUDA graphs on a GPU. Row masks skip frozen rows here; training in bf16 on a GPU does not. Times side by side; memory is the peak of a "
        "step beyond the model; state is the momentum, its index apart.",
    )
    steps, repeats = (1, 1) if smoke else (5, 7)

    def fresh() -> Classifier:
        config = Model(backbone=name, weights="none", options=options)
        return build_classifier(config, classes=100, size=pixels, seed=0).to(device)

    space = ParamSpace.of(fresh())
    dense, dense_state, dense_memory = _step(fresh(), None, pixels, batch, steps)
    masks: dict[tuple[str, str], Callable[[Classifier], Mask]] = {
        (granularity, f"{sparsity:g}"): _random(space, granularity, sparsity)
        for granularity, sparsity in itertools.product(GRANULARITIES, SPARSITIES)
    }
    masks["frozen prefix, 9 of 12 blocks", "-"] = lambda _: _prefix(space, 9)
    cases: list[tuple[str, str, Speed]] = [(*case, "graph") for case in masks]
    if large:  # where elementwise kernels are fused, products are a larger part of a step
        cases.append(("row", "0.9", "full"))
    with keeping(result):
        for kind, sparsity, speed in cases:
            make, model = masks[kind, sparsity], fresh()
            try:
                mask = make(model)
            except FedsieveError:
                result.rows.append((kind, sparsity, "no whole group fits", *[None] * 5))
                continue
            if speed == "full":
                kind = f"{kind}, both compiled"
                dense, dense_state, _ = _step(fresh(), None, pixels, batch, steps, speed)
            masked, state, memory = _step(model, mask, pixels, batch, steps, speed)
            taken = alternate({"dense": dense, "masked": masked}, device, repeats)
            result.rows.append(
                (
                    kind,
                    sparsity,
                    100 * mask.density,
                    1e3 * taken["dense"] / steps,
                    1e3 * taken["masked"] / steps,
                    taken["masked"] / taken["dense"],
                    memory / dense_memory if memory and dense_memory else None,
                    state() / dense_state(),
                )
            )
    return result


def _random(space: ParamSpace, granularity: Granularity, sparsity: float) -> Callable[[Classifier], Mask]:
    def make(model: Classifier) -> Mask:
        return calibrate(
            lambda *_: random_scores(space, 0, "bench"),
            space,
            sparsity=sparsity,
            lowest=True,
            granularity=granularity,
            heads=attention_heads(model),
        )

    return make


def _prefix(space: ParamSpace, blocks: int) -> Mask:
    """Everything from block `blocks` on is active, nothing before it."""
    first = next(i for i, name in enumerate(space.names) if name.startswith(f"backbone.blocks.{blocks}."))
    return Mask.from_bool(space, torch.arange(space.size) >= space.offsets[first])


def _step(
    model: Classifier, mask: Mask | None, pixels: int, batch: int, steps: int, speed: Speed = "graph"
) -> tuple[Callable[[], None], Callable[[], int], float | None]:
    """A function that does `steps` training steps, one that gives the bytes of optimizer state, and a step's peak memory."""
    theta = ParamSpace.of(model).bind(model)
    if mask is not None:
        spare_frozen(model, mask)
    optimizer = make_optimizer(Optimizer(lr=1e-4), theta, mask)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, pixels, pixels, generator=generator).to(theta.device)
    labels = torch.randint(100, (batch,), generator=generator).to(theta.device)
    gradient = Replay(forward_backward(model, theta, default_autocast(theta.device), speed), on=False)

    def run() -> None:
        for _ in range(steps):
            gradient(images, labels)
            optimizer.step()

    run()  # the optimizer's state is there from the second step on
    memory = peak_bytes(run, theta.device) if theta.is_cuda else None
    gradient.on = True  # recorded, as the training loop does it; a recorded step holds its memory all the time
    return run, lambda: optimizer.state_bytes().state, memory

"""The optimizer step alone: a sparse step against torch's dense one, fused and not."""

from collections.abc import Callable

import torch

from benchmarks.result import Result, alternate
from fedsieve.mask.calibration import calibrate, random_scores
from fedsieve.model.space import ParamSpace
from fedsieve.train.optimizers import SparseSGDM

WEIGHTS = 22_000_000  # ViT-S/16


def optimizer(device: torch.device, smoke: bool) -> Result:
    """SGD with momentum on one vector of 22 M weights."""
    size = 20_000 if smoke else WEIGHTS
    steps, repeats = (1, 1) if smoke else (20, 9)
    result = Result(
        ("optimizer", "density", "step, ms", "fused beside it, ms", "against torch fused", "state, MB", "index, MB"),
        note=f"SGD with momentum on {size:,} weights, float32; every row took turns with torch's fused dense step.",
    )
    space = ParamSpace(("w",), ((size,),))

    def vector() -> torch.Tensor:
        theta = torch.zeros(size, device=device).requires_grad_()
        theta.grad = torch.ones_like(theta)
        return theta

    def repeated(step: Callable[[], object]) -> Callable[[], None]:
        def call() -> None:
            for _ in range(steps):
                step()

        return call

    fused = torch.optim.SGD([vector()], lr=1e-3, momentum=0.9, fused=True)
    plain = torch.optim.SGD([vector()], lr=1e-3, momentum=0.9, fused=False, foreach=False)

    def beside(step: Callable[[], object]) -> tuple[float, float, float]:
        """Milliseconds of a step and of the fused one in the same turns, and their ratio."""
        taken = alternate({"fused": repeated(fused.step), "other": repeated(step)}, device, repeats)
        return 1e3 * taken["other"] / steps, 1e3 * taken["fused"] / steps, taken["other"] / taken["fused"]

    own, reference, ratio = beside(plain.step)
    result.rows.append(("torch, fused", 1.0, reference, reference, 1.0, 4e-6 * size, None))
    result.rows.append(("torch", 1.0, own, reference, ratio, 4e-6 * size, None))
    for density in (0.5, 0.1, 0.01):
        mask = calibrate(lambda *_: random_scores(space, 0, "bench"), space, sparsity=1 - density, lowest=True)
        sparse = SparseSGDM(vector(), mask, lr=1e-3)
        measured = beside(sparse.step)
        held = sparse.state_bytes()
        result.rows.append(("SparseSGDM", density, *measured, 1e-6 * held.state, 1e-6 * held.shared_index))
    return result

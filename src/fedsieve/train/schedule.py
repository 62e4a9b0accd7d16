"""Learning rates over the steps of a stage."""

import math
from typing import Literal


def learning_rate(
    step: int, steps: int, peak: float, schedule: Literal["cosine", "constant"], warmup_steps: int = 0
) -> float:
    """The rate of step 0..steps-1: a linear climb over `warmup_steps`, then constant or half a cosine towards 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))

"""What an experiment would do, without doing it: images, weights, steps, bytes, memory."""

import contextlib
import math

import torch
from torch import nn

from fedsieve.config import Experiment, Sieve, Stage
from fedsieve.data.sources import count_images
from fedsieve.data.store import free_memory
from fedsieve.model.build import trainable_names
from fedsieve.model.space import ParamSpace
from fedsieve.runner.environment import device_name
from fedsieve.runner.setup import blank_model, preflight
from fedsieve.train.sieve import taking_part


def plan(experiment: Experiment) -> list[tuple[str, str]]:
    """Rows of (what, how much)."""
    device = preflight(experiment)
    rows, test, classes, image_bytes = count_images(experiment.data)
    held = round(experiment.data.val_fraction * rows)
    train = rows - held
    model = blank_model(experiment, classes)
    everything = ParamSpace.of(model)
    lines = [
        ("device", f"{device_name(device)}, {size(free_memory(device))} free"),
        (
            "images",
            f"{train:,} train, {held:,} validation, {test:,} test, {classes} classes; {size(rows * image_bytes)} stored",
        ),
        (
            "model",
            f"{experiment.model.backbone} at {experiment.data.size} px: {everything.size:,} weights, {size(4 * everything.size)}",
        ),
    ]
    for stage in experiment.stages:
        space = ParamSpace.of(model, trainable_names(model, stage.train))
        steps = math.ceil(train / stage.batch_size)
        cached = stage.train == "head" and experiment.data.transform == "resize"
        lines += [
            (f"stage {stage.name}", f"{stage.epochs} epochs x {steps:,} steps of {stage.batch_size} images"),
            ("  trains", trains(model, space, everything.size, experiment.mask_of(stage))),
            ("  memory", memory(model, space, stage, experiment, cached)),
            ("  bytes sent", "none: the training is central"),
        ]
    largest = max(ParamSpace.of(model, trainable_names(model, stage.train)).size for stage in experiment.stages)
    total = sum((stage.epochs or 0) * math.ceil(train / stage.batch_size) for stage in experiment.stages)
    lines += [
        ("steps in all", f"{total:,}"),
        (
            "disk",
            f"about {size(4 * (3 * largest * experiment.checkpoint.keep + everything.size))} of checkpoints and weights",
        ),
    ]
    return lines


def trains(model: nn.Module, space: ParamSpace, whole: int, sieve: Sieve | None) -> str:
    """How many weights of a stage move."""
    if sieve is None:
        return f"{space.size:,} weights, {100 * space.size / whole:.1f} % of all (density 1: no mask)"
    taking = int(taking_part(sieve, model, space).sum())
    k = round((1 - sieve.sparsity) * taking)
    note = "" if sieve.granularity == "weight" else f" at most, in whole groups ({sieve.granularity})"
    density = f"density {1 - sieve.sparsity:.3g} of {taking:,} maskable"
    return f"{k:,} weights{note}, {100 * k / whole:.1f} % of all ({density})"


def memory(model: nn.Module, space: ParamSpace, stage: Stage, experiment: Experiment, cached: bool) -> str:
    """Weights, gradient, momentum, the best epoch's copy, and what one batch keeps for the backward pass."""
    state = 4 * space.size * 4
    activations = saved_bytes(model, space, stage, experiment.data.size) if not cached else 0
    note = "; features of the frozen backbone are computed once" if cached else ""
    if activations is None:
        return f"{size(state)} for weights and optimizer{note}"
    return f"{size(state)} for weights and optimizer, {size(activations)} for a batch in fp32{note}"


def saved_bytes(model: nn.Module, space: ParamSpace, stage: Stage, pixels: int) -> int | None:
    """Bytes that autograd keeps for one training step, counted on tensors without content; None if that fails."""
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        # The same activation is often kept by two operations; it is one piece of memory.
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    inside = set(space.names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in inside)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    with contextlib.suppress(RuntimeError, NotImplementedError):
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = model(torch.empty(stage.batch_size, 3, pixels, pixels, device="meta"))
        total = sum(count for key, count in saved.items() if key not in weights)
        del output
        return total
    return None


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError

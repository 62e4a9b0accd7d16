"""What can be done beside a run: measure and export its model, and look at data before training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from fedsieve.config import Experiment, parse_config, to_yaml
from fedsieve.data.exploration import explore as explore_images
from fedsieve.data.sources import Split, keep_classes, kind_of, load_images
from fedsieve.data.transforms import make_transform
from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomic
from fedsieve.model.adapters import merge_lora
from fedsieve.model.build import timm_options
from fedsieve.model.weights import timm_tensors
from fedsieve.report.explore import write_exploration
from fedsieve.runner.environment import choose_device, make_autocast
from fedsieve.runner.experiment import load_model
from fedsieve.runner.patch import load_patch, save_patch
from fedsieve.runner.progress import Display
from fedsieve.runner.setup import open_split
from fedsieve.train.loop import measure, predict

# What a model can be measured on; anything else in a config made the model, and changing it would change nothing.
MEASURABLE = {
    "source",
    "subset",
    "revision",
    "image_column",
    "label_column",
    "train_split",
    "test_split",
    "placement",
    "cache",
}


def evaluate(folder: Path, overrides: list[str], split: Split | None) -> dict[str, Any]:
    """Accuracy and loss of a finished run's model; `overrides` may change where the data is, and the device.

    Without a `split`: the test split; where other data than the run's has none, all of it.
    """
    experiment, model, metadata = load_model(folder)
    changed = parse_config(to_yaml(experiment), overrides, where=str(folder / "config.yaml"))
    for override in overrides:
        head, _, key = override.partition("=")[0].strip().partition(".")
        if (head, key) not in {("device", ""), ("precision", "")} and not (head == "data" and key in MEASURABLE):
            allowed = ", ".join(["device", "precision", *(f"data.{name}" for name in sorted(MEASURABLE))])
            raise FedsieveError(
                f"evaluate: {override} cannot be changed: the model was made with it. Allowed: {allowed}"
            )
    device = choose_device(changed.device)
    transform = make_transform(changed.data, metadata["mean"], metadata["std"])
    parts: list[Split] = [split or "test"]
    elsewhere = changed.data.source != experiment.data.source
    if split is None and elsewhere and load_images(changed.data, "test").whole:
        parts = ["train", "test"]
    feeds = [open_split(changed.data, part, metadata["class_names"], transform, device) for part in parts]
    model, autocast = model.to(device), make_autocast(changed, device)
    logits = torch.cat([predict(model, feed, autocast) for feed in feeds])
    found = measure(logits, torch.cat([feed.labels for feed in feeds]), "x")
    return {
        "source": changed.data.source,
        "split": "all of it" if len(parts) == 2 else parts[0],
        "accuracy": found["x_accuracy"],
        "loss": found["x_loss"],
        "images": len(logits),
    }


def export(source: Path, to: Path, backbone_only: bool, sparse: bool, weights: str | None, display: Display) -> str:
    """Write the model of a run folder or of a patch, and say what was written and how to load it.

    The file has timm's names, LoRA merged into its weights, and it is made sure that timm takes it; with `sparse` it is
    a patch on the pretrained weights, LoRA and adapters as they are.
    """
    import timm

    if to.suffix != ".safetensors":
        raise FedsieveError(f"--to: {to} should end in .safetensors")
    if sparse and (backbone_only or source.is_file()):
        raise FedsieveError("--sparse makes a patch of a run folder, head included: it goes with no other choice")
    if sparse:
        mask = save_patch(source, to, display)
        share = f"{mask.count:,} of {mask.space.size:,} backbone weights changed ({100 * mask.density:.1f} %)"
        return f"{to}: {to.stat().st_size:,} bytes; {share}\n`fedsieve export {to} --to FULL.safetensors` lays it on the pretrained weights"
    if weights and not source.is_file():
        raise FedsieveError("--weights goes with a patch: a run folder has all its weights")
    experiment, model, metadata = load_patch(source, weights, display) if source.is_file() else load_model(source)
    merge_lora(model)
    classes = 0 if backbone_only else len(metadata["class_names"])
    tensors = timm_tensors(model, with_head=not backbone_only)
    options = {"num_classes": classes, **timm_options(experiment.model, experiment.data.size)}
    architecture = experiment.model.backbone.partition(".")[0]
    try:
        timm.create_model(architecture, **options).load_state_dict(tensors)
    except (TypeError, RuntimeError) as error:
        raise FedsieveError(
            f"export: timm's {architecture} does not take these weights: {str(error)[:300]}", 1
        ) from None
    write_atomic(to, safetensors.torch.save(tensors, {"class_names": json.dumps(metadata["class_names"])}))
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return (
        f'{to}: {to.stat().st_size:,} bytes\ntimm.create_model("{architecture}", {arguments}, checkpoint_path="{to}")'
    )


def explore(experiment: Experiment, folder: Path, say: Callable[[str], None]) -> Path:
    """A page about the training images, and the numbers behind it."""
    kind_of(experiment.data.source)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FedsieveError(f"--out: {folder} is there already. Choose another folder")
    images = load_images(experiment.data, "train", say)
    pixels, rows = images.images, np.arange(len(images))
    rows, labels, class_names = keep_classes(images, rows, experiment.data.classes)
    if experiment.data.classes is not None:
        pixels = pixels[torch.from_numpy(rows)]
    found = explore_images(pixels, labels, class_names, experiment.seed)
    return write_exploration(found, pixels, f"{experiment.name}: {experiment.data.source}", folder)

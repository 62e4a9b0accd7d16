"""What can be done beside a run: measure and export its model, and look at data before training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch

from fedsieve.config import Experiment, parse_config, to_yaml
from fedsieve.data.exploration import explore as explore_images
from fedsieve.data.sources import Split, kind_of, load_images
from fedsieve.data.transforms import make_transform
from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomic
from fedsieve.model.weights import timm_tensors
from fedsieve.report.explore import write_exploration
from fedsieve.runner.environment import choose_device, make_autocast
from fedsieve.runner.experiment import load_model
from fedsieve.runner.setup import open_split
from fedsieve.train.loop import measure, predict


def evaluate(folder: Path, overrides: list[str], split: Split) -> dict[str, Any]:
    """Accuracy and loss of a finished run's model; `overrides` may change the data and the device."""
    experiment, model, metadata = load_model(folder)
    changed = parse_config(to_yaml(experiment), overrides, where=str(folder / "config.yaml"))
    if changed.model != experiment.model:
        raise FedsieveError("evaluate: the model is the run's; only data.* and device can be overridden")
    device = choose_device(changed.device)
    transform = make_transform(changed.data, metadata["mean"], metadata["std"])
    feed = open_split(changed.data, split, metadata["class_names"], transform, device)
    found = measure(predict(model.to(device), feed, make_autocast(changed, device)), feed.labels, "x")
    return {
        "source": changed.data.source,
        "accuracy": found["x_accuracy"],
        "loss": found["x_loss"],
        "images": len(feed),
    }


def export(folder: Path, to: Path, backbone_only: bool) -> str:
    """Write the model in timm's names, make sure that timm takes it, and say how to load it."""
    import timm

    if to.suffix != ".safetensors":
        raise FedsieveError(f"--to: {to} should end in .safetensors")
    experiment, model, metadata = load_model(folder)
    classes = 0 if backbone_only else len(metadata["class_names"])
    tensors = timm_tensors(model, with_head=not backbone_only)
    options: dict[str, Any] = {"num_classes": classes, **experiment.model.options}
    if hasattr(model.backbone, "patch_embed"):
        options.setdefault("img_size", experiment.data.size)
    architecture = experiment.model.backbone.partition(".")[0]
    try:
        timm.create_model(architecture, **options).load_state_dict(tensors)
    except (TypeError, RuntimeError) as error:
        raise FedsieveError(
            f"export: timm's {architecture} does not take these weights: {str(error)[:300]}", 1
        ) from None
    write_atomic(to, safetensors.torch.save(tensors, {"class_names": ",".join(metadata["class_names"])}))
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return (
        f'{to}: {to.stat().st_size:,} bytes\ntimm.create_model("{architecture}", {arguments}, checkpoint_path="{to}")'
    )


def explore(experiment: Experiment, folder: Path, say: Callable[[str], None]) -> Path:
    """A page about the training images, and the numbers behind it."""
    kind_of(experiment.data.source)
    images = load_images(experiment.data, "train", say)
    found = explore_images(images.images, images.labels, images.class_names, experiment.seed)
    return write_exploration(found, images.images, f"{experiment.name}: {experiment.data.source}", folder)

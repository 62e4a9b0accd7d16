"""A fine-tuned model as a patch: which weights of the pretrained backbone changed, their values, and the head."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from fedsieve.config import Experiment, Model, parse_config, to_yaml
from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomic
from fedsieve.mask.mask import Mask
from fedsieve.model.build import Classifier
from fedsieve.model.space import ParamSpace
from fedsieve.model.weights import digest, load_classifier
from fedsieve.runner.experiment import load_model
from fedsieve.runner.progress import Display
from fedsieve.runner.setup import with_weights_file

FORMAT = "fedsieve patch 1"
HEAD = "head."


def save_patch(folder: Path, file: Path, display: Display) -> Mask:
    """Write a finished run's model as a patch on its pretrained weights; gives the mask of what changed."""
    experiment, model, metadata = load_model(folder)
    base = _pretrained(experiment, len(metadata["class_names"]), display)
    space = ParamSpace.of(base.backbone)
    before, after = space.read(base.backbone), space.read(model.backbone)
    changed = before.view(torch.int32) != after.view(torch.int32)  # to the bit: -0.0 is not 0.0 here
    mask = Mask.from_bool(space, changed)
    tensors = {"mask": torch.from_numpy(np.array(mask.bits)), "values": after[changed]}
    tensors |= {HEAD + name: tensor.contiguous() for name, tensor in model.head.state_dict().items()}
    notes = {
        "format": FORMAT,
        "experiment": to_yaml(experiment),
        "metadata": json.dumps(metadata),
        "base": digest(base.backbone),
        "result": digest(model),
    }
    write_atomic(file, safetensors.torch.save(tensors, notes))
    return mask


def load_patch(
    file: Path, weights: str | None = None, display: Display | None = None
) -> tuple[Experiment, Classifier, dict[str, Any]]:
    """The experiment, the model and its metadata of a patch, laid on the pretrained weights it was made from.

    `weights` says where those are now, if not where the run had them. The result is the run's model to the bit.
    """
    try:
        with safetensors.safe_open(file, "pt") as content:
            notes = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise FedsieveError(f"{file}: not a patch that can be read: {error}") from None
    if notes.get("format") != FORMAT:
        raise FedsieveError(f"{file}: not a patch; `fedsieve export DIR --sparse --to FILE` makes one")
    try:
        text, base, result = (notes[name] for name in ("experiment", "base", "result"))
        metadata = json.loads(notes["metadata"])
        classes = len(metadata["class_names"])
    except (KeyError, TypeError, ValueError):
        raise FedsieveError(f"{file}: damaged: its notes on the experiment cannot be read", 1) from None
    overrides = [f"model.weights={weights}"] if weights else []
    experiment = parse_config(text, overrides, where=str(file))
    model = _pretrained(experiment, classes, display or Display.silent())
    if digest(model.backbone) != base:
        raise FedsieveError(
            f"{file}: a patch on other weights than {experiment.model.weights}. Name the right ones with --weights"
        )
    space = ParamSpace.of(model.backbone)
    theta = space.read(model.backbone)
    head = {name.removeprefix(HEAD): tensor for name, tensor in tensors.items() if name.startswith(HEAD)}
    try:
        theta[Mask(space, tensors["mask"].numpy()).to_bool()] = tensors["values"]
        space.write(model.backbone, theta)
        model.head.load_state_dict(head)
    except (FedsieveError, RuntimeError, KeyError, TypeError) as error:
        raise FedsieveError(f"{file}: damaged: {str(error).splitlines()[0]}", 1) from None
    if digest(model) != result:
        raise FedsieveError(f"{file}: damaged: the patched model is not the one that was saved", 1)
    return experiment, model, metadata


def _pretrained(experiment: Experiment, classes: int, display: Display) -> Classifier:
    config: Model = with_weights_file(experiment, display)
    return load_classifier(config, classes, experiment.data.size, experiment.seed)

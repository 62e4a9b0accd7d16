"""The model of a finished run as a file: saved, loaded, or as a patch on pretrained weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch

from fedsieve import plugins
from fedsieve.config import Experiment, Model, load_config, parse_config, to_yaml
from fedsieve.errors import FedsieveError
from fedsieve.files import with_notes, write_atomic
from fedsieve.mask.mask import Mask
from fedsieve.model.build import Classifier, build_classifier
from fedsieve.model.space import ParamSpace
from fedsieve.model.weights import FINAL, digest, load_classifier
from fedsieve.runner.prepare import with_weights_file
from fedsieve.runner.progress import Display
from fedsieve.runner.setup import Setup

PATCH = "fedsieve patch 1"
HEAD = "head."


class SavedModel(NamedTuple):
    """A trained model with the experiment it comes from. Its metadata: class_names, mean, std and, of a patch, record."""

    experiment: Experiment
    model: Classifier
    metadata: dict[str, Any]


def read_experiment(folder: Path) -> Experiment:
    """The experiment of a run folder."""
    if not (folder / "config.yaml").exists():
        raise FedsieveError(f"{folder}: not a run folder (it has no config.yaml). `fedsieve run` makes one")
    try:
        return load_config(folder / "config.yaml")
    except FedsieveError as error:
        missing = [name for name in _plugins(folder) if name not in {Path(loaded).name for loaded in plugins.LOADED}]
        if not missing:
            raise
        asked = " ".join(f"--plugin {name}" for name in missing)
        raise FedsieveError(f"{folder}: this run uses words of a plugin: add {asked}. ({error})") from None


def _plugins(folder: Path) -> list[str]:
    """The plugins that a run was started with."""
    try:
        return [str(name) for name in json.loads((folder / "environment.json").read_text()).get("plugins", {})]
    except (OSError, ValueError, AttributeError):
        return []


def save_model(file: Path, setup: Setup) -> None:
    """All weights in one file that knows its classes and how its inputs were normalised."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in setup.model.state_dict().items()}
    metadata = {"class_names": json.dumps(setup.class_names)}
    if setup.transform is not None:
        metadata |= {"mean": json.dumps(setup.transform.mean), "std": json.dumps(setup.transform.std)}
    write_atomic(file, with_notes(safetensors.torch.save(tensors), metadata))


def load_model(folder: Path) -> SavedModel:
    """The chosen model of a finished run folder."""
    experiment = read_experiment(folder)
    file = folder / FINAL
    if not file.exists():
        raise FedsieveError(
            f"{folder}: this run is not finished, so it has no chosen model. `fedsieve resume {folder}`"
        )
    try:
        with safetensors.safe_open(file, "pt") as content:
            metadata = {key: json.loads(value) for key, value in content.metadata().items()}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        bare = experiment.model.model_copy(update={"weights": "none"})
        model = build_classifier(bare, len(metadata["class_names"]), experiment.data.size, experiment.seed)
        model.load_state_dict(tensors)
    except (safetensors.SafetensorError, KeyError, RuntimeError, json.JSONDecodeError, AttributeError) as error:
        raise FedsieveError(f"{file}: damaged: {str(error).splitlines()[0][:200]}", 1) from None
    return SavedModel(experiment, model, metadata)


# --- patches --------------------------------------------------------------------------------------------------------


def make_patch(saved: SavedModel, notes: Mapping[str, str], display: Display) -> tuple[bytes, Mask]:
    """A model as a patch on its pretrained weights, with more `notes` in its metadata; and the mask of what changed."""
    experiment, model, metadata = saved
    base = _pretrained(experiment, len(metadata["class_names"]), display)
    space = ParamSpace.of(base.backbone)
    before, after = space.read(base.backbone), space.read(model.backbone)
    changed = before.view(torch.int32) != after.view(torch.int32)  # to the bit: -0.0 is not 0.0 here
    mask = Mask.from_bool(space, changed)
    tensors = {"mask": torch.from_numpy(np.array(mask.bits)), "values": after[changed]}
    tensors |= {HEAD + name: tensor.contiguous() for name, tensor in model.head.state_dict().items()}
    own = {
        "format": PATCH,
        "experiment": to_yaml(experiment),
        "metadata": json.dumps(metadata),
        "base": digest(base.backbone),
        "result": digest(model),
    }
    return with_notes(safetensors.torch.save(tensors), {**notes, **own}), mask


def load_patch(file: Path, weights: str | None = None, display: Display | None = None) -> SavedModel:
    """The model of a patch, laid on the pretrained weights it was made from.

    `weights` says where those are now, if not where the run had them. The result is the run's model to the bit.
    """
    try:
        with safetensors.safe_open(file, "pt") as content:
            notes = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise FedsieveError(f"{file}: not a patch that can be read: {error}") from None
    if notes.get("format") != PATCH:
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
    return SavedModel(experiment, model, metadata)


def _pretrained(experiment: Experiment, classes: int, display: Display) -> Classifier:
    config: Model = with_weights_file(experiment, display)
    return load_classifier(config, classes, experiment.data.size, experiment.seed)

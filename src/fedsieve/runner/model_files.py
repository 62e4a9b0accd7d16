"""The model of a finished run as a file: saved, loaded, exported, or as a patch on pretrained weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from fedsieve.config import Experiment, Model, load_config, parse_config, to_yaml
from fedsieve.errors import FedsieveError
from fedsieve.files import with_notes, write_atomic
from fedsieve.mask.mask import Mask
from fedsieve.model.adapters import merge_lora
from fedsieve.model.build import Classifier, build_classifier, timm_options
from fedsieve.model.space import ParamSpace
from fedsieve.model.weights import FINAL, digest, load_classifier, timm_tensors
from fedsieve.runner.prepare import with_weights_file
from fedsieve.runner.progress import Display
from fedsieve.runner.setup import Setup

PATCH = "fedsieve patch 1"
HEAD = "head."


def read_experiment(folder: Path) -> Experiment:
    """The experiment of a run folder."""
    if not (folder / "config.yaml").exists():
        raise FedsieveError(f"{folder}: not a run folder (it has no config.yaml). `fedsieve run` makes one")
    return load_config(folder / "config.yaml")


def save_model(file: Path, setup: Setup) -> None:
    """All weights in one file that knows its classes and how its inputs were normalised."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in setup.model.state_dict().items()}
    metadata = {
        "class_names": json.dumps(setup.class_names),
        "mean": json.dumps(setup.transform.mean),
        "std": json.dumps(setup.transform.std),
    }
    write_atomic(file, with_notes(safetensors.torch.save(tensors), metadata))


def load_model(folder: Path) -> tuple[Experiment, Classifier, dict[str, Any]]:
    """The experiment, the chosen model and its metadata (class_names, mean, std) of a finished run folder."""
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
    return experiment, model, metadata


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
    notes = {"class_names": json.dumps(metadata["class_names"])}
    write_atomic(to, with_notes(safetensors.torch.save(tensors), notes))
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return (
        f'{to}: {to.stat().st_size:,} bytes\ntimm.create_model("{architecture}", {arguments}, checkpoint_path="{to}")'
    )


# --- patches --------------------------------------------------------------------------------------------------------


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
        "format": PATCH,
        "experiment": to_yaml(experiment),
        "metadata": json.dumps(metadata),
        "base": digest(base.backbone),
        "result": digest(model),
    }
    write_atomic(file, with_notes(safetensors.torch.save(tensors), notes))
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
    return experiment, model, metadata


def _pretrained(experiment: Experiment, classes: int, display: Display) -> Classifier:
    config: Model = with_weights_file(experiment, display)
    return load_classifier(config, classes, experiment.data.size, experiment.seed)

"""Pretrained weights from files: timm's safetensors and .pth, and the original DINO release's formats.

DINO (Caron et al. 2021) publishes a bare backbone (`cls_token`, `blocks.0...`) and full training checkpoints
(`{"student": ..., "teacher": {"module.backbone.blocks.0..."}}`, with a projection head that is no classifier).
"""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fedsieve.config import Model
from fedsieve.errors import FedsieveError
from fedsieve.model.adapters import part_of
from fedsieve.model.build import Classifier, build_classifier, extend

# Containers that hold the weights of other tools, in the order they are looked for.
CONTAINERS = ("teacher", "state_dict", "model", "student")
# Where a run folder keeps its chosen weights.
FINAL = "checkpoints/final.safetensors"
# What no pretrained network has, and what to do about it.
FOREIGN = {
    "adapter": "They cannot be merged: start from a run without model.adapter",
    "lora": "`fedsieve export RUN --backbone-only --to FILE.safetensors` merges them: name that file",
}


def load_classifier(config: Model, classes: int, size: int, seed: int) -> Classifier:
    """The configured classifier with the configured weights: `hub`, `none`, a file, or a finished run's backbone."""
    plain = config.model_copy(update={"lora": None, "adapter": None})
    model = build_classifier(plain, classes, size, seed, pretrained=config.weights == "hub")
    if config.weights not in ("hub", "none"):
        load_backbone(model, read_weights(weights_file(config)), config.weights)
    return extend(model, config, seed)


def weights_file(config: Model) -> Path:
    """The file that `model.weights` names; refused when it is not there."""
    path = Path(config.weights).expanduser()
    if path.is_dir():
        path = path / FINAL
    if not path.is_file():
        raise FedsieveError(
            f"model.weights: {path}: no such file. Allowed: hub, none, digits, a .safetensors or .pth file, a run folder"
        )
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """The named tensors of a weights file, containers and wrappers' prefixes taken off."""
    try:
        if path.suffix == ".safetensors":
            content: Any = safetensors.torch.load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that is no pickle can fail in any way
        raise FedsieveError(
            f"model.weights: {path} cannot be read as weights: {(str(error) or type(error).__name__).splitlines()[0][:200]}",
            1,
        ) from None
    for name in CONTAINERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    if not isinstance(content, Mapping):
        raise FedsieveError(f"model.weights: {path} holds no named tensors")
    tensors = {str(name).removeprefix("module."): value for name, value in content.items() if isinstance(value, Tensor)}
    if any(name.startswith("backbone.") for name in tensors):
        # Only the backbone: a DINO checkpoint's own head projects, it does not classify.
        tensors = {name.removeprefix("backbone."): v for name, v in tensors.items() if name.startswith("backbone.")}
    if not tensors:
        raise FedsieveError(f"model.weights: {path} holds no named tensors")
    return tensors


def load_backbone(model: Classifier, tensors: Mapping[str, Tensor], where: str) -> None:
    """Fill the backbone from `tensors` in timm's names. Everything must fit; a classifier in the file is left out."""
    for part, way in FOREIGN.items():
        if any(part_of(name) == part for name in tensors):
            raise FedsieveError(f"model.weights: {where} holds {part} parameters besides a network's own. {way}")
    backbone = model.backbone
    wanted = backbone.state_dict()
    given = _convert(dict(tensors), backbone)
    classifiers = backbone.pretrained_cfg.get("classifier") or ()  # type: ignore[union-attr,operator]
    names = (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)
    extra = [name for name in given if name not in wanted and not name.startswith(tuple(f"{c}." for c in names))]
    missing = [name for name in wanted if name not in given]
    misshapen = [name for name in wanted if name in given and wanted[name].shape != given[name].shape]
    problems = [
        f"{len(found)} {what}, such as {found[0]}"
        for what, found in (
            ("tensors are missing", missing),
            ("do not belong", extra),
            ("have another shape", misshapen),
        )
        if found
    ]
    if problems:
        raise FedsieveError(f"model.weights: {where} does not fit the backbone: {'; '.join(problems)}")
    backbone.load_state_dict({name: given[name] for name in wanted})


def _convert(tensors: dict[str, Tensor], backbone: torch.nn.Module) -> dict[str, Tensor]:
    """Tensors in the names and sizes of this backbone: timm's own filter knows the formats of a family, and
    interpolates position embeddings to the input size."""
    convert = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return tensors
    try:
        return convert(tensors, backbone)
    except (KeyError, AttributeError, TypeError):  # filters that take other arguments leave the names as they are
        return tensors


def digest(model: torch.nn.Module) -> str:
    """A fingerprint of all weights and buffers of a model."""
    content = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        content.update(name.encode())
        content.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return content.hexdigest()


def timm_tensors(model: Classifier, with_head: bool) -> dict[str, Tensor]:
    """The classifier in the names of `timm.create_model(backbone, num_classes=...)`, or only its backbone."""
    tensors = dict(model.backbone.state_dict())
    if any(part_of(name) == "adapter" for name in tensors):
        raise FedsieveError(
            "export: timm's model has no place for adapters. `fedsieve export RUN --sparse` keeps them, as a patch"
        )
    if with_head:
        name = model.backbone.pretrained_cfg["classifier"]  # type: ignore[index]
        if not isinstance(name, str) or not isinstance(model.head, torch.nn.Linear):
            raise FedsieveError("export: timm's model has no place for this head. Use --backbone-only")
        tensors |= {f"{name}.{key}": value for key, value in model.head.state_dict().items()}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

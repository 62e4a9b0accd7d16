"""Exports: the model of a finished run as files that timm or peft load, or as a patch, each with a model card."""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from fedsieve.config import Experiment, to_yaml
from fedsieve.data.sources import SMALL, stored_side
from fedsieve.errors import FedsieveError
from fedsieve.files import with_notes, write_atomic
from fedsieve.model.adapters import merge_lora, part_of, peft_adapter
from fedsieve.model.build import timm_options, trainable_names
from fedsieve.model.weights import timm_tensors
from fedsieve.report.card import describe_run, model_card
from fedsieve.report.folder import read_run
from fedsieve.runner.checkpoint import list_checkpoints, read_checkpoint
from fedsieve.runner.model_files import SavedModel, load_model, load_patch, make_patch
from fedsieve.runner.progress import Display

Form = Literal["whole", "backbone", "patch", "peft"]
BASE = "base.safetensors"  # of an adapter folder: pretrained weights that the hub does not have

# Every step repeats fedsieve's own: images that are not small squares are stored as the middle square of each, and are
# resized as float tensors. timm's transforms of PIL images round to 8 bits after they resize.
LINES = """\
import json

{imports}
from PIL import Image, ImageOps
from torchvision.transforms import v2

with open({config}) as file:
    config = json.load(file)
{model}
class_names = config["pretrained_cfg"]["label_names"]


def square(image):
    if image.width == image.height <= {small}:
        return image
    scale = {side} / min(image.size)
    sides = [max({side}, round(length * scale)) for length in image.size]
    image = image.resize(sides, Image.Resampling.BICUBIC)
    left, top = (image.width - {side}) // 2, (image.height - {side}) // 2
    return image.crop((left, top, left + {side}, top + {side}))


transform = v2.Compose([
    v2.PILToTensor(),
    v2.ToDtype(torch.float32, scale=True),
    {resize},
    v2.Normalize(config["pretrained_cfg"]["mean"], config["pretrained_cfg"]["std"]),
])
image = square(ImageOps.exif_transpose(Image.open("image.jpg")).convert("RGB"))
with torch.inference_mode():
    {answer}
"""
TIMM = """\
model = timm.create_model(
    config["architecture"],
    checkpoint_path={file},
    num_classes=config["num_classes"],
    pretrained_cfg=config["pretrained_cfg"],
    **config["model_args"],
).eval()"""
PEFT = """\
base = timm.create_model({backbone}, {weights}, num_classes=config["num_classes"], **config["model_args"])
model = PeftModel.from_pretrained(base, {folder}).eval()"""
LOGITS = "logits = model(transform(image)[None])[0]\nprint(class_names[logits.argmax()])"
FEATURES = "features = model(transform(image)[None])[0]"
DIFFERENCES = """\
`image.jpg` stands for your image. For 8-bit RGB images these lines compute the logits of `fedsieve evaluate` up to float
rounding. They differ where fedsieve ran in bf16, for images with transparency or 16 bits, and for small square images of
a source whose images are of several sizes, which fedsieve resizes first. timm's own
`create_transform(**resolve_model_data_config(model))` is close. It resizes photographs once, where
fedsieve first stores their middle square, and it rounds to 8 bits."""


def export(source: Path, to: Path, form: Form, weights: str | None, force: bool, display: Display) -> str:
    """Write the model of a run folder or of a patch, with a card; gives what was written and how to load it.

    `whole` and `backbone` have timm's names, with LoRA merged into the weights. A `patch` holds what changed, with LoRA
    and adapters as they are. `peft` is an adapter folder with LoRA and the head. `weights` are those under a patch.
    """
    files = _files(to, form, force)
    if source.is_file() and form in ("patch", "peft"):
        option = "--sparse" if form == "patch" else "--peft"
        raise FedsieveError(f"export: {option} takes a run folder, and {source} is a file")
    if weights and not source.is_file():
        raise FedsieveError("export: --weights belongs to a patch. A run folder has all its weights: drop --weights")
    saved = load_patch(source, weights, display) if source.is_file() else load_model(source)
    record = saved.metadata.get("record", "") if source.is_file() else _record(source)
    config = timm_config(saved, with_head=form != "backbone")
    if form == "patch":
        made = _patch(saved, record, config, files, display)
    elif form == "peft":
        made = _adapter_folder(saved, config, files)
    else:
        made = _timm_file(saved, config, files)
    load = made.load(Path())  # the card is in the folder of the files
    load = load if form == "patch" else f"In the folder of this card:\n\n```python\n{load}```\n\n{DIFFERENCES}"
    experiment, data = saved.experiment, saved.experiment.data
    made.contents[files["card"]] = model_card(
        experiment.name,
        {"patch": "fedsieve", "peft": "peft"}.get(form, "timm"),
        record or "The patch that this model was made from does not record how the training went.",
        kind=made.what,
        data=data,
        side=stored_side(data),
        mean=config["pretrained_cfg"]["mean"],
        std=config["pretrained_cfg"]["std"],
        class_names=saved.metadata["class_names"],
        load=load,
        yaml=to_yaml(experiment),
    )
    for path, content in made.contents.items():
        write_atomic(path, content)
    written = "\n".join(f"{path}: {path.stat().st_size:,} bytes" for path in made.contents)
    return f"{written}\n{made.what}\n\n{made.load(files['card'].parent)}"


def _files(to: Path, form: Form, force: bool) -> dict[str, Path]:
    """The files of an export. Those that are there already are refused, unless they may be overwritten."""
    if form == "peft":
        if to.suffix == ".safetensors" or to.is_file():
            raise FedsieveError(f"--to: {to} should name a folder, because --peft writes several files")
        names = {"model": "adapter_model.safetensors", "settings": "adapter_config.json", "base": BASE}
        files = {key: to / name for key, name in {**names, "config": "config.json", "card": "README.md"}.items()}
    else:
        if to.suffix != ".safetensors":
            raise FedsieveError(f"--to: {to} should end in .safetensors")
        hub = to.name == "model.safetensors"  # then the folder is one that timm's local-dir: and the hub take
        files = {
            "model": to,
            "config": to.with_name("config.json") if hub else to.with_suffix(".json"),
            "card": to.with_name("README.md") if hub else to.with_suffix(".md"),
        }
        if form == "patch":
            del files["config"]
    if not force and (there := [str(path) for path in files.values() if path.exists()]):
        raise FedsieveError(
            f"--to: {', '.join(there)} {'exists' if len(there) == 1 else 'exist'} already. Name another place, or overwrite "
            "with --force"
        )
    return files


def _record(folder: Path) -> str:
    """What a run folder records, for the card."""
    fingerprint = None
    for path in list_checkpoints(folder / "checkpoints")[-1:]:
        with contextlib.suppress(ValueError, OSError):  # a damaged checkpoint records nothing
            fingerprint = read_checkpoint(path)[0].get("marks", {}).get("data.source")
    return describe_run(read_run(folder), fingerprint)


def timm_config(saved: SavedModel, with_head: bool) -> dict[str, Any]:
    """The network and its input in the words of the config.json that timm reads."""
    experiment, data, model = saved.experiment, saved.experiment.data, saved.model
    names = saved.metadata["class_names"] if with_head else []
    declared: Mapping[str, Any] = model.backbone.pretrained_cfg  # type: ignore[assignment]
    return {
        "architecture": experiment.model.backbone.partition(".")[0],
        "num_classes": len(names),
        "model_args": timm_options(experiment.model, data.size),
        "pretrained_cfg": {
            **{key: declared[key] for key in ("first_conv", "classifier", "fixed_input_size") if key in declared},
            "input_size": [3, data.size, data.size],
            "interpolation": data.interpolation,
            "crop_mode": "center",
            "crop_pct": data.size / stored_side(data) if data.transform == "crop_flip" else 1.0,
            "mean": list(saved.metadata["mean"]),
            "std": [max(value, 1 / 255) for value in saved.metadata["std"]],  # as Transform has it
            "num_classes": len(names),
            "label_names": names,
        },
    }


def _notes(saved: SavedModel, config: Mapping[str, Any]) -> dict[str, str]:
    return {"class_names": json.dumps(saved.metadata["class_names"]), "config": json.dumps(config)}


def _lines(experiment: Experiment, config_file: Path, packages: list[str], model: str, with_head: bool) -> str:
    """The Python that loads an export, prepares an image as fedsieve does, and classifies it."""
    data, side = experiment.data, stored_side(experiment.data)
    mode = f"v2.InterpolationMode.{data.interpolation.upper()}"
    resize = f"v2.Resize(({data.size}, {data.size}), {mode})"
    if data.transform == "crop_flip":
        resize = f"v2.Resize({side}, {mode}),\n    v2.CenterCrop({data.size})"
    return LINES.format(
        imports="\n".join(packages),
        config=_quoted(config_file),
        model=model,
        small=max(side, SMALL),
        side=side,
        resize=resize,
        answer=(LOGITS if with_head else FEATURES).replace("\nprint", "\n    print"),
    )


def _quoted(path: Path | str) -> str:
    return json.dumps(str(path))


class Made(NamedTuple):
    """An export before it is written."""

    what: str
    contents: dict[Path, bytes | str]
    load: Callable[[Path], str]  # how to load it, for readers who see its files in this folder


def _timm_file(saved: SavedModel, config: Mapping[str, Any], files: Mapping[str, Path]) -> Made:
    """The whole network, or only its backbone. It is made sure that timm takes it."""
    import timm

    merge_lora(saved.model)
    classes = config["num_classes"]
    tensors = timm_tensors(saved.model, with_head=classes > 0)
    architecture = config["architecture"]
    try:
        timm.create_model(architecture, num_classes=classes, **config["model_args"]).load_state_dict(tensors)
    except (TypeError, RuntimeError) as error:
        raise FedsieveError(
            f"export: timm's {architecture} does not take these weights: {str(error)[:300]}", 1
        ) from None
    contents: dict[Path, bytes | str] = {
        files["model"]: with_notes(safetensors.torch.save(tensors), _notes(saved, config)),
        files["config"]: json.dumps(config, indent=2) + "\n",
    }

    def load(folder: Path) -> str:
        packages, model = ["import timm", "import torch"], TIMM.format(file=_quoted(folder / files["model"].name))
        return _lines(saved.experiment, folder / files["config"].name, packages, model, with_head=classes > 0)

    what = f"An image classifier with {classes:,} classes" if classes else "The backbone of an image classifier"
    return Made(f"{what}: timm's `{architecture}`.", contents, load)


def _patch(
    saved: SavedModel, record: str, config: Mapping[str, Any], files: Mapping[str, Path], display: Display
) -> Made:
    """Only what changed, with all that a later export of the whole model needs."""
    kept = saved._replace(metadata={**saved.metadata, "record": record})
    content, mask = make_patch(kept, _notes(saved, config), display)
    share = f"{mask.count:,} of {mask.space.size:,} backbone weights changed ({100 * mask.density:.1f} %)"
    name = files["model"].name
    return Made(
        f"A patch on pretrained weights: {share}.",
        {files["model"]: content},
        lambda folder: f"`fedsieve export {folder / name} --to FULL.safetensors` lays it on the pretrained weights",
    )


def _adapter_folder(saved: SavedModel, config: dict[str, Any], files: Mapping[str, Path]) -> Made:
    """LoRA and the head as peft saves them; the pretrained weights too, unless the hub has them."""
    experiment, model = saved.experiment, saved.model
    lora, settings = experiment.model.lora, experiment.model
    if lora is None:
        raise FedsieveError("export: --peft is for LoRA, and this run has no model.lora. Drop --peft")
    for stage in experiment.stages:
        if other := {part_of(name) for name in trainable_names(model, stage.train)} - {"lora", "head"}:
            raise FedsieveError(
                f'export: --peft keeps LoRA and the head only, and stage "{stage.name}" also trains the {min(other)}. Drop '
                "--peft to merge LoRA into the weights, or use --sparse"
            )
    import timm

    tensors = timm_tensors(model, with_head=True)
    classifier: str = config["pretrained_cfg"]["classifier"]
    base = timm.create_model(config["architecture"], num_classes=config["num_classes"], **config["model_args"])
    adapter, peft_settings = peft_adapter(tensors, base, classifier, lora)
    from_hub = settings.weights == "hub"
    backbone = settings.backbone if from_hub else config["architecture"]
    peft_settings["base_model_name_or_path"] = backbone
    contents: dict[Path, bytes | str] = {
        files["model"]: with_notes(safetensors.torch.save(_plain(adapter)), _notes(saved, config)),
        files["settings"]: json.dumps(peft_settings, indent=2, sort_keys=True) + "\n",
        files["config"]: json.dumps(config, indent=2) + "\n",
    }
    if not from_hub:
        plain = {
            name.replace(".base_layer.", "."): one for name, one in tensors.items() if part_of(f".{name}") != "lora"
        }
        plain |= {name: torch.zeros_like(one) for name, one in plain.items() if name.startswith(f"{classifier}.")}
        contents[files["base"]] = safetensors.torch.save(_plain(plain))

    def load(folder: Path) -> str:
        weights = "pretrained=True" if from_hub else f"checkpoint_path={_quoted(folder / BASE)}"
        loading = PEFT.format(backbone=_quoted(backbone), weights=weights, folder=_quoted(folder))
        packages = ["import timm", "import torch", "from peft import PeftModel"]
        return _lines(experiment, folder / files["config"].name, packages, loading, with_head=True)

    return Made(f"A LoRA adapter with a head for {config['num_classes']:,} classes, on `{backbone}`.", contents, load)


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

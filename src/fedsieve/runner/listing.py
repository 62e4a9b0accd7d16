"""The words a config may use, for `fedsieve list`."""

from collections.abc import Callable, Iterable
from typing import Any, get_args

from fedsieve.config import Allocation, Granularity, Interpolation, Model, Normalize, Stage, TrackerName, Transform
from fedsieve.data.sources import EMBEDDED

Entries = Iterable[tuple[str, str]]

TRANSFORMS = {
    "resize": "resize to size x size; nothing random, so a frozen backbone's features are computed once",
    "flip": "resize, and flip left-right at random",
    "crop_flip": "random resized crop (crop_scale) and flip; evaluation resizes to size*256/224 and crops the centre",
    "flip_rotate": "resize, flip, and rotate by up to `rotation` degrees",
}
DATASETS = EMBEDDED | {
    "uoft-cs/cifar100": "60,000 photographs, 32x32, 100 classes (hub)",
    "uoft-cs/cifar10": "60,000 photographs, 32x32, 10 classes (hub)",
    "OWNER/NAME": "any image-classification set of the hub with an image and a label column",
    "FOLDER": "parquet files (train-*.parquet, test-*.parquet) or images by class (train/CLASS/*.png, test/CLASS/*.png)",
}
NORMALIZE = {
    "data": "mean and deviation of the training images",
    "imagenet": "mean 0.485 0.456 0.406, deviation 0.229 0.224 0.225 (DINO, most timm models)",
    "half": "mean and deviation 0.5 (many timm ViTs)",
}
PARTS = {
    "head": "only the classifier; the backbone is frozen",
    "backbone": "everything but the classifier, LoRA and adapters",
    "all": "backbone and head",
    "lora": "the low-rank updates of model.lora; the weights beside them are frozen",
    "adapter": "the layers of model.adapter",
    "{last_blocks: N}": "the last N blocks, what follows them, and the head",
    "[PART, ...]": "several of these together, such as [lora, head]",
}
WEIGHTS = {
    "hub": "timm's weights for the backbone, from the hub",
    "none": "random, drawn by the seed",
    "digits": "made on first use: the backbone trained in seconds on the digits 0 to 4",
    "FILE": ".safetensors or .pth in timm's names, or a file of the DINO release",
    "DIR": "the backbone of a finished run folder (one without LoRA and adapters)",
}
GRANULARITY = {
    "weight": "single weights; the gradient is still computed whole",
    "row": "rows of matrices: a frozen row's weight gradient is not computed",
    "attention_head": "attention heads; everything else is frozen",
    "block": "whole transformer blocks: a frozen prefix needs no backward pass",
}
ALLOCATION = {
    "global": "one threshold for the model",
    "tensor": "the same density in each tensor",
    "block": "the same density in each block",
}
KINDS = {
    "default": "all of linear, attention, norm and conv",
    "all": "everything, tokens and position embeddings included",
    "linear": "weights and biases of linear layers outside attention",
    "attention": "weights and biases of attention's projections",
    "norm": "weights and biases of norms",
    "conv": "weights and biases of convolutions",
    "bias": "the biases of all of these",
    "other": "what no layer owns: tokens, position embeddings, scales",
}
HEADS = {"linear": "one linear layer", "mlp": "a hidden layer of `model.hidden` units, GELU, a linear layer"}


def _models(pattern: str | None) -> Entries:
    import timm

    tagged = timm.list_models(pattern or "*", pretrained=True)
    bare = (
        [name for name in timm.list_models(pattern or "*") if not any(t.startswith(f"{name}.") for t in tagged)]
        if pattern
        else []
    )
    return [(name, "") for name in [*tagged, *bare]]


def _words(annotation: Any, texts: dict[str, str] | None = None) -> Callable[[str | None], Entries]:
    """Entries that follow the config's own type, so that the two cannot part."""
    return lambda _: [(word, (texts or {}).get(word, "")) for word in get_args(annotation)]


def _texts(texts: dict[str, str]) -> Callable[[str | None], Entries]:
    return lambda _: texts.items()


def _rules(_: str | None) -> Entries:
    from fedsieve.mask.calibration import RULES

    return [(name, rule.text) for name, rule in RULES.items()]


LISTINGS: dict[str, tuple[str, Callable[[str | None], Entries]]] = {
    "models": ("model.backbone: timm classifiers with weights on the hub (add a PATTERN for others)", _models),
    "weights": ("model.weights: where pretrained weights come from", _texts(WEIGHTS)),
    "heads": ("model.head: what classifies", _words(Model.model_fields["head"].annotation, HEADS)),
    "datasets": ("data.source: where images come from", _texts(DATASETS)),
    "transforms": ("data.transform: what happens to images", _words(Transform, TRANSFORMS)),
    "normalize": ("data.normalize: how colours are scaled", _words(Normalize, NORMALIZE)),
    "interpolation": ("data.interpolation: how images are resized", _words(Interpolation)),
    "rules": ("mask.rule: which weights may train", _rules),
    "granularity": ("mask.granularity: what is frozen together", _words(Granularity, GRANULARITY)),
    "allocation": ("mask.allocation: how the active weights are shared out", _words(Allocation, ALLOCATION)),
    "kinds": ("mask.kinds: default, all, or a list of the layer kinds that take part", _texts(KINDS)),
    "parts": ("stages.train: what a stage trains", _texts(PARTS)),
    "schedules": ("stages.schedule: the learning rate over a stage", _words(Stage.model_fields["schedule"].annotation)),
    "trackers": ("tracking: where metrics go beside metrics.jsonl", _words(TrackerName)),
}

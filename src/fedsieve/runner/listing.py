"""The words a config may use, for `fedsieve list`."""

from collections.abc import Callable, Iterable, Mapping

from fedsieve.config import FAMILIES
from fedsieve.data.image_tables import EMBEDDED

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
METHODS = {
    "sgd": "by steps of the stage's optimizer",
    "ridge": "a head in closed form, in one round; in a federation from sums that do not care who holds what",
}
SCOPES = {
    "shared": "one mask from clients' summed scores",
    "client": "each client calibrates its own",
    "public": "one mask, scored by the server on images it holds",
}
FORMATS = {
    "fp32": "4 bytes a value, exact",
    "bf16": "2 bytes, the range of fp32",
    "fp16": "2 bytes, finer, up to 65504",
    "int8": "1 byte and a scale per `group`, rounded at random",
    "int4": "half a byte and a scale per `group`, rounded at random",
    "sign": "one bit and a scale per `group`; up only",
    "coo": "fp32 with one int64 index per dimension, as the studies count it",
}
WEIGHTING = {"examples": "clients count by their images", "uniform": "every client counts the same"}
EXECUTORS = {
    "auto": "stacked on a GPU, sequential on a CPU",
    "sequential": "one client after another",
    "stacked": "all clients of a round at once, or as many as fit",
    "distributed": "either of them on every process that torchrun starts",
}
AGGREGATIONS = {
    "plain": "the server sees every update",
    "zero_sum": "the secure report's pads, for comparison: no secrecy, no dropouts",
    "secagg": "secure aggregation: the server sees sums only (docs/trust.md)",
}
PERSONAL = {
    "local": "what the last stage trained, under its mask",
    "head": "the classifier",
    "norms": "weights and biases of norm layers",
    "mask": "the weights of a mask of the client's own",
    "blend": "the client's last weights mixed in, without training (federation.blend)",
}


def _models(pattern: str | None) -> Entries:
    import timm

    tagged = timm.list_models(pattern or "*", pretrained=True)
    bare = (
        [name for name in timm.list_models(pattern or "*") if not any(t.startswith(f"{name}.") for t in tagged)]
        if pattern
        else []
    )
    return [(name, "") for name in [*tagged, *bare]]


def _words(texts: Mapping[str, str]) -> Callable[[str | None], Entries]:
    return lambda _: texts.items()


def _family(name: str) -> tuple[str, Callable[[str | None], Entries]]:
    """The words of a family, with the settings that each takes."""
    family = FAMILIES[name]

    def entries(_: str | None) -> Entries:
        for word, made in family.words.items():
            own = [key for key in made.model_fields if key not in family.model_fields]
            yield word, made.text() + (f" ({', '.join(own)})" if own else "")

    return f"{family.place}: {family.text().rstrip('.')}", entries


LISTINGS: dict[str, tuple[str, Callable[[str | None], Entries]]] = {
    "models": ("model.backbone: timm classifiers with weights on the hub (add a PATTERN for others)", _models),
    "weights": ("model.weights: where pretrained weights come from", _words(WEIGHTS)),
    "heads": ("model.head: what classifies", _words(HEADS)),
    "datasets": ("data.source: where images come from", _words(DATASETS)),
    "transforms": ("data.transform: what happens to images", _words(TRANSFORMS)),
    "normalize": ("data.normalize: how colours are scaled", _words(NORMALIZE)),
    "interpolation": ("data.interpolation: how images are resized", _words({"bilinear": "", "bicubic": ""})),
    "rules": _family("rule"),
    "granularity": ("mask.granularity: what is frozen together", _words(GRANULARITY)),
    "allocation": ("mask.allocation: how the active weights are shared out", _words(ALLOCATION)),
    "kinds": ("mask.kinds: default, all, or a list of the layer kinds that take part", _words(KINDS)),
    "parts": ("stages.train: what a stage trains", _words(PARTS)),
    "methods": ("stages.method: how a stage trains", _words(METHODS)),
    "optimizers": _family("optimizer"),
    "schedules": ("stages.schedule: the learning rate over a stage", _words({"cosine": "", "constant": ""})),
    "partitions": _family("partition"),
    "scopes": ("mask.scope: whose mask it is, in a federation", _words(SCOPES)),
    "formats": ("message.up, message.down: how values travel", _words(FORMATS)),
    "servers": _family("server"),
    "corrections": _family("correction"),
    "weighting": ("federation.weighting: how much a client counts", _words(WEIGHTING)),
    "aggregators": _family("aggregator"),
    "attacks": _family("attack"),
    "aggregations": ("privacy.aggregation: what the server sees of updates", _words(AGGREGATIONS)),
    "personal": ("federation.personal.methods: clients' own models at the end", _words(PERSONAL)),
    "executors": ("executor: what trains the clients of a round", _words(EXECUTORS)),
    "objectives": _family("objective"),
    "trackers": _family("tracker"),
}

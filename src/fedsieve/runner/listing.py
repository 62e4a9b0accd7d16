"""The words a config may use, for `fedsieve list`."""

from collections.abc import Callable, Iterable, Mapping

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
OPTIMIZERS = {"sgd": "SGD with momentum", "adamw": "Adam with decoupled weight decay"}
PARTITIONS = {
    "iid": "shuffled and split evenly",
    "classes": "exactly `nc` classes each, every class owned, owners drawn at random",
    "dirichlet": "class shares drawn with `alpha`: the smaller, the more skewed; at most `nc` classes, if given",
    "quantity": "sizes drawn with `alpha`, classes mixed",
    "natural": "by `column`, such as a user id",
    "sites": "each client elsewhere, with data of its own, as `fedsieve flower` has it",
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
SERVERS = {
    "sgd": "move by lr times the mean update; with lr 1, FedAvg",
    "momentum": "FedAvgM",
    "adam": "FedAdam",
    "yogi": "FedYogi",
    "adagrad": "FedAdagrad",
}
CORRECTIONS = {
    "none": "clients train as they would alone",
    "fedprox": "a pull of `mu` towards the received weights",
    "scaffold": "control variates, sent both ways",
    "fedntd": "distillation of the received model's answers beside the true class (`beta`, `tau`)",
}
WEIGHTING = {"examples": "clients count by their images", "uniform": "every client counts the same"}
EXECUTORS = {
    "auto": "stacked on a GPU, sequential on a CPU",
    "sequential": "one client after another",
    "stacked": "all clients of a round at once, or as many as fit",
    "distributed": "either of them on every process that torchrun starts",
}
AGGREGATORS = {
    "mean": "the mean, by `federation.weighting`",
    "median": "the median of each value",
    "trimmed_mean": "the mean of each value without a `share` of the clients at either end",
    "krum": "the one update that lies nearest to the others, where `f` may be hostile",
    "multi_krum": "the mean of the `m` (default: all but `f`) updates that Krum ranks first",
    "geometric_median": "the point with the least mean distance to all updates",
    "norm_bound": "the mean of updates shortened to a norm: `limit`, or the median of the round's",
}
ATTACKS = {
    "label_flip": "it trains on the last class for the first, and so on",
    "sign_flip": "the update times -`factor`",
    "gaussian_noise": "noise of `factor` times the update's norm",
    "nan": "no numbers at all: refused by the decoder",
    "stale_replay": "the client's first update, again and again",
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


def _rules(_: str | None) -> Entries:
    from fedsieve.mask.calibration import RULES

    return [(name, rule.text) for name, rule in RULES.items()]


LISTINGS: dict[str, tuple[str, Callable[[str | None], Entries]]] = {
    "models": ("model.backbone: timm classifiers with weights on the hub (add a PATTERN for others)", _models),
    "weights": ("model.weights: where pretrained weights come from", _words(WEIGHTS)),
    "heads": ("model.head: what classifies", _words(HEADS)),
    "datasets": ("data.source: where images come from", _words(DATASETS)),
    "transforms": ("data.transform: what happens to images", _words(TRANSFORMS)),
    "normalize": ("data.normalize: how colours are scaled", _words(NORMALIZE)),
    "interpolation": ("data.interpolation: how images are resized", _words({"bilinear": "", "bicubic": ""})),
    "rules": ("mask.rule: which weights may train", _rules),
    "granularity": ("mask.granularity: what is frozen together", _words(GRANULARITY)),
    "allocation": ("mask.allocation: how the active weights are shared out", _words(ALLOCATION)),
    "kinds": ("mask.kinds: default, all, or a list of the layer kinds that take part", _words(KINDS)),
    "parts": ("stages.train: what a stage trains", _words(PARTS)),
    "methods": ("stages.method: how a stage trains", _words(METHODS)),
    "optimizers": ("stages.optimizer.kind: how weights move", _words(OPTIMIZERS)),
    "schedules": ("stages.schedule: the learning rate over a stage", _words({"cosine": "", "constant": ""})),
    "partitions": ("federation.partition.kind: which client holds which images", _words(PARTITIONS)),
    "scopes": ("mask.scope: whose mask it is, in a federation", _words(SCOPES)),
    "formats": ("message.up, message.down: how values travel", _words(FORMATS)),
    "servers": ("federation.server.optimizer: how the server moves", _words(SERVERS)),
    "corrections": ("federation.correction.kind: what clients do against drift", _words(CORRECTIONS)),
    "weighting": ("federation.weighting: how much a client counts", _words(WEIGHTING)),
    "aggregators": (
        "federation.aggregator: how updates become one; all but mean also after `mix`, for clients that differ",
        _words(AGGREGATORS),
    ),
    "attacks": ("federation.attack: what hostile clients do", _words(ATTACKS)),
    "aggregations": ("privacy.aggregation: what the server sees of updates", _words(AGGREGATIONS)),
    "personal": ("federation.personal.methods: clients' own models at the end", _words(PERSONAL)),
    "executors": ("executor: what trains the clients of a round", _words(EXECUTORS)),
    "trackers": (
        "tracking: where metrics go beside metrics.jsonl",
        _words({"tensorboard": "", "wandb": "", "mlflow": ""}),
    ),
}

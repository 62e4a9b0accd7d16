"""A classifier: a timm backbone that gives features, and a head on top of them."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedsieve.config import LastBlocks, Model, Part
from fedsieve.errors import FedsieveError, did_you_mean
from fedsieve.model.adapters import add_adapters, add_lora, part_of
from fedsieve.randomness import generator

# What timm calls the repeated part of a network, in the order it is looked for.
BLOCK_LISTS = ("blocks", "stages", "layers")
# Options of timm's networks that say how large they are, as numbers. Others choose files, addresses and classes to load, and an
# experiment may come from somebody else.
OPTIONS = (
    *(
        "patch_size",
        "img_size",
        "window_size",
        "embed_dim",
        "embed_dims",
        "dims",
        "depth",
        "depths",
        "layers",
        "channels",
        "width_factor",
        "stage_conv_chs",
        "stage_out_chs",
        "block_per_stage",
    ),
    *(
        "heads",
        "num_heads",
        "key_dim",
        "num_vit",
        "mlp_ratio",
        "mlp_ratios",
        "expand_ratio",
        "stem_width",
        "base_width",
        "cardinality",
    ),
    *("growth_rate", "block_config", "kernel_size", "kernel_sizes", "class_token", "reg_tokens", "no_embed_class"),
    *("qkv_bias", "qk_norm", "pre_norm", "init_values", "ls_init_value", "drop_rate", "drop_path_rate"),
)


class Classifier(nn.Module):
    """`head(backbone(images))`. Parameters are named `backbone.*` and `head.*`."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))


class OnFeatures(nn.Module):
    """The head of a classifier, under the names it has there."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor) -> Tensor:
        return self.head(features)


def check_backbone(config: Model) -> None:
    """Refuse a backbone timm does not know, or one that the hub has no weights for."""
    import timm

    architecture, _, tag = config.backbone.partition(".")
    if not timm.is_model(architecture):
        raise FedsieveError(
            f'model.backbone: timm knows no model "{architecture}".{did_you_mean(architecture, timm.list_models())} '
            "`fedsieve list models PATTERN` shows them"
        )
    tagged = timm.list_models(f"{architecture}.*", pretrained=True)
    if tag and config.backbone not in tagged:
        raise FedsieveError(
            f'model.backbone: {architecture} has no weights "{tag}".{did_you_mean(config.backbone, tagged)} '
            f"It has: {', '.join(name.partition('.')[2] for name in tagged) or 'none'}"
        )
    if config.weights == "hub" and not tagged:
        raise FedsieveError(f"model.weights: the hub has no weights for {architecture}. Name a file, or none")


def build_classifier(config: Model, classes: int, size: int, seed: int, pretrained: bool = False) -> Classifier:
    """The configured network for `classes` classes of `size` px images, its weights drawn by `seed`.

    With `pretrained`, timm fills the backbone from the hub. Drop rates are forced to 0 and the network stays in eval
    mode in training too: every executor must compute the same function, and BatchNorm statistics stay pretrained.
    """
    import timm

    options = timm_options(config, size)
    logging.getLogger("timm").setLevel(logging.WARNING)
    with _drawn(seed, "initial weights"):
        try:
            backbone = timm.create_model(config.backbone, pretrained=pretrained, num_classes=0, **options)
        except TypeError as error:
            raise FedsieveError(f"model.options: {config.backbone} does not take them: {error}") from None
        except (OSError, RuntimeError) as error:
            if not pretrained:
                raise FedsieveError(f"model: {config.backbone} at {size} px cannot be built: {error}") from None
            raise FedsieveError(
                f"model.weights: {config.backbone} could not be fetched from the hub: {str(error).splitlines()[0][:200]}\n"
                "Offline, set model.weights to a local .safetensors or .pth file",
                1,
            ) from None
        except Exception as error:  # networks fail in their own ways
            raise FedsieveError(f"model: {config.backbone} at {size} px cannot be built: {error}") from None
        # Where timm's own head has a hidden layer, num_classes=0 still gives what comes after it.
        width: Any = getattr(backbone, "head_hidden_size", None) or backbone.num_features
        head = make_head(config, width, classes)
    for module in backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "drop_prob"):
            setattr(module, "drop_prob", 0.0)  # noqa: B010
        # timm keeps what it computes from attention biases in eval mode, which is the mode of training here. Layers that
        # keep something forget it when their mode is set.
        if type(module).train is not nn.Module.train:
            module.register_forward_pre_hook(_set_mode)
            module.register_forward_hook(_set_mode)
    return extend(Classifier(backbone, head), config, seed)


def _set_mode(module: nn.Module, *_: Any) -> None:
    module.train(module.training)


def extend(model: Classifier, config: Model, seed: int) -> Classifier:
    """The model with the configured LoRA and adapters, drawn by `seed`; what it computes stays the same."""
    if config.lora:
        with _drawn(seed, "lora"):
            add_lora(model.backbone, config.lora)
    if config.adapter:
        if (found := _block_list(model)) is None:
            raise FedsieveError("model.adapter: this backbone is not a sequence of blocks")
        with _drawn(seed, "adapter"):
            add_adapters(found[1], config.adapter.width)
    return model.requires_grad_().eval()


@contextmanager
def _drawn(seed: int, purpose: str) -> Iterator[None]:
    """timm, torch and peft initialise from torch's global state: set by the seed, and given back as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator(seed, purpose).integers(2**62)))
        yield


def timm_options(config: Model, size: int) -> dict[str, Any]:
    """What timm.create_model is given: the config's options, and the input size where the network must know it."""
    import timm

    for key, value in config.options.items():
        if key not in OPTIONS:
            raise FedsieveError(
                f"model.options: {key} is not allowed.{did_you_mean(key, OPTIONS)} Allowed: {', '.join(OPTIONS)}"
            )
        if not _is_numeric(value):
            raise FedsieveError(f"model.options.{key}: {value!r} is not allowed: give numbers, or lists of them")
    declared = timm.get_pretrained_cfg(config.backbone.partition(".")[0], allow_unregistered=True)
    fixed = {"img_size": size} if declared is not None and declared.fixed_input_size else {}
    return fixed | config.options


def _is_numeric(value: Any) -> bool:
    """Whether a value consists of numbers."""
    return all(map(_is_numeric, value)) if isinstance(value, list | tuple) else isinstance(value, int | float)


def make_head(config: Model, width: int, classes: int) -> nn.Module:
    """What turns features into logits."""
    last = nn.Linear(width if config.head == "linear" else config.hidden, classes)
    nn.init.trunc_normal_(last.weight, std=0.02)
    nn.init.zeros_(last.bias)
    if config.head == "linear":
        return last
    return nn.Sequential(nn.Linear(width, config.hidden), nn.GELU(), last)


def trainable_names(model: nn.Module, train: Part | LastBlocks | Sequence[Part | LastBlocks]) -> list[str]:
    """The names of the parameters that a stage trains, in the model's order."""
    names = [name for name, _ in model.named_parameters()]
    chosen: set[str] = set()
    for part in [train] if isinstance(train, (str, LastBlocks)) else train:
        if isinstance(part, LastBlocks):
            chosen.update(_last_blocks(model, names, part.last_blocks))
        else:
            parts = ("backbone", "head") if part == "all" else (part,)
            chosen.update(name for name in names if part_of(name) in parts)
    return [name for name in names if name in chosen]


def dense_names(model: nn.Module, train: Part | LastBlocks | Sequence[Part | LastBlocks]) -> list[str]:
    """What dense training would train in place of `train`: the backbone, where LoRA or adapters stand in for it."""
    parts = [train] if isinstance(train, (str, LastBlocks)) else train
    return trainable_names(model, ["backbone" if part in ("lora", "adapter") else part for part in parts])


def _last_blocks(model: nn.Module, names: list[str], count: int) -> list[str]:
    """The last `count` blocks, what comes after them, and the head: parameters are registered front to back."""
    if (found := _block_list(model)) is None:
        raise FedsieveError("stages.train.last_blocks: this backbone is not a sequence of blocks")
    attribute, blocks = found
    if count > len(blocks):
        raise FedsieveError(f"stages.train.last_blocks: the backbone has {len(blocks)} blocks, {count} were asked for")
    first = f"backbone.{attribute}.{len(blocks) - count}."
    start = next(index for index, name in enumerate(names) if name.startswith(first))
    return [name for name in names[start:] if part_of(name) in ("backbone", "head")]


def _block_list(model: nn.Module) -> tuple[str, nn.Sequential | nn.ModuleList] | None:
    """The repeated part of the backbone and its name, where there is one."""
    for name in BLOCK_LISTS:
        blocks = getattr(model.backbone, name, None)
        if isinstance(blocks, (nn.Sequential, nn.ModuleList)):
            return name, blocks
    return None

"""Small trainable layers inside a frozen backbone: LoRA (Hu et al. 2022) and bottleneck adapters (Houlsby et al. 2019).

Both start as zero functions, so that a network computes the same with them as without.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsieve.config import Lora
from fedsieve.errors import FedsieveError, did_you_mean, with_extra


def part_of(name: str) -> str:
    """The part of a classifier that a parameter belongs to: `lora`, `adapter`, or else `backbone` or `head`."""
    if ".lora_A." in name or ".lora_B." in name:
        return "lora"
    if ".mlp.adapter." in name:
        return "adapter"
    return name.partition(".")[0]


# --- LoRA ------------------------------------------------------------------------------------------------------------


def add_lora(backbone: nn.Module, config: Lora) -> None:
    """Replace the targeted linear layers by peft's, which hold them as `base_layer` beside `lora_A` and `lora_B`."""
    layers = [name for name, module in backbone.named_modules() if isinstance(module, nn.Linear)]
    chosen = set()
    for target in config.targets:
        found = {name for name in layers if f".{name}".endswith(f".{target}")}
        if not found:
            # Without the numbers of blocks: the words a target would be written in.
            ends = dict.fromkeys(".".join(p for p in name.split(".")[-2:] if not p.isdigit()) for name in layers)
            raise FedsieveError(
                f'model.lora.targets: no linear layer ends in "{target}".{did_you_mean(target, ends)} '
                f"This backbone has: {', '.join(ends) or 'none'}"
            )
        chosen |= found
    if find_spec("peft") is None:
        raise FedsieveError(f"model.lora needs a package that is not installed. Run {with_extra('lora')}")
    from peft import LoraConfig, inject_adapter_in_model

    alpha: Any = config.alpha  # peft divides it by the rank: it need not be whole
    inject_adapter_in_model(LoraConfig(r=config.rank, lora_alpha=alpha, target_modules=sorted(chosen)), backbone)


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add LoRA's products to the weights they stand beside, and take LoRA out: the plain network, in its own names."""
    for path, layer in list(model.named_modules()):
        if hasattr(layer, "lora_A"):
            layer.merge()
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layer.base_layer)


def peft_adapter(
    tensors: Mapping[str, Tensor], base: nn.Module, classifier: str, config: Lora
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """LoRA and the trained classifier as peft saves them: its tensors and its settings.

    `tensors` are those of the network with LoRA in timm's names. `base` is timm's network; peft changes it.
    """
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    alpha: Any = config.alpha
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        target_modules=sorted({name.partition(".lora_A.")[0] for name in tensors if ".lora_A." in name}),
        modules_to_save=[classifier],
        inference_mode=True,
    )
    wrapped: Any = get_peft_model(base, settings)
    # peft keeps the trained classifier next to the original, which is not ours to fill.
    head, trained = f"{classifier}.", f"{classifier}.modules_to_save.default."
    state = {
        trained + name.removeprefix(head) if name.startswith(head) else name: tensor for name, tensor in tensors.items()
    }
    found = wrapped.load_state_dict({f"base_model.model.{name}": one for name, one in state.items()}, strict=False)
    missing = [name for name in found.missing_keys if f".{classifier}.original_module." not in name]
    if wrong := [*found.unexpected_keys, *missing]:
        raise FedsieveError(f"export: peft's network does not take {wrong[0]}. Drop --peft to merge LoRA instead", 1)
    written = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.to_dict().items()}
    return get_peft_model_state_dict(wrapped, save_embedding_layers=False), written


def check_reached(model: nn.Module, outputs: Tensor) -> None:
    """Refuse LoRA beside layers that the network never calls: some read a layer's weight and multiply by themselves."""
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if part_of(n) == "lora"), strict=True)
    gradients = torch.autograd.grad(outputs.sum(), parameters, allow_unused=True)
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None:
            layer = name.removeprefix("backbone.").partition(".lora_")[0]
            raise FedsieveError(
                f"model.lora.targets: this backbone reads the weight of {layer} without calling the layer, so LoRA "
                "would not be noticed there. Leave it out"
            )


# --- adapters --------------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A bottleneck beside the identity: x + up(gelu(down(x)))."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(features, width)
        self.up = nn.Linear(width, features)
        nn.init.trunc_normal_(self.down.weight, std=0.02)
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.up(F.gelu(self.down(inputs)))


def add_adapters(blocks: nn.Module, width: int) -> None:
    """Put an adapter behind the MLP of every block, as `mlp.adapter`: no other name changes."""
    for block in blocks.children():
        mlp: nn.Module = getattr(block, "mlp", None) or nn.Identity()
        linear = [layer for layer in mlp.modules() if isinstance(layer, nn.Linear)]
        if not linear:
            raise FedsieveError(
                f"model.adapter goes behind an mlp of linear layers, and {type(block).__name__} has none"
            )
        mlp.adapter = Adapter(linear[-1].out_features, width)
        mlp.register_forward_hook(_through_adapter)


def _through_adapter(mlp: Any, inputs: Any, output: Tensor) -> Tensor:
    return mlp.adapter(output)

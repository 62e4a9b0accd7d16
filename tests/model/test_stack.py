"""A network is stacked only where that changes nothing: otherwise it trains one client after another."""

import copy
from contextlib import nullcontext

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from fedsieve.config import Model
from fedsieve.errors import FedsieveError
from fedsieve.model.build import build_classifier
from fedsieve.model.scheme import WAYS
from fedsieve.model.space import ParamSpace
from fedsieve.model.stack import Stack


def refusal(net: nn.Module, *shape: int, way="rules") -> str:
    """Why a network is not stacked; empty if it is."""
    net.requires_grad_(False)
    try:
        Stack(net, ParamSpace.of(net), None, 2, way=way).check(torch.zeros(2, *shape))
    except FedsieveError as error:
        return str(error)
    return ""


def flat(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 12), *layers, nn.Linear(12, 5))


def convolutional(norm: nn.Module | None = None, **options) -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1, **options), norm or nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(4), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(128, 5)).eval()


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs):
        return self.function(inputs)


class Scale(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, inputs):
        return inputs * self.scale


class Lora(nn.Linear):
    """LoRA as many write it by hand."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__(features, out)
        self.down = nn.Parameter(torch.randn(2, features) / 8)
        self.up = nn.Parameter(torch.zeros(out, 2))

    def forward(self, inputs):
        return super().forward(inputs) + inputs @ self.down.T @ self.up.T


class Leaky(nn.BatchNorm2d):
    """A BatchNorm with an activation, in a class that no rule knows."""

    def forward(self, inputs):
        return F.leaky_relu(super().forward(inputs), 0.95)


class Penalised(nn.Module):
    """Its output is that of the layer; its gradient also comes from reading the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, inputs):
        weight = self.layer.weight
        return self.layer(inputs) + (weight - weight.detach()).sum()


def with_mean_if_large(images):
    return images - 1e-4 * images.mean(0) if images.shape[-1] > 32 else images


def with_hook(layer: nn.Module) -> nn.Module:
    layer.register_full_backward_hook(lambda module, gradients, _: (2 * gradients[0],))
    return layer


def with_hook_on_the_weight(layer: nn.Linear) -> nn.Module:
    layer.weight.requires_grad_().register_hook(lambda gradient: 2 * gradient)
    return layer


def with_forward(layer: nn.Linear) -> nn.Module:
    layer.forward = lambda inputs: F.linear(inputs, 1.01 * layer.weight, layer.bias)
    return layer


# Networks that compute something else than a stack of their layers would, most of them only a little.
WRONG = {
    "activation in a BatchNorm of one's own": lambda: convolutional(Leaky(8)),
    "BatchNorm with activation that trains": lambda: convolutional(BatchNormAct2d(8)).train(),
    "circular padding": lambda: convolutional(padding_mode="circular"),
    "reflected padding": lambda: convolutional(padding_mode="reflect"),
    "batch statistics": lambda: convolutional(nn.BatchNorm2d(8, track_running_stats=False)),
    "frozen batch statistics": lambda: convolutional(nn.BatchNorm2d(8, affine=False, track_running_stats=False)),
    "BatchNorm that trains": lambda: convolutional().train(),
    "LoRA in a subclass": lambda: flat(Lora(12, 12)),
    "examples see the mean": lambda: flat(Apply(lambda inputs: inputs - 1e-4 * inputs.mean(0))),
    "examples see the first": lambda: flat(Apply(lambda inputs: inputs - 1e-4 * inputs[:1])),
    "examples see the last": lambda: flat(Apply(lambda inputs: inputs - 1e-4 * inputs[-1:])),
    "logits see the mean": lambda: flat().append(Apply(lambda logits: logits - 1e-4 * logits.detach().mean(0))),
    "images see the mean": lambda: nn.Sequential(
        Apply(lambda images: images - 1e-4 * images.mean(0)), *convolutional()
    ),
    "images see the mean if large": lambda: nn.Sequential(Apply(with_mean_if_large), *convolutional()),
    "gradient around the layer": lambda: flat(Penalised()),
    "backward hook": lambda: flat(with_hook(nn.Linear(12, 12))),
    "hook on a weight": lambda: flat(with_hook_on_the_weight(nn.Linear(12, 12))),
    "own forward pass": lambda: flat(with_forward(nn.Linear(12, 12))),
    "random numbers": lambda: flat(Apply(lambda inputs: inputs + 1e-3 * torch.randn_like(inputs))),
    "parameter without dimensions": lambda: flat(Scale()),
    "one scale of vectors": lambda: flat(Scale(1)),
    "weight_norm": lambda: flat(weight_norm(nn.Linear(12, 12))),
    "weight_norm, one channel": lambda: nn.Sequential(
        weight_norm(nn.Conv2d(3, 1, 3)), nn.Flatten(), nn.Linear(46 * 46, 5)
    ),
    "parametrized weight_norm": lambda: flat(parametrizations.weight_norm(nn.Linear(12, 12))),
    "spectral_norm": lambda: flat(spectral_norm(nn.Linear(12, 12))),
    "parametrized spectral_norm": lambda: flat(parametrizations.spectral_norm(nn.Linear(12, 12))),
    "nfnet": lambda: timm.create_model("test_nfnet", num_classes=5, skipinit=True).eval(),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_network_that_a_stack_would_get_wrong_is_refused(case):
    torch.manual_seed(0)
    net = WRONG[case]()
    shape = (12,) if isinstance(net[0] if isinstance(net, nn.Sequential) else None, nn.Linear) else (3, 48, 48)
    assert refusal(net, *shape)


class Gate(nn.Module):
    """Its parameter looks like one of tokens, and is summed: a stack of it would sum over all images."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((1, 12), 0.1))

    def forward(self, inputs):
        return inputs * self.gate.sum()


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_outside_the_support_is_checked_where_its_gradient_is_taken_too(whole):
    torch.manual_seed(0)
    net = flat(Gate()).requires_grad_(False)
    stack = Stack(net, ParamSpace.of(net), torch.arange(144), 2, whole=whole)  # the first layer's weight
    with pytest.raises(FedsieveError, match="off by") if whole else nullcontext():
        stack.check(torch.zeros(2, 12))


# Small members of families that rules alone stack: with tokens, scales, depthwise, same-padded and standardised convolutions,
# several norms, activations in norms, and gates.
RIGHT: dict[str, dict] = {
    "test_vit": {},
    "deit3_small_patch16_224": {"embed_dim": 12, "depth": 2, "num_heads": 2},
    "test_resnet": {},
    "starnet_s050": {},
    "tresnet_m": {"layers": [1, 1, 1, 1], "width_factor": 0.25},
    "test_nfnet": {},
    "test_efficientnet": {},
    "test_byobnet": {},
    "lcnet_035": {},
    "dla46x_c": {},
    "cspnext_tiny": {},
    "resnetv2_18": {},
    "mobilevit_xxs": {},
    "vovnet39a": {"stage_conv_chs": [8, 8, 8, 8], "stage_out_chs": [8, 8, 16, 16], "block_per_stage": [1, 1, 1, 1]},
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_network_of_known_layers_is_stacked(name):
    net = build_classifier(Model(backbone=name, weights="none", options=RIGHT[name]), 5, 64, 0)
    assert refusal(net, 3, 64, 64) == ""


# Small members of families with layers that have no rule: relative positions, scales inside blocks, heads with scalars.
MAPPED: dict[str, dict] = {
    "test_convnext": {},
    "swin_tiny_patch4_window7_224": {"embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2)},
    "levit_128s": {"embed_dim": (16, 24, 32), "depth": (1, 1, 1), "num_heads": (1, 1, 1), "key_dim": 8},
    "edgenext_xx_small": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32), "heads": (2, 2, 2, 2)},
    "inception_next_atto": {},
    "test_coatnet": {},
    "beit_base_patch16_224": {"embed_dim": 12, "depth": 1, "num_heads": 2},
    "hgnetv2_b0": {},
}


@pytest.mark.parametrize("name", MAPPED)
def test_a_network_whose_layers_have_no_rule_is_stacked_with_modules_mapped(name):
    net = build_classifier(Model(backbone=name, weights="none", options=MAPPED[name]), 5, 64, 0)
    assert refusal(net, 3, 64, 64)
    assert any(refusal(net, 3, 64, 64, way=way) == "" for way in ("layers", "around"))
    assert refusal(net, 3, 64, 64, way="whole") == ""


def test_a_recurrent_network_is_refused_in_every_way():
    """vmap has no rule for it."""

    class Last(nn.LSTM):
        def forward(self, inputs):
            return super().forward(inputs)[0][:, -1]

    net = nn.Sequential(nn.Unflatten(1, (3, 4)), Last(4, 6, batch_first=True), nn.Linear(6, 5))
    assert all(refusal(net, 12, way=way) for way in WAYS)


class InFloat(nn.Module):
    """Computes in float32, whatever the weights and inputs are."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs):
        return self.net(inputs.float())


def test_a_network_that_computes_in_float32_alone_is_compared_in_float32():
    assert refusal(InFloat(flat()), 12) == ""
    assert "off by" in refusal(InFloat(flat(Apply(lambda inputs: inputs - 1e-2 * inputs.mean(0)))), 12)


class Twice(nn.Module):
    """A module in two places, as in CoaT."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.block, self.scale = nn.Sequential(self.layer), Scale(12)

    def forward(self, inputs):
        return self.scale(self.block(self.layer(inputs)[:, None])).squeeze(1)


def test_a_module_in_two_places_is_stacked_and_left_as_it_was():
    net = flat(Twice())
    before = dict(net.named_parameters(remove_duplicate=False))
    assert refusal(net, 12) == ""
    Stack(net, ParamSpace.of(net), None, 2)(torch.zeros(4, 12))
    after = dict(net.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before)


def test_checking_leaves_the_model_and_the_random_numbers_as_they_were():
    net = convolutional().train()
    net.append(Apply(lambda logits: logits + torch.rand(())))
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    assert refusal(net, 3, 48, 48)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name

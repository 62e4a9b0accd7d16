"""Every rule, and every mapped module, computes for stacked clients what its layer computes for each of them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from timm import layers as timm
from timm.layers.grn import GlobalResponseNorm
from timm.layers.linear import Linear
from torch import nn
from torch.func import functional_call
from torch.profiler import profile
from torchvision.models.convnext import LayerNorm2d

from fedsieve.errors import FedsieveError
from fedsieve.model.layers import rules
from fedsieve.model.scheme import WAYS
from fedsieve.model.space import ParamSpace
from fedsieve.model.stack import Stack

CLIENTS, BATCH = 3, 2
MAPS, TOKENS = (4, 9, 7), (5, 4)  # channels, height, width; tokens, features


def act(layer: type[nn.Module], *inputs) -> nn.Module:
    return layer(*inputs, act_layer=lambda inplace: nn.LeakyReLU(0.3, inplace))


# By the types that have rules, layers with unusual settings, and the shape of an input.
CASES = {
    nn.Linear: [(nn.Linear(4, 3), TOKENS), (nn.Linear(4, 3, bias=False), (4,))],
    Linear: [(Linear(4, 3), TOKENS)],
    nn.LayerNorm: [(nn.LayerNorm(4, eps=0.3), TOKENS), (nn.LayerNorm((5, 4)), TOKENS)],
    timm.LayerNorm: [(timm.LayerNorm(4, eps=0.3), TOKENS)],
    timm.LayerNorm2d: [(timm.LayerNorm2d(4, eps=0.3), MAPS)],
    timm.LayerNormAct2d: [(act(timm.LayerNormAct2d, 4), MAPS)],
    LayerNorm2d: [(LayerNorm2d(4, eps=0.3), MAPS)],
    nn.RMSNorm: [(nn.RMSNorm(4), TOKENS), (nn.RMSNorm((5, 4), eps=0.3), TOKENS)],
    timm.RmsNorm: [(timm.RmsNorm(4, eps=0.3), TOKENS)],
    timm.RmsNorm2d: [(timm.RmsNorm2d(4, eps=0.3), MAPS)],
    nn.BatchNorm1d: [(nn.BatchNorm1d(4, eps=0.3), (4,)), (nn.BatchNorm1d(4), (4, 6))],
    nn.BatchNorm2d: [(nn.BatchNorm2d(4, eps=0.3), MAPS)],
    nn.BatchNorm3d: [(nn.BatchNorm3d(4), (4, 3, 2, 5))],
    timm.BatchNormAct2d: [(act(timm.BatchNormAct2d, 4, 0.3), MAPS), (timm.BatchNormAct2d(4, apply_act=False), MAPS)],
    nn.GroupNorm: [(nn.GroupNorm(2, 4, eps=0.3), MAPS), (nn.GroupNorm(4, 4), (4, 6))],
    timm.GroupNorm: [(timm.GroupNorm(4, 2), MAPS)],
    timm.GroupNorm1: [(timm.GroupNorm1(4), MAPS)],
    timm.GroupNormAct: [(act(timm.GroupNormAct, 4, 2), MAPS)],
    timm.GroupNorm1Act: [(act(timm.GroupNorm1Act, 4), MAPS)],
    timm.LayerScale2d: [(timm.LayerScale2d(4, 0.3), MAPS)],
    nn.Embedding: [(nn.Embedding(7, 4), (5,)), (nn.Embedding(7, 4, padding_idx=2), (5,))],
    nn.Conv1d: [(nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 9))],
    nn.Conv2d: [
        (nn.Conv2d(4, 6, 3, stride=2, padding=(2, 1), dilation=2, groups=2), MAPS),
        (nn.Conv2d(4, 6, 3, padding="same", bias=False), MAPS),
        (nn.Conv2d(4, 6, (3, 2), (3, 2)), MAPS),  # patches, one column too many
    ],
    nn.Conv3d: [(nn.Conv3d(4, 6, (1, 2, 3), padding=(0, 1, 0)), (4, 3, 2, 5))],
    timm.Conv2dSame: [(timm.Conv2dSame(4, 6, 3, stride=2), MAPS), (timm.Conv2dSame(4, 6, 2, stride=2), MAPS)],
    timm.StdConv2d: [(timm.StdConv2d(4, 6, 3, stride=2, bias=True, eps=0.3), MAPS)],
    timm.StdConv2dSame: [(timm.StdConv2dSame(4, 6, 3, stride=2), MAPS)],
    timm.ScaledStdConv2d: [(timm.ScaledStdConv2d(4, 6, 3, groups=2, gamma=1.7, eps=0.3), MAPS)],
    timm.ScaledStdConv2dSame: [(timm.ScaledStdConv2dSame(4, 6, 3, stride=2, gamma=1.7), MAPS)],
}


def compare(layer: nn.Module, *shape: int, way="rules", inputs=None) -> None:
    """Outputs and gradients of stacked clients, by weights and by inputs, are those of the layer by itself."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(copy.deepcopy(layer)).eval().double().requires_grad_(False)
    for name, buffer in net.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
        assert "running" in name or "tracked" in name or not buffer.is_floating_point()
    space = ParamSpace.of(net)
    values = 0.5 + torch.rand(CLIENTS, space.size, generator=generator).double()
    stack = Stack(net, space, None, CLIENTS, way=way)
    stack.load(values)
    if isinstance(layer, nn.Embedding):
        inputs = torch.randint(layer.num_embeddings, (CLIENTS * BATCH, *shape), generator=generator)
    if inputs is None:
        inputs = torch.randn(CLIENTS * BATCH, *shape, generator=generator).double().requires_grad_()
    together = stack(inputs)
    directions = torch.randn(together.shape, generator=generator).double()
    found = stack.gather(stack.gradients((together * directions).sum()), values)
    for client in range(CLIENTS):
        mine = slice(client * BATCH, (client + 1) * BATCH)
        weights = {name: value.clone().requires_grad_() for name, value in space.unflatten(values[client]).items()}
        alone = functional_call(net, weights, (inputs[mine],))
        slopes = torch.autograd.grad((alone * directions[mine]).sum(), list(weights.values()))
        torch.testing.assert_close(together[mine], alone, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(
            found[client], torch.cat([slope.flatten() for slope in slopes]), rtol=1e-9, atol=1e-10
        )
    if inputs.requires_grad:
        (by_inputs,) = torch.autograd.grad((stack(inputs) * directions).sum(), inputs)
        weights = [space.unflatten(row) for row in values]
        parts = zip(weights, inputs.chunk(CLIENTS), directions.chunk(CLIENTS), strict=True)
        total = sum((functional_call(net, own, (batch,)) * direction).sum() for own, batch, direction in parts)
        torch.testing.assert_close(by_inputs, torch.autograd.grad(total, inputs)[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("kind", "number"), [(kind, number) for kind in CASES for number in range(len(CASES[kind]))])
def test_a_rule_computes_what_its_layer_computes(kind, number):
    layer, shape = CASES[kind][number]
    assert type(layer) is kind
    compare(layer, *shape)


def test_every_rule_is_tested():
    assert CASES.keys() == rules().keys()


@pytest.mark.parametrize("kind", CASES)
def test_a_subclass_has_no_rule(kind):
    """It may compute something else; what looks like a bare scale is no exception."""
    layer = copy.deepcopy(CASES[kind][0][0])
    layer.__class__ = type("Own", (kind,), {"forward": lambda self, inputs: 1.01 * kind.forward(self, inputs)})
    net, shape = nn.Sequential(layer), CASES[kind][0][1]
    with pytest.raises(FedsieveError, match="Own"):
        Stack(net.eval().requires_grad_(False), ParamSpace.of(net), None, 2).check(torch.zeros(2, *shape))


def with_attributes(layer: nn.Module, **attributes) -> nn.Module:
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


# Layers of types with rules, but with settings under which the rules would be wrong.
CHANGED = {
    "circular padding": nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"),
    "reflected padding": timm.StdConv2d(4, 6, 3),
    "fast LayerNorm": with_attributes(timm.LayerNorm2d(4), _fast_norm=True),
    "fast RmsNorm": with_attributes(timm.RmsNorm(4), _fast_norm=True),
    "fast GroupNorm": with_attributes(timm.GroupNormAct(4, 2), _fast_norm=True),
    "batch statistics": timm.BatchNormAct2d(4, track_running_stats=False),
    "batch statistics in 1-D": nn.BatchNorm1d(4, track_running_stats=False),
    "a parameter more": with_attributes(nn.GroupNorm(2, 4), gate=nn.Parameter(torch.ones(4))),
    "no gain": with_attributes(timm.ScaledStdConv2d(4, 6, 3), gain=None),
    "own forward pass": with_attributes(nn.RMSNorm(4), forward=lambda inputs: inputs),
}
CHANGED["reflected padding"].padding_mode = "reflect"


@pytest.mark.parametrize("case", CHANGED)
def test_a_setting_that_a_rule_does_not_know_is_refused(case):
    net = nn.Sequential(CHANGED[case]).eval().requires_grad_(False)
    with pytest.raises(FedsieveError):
        Stack(net, ParamSpace.of(net), None, 2)


class Table(nn.Module):
    """Attention with relative positions, scalars per head, and a bias for queries alone."""

    def __init__(self, mask: str = "heads") -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.query_bias = nn.Parameter(torch.ones(4))
        self.table = nn.Parameter(torch.ones(2, 5, 5))
        self.temperature = nn.Parameter(torch.ones(2, 1, 1))
        self.mask = mask

    def forward(self, tokens):
        query, key, value = self.qkv(tokens).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        query = (query + self.query_bias.view(2, 1, 2)) * self.temperature
        masks = {"heads": self.table, "shared": self.table[0].detach(), "rows": self.table[0], "none": None}
        masks["images"] = tokens @ tokens.mT[:, :, :] * self.table[:1].mean()
        masks["images"] = masks["images"][:, None]
        masks["constant"] = torch.arange(50.0).view(2, 1, 5, 5).double()
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=masks[self.mask], scale=0.7)
        return mixed.transpose(1, 2).flatten(2) + 0 * self.table.sum() + self.table.mean()


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.other.weight = self.one.weight

    def forward(self, inputs):
        return self.other(torch.tanh(self.one(inputs)))


class Pair(nn.Module):
    """A module that gives a tuple with None in it, called with what all clients share."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4, 1))

        def forward(self, inputs, shared, factor=1.0, other=None):
            return inputs * self.gain.squeeze(1) * factor + shared, None, other * self.gain.sum()

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair.Inner()

    def forward(self, inputs):
        first, nothing, second = self.inner(inputs, torch.arange(4.0).double(), factor=0.5, other=inputs**2)
        assert nothing is None
        return first * second


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, numbers):
        return self.head(self.embedding((10 * numbers).long().abs() % 7)) * numbers[..., None]


class Self(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.options = options

    def forward(self, tokens):
        return self.attention(tokens, tokens, tokens, **self.options)[0]


OTHERS = {
    **{
        f"attention, mask {mask}": (Table(mask), TOKENS)
        for mask in ("heads", "rows", "shared", "images", "constant", "none")
    },
    "tuple": (Pair(), TOKENS),
    "embedding": (Words(), (5,)),
    "MultiheadAttention": (Self(), TOKENS),
    "MultiheadAttention without weights": (Self(need_weights=False), TOKENS),
    "PReLU": (nn.PReLU(4), MAPS),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 3, 2, stride=2), MAPS),
    "GRN": (GlobalResponseNorm(4, channels_last=False), MAPS),
    "circular padding": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), MAPS),
}


@pytest.mark.parametrize("way", ["layers", "around", "whole"])
@pytest.mark.parametrize("case", OTHERS)
def test_a_mapped_module_computes_what_it_computes_alone(case, way):
    layer, shape = OTHERS[case]
    compare(layer, *shape, way=way)


@pytest.mark.parametrize("way", WAYS)
def test_tied_weights_are_one_weight_in_every_way(way):
    compare(Tied(), *TOKENS, way=way)


def test_mapped_modules_are_left_as_they_were():
    net = nn.Sequential(Table(), Tied()).double().requires_grad_(False)
    own = net[0].forward = net[0].forward
    before = dict(net.named_parameters(remove_duplicate=False))
    Stack(net, ParamSpace.of(net), None, 2, way="layers")(torch.zeros(4, *TOKENS).double())
    after = dict(net.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before) and before.keys() == after.keys()
    assert vars(net[0])["forward"] is own and "forward" not in vars(net[1].one)


def test_fused_attention_of_mapped_modules_stays_fused():
    """vmap would take clients one by one, with a warning."""
    net = nn.Sequential(Table("none")).double().requires_grad_(False)
    stack = Stack(net, ParamSpace.of(net), None, 3, way="layers")
    with profile() as taken:
        stack(torch.zeros(6, *TOKENS).double())
    seen = [event for event in taken.events() if event.name == "aten::scaled_dot_product_attention"]
    assert len(seen) == 1

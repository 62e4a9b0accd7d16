"""timm keeps what it computed from attention biases in eval mode, the mode of training here. No pass may use it again."""

import copy

import pytest
import timm
import torch
from torch import nn

from fedsieve.config import Model
from fedsieve.model.build import Classifier, build_classifier

# A small network of each family that keeps something.
KEEPING = {
    "levit_128s": {"embed_dim": (16, 24, 32), "depth": (1, 1, 1), "num_heads": (1, 1, 1), "key_dim": 8},
    "tiny_vit_5m_224": {"embed_dims": (8, 16, 16, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)},
    "efficientvit_m0": {"embed_dim": (16, 32, 48), "depth": (1, 1, 1), "num_heads": (2, 2, 2), "key_dim": (8, 8, 8)},
    "efficientformer_l1": {"depths": (1, 1, 1, 2), "embed_dims": (8, 16, 24, 32), "num_vit": 1},
    "efficientformerv2_s0": {"depths": (1, 1, 1, 2), "embed_dims": (8, 16, 24, 32), "num_vit": 1},
}
SIZE = 224  # the only one that efficientformer takes


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """A network, and timm's own in which attention is in training mode: there timm keeps nothing."""
    model = build_classifier(Model(backbone=name, weights="none", options=KEEPING[name]), 5, SIZE, 0).double()
    plain = Classifier(timm.create_model(name, num_classes=0, **KEEPING[name]), copy.deepcopy(model.head))
    plain = plain.double().eval()
    for module in plain.modules():
        if hasattr(module, "attention_biases"):
            module.training = True
    return model, plain


@torch.no_grad()
def move(model: nn.Module, plain: nn.Module, seed: int) -> None:
    """Give both new weights."""
    generator = torch.Generator().manual_seed(seed)
    for weights in model.parameters():
        weights += 0.02 * torch.randn(weights.shape, generator=generator)
    plain.load_state_dict(model.state_dict())


def images(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("name", KEEPING)
def test_every_parameter_gets_the_gradient_of_the_weights_as_they_are(name):
    model, plain = pair(name)
    for step in range(2):
        move(model, plain, step)
        with torch.no_grad():
            model(images(step))  # evaluation between steps
        found, expected = (
            torch.autograd.grad(one(images(step)).square().sum(), list(one.parameters())) for one in (model, plain)
        )
        for (parameter, _), mine, right in zip(model.named_parameters(), found, expected, strict=True):
            assert torch.equal(mine, right), parameter
            assert "attention_biases" not in parameter or mine.any(), parameter


@pytest.mark.parametrize("name", KEEPING)
@torch.no_grad()
def test_evaluation_uses_the_weights_as_they_are(name):
    model, plain = pair(name)
    for seed in range(2):
        move(model, plain, seed)
        assert torch.equal(model(images(0)), plain(images(0)))


@pytest.mark.parametrize("name", KEEPING)
def test_a_network_that_has_been_run_can_be_copied(name):
    model, _ = pair(name)
    outputs = model(images(0))
    assert torch.equal(copy.deepcopy(model)(images(0)), outputs)


@pytest.mark.parametrize("name", KEEPING)
@torch.no_grad()
def test_a_pass_that_was_cut_short_leaves_nothing_behind(name):
    """As one that runs out of memory: what it has kept by then is not used by the next."""
    model, plain = pair(name)

    def fail(*_):
        raise MemoryError

    cuts = [
        module.proj.register_forward_pre_hook(fail) for module in model.modules() if hasattr(module, "attention_biases")
    ]
    with pytest.raises(MemoryError):
        model(images(0))
    for cut in cuts:
        cut.remove()
    move(model, plain, 0)
    assert torch.equal(model(images(0)), plain(images(0)))

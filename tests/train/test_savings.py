import contextlib

import pytest
import torch
import torch.nn.functional as F

from fedsieve.config import Model
from fedsieve.mask.mask import Mask
from fedsieve.model.build import build_classifier
from fedsieve.model.space import ParamSpace
from fedsieve.train.savings import spare_frozen


def network():
    options = {"patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
    return build_classifier(Model(backbone="vit_tiny_patch16_224", weights="none", options=options), 5, 8, 0)


def row_mask(space: ParamSpace, share: float) -> Mask:
    """Random whole rows of matrices, random entries of vectors."""
    generator = torch.Generator().manual_seed(0)
    active = torch.zeros(space.size, dtype=torch.bool)
    for view in space.unflatten(active).values():
        view[torch.rand(view.shape[0], generator=generator) < share] = True
    return Mask.from_bool(space, active)


def gradient(model, space, theta, autocast=contextlib.nullcontext):
    images, labels = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 5
    theta.grad.zero_()
    with autocast():
        logits = model(images)
    F.cross_entropy(logits.float(), labels).backward()
    return theta.grad.clone()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_gradients_of_active_weights_stay_the_same(share):
    model = network()
    space = ParamSpace.of(model)
    theta = space.bind(model)
    dense = gradient(model, space, theta)
    mask = row_mask(space, share)
    undo = spare_frozen(model, mask)
    spared = gradient(model, space, theta)
    active = mask.to_bool()
    assert torch.allclose(spared[active], dense[active], atol=1e-7)
    if share < 0.2:
        matrix = space.view(spared, "backbone.blocks.1.mlp.fc1.weight")
        rows = mask.tensor("backbone.blocks.1.mlp.fc1.weight").any(1)
        assert (matrix[~rows] == 0).all() and (matrix[rows] != 0).any()
    undo()
    assert torch.equal(gradient(model, space, theta), dense)


def test_autocast_reaches_the_rows():
    model = network()
    space = ParamSpace.of(model)
    theta = space.bind(model)
    bf16 = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    dense = gradient(model, space, theta, bf16)
    mask = row_mask(space, 0.1)
    spare_frozen(model, mask)
    spared = gradient(model, space, theta, bf16)
    active = mask.to_bool()
    assert (spared[active] - dense[active]).norm() < 0.02 * dense[active].norm()


def test_a_frozen_prefix_is_never_walked_back_through():
    model = network()
    space = ParamSpace.of(model)
    theta = space.bind(model)
    active = torch.zeros(space.size, dtype=torch.bool)
    for name, view in space.unflatten(active).items():
        view.fill_(name.startswith(("backbone.blocks.2", "backbone.norm", "head")))
    spare_frozen(model, Mask.from_bool(space, active))
    seen = []
    for number, block in enumerate(model.backbone.blocks):
        block.register_full_backward_hook(lambda *_, number=number: seen.append(number))
    found = gradient(model, space, theta)
    assert seen == [2]
    assert (found[~active] == 0).all() and (found[active] != 0).any()
    assert not model.backbone.patch_embed.proj.weight.requires_grad

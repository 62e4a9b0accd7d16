import copy
import importlib.util

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from fedsieve.config import LastBlocks, Model
from fedsieve.errors import FedsieveError
from fedsieve.mask.calibration import maskable
from fedsieve.mask.scores import fisher
from fedsieve.mask.selection import attention_heads, group_ids
from fedsieve.model.adapters import check_reached, merge_lora, part_of
from fedsieve.model.build import build_classifier, trainable_names
from fedsieve.model.space import ParamSpace
from fedsieve.model.weights import digest, load_classifier, timm_tensors

OPTIONS = {"embed_dim": 24, "depth": 3, "num_heads": 2}
LORA = {"rank": 4, "alpha": 10}
BOTH = {"lora": LORA, "adapter": {"width": 6}}


def config(**fields) -> Model:
    return Model.model_validate({"backbone": "vit_tiny_patch16_224", "weights": "none", "options": OPTIONS} | fields)


def build(**fields):
    return build_classifier(config(**fields), 5, 32, 0)


def moved(model: nn.Module) -> nn.Module:
    """The model after something happened to each of its weights."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture
def images():
    torch.manual_seed(2)
    return torch.randn(3, 3, 32, 32)


@pytest.mark.parametrize("extras", [{"lora": LORA}, {"adapter": {"width": 6}}, BOTH])
def test_what_is_added_changes_nothing_at_first(extras, images):
    plain, model = build(), build(**extras)
    assert torch.equal(model(images), plain(images))
    own = {name.replace(".base_layer.", "."): p for name, p in model.named_parameters() if part_of(name) not in extras}
    assert own.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(own[name], parameter) for name, parameter in plain.named_parameters())


def test_everything_added_has_a_say(images):
    model = moved(build(**BOTH))
    before = model(images)
    for part in ("lora", "adapter"):
        for name in trainable_names(model, part):
            changed = copy.deepcopy(model)
            changed.get_parameter(name).data.mul_(2)
            assert not torch.equal(changed(images), before), name


def test_the_seed_alone_decides_what_is_added():
    torch.manual_seed(1)
    one, before = digest(build(**BOTH)), torch.random.get_rng_state()
    assert one == digest(build(**BOTH)) != digest(build_classifier(config(**BOTH), 5, 32, seed=1))
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_parts_are_disjoint_and_lists_are_their_unions():
    model = build(**BOTH)
    every = ParamSpace.of(model).names
    parts = {part: trainable_names(model, part) for part in ("backbone", "head", "lora", "adapter")}
    assert sorted(every) == sorted(name for names in parts.values() for name in names)
    assert trainable_names(model, "all") == parts["backbone"] + parts["head"]
    assert trainable_names(model, ["head", "lora"]) == parts["lora"] + parts["head"]
    assert trainable_names(model, ["lora", "all", "adapter"]) == list(every)
    assert ParamSpace.of(model, parts["lora"]).size == 3 * (4 * (24 + 72) + 4 * (24 + 24))
    assert ParamSpace.of(model, parts["adapter"]).size == 3 * (24 * 6 + 6 + 6 * 24 + 24)
    last = trainable_names(model, LastBlocks(last_blocks=1))
    assert {part_of(name) for name in last} == {"backbone", "head"}
    assert len(last) == len(trainable_names(build(), LastBlocks(last_blocks=1)))
    assert trainable_names(model, [LastBlocks(last_blocks=1), "lora"]) == [
        name for name in every if name in {*last, *parts["lora"]}
    ]


def test_merging_gives_the_plain_network_of_the_same_function(images):
    model = moved(build(lora=LORA | {"targets": ["qkv", "fc2"]}))
    before = model(images)
    beside = model.backbone.blocks[0].mlp.fc2
    expected = beside.base_layer.weight + 10 / 4 * beside.lora_B.default.weight @ beside.lora_A.default.weight
    merge_lora(model)
    assert torch.allclose(model(images), before, atol=1e-5)
    assert torch.allclose(model.backbone.blocks[0].mlp.fc2.weight, expected)
    assert model.state_dict().keys() == build().state_dict().keys()
    whole = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=32, **OPTIONS).eval()
    whole.load_state_dict(timm_tensors(model, with_head=True))
    assert torch.equal(whole(images), model(images))


def test_adapters_have_no_place_in_timm():
    with pytest.raises(FedsieveError, match="no place for adapters.*--sparse"):
        timm_tensors(build(adapter={}), with_head=False)


def test_pretrained_weights_are_laid_under_what_is_added(images, tmp_path):
    file = str(tmp_path / "w.safetensors")
    safetensors.torch.save_file(moved(build()).backbone.state_dict(), file)
    plain, model = (load_classifier(config(weights=file, **extras), 5, 32, 0) for extras in ({}, BOTH))
    assert torch.equal(model(images), plain(images))
    assert model.state_dict().keys() == build(**BOTH).state_dict().keys()


@pytest.mark.parametrize(("part", "said"), [("lora", "--backbone-only"), ("adapter", "cannot be merged")])
def test_weights_of_a_run_that_had_them_are_refused(part, said, tmp_path):
    file = str(tmp_path / "final.safetensors")
    safetensors.torch.save_file(build(**{part: {}}).state_dict(), file)
    with pytest.raises(FedsieveError, match=f"holds {part} parameters.*{said}"):
        load_classifier(config(weights=file), 5, 32, 0)


def test_a_target_that_is_no_layer_gets_a_suggestion():
    with pytest.raises(FedsieveError, match='ends in "attn.qvk".*Did you mean "attn.qkv".*mlp.fc1'):
        build(lora={"targets": ["attn.proj", "attn.qvk"]})
    with pytest.raises(FedsieveError, match='ends in "kv"'):
        build(lora={"targets": ["kv"]})
    assert any("fc1.lora_A" in name for name in trainable_names(build(lora={"targets": ["blocks.1.mlp.fc1"]}), "lora"))


def test_a_layer_that_is_never_called_is_refused():
    """BEiT multiplies by qkv.weight itself."""
    with torch.device("meta"):
        model = build_classifier(config(backbone="beit_base_patch16_224", options={"depth": 1}, lora={}), 5, 224, 0)
        with pytest.raises(FedsieveError, match="blocks.0.attn.qkv without calling"):
            check_reached(model, model(torch.empty(1, 3, 224, 224)))
        good = build(lora={})
        check_reached(good, good(torch.empty(1, 3, 32, 32)))


@pytest.mark.parametrize(
    ("backbone", "said"), [("resnet18", "not a sequence of blocks"), ("mixer_s32_224", "MixerBlock has none")]
)
def test_a_backbone_without_mlps_takes_no_adapters(backbone, said):
    with torch.device("meta"), pytest.raises(FedsieveError, match=said):
        build_classifier(config(backbone=backbone, options={}, adapter={}), 5, 224, 0)


def test_without_peft_the_way_to_get_it_is_told(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("fedsieve.model.adapters.find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(FedsieveError, match=r"--extra lora .*fedsieve\[lora\]"):
        build(lora={})
    build(adapter={})


def test_they_take_part_in_masks_as_linear_layers():
    model = build(**BOTH)
    space = ParamSpace.of(model, trainable_names(model, ["lora", "adapter"]))
    for kinds, part in ((["attention"], "lora"), (["linear"], "adapter")):
        taking = maskable(space, model, kinds)
        assert int(taking.sum()) == ParamSpace.of(model, trainable_names(model, part)).size
    assert maskable(space, model).all()


def test_attention_heads_are_found_beside_lora():
    plain, model = build(), build(lora=LORA)
    groups = [
        group_ids(ParamSpace.of(m, trainable_names(m, "backbone")), "attention_head", attention_heads(m))
        for m in (plain, model)
    ]
    assert (groups[0] == groups[1]).all()


def test_scores_are_zero_beside_what_is_still_zero(images):
    model = build(**BOTH)
    space = ParamSpace.of(model, trainable_names(model, ["lora", "adapter"]))
    labels = torch.tensor([0, 1, 2])
    with torch.no_grad():
        model.head.weight.normal_()
    scores = space.unflatten(fisher(model, space, [(images, labels)], None))
    for name, score in scores.items():
        first = "lora_A" in name or "adapter.down" in name
        assert score.any() != first, name
    scores = space.unflatten(fisher(moved(model), space, [(images, labels)], None))
    assert all(score.any() for score in scores.values())
    # Per sample by vmap, and one sample at a time by autograd.
    total = torch.zeros(space.size)
    for image, label in zip(images, labels, strict=True):
        loss = -nn.functional.cross_entropy(model(image[None]), label[None])
        gradients = torch.autograd.grad(loss, [model.get_parameter(name) for name in space.names])
        total += torch.cat([gradient.flatten() for gradient in gradients]).square() / 3
    assert torch.allclose(space.flatten(scores), total, rtol=1e-3, atol=1e-9)


def test_linear_layers_are_called_as_modules(images):
    """An executor that stands in for the layers' forward must see all of them."""
    model, called = build(**BOTH), set()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, module in layers.items():
        module.register_forward_hook(lambda *_, name=name: called.add(name))
    model(images)
    assert called == layers.keys()

import pytest
import safetensors.torch
import timm
import torch

from fedsieve.config import LastBlocks, Model
from fedsieve.errors import FedsieveError
from fedsieve.model.build import build_classifier, check_backbone, trainable_names
from fedsieve.model.space import ParamSpace
from fedsieve.model.weights import digest, load_classifier, timm_tensors

OPTIONS = {"embed_dim": 24, "depth": 3, "num_heads": 2}


def config(**fields) -> Model:
    return Model(**({"backbone": "vit_tiny_patch16_224", "weights": "none", "options": OPTIONS} | fields))


@pytest.fixture
def original():
    """A ViT as a release would publish it: 224 px, 14 x 14 patches."""
    torch.manual_seed(5)
    return timm.create_model("vit_tiny_patch16_224", num_classes=7, **OPTIONS).eval()


def save(path, content):
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(content, path)
    else:
        torch.save(content, path)
    return str(path)


def releases(state):
    """The same weights in every format that is read."""
    bare = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    dino = {f"module.backbone.{name}": tensor for name, tensor in bare.items()}
    dino |= {"module.head.mlp.0.weight": torch.zeros(3, 3), "module.head.last_layer.weight_g": torch.zeros(9, 1)}
    return {
        "timm.safetensors": state,
        "timm.pth": state,
        "dino_pretrain.pth": bare,  # the release's backbone-only file
        "dino_full.pth": {"student": {"x": torch.zeros(1)}, "teacher": dino, "epoch": 800},
        "wrapped.pth": {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}},
        "fedsieve.safetensors": {f"backbone.{name}": tensor for name, tensor in bare.items()}
        | {"head.weight": torch.zeros(7, 24)},
    }


@pytest.mark.parametrize("name", releases({}).keys())
def test_every_release_format_gives_the_same_features(name, original, tmp_path):
    file = save(tmp_path / name, releases(original.state_dict())[name])
    model = load_classifier(config(weights=file), classes=5, size=224, seed=0)
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        expected = original.forward_head(original.forward_features(images), pre_logits=True)
        assert torch.allclose(model.backbone(images), expected, atol=1e-6)
        assert model(images).shape == (2, 5)


def test_position_embeddings_are_interpolated_to_the_input_size(original, tmp_path):
    from timm.layers import resample_abs_pos_embed

    file = save(tmp_path / "w.safetensors", original.state_dict())
    model = load_classifier(config(weights=file), classes=5, size=64, seed=0)
    expected = resample_abs_pos_embed(original.pos_embed, [4, 4], num_prefix_tokens=1)
    assert torch.allclose(model.backbone.pos_embed, expected, atol=1e-6)
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 5)


def test_weights_that_do_not_fit_are_refused_with_an_example(original, tmp_path):
    state = original.state_dict()
    missing = {name: tensor for name, tensor in state.items() if "blocks.2" not in name}
    for content, said in (
        (missing, "12 tensors are missing, such as blocks.2"),
        (state | {"extra.weight": torch.zeros(2)}, "1 do not belong, such as extra.weight"),
        (state | {"norm.weight": torch.zeros(25)}, "1 have another shape, such as norm.weight"),
    ):
        with pytest.raises(FedsieveError, match=said):
            load_classifier(config(weights=save(tmp_path / "w.pth", content)), 5, 224, 0)


def test_damaged_foreign_and_missing_files_are_refused(tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    (tmp_path / "text.pth").write_text("hello")
    for name, said in (
        ("cut.safetensors", "cannot be read"),
        ("text.pth", "cannot be read"),
        ("no.pth", "no such file"),
    ):
        with pytest.raises(FedsieveError, match=said):
            load_classifier(config(weights=str(tmp_path / name)), 5, 224, 0)
    with pytest.raises(FedsieveError, match="holds no named tensors"):
        load_classifier(config(weights=save(tmp_path / "list.pth", [1, 2])), 5, 224, 0)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"state_dict": Bomb()}, tmp_path / "bomb.pth")
    with pytest.raises(FedsieveError, match="cannot be read"):
        load_classifier(config(weights=str(tmp_path / "bomb.pth")), 5, 224, 0)
    assert not (tmp_path / "ran").exists()


def test_the_seed_alone_decides_the_initial_weights():
    torch.manual_seed(1)
    one = digest(build_classifier(config(), 5, 32, seed=4))
    before = torch.random.get_rng_state()
    two = digest(build_classifier(config(), 5, 32, seed=4))
    assert one == two != digest(build_classifier(config(), 5, 32, seed=5))
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_unknown_backbone_gets_a_suggestion():
    with pytest.raises(FedsieveError, match='Did you mean "vit_small_patch16_224"'):
        check_backbone(config(backbone="vit_smal_patch16_224"))
    with pytest.raises(FedsieveError, match='no weights "dinoo".*Did you mean "vit_small_patch16_224.dino"'):
        check_backbone(config(backbone="vit_small_patch16_224.dinoo"))
    check_backbone(config(backbone="vit_small_patch16_224.dino", weights="hub"))


def test_impossible_options_are_refused():
    with pytest.raises(FedsieveError, match="model.options"):
        build_classifier(config(options={"embed_dimm": 3}), 5, 32, 0)
    with pytest.raises(FedsieveError, match="cannot be built"):
        build_classifier(config(options=OPTIONS | {"num_heads": 5}), 5, 32, 0)


@pytest.mark.parametrize("backbone", ["resnet18", "convnext_atto", "mobilenetv3_small_050", "mixer_s32_224"])
def test_other_families_work_and_export_to_timm(backbone):
    model = build_classifier(config(backbone=backbone, options={}), 4, 224, 0)
    whole = timm.create_model(backbone, num_classes=4).eval()
    whole.load_state_dict(timm_tensors(model, with_head=True))
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(whole(images), model(images))


def test_no_drop_rate_and_no_batch_statistics_survive():
    model = build_classifier(config(options=OPTIONS | {"drop_rate": 0.5, "drop_path_rate": 0.5}), 4, 32, 0)
    assert not model.training
    images = torch.randn(2, 3, 32, 32)
    model.train()
    assert torch.equal(model(images), model(images))


def test_each_part_trains_what_it_says():
    model = build_classifier(config(head="mlp", hidden=6), 4, 32, 0)
    names = {part: set(trainable_names(model, part)) for part in ("head", "backbone", "all")}
    assert names["head"] == {"head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"}
    assert names["head"] | names["backbone"] == names["all"] == set(ParamSpace.of(model).names)
    assert not names["head"] & names["backbone"]
    last = set(trainable_names(model, LastBlocks(last_blocks=1)))
    assert last == {n for n in names["all"] if n.startswith(("backbone.blocks.2.", "backbone.norm.", "head."))}
    with pytest.raises(FedsieveError, match="has 3 blocks, 4 were asked for"):
        trainable_names(model, LastBlocks(last_blocks=4))


def test_a_distilled_model_refuses_an_export_it_has_no_place_for():
    model = build_classifier(config(head="mlp"), 4, 32, 0)
    with pytest.raises(FedsieveError, match="--backbone-only"):
        timm_tensors(model, with_head=True)
    assert "patch_embed.proj.weight" in timm_tensors(model, with_head=False)

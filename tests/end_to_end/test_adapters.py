"""LoRA and adapters as a user trains them: stages, summaries, exports, errors."""

import json

import pytest
import safetensors.torch
import timm
import torch
from tests.conftest import TINY
from tests.end_to_end.test_command_line import fedsieve

from fedsieve.config import parse_config, to_yaml
from fedsieve.errors import FedsieveError
from fedsieve.runner.model_files import load_model, load_patch
from fedsieve.runner.run import resume, run

LORA = ["model.lora={rank: 2}", "stages.backbone.train=[lora, head]", "stages.backbone.name=lora"]
ADAPTER = ["model.adapter={width: 3}", "stages.backbone.train=adapter", "stages.backbone.name=adapter"]
HEAD = 16 * 10 + 10


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One finished run of each kind."""
    base = tmp_path_factory.mktemp("runs")
    for name, overrides in (("lora", LORA), ("adapter", ADAPTER)):
        run(parse_config(TINY, overrides), base / name)
    return base


def test_only_what_a_stage_names_trains_and_moves(runs, tiny):
    from fedsieve.runner.prepare import prepare
    from fedsieve.runner.progress import Display

    trained = {"lora": 2 * 2 * (16 + 48 + 16 + 16) + HEAD, "adapter": 2 * (2 * 16 * 3 + 3 + 16)}
    for name, overrides in (("lora", LORA), ("adapter", ADAPTER)):
        stages = json.loads((runs / name / "summary.json").read_text())["stages"]
        assert stages["head"]["trained"] == HEAD and stages[name]["trained"] == trained[name]
        before = prepare(tiny(*overrides), Display.silent()).model.state_dict()
        after = load_model(runs / name)[1].state_dict()
        moved = {key for key in before if not torch.equal(before[key], after[key])}
        assert moved == {key for key in before if name in key or key.startswith("head.")}
        assert (runs / name / "report.html").exists()


def test_lora_is_merged_into_the_exported_weights(runs, tmp_path):
    file = tmp_path / "model.safetensors"
    assert fedsieve("export", runs / "lora", "--to", file) == 0
    merged = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(4, 3, 8, 8)
    assert torch.allclose(merged(images), load_model(runs / "lora")[1](images), atol=1e-5)
    assert not any("lora" in name or "base_layer" in name for name in safetensors.torch.load_file(file))


def test_a_merged_backbone_serves_as_pretrained_weights_and_an_unmerged_one_is_refused(runs, tiny, tmp_path):
    file = tmp_path / "b.safetensors"
    assert fedsieve("export", runs / "lora", "--to", file, "--backbone-only") == 0
    short = ["stages.head.epochs=1", "stages.lora.epochs=1"]
    run(tiny(*LORA, f"model.weights={file}", *short), tmp_path / "next")
    with pytest.raises(FedsieveError, match="--backbone-only"):
        run(tiny(f"model.weights={runs / 'lora'}"), tmp_path / "refused")


def test_adapters_are_exported_as_a_patch_alone(runs, tmp_path, capsys):
    assert fedsieve("export", runs / "adapter", "--to", tmp_path / "x.safetensors") == 2
    assert "no place for adapters" in capsys.readouterr().err
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("name", ["lora", "adapter"])
def test_a_patch_gives_the_model_back_to_the_bit(runs, name, tmp_path):
    patch = tmp_path / "patch.safetensors"
    assert fedsieve("export", runs / name, "--sparse", "--to", patch) == 0
    expected = load_model(runs / name)[1].state_dict()
    found = load_patch(patch)[1].state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    assert fedsieve("export", patch, "--to", tmp_path / "full.safetensors") == (0 if name == "lora" else 2)


def test_evaluate_repeats_the_test_accuracy(runs, capsys):
    for name in ("lora", "adapter"):
        accuracy = json.loads((runs / name / "summary.json").read_text())["test_accuracy"]
        assert fedsieve("evaluate", runs / name) == 0
        assert f"{100 * accuracy:.2f} %" in capsys.readouterr().out


def test_a_masked_stage_of_both_resumes(tiny, tmp_path):
    overrides = [
        *("model.lora={rank: 2}", "model.adapter={width: 3}", "stages.backbone.train=[lora, adapter]"),
        "stages.backbone.mask={rule: most_sensitive, sparsity: 0.5, fisher: {samples: 40}}",
        "checkpoint.every_seconds=0",
    ]
    summary = run(tiny(*overrides), tmp_path / "whole")
    stage = summary["stages"]["backbone"]
    assert stage["active"] == stage["trained"] / 2
    whole = safetensors.torch.load_file(tmp_path / "whole" / "checkpoints" / "final.safetensors")
    (tmp_path / "whole" / "summary.json").unlink()
    sorted((tmp_path / "whole" / "checkpoints").glob("*.ckpt"))[-1].unlink()
    resume(tmp_path / "whole")
    again = safetensors.torch.load_file(tmp_path / "whole" / "checkpoints" / "final.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_embedded_weights_are_made_without_what_is_added(tiny, tmp_path):
    short = ["model.weights=digits", "stages.head.epochs=1", "stages.backbone.epochs=1"]
    run(tiny("model.adapter={}", "stages.backbone.train=adapter", *short), tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["stages.backbone.train=lora"], "stages.backbone.train: lora needs model.lora"),
        (["stages.backbone.train=[adapter, head]"], "stages.backbone.train: adapter needs model.adapter"),
        (["model.lora={}"], "model.lora is given, but no stage trains it"),
        (["model.adapter={}"], "model.adapter is given, but no stage trains it"),
        (["model.lora.rnak=2"], 'model.lora.rnak: unknown key. Did you mean "rank"?'),
        (
            ["stages.backbone.train=[lora, hed]"],
            "stages.backbone.train.1: 'hed' is not allowed. Did you mean \"head\"?",
        ),
        (["stages.backbone.train=[]"], "stages.backbone.train: List should have at least 1 item"),
        (["stages.backbone.train=[{last_block: 1}]"], 'Did you mean "last_blocks"?'),
        (["stages.backbone.train=3"], "stages.backbone.train: 3 is not allowed"),
    ],
)
def test_a_wrong_part_is_named(tiny, overrides, said):
    with pytest.raises(FedsieveError) as caught:
        tiny(*overrides)
    assert said in str(caught.value)


def test_parts_read_back_and_a_list_of_one_is_that_one(tiny):
    experiment = tiny(*LORA, "stages.lora.train=[lora, {last_blocks: 1}]")
    assert parse_config(to_yaml(experiment)) == experiment
    assert tiny("stages.head.train=[head]").stages[0].train == "head"

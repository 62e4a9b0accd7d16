"""Sparse stages as a user runs them: scenarios, masks on disk, patches, resume."""

import json

import pytest
import safetensors.torch
import torch
from rich.console import Console
from tests.end_to_end.test_command_line import fedsieve

from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.runner.model_files import load_model, load_patch
from fedsieve.runner.progress import Display
from fedsieve.runner.run import resume, run

SIEVE = "mask={rule: least_sensitive, sparsity: 0.8, calibration_rounds: 2, fisher: {samples: 50}}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    from tests.conftest import TINY

    from fedsieve.config import parse_config

    folder = tmp_path_factory.mktemp("sparse") / "run"
    run(parse_config(TINY, [SIEVE, "stages.backbone.sparse=true"]), folder)
    return folder


def test_the_three_scenarios_run(tiny, tmp_path):
    scenarios = {
        "head then sparse backbone": ["stages.backbone.sparse=true"],
        "whole model at once": ["stages=[{name: all, train: all, sparse: true, epochs: 2, batch_size: 300}]"],
        "head then sparse whole model": ["stages.backbone.train=all", "stages.backbone.sparse=true"],
    }
    for number, overrides in enumerate(scenarios.values()):
        summary = run(tiny(SIEVE, *overrides), tmp_path / str(number))
        last = list(summary["stages"].values())[-1]
        assert last["sparsity"] == 0.8 and last["active"] < 0.21 * last["trained"]


def test_a_stage_of_its_own_mask_overrides_the_shared_one(tiny, tmp_path):
    stages = "stages=[{name: a, sparse: true, epochs: 1, batch_size: 300}, {name: b, epochs: 1, batch_size: 300, mask: {rule: random, sparsity: 0.5}}]"
    summary = run(tiny(SIEVE, stages), tmp_path / "run")
    assert [stage["rule"] for stage in summary["stages"].values()] == ["least_sensitive", "random"]
    assert [stage["sparsity"] for stage in summary["stages"].values()] == [0.8, 0.5]


def test_the_folder_holds_the_mask_and_the_page_shows_it(finished):
    mask = Mask.load(finished / "masks" / "backbone.safetensors")
    stage = json.loads((finished / "summary.json").read_text())["stages"]["backbone"]
    assert (mask.id, mask.count) == (stage["mask_id"], stage["active"])
    assert mask.id[:12] in (finished / "report.html").read_text()


def test_only_the_mask_moved(finished, tiny):
    from fedsieve.runner.prepare import prepare
    from fedsieve.runner.progress import Display

    mask = Mask.load(finished / "masks" / "backbone.safetensors")
    before = mask.space.read(prepare(tiny(), Display.silent()).model)
    after = mask.space.read(load_model(finished)[1])
    assert torch.equal(before[~mask.to_bool()], after[~mask.to_bool()])


def test_resume_finds_the_same_mask_again_even_when_its_file_is_damaged(finished, tiny, tmp_path):
    folder = tmp_path / "run"
    run(tiny(SIEVE, "stages.backbone.sparse=true", "checkpoint.every_seconds=0"), folder)
    (folder / "summary.json").unlink()
    for checkpoint in sorted((folder / "checkpoints").glob("*.ckpt"))[1:]:
        checkpoint.unlink()  # back into the middle of the sparse stage
    (folder / "masks" / "backbone.safetensors").write_bytes(b"rubbish")
    resume(folder)
    one, two = (safetensors.torch.load_file(f / "checkpoints" / "final.safetensors") for f in (folder, finished))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_patch_is_small_and_gives_the_model_back_to_the_bit(finished, tmp_path, capsys):
    patch = tmp_path / "patch.safetensors"
    assert fedsieve("export", finished, "--sparse", "--to", patch) == 0
    assert "weights changed" in capsys.readouterr().out
    tensors = safetensors.torch.load_file(patch)
    mask = Mask.load(finished / "masks" / "backbone.safetensors")
    assert len(tensors["values"]) <= mask.count
    _, model, _ = load_patch(patch)
    expected = load_model(finished)[1].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert fedsieve("export", patch, "--to", tmp_path / "full.safetensors") == 0
    assert fedsieve("export", finished, "--to", tmp_path / "direct.safetensors") == 0
    assert (tmp_path / "full.safetensors").read_bytes() == (tmp_path / "direct.safetensors").read_bytes()


def test_a_patch_on_other_weights_or_a_damaged_one_is_refused(finished, tmp_path, capsys, tiny):
    from fedsieve.model.build import build_classifier

    patch = tmp_path / "patch.safetensors"
    assert fedsieve("export", finished, "--sparse", "--to", patch) == 0
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file(build_classifier(tiny().model, 10, 8, seed=77).backbone.state_dict(), other)
    assert fedsieve("export", patch, "--weights", other, "--to", tmp_path / "full.safetensors") == 2
    assert "a patch on other weights" in capsys.readouterr().err
    content = bytearray(patch.read_bytes())
    content[-3] ^= 1
    patch.write_bytes(content)
    assert fedsieve("export", patch, "--to", tmp_path / "full.safetensors") == 1
    assert "damaged" in capsys.readouterr().err
    assert fedsieve("export", other, "--to", tmp_path / "full.safetensors") == 2
    assert "not a patch" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [{"experiment": None}, {"base": None}, *({"metadata": text} for text in (None, "{", "[]", "{}"))],
)
def test_a_patch_with_damaged_notes_is_refused(finished, tmp_path, capsys, damage):
    patch = tmp_path / "patch.safetensors"
    assert fedsieve("export", finished, "--sparse", "--to", patch) == 0
    with safetensors.safe_open(patch, "pt") as content:
        notes = {name: text for name, text in (content.metadata() | damage).items() if text is not None}
    safetensors.torch.save_file(safetensors.torch.load_file(patch), patch, notes)
    assert fedsieve("export", patch, "--to", tmp_path / "full.safetensors") == 1
    assert "patch.safetensors: damaged: its notes" in capsys.readouterr().err.replace("\n", "")


def test_mask_commands_name_the_files_that_do_not_serve(finished, tmp_path, capsys):
    file, other = finished / "masks" / "backbone.safetensors", tmp_path / "other.safetensors"
    Mask.ones(ParamSpace(("a",), ((3,),))).save(other)
    assert fedsieve("mask", "diff", file, other) == 2
    assert f"{file} and {other} cannot be compared" in capsys.readouterr().err
    for folder in (finished, finished / "masks"):
        assert fedsieve("mask", "show", folder) == 2
        assert f"{folder}: a folder, not a mask file. Masks in it: {file}" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert fedsieve("mask", "show", tmp_path / "empty") == 2
    assert "No mask is in it" in capsys.readouterr().err


def test_mask_show_and_diff(finished, tmp_path, capsys):
    mask = Mask.load(finished / "masks" / "backbone.safetensors")
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    mask.save(a)
    (~mask).save(b)
    assert fedsieve("mask", "show", a, "--out", tmp_path / "show.html") == 0
    assert mask.id in capsys.readouterr().out and (tmp_path / "show.html").exists()
    assert fedsieve("mask", "diff", a, b, "--out", tmp_path / "diff.html") == 0
    assert "Jaccard 0.000" in capsys.readouterr().out
    assert fedsieve("mask", "diff", a, a) == 0
    assert "equal masks" in capsys.readouterr().out
    assert fedsieve("mask", "diff", a) == 2
    assert fedsieve("mask", "show", tmp_path / "show.html") in (1, 2)


def test_sparse_without_a_mask_and_a_mask_without_a_stage_are_refused(finished, tmp_path, capsys):
    config = finished / "config.yaml"
    assert fedsieve("run", config, "mask=null", "--out", tmp_path / "x") == 2
    assert "needs a mask" in capsys.readouterr().err
    assert fedsieve("run", config, "stages.backbone.sparse=false", "--out", tmp_path / "x") == 2
    assert "no stage takes it" in capsys.readouterr().err
    assert fedsieve("run", config, "mask.sparsity=0.99999", "--out", tmp_path / "x") == 2


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_adamw_resumes_like_sgd(tiny, tmp_path, kind):
    overrides = [
        SIEVE,
        "stages.backbone.sparse=true",
        f"stages.backbone.optimizer.kind={kind}",
        "checkpoint.every_seconds=0",
    ]
    run(tiny(*overrides), tmp_path / "whole")
    run(tiny(*overrides), tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    sorted((tmp_path / "cut" / "checkpoints").glob("*.ckpt"))[-1].unlink()
    resume(tmp_path / "cut")
    one, two = (
        safetensors.torch.load_file(tmp_path / n / "checkpoints" / "final.safetensors") for n in ("whole", "cut")
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_mask_that_was_exchanged_in_a_stopped_run_is_noticed(tiny, tmp_path):
    """Another mask of the same size would go unnoticed by shapes, and leave the momentum on the wrong weights."""
    experiment = tiny("mask={rule: random, sparsity: 0.9}", "stages.backbone.sparse=true", "checkpoint.every_seconds=0")

    class Stop(Exception):
        pass

    class Stopping(Display):
        def step(self, stage, tick):
            if stage == "backbone" and tick.step == 3:
                raise Stop

    whole = run(experiment, tmp_path / "whole")
    with pytest.raises(Stop):
        run(experiment, tmp_path / "cut", Stopping(Console(), quiet=True))
    file = tmp_path / "cut" / "masks" / "backbone.safetensors"
    mask = Mask.load(file)
    Mask.from_bool(mask.space, mask.to_bool().flip(0)).save(file)
    again = resume(tmp_path / "cut")
    assert again["stages"]["backbone"]["mask_id"] == whole["stages"]["backbone"]["mask_id"]
    assert again["test_loss"] == whole["test_loss"]


def test_a_mask_of_the_head_is_judged_by_the_classes_there_are(tiny, tmp_path):
    stage = "stages=[{name: head, train: head, epochs: 1, sparse: true, optimizer: {lr: 0.1}}]"
    summary = run(tiny(stage, "mask={rule: random, sparsity: 0.98}"), tmp_path / "run")
    assert summary["stages"]["head"]["active"] == 3

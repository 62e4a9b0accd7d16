"""The commands as a user types them, in one process each way they can end."""

import json
import shutil
import subprocess
import sys
from typing import get_args

import pytest
import torch
import yaml
from rich.console import Console
from tests.conftest import TINY

from fedsieve.cli import main
from fedsieve.config import LayerKind, parse_config
from fedsieve.runner.listing import KINDS, LISTINGS


@pytest.fixture
def config(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    return str(tmp_path / "tiny.yaml")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One finished run."""
    base = tmp_path_factory.mktemp("finished")
    (base / "tiny.yaml").write_text(TINY)
    fedsieve("run", base / "tiny.yaml", "--out", base / "run", "tracking=[tensorboard]")
    return base / "run"


def fedsieve(*words) -> int:
    """Exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code or 0


def test_run_leaves_the_folder_it_promises(finished):
    for name in (
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "tensorboard",
        "figures",
    ):
        assert (finished / name).exists(), name
    summary = json.loads((finished / "summary.json").read_text())
    keys = {"test_accuracy", "test_loss", "val_accuracy", "best_at", "seconds"}
    assert keys | {"seed"} <= summary.keys()
    assert set(summary["stages"]) == {"head", "backbone"}
    assert all(keys <= stage.keys() for stage in summary["stages"].values())
    assert summary["stages"]["backbone"]["test_accuracy"] == summary["test_accuracy"]
    records = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [(record["stage"], record["epoch"]) for record in records] == [
        ("head", 1), ("head", 2), ("backbone", 1), ("backbone", 2),
    ]  # fmt: skip
    resolved = parse_config((finished / "config.yaml").read_text())
    assert resolved == parse_config(TINY, ["tracking=[tensorboard]"])


def test_a_wrong_config_ends_with_2_before_torch_is_imported(tmp_path):
    (tmp_path / "bad.yaml").write_text("stages: [{name: a, trian: head}]")
    code = (
        "import sys; from fedsieve.cli import main\n"
        "try: main(['run', 'bad.yaml'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "False"]
    assert 'bad.yaml: stages.a.trian: unknown key. Did you mean "train"?' in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("device=cuda:7", "cuda:7 is not there"),
        ("model.backbone=vit_tinny_patch16_224", 'Did you mean "vit_tiny_patch16_224"?'),
        ("model.weights=missing.pth", "missing.pth: no such file"),
        ("data.source=./missing", "no such folder"),
        ("data.val_fraction=1e-5", "leaves none to validate on"),
        ("data.val_fraction=0.9999", "data.val_fraction: 0.9999 leaves no image"),
        ("data.classes=[3, 99]", "no class 99"),
        ("model.options={patch_size: 0, embed_dim: 16}", "model"),
        ("data.test_split=train", "the same"),
        ("device=gpu", "Allowed: auto, cpu, cuda"),
        ("stages.backbone.train={last_blocks: 9}", "has 2 blocks, 9 were asked for"),
        ("model.options={patch_size: 4, embed_dim: 16, depth: 1, num_heads: 3}", "cannot be built"),
    ],
)
def test_what_cannot_run_here_ends_with_2_and_a_reason(config, tmp_path, capsys, override, said):
    if override == "device=cuda:7" and torch.cuda.device_count() > 7:
        pytest.skip("this machine has eight GPUs")
    assert fedsieve("run", config, override, "--out", tmp_path / "run") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists(), "a wrong request must not block the folder it named"


@pytest.mark.parametrize(
    "override", ["model.weights=missing.pth", "data.classes=[3, 99]"]
)  # refused early, and with the data
def test_a_wrong_request_takes_no_name_from_the_next_run(config, tmp_path, monkeypatch, override):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to("elsewhere")
    assert fedsieve("run", config, override) == 2
    (tmp_path / "elsewhere" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny-2").symlink_to("nothing")
    assert fedsieve("run", config, override) == 2
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["tiny", "tiny-2"]


def test_an_existing_folder_is_not_overwritten(finished, config, capsys):
    before = (finished / "summary.json").read_bytes()
    assert fedsieve("run", config, "--out", finished) == 2
    assert "fedsieve resume" in capsys.readouterr().err
    assert (finished / "summary.json").read_bytes() == before


def test_evaluate_repeats_the_test_accuracy_and_takes_other_data(finished, capsys):
    summary = json.loads((finished / "summary.json").read_text())
    assert fedsieve("evaluate", finished) == 0
    assert f"{100 * summary['test_accuracy']:.2f} %" in capsys.readouterr().out
    assert fedsieve("evaluate", finished, "--data", "digits", "--split", "train") == 0
    assert "1,438 images" in capsys.readouterr().out
    for change in ("data.classes=[0, 1]", "data.size=16", "data.normalize=data", "seed=4", "model.head=mlp"):
        assert fedsieve("evaluate", finished, change) == 2
        assert "cannot be changed" in capsys.readouterr().err
    assert fedsieve("evaluate", finished, "--split", "tset") == 2


def test_other_data_without_a_test_split_is_measured_whole(finished, tmp_path, capsys):
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for row in range(60):
        file = tmp_path / "more" / str(digits.target[row]) / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[row] * 15).astype("uint8")).save(file)
    assert fedsieve("evaluate", finished, "--data", tmp_path / "more") == 0
    assert "60 images" in capsys.readouterr().out
    (tmp_path / "more" / "9").rename(tmp_path / "more" / "nine")
    assert fedsieve("evaluate", finished, "--data", tmp_path / "more") == 2
    assert "not those of the model" in capsys.readouterr().err


def test_a_run_folder_serves_as_pretrained_weights(finished, config, tmp_path):
    assert fedsieve("run", config, f"model.weights={finished}", "--out", tmp_path / "next", "stages.head.epochs=1") == 0


def test_an_unfinished_or_foreign_folder_is_refused(tmp_path, capsys):
    for command in (["resume"], ["evaluate"], ["report"], ["export", "--to", "x.safetensors"]):
        assert fedsieve(command[0], tmp_path, *command[1:]) == 2
        assert "config.yaml" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text(TINY)
    assert fedsieve("evaluate", tmp_path) == 2
    assert "not finished" in capsys.readouterr().err


def test_report_and_explore_write_pages(finished, config, tmp_path, capsys):
    (finished / "report.html").unlink()
    assert fedsieve("report", finished) == 0
    assert "Traceback" not in (finished / "report.html").read_text()
    (tmp_path / "nothing").mkdir()
    assert fedsieve("report", finished, tmp_path / "nothing", "--out", tmp_path / "both.html") == 0
    assert "nothing" in (tmp_path / "both.html").read_text()
    assert fedsieve("report", finished, tmp_path / "missing", "--out", tmp_path / "other.html") == 2
    assert "missing is not there" in capsys.readouterr().err
    assert fedsieve("explore", config, "--out", tmp_path / "explore") == 0
    assert (tmp_path / "explore" / "explore.html").exists()
    assert fedsieve("explore", config, "--out", finished) == 2


def test_names_are_shown_whole_however_narrow_the_terminal(finished, tmp_path, monkeypatch, capsys):
    name, runs = "name-" + "x" * 80 + "-end", [tmp_path / "[a]", tmp_path / "[b]"]
    for size, run in enumerate(runs, start=16):  # one name, so that their folders tell them apart
        shutil.copytree(finished, run)
        settings = yaml.safe_load((run / "config.yaml").read_text()) | {"name": name}
        settings["stages"][0]["batch_size"] = size
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setattr("fedsieve.cli.run_commands.console", Console(width=80))
    assert fedsieve("report", *runs, "--out", tmp_path / "page.html") == 0
    cells = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert all(f"{name}({run})" in "".join(cells) for run in runs)


def test_a_place_that_cannot_be_written_is_named_without_a_traceback(finished, config, capsys):
    assert fedsieve("export", finished, "--to", "/proc/nothing/model.safetensors") == 1
    assert "/proc/nothing" in capsys.readouterr().err
    assert fedsieve("run", config, "--out", "/proc/nothing/run") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_model_that_explodes_in_its_last_step_is_still_reported(config, tmp_path):
    """Its loss is infinite, which JSON cannot say."""
    explode = ["data.val_fraction=0", "stages=[{name: a, epochs: 1, batch_size: 5000, optimizer: {lr: 1e30}}]"]
    assert fedsieve("run", config, *explode, "--out", tmp_path / "run") == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test_loss"] is None
    assert fedsieve("run", config, explode[1], "--out", tmp_path / "validated") == 1


def test_dry_run_prints_and_writes_nothing(config, tmp_path, capsys):
    assert fedsieve("run", config, "--dry-run", "--out", tmp_path / "run") == 0
    said = capsys.readouterr().out
    for words in ("weights", "steps", "memory", "bytes", "density"):
        assert words in said
    assert not (tmp_path / "run").exists()


def test_the_demo_is_an_ordinary_experiment(capsys, tmp_path):
    assert fedsieve("demo", "--show") == 0
    text = capsys.readouterr().out
    assert parse_config(text).data.source == "digits"
    yaml.safe_load(text)
    short = ["stages.head.epochs=1", "stages.backbone.epochs=1", "model.weights=none"]
    assert fedsieve("demo", *short, "--out", tmp_path / "demo", "--quiet") == 0
    assert json.loads((tmp_path / "demo" / "summary.json").read_text())["stages"]["head"]["epochs"] == 1
    assert fedsieve("demo", "stages.heed.epochs=1") == 2


def test_digits_weights_see_no_validation_or_test_image(tiny):
    from tests.train.test_loop import quiet

    from fedsieve.runner.prepare import prepare, pretraining

    experiment = tiny("model.weights=digits")
    recipe = pretraining(experiment)
    upstream, downstream = prepare(recipe, quiet()), prepare(tiny(), quiet())
    assert set(upstream.train.rows) <= set(downstream.train.rows)
    assert not set(upstream.train.rows) & set(downstream.validation.rows)
    assert set(upstream.train.labels.tolist()) == {0, 1, 2, 3, 4}


def test_list_shows_what_a_config_may_say(capsys):
    assert fedsieve("list") == 0
    kinds = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    for kind in kinds:
        assert fedsieve("list", kind, *(["vit_small*dino"] if kind == "models" else [])) == 0
        assert capsys.readouterr().out.strip()
    federation = {"partitions", "scopes", "formats", "servers", "corrections", "weighting", "executors", "personal"}
    assert {"kinds", "rules"} | federation <= set(kinds)
    for kind in federation:
        assert all(text for _, text in LISTINGS[kind][1](None))  # every word that the config takes is explained
    assert set(KINDS) == {"default", "all", *get_args(LayerKind)}
    assert fedsieve("list", "modles") == 2
    assert 'Did you mean "models"' in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["", "demo", "run", "resume", "evaluate", "export", "explore", "report", "sweep", "list", "bench"]
)
def test_help_is_everywhere(command, capsys):
    assert fedsieve(*command.split(), "--help") == 0
    assert len(capsys.readouterr().out) > 300


def test_test_curves_are_recorded_and_nothing_is_selected_on_them(config, tmp_path):
    for name, switch in (("with", "true"), ("without", "false")):
        assert fedsieve("run", config, f"test_curve={switch}", "--out", tmp_path / name) == 0
    one, two = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("with", "without"))
    assert one["test_accuracy"] == two["test_accuracy"] and one["best_at"] == two["best_at"]
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("with", "without")]
    assert "test_accuracy" in lines[0] and "test_accuracy" not in lines[1]

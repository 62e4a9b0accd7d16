"""Models outside fedsieve: what an export prints is run, and its files are loaded by timm and peft alone."""

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import timm
import torch
from peft import PeftModel
from PIL import Image
from tests.conftest import TINY
from tests.end_to_end.test_command_line import fedsieve

from fedsieve.config import parse_config
from fedsieve.data.transforms import make_transform
from fedsieve.runner.checkpoint import list_checkpoints, read_checkpoint
from fedsieve.runner.environment import make_autocast
from fedsieve.runner.model_files import load_model
from fedsieve.runner.run import run
from fedsieve.runner.setup import open_split
from fedsieve.train.loop import predict

INPUT = ["data.size=16", "data.normalize=data"]
CENTRAL = ["model.lora={rank: 2}", "stages.backbone.train=[lora, head]", "data.interpolation=bilinear"]
FEDERATED = [
    "data.transform=crop_flip",
    "federation={clients: 6, partition: {kind: classes, nc: 3}, cohort: 0.5}",
    "privacy={dp: {noise_multiplier: 1.0, clip_norm: 0.5}}",
    "federation.weighting=uniform",
    "stages=[{name: all, train: all, sparse: true, rounds: 2, batch_size: 50, optimizer: {lr: 0.1}}]",
    "mask={rule: high_magnitude, sparsity: 0.7}",
]
SIZES = {"photo": (61, 40), "small": (12, 12)}  # one that is stored as its middle square, one that is kept whole


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A central run with LoRA, and a federated one with a mask."""
    base = tmp_path_factory.mktemp("runs")
    for name, overrides in (("central", CENTRAL), ("federated", FEDERATED)):
        run(parse_config(TINY, [*INPUT, *overrides]), base / name, page=False)
    return base


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """For each size a dataset with one test image per class."""
    base, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for kind, (width, height) in SIZES.items():
        for label in range(10):
            buffer = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "JPEG")
            for split in ("train", "test"):
                file = base / kind / split / str(label) / "image.jpg"
                file.parent.mkdir(parents=True)
                file.write_bytes(buffer.getvalue())
    return base


def own_logits(folder: Path, pictures: Path) -> torch.Tensor:
    """What fedsieve's evaluation makes of the image of class 7."""
    experiment, model, metadata = load_model(folder)
    data, cpu = experiment.data.model_copy(update={"source": str(pictures)}), torch.device("cpu")
    transform = make_transform(data, metadata["mean"], metadata["std"])
    feed = open_split(data, "test", metadata["class_names"], transform, cpu)
    (row,) = (feed.labels == 7).nonzero()[:, 0].tolist()
    return predict(model, feed, make_autocast(experiment, cpu))[row]


def exported(capsys, *words) -> str:
    """The Python lines that an export prints."""
    capsys.readouterr()
    assert fedsieve("export", *words) == 0
    said = capsys.readouterr().out
    return said[said.index("import json") :]


def run_elsewhere(lines: str, folder: Path, picture: Path, result: str) -> tuple[str, torch.Tensor]:
    """What the lines print, and a result that they compute, in a process that has no fedsieve and no network."""
    folder.mkdir(exist_ok=True)
    (folder / "image.jpg").write_bytes((picture / "test" / "7" / "image.jpg").read_bytes())
    code = f"{lines}\nimport sys\nassert 'fedsieve' not in sys.modules\nprint({result}.tolist())"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *said, numbers = done.stdout.splitlines()
    return "".join(said), torch.tensor(json.loads(numbers))


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("name", ["central", "federated"])
def test_the_printed_lines_compute_the_logits_of_fedsieve_on_an_image_file(
    runs, pictures, name, kind, tmp_path, capsys
):
    lines = exported(capsys, runs / name, "--to", tmp_path / "x.safetensors")
    expected = own_logits(runs / name, pictures / kind)
    said, logits = run_elsewhere(lines, tmp_path / "elsewhere", pictures / kind, "logits")
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert said == str(expected.argmax().item())  # the classes of the digits are named by their numbers


def test_the_printed_lines_of_a_peft_folder_compute_the_same_logits(runs, pictures, tmp_path, capsys):
    lines = exported(capsys, runs / "central", "--peft", "--to", tmp_path / "adapter")
    assert "PeftModel.from_pretrained" in lines
    expected = own_logits(runs / "central", pictures / "photo")
    _, logits = run_elsewhere(lines, tmp_path / "elsewhere", pictures / "photo", "logits")
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "adapter").iterdir()}
    assert sizes["adapter_model.safetensors"] < sizes["base.safetensors"] / 2
    base = safetensors.torch.load_file(tmp_path / "adapter" / "base.safetensors")
    before = load_model(runs / "central")[1].backbone
    assert torch.equal(base["blocks.0.attn.qkv.weight"], before.blocks[0].attn.qkv.base_layer.weight)
    assert not base["head.weight"].any(), "a trained head would hide an adapter that lost its own"


def test_an_adapter_on_weights_of_the_hub_comes_without_them_and_fits_timms_own_network(tmp_path, capsys):
    """The head of this network lies deeper, as head.fc."""
    network = ["model.backbone=convnext_tiny", "model.options={depths: [1, 1, 1, 1], dims: [8, 8, 8, 8]}"]
    lora = ["data.size=32", "model.lora={rank: 2, targets: [mlp.fc1]}", "stages.backbone.train=[lora, head]"]
    folder, adapter = tmp_path / "run", tmp_path / "adapter"
    run(parse_config(TINY, [*network, *lora]), folder, page=False)
    settings = folder / "config.yaml"
    settings.write_text(settings.read_text().replace("weights: none", "weights: hub"))
    lines = exported(capsys, folder, "--peft", "--to", adapter)
    assert (
        'timm.create_model("convnext_tiny", pretrained=True,' in lines and not (adapter / "base.safetensors").exists()
    )
    _, model, _ = load_model(folder)
    plain = timm.create_model("convnext_tiny", num_classes=10, depths=[1, 1, 1, 1], dims=[8, 8, 8, 8])
    pretrained = {name.replace(".base_layer.", "."): one for name, one in model.backbone.state_dict().items()}
    plain.load_state_dict({name: one for name, one in pretrained.items() if name in plain.state_dict()}, strict=False)
    images = torch.randn(4, 3, 32, 32)
    fine_tuned = PeftModel.from_pretrained(plain, str(adapter)).eval()
    assert torch.allclose(fine_tuned(images), model(images), rtol=1e-4, atol=1e-5)


def test_the_lines_of_a_card_work_in_the_folder_of_the_card(runs, pictures, tmp_path, capsys):
    exported(capsys, runs / "central", "--backbone-only", "--to", tmp_path / "b.safetensors")
    (lines,) = re.findall(r"```python\n(.*?)```", (tmp_path / "b.md").read_text(), flags=re.DOTALL)
    _, features = run_elsewhere(lines, tmp_path, pictures / "photo", "features")
    head = load_model(runs / "central")[1].head
    expected = own_logits(runs / "central", pictures / "photo")
    assert torch.allclose(head(features), expected, rtol=1e-4, atol=1e-5)
    assert "head.weight" not in safetensors.torch.load_file(tmp_path / "b.safetensors")


def test_a_file_named_model_makes_a_folder_that_timm_loads_with_its_input_and_classes(runs, tmp_path):
    assert fedsieve("export", runs / "federated", "--to", tmp_path / "model.safetensors") == 0
    assert {file.name for file in tmp_path.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    experiment, ours, metadata = load_model(runs / "federated")
    images = torch.randn(3, 3, 16, 16)
    assert torch.equal(model(images), ours(images))
    found = timm.data.resolve_model_data_config(model)
    assert tuple(found["input_size"]) == (3, 16, 16) and found["interpolation"] == experiment.data.interpolation
    assert list(found["mean"]) == metadata["mean"] and list(found["std"]) == metadata["std"]
    assert timm.data.create_transform(**found).transforms[0].size == 18  # as round(16 * 256 / 224)
    assert list(model.pretrained_cfg["label_names"]) == metadata["class_names"]


def notes(file: Path) -> dict[str, str]:
    with safetensors.safe_open(file, "pt") as content:
        return content.metadata()


def test_every_file_carries_the_input_and_the_classes_itself(runs, tmp_path):
    for name, words in (("whole", []), ("patch", ["--sparse"]), ("again", ["--peft"])):
        to = tmp_path / name if name == "again" else tmp_path / f"{name}.safetensors"
        assert fedsieve("export", runs / "central", *words, "--to", to) == 0
    beside = json.loads((tmp_path / "whole.json").read_text())
    files = ("whole.safetensors", "patch.safetensors", "again/adapter_model.safetensors")
    assert all(json.loads(notes(tmp_path / file)["config"]) == beside for file in files)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == beside
    assert beside["pretrained_cfg"]["label_names"] == [str(digit) for digit in range(10)]


@pytest.mark.parametrize(
    ("words", "card"),
    [([], "x.md"), (["--sparse"], "x.md"), (["--backbone-only"], "x.md"), (["--peft"], "x/README.md")],
)
def test_an_export_overwrites_nothing_unless_it_is_forced(runs, tmp_path, capsys, words, card):
    to = tmp_path / ("x" if words == ["--peft"] else "x.safetensors")
    assert fedsieve("export", runs / "central", *words, "--to", to) == 0
    files = {file for file in tmp_path.rglob("*") if file.is_file()}
    for kept in files:
        for file in files:
            file.unlink(missing_ok=True)
        kept.write_text("mine")
        assert fedsieve("export", runs / "central", *words, "--to", to) == 2
        assert f"{kept} exists already" in capsys.readouterr().err and kept.read_text() == "mine"
        assert {file for file in tmp_path.rglob("*") if file.is_file()} == {kept}
    kept = tmp_path / card
    kept.write_text("mine")
    assert fedsieve("export", runs / "central", *words, "--to", to, "--force") == 0
    assert kept.read_text() != "mine" and {file for file in tmp_path.rglob("*") if file.is_file()} == files


def test_a_card_repeats_what_the_run_recorded(runs, tmp_path):
    folder = runs / "federated"
    assert fedsieve("export", folder, "--to", tmp_path / "x.safetensors") == 0
    card = (tmp_path / "x.md").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    stage = summary["stages"]["all"]
    accuracy = f"{100 * summary['test_accuracy']:.2f}\u00a0%"
    assert f"| the test split | {summary['test_images']} | {accuracy} |" in card
    assert f"| {summary['val_images']} | {100 * summary['val_accuracy']:.2f}\u00a0% |" in card
    assert f"{summary['bytes_up']:,} bytes up and {summary['bytes_down']:,} bytes down" in card
    assert f"epsilon {summary['privacy']['epsilon']:.3f} at delta" in card
    assert f"| {stage['trained']:,} | {stage['active']:,} |" in card and f"id `{stage['mask_id']}`" in card
    numbers, _ = read_checkpoint(list_checkpoints(folder / "checkpoints")[-1])
    assert f"Fingerprint of the training split: `{numbers['marks']['data.source']}`" in card
    (settings,) = re.findall(r"```yaml\n(.*?)```", card, flags=re.DOTALL)
    assert parse_config(settings) == load_model(folder).experiment
    assert card.startswith("---\nlibrary_name: timm\n")


def test_a_card_claims_nothing_that_the_run_folder_lost(runs, tmp_path):

    folder = shutil.copytree(runs / "federated", tmp_path / "run")
    (folder / "summary.json").unlink()
    for checkpoint in list_checkpoints(folder / "checkpoints"):
        checkpoint.write_bytes(b"damaged")
    assert fedsieve("export", folder, "--to", tmp_path / "x.safetensors") == 0
    card = (tmp_path / "x.md").read_text()
    assert "no readable summary.json" in card and "Fingerprint" not in card and "epsilon " not in card
    assert "bytes up" not in card and "test split |" not in card


def test_a_patch_carries_the_record_of_its_run_to_the_card_of_the_whole_model(runs, tmp_path):
    patch = tmp_path / "patch.safetensors"
    assert fedsieve("export", runs / "federated", "--sparse", "--to", patch) == 0
    assert fedsieve("export", patch, "--to", tmp_path / "full.safetensors") == 0
    assert fedsieve("export", runs / "federated", "--to", tmp_path / "direct.safetensors") == 0
    full, direct = ((tmp_path / f"{name}.md").read_text() for name in ("full", "direct"))
    assert full.replace("full.", "direct.") == direct


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("federated", ["--peft", "--to", "x"], "this run has no model.lora"),
        ("central", ["--peft", "--to", "x.safetensors"], "should name a folder"),
        ("central", ["--peft", "--sparse", "--to", "x"], "Choose one"),
        ("central", ["--weights", "a.pth", "--to", "x.safetensors"], "drop --weights"),
        ("central", ["--to", "model.bin"], "should end in .safetensors"),
    ],
)
def test_a_wrong_request_writes_nothing(runs, tmp_path, monkeypatch, capsys, name, words, said):
    monkeypatch.chdir(tmp_path)
    assert fedsieve("export", runs / name, *words) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_run_that_also_trained_the_backbone_is_no_peft_folder(tmp_path, capsys):
    stages = "stages=[{name: both, train: [lora, backbone], epochs: 1, batch_size: 500}]"
    run(parse_config(TINY, ["model.lora={rank: 2}", stages]), tmp_path / "run", page=False)
    assert fedsieve("export", tmp_path / "run", "--peft", "--to", tmp_path / "x") == 2
    assert 'stage "both" also trains the backbone' in capsys.readouterr().err

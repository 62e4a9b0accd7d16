import re
import sys
from dataclasses import replace

import pytest
import torch

from fedsieve import run
from fedsieve.cli.run_commands import _show_summary
from fedsieve.config import parse_config
from fedsieve.errors import FedsieveError
from fedsieve.report.folder import read_run
from fedsieve.report.html import size
from fedsieve.report.traffic import of_dense, read_traffic
from fedsieve.runner.estimate import images_trained
from fedsieve.runner.plan import plan
from fedsieve.runner.prepare import prepare
from fedsieve.runner.progress import Display
from fedsieve.wire.ledger import lines, totals

CONFIG = """
name: planned
seed: 1
device: cpu
data: {source: digits, size: 8, normalize: half, val_fraction: 0.2}
model:
  backbone: vit_tiny_patch16_224
  options: {patch_size: 4, embed_dim: 32, depth: 2, num_heads: 2}
  weights: none
mask: {rule: least_sensitive, sparsity: 0.8, calibration_rounds: 2, fisher: {samples: 20}}
federation: {clients: 10, cohort: 3, held_out: 0.2, partition: {kind: classes, nc: 3}}
message: {up: int8, down: fp16}
stages:
  - {name: head, train: head, method: ridge}
  - {name: backbone, train: backbone, sparse: true, rounds: 4, local: {steps: 2}, batch_size: 16}
tracking: []
"""


def planned(*overrides):
    rows, found = plan(parse_config(CONFIG, overrides)), {}
    stage = ""
    for what, how_much in rows:
        stage = what.removeprefix("stage ") if what.startswith("stage") else stage if what.startswith(" ") else ""
        found[stage, what.strip() if not what.startswith("stage") else ""] = how_much
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return run(parse_config(CONFIG), folder), folder


def amount(text):
    number, unit = re.search(r"([\d.]+) (B|KB|MB)", text).groups()
    return float(number) * {"B": 1, "KB": 1e3, "MB": 1e6}[unit]


def test_a_plan_gives_the_bytes_that_the_run_then_sends(finished):
    summary, folder = finished
    found = planned()
    assert found["", "clients"] == "10, 2 of them strangers; 3 in a round, about 115 images each"
    assert found["head", ""] == "closed form, one round with all 8 clients"
    assert found["backbone", ""] == "4 rounds x 3 clients x 2 steps of 16 images"
    up, _ = totals(folder / "ledger.csv")["backbone"]
    messages = {(line.direction, line.what): line.size for line in lines(folder / "ledger.csv") if line.round == 4}
    assert f"{size(up[3])} a round: 3 x {size(messages['up', 'update'])}," in found["backbone", "bytes up"]
    assert f"3 x {size(messages['down', 'model'])}," in found["backbone", "bytes down"]
    sent = summary["bytes_up"] + summary["bytes_down"]
    assert amount(found["", "bytes in all"]) == pytest.approx(sent, rel=0.1)
    assert found["", "steps in all"] == "24"


def test_what_cannot_be_known_before_is_a_bound():
    own = planned("mask.scope=client")
    assert own["backbone", "bytes down"].startswith("at most") and own["", "bytes in all"].startswith("at most")
    assert not planned()["backbone", "bytes down"].startswith("at most")


def test_twice_as_much_travels_with_control_variates():
    plain, scaffold = planned(), planned("federation.correction.kind=scaffold")
    for way in ("bytes up", "bytes down"):
        once, twice = amount(plain["backbone", way]), amount(scaffold["backbone", way])
        assert twice == pytest.approx(2 * once, rel=0.02)


def test_a_central_plan_sends_nothing(tiny):
    rows = dict(plan(tiny()))
    assert rows["  bytes sent"] == "none: the training is central" and "clients" not in rows
    assert rows["stage head"].startswith("2 epochs x")


def test_the_summary_of_a_federated_run_is_in_rounds_and_bytes(finished, capsys):
    summary, folder = finished
    personal = {"global": {"clients": 3, "mean": 0.5}, "local": {"clients": 3, "mean": 0.75}}
    _show_summary(summary | {"refused": {"crash": 2, "late": 1}, "personal": personal}, folder)
    told = " ".join(capsys.readouterr().out.split())
    assert "chosen round" in told and "epoch" not in told
    assert f"5 rounds, {size(summary['bytes_up'])} up, {size(summary['bytes_down'])} down, " in told
    assert "% of dense fp32 FedAvg" in told and "refused: 2 crash, 1 late" in told
    assert "personal models of 3 clients: global 50.00 %, local 75.00 %" in told
    assert f"worst decile {100 * summary['client_accuracy']['worst_decile']:.2f} %, last drift" in told
    assert (folder / "report.html").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ["federation.client_validation=0.2"],
        ["federation.blend=true"],
        [
            "privacy.aggregation=secagg",
            "message={up: fp32}",
            "federation={clients: 8, cohort: 4, client_validation: 0.2}",
        ],
        ["federation.correction.kind=scaffold"],
        ["data.val_fraction=0", "mask.fisher.samples=16"],
        [
            "stages=[{name: backbone, train: backbone, sparse: true, rounds: 4, local: {steps: 1}, batch_size: 16}, "
            "{name: head, train: head, method: ridge}, "
            "{name: more, train: backbone, rounds: 2, local: {steps: 1}, batch_size: 16}]"
        ],
    ],
)
def test_a_plan_counts_whatever_a_run_sends(tmp_path, overrides):
    summary = run(parse_config(CONFIG, overrides), tmp_path / "run")
    sent = summary["bytes_up"] + summary["bytes_down"]
    assert amount(planned(*overrides)["", "bytes in all"]) == pytest.approx(sent, rel=0.1)


def test_a_plan_says_how_many_hostile_clients_a_round_may_have_and_what_the_rule_bears():
    attack = [
        "federation={clients: 20, cohort: 10, attack: {kind: sign_flip, fraction: 0.2}}",
        "federation.aggregator.kind=multi_krum",
    ]
    assert "up to 4 of 10 in a round" in planned(*attack)["", "trust"]
    assert (
        "multi_krum as it is set leaves 3 of them aside" in planned(*attack, "federation.aggregator.f=3")["", "trust"]
    )
    enough = planned(*attack, "federation.aggregator={kind: multi_krum, f: 3, m: 6}")["", "trust"]
    assert "aside" not in enough


def test_what_stands_in_for_the_backbone_is_beside_the_backbone(tmp_path):
    """A few weights of adapters are a small share of dense, whatever masks and newcomers cost beside them."""
    overrides = [
        "model.adapter={width: 2}",
        "mask=null",
        "stages.backbone.sparse=false",
        "stages.backbone.train=adapter",
    ]
    summary = run(parse_config(CONFIG, overrides), tmp_path / "run")
    stage = summary["stages"]["backbone"]
    assert stage["trained"] == 2 * (32 * 2 + 2 + 2 * 32 + 32)
    assert stage["dense"] == summary["parameters"] - stage["trained"] - summary["stages"]["head"]["trained"] > 20_000
    (_, traffic) = read_traffic(read_run(tmp_path / "run"))
    assert traffic.dense == 4 * stage["dense"]
    told = float(re.search(r"([\d.]+) % of dense", planned(*overrides)["", "bytes in all"])[1])
    assert told == pytest.approx(100 * of_dense(read_traffic(read_run(tmp_path / "run"))), rel=0.1)


@pytest.mark.parametrize(
    "overrides",
    [
        ["federation.partition.nc=11"],
        ["federation.clients=3000"],
        ["data.val_fraction=1e-5"],
        ["federation.partition={kind: natural, column: user}", "federation.clients=null"],
        ["clients_at_once=2"],
        ["tracking=[wandb]"],
        ["model.weights=garbage.safetensors"],
        ["mask.granularity=attention_head", "federation.devices=[{share: 0.5}, {share: 0.5, density: 0.01}]"],
    ],
)
def test_a_plan_refuses_what_a_run_refuses(tmp_path, monkeypatch, overrides):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "garbage.safetensors").write_bytes(b"no weights at all")
    experiment = parse_config(CONFIG, overrides)
    with pytest.raises(FedsieveError) as planned_one:
        plan(experiment)
    with pytest.raises(FedsieveError) as run_one:
        run(experiment, tmp_path / "run")
    assert str(planned_one.value) == str(run_one.value)
    assert planned_one.value.exit_code == run_one.value.exit_code
    assert run_one.value.exit_code == 1 or not (tmp_path / "run").exists()


def test_a_plan_says_what_a_budget_comes_to():
    stages = "stages=[{name: all, train: all, budget: 13, local: {steps: 4}, batch_size: 16}]"
    found = planned(stages, "mask=null")
    assert "3 rounds x 3 clients x 4 steps" in found["all", ""] and "is 3 rounds, 12 steps" in found["all", ""]


def test_the_images_that_a_run_trains_on(tiny):
    central = tiny("stages=[{name: all, train: all, epochs: 3}]")
    assert images_trained(central, 800) == 3 * 800
    federated = tiny(
        "federation={clients: 10, cohort: 0.2}", "stages=[{name: all, train: all, rounds: 5, local: {epochs: 2}}]"
    )
    assert images_trained(federated, 800) == 5 * 2 * 2 * 80
    steps = tiny(
        "federation={clients: 10, cohort: 3}",
        "stages=[{name: all, train: all, rounds: 5, local: {steps: 4}, batch_size: 7}]",
    )
    assert images_trained(steps, 800) == 5 * 3 * 4 * 7


@pytest.mark.parametrize(
    ("device", "epochs", "asked", "speed"),
    [
        ("cuda", 1, "auto", "graph"),
        ("cuda", 10**6, "auto", "full"),
        ("cpu", 10**6, "auto", "eager"),
        ("cuda", 1, "blocks", "blocks"),
    ],
)
def test_a_gpu_compiles_where_that_pays(tiny, device, epochs, asked, speed):
    setup = prepare(tiny(f"stages=[{{name: all, train: all, epochs: {epochs}}}]"), Display.silent())
    experiment = setup.experiment.model_copy(update={"compile": asked})
    assert replace(setup, device=torch.device(device), experiment=experiment).speed == speed

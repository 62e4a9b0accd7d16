"""`test: false`: a run that never sees the images it will one day be judged on."""

import json

import pytest
from tests.federation.conftest import CONFIG

from fedsieve.cli import main
from fedsieve.config import parse_config
from fedsieve.errors import FedsieveError
from fedsieve.report.folder import read_run
from fedsieve.runner.run import run
from fedsieve.runner.setup import Setup


@pytest.fixture
def closed(monkeypatch):
    def opened(_):
        raise AssertionError("the test set was opened")

    monkeypatch.setattr(Setup, "test_feed", opened)


FEDERATED = "federation.personal={methods: [head]}"


@pytest.mark.parametrize("kind", ["central", "federated"])
def test_the_test_set_stays_closed_and_the_run_counts_by_validation(closed, tiny, tmp_path, kind, capsys):
    experiment = tiny("test=false") if kind == "central" else parse_config(CONFIG, ["test=false", FEDERATED])
    summary = run(experiment, tmp_path / "run")
    assert summary["test_accuracy"] is None and summary["test_images"] == 0
    assert not {"personal", "client_accuracy"} & summary.keys()
    found = read_run(tmp_path / "run")
    assert found.missing is None and found.summary.validation == summary["val_accuracy"] is not None
    assert "the test set stays closed" in (tmp_path / "run" / "report.html").read_text()
    with pytest.raises(SystemExit) as ended:
        main(["resume", str(tmp_path / "run")])
    assert not ended.value.code and "the test set stays closed" in capsys.readouterr().out


def test_closing_the_test_set_changes_nothing_else(tiny, tmp_path):
    both = [run(tiny(f"test={switch}"), tmp_path / switch) for switch in ("true", "false")]
    assert both[0]["test_accuracy"] is not None
    assert both[0]["val_accuracy"] == both[1]["val_accuracy"] and both[0]["val_loss"] == both[1]["val_loss"]
    lines = [
        [json.loads(line) for line in (tmp_path / s / "metrics.jsonl").read_text().splitlines()]
        for s in ("true", "false")
    ]
    timed = ("seconds", "images_per_second")
    assert [{k: v for k, v in row.items() if k not in timed} for row in lines[0]] == [
        {k: v for k, v in row.items() if k not in timed} for row in lines[1]
    ]


def test_a_test_curve_needs_an_open_test_set(tiny):
    with pytest.raises(FedsieveError, match="test_curve tests after every epoch, but test is false"):
        tiny("test=false", "test_curve=true")

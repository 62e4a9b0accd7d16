"""A federated run whose files were damaged, edited or deleted says so, or goes on as if nothing had happened."""

import re
import shutil

import numpy as np
import pytest
from tests.federation.conftest import SPARSE
from tests.federation.test_rounds import Stop, Stopping

from fedsieve import resume, run
from fedsieve.errors import FedsieveError
from fedsieve.report.page import write_report

BLEND = [*SPARSE, "federation.blend=true", "stages.all.rounds=4", "checkpoint.every_seconds=0"]


def stopped(experiment, folder, after=2):
    with pytest.raises(Stop):
        run(experiment, folder, Stopping(after))
    return folder


def message_of(folder):
    with pytest.raises(FedsieveError) as caught:
        resume(folder)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    return str(caught.value)


def test_an_edited_ledger_is_noticed_and_a_restored_one_goes_on(federated, tmp_path):
    folder = stopped(federated(*BLEND), tmp_path / "run")
    ledger = folder / "ledger.csv"
    whole = ledger.read_text()
    for damaged, expected in (
        (
            re.sub(r",up,update,(\d)", lambda found: f",up,update,{(int(found[1]) + 1) % 10}", whole, count=1),
            "not what",
        ),
        (whole.replace("down", "\x00\x00", 1), "is no message"),
        (whole[:50], "are left"),
    ):
        ledger.write_text(damaged)
        assert expected in message_of(folder)
    ledger.write_text(whole)
    assert resume(folder)["rounds"] == 4


def test_a_missing_client_file_is_told_before_anything_is_trained(federated, tmp_path):
    folder = stopped(federated(*BLEND), tmp_path / "run")
    before = (folder / "metrics.jsonl").read_text()
    file = max((folder / "clients").glob("3/*.state"))
    kept = file.read_bytes()
    file.unlink()
    said = message_of(folder)
    assert str(file) in said and "client 3 remembers" in said and "fedsieve run" in said
    assert (folder / "metrics.jsonl").read_text() == before
    file.write_bytes(kept)
    assert resume(folder)["rounds"] == 4


def test_personal_models_do_not_need_the_mask_files(federated, tmp_path, monkeypatch):
    personal = "federation.personal={local: {steps: 1}, batch_size: 16}"
    experiment = federated(*SPARSE, personal, "stages.all.rounds=2")
    whole = run(experiment, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("fedsieve.runner.testing.personal_summary", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(experiment, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "masks")
    assert resume(tmp_path / "cut")["personal"] == whole["personal"]


def test_a_stopped_run_knows_its_clients(federated, tmp_path):
    folder = stopped(federated(*BLEND), tmp_path / "run", 1)
    with np.load(folder / "clients.npz") as file:
        assert np.isnan(file["accuracy"]).all() and file["sizes"].sum() == file["examples"].sum() > 0
    text = write_report(folder).read_text()
    assert "images of each class that each client holds" in text and "test accuracy of each client" not in text
    resume(folder)
    with np.load(folder / "clients.npz") as file:
        assert np.isfinite(file["accuracy"]).all()

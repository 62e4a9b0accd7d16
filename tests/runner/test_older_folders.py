"""Run folders of version 0.1: a finished run, and one that was stopped, as that version left them."""

import zipfile
from pathlib import Path

import pytest

from fedsieve.errors import FedsieveError
from fedsieve.report.folder import read_run
from fedsieve.report.page import write_report
from fedsieve.runner.export import export
from fedsieve.runner.model_files import load_patch
from fedsieve.runner.progress import Display
from fedsieve.runner.run import resume
from fedsieve.runner.testing import evaluate


@pytest.fixture
def folders(tmp_path):
    with zipfile.ZipFile(Path(__file__).parent / "folders-0.1.zip") as file:
        file.extractall(tmp_path)
    return tmp_path


def test_a_finished_run_can_still_be_shown_measured_and_exported(folders):
    folder = folders / "done"
    page, found = write_report(folder).read_text(), read_run(folder)
    assert not found.problems and found.torn is None and "10.03" in page
    assert evaluate(folder, [], None)["accuracy"] == pytest.approx(found.summary.test_accuracy)
    display = Display.silent()
    assert "timm.create_model" in export(folder, folders / "a.safetensors", "whole", None, False, display)
    export(folder, folders / "patch.safetensors", "patch", None, False, display)
    load_patch(folders / "patch.safetensors")  # which checks that it gives the model back to the bit
    assert resume(folder)["test_accuracy"] == found.summary.test_accuracy


def test_an_unfinished_run_is_refused_in_one_sentence_and_left_as_it_is(folders):
    folder = folders / "stopped"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(FedsieveError, match="started by an older version of fedsieve") as caught:
        resume(folder, page=False)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before

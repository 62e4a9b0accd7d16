import json

import numpy as np
import pytest

from fedsieve.errors import FedsieveError
from fedsieve.report.folder import read_run


def test_a_folder_without_config_is_refused_by_name(tmp_path):
    with pytest.raises(FedsieveError, match=r"nothing-here: not a run folder.*config\.yaml"):
        read_run(tmp_path / "nothing-here")


def test_a_config_that_no_longer_holds_is_refused_with_its_place(make_run):
    folder = make_run("run")
    (folder / "config.yaml").write_text("stages: 3\n")
    with pytest.raises(FedsieveError, match=r"config\.yaml"):
        read_run(folder)


def test_a_torn_last_line_is_ignored_and_a_damaged_middle_one_is_named(make_run):
    folder = make_run("run", finished=False)
    whole = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([whole[0], "{torn", "[1]", whole[1], '{"index": 3, "sta']))
    run = read_run(folder)
    assert [row["index"] for row in run.records] == [1, 2]
    assert [problem.split(" is ")[0] for problem in run.problems] == ["metrics.jsonl, line 2", "metrics.jsonl, line 3"]


def test_an_epoch_repeated_by_a_resumed_run_counts_once_as_last_written(make_run):
    folder = make_run("run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"index": 4, "stage": "backbone", "train_loss": 9.0, "drift": 0.1}) + "\n")
    records = read_run(folder).records
    assert [row["index"] for row in records] == [1, 2, 3, 4]
    assert records[-1]["train_loss"] == 9.0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"test_accuracy": "high"}', '{"stages": 3}', "\x00"])
def test_a_damaged_summary_is_a_problem_and_not_a_result(make_run, text):
    folder = make_run("run")
    (folder / "summary.json").write_text(text)
    run = read_run(folder)
    assert run.summary is None
    assert run.problems[0].startswith("summary.json is damaged") and run.missing == run.problems[0]


def test_an_unfinished_run_has_no_problem_but_says_what_is_missing(make_run):
    run = read_run(make_run("run", finished=False))
    assert not run.problems
    assert run.missing == "unfinished: no summary.json yet"


def test_a_summary_with_unknown_fields_is_read(make_run):
    folder = make_run("run")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"bytes_up": 12, "weather": {"round": 3}}))
    run = read_run(folder)
    assert run.summary is not None and run.missing is None
    assert run.chosen("head") == 2 and run.chosen("nowhere") is None


def test_an_epoch_counts_as_chosen_only_where_validation_chose_it(make_run):
    folder = make_run("run", val=False)
    summary = json.loads((folder / "summary.json").read_text())
    summary["stages"]["head"]["best_at"] = 2  # the last epoch, for want of another
    (folder / "summary.json").write_text(json.dumps(summary))
    assert read_run(folder).chosen("head") is None


def _truncate(path):
    path.write_bytes(path.read_bytes()[:200])


def _no_zip(path):
    path.write_bytes(b"not a zip file")


def _change(**changes):
    def damage(path):
        arrays = dict(np.load(path))
        np.savez(path, **(arrays | changes))

    return damage


def _drop(path):
    arrays = dict(np.load(path))
    del arrays["labels"]
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _no_zip,
        _drop,
        _change(labels=np.arange(3)),
        _change(predicted=np.full(20, 3)),
        _change(sample_rows=np.array([0, 1, 20])),
        _change(sample_images=np.zeros((3, 8, 8))),
        _change(class_names=np.array(["a", None, object()])),
    ],
)
def test_damaged_predictions_are_a_problem(make_run, damage):
    folder = make_run("run")
    damage(folder / "predictions.npz")
    run = read_run(folder)
    assert run.predictions is None
    assert len(run.problems) == 1 and run.problems[0].startswith("predictions.npz is damaged")

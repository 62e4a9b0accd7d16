"""Running studies: a miniature of every kind of row, going on after a kill, refusing to mix, and pages of it all."""

import contextlib
import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.console import Console
from sklearn.datasets import load_digits

from fedsieve.campaign import engine
from fedsieve.campaign import study as module
from fedsieve.campaign.definition import STUDIES, load_study
from fedsieve.campaign.engine import CampaignDisplay, claim
from fedsieve.campaign.evidence import read_results
from fedsieve.campaign.study import Grid, begin, run_study, show_study, unsound
from fedsieve.campaign.tables import make_table, markdown, write_study
from fedsieve.cli import main
from fedsieve.errors import FedsieveError
from fedsieve.report.html import flatten
from fedsieve.report.measures import OF_MASKS, OF_RUNS, OF_STAGES, SPREADS, fills
from fedsieve.report.measuring import measure
from fedsieve.report.page import write_report
from fedsieve.report.series import written
from fedsieve.runner.claim import held

SMALL = """
title: small
text: a study of a test
base:
  threads: 1
  data: {source: digits, size: 8, normalize: half, val_fraction: 0.2}
  model: {backbone: vit_tiny_patch16_224, options: {patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}, weights: none}
  stages: [{name: all, train: all, epochs: 1, batch_size: 200, optimizer: {lr: 0.1}}]
rows:
  - {name: a/plain, label: plain}
  - {name: a/tuned, label: tuned, tune: {stages.all.optimizer.lr: [1e-6, 0.1, 1e30]}}
  - {name: a/diverging, label: diverging, set: {stages.all.optimizer.lr: 1e30}, seeds: 1}
sections:
  - title: all of it
    rows: [a/*]
    columns: [test_accuracy, train_accuracy]
    figures: [{kind: dots, title: dots}, {kind: curves, title: curves, y: val_accuracy}]
    claims: [{says: tuned is as good, level: [a/tuned, a/plain], within: 1.0}]
  - title: the rest
    rows: [a/diverging]
    claims: [{says: diverging is no good, above: [a/plain, a/diverging]}]
"""


@pytest.fixture
def small(tmp_path):
    """small(*overrides) -> a study of three rows."""

    def load(*overrides):
        (tmp_path / "small.yaml").write_text(SMALL)
        return load_study("small", overrides, where=tmp_path)

    return load


def run_all(study, out, seeds=2, patterns=()):
    return run_study(study, out, study.select(list(patterns)), seeds, Console(quiet=True))


MEASURES = [*OF_STAGES, *OF_RUNS, *(f"last.{name}" for name in OF_STAGES | OF_MASKS)]
MEASURES += [f"{who}.{name}" for who in ("clients", "personal.local", "personal.head") for name in SPREADS]

# Words that change a formula, and not how a run goes; they are tested where the formula is.
FORMULAS = ("mask.rule", "message.", "federation.server.", "federation.aggregator.", "federation.attack.", "data.")


def kinds(experiment) -> set[tuple[str, str]]:
    """What kind of experiment it is: its settings, numbers and formulas aside, whatever its stages are called."""
    settings = flatten(experiment.model_dump(mode="json", exclude={"name"}))
    named = {re.sub(r"^stages\.[^.]+\.", "stages.", key): value for key, value in settings.items() if key != "stages"}
    return {
        (key, str(value) if isinstance(value, (str, bool)) else type(value).__name__)
        for key, value in named.items()
        if not key.startswith(FORMULAS)
    }


def test_a_miniature_of_every_kind_of_row_runs_and_is_shown(tmp_path):
    """Rows are taken in order while one is of a kind that none before it was."""
    seen: set[tuple[str, str]] = set()
    for name in STUDIES:
        study, chosen = load_study(name, smoke=True), []
        for row in study.rows.values():
            kind = kinds(study.experiment(row, 0))
            if not kind <= seen or not chosen:
                seen |= kind
                chosen.append(row)
        out = tmp_path / name
        if name not in ("drift", "overlap"):  # which have all kinds of figures between them
            begin(study, out)
            Grid(study, out, chosen, 1, Console(quiet=True)).run()
        else:
            page = run_study(study, out, chosen, 1, Console(quiet=True)).read_text()
            assert all(section.title.replace("'", "&#39;") in page for section in study.spec.sections)
            assert "In miniature" in page and "not run" in page and list((out / "figures").glob("*.svg"))
        results = read_results(study, out, chosen, 1).values()
        assert {result.state for result in results} == {"finished"}, name
        for run in (run for result in results for run in result.runs):
            for asked in MEASURES:
                found = measure(run, asked) is not None
                # With differential privacy, nobody may be drawn for the last round, which then has no drift.
                nobody = asked in ("drift", "last.drift") and run.experiment.privacy.dp and not found
                assert nobody or found == fills(run.experiment, asked), (run.path, asked)


def test_a_study_runs_chooses_notes_what_diverged_and_is_not_run_again(small, tmp_path, monkeypatch):
    study, out = small(), tmp_path / "out"
    page = run_all(study, out).read_text()
    results = read_results(study, out, study.select([]), 2)
    assert results["a/plain"].state == "finished" and len(results["a/plain"].runs) == 2
    assert results["a/tuned"].chosen == {"stages.all.optimizer.lr": 0.1}  # 1e30 diverged, 1e-6 learns nothing
    assert (
        results["a/diverging"].state.startswith("seed 0 diverged")
        and results["a/diverging"].mean("test_accuracy") is None
    )
    # The trial that is what the row does anyway is its first seed, to the digit.
    assert results["a/tuned"].by_seed("test_accuracy") == results["a/plain"].by_seed("test_accuracy")
    with (out / "choices.csv").open() as file:
        choices = list(csv.DictReader(file))
    assert [(line["state"], line["chosen"]) for line in choices] == [
        ("finished", "False"), ("finished", "True"), ("diverged", "False"),
    ]  # fmt: skip
    for text in ("<b>1</b> hold", "rate 0.1 of 1e-06, 0.1, 1e+30", "seed 0 diverged", "commit", "plain (", "2 seeds"):
        assert text in page, text
    with (out / "results.csv").open() as file:
        lines = {(line["row"], line["measure"]): line for line in csv.DictReader(file)}
    plain = results["a/plain"]
    assert float(lines["a/plain", "test_accuracy"]["mean"]) == plain.mean("test_accuracy")
    assert lines["a/plain", "test_accuracy"]["seeds"] == "2"
    assert lines["a/diverging", "test_accuracy"]["mean"] == ""
    assert f"| 2 | {written(plain.mean('test_accuracy'), 'test_accuracy')} " in (out / "tables.md").read_text()

    monkeypatch.setattr(engine, "run", lambda *_, **__: pytest.fail("a finished row was run again"))
    monkeypatch.setattr(engine, "resume", lambda *_, **__: pytest.fail("a finished row was run again"))
    run_all(study, out)
    for seed, kept in ((0, True), (1, False)):  # what only going on would need is gone, the page of a row is not
        folder = out / "runs" / "a" / "plain" / f"seed-{seed}"
        assert not list(folder.glob("checkpoints/*.ckpt"))
        assert (folder / "checkpoints" / "final.safetensors").exists() is kept
    assert write_report(out / "runs/a/plain/seed-1").exists()


MISLED = """
title: misled
text: a study whose test set has wrong labels
base:
  data: {source: FOLDER, size: 8, normalize: half, val_fraction: 0.2}
  model: {backbone: vit_tiny_patch16_224, options: {patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}, weights: none}
  stages: [{name: head, train: head, method: ridge}]
rows: [{name: a/tuned, label: tuned, tune: {stages.head.ridge.strength: [1e-3, 1e+9]}}]
sections: [{title: all of it, rows: [a/*]}]
"""


def write_digits(file, rows, shift):
    """Digits with their labels shifted by `shift`."""
    bunch, images = load_digits(), []
    for image in bunch.images[rows]:
        Image.fromarray((image * 15.9).astype("uint8")).save(buffer := io.BytesIO(), "PNG")
        images.append({"bytes": buffer.getvalue(), "path": None})
    pq.write_table(pa.table({"image": images, "label": (bunch.target[rows] + shift) % 10}), file)


def test_settings_are_chosen_on_validation_not_on_the_test_set(tmp_path):
    """The test labels are wrong, so the setting that learns well tests worse than the one that learns nothing."""
    (tmp_path / "data").mkdir()
    write_digits(tmp_path / "data" / "train.parquet", slice(0, 400), 0)
    write_digits(tmp_path / "data" / "test.parquet", slice(400, 600), 1)
    (tmp_path / "misled.yaml").write_text(MISLED.replace("FOLDER", str(tmp_path / "data")))
    study, out = load_study("misled", where=tmp_path), tmp_path / "out"
    run_all(study, out, 1)
    (result,) = read_results(study, out, study.select([]), 1).values()
    learned, nothing = (trial.outcome.run.summary for trial in result.trials)
    assert learned.val_accuracy > nothing.val_accuracy and learned.test_accuracy < nothing.test_accuracy
    assert result.chosen == {"stages.head.ridge.strength": 1e-3}


def test_a_study_goes_on_where_it_was_stopped_to_the_same_numbers(small, tmp_path, monkeypatch):
    study, out = small("stages.all.epochs=3"), tmp_path / "out"
    steps = 0

    def stop(*_):
        nonlocal steps
        steps += 1
        if steps == 30:  # in the second epoch of the second run
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(CampaignDisplay, "step", stop)
        with pytest.raises(FedsieveError, match=r"stopped in a/tuned trying lr 1e-06; nothing is lost") as caught:
            run_all(study, out)
        assert caught.value.exit_code == 130
    assert "not run" in (out / "study.html").read_text()  # the page shows what is there
    unfinished = [folder.parent for folder in out.rglob("config.yaml") if not (folder.parent / "summary.json").exists()]
    assert len(unfinished) == 1 and list(unfinished[0].glob("checkpoints/*.ckpt"))
    run_all(study, out)
    run_all(study, tmp_path / "straight")
    for name, one in read_results(study, out, study.select([]), 2).items():
        other = read_results(study, tmp_path / "straight", [study.rows[name]], 2)[name]
        assert one.by_seed("test_loss") == other.by_seed("test_loss")
        assert [trial.accuracy for trial in one.trials] == [trial.accuracy for trial in other.trials]


def test_a_limit_stops_in_the_middle_and_loses_nothing(small, tmp_path, capsys):
    study, out = small("stages.all.epochs=200"), tmp_path / "out"
    run_study(study, out, study.select(["a/plain"]), 1, Console(), limit=1.0)
    assert "time is up: 0 of 1 runs" in capsys.readouterr().out
    assert list(out.glob("runs/a/plain/seed-0/checkpoints/*.ckpt"))
    assert "seed 0 unfinished" in (out / "study.html").read_text()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_rows_of_two_configs_are_not_mixed(small, tmp_path):
    out = tmp_path / "out"
    run_all(small(), out, seeds=1, patterns=["a/plain"])
    with pytest.raises(FedsieveError, match=r"begun as `fedsieve study small`.*not mixed"):
        run_all(small("data.size=16"), out)
    config = out / "runs/a/plain/seed-0/config.yaml"
    config.write_text(config.read_text().replace("lr: 0.1", "lr: 0.2"))
    with pytest.raises(FedsieveError, match=r"seed-0.*optimizer.lr \(0.2 there, 0.1 here\).*not mixed"):
        run_all(small(), out, seeds=1, patterns=["a/plain"])
    results = read_results(small(), out, small().select(["a/plain"]), 1)
    assert results["a/plain"].mean("test_accuracy") is None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(FedsieveError, match="no study folder"):
        run_all(small(), tmp_path / "other")
    for damage in ("{", '{"study": "small", "overrides": 5, "rates": [], "smoke": false}'):
        (out / "study.json").write_text(damage)
        with pytest.raises(FedsieveError, match=r"study\.json: damaged.*Delete this file"):
            run_all(small(), out)


def test_a_study_goes_on_with_its_words_in_another_order_and_without_its_record(small, tmp_path):
    out, words = tmp_path / "out", ["data.size=16", "threads=1"]
    run_all(small(*words), out, seeds=1, patterns=["a/plain"])
    run_all(small("data.size=8", *reversed(words)), out, seeds=1, patterns=["a/plain"])
    (out / "study.json").unlink()
    (out / "data").mkdir()  # what a whole study leaves of its images
    summary = out / "runs/a/plain/seed-0/summary.json"
    before = summary.stat().st_mtime_ns
    run_all(small(*words), out, seeds=1, patterns=["a/plain"])
    assert summary.stat().st_mtime_ns == before
    (out / "study.json").unlink()
    with pytest.raises(FedsieveError, match=r"data.size \(16 there, 8 here\).*not mixed"):
        run_all(small(), out, seeds=1, patterns=["a/plain"])


@pytest.mark.parametrize("word", ["federation.clientz=3", "federation.clients=abc"])
def test_wrong_words_are_refused_also_where_they_mean_nothing_to_the_chosen_rows(word, tmp_path):
    with pytest.raises(FedsieveError, match=word.partition("=")[0]):
        run_all(load_study("drift", ["data.source=digits", word]), tmp_path / "out", patterns=["table1/head"])
    assert not (tmp_path / "out").exists()


def test_a_damaged_row_is_shown_as_missing_and_run_again(small, tmp_path):
    study, out = small(), tmp_path / "out"
    run_all(study, out, seeds=1, patterns=["a/plain"])
    folder = out / "runs/a/plain/seed-0"
    before = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text("{")
    page = write_study(study, out, 1).read_text()
    assert "Not in the numbers" in page and "seed 0 damaged" in page
    run_all(study, out, seeds=1, patterns=["a/plain"])
    again = json.loads((folder / "summary.json").read_text())
    assert again["test_loss"] == before["test_loss"]
    (folder / "metrics.jsonl").write_text("")
    assert "metrics.jsonl is damaged" in write_study(study, out, 1).read_text()
    assert "Not in the numbers" not in run_all(study, out, seeds=1, patterns=["a/plain"]).read_text()
    (folder / "config.yaml").write_text("")
    with pytest.raises(FedsieveError, match=r"Delete .*seed-0 to run it anew"):
        run_all(study, out, seeds=1, patterns=["a/plain"])
    assert (folder / "summary.json").exists()


def test_runs_that_cannot_go_on_are_named_when_all_others_are_over(small, tmp_path, capsys):
    study, out = small(), tmp_path / "out"
    run_all(study, out, seeds=3, patterns=["a/plain"])
    lost, gone, other = (out / f"runs/a/plain/seed-{seed}" for seed in range(3))
    (lost / "config.yaml").unlink()
    shutil.rmtree(gone)
    gone.write_text("a file")
    (other / "summary.json").write_text("{")
    with pytest.raises(FedsieveError) as stuck:
        run_all(study, out, seeds=3, patterns=["a/plain"])
    assert f"Delete {lost} to run it anew" in str(stuck.value) and f"Delete {gone} to run it anew" in str(stuck.value)
    states = [outcome.state for outcome in read_results(study, out, study.select(["a/plain"]), 3)["a/plain"].outcomes]
    assert states == ["damaged", "damaged", "finished"] and gone.read_text() == "a file"


def test_a_signal_that_went_unheard_between_two_runs_stops_before_the_next(small, tmp_path, monkeypatch):
    study, out = small(), tmp_path / "out"
    do = Grid._do

    def swallow(self, row, seed, size):
        do(self, row, seed, size)
        with contextlib.suppress(BaseException):  # as a destructor does
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    monkeypatch.setattr(Grid, "_do", swallow)
    with pytest.raises(FedsieveError, match="stopped between two runs") as stopped:
        run_all(study, out, seeds=2, patterns=["a/plain"])
    assert stopped.value.exit_code == 130 and not (out / "runs/a/plain/seed-1").exists()


def test_a_damaged_trial_leaves_nothing_chosen_and_is_told(small, tmp_path, capsys):
    study, out = small(), tmp_path / "out"
    run_all(study, out, seeds=1, patterns=["a/tuned"])
    (out / "runs/a/tuned/lr-0.1/seed-0/summary.json").write_text("{")
    assert unsound(out) == 0
    page = write_study(study, out, 1).read_text()
    assert "lr 0.1 damaged" in page and unsound(out) == 1
    assert "True" not in (out / "choices.csv").read_text()


def test_a_damaged_run_that_cannot_go_on_is_run_anew(small, tmp_path, monkeypatch):
    study, out = small(), tmp_path / "out"
    run_all(study, out, seeds=1, patterns=["a/plain"])
    summary = out / "runs/a/plain/seed-0/summary.json"
    before = json.loads(summary.read_text())
    summary.write_text("{")

    def refuse(*_, **__):
        raise FedsieveError("ledger.csv: damaged")

    monkeypatch.setattr(engine, "resume", refuse)
    run_all(study, out, seeds=1, patterns=["a/plain"])
    assert json.loads(summary.read_text())["test_loss"] == before["test_loss"]
    summary.unlink()
    with pytest.raises(
        FedsieveError, match=r"ledger.csv: damaged.*Delete"
    ):  # unfinished, and what it has is not thrown away
        run_all(study, out, seeds=1, patterns=["a/plain"])


def test_rows_sections_and_claims_that_were_not_run_stand_apart(small, tmp_path):
    study, out = small(), tmp_path / "out"
    page = run_all(study, out, seeds=1, patterns=["a/plain"]).read_text()
    tables = (out / "tables.md").read_text()
    first, last = tables.split("## Not run")
    assert "| `a/plain` plain | 1 |" in first and "Not run: `a/tuned`, `a/diverging` (2 rows)" in first
    assert "`a/tuned` tuned" not in tables and "the rest" not in first and "tuned is as good" not in first
    assert "- the rest: `a/diverging` (1 row)" in last and "- tuned is as good" in last
    first, last = page.split('<h2 id="not-run">')
    assert "Not run: tuned; diverging (2 rows)" in first and "the rest" not in first and "tuned is as good" not in first
    assert "the rest" in last and "tuned is as good" in last and "diverging is no good" in last
    # What was begun is never folded away with what was not.
    run_all(study, out, seeds=1, patterns=["a/diverging"])
    tables = (out / "tables.md").read_text()
    assert tables.count("| `a/diverging` diverging | seed 0 diverged") == 2 and "- the rest" not in tables
    assert "Not in the numbers" in (out / "study.html").read_text()


def test_what_does_not_go_with_rows_that_were_not_chosen_does_not_cost_the_page(tmp_path):
    picky = "  - {name: a/slow, label: slow, set: {stages.all.warmup_epochs: 2}}\nsections:"
    (tmp_path / "small.yaml").write_text(SMALL.replace("epochs: 1", "epochs: 3").replace("sections:", picky))
    study = load_study("small", ["stages.all.epochs=1"], where=tmp_path)
    with pytest.raises(FedsieveError, match="warmup_epochs"):
        study.select([])
    page = run_all(study, tmp_path / "out", seeds=1, patterns=["a/plain"]).read_text()
    assert "Not run: tuned; diverging; slow (3 rows)" in page


def test_a_row_of_which_only_trials_ran_says_so(small, tmp_path):
    study, out = small(), tmp_path / "out"
    run_all(study, out, seeds=1, patterns=["a/tuned"])
    shutil.rmtree(out / "runs/a/tuned/lr-1e-06")
    show = read_results(study, out, study.select(["a/tuned"]), 1)
    table = make_table(["test_accuracy"], list(show.values()), "about")
    assert "| `a/tuned` tuned | its settings are not chosen yet |" in markdown(table, differ=True) and not table.idle


def test_tables_say_what_was_not_run(small, tmp_path):
    study = small()
    results = read_results(study, tmp_path, study.select([]), 2)
    table = make_table(["test_accuracy"], list(results.values()), "nothing")
    assert table.shown == [] and table.lines == []
    assert markdown(table, differ=True) == "Not run: `a/plain`, `a/tuned`, `a/diverging` (3 rows).\n\nnothing\n"


def test_without_the_hub_a_study_ends_in_a_line_and_makes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FEDSIEVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert fedsieve("study", "drift", "--out", tmp_path / "out") == 1
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert "the hub cannot be reached" in said and "data.source=FOLDER model.weights=FILE" in said
    assert not (tmp_path / "out").exists()


def fedsieve(*words) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code or 0


def test_the_command_lists_runs_and_shows(tmp_path, capsys):
    assert fedsieve("study", "list") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in STUDIES)
    assert fedsieve("study", "secure", "--list", "--rows", "fedavg/*") == 0
    assert len(capsys.readouterr().out.strip().splitlines()) == 5
    out = tmp_path / "out"
    assert fedsieve("study", "secure", "--smoke", "--rows", "central/dense", "--out", out) == 0
    said = capsys.readouterr().out
    assert "1 of 1" in said and "all done" in said and "study.html" in said
    (out / "study.html").unlink()
    assert fedsieve("study", "secure", "--show", "--out", out) == 0 and (out / "study.html").exists()
    for words, message in (
        (("study", "secur"), 'Did you mean "secure"?'),
        (("study", "secure", "--rates", "fast"), "--rates: fast"),
        (("study", "secure", "--rates", ""), "--rates: "),
        (("study", "secure", "--limit", "nan"), "--limit: nan"),
        (("study", "secure", "--limit", "1e12"), "--limit: 1e+12"),
        (("study", "drift", "--show", "--out", out), "the study secure, not of drift"),
        (("study", "secure", "--show", "--out", tmp_path), "not a study folder"),
        (("study", "secure", "--show", "data.size=9", "--out", out), "was begun as `fedsieve study secure --smoke`"),
        (("study", "secure", "--show", "--rows", "central/*", "--out", out), "leave --rows out"),
        (("study", "secure", "data.sise=3", "--out", tmp_path / "new"), "data.sise"),
    ):
        assert fedsieve(*words) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new").exists()
    shutil.rmtree(out)
    with pytest.raises(FedsieveError):
        show_study("secure", out, 1)


def test_a_run_that_another_process_is_at_is_left_to_it_and_taken_when_it_dies(small, tmp_path, monkeypatch, capsys):
    study, out = small(), tmp_path / "out"
    begin(study, out)
    with contextlib.ExitStack() as elsewhere:
        elsewhere.enter_context(claim(out, out / "runs/a/plain/seed-0"))
        monkeypatch.setattr(module.time, "sleep", lambda _: elsewhere.close())
        run_study(study, out, study.select(["a/plain", "a/diverging"]), 2, Console(width=200))
    told = re.findall(r"(\d) of 3  (\S+ seed \d)", capsys.readouterr().out)
    assert told == [("1", "a/diverging seed 0"), ("2", "a/plain seed 1"), ("3", "a/plain seed 0")]


def test_two_processes_share_the_rows(small, tmp_path):
    small()
    script = f"""
from pathlib import Path
from rich.console import Console
from fedsieve.campaign.definition import load_study
from fedsieve.campaign.study import run_study
study = load_study("small", ["stages.all.epochs=5"], where=Path({str(tmp_path)!r}))
run_study(study, Path({str(tmp_path / "out")!r}), study.select([]), 3, Console(width=200))
"""
    command = [sys.executable, "-c", script]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    done = [re.findall(r" of \d+  (.+?): ", text) for text in printed]
    runs = sorted(done[0] + done[1])
    assert runs == sorted(set(runs)) and len(runs) == 9  # each once; the best of three trials is seed 0
    study = load_study("small", ["stages.all.epochs=5"], where=tmp_path)
    results = read_results(study, tmp_path / "out", study.select([]), 3).values()
    assert [len(result.runs) for result in results] == [3, 3, 0]


@pytest.mark.parametrize("content", [None, "{"])
def test_a_run_that_another_process_works_on_is_left_to_it_and_looked_at_again(small, tmp_path, monkeypatch, content):
    """Someone resumes a run of a study by hand: not begun, or with a damaged summary."""
    study, out = small(), tmp_path / "out"
    folder = out / "runs/a/plain/seed-0"
    folder.mkdir(parents=True)
    if content:
        run_all(study, out, seeds=1, patterns=["a/plain"])
        (folder / "summary.json").write_text(content)
    with contextlib.ExitStack() as other:
        other.enter_context(held(folder))
        (folder / ".config.theirs").touch()

        def wait(seconds):
            other.close()

        monkeypatch.setattr(module.time, "sleep", wait)
        run_all(study, out, seeds=1, patterns=["a/plain"])
    assert read_results(study, out, study.select(["a/plain"]), 1)["a/plain"].state == "finished"
    assert (folder / ".config.theirs").exists()


# --- frontier --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frontier(tmp_path_factory):
    """The rows of a frontier in miniature, and the folder."""
    study, out = load_study("frontier", smoke=True), tmp_path_factory.mktemp("frontier") / "out"
    rows = study.select(["dense", "last_blocks", "shared_int8"])
    run_study(study, out, rows, 1, Console(quiet=True))
    return study, out, read_results(study, out, rows, 1)


def test_costs_until_a_target_are_those_of_the_first_evaluation_that_reached_it(frontier):
    for result in frontier[2].values():
        (run,) = result.runs
        records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        looks = [place for place, record in enumerate(records) if "val_accuracy" in record]
        best = max(looks, key=lambda place: records[place]["val_accuracy"])
        for place in (looks[0], best):
            target = f"{100 * records[place]['val_accuracy'] - 1e-9:.12f}"
            spent = sum(record["seconds"] for record in records[: place + 1] if record["stage"] == "tune")
            assert measure(run, f"seconds_to_{target}") == pytest.approx(spent)
        sent = run.summary.bytes_up + run.summary.bytes_down
        assert measure(run, "bytes_to_0") == run.summary.stages["head"].bytes_up + run.summary.stages["head"].bytes_down
        assert measure(run, "bytes") == sent and measure(run, "bytes_to_100") is None
        updates = [
            message for message in (run.path / "ledger.csv").read_text().splitlines() if ",up,update," in message
        ]
        sizes = [int(line.split(",")[5]) for line in updates if line.startswith("tune,")]
        assert measure(run, "bytes_per_update") == pytest.approx(sum(sizes) / len(sizes))


def test_a_ratio_is_taken_seed_by_seed_and_of_a_row_that_ran(frontier):
    results = frontier[2]
    dense, small = results["dense"], results["shared_int8"]
    assert dense.mean("bytes / dense") == 1.0
    assert small.by_seed("bytes / dense") == {0: small.mean("bytes") / dense.mean("bytes")}
    assert small.mean("bytes / lora") is None and small.mean("bytes_to_100 / dense") is None


def test_a_frontier_draws_accuracy_by_bytes_and_seconds_and_tells_what_a_method_adds(frontier):
    _, out, results = frontier
    assert {"bytes so far", "seconds so far"} == {
        words for file in out.glob("figures/1-*.svg") for words in re.findall(r"\w+ so far", file.read_text())
    }
    page = (out / "tables.md").read_text()
    assert "| gain over the stage before, % |" in page and "Not run: `lora`, `client_masks` (2 rows)" in page
    assert results["dense"].mean("gain") == measure(results["dense"].runs[0], "test_accuracy") - measure(
        results["dense"].runs[0], "head.test_accuracy"
    )


def test_a_frontier_that_is_run_again_takes_its_runs_over_and_others_only_with_their_settings(frontier, monkeypatch):
    study, out, _ = frontier
    monkeypatch.setattr(engine, "run", lambda *_, **__: pytest.fail("a finished row was run again"))
    run_study(study, out, study.select(["dense"]), 1, Console(quiet=True))
    with pytest.raises(FedsieveError, match="begun as `fedsieve study frontier --smoke`"):
        changed = load_study("frontier", ["stages.tune.rounds=6"], smoke=True)
        run_study(changed, out, changed.select(["dense"]), 1, Console(quiet=True))


def test_the_command_runs_a_table_under_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ("study", "secure", "--table", "secure", "--smoke", "--rows", "central/dense")
    assert fedsieve(*words) == 0 and "1 of 1" in capsys.readouterr().out
    out = tmp_path / "runs" / "secure-smoke"
    assert json.loads((out / "study.json").read_text())["overrides"] == []
    assert fedsieve("study", "secure", "--show", "--out", out) == 0
    assert fedsieve("study", "secure", "--table", "secur") == 2
    assert 'Did you mean "secure"? Allowed: secure' in " ".join(capsys.readouterr().err.split())

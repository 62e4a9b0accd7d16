"""Trials are done once each, whoever dies; and the test set stays closed."""

import csv
import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.conftest import TINY

from fedsieve.campaign import engine
from fedsieve.campaign import sweep as module
from fedsieve.campaign.axes import Space
from fedsieve.campaign.engine import best_of
from fedsieve.campaign.sweep import RIVALS, behind, importance, sweep
from fedsieve.cli import main
from fedsieve.config import load_config, to_yaml
from fedsieve.errors import Diverged, FedsieveError, Stopped
from fedsieve.runner.claim import held
from fedsieve.runner.run import run
from fedsieve.runner.setup import Setup

LR, EPOCHS = "stages.backbone.optimizer.lr", "stages.head.epochs"
GRID = [f"{LR}=0.05,0.1,0.2", f"{EPOCHS}=1,2"]
fork = multiprocessing.get_context("fork")


@pytest.fixture
def config(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path / "tiny.yaml"


def pretend(experiment, folder, display=None, **_):
    """A run that leaves what a sweep reads, at once: its accuracy falls with the distance of the rate from 0.1."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(experiment))
    rate = experiment.stages[1].optimizer.lr
    with (folder.parent.parent / "log").open("a") as log:
        log.write(f"{folder.name} {os.getpid()}\n")
    stage = {"val_accuracy": 1 / (1 + abs(rate - 0.1)), "best_at": 1}
    return {"stages": {"backbone": stage}, "seconds": 1.0, "val_images": 100}


@pytest.fixture
def pretended(monkeypatch):
    monkeypatch.setattr(engine, "run", pretend)


def rows(folder):
    with (folder / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def done(folder):
    return [line.split()[0] for line in (folder / "log").read_text().splitlines()]


def test_a_sweep_ends_with_runs_a_table_a_page_and_a_config_and_opens_no_test_set(
    config, tmp_path, monkeypatch, capsys
):
    def opened(_):
        raise AssertionError("the test set was opened")

    monkeypatch.setattr(Setup, "test_feed", opened)
    words = ["sweep", config, "--method", "grid", "--vary", f"{LR}=0.05,1e30", f"{EPOCHS}=1", "--out", tmp_path / "s"]
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert not ended.value.code and "1 complete, 1 diverged" in capsys.readouterr().out
    one, two = rows(tmp_path / "s")
    summary = json.loads((tmp_path / "s" / "trials" / "0000" / "summary.json").read_text())
    assert float(one["val_accuracy"]) == summary["val_accuracy"] and summary["test_accuracy"] is None
    assert two["state"] == "diverged" and "Lower stages.backbone.optimizer.lr" in two["note"]
    page = (tmp_path / "s" / "sweep.html").read_text()
    assert "The test set was not opened" in page and "<script" not in page and 'src="http' not in page
    monkeypatch.undo()
    best = load_config(tmp_path / "s" / "best.yaml")
    assert best == load_config(config, [f"{EPOCHS}=1", f"{LR}=0.05"])
    assert run(best, tmp_path / "again")["val_accuracy"] == summary["val_accuracy"]


def test_processes_share_the_work(config, tmp_path, pretended):
    space = Space(config, [f"{LR}=0.01:0.3:12"], "grid")

    def work():
        time.sleep(0.02)
        sweep(space, tmp_path / "s")

    workers = [fork.Process(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sorted(done(tmp_path / "s")) == [f"{number:04d}" for number in range(12)], "each once"
    found = sweep(space, tmp_path / "s")
    assert [trial.values[LR] for trial in found.trials] == list(space.axes[0].choices)
    assert Counter(trial.state for trial in found.trials) == {"complete": 12} and len(done(tmp_path / "s")) == 12


def test_processes_of_a_bayesian_search_draw_differently(config, tmp_path, pretended):
    space = Space(config, [f"{LR}=log:1e-3:1"], "bayes")
    workers = [fork.Process(target=sweep, args=(space, tmp_path / "s", 12)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    drawn = [row[LR] for row in rows(tmp_path / "s")]
    assert len(drawn) == len(set(drawn)) == 12


def test_what_a_killed_process_left_is_gone_on_with(config, tmp_path):
    """Killed in its second trial, which is taken up from its checkpoint: the same results as without the kill."""
    overrides = ["checkpoint.every_seconds=0", "stages.backbone.epochs=5"]
    space = Space(config, [f"{LR}=0.05,0.2"], "grid", overrides)
    worker = fork.Process(target=sweep, args=(space, tmp_path / "killed"))
    worker.start()
    metrics, patience = tmp_path / "killed" / "trials" / "0001" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3) and time.monotonic() < patience:
        time.sleep(0.005)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(10)
    begun = metrics.read_text().splitlines()[:2]
    assert [row["state"] for row in rows(tmp_path / "killed")] == ["complete"], "only the first was settled"
    said = Console(record=True, width=200)
    sweep(
        Space(config, [f"{LR}=0.05,0.2"], "grid", [*overrides, "checkpoint.keep=3"]), tmp_path / "killed", console=said
    )
    assert load_config(tmp_path / "killed" / "trials" / "0001" / "config.yaml").checkpoint.keep == 3
    sweep(space, tmp_path / "whole")
    assert metrics.read_text().splitlines()[:2] == begun, "seconds included: these epochs were not done again"
    timed = ("seconds",)
    killed, whole = (
        [{key: value for key, value in row.items() if key not in timed} for row in rows(tmp_path / name)]
        for name in ("killed", "whole")
    )
    assert killed == whole and len(whole) == 2
    assert "trial 1, 2 of 2 done" in said.export_text() and "trial 0" not in said.export_text()


def test_failures_belong_to_trials_and_the_world_s_to_nobody(config, tmp_path, monkeypatch):
    ends = [Diverged("too fast"), FedsieveError("cannot be built"), RuntimeError("out of memory\nlong"), None]

    def failing(experiment, folder, display=None, **_):
        if (end := ends[int(folder.name)]) is not None:
            raise end
        return pretend(experiment, folder, display)

    monkeypatch.setattr(engine, "run", failing)
    space = Space(config, [f"{LR}=0.1,0.2,0.3,0.4"], "grid")
    found = sweep(space, tmp_path / "s")
    assert [trial.state for trial in found.trials] == ["diverged", "failed", "failed", "complete"]
    assert [trial.note for trial in found.trials[:3]] == ["too fast", "cannot be built", "RuntimeError: out of memory"]
    assert found.best.number == 3
    assert "Traceback" in (tmp_path / "s" / "trials" / "0002" / "failure.txt").read_text()

    for end in (FedsieveError("the disk is full", 1), Stopped("stopped in stage", 2), OSError(5, "broken")):
        ends[1] = end
        folder = tmp_path / f"world-{type(end).__name__}{getattr(end, 'exit_code', '')}"
        with pytest.raises(type(end)):
            sweep(space, folder)
        assert [row["state"] for row in rows(folder)] == ["diverged"]
        ends[1] = None  # the disk has room again
        assert [trial.state for trial in sweep(space, folder).trials] == ["diverged", "complete", "failed", "complete"]


def test_the_first_of_equally_good_trials_is_the_best(config, tmp_path, pretended):
    """The pretended accuracy depends on the rate only, so both numbers of epochs tie."""
    found = sweep(Space(config, GRID, "grid"), tmp_path / "s")
    equals = [trial for trial in found.trials if trial.accuracy == found.best.accuracy]
    assert len(equals) == 2 and found.best is equals[0]
    assert load_config(tmp_path / "s" / "best.yaml").stages[0].epochs == equals[0].values[EPOCHS]


def test_another_sweep_is_not_mixed_in_but_more_trials_and_other_devices_are(config, tmp_path, pretended, capsys):
    words = ["--method", "bayes", "--trials", "3", "--vary", f"{LR}=log:1e-3:1"]

    def started(*words, code=0):
        with pytest.raises(SystemExit) as ended:
            main(["sweep", str(config), "--out", str(tmp_path / "s"), "--quiet", *words])
        assert (ended.value.code or 0) == code
        return capsys.readouterr().err

    started(*words)
    changed = started(*words, "stages.head.batch_size=100", code=2)
    assert "holds another sweep: stages.head.batch_size is 200 there and 100 here" in changed
    assert "method" in started("--method", "grid", "--vary", f"{LR}=0.1,1", code=2)
    assert f"vary.{LR}" in started("--vary", f"{LR}=log:1e-3:2", code=2)
    assert len(done(tmp_path / "s")) == 3
    started(*words, "--trials", "5", "tracking=[tensorboard]")
    assert done(tmp_path / "s") == [f"{number:04d}" for number in range(5)]


def test_a_folder_of_something_else_and_a_damaged_database_are_told(config, tmp_path, pretended):
    space = Space(config, [f"{LR}=0.1,0.2"], "grid")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(TINY)
    with pytest.raises(FedsieveError, match="holds no sweep"):
        sweep(space, tmp_path / "run")
    sweep(space, tmp_path / "s")
    for name, said in (("sweep.db", "not a database"), ("sweep.json", "damaged")):
        (tmp_path / "s" / name).write_text("nonsense" * 1000)
        with pytest.raises(FedsieveError, match=said):
            sweep(space, tmp_path / "s")


def test_a_database_damaged_in_part_is_told(config, tmp_path, pretended):
    space = Space(config, [f"{LR}=log:1e-3:1"], "bayes")
    sweep(space, tmp_path / "s", 2)
    file = tmp_path / "s" / "sweep.db"
    whole = file.read_bytes()
    for page in range(1, len(whole) // 4096, 3):
        file.write_bytes(whole[: 4096 * page] + b"nonsense" * 512 + whole[4096 * (page + 1) :])
        with pytest.raises(FedsieveError, match=r"not a database that can be read .*fedsieve report"):
            sweep(space, tmp_path / "s", 3)
    file.write_bytes(whole.replace(b"COMPLETE", b"COMPLETF"))  # in order as a file, but no state of a trial
    with pytest.raises(FedsieveError, match="not a database that can be read"):
        sweep(space, tmp_path / "s", 3)
    assert len(done(tmp_path / "s")) == 2


def test_a_database_damaged_meanwhile_is_told(config, tmp_path, monkeypatch):
    def damaging(experiment, folder, display=None, **_):
        (tmp_path / "s" / "sweep.db").write_text("nonsense" * 1000)
        return pretend(experiment, folder, display)

    monkeypatch.setattr(engine, "run", damaging)
    with pytest.raises(FedsieveError, match=r"not a database that can be read .*fedsieve report"):
        sweep(Space(config, [f"{LR}=0.1,0.2"], "grid"), tmp_path / "s")


@pytest.mark.parametrize("name", ["a?z", "a%3Fz", "{a}"])
def test_a_folder_that_a_database_s_address_cannot_name_is_refused(config, tmp_path, pretended, name):
    with pytest.raises(FedsieveError, match="has no . in its name"):
        sweep(Space(config, [f"{LR}=0.1,0.2"], "grid"), tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.yaml"]


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.suffix != ".db"}


@pytest.mark.parametrize("lose", [os.unlink, lambda file: os.truncate(file, 0)])
def test_trials_without_their_database_are_left_alone(config, tmp_path, pretended, lose):
    space = Space(config, [f"{LR}=log:1e-3:1"], "bayes")
    sweep(space, tmp_path / "s", 2)
    before = contents(tmp_path / "s")
    lose(tmp_path / "s" / "sweep.db")
    for _ in range(2):
        with pytest.raises(FedsieveError, match=r"sweep.db: missing or empty.* choose another --out"):
            sweep(space, tmp_path / "s", 2)
    assert contents(tmp_path / "s") == before


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("lr: 0.2", "lr: 0.3", f"{LR} is 0.3 there and 0.2 here"), ("seed:", "sead:", 'Did you mean "seed"')],
)
def test_a_trial_does_not_go_on_with_a_run_of_other_settings(config, tmp_path, pretended, old, new, said):
    space = Space(config, [f"{LR}=0.1,0.2"], "grid")
    sweep(space, tmp_path / "s", 1)
    other = tmp_path / "s" / "trials" / "0001"
    experiment = space.configure({LR: 0.2})
    other.mkdir()
    text = to_yaml(experiment.model_copy(update={"name": f"{experiment.name}-0001"}))
    assert old in text
    (other / "config.yaml").write_text(text.replace(old, new))
    before = contents(tmp_path / "s" / "trials")
    for _ in range(2):
        with pytest.raises(FedsieveError) as error:
            sweep(space, tmp_path / "s")
        assert said in str(error.value) and "Move it elsewhere" in str(error.value) and error.value.exit_code == 1
    assert contents(tmp_path / "s" / "trials") == before and len(rows(tmp_path / "s")) == 1
    other.rename(tmp_path / "elsewhere")
    assert [trial.state for trial in sweep(space, tmp_path / "s").trials] == ["complete"] * 2


def test_a_missing_package_is_named(config, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(FedsieveError, match=r"--extra sweep .*fedsieve\[sweep\]"):
        sweep(Space(config, GRID, "grid"), tmp_path / "s")


def test_a_bayesian_search_finds_what_it_looks_for_tells_why_and_repeats(config, tmp_path, pretended):
    space = Space(config, [f"{LR}=log:1e-3:10", "stages.head.optimizer.lr=log:1e-3:10"], "bayes")
    found = sweep(space, tmp_path / "one", 25)
    assert best_of(found.trials).accuracy > 0.97
    late, early = ([abs(t.values[LR] - 0.1) for t in part] for part in (found.trials[15:], found.trials[:10]))
    assert median(late) < median(early)
    shares = importance(space, found.trials)
    assert shares[LR] > 0.7 > 0.2 > shares["stages.head.optimizer.lr"]
    again = sweep(space, tmp_path / "two", 12)  # two of them past the random ones
    assert [trial.values for trial in again.trials] == [trial.values for trial in found.trials[:12]]


def test_a_bayesian_search_tries_nothing_twice_and_ends_when_all_was_tried(config, tmp_path, pretended):
    found = sweep(Space(config, GRID, "bayes"), tmp_path / "s", 20)
    tried = [tuple(trial.values.values()) for trial in found.trials]
    assert len(tried) == len(set(tried)) <= 6 and len(tried) >= 5


@given(
    st.lists(st.floats(0, 1), max_size=8),
    st.lists(st.lists(st.floats(0, 1), max_size=8), max_size=9),
)
def test_behind_is_below_the_median_of_those_that_came_as_far(own, rivals):
    there = [rival[len(own) - 1] for rival in rivals if own and len(rival) >= len(own)]
    assert behind(own, rivals) == (len(there) >= RIVALS and own[-1] < median(there))


def test_few_rivals_stop_nobody():
    assert behind([0.1], [[0.2]] * RIVALS) and not behind([0.1], [[0.2]] * (RIVALS - 1))
    assert not behind([0.1], [[]] * RIVALS) and not behind([0.2], [[0.2]] * RIVALS) and not behind([], [[0.2]] * RIVALS)


def test_trials_that_fall_behind_are_stopped_and_say_so(config, tmp_path):
    choices = ",".join(f"{{lr: {rate}}}" for rate in (1e-9, 2e-9, 3e-9, 4e-9, 5e-9, 0.1))  # the last unlearns
    overrides = ["stages.backbone.epochs=2", "stages.backbone.train=all", "stages.backbone.batch_size=100"]
    space = Space(config, [f"stages.backbone.optimizer={choices}"], "grid", overrides)
    found = sweep(space, tmp_path / "s", prune=True)
    assert [trial.state for trial in found.trials] == ["complete"] * 5 + ["stopped"]
    assert found.trials[5].accuracy is not None and not (found.trials[5].folder / "summary.json").exists()
    assert "stopped early" in found.page.read_text()


def test_a_trial_that_is_a_run_of_another_process_is_left_to_it_and_not_counted_as_failed(config, tmp_path):
    space, folder = Space(config, [f"{EPOCHS}=1,2"], "grid"), tmp_path / "sweep"
    search = module.Search(space, folder, None, False, Console(quiet=True))
    search.path(0).mkdir(parents=True)
    with held(search.path(0)), pytest.raises(FedsieveError, match="another process is working on this run"):
        sweep(space, folder)
    assert {trial.state for trial in sweep(space, folder).trials} == {"complete"}

import sys
from pathlib import Path
from typing import Any

import pytest

from fedsieve.config import Experiment, Stage, TrackerChoice
from fedsieve.errors import FedsieveError
from fedsieve.runner.tracking import Tracker, make_trackers

EXPERIMENT = Experiment(name="trial", stages=[Stage(name="head", epochs=1), Stage(name="backbone", epochs=1)])
RECORDS = [
    {"index": 1, "stage": "head", "epoch": 1, "loss": 0.5, "best": True, "note": "text", "none": None},
    {"index": 2, "stage": "head", "epoch": 2, "loss": 0.25},
    {"index": 3, "stage": "backbone", "round": 1, "loss": 0.125, "seconds": 2, "refused": {"too few replies": 2}}
    | {"drift_by_block": {"blocks.0": 0.5, "norm": None}},
]
SUMMARY = {"accuracy": 0.75, "steps": 3, "finished": True, "model": "vit"}
POINTS = {
    "head/epoch": [(1, 1), (2, 2)],
    "head/loss": [(1, 0.5), (2, 0.25)],
    "backbone/round": [(3, 1)],
    "backbone/loss": [(3, 0.125)],
    "backbone/seconds": [(3, 2)],
    "backbone/refused/too few replies": [(3, 2)],
    "backbone/drift_by_block/blocks.0": [(3, 0.5)],
}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def track(name: str, folder: Path, history: list[dict[str, Any]], new: list[dict[str, Any]], summary: Any) -> None:
    """One session of a run, with no guard so that a failure fails the test."""
    tracker = TrackerChoice.of(name).made()
    tracker.start(folder, EXPERIMENT, history)
    for record in new:
        tracker.log(record)
    tracker.finish(summary)


def run_and_resume(name: str, folder: Path) -> None:
    """Two records seen, the second one lost by a kill and so repeated after the resume."""
    track(name, folder, [], RECORDS[:2], None)
    track(name, folder, RECORDS[:1], RECORDS[1:], SUMMARY)


def test_tensorboard_shows_each_point_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_and_resume("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert shown == POINTS | {"summary/accuracy": [(3, 0.75)], "summary/steps": [(3, 3)]}


def test_tensorboard_leaves_other_files_alone(tmp_path: Path) -> None:
    other = tmp_path / "tensorboard" / "notes.txt"
    other.parent.mkdir()
    other.write_text("mine")
    track("tensorboard", tmp_path, [], RECORDS, SUMMARY)
    assert other.read_text() == "mine"


def wandb_records(file: Path) -> list[Any]:
    """The protobuf records of an offline W&B log: a 7 byte header, then LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts, records = file.read_bytes(), 7, b"", []
    while position < len(content):
        if 32768 - position % 32768 < 7:  # too little of a block left for a header
            position += 32768 - position % 32768
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(parts))
            parts = b""
    return records


def test_wandb_is_offline_without_a_key_and_holds_each_point_once_after_a_resume(tmp_path: Path) -> None:
    import wandb

    run_and_resume("wandb", tmp_path)
    wandb.teardown()  # a run is finished a few milliseconds before its file is: wait for the writing process
    (log,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert log.stem == "run-" + (tmp_path / "wandb" / "run_id").read_text()
    shown: dict[str, list[tuple[int, float]]] = {}
    summary: dict[str, str] = {}
    for record in wandb_records(log):
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                shown.setdefault(name, []).append((record.history.step.num, float(item.value_json)))
        summary |= {item.key or "/".join(item.nested_key): item.value_json for item in record.summary.update}
    assert shown == POINTS
    assert float(summary["accuracy"]) == 0.75 and "model" not in summary


def test_wandb_goes_online_where_a_key_is_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wandb

    asked: list[dict[str, Any]] = []
    logged: list[int] = []

    class Run:
        step = 2  # what the server has

        def log(self, data: dict[str, float], step: int, commit: bool) -> None:
            logged.append(step)

    def init(**arguments: Any) -> Run:
        asked.append(arguments)
        return Run()

    monkeypatch.setattr(wandb, "init", init)
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {'a' * 40}\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    for _ in range(2):
        tracker = TrackerChoice.of("wandb").made()
        tracker.start(tmp_path, EXPERIMENT, RECORDS[:2])
        tracker.log(RECORDS[2])
    monkeypatch.setenv("WANDB_MODE", "offline")
    TrackerChoice.of("wandb").made().start(tmp_path, EXPERIMENT, [])
    assert [arguments["mode"] for arguments in asked] == ["online", "online", "offline"]
    assert len({arguments["id"] for arguments in asked}) == 1
    assert logged == [2, 3, 2, 3], "the point at step 1 is there already"


def test_mlflow_holds_each_point_once_after_a_resume(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    run_and_resume("mlflow", tmp_path)
    client = MlflowClient((tmp_path / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("fedsieve").experiment_id])
    shown = {
        name: sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))
        for name in run.data.metrics
    }
    assert shown == POINTS | {"summary/accuracy": [(3, 0.75)], "summary/steps": [(3, 3)]}
    assert run.info.status == "FINISHED" and run.info.run_name == "trial"
    assert run.data.params["stages.1.name"] == "backbone"


def test_mlflow_begins_anew_on_another_server_with_the_whole_history(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    track("mlflow", tmp_path, [], RECORDS[:2], None)
    uri = (tmp_path / "elsewhere").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    # More metrics and parameters than MLflow takes in one call.
    history = [{"index": index, "stage": "head", "epoch": index, "loss": 1.0} for index in range(1, 601)]
    tracker = TrackerChoice.of("mlflow").made()
    tracker.start(tmp_path, Experiment(stages=[Stage(name=f"s{i}", epochs=1) for i in range(20)]), history)
    tracker.finish(None)
    run = MlflowClient(uri).get_run((tmp_path / "mlflow" / "run_id").read_text())
    assert len(MlflowClient(uri).get_metric_history(run.info.run_id, "head/loss")) == 600
    assert run.info.status == "KILLED" and len(run.data.params) > 200


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FedsieveError, match=rf"--extra {name} .*fedsieve\[{name}\]"):
        make_trackers([TrackerChoice.of("tensorboard"), TrackerChoice.of(name)])


def test_a_failing_tracker_warns_once_and_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    class Failing:
        def start(self, folder: Path, experiment: Experiment, history: list[dict[str, Any]]) -> None:
            calls.append("start")

        def log(self, record: dict[str, Any]) -> None:
            calls.append("log")
            raise ConnectionError("no route\nto host")

        def finish(self, summary: dict[str, Any] | None) -> None:
            calls.append("finish")

    monkeypatch.setattr(TrackerChoice.words["wandb"], "home", Failing)
    trackers: list[Tracker] = make_trackers([TrackerChoice.of("wandb"), TrackerChoice.of("tensorboard")])
    for tracker in trackers:
        tracker.start(tmp_path, EXPERIMENT, [])
    for record in RECORDS:
        for tracker in trackers:
            tracker.log(record)
    for tracker in trackers:
        tracker.finish(None)
    assert calls == ["start", "log"]
    printed = capsys.readouterr()
    assert printed.err == "warning: wandb is off for the rest of this run: ConnectionError: no route to host\n"
    assert printed.out == ""
    assert list((tmp_path / "tensorboard").iterdir()), "the other trackers go on"


def test_no_tracker_is_imported_before_it_is_used() -> None:
    import subprocess

    code = "import sys, fedsieve.runner.tracking as t; w = t.TrackerChoice.words; t.make_trackers([c() for c in w.values()]); print({*w} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

"""Trackers: the records of metrics.jsonl, shown in TensorBoard, Weights & Biases or MLflow.

metrics.jsonl stays the truth. A resumed run hands over what the file already holds, and every tracker then ends up
with each point once. A tracker that fails is switched off with a warning: training goes on without it.
"""

import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from fedsieve.config import Experiment, TrackerChoice, to_yaml
from fedsieve.errors import FedsieveError, with_extra
from fedsieve.files import write_atomic

Record = dict[str, Any]


class Tracker(Protocol):
    """A record is {"index": count from 1, "stage": name, "epoch" or "round": number, and what was measured}."""

    def start(self, folder: Path, experiment: Experiment, history: list[Record]) -> None:
        """Begin, or go on with, the run in `folder`; `history` holds its records so far."""

    def log(self, record: Record) -> None:
        """Show the numbers of a record as `<stage>/<field>` at step `index`."""

    def finish(self, summary: Record | None) -> None:
        """End with the numbers of the summary, or with None when the run was interrupted."""


def make_trackers(words: Iterable[TrackerChoice]) -> list[Tracker]:
    """The chosen trackers; a package that is not installed is refused here, before any work."""
    trackers: list[Tracker] = []
    for word in words:
        name = word.kind
        if not word.foreign and find_spec(name) is None:
            how = "`pip install tensorboard`" if name == "tensorboard" else with_extra(name)
            raise FedsieveError(
                f'tracking: "{name}" needs a package that is not installed. Run {how}; or take {name} out of tracking'
            )
        trackers.append(_Guarded(name, word.made()))
    return trackers


class TensorBoardTracker:
    """Event files in `tensorboard/`, written afresh from the history when a run resumes."""

    def __init__(self) -> None:
        self.step = 0  # the last one that was shown
        self.writer: Any = None  # of event files

    def start(self, folder: Path, experiment: Experiment, history: list[Record]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for old in (folder / "tensorboard").glob("events.out.tfevents.*"):
            old.unlink()
        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("experiment", f"```yaml\n{to_yaml(experiment)}```")
        for record in history:
            self._add(record["index"], _scalars(record))
        self.writer.flush()

    def log(self, record: Record) -> None:
        self._add(record["index"], _scalars(record))
        self.writer.flush()

    def finish(self, summary: Record | None) -> None:
        self._add(self.step, _numbers(summary or {}, "summary/"))
        self.writer.close()

    def _add(self, step: int, scalars: dict[str, float]) -> None:
        self.step = step
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)


class WandbTracker:
    """One W&B run per run folder; offline, for a later `wandb sync`, unless WANDB_MODE or an API key says otherwise."""

    def __init__(self) -> None:
        self.run: Any = None  # W&B's
        self.first = 0  # the first step that W&B takes

    def start(self, folder: Path, experiment: Experiment, history: list[Record]) -> None:
        import wandb

        file = folder / "wandb" / "run_id"
        if not file.exists():
            write_atomic(file, secrets.token_hex(8))
        run_id, mode = file.read_text(), _wandb_mode()
        if mode == "offline":
            # An offline session cannot see the earlier ones, so it replaces them and starts from the whole history.
            for old in file.parent.glob(f"offline-run-*-{run_id}"):
                shutil.rmtree(old, ignore_errors=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedsieve"),
            name=experiment.name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            mode=mode,
            config=experiment.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=mode == "offline"),
        )
        # W&B drops what comes before its own step; the same numbers are there already.
        self.first = self.run.step
        for record in history:
            self.log(record)

    def log(self, record: Record) -> None:
        if record["index"] >= self.first:
            self.run.log(_scalars(record), step=record["index"], commit=True)

    def finish(self, summary: Record | None) -> None:
        self.run.summary.update(_numbers(summary or {}))
        self.run.finish(exit_code=1 if summary is None else 0)


class MLflowTracker:
    """One MLflow run per run folder, at MLFLOW_TRACKING_URI or in files under `mlflow/`."""

    def __init__(self) -> None:
        self.client: Any = None  # MLflow's
        self.run_id = ""
        self.sent = set[tuple[str, int]]()  # points that MLflow has: the name of a metric, and a step
        self.step = 0  # the last one that was sent

    def start(self, folder: Path, experiment: Experiment, history: list[Record]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # A database needs packages that mlflow-skinny leaves out; files need MLflow's leave.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        file = folder / "mlflow" / "run_id"
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or file.parent.resolve().as_uri())
        try:
            run = self.client.get_run(file.read_text())
        except FileNotFoundError:
            run = self._create(experiment)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            run = self._create(experiment)  # the run began on another server
        self.run_id = run.info.run_id
        write_atomic(file, self.run_id)
        self.client.update_run(self.run_id, status="RUNNING")
        self.sent = {
            (name, point.step)
            for name in run.data.metrics
            for point in self.client.get_metric_history(self.run_id, name)
        }
        self._send((record["index"], _scalars(record)) for record in history)

    def log(self, record: Record) -> None:
        self._send([(record["index"], _scalars(record))])

    def finish(self, summary: Record | None) -> None:
        self._send([(self.step, _numbers(summary or {}, "summary/"))])
        self.client.set_terminated(self.run_id, "KILLED" if summary is None else "FINISHED")

    def _create(self, experiment: Experiment) -> Any:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedsieve")
        found = self.client.get_experiment_by_name(name)
        run = self.client.create_run(
            found.experiment_id if found else self.client.create_experiment(name), run_name=experiment.name
        )
        params = (Param(key, str(value)) for key, value in _leaves(experiment.model_dump(mode="json")))
        for batch in _batches(params, 100):  # the most MLflow takes at once
            self.client.log_batch(run.info.run_id, params=batch)
        return run

    def _send(self, points: Iterable[tuple[int, dict[str, float]]]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = []
        for step, scalars in points:
            self.step = step
            new = {name: value for name, value in scalars.items() if (name, step) not in self.sent}
            metrics += [Metric(name, value, now, step) for name, value in new.items()]
            self.sent.update((name, step) for name in new)
        for batch in _batches(metrics, 1000):
            self.client.log_batch(self.run_id, metrics=batch)


class _Guarded:
    """Switches a tracker off after its first failure, with one line of warning."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.tracker: Tracker | None = tracker

    def start(self, folder: Path, experiment: Experiment, history: list[Record]) -> None:
        self._call("start", folder, experiment, history)

    def log(self, record: Record) -> None:
        self._call("log", record)

    def finish(self, summary: Record | None) -> None:
        self._call("finish", summary)

    def _call(self, verb: str, *arguments: Any) -> None:
        if self.tracker is None:
            return
        try:
            getattr(self.tracker, verb)(*arguments)
        except Exception as error:
            self.tracker = None
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"warning: {self.name} is off for the rest of this run: {reason}", file=sys.stderr)


def _numbers(record: Record, prefix: str = "") -> dict[str, float]:
    """The numbers of a record, those in a mapping under its name: `drift_by_block/blocks.3`."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            numbers |= _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, Real) and not isinstance(value, bool):
            numbers[prefix + name] = float(value)
    return numbers


def _scalars(record: Record) -> dict[str, float]:
    return _numbers({name: value for name, value in record.items() if name != "index"}, f"{record['stage']}/")


def _wandb_mode() -> Any:
    """WANDB_MODE, else online where there is a key: without one wandb would stop to ask for it."""
    import wandb
    from requests.utils import get_netrc_auth

    if mode := os.environ.get("WANDB_MODE"):
        return mode
    settings = wandb.setup().settings
    known = (
        settings.api_key
        or os.environ.get("WANDB_API_KEY")
        or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
        or get_netrc_auth(settings.base_url)
        or get_netrc_auth("https://api.wandb.ai")  # keys from before the service moved are still taken
    )
    return "online" if known else "offline"


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in nested mappings and lists."""
    if isinstance(tree, dict | list) and tree:
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch

"""A run folder while a process works in it: the metrics, the checkpoints, and what must not change before a resume."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fedsieve.config import Experiment
from fedsieve.errors import FedsieveError
from fedsieve.federation.state import ServerState
from fedsieve.files import write_atomic
from fedsieve.report.summary import StageSummary, Summary
from fedsieve.runner.checkpoint import list_checkpoints, load_newest, read_checkpoint, save_checkpoint
from fedsieve.runner.tracking import Tracker
from fedsieve.train.loop import StageState
from fedsieve.train.record import Record

FORMAT = 2  # of the numbers in a checkpoint
METRICS = "metrics.jsonl"


@dataclass
class RunState:
    """The progress of a run. A checkpoint holds all of it."""

    ticks: int = 0  # steps of all stages: the number of the next checkpoint
    seconds: float = 0.0  # of all processes that worked on the run, up to the last checkpoint
    lines: list[str] = field(default_factory=list)  # of metrics.jsonl
    finished: dict[str, StageSummary] = field(default_factory=dict)  # a summary of every stage that is over,
    chosen: list[Tensor] = field(default_factory=list)  # its chosen weights,
    masks: list[Tensor] = field(default_factory=list)  # and the bits of a federation's mask; empty without one
    stage: StageState | ServerState | None = None  # of the stage under way
    federation: dict[str, Any] = field(default_factory=dict)  # ledger, memory and privacy account

    def numbers(self) -> dict[str, Any]:
        """Everything but the tensors."""
        return {
            "format": FORMAT,
            "ticks": self.ticks,
            "seconds": self.seconds,
            "lines": self.lines,
            "finished": {name: summary.content() for name, summary in self.finished.items()},
            "stage": self.stage.numbers() if self.stage else None,
            "federation": self.federation,
        }

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by names that `restore` understands."""
        tensors = {f"chosen.{number}": tensor for number, tensor in enumerate(self.chosen)}
        tensors |= {f"mask.{number}": bits for number, bits in enumerate(self.masks)}
        if self.stage:
            tensors |= {f"stage.{name}": tensor for name, tensor in self.stage.tensors().items()}
        return tensors

    @classmethod
    def restore(
        cls,
        numbers: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        kind: type[StageState] | type[ServerState],
        device: torch.device,
    ) -> "RunState":
        """The state that gave these `numbers()` and `tensors()`; a stage under way has a state of this `kind`."""
        finished = {name: StageSummary(**content) for name, content in numbers["finished"].items()}
        count, stage = range(len(finished)), None
        if numbers["stage"]:
            own = {name.removeprefix("stage."): one for name, one in tensors.items() if name.startswith("stage.")}
            stage = kind.restore(numbers["stage"], own, device)
        return cls(
            ticks=numbers["ticks"],
            seconds=numbers["seconds"],
            lines=numbers["lines"],
            finished=finished,
            chosen=[tensors[f"chosen.{number}"].to(device) for number in count],
            masks=[tensors[f"mask.{number}"] for number in count],
            stage=stage,
            federation=numbers["federation"],
        )


class Journal:
    """Keeps the metrics and checkpoints of one run."""

    def __init__(self, folder: Path, experiment: Experiment, say: Callable[[str], None]) -> None:
        self.folder, self.experiment, self.settings, self.say = folder, experiment, experiment.checkpoint, say
        self.state = RunState()
        self.marks: dict[str, str] = {}  # digests of what must be the same when the run is resumed
        self._clock = time.perf_counter()  # of the last checkpoint
        self._metrics: BinaryIO | None = None
        self._trackers: list[Tracker] = []
        self._summary: dict[str, Any] | None = None  # None until the run is over

    # --- the beginning -----------------------------------------------------------------------------------------------

    def restore(self, marks: dict[str, str], device: torch.device) -> None:
        """Take up the newest checkpoint that is intact, if there is one, and refuse one of other `marks`."""
        self.marks = marks
        if (saved := load_newest(self.folder / "checkpoints", self.say)) is None:
            return
        numbers, tensors = saved
        if (saved_as := numbers.get("format", 1)) != FORMAT:
            age = "an older" if saved_as < FORMAT else "a newer"
            raise FedsieveError(
                f"{self.folder}: this run was started by {age} version of fedsieve. Resume it with that version, or start a "
                "new run"
            )
        for key, mark in marks.items():
            if numbers["marks"].get(key) != mark:
                raise FedsieveError(
                    f"{self.folder}: {key} is not what this run began with: its content has changed. Put the original "
                    "back, or start a new run"
                )
        central = self.experiment.federation is None
        self.state = RunState.restore(numbers, tensors, StageState if central else ServerState, device)
        state, unit = self.state.stage, "epoch" if central else "round"
        where = f"{unit} {state.length + 1} of stage" if state else "the end of stage"
        name = self.experiment.stages[len(self.state.finished) - (state is None)].name
        self.say(f"resuming at {where} {name}, step {self.state.ticks:,}")

    @contextlib.contextmanager
    def open(self, trackers: list[Tracker]) -> Iterator[None]:
        """Bring the metrics back to what the checkpoint knows, and write to them and to `trackers` from here on."""
        file = self.folder / METRICS
        restore_metrics(file, self.state.lines, self.say)
        history = [json.loads(line) for line in self.state.lines]
        with file.open("ab") as self._metrics:
            for tracker in trackers:
                tracker.start(self.folder, self.experiment, history)
            self._trackers = trackers
            try:
                yield
            finally:
                for tracker in trackers:
                    tracker.finish(self._summary)

    def finish(self, summary: Summary) -> None:
        """Write how the run ended."""
        summary.write(self.folder)
        self._summary = summary.content()

    # --- while training ----------------------------------------------------------------------------------------------

    def write(self, record: Record) -> None:
        """Add a record to the metrics."""
        assert self._metrics is not None
        record.index = len(self.state.lines) + 1
        line = record.line()
        self.state.lines.append(line)
        self._metrics.write(line.encode())
        self._metrics.flush()
        for tracker in self._trackers:
            tracker.log(dict(record))

    @property
    def due(self) -> bool:
        """True when it is time for a checkpoint."""
        return time.perf_counter() - self._clock >= self.settings.every_seconds

    @property
    def seconds(self) -> float:
        """The seconds that all processes worked on the run."""
        return self.state.seconds + time.perf_counter() - self._clock

    def save(self) -> None:
        """Write a checkpoint."""
        assert self._metrics is not None
        os.fsync(self._metrics.fileno())  # the checkpoint has these lines too
        state = self.state
        state.seconds, self._clock = self.seconds, time.perf_counter()
        numbers = state.numbers() | {"marks": self.marks}
        save_checkpoint(self.folder / "checkpoints", state.ticks, numbers, state.tensors(), self.settings.keep)


def restore_metrics(file: Path, lines: list[str], say: Callable[[str], None]) -> None:
    """Bring a metrics file back to the lines that a checkpoint knows; what was written after them is written again.

    A damaged file costs nothing: the checkpoint has a copy of it.
    """
    content = "".join(lines).encode()
    try:
        there = file.read_bytes()
    except FileNotFoundError:
        there = b""
    if there == content:
        return
    if not there.startswith(content):
        say(f"{file} was changed or cut. It is restored from the checkpoint")
    write_atomic(file, content)


def restore_finished(folder: Path, stages: Collection[str], say: Callable[[str], None]) -> None:
    """Bring the metrics of a run with these `stages`, all finished, back to what its last checkpoint knows."""
    for path in list_checkpoints(folder / "checkpoints")[-1:]:
        with contextlib.suppress(ValueError):  # a damaged checkpoint knows nothing
            numbers, _ = read_checkpoint(path)
            if numbers.get("format") == FORMAT and numbers["finished"].keys() == {*stages}:
                restore_metrics(folder / METRICS, numbers["lines"], say)

"""A campaign: many runs in one folder, which several processes may share, and each of which may be killed at any moment.

A run belongs to the process that holds its claim, a file lock that dies with the process. So what a dead process left is found,
and continued, by whoever comes next. What became of a run is read from its folder, and a run of another config is never mixed in.
"""

import contextlib
import csv
import fcntl
import gc
import io
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import torch
from rich.console import Console

from fedsieve.campaign.axes import label
from fedsieve.config import Experiment, load_config, to_yaml
from fedsieve.errors import Diverged, FedsieveError, Stopped
from fedsieve.files import write_atomic, write_json
from fedsieve.report.folder import RunFolder, read_run
from fedsieve.report.html import duration, flatten
from fedsieve.runner.claim import Busy, is_free
from fedsieve.runner.model_files import read_experiment
from fedsieve.runner.progress import Display
from fedsieve.runner.run import Signals, resume, run, stop_signals
from fedsieve.runner.run_cache import RunCache
from fedsieve.train.loop import Tick

T = TypeVar("T", bound=Any)
State = Literal["finished", "diverged", "not run", "unfinished", "damaged", "another config"]
FAILED = "failed.json"  # in the folder of a run that diverged
# What may differ between the processes of one campaign: where runs are computed, logged, cached, saved, and if tested.
INCIDENTAL = ("device.", "tracking.", "checkpoint.", "data.cache.", "data.placement.", "test.")


@dataclass(frozen=True)
class Attempt:
    """One run of a campaign."""

    name: str
    folder: Path
    experiment: Experiment
    cost: float = 1.0  # relative to the others'


@dataclass(frozen=True)
class Outcome:
    """One run as it is found in its folder."""

    folder: Path
    seed: int
    state: State
    reason: str = ""
    run: RunFolder | None = None

    @property
    def over(self) -> bool:
        return self.state in ("finished", "diverged")


class Stuck(FedsieveError):
    """A run that can neither be continued nor repeated: what lies there is not the campaign's to delete."""


def best_of(candidates: Iterable[T]) -> T | None:
    """The first of those with the best `score`, None where that is None for all."""
    return max((one for one in candidates if one.score is not None), key=lambda one: one.score, default=None)


def read_outcome(folder: Path, experiment: Experiment) -> Outcome:
    """Look at the place of a run of `experiment`."""

    def found(state: State, reason: str = "", run: RunFolder | None = None) -> Outcome:
        return Outcome(folder, experiment.seed, state, reason, run)

    if folder.exists() and not folder.is_dir():
        return found("damaged", "a file lies where the run's folder belongs")
    if not (folder / "config.yaml").exists():
        ended = (folder / "summary.json").exists()
        return found("damaged", "config.yaml is gone") if ended else found("not run")
    try:
        if changed := changed_settings(folder, experiment):
            words = (f"{key} ({there} there, {here} here)" for key, (there, here) in changed.items())
            return found("another config", f"differs in {', '.join(words)}")
        if (folder / FAILED).exists():
            return found("diverged", _read_failed(folder / FAILED))
        there = read_run(folder)
    except (FedsieveError, OSError, ValueError, KeyError, TypeError) as error:
        return found("damaged", str(error).splitlines()[0])
    if there.missing:
        return found("unfinished" if there.missing.startswith("unfinished") else "damaged", there.missing)
    return found("damaged", there.torn) if there.torn else found("finished", run=there)


def _read_failed(file: Path) -> str:
    try:
        return str(json.loads(file.read_text())["reason"])
    except (ValueError, KeyError, TypeError):
        raise FedsieveError(f"{file.name} is damaged") from None


def changed_settings(folder: Path, experiment: Experiment) -> dict[str, tuple[str, str]]:
    """The settings, by dotted path with their two values, in which a run folder's config is not that of `experiment`."""
    if (folder / "config.yaml").read_text(encoding="utf-8", errors="replace") == to_yaml(experiment):
        return {}
    return differences(load_config(folder / "config.yaml").model_dump(mode="json"), experiment.model_dump(mode="json"))


def differences(was: Any, now: Any) -> dict[str, tuple[str, str]]:
    """The settings that matter, by dotted path with their two values, in which two experiments or campaigns differ."""
    was, now = flatten(was), flatten(now)
    changed = (key for key in was | now if was.get(key, ...) != now.get(key, ...))
    both = {key: tuple(label(side[key]) if key in side else "absent" for side in (was, now)) for key in changed}
    named = ((key.removeprefix("config."), values) for key, values in both.items())
    return {key: (there, here) for key, (there, here) in named if not f"{key}.".startswith(INCIDENTAL)}


def is_foreign(folder: Path, record: str, known: Collection[str] = ()) -> bool:
    """True for a folder without a record that holds more than a campaign's own files."""
    if (folder / record).exists() or not folder.exists():
        return False
    return not folder.is_dir() or bool({path.name for path in folder.glob("[!.]*")} - {*known})


class Campaign:
    """One process's work on the runs of a folder."""

    def __init__(self, folder: Path, display: "CampaignDisplay", page: bool) -> None:
        self.folder, self.display, self.page, self.cache = folder, display, page, RunCache()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process changes what the runs have in common."""
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def carry_out(self, attempt: Attempt, state: State) -> dict[str, Any]:
        """Run an attempt that this process has claimed, from its start or from where it was left; gives its summary."""
        folder, experiment = attempt.folder, attempt.experiment
        self.display.name = attempt.name
        try:
            if state == "not run":
                if not is_free(folder):
                    shutil.rmtree(folder, ignore_errors=True)  # without a config, nothing says what it was
                return run(experiment, folder, self.display, page=self.page, cache=self.cache)
            return self._continue(experiment, folder, state)
        except Diverged as error:
            write_json(folder / FAILED, {"reason": str(error)})
            raise
        except Stopped as error:
            words = f"stopped in {attempt.name}; nothing is lost. The same command goes on from here"
            raise Stopped(words, error.signal) from None
        finally:
            self.display.name = ""
            if torch.cuda.is_initialized():
                gc.collect()  # a network in a cycle of references would hold on to the device's memory

    def _continue(self, experiment: Experiment, folder: Path, state: State) -> dict[str, Any]:
        """Continue a run; a damaged one that cannot go on is repeated."""
        try:
            there = read_experiment(folder)
        except FedsieveError as error:  # nothing says what ran here
            raise Stuck(str(error)) from None
        if there != experiment:  # on another device now, perhaps
            write_atomic(folder / "config.yaml", to_yaml(experiment))
        if state == "damaged":
            for file in ("summary.json", FAILED):
                (folder / file).unlink(missing_ok=True)  # it says that all is over, and is wrong
        try:
            return resume(folder, self.display, page=self.page, cache=self.cache)
        except (Busy, Diverged, Stopped):
            raise
        except FedsieveError:
            if state != "damaged":
                raise
            shutil.rmtree(folder)
            return run(experiment, folder, self.display, page=self.page, cache=self.cache)


def claim(root: Path, folder: Path) -> IO[str]:
    """Keep other processes off a run until the file is closed. A process that dies lets go of its claim."""
    file = root / ".claims" / "~".join(folder.relative_to(root).parts)
    file.parent.mkdir(exist_ok=True)
    lock = file.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise Busy(f"{folder}: another process is working on this run") from None
    return lock


def slim(folder: Path, weights: bool = True, masks: bool = True) -> None:
    """Delete from a finished run what only going on would need and, unless asked to keep them, its weights and clients' masks."""
    shutil.rmtree(folder / "clients", ignore_errors=True)
    patterns = ["checkpoints/*.ckpt"]
    patterns += [] if weights else ["checkpoints/*.safetensors"]
    patterns += [] if masks else ["masks/*.client-*.safetensors"]
    for file in (file for pattern in patterns for file in folder.glob(pattern)):
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def stoppable(limit: float | None = None) -> Iterator[Signals]:
    """Stop when asked to, and quietly after `limit` seconds: inside a run it saves first, between two nothing is lost."""
    end = time.monotonic() + (math.inf if limit is None else limit)
    timer = threading.Timer(limit or 0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    with stop_signals() as signals:
        if limit is not None and threading.current_thread() is threading.main_thread():
            timer.start()
        try:
            yield signals
        except (KeyboardInterrupt, Stopped) as error:
            number = error.signal if isinstance(error, Stopped) else signals.received or signal.SIGINT
            if number == signal.SIGTERM and time.monotonic() >= end:
                return
            words = "stopped between two runs; nothing is lost. The same command goes on from here"
            raise error if isinstance(error, Stopped) else Stopped(words, number) from None
        finally:
            timer.cancel()


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as a CSV file."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


class CampaignDisplay(Display):
    """Bars for the run under way, and a line for every run that is over."""

    def __init__(self, console: Console, watch: Callable[[str, Tick], None] | None = None) -> None:
        super().__init__(console, transient=True)
        self.watch = watch  # sees every step, and may end the run
        self.name = ""  # of the run under way
        self.runs = self.over = 0  # runs in all, and those that are over
        self.ahead = self.spent = 0.0  # what is still to do, and what was done here
        self.began = time.perf_counter()  # when the runs were planned

    def plan(self, costs: Sequence[float]) -> None:
        """Take note of the costs of all runs."""
        self.runs, self.ahead, self.began = len(costs), sum(costs), time.perf_counter()

    def say(self, text: str) -> None:
        """Print a line, but none of a run's own: they would bury the campaign's."""
        if not self.name:
            super().say(text)

    def __enter__(self) -> "CampaignDisplay":
        self._tasks.clear()
        self._newest.clear()
        super().__enter__()
        return self

    def step(self, stage: str, tick: Tick) -> None:
        super().step(f"{self.name}, {stage}", tick)
        if self.watch is not None:
            self.watch(stage, tick)

    def count(self, cost: float, before: bool = False) -> str:
        """Count a run that is over, or was `before`; gives in words how much time is left."""
        self.over, self.ahead = self.over + 1, max(0.0, self.ahead - cost)
        self.runs, self.spent = max(self.runs, self.over), self.spent + (0.0 if before else cost)
        left = self.ahead * (time.perf_counter() - self.began) / max(self.spent, 1e-9)
        return f"about {duration(left)} left" if self.over < self.runs else "all done"

"""A search for the best settings on validation: trials are runs in one folder, Optuna says which comes next.

Several processes may work on one folder, and each may be killed at any moment. A trial belongs to the process that
holds the lock on its file, so what a dead process left is found, and gone on with, by whoever comes next.
"""

import contextlib
import csv
import fcntl
import gc
import io
import json
import sqlite3
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, Any

import torch
from rich.console import Console

from fedsieve.config import Experiment, to_yaml
from fedsieve.errors import Diverged, FedsieveError, with_extra
from fedsieve.files import write_atomic, write_json
from fedsieve.randomness import generator
from fedsieve.report.html import duration, flatten
from fedsieve.runner.checkpoint import list_checkpoints
from fedsieve.runner.claim import Busy
from fedsieve.runner.experiment import read_experiment, resume, run
from fedsieve.runner.progress import Display
from fedsieve.runner.setup import preflight
from fedsieve.sweep.page import Trial, write_page
from fedsieve.sweep.space import Space, Values, label
from fedsieve.train.loop import Tick

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

TRIALS = 30  # of a search that is not told how many
RIVALS = 5  # finished trials without which none is stopped early
DRAWS = 50  # tries to draw settings that no trial has had
# What may differ between the processes of one sweep: where trials are computed, logged, cached and saved.
INCIDENTAL = ("device", "tracking", "checkpoint", "data.cache", "data.placement")


@dataclass(frozen=True)
class Result:
    """How a sweep stands."""

    trials: list[Trial]
    best: Trial | None
    page: Path
    hints: list[str]


def sweep(
    space: Space, folder: str | Path, trials: int | None = None, prune: bool = False, console: Console | None = None
) -> Result:
    """Search a space for the best validation accuracy, every trial a run under `folder`.

    In a folder that already holds this sweep it goes on with what is missing; `trials` counts them all. With `prune` a
    trial is stopped that falls behind the median of those that ended.
    """
    search = Search(space, Path(folder), trials, prune, console or Console(quiet=True))
    while (claimed := search.claim()) is not None:
        number, values, lock = claimed
        with lock:
            search.settle(number, values, search.attempt(number, values))
        if torch.cuda.is_available():
            gc.collect()  # a network in a cycle of references would hold on to the device's memory
    return search.result()


class Search:
    """One process's work on a sweep folder."""

    def __init__(self, space: Space, folder: Path, trials: int | None, prune: bool, console: Console) -> None:
        if find_spec("optuna") is None:
            raise FedsieveError(f"sweep needs a package that is not installed. Run {with_extra('sweep')}")
        self.space, self.folder, self.prune, self.console = space, folder, prune, console
        self.file = folder / "sweep.db"
        self.left = f"The trials are still runs of their own: `fedsieve report {folder}/trials/*`"
        self.total = trials or TRIALS
        if space.method == "grid":
            self.total = min(trials or len(space.grid), len(space.grid))
        preflight(space.base)
        self._open()

    # --- the folder ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process changes the sweep meanwhile. What fails in its database is told."""
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            except (SQLAlchemyError, StorageInternalError) as error:
                raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> FedsieveError:
        reason = str(error.__cause__ or error).splitlines()[0][:200]  # Optuna's own words say little
        return FedsieveError(f"{self.file}: not a database that can be read ({reason}). {self.left}", 1)

    def _open(self) -> None:
        """Opens the sweep's database, new or as it stands; one of another sweep is refused."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sheet = self.folder / "sweep.json"
        if odd := [mark for mark in "?%{}" if mark in str(self.folder)]:  # they mean something in a database's address
            raise FedsieveError(f"--out: {self.folder}: a sweep's folder has no {odd[0]} in its name. Choose another")
        if self.folder.exists() and not sheet.exists() and any(self.folder.glob("[!.]*")):
            raise FedsieveError(f"--out: {self.folder} is there already, and holds no sweep. Choose another folder")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FedsieveError(f"--out: {self.folder} cannot be written: {error.strerror}") from None
        with self._alone():
            if sheet.exists():
                self._check(sheet)
            else:
                write_json(sheet, self._identity())
            there = self.file.exists() and self.file.stat().st_size
            if any((self.folder / "trials").glob("*")) and not there:
                raise FedsieveError(
                    f"{self.file}: missing or empty, though there are trials that it should know of. Put it back, or choose another "
                    f"--out. {self.left}",
                    1,
                )
            (self.folder / ".trials").mkdir(exist_ok=True)
            try:
                with contextlib.closing(sqlite3.connect(self.file, timeout=60)) as database:
                    (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
                if found != "ok":
                    raise ValueError(found.splitlines()[-1])
                storage = optuna.storages.RDBStorage(
                    f"sqlite:///{self.file}", engine_kwargs={"connect_args": {"timeout": 60}}
                )
                self.study: Study = optuna.create_study(
                    storage=storage, study_name="sweep", direction="maximize", load_if_exists=True
                )
                self._trials()
            except Exception as error:  # damage has many names
                raise self._unreadable(error) from None

    def _identity(self) -> dict[str, Any]:
        """What a sweep is: continued with anything else, its trials could not be compared."""
        axes = {
            axis.key: [label(choice) for choice in axis.choices] or f"{'log:' * axis.log}{axis.low:g}:{axis.high:g}"
            for axis in self.space.axes
        }
        return {"method": self.space.method, "vary": axes, "config": self.space.base.model_dump(mode="json")}

    def _check(self, sheet: Path) -> None:
        try:
            begun = json.loads(sheet.read_text(encoding="utf-8"))
        except ValueError as error:
            raise FedsieveError(f"{sheet}: damaged ({error}). Choose another folder", 1) from None
        if found := _difference(begun, self._identity()):
            raise FedsieveError(
                f"--out: {self.folder} holds another sweep: {found}. Choose another folder, or go on with what it began with"
            )

    def path(self, number: int) -> Path:
        """The run folder of a trial."""
        return self.folder / "trials" / f"{number:04d}"

    # --- one trial ----------------------------------------------------------------------------------------------------

    def claim(self) -> tuple[int, Values, IO[str]] | None:
        """A trial that nobody works on, now this process's as long as its lock is open; None where none is left."""
        from optuna.trial import TrialState, create_trial

        with self._alone():
            known = self.study.get_trials(deepcopy=False)
            for trial in known:
                if trial.state == TrialState.RUNNING and (lock := self._hold(trial.number)):
                    return trial.number, self.space.values(trial.params), lock
            values = self._next(known)
            if values is None:
                return None
            number = len(known)
            lock = self._hold(number)
            assert lock is not None
            distributions = self.space.distributions()
            # In one transaction, settings included: a kill leaves a whole trial or none.
            self.study.add_trial(
                create_trial(state=TrialState.RUNNING, params=self.space.params(values), distributions=distributions)
            )
            return number, values, lock

    def _hold(self, number: int) -> IO[str] | None:
        lock = (self.folder / ".trials" / f"{number:04d}").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            lock.close()
            return None

    def _next(self, known: Sequence["FrozenTrial"]) -> Values | None:
        """The settings of the next trial; None where there are enough, or no new ones."""
        if len(known) >= self.total:
            return None
        if self.space.method == "grid":
            return self.space.grid[len(known)]
        import optuna

        had = [self.space.values(trial.params) for trial in known]
        for draw in range(DRAWS):
            # Drawn by the trial's number, so that processes draw differently, and a sweep done again draws the same.
            seed = int(generator(self.space.base.seed, "sweep", len(known), draw).integers(2**32))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                # Tree-structured Parzen estimator (Bergstra et al. 2011); trials under way count as poor for now.
                sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
            beside = optuna.create_study(direction="maximize", sampler=sampler)
            beside.add_trials(known)
            values = self.space.values(beside.ask(self.space.distributions()).params)
            if values not in had:
                return values
        return None

    def attempt(self, number: int, values: Values) -> dict[str, Any]:
        """Run a trial, or go on with it; what became of it. What is nobody's settings' fault ends the sweep instead."""
        folder = self.path(number)
        try:
            experiment = self.space.configure(values)
            experiment = experiment.model_copy(update={"name": f"{experiment.name[:90]}-{number:04d}"})
            display = _Watch(self, folder, experiment)
            if (folder / "config.yaml").exists():
                _check_own(folder, experiment)
                write_atomic(folder / "config.yaml", to_yaml(experiment))  # perhaps on another device now
                summary = resume(folder, display)
            else:
                summary = run(experiment, folder, display)
        except _Behind:
            reached = max(curve(folder, experiment.stages[-1].name), default=None)
            return {"state": "stopped", "accuracy": reached, "note": "behind the median"}
        except Diverged as error:
            return {"state": "diverged", "note": str(error)}
        except Busy:  # it will have a result
            raise
        except FedsieveError as error:
            if error.exit_code > 2:
                raise FedsieveError(f"stopped in trial {number}. The same command goes on", error.exit_code) from None
            if error.exit_code != 2:
                raise
            return {"state": "failed", "note": str(error)}
        except OSError:
            raise
        except Exception as error:  # what a network and a device do to each other has many names
            with contextlib.suppress(OSError):
                write_atomic(folder / "failure.txt", traceback.format_exc())
            return {"state": "failed", "note": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        for checkpoint in list_checkpoints(folder / "checkpoints"):
            checkpoint.unlink()  # a finished run goes on from none, and a sweep has many
        last = list(summary["stages"].values())[-1]
        accuracy = last.get("client_val_accuracy") if last["val_accuracy"] is None else last["val_accuracy"]
        if accuracy is None:
            return {"state": "failed", "note": "no validation accuracy came out"}
        return {
            "state": "complete",
            "accuracy": accuracy,
            "seconds": summary["seconds"],
            "best_at": last["best_at"],
            "images": summary["val_images"] if last["val_accuracy"] is not None else None,
        }

    def settle(self, number: int, values: Values, outcome: dict[str, Any]) -> None:
        """Write down what became of a trial, and what is best now."""
        from optuna.trial import TrialState

        states = {"complete": TrialState.COMPLETE, "failed": TrialState.FAIL}
        # Optuna passes over what failed, and learns from what it takes for pruned: do not go there.
        state = states.get(outcome["state"], TrialState.PRUNED)
        with self._alone():
            self.study.set_user_attr(str(number), outcome)
            self.study.tell(number, outcome["accuracy"] if state == TrialState.COMPLETE else None, state)
            trials = self._trials()
            self._write(trials)
        settings = ", ".join(f"{key}={label(value)}" for key, value in values.items())
        ended = _percent(outcome.get("accuracy")) if outcome["state"] == "complete" else outcome["state"]
        first = " (best so far)" if (best := best_of(trials)) and best.number == number else ""
        took = f", {duration(outcome['seconds'])}" if "seconds" in outcome else ""
        self.console.print(
            f"trial {number}, {len([t for t in trials if t.state != 'running'])} of {self.total} done: {ended}{first}{took}; {settings}",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip

    # --- the whole ----------------------------------------------------------------------------------------------------

    def _trials(self) -> list[Trial]:
        told = self.study.user_attrs
        found = []
        for trial in self.study.get_trials(deepcopy=False):
            outcome = told.get(str(trial.number), {}) if trial.state.is_finished() else {}
            found.append(
                Trial(
                    number=trial.number,
                    folder=self.path(trial.number),
                    values=self.space.values(trial.params),
                    state=outcome.get("state", "running"),
                    accuracy=outcome.get("accuracy"),
                    seconds=outcome.get("seconds"),
                    best_at=outcome.get("best_at"),
                    images=outcome.get("images"),
                    note=outcome.get("note", ""),
                )
            )
        return found

    def _write(self, trials: list[Trial]) -> None:
        table = io.StringIO()
        rows = csv.writer(table, lineterminator="\n")
        keys = [axis.key for axis in self.space.axes]
        rows.writerow(["trial", "state", *keys, "val_accuracy", "best_at", "seconds", "folder", "note"])
        for trial in trials:
            settings = [label(trial.values[key]) for key in keys]
            numbers = ["" if value is None else value for value in (trial.accuracy, trial.best_at, trial.seconds)]
            place = trial.folder.relative_to(self.folder)
            rows.writerow([trial.number, trial.state, *settings, *numbers, place, trial.note])
        write_atomic(self.folder / "sweep.csv", table.getvalue())
        if (best := best_of(trials)) is not None:
            write_atomic(self.folder / "best.yaml", to_yaml(self.space.configure(best.values, final=True)))

    def result(self) -> Result:
        """The page, and how the sweep stands."""
        with self._alone():
            trials = self._trials()
            best = best_of(trials)
            self._write(trials)
            page = write_page(
                self.folder,
                self.space.base.name,
                self.space.method,
                self.space.axes,
                trials,
                best,
                importance(self.space, trials),
            )
        hints = [
            f"{axis.key}: the best value, {label(best.values[axis.key])}, lies at the end of what was searched; a better one may lie beyond"
            for axis in self.space.axes
            if best and axis.at_end(best.values[axis.key])
        ]
        return Result(trials, best, page, hints)


def _difference(was: Any, now: Any) -> str | None:
    """The first setting, of those that matter, in which two sweeps or experiments differ."""
    was, now = flatten(was), flatten(now)
    for key in was | now:
        name = key.removeprefix("config.")
        if was.get(key, ...) != now.get(key, ...) and not f"{name}.".startswith(tuple(f"{k}." for k in INCIDENTAL)):
            there, here = (label(side[key]) if key in side else "absent" for side in (was, now))
            return f"{name} is {there} there and {here} here"
    return None


def _check_own(folder: Path, experiment: Experiment) -> None:
    """Refuse a run of other settings than its trial's."""
    try:
        found = _difference(read_experiment(folder).model_dump(mode="json"), experiment.model_dump(mode="json"))
    except FedsieveError as error:
        found = str(error)
    if found:
        raise FedsieveError(
            f"{folder}: not a run of this trial's settings: {found}. Move it elsewhere, and the same command runs the trial; "
            "or choose another --out",
            1,
        )


def importance(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """The share of the variance of accuracy that each setting explains by itself (fANOVA, Hutter et al. 2014).

    Nothing where only one setting varies, too few trials ended, or all ended alike.
    """
    import optuna

    ended = [trial for trial in trials if trial.state == "complete"]
    few = len(space.axes) < 2 or len(ended) < 2 * len(space.axes) + 2
    if few or len({trial.accuracy for trial in ended}) == 1:
        return {}
    # Numbers by position: on its own scale, the top decade of a log range would count as nine tenths of it.
    even = optuna.distributions.FloatDistribution(0.0, 1.0)
    distributions = space.distributions() | {axis.key: even for axis in space.axes if axis.numeric}
    study = optuna.create_study(direction="maximize")
    for trial in ended:
        places = {axis.key: axis.position(trial.values[axis.key]) for axis in space.axes if axis.numeric}
        params = space.params(trial.values) | places
        study.add_trial(optuna.trial.create_trial(value=trial.accuracy, params=params, distributions=distributions))
    return optuna.importance.FanovaImportanceEvaluator(seed=0).evaluate(study)


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The first of the best."""
    ended = [trial for trial in trials if trial.state == "complete"]
    return max(ended, key=lambda trial: (trial.accuracy, -trial.number), default=None)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


# --- stopping early --------------------------------------------------------------------------------------------------


class _Behind(Exception):
    """A trial fell behind."""


class _Watch(Display):
    """A run's display that stops it when it falls behind."""

    def __init__(self, search: Search, folder: Path, experiment: Experiment) -> None:
        super().__init__(search.console, quiet=not search.console.is_terminal, transient=True)
        self.folder, self.stage, self.rivals = folder, experiment.stages[-1].name, []
        if search.prune:
            with search._alone():
                ended = [trial for trial in search._trials() if trial.state == "complete"]
            self.rivals = [curve(trial.folder, self.stage) for trial in ended]

    def say(self, text: str) -> None:
        """One line per trial is enough."""

    def step(self, stage: str, tick: Tick) -> None:
        super().step(stage, tick)
        if (
            tick.record
            and stage == self.stage
            and tick.step < tick.steps
            and behind(curve(self.folder, stage), self.rivals)
        ):
            raise _Behind


def curve(folder: Path, stage: str) -> list[float]:
    """The best validation accuracy of a run's stage so far, at each of its evaluations."""
    found: list[float] = []
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            accuracy = row.get("val_accuracy", row.get("client_val_accuracy"))
            if row.get("stage") == stage and accuracy is not None:
                found.append(max([accuracy, *found[-1:]]))
    return found


def behind(own: Sequence[float], rivals: Sequence[Sequence[float]]) -> bool:
    """The median rule (Golovin et al. 2017): whether the best so far is below the median of rivals' at this point."""
    there = [rival[len(own) - 1] for rival in rivals if len(rival) >= len(own)] if own else []
    return len(there) >= RIVALS and own[-1] < median(there)

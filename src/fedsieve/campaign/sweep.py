"""A sweep: a search for the best settings on validation, whose trials are runs in one folder. Optuna says which comes next.

A sweep knows of its trials from Optuna's database. One that is under way there and that no process has claimed was left behind.
"""

import contextlib
import json
import sqlite3
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console

from fedsieve.campaign import engine
from fedsieve.campaign.axes import Space, Values, label
from fedsieve.campaign.engine import Attempt, Campaign, Stuck, best_of
from fedsieve.campaign.sweep_page import Standing, Trial, write_page
from fedsieve.config import to_yaml
from fedsieve.errors import Diverged, FedsieveError, Stopped, with_extra
from fedsieve.files import write_atomic, write_json
from fedsieve.randomness import generator
from fedsieve.report.html import duration
from fedsieve.runner.claim import Busy
from fedsieve.runner.preflight import preflight
from fedsieve.train.loop import Tick

if TYPE_CHECKING:
    from optuna.study import Study as OptunaStudy
    from optuna.trial import FrozenTrial

TRIALS = 30  # of a search that is not told how many
RIVALS = 5  # finished trials without which none is stopped early
DRAWS = 50  # tries to draw settings that no trial has had


class Behind(Exception):
    """A trial fell behind the median."""


def sweep(
    space: Space, folder: str | Path, trials: int | None = None, prune: bool = False, console: Console | None = None
) -> Standing:
    """Search a space for the best validation accuracy, every trial a run under `folder`.

    In a folder that already holds this sweep it goes on with what is missing; `trials` counts them all. With `prune` a
    trial is stopped that falls behind the median of those that ended.
    """
    search = Search(space, Path(folder), trials, prune, console or Console(quiet=True))
    with engine.stoppable():
        while (claimed := search.claim()) is not None:
            trial, lock = claimed
            with lock:
                search.settle(search.attempt(trial))
    return search.standing()


class Search:
    """One process's work on a sweep folder."""

    def __init__(self, space: Space, folder: Path, trials: int | None, prune: bool, console: Console) -> None:
        if find_spec("optuna") is None:
            raise FedsieveError(f"sweep needs a package that is not installed. Run {with_extra('sweep')}")
        self.space, self.folder, self.prune = space, folder, prune
        self.campaign = Campaign(folder, engine.CampaignDisplay(console), page=True)
        self.file = folder / "sweep.db"
        self.left = f"The trials are still runs of their own: `fedsieve report {folder}/trials/*`"
        self.total = trials or TRIALS
        if space.method == "grid":
            self.total = min(trials or len(space.grid), len(space.grid))
        preflight(space.base)
        with self._opening():
            self.study = self._database()
            self._trials()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process changes the sweep meanwhile. Errors of its database become sentences."""
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        with self.campaign.alone():
            try:
                yield
            except (SQLAlchemyError, StorageInternalError) as error:
                raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> FedsieveError:
        reason = str(error.__cause__ or error).splitlines()[0][:200]  # Optuna's own words say little
        return FedsieveError(f"{self.file}: not a database that can be read ({reason}). {self.left}", 1)

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        """No other process opens the database meanwhile. The folder of another sweep and a damaged database are refused."""
        if odd := [mark for mark in "?%{}" if mark in str(self.folder)]:  # they mean something in a database's address
            raise FedsieveError(f"--out: {self.folder}: a sweep's folder has no {odd[0]} in its name. Choose another")
        if engine.is_foreign(self.folder, "sweep.json"):
            raise FedsieveError(f"--out: {self.folder} is there already, and holds no sweep. Choose another folder")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FedsieveError(f"--out: {self.folder} cannot be written: {error.strerror}") from None
        with self._alone():
            self._check_record(self.folder / "sweep.json")
            there = self.file.exists() and self.file.stat().st_size
            if any((self.folder / "trials").glob("*")) and not there:
                raise FedsieveError(
                    f"{self.file}: missing or empty, though there are trials that it should know of. Put it back, or choose another "
                    f"--out. {self.left}",
                    1,
                )
            try:
                yield
            except Exception as error:  # damage has many names
                raise self._unreadable(error) from None

    def _check_record(self, file: Path) -> None:
        """Refuse a folder of another sweep, whose trials could not be compared; note what this one is in a new folder."""
        axes = {
            axis.key: [label(choice) for choice in axis.choices] or f"{'log:' * axis.log}{axis.low:g}:{axis.high:g}"
            for axis in self.space.axes
        }
        record = {"method": self.space.method, "vary": axes, "config": self.space.base.model_dump(mode="json")}
        if not file.exists():
            write_json(file, record)
            return
        try:
            begun = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise FedsieveError(f"{file}: damaged ({error}). Choose another folder", 1) from None
        for key, (there, here) in engine.differences(begun, record).items():
            raise FedsieveError(
                f"--out: {self.folder} holds another sweep: {key} is {there} there and {here} here. Choose another folder, "
                "or go on with what it began with"
            )

    def _database(self) -> "OptunaStudy":
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with contextlib.closing(sqlite3.connect(self.file, timeout=60)) as database:
            (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise ValueError(found.splitlines()[-1])
        address = f"sqlite:///{self.file}"
        storage = optuna.storages.RDBStorage(address, engine_kwargs={"connect_args": {"timeout": 60}})
        return optuna.create_study(storage=storage, study_name="sweep", direction="maximize", load_if_exists=True)

    def path(self, number: int) -> Path:
        """The run folder of a trial."""
        return self.folder / "trials" / f"{number:04d}"

    def claim(self) -> tuple[Trial, IO[str]] | None:
        """A trial that nobody works on, now this process's as long as its lock is open; None where none is left."""
        from optuna.trial import TrialState, create_trial

        with self._alone():
            trials = self._trials()
            for trial in trials:
                if trial.state == "running":
                    with contextlib.suppress(Busy):
                        return trial, engine.claim(self.folder, trial.folder)
            values = self._next(self.study.get_trials(deepcopy=False))
            if values is None:
                return None
            trial = Trial(len(trials), self.path(len(trials)), values)
            lock = engine.claim(self.folder, trial.folder)
            distributions = self.space.distributions()
            # In one transaction, settings included: a kill leaves a whole trial or none.
            self.study.add_trial(
                create_trial(state=TrialState.RUNNING, params=self.space.params(values), distributions=distributions)
            )
            return trial, lock

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
            copy = optuna.create_study(direction="maximize", sampler=sampler)
            copy.add_trials(known)
            values = self.space.values(copy.ask(self.space.distributions()).params)
            if values not in had:
                return values
        return None

    def attempt(self, trial: Trial) -> Trial:
        """Run a claimed trial, or go on with it. What is nobody's settings' fault ends the sweep instead."""
        try:
            experiment = self.space.configure(trial.values)
            experiment = experiment.model_copy(update={"name": f"{experiment.name[:90]}-{trial.number:04d}"})
            attempt = Attempt(f"trial {trial.number}", trial.folder, experiment)
            summary = self._summary(attempt)
        except Behind:
            reached = max(curve(trial.folder, experiment.stages[-1].name), default=None)
            return replace(trial, state="stopped", accuracy=reached, note="behind the median")
        except Diverged as error:
            return replace(trial, state="diverged", note=str(error))
        except (Busy, Stopped, OSError):
            raise
        except FedsieveError as error:
            if not error.is_request:
                raise
            return replace(trial, state="failed", note=str(error))
        except Exception as error:  # what a network and a device do to each other has many names
            with contextlib.suppress(OSError):
                write_atomic(trial.folder / "failure.txt", traceback.format_exc())
            note = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return replace(trial, state="failed", note=note)
        engine.slim(trial.folder)  # a finished run goes on from none of its checkpoints, and a sweep has many
        last = list(summary["stages"].values())[-1]
        accuracy = last.get("client_val_accuracy") if last["val_accuracy"] is None else last["val_accuracy"]
        if accuracy is None:
            return replace(trial, state="failed", note="no validation accuracy came out")
        images = summary["val_images"] if last["val_accuracy"] is not None else None
        told = {"accuracy": accuracy, "seconds": summary["seconds"], "best_at": last["best_at"], "images": images}
        return replace(trial, state="complete", **told)

    def _summary(self, attempt: Attempt) -> dict[str, Any]:
        """Carry out an attempt; one whose folder holds a run of other settings is refused."""
        outcome = engine.read_outcome(attempt.folder, attempt.experiment)
        if outcome.state == "diverged":
            raise Diverged(outcome.reason)
        try:
            if outcome.state == "another config":
                changed = engine.changed_settings(attempt.folder, attempt.experiment)
                raise Stuck(
                    ", ".join(f"{key} is {there} there and {here} here" for key, (there, here) in changed.items())
                )
            if self.prune:
                self._watch(attempt)
            return self.campaign.carry_out(attempt, outcome.state)
        except Stuck as error:
            raise FedsieveError(
                f"{attempt.folder}: not a run of this trial's settings: {error}. Move it elsewhere, and the same command runs "
                "the trial; or choose another --out",
                1,
            ) from None

    def settle(self, trial: Trial) -> None:
        """Write down what became of a trial, and what is best now."""
        from optuna.trial import TrialState

        # Optuna passes over what failed, and learns from what it takes for pruned: do not go there.
        state = {"complete": TrialState.COMPLETE, "failed": TrialState.FAIL}.get(trial.state, TrialState.PRUNED)
        with self._alone():
            self.study.set_user_attr(str(trial.number), trial.outcome)
            self.study.tell(trial.number, trial.accuracy if state == TrialState.COMPLETE else None, state)
            trials = self._trials()
            self._write(trials)
        settings = ", ".join(f"{key}={label(value)}" for key, value in trial.values.items())
        ended = f"{trial.percent:.2f} %" if trial.score is not None else trial.state
        first = " (best so far)" if (best := best_of(trials)) and best.number == trial.number else ""
        took = f", {duration(trial.seconds)}" if trial.seconds is not None else ""
        done = sum(other.state != "running" for other in trials)
        self.campaign.display.say(
            f"trial {trial.number}, {done} of {self.total} done: {ended}{first}{took}; {settings}"
        )

    def _watch(self, attempt: Attempt) -> None:
        """Stop an attempt when it falls behind the trials that have ended."""
        last = attempt.experiment.stages[-1].name
        with self._alone():
            rivals = [curve(trial.folder, last) for trial in self._trials() if trial.state == "complete"]

        def watch(stage: str, tick: Tick) -> None:
            ends = tick.record and stage == last and tick.step < tick.steps
            if ends and behind(curve(attempt.folder, last), rivals):
                raise Behind

        self.campaign.display.watch = watch

    def _trials(self) -> list[Trial]:
        told = self.study.user_attrs
        return [
            Trial(
                trial.number,
                self.path(trial.number),
                self.space.values(trial.params),
                **(told.get(str(trial.number), {}) if trial.state.is_finished() else {}),
            )
            for trial in self.study.get_trials(deepcopy=False)
        ]

    def _write(self, trials: list[Trial]) -> None:
        rows = [
            {
                "trial": trial.number,
                "state": trial.state,
                **{axis.key: label(trial.values[axis.key]) for axis in self.space.axes},
                "val_accuracy": trial.accuracy,
                "best_at": trial.best_at,
                "seconds": trial.seconds,
                "folder": trial.folder.relative_to(self.folder),
                "note": trial.note,
            }
            for trial in trials
        ]
        write_atomic(self.folder / "sweep.csv", engine.csv_text(rows))
        if (best := best_of(trials)) is not None:
            write_atomic(self.folder / "best.yaml", to_yaml(self.space.configure(best.values, final=True)))

    def standing(self) -> Standing:
        """The page, and how the sweep stands."""
        with self._alone():
            trials = self._trials()
            self._write(trials)
            return write_page(self.folder, self.space, trials, importance(self.space, trials))


def importance(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """The share of the variance of accuracy that each setting explains by itself (fANOVA, Hutter et al. 2014).

    Nothing where only one setting varies, too few trials ended, or all ended alike.
    """
    import optuna

    ended = [trial for trial in trials if trial.score is not None]
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

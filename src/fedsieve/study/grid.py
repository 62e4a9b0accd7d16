"""Running a study: every row with every seed, in one process that pays for its start once, or in several that share the rows.

What is finished is skipped, a killed run goes on inside, and a row of another config is never mixed in.
"""

import contextlib
import csv
import fcntl
import gc
import json
import math
import os
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedsieve.config import Experiment
from fedsieve.data.exploration import explore as explore_images
from fedsieve.data.sources import load_images
from fedsieve.errors import Diverged, FedsieveError
from fedsieve.files import folder_atomic, write_json
from fedsieve.randomness import generator
from fedsieve.report.explore import write_exploration
from fedsieve.report.html import duration
from fedsieve.runner.claim import Busy, is_free
from fedsieve.runner.environment import set_deterministic
from fedsieve.runner.estimate import images_trained
from fedsieve.runner.experiment import read_experiment, resume, run
from fedsieve.runner.progress import Display, describe
from fedsieve.runner.setup import check_hub, preflight
from fedsieve.runner.shared import Shared
from fedsieve.study.definition import Row, Study, applies, load_study
from fedsieve.study.page import SAMPLE, write_study
from fedsieve.study.results import (
    FAILED,
    Outcome,
    Settings,
    State,
    Trial,
    best_trial,
    next_settings,
    read_outcome,
    run_folder,
    trial,
    trial_place,
    tried_words,
)
from fedsieve.train.loop import Tick

RECORD = "study.json"
WRITTEN = {"runs", "data", "results.csv", "runs.csv", "choices.csv", "tables.md", "study.html", "figures"}  # beside it
SHOWN = 16  # training images on the page


def check_folder(study: Study, out: Path) -> None:
    """Refuse a folder that is no study's, or was begun with other words."""
    if (out / RECORD).exists():
        there = _read_record(out)
        if _meaning(there) != _meaning(_record(study)):
            raise FedsieveError(
                f"--out: {out} was begun as `fedsieve study {_words(there)}`, and rows of two kinds are not mixed. "
                "Go on with the same words, or choose another folder"
            )
    elif out.exists() and (not out.is_dir() or {path.name for path in out.glob("[!.]*")} - WRITTEN):
        raise FedsieveError(f"--out: {out} is there already and is no study folder. Choose another folder")


def begin(study: Study, out: Path) -> None:
    """Make the study folder, where it is not there."""
    if (out / RECORD).exists():
        return
    try:
        write_json(out / RECORD, _record(study))
    except OSError as error:
        raise FedsieveError(f"--out: {out} cannot be written: {error.strerror}") from None


def _record(study: Study) -> dict[str, Any]:
    """The words that a study is run with."""
    return {"study": study.name, "overrides": list(study.overrides), "rates": list(study.rates), "smoke": study.smoke}


def _read_record(out: Path) -> dict[str, Any]:
    try:
        there = json.loads((out / RECORD).read_text())
        found = {key: there[key] for key in ("study", "overrides", "rates", "smoke")}
        _meaning(found), _words(found)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FedsieveError(
            f"{out / RECORD}: damaged: {error}. Delete this file and run the command that the study was begun with: "
            "runs of other settings are noticed"
        ) from None


def _meaning(record: dict[str, Any]) -> dict[str, Any]:
    """A record, whatever the order of its words; of two for one setting the last counts."""
    return record | {"overrides": dict(override.split("=", 1) for override in record["overrides"])}


def _words(record: dict[str, Any]) -> str:
    rates = ["--rates", ",".join(f"{rate:g}" for rate in record["rates"])] if record["rates"] else []
    return shlex.join([record["study"], *record["overrides"], *rates, *["--smoke"] * record["smoke"]])


def run_study(
    study: Study,
    out: Path,
    rows: Sequence[Row],
    seeds: int,
    console: Console,
    quiet: bool = False,
    keep_all: bool = False,
    limit: float | None = None,
) -> Path:
    """Run what is not finished, for at most `limit` seconds, and write the page, also when stopped; gives the page."""
    display = GridDisplay(console, quiet)
    grid = Grid(study, out, rows, seeds, display, keep_all)
    for override in study.idle(rows):  # wrong words would be refused with the first row that they mean something to
        study.experiment(next(row for row in study.rows.values() if applies(row, override)), 0)
    check_folder(study, out)
    grid.check()
    begin(study, out)
    for override in study.idle(rows):
        display.say(f"{override} means nothing to the chosen rows, only to others of this study")
    try:
        if not grid.run(limit):
            display.say(
                f"time is up: {display.over} of {display.runs} runs are over. The same command goes on from here"
            )
        elif len(rows) == len(study.rows) and study.looks_at_data:
            with _alone(out):
                explore(study, out, display)
    finally:
        with _alone(out):
            page = write_study(study, out, max(seeds, _seeds_there(out)))
    return page


def show_study(name: str, out: Path, seeds: int) -> Path:
    """The page of what lies in a study folder."""
    if not (out / RECORD).exists():
        begun = (
            ", and the command that this one was begun with takes its runs up again" if (out / "runs").is_dir() else ""
        )
        raise FedsieveError(
            f"{out}: not a study folder (it has no {RECORD}). `fedsieve study {name} --out DIR` makes one{begun}"
        )
    there = _read_record(out)
    if there["study"] != name:
        raise FedsieveError(f"{out}: the folder of the study {there['study']}, not of {name}")
    study = load_study(name, there["overrides"], there["rates"], there["smoke"])
    return write_study(study, out, _seeds_there(out) or seeds)


def unsound(out: Path) -> int:
    """How many runs of a study that was shown were begun and have no result: unfinished, damaged, of another config."""
    count = 0
    for name, well in (("runs.csv", {"finished", "not run"}), ("choices.csv", {"finished", "not run", "diverged"})):
        if (out / name).exists():  # nothing is chosen in some studies
            with (out / name).open(newline="") as file:
                count += sum(row["state"] not in well for row in csv.DictReader(file))
    return count


def _seeds_there(out: Path) -> int:
    """How many seeds some row has."""
    numbers = [folder.name.rpartition("-")[2] for folder in out.glob("runs/**/seed-*")]
    return max((int(number) + 1 for number in numbers if number.isdigit()), default=0)


class Taken(Exception):
    """Another process is at a run."""


class Stuck(FedsieveError):
    """A run that can neither go on nor be run anew: what lies there is not this study's to delete."""


class _Stop(BaseException):
    """A signal between two runs. No `except Exception` on the way takes it for something else."""


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Wait until no other process writes pages into a study folder."""
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def claimed(out: Path, folder: Path) -> Iterator[None]:
    """A run for this process alone. A process that dies lets go of its claim."""
    file = out / ".claims" / "~".join(folder.relative_to(out).parts)
    file.parent.mkdir(exist_ok=True)
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Taken from None
        yield


class _Signals:
    """What asked the process to stop between two runs."""

    def __init__(self) -> None:
        self.rung = False  # the time was up
        self.received: int | None = None

    def check(self) -> None:
        """Stop, where what a signal raised went unheard, as it does in a destructor."""
        if self.received is not None:
            raise _Stop


@contextlib.contextmanager
def _alarm(limit: float | None) -> Iterator[_Signals]:
    """Stop as SIGTERM would after so many seconds: in a run it saves first, between two there is nothing to save."""
    signals = _Signals()

    def ring() -> None:
        signals.rung = True
        os.kill(os.getpid(), signal.SIGTERM)

    def between(number: int, _: Any) -> None:
        signals.received = number
        raise _Stop

    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, between) for number in (signal.SIGINT, signal.SIGTERM)}
    timer = threading.Timer(limit or 0, ring)
    timer.daemon = True
    if limit is not None:
        timer.start()
    try:
        yield signals
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


class Grid:
    """One process's work on a study folder."""

    def __init__(
        self, study: Study, out: Path, rows: Sequence[Row], seeds: int, display: "GridDisplay", keep_all: bool = False
    ) -> None:
        self.study, self.out, self.rows, self.seeds = study, out, rows, seeds
        self.display, self.keep_all, self.shared = display, keep_all, Shared()
        self.over: set[Path] = set()  # runs that are counted as over

    def run(self, limit: float | None = None) -> bool:
        """All rows with the first seed, then all with the second, and so on: what is there early is there for every row.

        What other processes are at is passed over, and looked at again at the end. Gives whether all could run in `limit` seconds.
        """
        with _alarm(limit) as signals:
            try:
                self._run_all(signals)
            except _Stop:
                if not (signals.rung and signals.received == signal.SIGTERM):
                    raise FedsieveError(
                        "stopped between two runs; nothing is lost. The same command goes on from here",
                        128 + (signals.received or signal.SIGINT),
                    ) from None
            except FedsieveError as error:
                if not (signals.rung and error.exit_code == 128 + signal.SIGTERM):
                    raise
        return not signals.rung

    def _run_all(self, signals: _Signals) -> None:
        images = len(self.shared.images(self.study.experiment(self.rows[0], 0).data, "train", self.display.say))
        experiments = {row.name: self.study.experiment(row, 0) for row in self.rows}
        costs = {
            name: images_trained(found, images * (1 - found.data.val_fraction)) for name, found in experiments.items()
        }
        with self.display.grid(self._planned(costs)):
            seeds = range(self.seeds)
            left = [(row, seed) for seed in seeds for row in self.rows if seed < (row.seeds or self.seeds)]
            stuck: dict[str, None] = {}  # a trial's is met with every seed
            while left:
                elsewhere = []
                for row, seed in left:
                    signals.check()
                    try:
                        self._do(row, seed, costs[row.name])
                    except Taken:
                        elsewhere.append((row, seed))
                    except Stuck as error:
                        stuck[str(error)] = None
                if elsewhere == left:
                    time.sleep(1)
                left = elsewhere
        if stuck:
            raise FedsieveError("all other runs are over, but these cannot go on:\n" + "\n".join(stuck))

    def check(self) -> None:
        """Refuse, before anything runs, what cannot run here and rows that were made with another config."""
        for row in self.rows:
            experiment = self.study.experiment(row, 0)
            check_hub(experiment)
            preflight(experiment, self.shared)
            if experiment.deterministic:
                set_deterministic(True)  # before the first run that is not: cuBLAS reads it once
            if self.study.tune(row, experiment):
                continue  # seen to when its settings are known
            for seed in range(min(self.seeds, row.seeds or self.seeds)):
                folder = run_folder(self.out, row, {}) / f"seed-{seed}"
                self._refuse_other(read_outcome(folder, self.study.experiment(row, seed)))

    def _refuse_other(self, outcome: Outcome) -> None:
        if outcome.state == "another config":
            raise FedsieveError(
                f"{outcome.folder}: made with another config: it {outcome.reason}. Rows of two configs are not mixed: "
                "choose another --out, or delete this run"
            )

    def _planned(self, costs: Mapping[str, float]) -> list[float]:
        """What every run costs that is planned; how far rates must be widened is not known before."""
        planned = []
        for row in self.rows:
            tune = self.study.tune(row, self.study.experiment(row, 0))
            runs = min(self.seeds, row.seeds or self.seeds)
            if tune:
                first = {key: values[0] for key, values in tune.items()}
                is_run = trial_place(self.study, row, first, self.out)[0].name == "seed-0"  # a trial that is a run, too
                runs += math.prod(map(len, tune.values())) - is_run
            planned += [costs[row.name]] * runs
        return planned

    def _do(self, row: Row, seed: int, size: float) -> None:
        chosen = self._choose(row, size)
        if chosen is not None:
            folder = run_folder(self.out, row, chosen) / f"seed-{seed}"
            self._run(row, f"{row.name} seed {seed}", folder, self.study.experiment(row, seed, chosen), size)

    def _choose(self, row: Row, size: float) -> Settings | None:
        """The settings of a row, from runs on validation where some are to be chosen; None where all diverged."""
        tune = self.study.tune(row, self.study.experiment(row, 0))
        if not tune:
            return {}
        trials: list[Trial] = []
        while (settings := next_settings(tune, trials, self.study.smoke)) is not None:
            folder, experiment = trial_place(self.study, row, settings, self.out)
            self._run(row, f"{row.name} trying {tried_words(settings)}", folder, experiment, size)
            trials.append(trial(self.study, row, settings, self.out))
        best = best_trial(trials)
        return best.settings if best else None

    def _run(self, row: Row, name: str, folder: Path, experiment: Experiment, size: float) -> None:
        """One run, or what is left of it."""
        if folder in self.over:
            return
        with claimed(self.out, folder):
            outcome = read_outcome(folder, experiment)
            self._refuse_other(outcome)
            if outcome.state in ("finished", "diverged"):
                self.display.skip(size)
            else:
                self._go(row, name, folder, experiment, size, outcome.state)
        self.over.add(folder)

    def _go_on(self, experiment: Experiment, folder: Path, state: State) -> dict[str, Any]:
        """What an unfinished run comes to; a damaged one that cannot go on is run anew."""
        try:
            return resume(folder, self.display, page=False, shared=self.shared)
        except FedsieveError as error:
            if state != "damaged" or isinstance(error, (Busy, Diverged)) or error.exit_code >= 128:
                raise
            shutil.rmtree(folder)
            return run(experiment, folder, self.display, page=False, shared=self.shared)

    def _go(self, row: Row, name: str, folder: Path, experiment: Experiment, size: float, state: State) -> None:
        self.display.next(name)
        began = time.perf_counter()
        try:
            if state == "not run":
                if not is_free(folder):
                    shutil.rmtree(folder, ignore_errors=True)  # without a config, nothing says what it was
                summary = run(experiment, folder, self.display, page=False, shared=self.shared)
            else:
                read_experiment(folder)  # refused where this is damaged: nothing then says what ran here
                for file in ("summary.json", FAILED) if state == "damaged" else ():
                    (folder / file).unlink(missing_ok=True)  # it says that all is over, and is wrong
                summary = self._go_on(experiment, folder, state)
            tested = summary.get("test_accuracy")
            told = f"val {_percent(summary['val_accuracy'])}" if tested is None else f"test {_percent(tested)}"
        except Diverged as error:
            write_json(folder / FAILED, {"reason": str(error)})
            told = "diverged"
        except Busy:
            raise Taken from None
        except FedsieveError as error:
            if error.exit_code >= 128:
                raise FedsieveError(
                    f"stopped in {name}; nothing is lost. The same command goes on from here", error.exit_code
                ) from None
            if state == "not run":
                raise FedsieveError(f"{name}: {error}", error.exit_code) from None
            raise Stuck(f"{name}: {error}. Delete {folder} to run it anew") from None
        gc.collect()  # a network in a cycle of references would hold on to the device's memory
        if not self.keep_all:
            slim(folder, weights=experiment.seed == 0, masks=experiment.seed == 0 or row.keep)
        self.display.done(f"{name}: {told}, {time.perf_counter() - began:.1f} s", size)


def _percent(accuracy: float) -> str:
    return f"{100 * accuracy:.2f} %"


def slim(folder: Path, weights: bool, masks: bool) -> None:
    """Take from a finished run what only going on would need, and unless asked to stay, its weights and clients' masks."""
    shutil.rmtree(folder / "clients", ignore_errors=True)
    patterns = ["checkpoints/*.ckpt"]
    patterns += [] if weights else ["checkpoints/*.safetensors"]
    patterns += [] if masks else ["masks/*.client-*.safetensors"]
    for file in (file for pattern in patterns for file in folder.glob(pattern)):
        file.unlink(missing_ok=True)


def explore(study: Study, out: Path, display: "GridDisplay") -> None:
    """A page about the study's training images, and some of them to show, made once."""
    folder, experiment = out / "data", study.experiment(next(iter(study.rows.values())), 0)
    if folder.exists():
        return
    display.say("looking at the data")
    images = load_images(experiment.data, "train", display.say)
    found = explore_images(images.images, images.labels, images.class_names, experiment.seed)
    rows = generator(experiment.seed, "samples").permutation(len(images))[:SHOWN]
    names = np.array(images.class_names)[images.labels[rows].numpy()]
    with folder_atomic(folder) as filling:
        write_exploration(found, images.images, experiment.data.source, filling)
        np.savez_compressed(filling / SAMPLE, images=images.images[rows].numpy(), names=names)


# --- progress ---------------------------------------------------------------------------------------------------------


class GridDisplay(Display):
    """Progress over a whole grid: a bar for it and one for the run under way; elsewhere a line for every run."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        super().__init__(console, quiet)
        self.runs = self.over = 0  # runs in all, and those that are over
        self.ahead = self.spent = 0.0  # what is still to do, and what was done here, in images
        self.name = ""

    @contextlib.contextmanager
    def grid(self, costs: Sequence[float]) -> Iterator[None]:
        """While the grid runs; `costs` are those of all its runs."""
        self.runs, self.ahead, self.began = len(costs), sum(costs), time.perf_counter()
        if self.console.is_terminal and not self.quiet:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
            self._bars = Progress(TextColumn("[bold]{task.description}"), *columns, console=self.console)
            self.whole = self._bars.add_task("all runs", total=self.runs, note="")
            self.one = self._bars.add_task("", note="")
        with self._bars or contextlib.nullcontext():
            yield

    def __enter__(self) -> "GridDisplay":
        return self  # a run begins: the bars are there already

    def __exit__(self, *_: Any) -> None:
        self.name = ""

    def say(self, text: str) -> None:
        """What a run says of itself would bury the grid's own lines."""
        if not self.name:
            super().say(text)

    def step(self, stage: str, tick: Tick) -> None:
        if self._bars is not None:
            note: dict[str, Any] = {"note": describe(tick.record)} if tick.record else {}
            name = f"{self.name}, {stage}"
            self._bars.update(self.one, description=name, total=tick.steps, completed=tick.step, **note)

    def next(self, name: str) -> None:
        """A run begins."""
        self.name = name
        if self._bars is not None:
            self._bars.reset(self.one, description=name, note="")

    def done(self, text: str, cost: float) -> None:
        """A run is over."""
        self.spent += cost
        self.skip(cost)
        left = self.ahead * (time.perf_counter() - self.began) / self.spent
        about = f"about {duration(left)} left" if self.over < self.runs else "all done"
        if self._bars is not None:
            self._bars.update(self.whole, note=about)
        self.say(f"{self.over:>3} of {self.runs}  {text}" + ("" if self._bars else f"; {about}"))

    def skip(self, cost: float) -> None:
        """A run that was over before."""
        self.over, self.ahead = self.over + 1, max(0.0, self.ahead - cost)
        self.runs = max(self.runs, self.over)
        if self._bars is not None:
            self._bars.update(self.whole, completed=self.over, total=self.runs)

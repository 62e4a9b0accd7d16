"""Running a study: every row with every seed, in one process that pays for its start once, or in several that share the rows.

Finished runs are skipped, a killed run goes on inside, and a row of another config is never mixed in.
"""

import csv
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fedsieve.campaign import engine
from fedsieve.campaign.axes import Values, combinations
from fedsieve.campaign.definition import Row, Study, load_study
from fedsieve.campaign.engine import Attempt, Campaign, Outcome, Stuck, read_outcome
from fedsieve.campaign.evidence import choose, in_words, run_folder, search_place
from fedsieve.campaign.tables import SAMPLE, write_study
from fedsieve.config import Experiment, parse_yaml
from fedsieve.errors import Diverged, FedsieveError, Stopped
from fedsieve.files import folder_atomic, write_json
from fedsieve.randomness import generator
from fedsieve.report.explore import explore as write_page
from fedsieve.runner.claim import Busy
from fedsieve.runner.environment import set_deterministic
from fedsieve.runner.estimate import images_trained
from fedsieve.runner.preflight import check_hub, preflight
from fedsieve.runner.run import Signals

RECORD = "study.json"
WRITTEN = {"runs", "data", "results.csv", "runs.csv", "choices.csv", "tables.md", "study.html", "figures"}  # beside it
SHOWN = 16  # training images on the page


def check_folder(study: Study, out: Path) -> None:
    """Refuse a folder that is no study's, or was begun with other words."""
    if engine.is_foreign(out, RECORD, WRITTEN):
        raise FedsieveError(f"--out: {out} is there already and is no study folder. Choose another folder")
    if (out / RECORD).exists() and _meaning(there := _read_record(out)) != _meaning(_record(study)):
        raise FedsieveError(
            f"--out: {out} was begun as `fedsieve study {_words(there)}`, and rows of two kinds are not mixed. "
            "Go on with the same words, or choose another folder"
        )


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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, FedsieveError) as error:
        raise FedsieveError(
            f"{out / RECORD}: damaged: {error}. Delete this file and run the command that the study was begun with: "
            "runs of other settings are noticed"
        ) from None


def _meaning(record: dict[str, Any]) -> dict[str, Any]:
    """A record, whatever the order and spelling of its words; of two for one setting the last counts."""
    values = dict(override.split("=", 1) for override in record["overrides"])
    return record | {"overrides": {key.strip(): parse_yaml(value, key) for key, value in values.items()}}


def _words(record: dict[str, Any]) -> str:
    rates = ["--rates", ",".join(f"{rate:g}" for rate in record["rates"])] if record["rates"] else []
    return shlex.join([record["study"], *record["overrides"], *rates, *["--smoke"] * record["smoke"]])


def _seeds_there(out: Path) -> int:
    """How many seeds some row has."""
    numbers = [folder.name.rpartition("-")[2] for folder in out.glob("runs/**/seed-*")]
    return max((int(number) + 1 for number in numbers if number.isdigit()), default=0)


def run_study(
    study: Study, out: Path, rows: Sequence[Row], seeds: int, console: Console, limit: float | None = None
) -> Path:
    """Run what is not finished, for at most `limit` seconds, and write the page, also when stopped; gives the page."""
    grid = Grid(study, out, rows, seeds, console)
    display, idle = grid.campaign.display, study.idle(rows)
    check_folder(study, out)
    grid.check()
    begin(study, out)
    for override in idle:
        display.say(f"{override} means nothing to the chosen rows, only to others of this study")
    try:
        if not grid.run(limit):
            display.say(
                f"time is up: {display.over} of {display.runs} runs are over. The same command goes on from here"
            )
        elif len(rows) == len(study.rows) and any(
            item.kind == "data" for one in study.spec.sections for item in one.figures
        ):
            with grid.campaign.alone():
                explore(study, out, grid.campaign)
    finally:
        with grid.campaign.alone():
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


class Grid:
    """One process's work on a study."""

    def __init__(self, study: Study, out: Path, rows: Sequence[Row], seeds: int, console: Console) -> None:
        self.study, self.out, self.rows, self.seeds = study, out, rows, seeds
        self.campaign = Campaign(out, engine.CampaignDisplay(console), page=False)
        self.over: set[Path] = set()  # runs that are counted as over

    def run(self, limit: float | None = None) -> bool:
        """All rows with the first seed, then all with the second, and so on: what is there early is there for every row.

        What other processes are at is passed over, and looked at again at the end. Gives whether all could run in `limit` seconds.
        """
        with engine.stoppable(limit) as signals:
            self._run_all(signals)
            return True
        return False

    def _run_all(self, signals: Signals) -> None:
        display = self.campaign.display
        images = len(self.campaign.cache.images(self.study.experiment(self.rows[0], 0).data, "train", display.say))
        experiments = {row.name: self.study.experiment(row, 0) for row in self.rows}
        costs = {name: images_trained(one, images * (1 - one.data.val_fraction)) for name, one in experiments.items()}
        stuck: dict[str, None] = {}  # a trial's is met with every seed
        left = [(row, seed) for seed in range(self.seeds) for row in self.rows if seed < (row.seeds or self.seeds)]
        display.plan([costs[row.name] for row, _ in left] + self._searches(costs))
        while left:
            elsewhere = []
            for row, seed in left:
                if signals.received is not None:
                    raise KeyboardInterrupt  # it went unheard, as it does in a destructor
                try:
                    self._do(row, seed, costs[row.name])
                except Busy:
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
            preflight(experiment, self.campaign.cache)
            if experiment.deterministic:
                set_deterministic(True)  # before the first run that is not: cuBLAS reads it once
            if self.study.tune(row, experiment):
                continue  # seen to when its settings are known
            for seed in range(min(self.seeds, row.seeds or self.seeds)):
                folder = run_folder(self.out, row, {}) / f"seed-{seed}"
                _refuse_other(read_outcome(folder, self.study.experiment(row, seed)))

    def _searches(self, costs: Mapping[str, float]) -> list[float]:
        """The costs of the runs that choose settings; how far rates must be widened is not known before."""
        planned = []
        for row in self.rows:
            if tune := self.study.tune(row, self.study.experiment(row, 0)):
                trials = combinations(tune)
                is_run = search_place(self.study, row, trials[0], self.out)[0].name == "seed-0"
                planned += [costs[row.name]] * (len(trials) - is_run)
        return planned

    def _do(self, row: Row, seed: int, cost: float) -> None:
        def attempt(settings: Values, folder: Path, experiment: Experiment) -> None:
            self._run(row, Attempt(f"{row.name} trying {in_words(settings)}", folder, experiment, cost))

        _, chosen = choose(self.study, row, self.out, attempt)
        if chosen is not None:
            folder = run_folder(self.out, row, chosen) / f"seed-{seed}"
            self._run(row, Attempt(f"{row.name} seed {seed}", folder, self.study.experiment(row, seed, chosen), cost))

    def _run(self, row: Row, attempt: Attempt) -> None:
        """One run, or what is left of it."""
        if attempt.folder in self.over:
            return
        with engine.claim(self.out, attempt.folder):
            outcome = read_outcome(attempt.folder, attempt.experiment)
            _refuse_other(outcome)
            if outcome.over:
                self.campaign.display.count(attempt.cost, before=True)
            else:
                self._carry_out(row, attempt, outcome)
        self.over.add(attempt.folder)

    def _carry_out(self, row: Row, attempt: Attempt, outcome: Outcome) -> None:
        began, display = time.perf_counter(), self.campaign.display
        try:
            summary = self.campaign.carry_out(attempt, outcome.state)
            tested = summary.get("test_accuracy")
            word = f"val {_percent(summary['val_accuracy'])}" if tested is None else f"test {_percent(tested)}"
        except Diverged:
            word = "diverged"
        except (Busy, Stopped):
            raise
        except FedsieveError as error:
            if outcome.state == "not run":
                raise FedsieveError(f"{attempt.name}: {error}", error.exit_code) from None
            raise Stuck(f"{attempt.name}: {error}. Delete {attempt.folder} to run it anew") from None
        if not self.study.keep_all:
            first = attempt.experiment.seed == 0
            engine.slim(attempt.folder, weights=first, masks=first or row.keep)
        about = display.count(attempt.cost)
        took = time.perf_counter() - began
        display.say(f"{display.over:>3} of {display.runs}  {attempt.name}: {word}, {took:.1f} s; {about}")


def _refuse_other(outcome: Outcome) -> None:
    if outcome.state == "another config":
        raise FedsieveError(
            f"{outcome.folder}: made with another config: it {outcome.reason}. Rows of two configs are not mixed: "
            "choose another --out, or delete this run"
        )


def _percent(accuracy: float) -> str:
    return f"{100 * accuracy:.2f} %"


def explore(study: Study, out: Path, campaign: Campaign) -> None:
    """Write a page about the study's training images, and some of them to show, once."""
    folder, experiment = out / "data", study.experiment(next(iter(study.rows.values())), 0)
    if folder.exists():
        return
    campaign.display.say("looking at the data")
    images = campaign.cache.images(experiment.data, "train", campaign.display.say)
    rows = generator(experiment.seed, "samples").permutation(len(images))[:SHOWN]
    names = np.array(images.class_names)[images.labels[rows].numpy()]
    with folder_atomic(folder) as filling:
        write_page(experiment.model_copy(update={"name": study.name}), filling, campaign.display.say)
        np.savez_compressed(filling / SAMPLE, images=images.images[rows].numpy(), names=names)

"""The evidence of a study, as far as it ran: measures by row and seed, their means and spreads, and what claims become.

Only finished runs of the row's own config count. Whatever else lies in a row's place is missing, with the reason.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedsieve.campaign.axes import Values, combinations
from fedsieve.campaign.definition import ClaimSpec, Row, Study
from fedsieve.campaign.engine import Outcome, best_of, differences, read_outcome
from fedsieve.config import Experiment
from fedsieve.errors import FedsieveError
from fedsieve.report.folder import RunFolder
from fedsieve.report.html import flatten
from fedsieve.report.intervals import paired
from fedsieve.report.measures import RATIO
from fedsieve.report.measuring import measure

TRIES, WIDEN = 8, ".lr"  # rates tried at most, and what keys of rates end in: beyond an edge there are more
FLAT = 0.005  # accuracies that differ by less tell nothing: on a plateau noise has its best inside


@dataclass(frozen=True)
class Tried:
    """Settings that were tried for a row. Their accuracy is -1 where they diverged."""

    settings: Values
    outcome: Outcome
    accuracy: float | None

    @property
    def score(self) -> float | None:
        return self.accuracy if self.accuracy is not None and self.accuracy >= 0 else None


Try = Callable[[Values, Path, Experiment], None]


def choose(study: Study, row: Row, out: Path, attempt: Try = lambda *_: None) -> tuple[list[Tried], Values | None]:
    """The settings tried for a row, each by an `attempt`, and the best; None where all diverged or some are not over."""
    tune = study.tune(row, study.experiment(row, 0))
    trials: list[Tried] = []
    while tune and (settings := next_settings(tune, trials, study.smoke)) is not None:
        folder, experiment = search_place(study, row, settings, out)
        attempt(settings, folder, experiment)
        outcome = read_outcome(folder, experiment)
        accuracy = -1.0 if outcome.state == "diverged" else None
        if outcome.run and outcome.run.summary:
            accuracy = outcome.run.summary.val_accuracy
        trials.append(Tried(settings, outcome, accuracy))
    best = best_of(trials)
    if not tune:
        return trials, {}
    return trials, best.settings if best and all(trial.outcome.over for trial in trials) else None


def search_place(study: Study, row: Row, settings: Values, out: Path) -> tuple[Path, Experiment]:
    """Where settings are tried, and the run that tries them: the row's own run of seed 0, if it does just that."""
    folder = run_folder(out, row, settings)
    search, first = study.search(row, settings), study.experiment(row, 0, settings)
    if not differences(search.model_dump(mode="json"), first.model_dump(mode="json")):
        return folder / "seed-0", first
    return folder / "search", search


def run_folder(out: Path, row: Row, settings: Mapping[str, Any]) -> Path:
    """Where the runs of a row with some chosen settings lie."""
    words = [
        f"{key.rpartition('.')[2]}-{f'{value:g}' if isinstance(value, float) else value}"
        for key, value in settings.items()
    ]
    return out / "runs" / row.name / "_".join(words)


def in_words(settings: Values) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in settings.items())


def next_settings(tune: Mapping[str, Sequence[Any]], trials: Sequence[Tried], smoke: bool) -> Values | None:
    """The settings to try next for a row; None when all have been tried."""
    had = [trial.settings for trial in trials]
    for settings in combinations(tune):
        if settings not in had:
            return settings
    key, *more = tune
    if more or smoke or not key.endswith(WIDEN) or len(trials) >= TRIES or len(set(tune[key])) < 2:
        return None
    best = best_of(trials)
    rates = sorted({trial.settings[key] for trial in trials})
    if best is None or not all(trial.outcome.over for trial in trials):
        return None
    step = max(2.0, rates[1] / rates[0])
    known = {trial.settings[key]: trial.accuracy for trial in trials if trial.accuracy is not None}
    if max(known.values()) - known.get(rates[-1], -1.0) < FLAT:
        beyond = rates[-1] * step
    elif best.settings[key] == rates[0]:
        beyond = rates[0] / step
    else:
        return None
    return {key: float(f"{beyond:.3g}")}


@dataclass
class RowResult:
    """A row of a study: the settings that were tried for it, and its runs."""

    row: Row
    experiment: Experiment | None  # None: settings still to be chosen
    trials: list[Tried]
    outcomes: list[Outcome]
    others: Mapping[str, "RowResult"] = field(default_factory=dict, repr=False)  # of the study, by name: for ratios
    _known: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def runs(self) -> list[RunFolder]:
        return [outcome.run for outcome in self.outcomes if outcome.run is not None]

    @property
    def broken(self) -> list[Outcome]:
        """Runs that were begun and have no result that counts."""
        return [outcome for outcome in self.outcomes if outcome.state not in ("finished", "not run")]

    @property
    def begun(self) -> bool:
        """True where any part of it ran, be it only a trial."""
        return any(one.state != "not run" for one in [*self.outcomes, *(trial.outcome for trial in self.trials)])

    @property
    def chosen(self) -> Values:
        best = best_of(self.trials) if self.experiment else None  # else the search is not over
        return best.settings if best else {}

    @property
    def at_edge(self) -> bool:
        """True where the chosen rate is the lowest or highest that was tried: a better one may lie beyond."""
        for key in self.chosen:
            rates = sorted({trial.settings[key] for trial in self.trials})
            if key.endswith(WIDEN) and len(rates) > 1 and self.chosen[key] in (rates[0], rates[-1]):
                return True
        return False

    @property
    def state(self) -> str:
        """In a word, or with reasons."""
        missing = [outcome for outcome in self.outcomes if outcome.state != "finished"]
        if not missing:
            return "finished" if self.outcomes else "not run"
        if all(outcome.state == "not run" for outcome in self.outcomes):
            return "not run"
        words = [f"seed {item.seed} {item.state}" + (f" ({item.reason})" if item.reason else "") for item in missing]
        return "; ".join(words)

    def by_seed(self, name: str) -> dict[int, float]:
        """A measure of every finished run that has it; a ratio, where the other row has a run with the same seed."""
        name, _, reference = name.partition(RATIO)
        if reference:
            to = self.others[reference].by_seed(name) if reference in self.others else {}
            return {seed: value / to[seed] for seed, value in self.by_seed(name).items() if to.get(seed)}
        if name not in self._known:
            self._known[name] = [measure(run, name) for run in self.runs]
        known = zip(self.runs, self._known[name], strict=True)
        return {run.experiment.seed: value for run, value in known if value is not None and math.isfinite(value)}

    def values(self, name: str) -> np.ndarray:
        return np.array(list(self.by_seed(name).values()))

    def mean(self, name: str) -> float | None:
        values = self.values(name)
        return float(values.mean()) if len(values) else None

    def spread(self, name: str) -> float | None:
        """Standard deviation over the seeds; one seed has none."""
        values = self.values(name)
        return float(values.std(ddof=1)) if len(values) > 1 else None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The row's config by dotted path, stages by name, the last also as `last`; `partition` in words,
        and `way`, the first part of its name."""
        if self.experiment is None:
            return {}
        tree = self.experiment.model_dump(mode="json")
        stage = {f"last.{key}": value for key, value in flatten(tree["stages"][-1]).items()}
        return flatten(tree) | stage | {"partition": partition(self.experiment), "way": self.row.group}


def partition(experiment: Experiment) -> str:
    """Who holds what, in a word."""
    if experiment.federation is None:
        return "central"
    kind, fields = experiment.federation.partition.kind, experiment.federation.partition.fields
    words = {"classes": "Nc={nc}", "dirichlet": "Dir({alpha})", "quantity": "sizes({alpha})", "iid": "IID"}
    return words.get(kind, kind).format(**fields)


def read_results(study: Study, out: Path, rows: Sequence[Row], seeds: int) -> dict[str, RowResult]:
    """Every row's runs in the study folder `out`."""
    results: dict[str, RowResult] = {}
    for row in rows:
        results[row.name] = replace(read_result(study, out, row, seeds), others=results)
    return results


def read_result(study: Study, out: Path, row: Row, seeds: int) -> RowResult:
    count = min(seeds, row.seeds or seeds)
    trials: list[Tried] = []
    try:
        trials, chosen = choose(study, row, out)
        reason = "its settings are not chosen yet"
        begun = [trial for trial in trials if not trial.outcome.over and trial.outcome.state != "not run"]
        if begun:
            reason += f" ({'; '.join(f'{in_words(trial.settings)} {trial.outcome.state}' for trial in begun)})"
        elif trials and all(trial.outcome.state == "diverged" for trial in trials):
            reason = "every setting that was tried diverged"
    except FedsieveError as error:  # an override for the rows that were chosen does not suit this one
        chosen, reason = None, str(error)
    if chosen is None:
        return RowResult(row, None, trials, [Outcome(out, seed, "not run", reason) for seed in range(count)])
    folder = run_folder(out, row, chosen)
    experiments = [study.experiment(row, seed, chosen) for seed in range(count)]
    outcomes = [read_outcome(folder / f"seed-{experiment.seed}", experiment) for experiment in experiments]
    return RowResult(row, experiments[0], trials, outcomes)


@dataclass(frozen=True)
class Verdict:
    claim: ClaimSpec
    word: Literal["holds", "does not hold", "cannot be told", "not run"]
    difference: float | None = None
    interval: tuple[float, float] | None = None
    seeds: int = 0


def judge(claim: ClaimSpec, results: Mapping[str, RowResult]) -> Verdict:
    """Judge a claim by the difference, seed by seed, between two rows (or a row and a number), and the 95 % interval of
    its mean (Student). Where seeds make no difference to rows, one seed settles it."""
    found = [results[name].by_seed(claim.measure) if name in results else {} for name in claim.rows]
    other = dict.fromkeys(found[0], claim.than) if claim.exceeds else found[1]
    pairs = [(value, other[seed]) for seed, value in found[0].items() if seed in other]
    rows = [results[name] for name in claim.rows if name in results]
    if not pairs:  # rows that ran may lack a measure, as steadiness after few evaluations
        return Verdict(claim, "cannot be told" if rows and all(row.runs for row in rows) else "not run")
    one, two = zip(*pairs, strict=True)
    mean = float(np.subtract(one, two).mean())
    exact = all(row.row.seeds == 1 for row in rows)
    if len(pairs) == 1 and not exact:
        return Verdict(claim, "cannot be told", mean, None, 1)
    low, high = (mean, mean) if exact else paired(one, two)
    if claim.level:
        holds, fails = -claim.within <= low and high <= claim.within, low > claim.within or high < -claim.within
    elif claim.no_worse:
        holds, fails = low >= -claim.within, high < -claim.within
    else:
        holds, fails = low > 0, high <= 0  # equal with every seed is not above
    word: Any = "holds" if holds else "does not hold" if fails else "cannot be told"
    return Verdict(claim, word, mean, None if exact else (low, high), len(pairs))


def agreement(rows: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Of all pairs of rows that differ in their second number, how many stand in the same order by both, and how many
    such pairs there are."""
    both = [(a, b) for a, b in itertools.combinations(rows, 2) if a[1] != b[1]]
    return sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in both), len(both)

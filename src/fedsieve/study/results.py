"""What came out of a study, as far as it ran: measures by row and seed, their means and spreads, and what claims become.

Only finished runs of the row's own config count. Whatever else lies in a row's place is missing, with the reason.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.stats import t as student

from fedsieve.config import Experiment, load_config, to_yaml
from fedsieve.errors import FedsieveError
from fedsieve.mask.overlap import AROUND
from fedsieve.report.folder import RunFolder, read_masks, read_run
from fedsieve.report.html import flatten
from fedsieve.report.traffic import of_dense, read_traffic
from fedsieve.runner.setup import config_digest
from fedsieve.study.definition import STEADY, ClaimSpec, Row, Study

State = Literal["finished", "diverged", "not run", "unfinished", "damaged", "another config"]
FAILED = "failed.json"  # in the folder of a run that diverged
TRIES, WIDEN = 8, ".lr"  # a rate at the edge of what was tried is tried further, up to so many
FLAT = 0.005  # accuracies that differ by less tell nothing: on a plateau noise has its best inside
Settings = dict[str, Any]


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One run of a row, as it is found in its folder."""

    folder: Path
    seed: int
    state: State
    reason: str = ""
    run: RunFolder | None = None


def read_outcome(folder: Path, experiment: Experiment) -> Outcome:
    """What lies in the place of a run of `experiment`."""
    seed = experiment.seed
    if folder.exists() and not folder.is_dir():
        return Outcome(folder, seed, "damaged", "a file lies where the run's folder belongs")
    if not (folder / "config.yaml").exists():
        ended = (folder / "summary.json").exists()
        return Outcome(folder, seed, *(("damaged", "config.yaml is gone") if ended else ("not run",)))
    try:
        if changed := differences(folder, experiment):
            return Outcome(folder, seed, "another config", f"differs in {', '.join(changed)}")
        if (folder / FAILED).exists():
            return Outcome(folder, seed, "diverged", _read_failed(folder / FAILED))
        run = read_run(folder)
    except (FedsieveError, OSError, ValueError, KeyError, TypeError) as error:
        return Outcome(folder, seed, "damaged", str(error).splitlines()[0])
    if run.missing:
        return Outcome(folder, seed, "unfinished" if run.missing.startswith("unfinished") else "damaged", run.missing)
    if run.torn:
        return Outcome(folder, seed, "damaged", run.torn)
    return Outcome(folder, seed, "finished", run=run)


def _read_failed(file: Path) -> str:
    try:
        return str(json.loads(file.read_text())["reason"])
    except (ValueError, KeyError, TypeError):
        raise FedsieveError(f"{file.name} is damaged") from None


def differences(folder: Path, experiment: Experiment) -> list[str]:
    """The settings, by dotted path with their two values, in which a run folder's config is not that of `experiment`."""
    if (folder / "config.yaml").read_text(encoding="utf-8", errors="replace") == to_yaml(experiment):
        return []
    there = load_config(folder / "config.yaml")
    if config_digest(there) == config_digest(experiment):
        return []
    old, new = (flatten(config.model_dump(mode="json")) for config in (there, experiment))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"{key} ({old.get(key)} there, {new.get(key)} here)" for key in keys]


# --- what was chosen -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """Settings that were tried for a row, and how good they were on validation; None: not known (yet)."""

    settings: Settings
    outcome: Outcome
    accuracy: float | None

    @property
    def over(self) -> bool:
        return self.outcome.state in ("finished", "diverged")


def trial(study: Study, row: Row, settings: Settings, out: Path) -> Trial:
    outcome = read_outcome(*trial_place(study, row, settings, out))
    accuracy = -1.0 if outcome.state == "diverged" else None
    if outcome.run and outcome.run.summary:
        accuracy = outcome.run.summary.val_accuracy
    return Trial(settings, outcome, accuracy)


def trial_place(study: Study, row: Row, settings: Settings, out: Path) -> tuple[Path, Experiment]:
    """Where a trial lies, and what it does: one that does what the row does with seed 0 anyway is that run."""
    folder = run_folder(out, row, settings)
    search, first = study.search(row, settings), study.experiment(row, 0, settings)
    if config_digest(search) == config_digest(first):
        return folder / "seed-0", first
    return folder / "search", search


def run_folder(out: Path, row: Row, settings: Mapping[str, Any]) -> Path:
    """Where the runs of a row with some chosen settings lie."""
    words = [
        f"{key.rpartition('.')[2]}-{f'{value:g}' if isinstance(value, float) else value}"
        for key, value in settings.items()
    ]
    return out / "runs" / row.name / "_".join(words)


def tried_words(settings: Settings) -> str:
    """What was tried, in a few words."""
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in settings.items())


def next_settings(tune: Mapping[str, Sequence[Any]], trials: Sequence[Trial], smoke: bool) -> Settings | None:
    """What to try next for a row; None when all has been tried."""
    tried = [found.settings for found in trials]
    for values in itertools.product(*tune.values()):
        settings = dict(zip(tune, values, strict=True))
        if settings not in tried:
            return settings
    key, *more = tune
    if more or smoke or not key.endswith(WIDEN) or len(trials) >= TRIES or len(set(tune[key])) < 2:
        return None
    best = best_trial(trials)
    rates = sorted({found.settings[key] for found in trials})
    if best is None or not all(found.over for found in trials):
        return None
    step = max(2.0, rates[1] / rates[0])
    known = {found.settings[key]: found.accuracy for found in trials if found.accuracy is not None}
    if max(known.values()) - known.get(rates[-1], -1.0) < FLAT:
        beyond = rates[-1] * step
    elif best.settings[key] == rates[0]:
        beyond = rates[0] / step
    else:
        return None
    return {key: float(f"{beyond:.3g}")}


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The trial with the best validation accuracy, the first of equals; None where none has any."""
    known = [found for found in trials if found.accuracy is not None and found.accuracy >= 0]
    return max(known, key=lambda found: found.accuracy or 0.0, default=None)


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """A row of a study: what was chosen for it, and its runs."""

    row: Row
    experiment: Experiment | None  # None: settings still to be chosen
    trials: list[Trial]
    outcomes: list[Outcome]
    _known: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def runs(self) -> list[RunFolder]:
        return [outcome.run for outcome in self.outcomes if outcome.run is not None]

    @property
    def begun(self) -> bool:
        """Whether something of it ran, be it only a trial."""
        found = [*self.outcomes, *(trial.outcome for trial in self.trials)]
        return any(outcome.state != "not run" for outcome in found)

    @property
    def chosen(self) -> Settings:
        best = best_trial(self.trials) if self.experiment else None  # else the search is not over
        return best.settings if best else {}

    @property
    def at_edge(self) -> bool:
        """Whether the chosen rate is the lowest or highest that was tried: a better one may lie beyond."""
        for key in self.chosen:
            rates = sorted({found.settings[key] for found in self.trials})
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
        """A measure of every finished run that has it."""
        if name not in self._known:
            self._known[name] = [measure(run, name) for run in self.runs]
        pairs_ = zip(self.runs, self._known[name], strict=True)
        return {run.experiment.seed: value for run, value in pairs_ if value is not None and math.isfinite(value)}

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
        way = self.row.name.partition("/")[0]
        return flatten(tree) | stage | {"partition": partition(self.experiment), "way": way}


def partition(experiment: Experiment) -> str:
    """Who holds what, in a word."""
    if experiment.federation is None:
        return "central"
    kind = experiment.federation.partition
    words = {"classes": f"Nc={kind.nc}", "dirichlet": f"Dir({kind.alpha})", "quantity": f"sizes({kind.alpha})"}
    return words.get(kind.kind, kind.kind.upper() if kind.kind == "iid" else kind.kind)


def read_results(study: Study, out: Path, rows: Sequence[Row], seeds: int) -> dict[str, Result]:
    """Every row's runs in the study folder `out`."""
    return {row.name: read_result(study, out, row, seeds) for row in rows}


def read_result(study: Study, out: Path, row: Row, seeds: int) -> Result:
    count = min(seeds, row.seeds or seeds)
    try:
        tune = study.tune(row, study.experiment(row, 0))
    except FedsieveError as error:  # what was set for other rows, which were chosen
        return Result(row, None, [], [Outcome(out, seed, "not run", str(error)) for seed in range(count)])
    trials: list[Trial] = []
    while tune and (settings := next_settings(tune, trials, study.smoke)) is not None:
        trials.append(trial(study, row, settings, out))
    best = best_trial(trials)
    if tune and (best is None or not all(found.over for found in trials)):
        begun = [found for found in trials if not found.over and found.outcome.state != "not run"]
        told = "; ".join(f"{tried_words(found.settings)} {found.outcome.state}" for found in begun)
        reason = "its settings are not chosen yet" + (f" ({told})" if told else "")
        if trials and all(found.outcome.state == "diverged" for found in trials):
            reason = "every setting that was tried diverged"
        waiting: list[Outcome] = [Outcome(out, seed, "not run", reason) for seed in range(count)]
        return Result(row, None, trials, waiting)
    chosen = best.settings if best else {}
    folder = run_folder(out, row, chosen)
    experiments = [study.experiment(row, seed, chosen) for seed in range(count)]
    outcomes = [read_outcome(folder / f"seed-{experiment.seed}", experiment) for experiment in experiments]
    return Result(row, experiments[0], trials, outcomes)


# --- measures --------------------------------------------------------------------------------------------------------


def measure(run: RunFolder, name: str) -> float | None:
    """A number of one run: a field of its summary, of a stage (`head.test_loss`, `last.seconds`), or made here."""
    if name in MADE:
        return MADE[name](run)
    if run.summary is None:
        return None
    stages = run.summary.stages
    first, _, rest = name.partition(".")
    part: Any = run.summary
    if rest and (first == "last" or first in stages):
        if rest == "seconds":
            return _seconds(run, first if first in stages else run.experiment.stages[-1].name)
        part, name = stages.get(first) or list(stages.values())[-1], rest
    elif first == "clients":
        part, name = run.summary.client_accuracy, rest
    elif first == "personal":
        method, _, name = rest.partition(".")
        part = run.summary.personal.get(method)
    value = getattr(part, name, None)
    return None if value is None else float(value)


def _last(run: RunFolder) -> list[dict[str, Any]]:
    """Records of the last stage."""
    name = run.experiment.stages[-1].name
    return [record for record in run.records if record.get("stage") == name]


def _column(run: RunFolder, *names: str) -> list[float]:
    """The first of these fields that the last stage's records have."""
    for name in names:
        if values := [record[name] for record in _last(run) if record.get(name) is not None]:
            return values
    return []


def _seconds(run: RunFolder, *stages: str) -> float | None:
    """How long stages took, were all their epochs or rounds typical ones. Some also compile or compute features, but
    only in the first row of a process: this would tell more of the order of rows than of the row."""
    total = 0.0
    for stage in stages:
        values = [record["seconds"] for record in run.records if record.get("stage") == stage and "seconds" in record]
        if len(values) < 2:
            return None
        total += len(values) * float(np.median(values))
    return total


def _bytes(run: RunFolder) -> float | None:
    summary = run.summary
    if summary is None or summary.bytes_up is None or summary.bytes_down is None:
        return None
    return float(summary.bytes_up + summary.bytes_down)


def _steadiness(run: RunFolder) -> float | None:
    """How far the last evaluations deviate from a straight line: a run that still rises is not unsteady for that."""
    values = np.array(_column(run, "test_accuracy", "val_accuracy")[-STEADY:])
    if len(values) < STEADY:
        return None
    line = np.polynomial.Polynomial.fit(np.arange(STEADY), values, 1)
    return float(np.std(values - line(np.arange(STEADY))))


def _jaccard(run: RunFolder) -> float | None:
    found = run.client_pairs
    return None if found is None else float(np.nanmean(found.total))


def _chance(run: RunFolder) -> float | None:
    found = run.client_pairs
    return None if found is None else float(np.nanmean(found.chance))


def _third(run: RunFolder, last: bool) -> float | None:
    """Mean agreement in the last, or first, third of the blocks; what lies around them is no block."""
    found = run.client_pairs
    if found is None:
        return None
    inner = [place for place, name in enumerate(found.block_names) if name not in AROUND]
    count = max(1, len(inner) // 3)
    return float(np.nanmean(found.blocks[inner[-count:] if last else inner[:count]]))


def _difference(one: float | None, two: float | None) -> float | None:
    return None if one is None or two is None else one - two


def _numbers_up(run: RunFolder) -> float | None:
    """How many numbers all updates carried, counted as the drift report does: for every weight its value and, where
    only some are sent, one index for each dimension of its tensor."""
    if run.messages is None or run.summary is None:
        return None
    stage = run.experiment.stages[-1]
    sent = sum(n for (name, _, _, what, _), n in run.messages.items() if name == stage.name and what == "update")
    trained = run.summary.stages[stage.name].trained
    if run.experiment.mask_of(stage) is None:
        return None if trained is None else float(sent * trained)
    own = read_masks(run, []).get(stage.name)
    masks = list(own.clients.values()) or list(own.shared.values()) if own else []
    each = [
        sum(count * (1 + len(shape)) for count, shape in zip(mask.counts().values(), mask.space.shapes, strict=True))
        for mask in masks
    ]
    return sent * float(np.mean(each)) if each else None


def _best_test_at(run: RunFolder) -> float | None:
    """The epoch or round of the last stage that did best on test, as reports choose it."""
    tested = [record for record in _last(run) if record.get("test_accuracy") is not None]
    best = max(tested, key=lambda record: record["test_accuracy"], default=None)
    return None if best is None else float(best.get("round") or best["epoch"])


def _gain(run: RunFolder) -> float | None:
    """What the last stage adds to the one before it."""
    names = [stage.name for stage in run.experiment.stages]
    return _difference(measure(run, "test_accuracy"), measure(run, f"{names[-2]}.test_accuracy") if names[1:] else None)


def _first(values: Sequence[float]) -> float | None:
    return values[0] if values else None


MADE: dict[str, Callable[[RunFolder], float | None]] = {
    "bytes": _bytes,
    "of_dense": lambda run: of_dense(read_traffic(run)),
    "best_test_accuracy": lambda run: max(_column(run, "test_accuracy"), default=None),
    "best_test_at": _best_test_at,
    "seconds": lambda run: _seconds(run, *(stage.name for stage in run.experiment.stages)),
    "steadiness": _steadiness,
    "mean_drift": lambda run: float(np.mean(found)) if (found := _column(run, "drift")) else None,
    "train_accuracy": lambda run: _first(_column(run, "train_accuracy")[-1:]),
    "jaccard": _jaccard,
    "jaccard_chance": _chance,
    "jaccard_deep": lambda run: _third(run, last=True),
    "jaccard_deepens": lambda run: _difference(_third(run, last=True), _third(run, last=False)),
    "numbers_up": _numbers_up,
    "epsilon": lambda run: run.summary.privacy.get("epsilon") if run.summary else None,
    "gain": _gain,
    "personal_gain": lambda run: _difference(measure(run, "personal.local.mean"), measure(run, "personal.global.mean")),
}


# --- claims ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    claim: ClaimSpec
    word: Literal["holds", "does not hold", "cannot be told", "not run"]
    difference: float | None = None
    interval: tuple[float, float] | None = None
    seeds: int = 0


def judge(claim: ClaimSpec, results: Mapping[str, Result]) -> Verdict:
    """What the runs say of a claim: the difference, seed by seed, between two rows (or a row and a number), and the 95 %
    interval of its mean (Student). Of rows that seeds make no difference to, one seed tells all there is."""
    found = [results[name].by_seed(claim.measure) if name in results else {} for name in claim.rows]
    if claim.exceeds:
        apart = np.array([value - claim.than for value in found[0].values()])
    else:
        apart = np.array([found[0][seed] - found[1][seed] for seed in found[0] if seed in found[1]])
    rows = [results[name] for name in claim.rows if name in results]
    if not len(apart):  # rows that ran may lack a measure, as steadiness after few evaluations
        return Verdict(claim, "cannot be told" if rows and all(row.runs for row in rows) else "not run")
    mean = float(apart.mean())
    exact = all(row.row.seeds == 1 for row in rows)
    if len(apart) == 1 and not exact:
        return Verdict(claim, "cannot be told", mean, None, 1)
    half = 0.0 if exact else float(student.ppf(0.975, len(apart) - 1) * apart.std(ddof=1) / math.sqrt(len(apart)))
    low, high = mean - half, mean + half
    if claim.level:
        holds, fails = -claim.within <= low and high <= claim.within, low > claim.within or high < -claim.within
    elif claim.no_worse:
        holds, fails = low >= -claim.within, high < -claim.within
    else:
        holds, fails = low > 0, high <= 0  # equal with every seed is not above
    word: Any = "holds" if holds else "does not hold" if fails else "cannot be told"
    return Verdict(claim, word, mean, None if exact else (low, high), len(apart))


def agreement(pairs_: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Of all pairs of rows that differ in their second number, how many stand in the same order by both, and how many
    such pairs there are."""
    both = [(a, b) for a, b in itertools.combinations(pairs_, 2) if a[1] != b[1]]
    return sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in both), len(both)


# --- what all runs have in common ------------------------------------------------------------------------------------


def provenance(results: Sequence[Result]) -> dict[str, Any]:
    """Network, images, commits, hardware, seeds and time of the finished runs."""
    runs = [run for result in results for run in result.runs]

    def distinct(values: Iterator[Any]) -> list[str]:
        return sorted({str(value) for value in values if value is not None})

    def weights(run: RunFolder) -> str:
        model = run.experiment.model
        origin = model.weights if model.weights in ("hub", "none", "digits") else Path(model.weights).name
        return f"{model.backbone} ({'from the hub' if origin == 'hub' else f'weights: {origin}'})"

    return {
        "runs": len(runs),
        "backbones": distinct(weights(run) for run in runs),
        "sizes": distinct(f"{run.experiment.data.size} px" for run in runs),
        "data": distinct(Path(run.experiment.data.source).name for run in runs),
        "seeds": sorted({run.experiment.seed for run in runs}),
        "commits": distinct(
            run.environment.get("commit") or f"version {run.environment.get('fedsieve')}" for run in runs
        ),
        "hardware": distinct(run.environment.get("device") for run in runs),
        "torch": distinct(run.environment.get("torch") for run in runs),
        "seconds": sum(run.summary.seconds or 0.0 for run in runs if run.summary),
    }

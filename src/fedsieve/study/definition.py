"""What a study is: rows of experiments and the sections that show them, read from YAML inside the package.

A row is a base config and some settings laid over it. Nothing here runs anything, or needs torch.
"""

import csv
import functools
import io
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from string import Template
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from fedsieve.config import Experiment, Positive, Stage, Strict, apply_overrides, make_experiment, parse_yaml
from fedsieve.errors import FedsieveError, did_you_mean

STUDIES = ("drift", "personalization", "secure", "editing", "overlap", "beyond")
SEARCH_FRACTION = 0.1  # of the training images, to choose settings on, where a row itself holds out none
STEADY = 10  # evaluations at the end over which steadiness is taken: fewer show how fast a run learns
FOLDER = resources.files("fedsieve") / "assets" / "studies"
Pair = Annotated[list[str], Field(min_length=2, max_length=2)]


class RowSpec(Strict):
    """A row, or with `each` one for every combination of its values, which `$name` stands for."""

    name: str
    label: str | None = Field(None, description="what tables call it; default: its name")
    each: dict[str, list[Any]] = Field({}, description="values by name")
    base: str | None = Field(None, description="one of the study's bases")
    set: dict[str, Any] = Field({}, description="settings by dotted path")
    reported: str | list[str] = Field([], description="ids of what a report gives for it, in reported.csv")
    tune: dict[str, list[Any]] = Field({}, description="settings chosen on validation at seed 0, with what is tried")
    search: dict[str, Any] = Field({}, description="settings of the runs that choose, where they differ")
    seeds: Positive | None = Field(None, description="at most so many; where seeds make no difference, 1")
    keep: bool = Field(False, description="clients' masks are kept of every seed: something is measured on them")


class FigureSpec(Strict):
    kind: Literal["lines", "dots", "curves", "scatter", "allocation", "confusion", "predictions", "overlap", "data"]
    title: str
    rows: list[str] = Field([], description="default: those of the section")
    x: str | None = Field(None, description="lines: a setting by dotted path, or partition; scatter: a measure")
    by: str | None = Field(None, description="lines: the setting that tells lines apart")
    y: str = "test_accuracy"
    log: bool = False


class ClaimSpec(Strict):
    """Something a report says of two rows (or, in beyond, that one would like to know)."""

    says: str
    above: Pair | None = Field(None, description="the first row's measure is above the second's")
    level: Pair | None = Field(None, description="the two differ by no more than `within`")
    no_worse: Pair | None = Field(None, description="the first is below the second by no more than `within`")
    within: float = 0.01
    exceeds: str | None = Field(None, description="the row's measure is above `than`")
    than: float = 0.0
    measure: str = "test_accuracy"

    @property
    def rows(self) -> list[str]:
        return self.above or self.level or self.no_worse or [self.exceeds or ""]


class SectionSpec(Strict):
    title: str
    text: str = ""
    rows: list[str] = Field([], description="patterns of rows' names")
    columns: list[str] = Field(["test_accuracy"], description="measures")
    figures: list[FigureSpec] = Field([])
    claims: list[ClaimSpec] = Field([])


class StudySpec(Strict):
    title: str
    source: str | None = Field(None, description="the report it follows")
    text: str
    assumed: list[str] = Field([], description="what the report leaves open, and how it is read here")
    words: dict[str, Any] = Field({}, description="names for values: a setting that is one of them means its value")
    base: dict[str, Any]
    bases: dict[str, dict[str, Any]] = Field({}, description="laid over the base")
    rows: list[RowSpec]
    sections: list[SectionSpec]


@dataclass(frozen=True)
class Row:
    name: str
    label: str
    tree: Mapping[str, Any]  # the experiment, without a seed
    reported: tuple[str, ...]  # ids in reported.csv
    tune: Mapping[str, Sequence[Any]]
    search: Mapping[str, Any]
    seeds: int | None
    keep: bool
    own: frozenset[str]  # the settings that make it this row, by dotted path


@dataclass(frozen=True)
class Study:
    """A study as it is to be run: its rows, and what the command line changed in all of them."""

    name: str
    spec: StudySpec
    rows: Mapping[str, Row]
    overrides: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    smoke: bool = False

    def select(self, patterns: Sequence[str]) -> list[Row]:
        """The rows whose names match one of the patterns (all, where there are none), in the study's order."""
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in self.rows):
                raise FedsieveError(
                    f'--rows: no row of {self.name} matches "{pattern}".{did_you_mean(pattern, self.rows)} '
                    f"`fedsieve study {self.name} --list` shows them"
                )
        wanted = patterns or ["*"]
        chosen = [row for row in self.rows.values() if any(fnmatchcase(row.name, pattern) for pattern in wanted)]
        self._check_overrides(chosen)
        return chosen

    def idle(self, rows: Sequence[Row]) -> list[str]:
        """What the command line changed that means nothing to these rows, but does to others of the study."""
        return [override for override in self.overrides if not any(applies(row, override) for row in rows)]

    @property
    def looks_at_data(self) -> bool:
        return any(figure.kind == "data" for section in self.spec.sections for figure in section.figures)

    def matching(self, pattern: str) -> list[Row]:
        """The rows that a pattern of the study's own means."""
        return [row for row in self.rows.values() if fnmatchcase(row.name, pattern)]

    def experiment(self, row: Row, seed: int, chosen: Mapping[str, Any] = {}) -> Experiment:
        """What a row does with one seed and the settings that were chosen for it."""
        return self._experiment(row, dict(row.tree), seed, chosen)

    def search(self, row: Row, tried: Mapping[str, Any]) -> Experiment:
        """What is run to see how good some settings of a row are, on validation."""
        given = {**row.search, **self._search_lengths(row), **tried}
        experiment = self._experiment(row, dict(row.tree), 0, given)
        held = experiment.data.val_fraction or SEARCH_FRACTION
        data = experiment.data.model_copy(update={"val_fraction": held})
        return experiment.model_copy(update={"data": data, "test": False, "test_curve": False})

    def _search_lengths(self, row: Row) -> dict[str, int]:
        """How long the stages of a search are: what the study says, and no longer than those of the row."""
        rows = {stage.name: stage.length for stage in self.experiment(row, 0).stages}
        lengths = {key: value for key, value in row.search.items() if key.endswith((".rounds", ".epochs"))}
        return {key: min(value, rows[key.split(".")[1]]) for key, value in lengths.items()}

    def tune(self, row: Row, experiment: Experiment) -> dict[str, list[Any]]:
        """What is tried for a row, by setting. In miniature only the first row of a group chooses, between two."""
        tune = {key: list(values) for key, values in row.tune.items()}
        last = experiment.stages[-1]
        if self.rates and last.method == "sgd":
            tune[f"stages.{last.name}.optimizer.lr"] = list(self.rates)
        if not self.smoke:
            return tune
        group = row.name.partition("/")[0]
        first = next(name for name in self.rows if name.partition("/")[0] == group)
        return {key: values[:2] for key, values in tune.items()} if row.name == first else {}

    def _experiment(self, row: Row, tree: dict[str, Any], seed: int, chosen: Mapping[str, Any]) -> Experiment:
        tree = {"tracking": [], **(miniature(tree) if self.smoke else tree)}
        tree["name"] = f"{self.name}-{row.name}".replace("/", "-")
        given = [override for override in self.overrides if applies(row, override)]
        where = f"study {self.name}, row {row.name}"
        return make_experiment(tree, [*given, *_overrides(chosen), f"seed={seed}"], where)

    def _check_overrides(self, rows: Sequence[Row]) -> None:
        for override in self.overrides:
            if override.partition("=")[0].strip() in ("seed", "name"):
                raise FedsieveError(f"command line: {override}: a study sets the seeds and names of its rows itself")
            if not any(applies(row, override) for row in self.rows.values()):
                raise FedsieveError(f"command line: {override} applies to none of the rows of {self.name}")
        for row in rows if self.overrides else ():
            self.experiment(row, 0)  # refused here, before anything is loaded, where a setting cannot be


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]  # JSON is YAML


# --- reading ---------------------------------------------------------------------------------------------------------


def load_study(
    name: str, overrides: Sequence[str] = (), rates: Sequence[float] = (), smoke: bool = False, where: Any = FOLDER
) -> Study:
    """A study of the package, or of another folder `where`."""
    if name not in STUDIES and where is FOLDER:
        raise FedsieveError(f'study: "{name}" is not there.{did_you_mean(name, STUDIES)} Allowed: {", ".join(STUDIES)}')
    file = f"{name}.yaml"
    tree = parse_yaml((where / file).read_text(encoding="utf-8"), file)
    try:
        spec = StudySpec.model_validate(tree)
    except ValidationError as error:
        problems = [f"{file}: {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise FedsieveError("\n".join(problems)) from None
    rows: dict[str, Row] = {}
    for row in (row for item in spec.rows for row in _expanded(item, spec, file)):
        if row.name in rows:
            raise FedsieveError(f"{file}: two rows are named {row.name}")
        rows[row.name] = row
    study = Study(name, spec, rows, tuple(overrides), tuple(rates), smoke)
    _check(study, file)
    return study


def _expanded(item: RowSpec, spec: StudySpec, file: str) -> list[Row]:
    rows = []
    for values in itertools.product(*item.each.values()):
        words = dict(zip(item.each, values, strict=True))
        own = _filled(item.model_dump(exclude={"each", "label"}), words)
        label = _filled(item.label or item.name, {key: _spoken(value) for key, value in words.items()})
        if own["base"] is not None and own["base"] not in spec.bases:
            raise FedsieveError(f"{file}: row {own['name']}: no base {own['base']}. There are: {', '.join(spec.bases)}")
        tree = _merged(spec.base, spec.bases[own["base"]] if own["base"] else {})
        settings = {key: _meant(value, spec.words) for key, value in own["set"].items()}
        tree = apply_overrides(tree, _overrides(settings))
        reported = [own["reported"]] if isinstance(own["reported"], str) else own["reported"]
        extra = {key: own[key] for key in ("tune", "search", "seeds", "keep")}
        rows.append(Row(own["name"], label, tree, tuple(reported), **extra, own=frozenset(settings)))
    return rows


def _spoken(value: Any) -> str:
    """A value as a label says it: nc5 is Nc=5, least_sensitive two words."""
    return re.sub(r"\bnc(\d+)\b", r"Nc=\1", re.sub(r"\biid\b", "IID", str(value))).replace("_", " ")


def _filled(node: Any, words: Mapping[str, Any]) -> Any:
    """`node` with `$name` replaced in every text; a text that is nothing but `$name` becomes the value itself."""
    if isinstance(node, Mapping):
        return {_filled(key, words): _filled(value, words) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(item, words) for item in node]
    if not isinstance(node, str):
        return node
    return words[node[1:]] if node[:1] == "$" and node[1:] in words else Template(node).substitute(words)


def _meant(value: Any, words: Mapping[str, Any]) -> Any:
    return words.get(value, value) if isinstance(value, str) else value


def _merged(base: Any, over: Any) -> Any:
    """`over` laid over `base`: mappings are joined unless they are of another kind, anything else is replaced."""
    mappings = isinstance(base, Mapping) and isinstance(over, Mapping)
    if not mappings or over.get("kind", base.get("kind")) != base.get("kind"):
        return deepcopy(over)
    return {key: _merged(base.get(key), over[key]) if key in over else deepcopy(base[key]) for key in {**base, **over}}


def _check(study: Study, file: str) -> None:
    """Refuse a definition that names rows, reported figures or measures that cannot be there."""
    known = {entry.id for entry in load_reported()}
    experiment = functools.cache(lambda name: make_experiment(study.rows[name].tree))
    for row in study.rows.values():
        for name in row.reported:
            if name not in known:
                raise FedsieveError(f"{file}: row {row.name}: reported.csv has no id {name}")
    for section in study.spec.sections:
        patterns = [*section.rows, *(pattern for figure in section.figures for pattern in figure.rows)]
        patterns += [name for claim in section.claims for name in claim.rows]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in study.rows):
                raise FedsieveError(f'{file}: section "{section.title}": no row matches {pattern}')
        _check_measures(study, section, experiment, f'{file}: section "{section.title}"')


def _check_measures(study: Study, section: SectionSpec, experiment: Callable[[str], Experiment], where: str) -> None:
    """Refuse columns and figures that no row of theirs can fill, and claims about what one of their rows lacks."""

    def able(patterns: Sequence[str], measure: str) -> list[bool]:
        rows = dict.fromkeys(row.name for pattern in patterns for row in study.matching(pattern))
        try:
            return [fills(experiment(name), measure) for name in rows]
        except FedsieveError as error:
            raise FedsieveError(f"{where}: {error}") from None

    wanted = [("column", section.rows, measure) for measure in section.columns if section.rows]
    for figure in section.figures:
        measures = {"lines": [figure.y], "dots": [figure.y], "scatter": [figure.x or "bytes", figure.y]}
        title = f'figure "{figure.title}"'
        wanted += [(title, figure.rows or section.rows, measure) for measure in measures.get(figure.kind, [])]
    for what, patterns, measure in wanted:
        if not any(able(patterns, measure)):
            raise FedsieveError(f"{where}: {what}: no row can have {measure}. Leave it out, or let a row measure it")
    for claim in section.claims:
        if not all(able(claim.rows, claim.measure)):
            raise FedsieveError(f'{where}: claim "{claim.says}": not all of its rows can have {claim.measure}')


# --- what a run can measure ------------------------------------------------------------------------------------------


def _federated(experiment: Experiment, _: Stage) -> bool:
    return experiment.federation is not None


def _own_masks(experiment: Experiment, stage: Stage) -> bool:
    sieve = experiment.mask_of(stage)
    return experiment.federation is not None and sieve is not None and sieve.scope == "client"


def _steadies(experiment: Experiment, stage: Stage) -> bool:
    every = experiment.federation.evaluate_every if experiment.federation else 1
    return (experiment.test_curve or experiment.data.val_fraction > 0) and -(-stage.length // every) >= STEADY


Can = Callable[[Experiment, Stage], bool]
OF_STAGES: dict[str, Can] = {  # whether a stage has it; without a stage's name, it is that of the whole run
    **dict.fromkeys(("test_accuracy", "test_loss"), lambda experiment, _: experiment.test),
    **dict.fromkeys(("val_accuracy", "val_loss"), lambda experiment, _: experiment.data.val_fraction > 0),
    **dict.fromkeys(("bytes_up", "bytes_down"), _federated),
    "drift": lambda experiment, stage: experiment.federation is not None and stage.method == "sgd",
    "seconds": lambda _, stage: stage.method == "sgd" and stage.length > 1,
}
OF_MASKS: dict[str, Can] = dict.fromkeys(
    ("calibration_seconds", "active"), lambda experiment, stage: experiment.mask_of(stage) is not None
)
OF_RUNS: dict[str, Can] = {  # made of the records, messages and masks of the last stage, or of the whole run
    **dict.fromkeys(("bytes", "of_dense", "numbers_up"), _federated),
    **dict.fromkeys(("best_test_accuracy", "best_test_at"), lambda experiment, _: experiment.test_curve),
    **dict.fromkeys(("jaccard", "jaccard_chance", "jaccard_deep", "jaccard_deepens"), _own_masks),
    "train_accuracy": lambda _, __: True,
    "mean_drift": OF_STAGES["drift"],
    "steadiness": _steadies,
    "epsilon": lambda experiment, _: experiment.privacy.dp is not None,
    "gain": lambda experiment, _: experiment.test and len(experiment.stages) > 1,
    "personal_gain": lambda experiment, _: _personal(experiment, "local"),
}
SPREADS = ("mean", "std", "worst_decile", "worst")


def _personal(experiment: Experiment, method: str) -> bool:
    personal = experiment.federation.personal if experiment.federation else None
    return personal is not None and method in ("global", *personal.methods)


def fills(experiment: Experiment, measure: str) -> bool:
    """Whether a finished run of `experiment` has `measure`. A measure that no run could have is refused."""
    *first, field = measure.split(".")
    stages = {stage.name: stage for stage in experiment.stages}
    last = experiment.stages[-1]
    match first:
        case []:
            can = (OF_STAGES | OF_RUNS).get(field)
            if can and field == "seconds":
                return all(can(experiment, stage) for stage in experiment.stages)
            if can:
                return can(experiment, last)
        case ["clients"] if field in SPREADS:
            return experiment.federation is not None
        case ["personal", method] if field in SPREADS:
            return _personal(experiment, method)
        case [name] if field in OF_STAGES | OF_MASKS:
            stage = last if name == "last" else stages.get(name)
            return stage is not None and (OF_STAGES | OF_MASKS)[field](experiment, stage)
    hint = f" It belongs to a stage: last.{field}." if not first and field in OF_MASKS else ""
    raise FedsieveError(f'there is no measure "{measure}".{hint}{did_you_mean(measure, [*OF_STAGES, *OF_RUNS])}')


# --- what was reported -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reported:
    """One figure of a report."""

    id: str
    metric: str
    value: float
    source: str
    note: str


@functools.cache
def load_reported() -> list[Reported]:
    """All figures that the reports give for rows of the studies."""
    text = (FOLDER / "reported.csv").read_text(encoding="utf-8")
    lines = csv.DictReader(io.StringIO(text))
    return [Reported(line["id"], line["metric"], float(line["value"]), line["source"], line["note"]) for line in lines]


def reported_of(row: Row, measure: str) -> Reported | None:
    """What a report gives for a row."""
    wanted = {(name, measure) for name in row.reported}
    return next((entry for entry in load_reported() if (entry.id, entry.metric) in wanted), None)


# --- settings for all rows -------------------------------------------------------------------------------------------

FEDERATED = {"federation", "message", "privacy", "executor", "clients_at_once"}
ROUNDS = {"rounds", "local", "budget", "warmup_rounds"}
EPOCHS = {"epochs", "warmup_epochs"}


def applies(row: Row, override: str) -> bool:
    """Whether an override changes a row: not where it means nothing (rounds of central training, the rule of a mask that is
    not there), and not what makes the row the one it is. How long a stage is may always be changed."""
    path = override.partition("=")[0].strip()
    first, *rest = path.split(".")
    central = row.tree.get("federation") is None
    length = first == "stages" and rest[1:] in (["rounds"], ["epochs"])
    if not length and any(
        f"{path}.".startswith(f"{key}.") or key.startswith(f"{path}.") for key in row.own - {"stages"}
    ):
        return False
    if first in FEDERATED:
        return not central
    if first == "mask":
        return row.tree.get("mask") is not None
    if first == "stages" and rest:
        stages = {str(stage["name"]): stage for stage in row.tree["stages"]}
        stage = stages.get(rest[0])
        if stage is None:
            return rest[0].isdigit() and int(rest[0]) < len(stages)
        never = ROUNDS | EPOCHS if stage.get("method") == "ridge" else ROUNDS if central else EPOCHS
        return not (len(rest) > 1 and rest[1] in never)
    return True


# The miniature of a row: its own kind of training, on a network, data and clients so small that it takes a blink.
TINY_MODEL = {"backbone": "vit_tiny_patch16_224", "weights": "none"}
TINY_OPTIONS = {"patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
TINY_CLIENTS, TINY_CLASSES = 30, 9  # three a round: the fewest that Krum and secure sums take


def miniature(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A row's experiment on the embedded data, with one or two rounds, or an epoch."""
    small = deepcopy(dict(tree))
    small |= {"device": "cpu", "threads": 1, "checkpoint": {"every_seconds": 3600.0}}
    data = small.setdefault("data", {})
    data |= {"source": "digits", "size": 8, "normalize": "half", "val_fraction": 0.2 if data.get("val_fraction") else 0}
    small["model"] = {**small.get("model", {}), **TINY_MODEL, "options": TINY_OPTIONS, "hidden": 16}
    sieves = [small.get("mask"), *(stage.get("mask") for stage in small["stages"])]
    for sieve in (sieve for sieve in sieves if sieve):
        sieve["fisher"] = {**sieve.get("fisher", {}), "samples": 16, "batch_size": 16}
        sieve["calibration_rounds"] = min(2, sieve.get("calibration_rounds", 1))
        if "refresh" in sieve:
            sieve["refresh"] = 1
    if dp := small.get("privacy", {}).get("dp"):
        small["privacy"]["dp"] = {"clip_norm": dp["clip_norm"], "noise_multiplier": 1.0}  # finding one takes seconds
    if federation := small.get("federation"):
        federation["clients"] = TINY_CLIENTS
        if federation.get("partition", {}).get("nc"):
            federation["partition"]["nc"] = min(federation["partition"]["nc"], TINY_CLASSES)
        if isinstance(rule := federation.get("aggregator"), dict):  # which a handful of clients must do for
            few = {"f": 0, "mix": 0, "m": 1, "share": 0.1}
            rule |= {key: few[key] for key in few.keys() & rule.keys()}
        if federation.get("personal"):
            federation["personal"] |= {"clients": 2, "local": {"steps": 1}}
    for stage in (stage for stage in small["stages"] if stage.get("method") != "ridge"):
        stage["batch_size"] = min(stage.get("batch_size", 128), 64) if federation else 512
        if "epochs" in stage:
            stage["epochs"] = 1
        if "rounds" in stage:
            stage |= {"rounds": 2, "local": {key: 1 for key in stage.get("local", {})}}
        for key in ("warmup_epochs", "warmup_rounds", "early_stopping"):
            stage.pop(key, None)
    return small

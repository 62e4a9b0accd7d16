"""Studies as data: rows of experiments and the sections that show them, read from YAML inside the package.

A row is a base config with some settings laid over it. Nothing here runs anything, or needs torch.
"""

import csv
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import resources
from string import Template
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from fedsieve.campaign.axes import spelled
from fedsieve.config import Experiment, Positive, Strict, apply_overrides, make_experiment, override_place, parse_yaml
from fedsieve.errors import FedsieveError, did_you_mean
from fedsieve.report.measures import RATIO, fills
from fedsieve.train.record import FIELDS

STUDIES: tuple[str, ...] = (
    "drift",
    "personalization",
    "secure",
    "editing",
    "overlap",
    "beyond",
    "frontier",
    "federation",
    "rules",
    "trust",
    "masks",
)
SEARCH_FRACTION = 0.1  # of the training images, to choose settings on, where a row itself holds out none
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
    seeds: Positive | None = Field(None, description="the most seeds to run; 1 where seeds make no difference")
    keep: bool = Field(False, description="clients' masks are kept of every seed: something is measured on them")


class FigureSpec(Strict):
    kind: Literal[
        "lines", "dots", "curves", "scatter", "allocation", "blocks", "confusion", "predictions", "overlap", "data"
    ]
    title: str
    rows: list[str] = Field([], description="default: those of the section")
    x: str | None = Field(
        None, description="lines: a setting by dotted path, or partition; scatter: a measure; curves: bytes or seconds"
    )
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
    columns: list[str] = Field(["test_accuracy"], description="measures; `MEASURE / ROW` is a ratio to a row's")
    figures: list[FigureSpec] = Field([])
    claims: list[ClaimSpec] = Field([])


class TableSpec(Strict):
    """Some rows of a study under other settings: `fedsieve study NAME --table TABLE` runs them."""

    overrides: list[str] = Field([], description="as on the command line")
    rates: list[float] = Field([], description="as --rates")
    rows: list[str] = Field([], description="patterns of rows' names; default: all")
    seeds: Positive = 3


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
    tables: dict[str, TableSpec] = Field({}, description="by name")


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
    fixed: frozenset[str]  # the settings that it stands for, by dotted path: no override changes them
    axes: frozenset[str] = frozenset()  # the settings whose values are in the names of its group

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Study:
    """A study as it is to be run: its rows, and what the command line changed in all of them."""

    name: str
    spec: StudySpec
    rows: Mapping[str, Row]
    overrides: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    smoke: bool = False
    keep_all: bool = False  # checkpoints, and every seed's weights and clients' masks

    def select(self, patterns: Sequence[str]) -> list[Row]:
        """The rows whose names match one of the patterns (all, where there are none), in the study's order."""
        for pattern in patterns:
            if not self.matching([pattern]):
                raise FedsieveError(
                    f'--rows: no row of {self.name} matches "{pattern}".{did_you_mean(pattern, self.rows)} '
                    f"`fedsieve study {self.name} --list` shows them"
                )
        wanted = {row.name for row in self.matching(patterns or ["*"])}
        chosen = [row for row in self.rows.values() if row.name in wanted]
        self._check_overrides(chosen)
        return chosen

    def idle(self, rows: Sequence[Row]) -> list[str]:
        """The overrides that change none of these rows, but others of the study."""
        return [override for override in self.overrides if not any(applies(row, override) for row in rows)]

    def matching(self, patterns: Iterable[str]) -> list[Row]:
        """The rows that patterns of the study's own mean, each once."""
        names = dict.fromkeys(name for pattern in patterns for name in self.rows if fnmatchcase(name, pattern))
        return [self.rows[name] for name in names]

    def experiment(self, row: Row, seed: int, chosen: Mapping[str, Any] = {}) -> Experiment:
        """The run of a row with one seed and the settings that were chosen for it."""
        tree = {"tracking": [], **(miniature(row.tree) if self.smoke else row.tree)}
        tree["name"] = f"{self.name}-{row.name}".replace("/", "-")
        given = [override for override in self.overrides if applies(row, override)]
        where = f"study {self.name}, row {row.name}"
        return make_experiment(tree, [*given, *spelled(chosen), f"seed={seed}"], where)

    def search(self, row: Row, tried: Mapping[str, Any]) -> Experiment:
        """The run that shows how good some settings of a row are, on validation."""
        lengths = {stage.name: stage.length for stage in self.experiment(row, 0).stages}
        settings = {  # as short as the study says, and no longer than the row
            key: min(value, lengths[key.split(".")[1]]) if _is_length(key) else value
            for key, value in row.search.items()
        }
        experiment = self.experiment(row, 0, {**settings, **tried})
        held = experiment.data.val_fraction or SEARCH_FRACTION
        data = experiment.data.model_copy(update={"val_fraction": held})
        return experiment.model_copy(update={"data": data, "test": False, "test_curve": False})

    def tune(self, row: Row, experiment: Experiment) -> dict[str, list[Any]]:
        """The values to try for a row, by setting. In miniature only the first row of a group chooses, between two."""
        tune = {key: list(values) for key, values in row.tune.items()}
        last = experiment.stages[-1]
        rate = f"stages.{last.name}.optimizer.lr"
        if self.rates and last.method == "sgd" and rate not in row.axes:
            tune[rate] = list(self.rates)
        if not self.smoke:
            return tune
        first = next(other for other in self.rows.values() if other.group == row.group)
        return {key: values[:2] for key, values in tune.items()} if row is first else {}

    def _check_overrides(self, rows: Sequence[Row]) -> None:
        for override in self.overrides:
            if override.partition("=")[0].strip() in ("seed", "name"):
                raise FedsieveError(f"command line: {override}: a study sets the seeds and names of its rows itself")
            touched = next((row for row in (*rows, *self.rows.values()) if applies(row, override)), None)
            if touched is None:
                raise FedsieveError(f"command line: {override} applies to none of the rows of {self.name}")
            self.experiment(touched, 0)  # wrong words are refused also where they mean nothing to the chosen rows
        for row in rows if self.overrides else ():
            self.experiment(row, 0)  # refused here, before anything is loaded, where a setting cannot be


# --- reading ---------------------------------------------------------------------------------------------------------


def load_study(
    name: str,
    overrides: Sequence[str] = (),
    rates: Sequence[float] = (),
    smoke: bool = False,
    where: Any = FOLDER,
    table: str | None = None,
) -> Study:
    """A study of the package, or of another folder `where`; with the settings of one of its tables."""
    if name not in STUDIES and where is FOLDER:
        raise FedsieveError(f'study: "{name}" is not there.{did_you_mean(name, STUDIES)} Allowed: {", ".join(STUDIES)}')
    file = f"{name}.yaml"
    tree = parse_yaml((where / file).read_text(encoding="utf-8"), file)
    try:
        spec = StudySpec.model_validate(tree)
    except ValidationError as error:
        problems = [f"{file}: {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise FedsieveError("\n".join(problems)) from None
    if table is not None:
        if table not in spec.tables:
            allowed = f" Allowed: {', '.join(spec.tables)}" if spec.tables else ""
            raise FedsieveError(f'--table: {name} has no "{table}".{did_you_mean(table, spec.tables)}{allowed}')
        if not smoke:  # a miniature has sizes and lengths of its own
            overrides, rates = [*spec.tables[table].overrides, *overrides], rates or spec.tables[table].rates
    study = Study(name, spec, _read_rows(spec, file), tuple(overrides), tuple(rates), smoke)
    _check(study, file)
    return study


Expanded = tuple[Row, dict[str, Any], set[str]]  # a row, its own settings, and those of them that `each` gives


def _read_rows(spec: StudySpec, file: str) -> dict[str, Row]:
    """The rows by name, each with the settings that it stands for."""
    found = [part for item in spec.rows for part in _expanded(item, spec, file)]
    rows: dict[str, Row] = {}
    for row, own, _ in found:
        if row.name in rows:
            raise FedsieveError(f"{file}: two rows are named {row.name}")
        group = [(settings, axes) for other, settings, axes in found if other.group == row.group]
        axes = frozenset(key for _, each in group for key in each)
        # A sibling's setting stands for this row, too: the row is the one with the base's value.
        keys = {*own, *(key for settings, _ in group for key, value in settings.items() if value is not None)}
        keys -= {"stages", *(key for key in keys if _is_length(key) and key not in axes)}
        rows[row.name] = replace(row, fixed=frozenset(keys), axes=axes)
    return rows


def _expanded(item: RowSpec, spec: StudySpec, file: str) -> list[Expanded]:
    rows = []
    from_each = {key for key, value in item.set.items() if item.each and "$" in f"{key} {value}"}
    for values in itertools.product(*item.each.values()):
        words = dict(zip(item.each, values, strict=True))
        own = _filled(item.model_dump(exclude={"each", "label"}), words)
        label = _filled(item.label or item.name, {key: _spoken(value) for key, value in words.items()})
        if own["base"] is not None and own["base"] not in spec.bases:
            raise FedsieveError(f"{file}: row {own['name']}: no base {own['base']}. There are: {', '.join(spec.bases)}")
        tree = _merged(spec.base, spec.bases[own["base"]] if own["base"] else {})
        meant = spec.words.get
        settings = {key: meant(value, value) if isinstance(value, str) else value for key, value in own["set"].items()}
        tree = apply_overrides(tree, spelled(settings))
        reported = [own["reported"]] if isinstance(own["reported"], str) else own["reported"]
        extra = {key: own[key] for key in ("tune", "search", "seeds", "keep")}
        row = Row(own["name"], label, tree, tuple(reported), **extra, fixed=frozenset())
        rows.append((row, settings, from_each))
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


def _merged(base: Any, over: Any) -> Any:
    """`over` laid over `base`: mappings are joined unless they are of another kind, anything else is replaced."""
    mappings = isinstance(base, Mapping) and isinstance(over, Mapping)
    if not mappings or over.get("kind", base.get("kind")) != base.get("kind"):
        return deepcopy(over)
    return {key: _merged(base.get(key), over[key]) if key in over else deepcopy(base[key]) for key in {**base, **over}}


# --- checking --------------------------------------------------------------------------------------------------------


def _check(study: Study, file: str) -> None:
    """Refuse a definition that names rows, reported figures or measures that cannot be there."""
    known = {entry.id for entry in load_reported()}
    for row in study.rows.values():
        for name in row.reported:
            if name not in known:
                raise FedsieveError(f"{file}: row {row.name}: reported.csv has no id {name}")
    for name, table in study.spec.tables.items():
        _check_patterns(study, table.rows, f"{file}: table {name}")
    for section in study.spec.sections:
        where = f'{file}: section "{section.title}"'
        patterns = [*section.rows, *(pattern for figure in section.figures for pattern in figure.rows)]
        _check_patterns(study, [*patterns, *(name for claim in section.claims for name in claim.rows)], where)
        try:
            _check_section(study, section)
        except FedsieveError as error:
            raise FedsieveError(f"{where}: {error}") from None


def _check_patterns(study: Study, patterns: Iterable[str], where: str) -> None:
    for pattern in patterns:
        if not study.matching([pattern]):
            raise FedsieveError(f"{where}: no row matches {pattern}")


def _check_section(study: Study, section: SectionSpec) -> None:
    """Refuse columns and figures that no row of theirs can fill, and claims about what one of their rows lacks."""
    experiment = functools.cache(lambda name: make_experiment(study.rows[name].tree))

    def able(patterns: Iterable[str], measure: str) -> list[bool]:
        measure, _, reference = measure.partition(RATIO)
        if reference and (reference not in study.rows or not fills(experiment(reference), measure)):
            raise FedsieveError(f"there is no {measure} of a row {reference}")
        return [fills(experiment(row.name), measure) for row in study.matching(patterns)]

    wanted = [("column", section.rows, measure) for measure in section.columns if section.rows]
    for figure in section.figures:
        title = f'figure "{figure.title}"'
        if figure.kind == "curves" and not (figure.y in FIELDS and figure.x in (None, "bytes", "seconds")):
            raise FedsieveError(f"{title}: curves show a field of metrics.jsonl by round or epoch, bytes or seconds")
        measures = {"lines": [figure.y], "dots": [figure.y], "scatter": [figure.x or "bytes", figure.y]}
        wanted += [(title, figure.rows or section.rows, measure) for measure in measures.get(figure.kind, [])]
    for what, patterns, measure in wanted:
        if not any(able(patterns, measure)):
            raise FedsieveError(f"{what}: no row can have {measure}. Leave it out, or let a row measure it")
    for claim in section.claims:
        if not all(able(claim.rows, claim.measure)):
            raise FedsieveError(f'claim "{claim.says}": not all of its rows can have {claim.measure}')


# --- what was reported -----------------------------------------------------------------------------------------------


class Reported(NamedTuple):
    """One figure of a report."""

    id: str
    metric: str
    value: float
    source: str
    note: str


@functools.cache
def load_reported() -> list[Reported]:
    """All figures that the reports give for rows of the studies."""
    lines = csv.DictReader((FOLDER / "reported.csv").read_text(encoding="utf-8").splitlines())
    return [Reported(line["id"], line["metric"], float(line["value"]), line["source"], line["note"]) for line in lines]


def reported_of(row: Row, measure: str) -> Reported | None:
    """The figure that a report gives for a row."""
    return next((one for one in load_reported() if one.metric == measure and one.id in row.reported), None)


# --- settings for all rows -------------------------------------------------------------------------------------------

FEDERATED = {"federation", "message", "privacy", "executor", "clients_at_once"}
ROUNDS = {"rounds", "local", "budget", "warmup_rounds"}
EPOCHS = {"epochs", "warmup_epochs"}
TRAINED = {"name", "train", "method", "sparse"}  # of a stage: what trains, and how


def applies(row: Row, override: str) -> bool:
    """True where an override changes a row: it means something to the row, and is not what the row stands for."""
    path, _, value = override.partition("=")
    place = override_place(row.tree, path)
    return _means_something(row, place) and not _is_fixed(row, place, value)


def _means_something(row: Row, place: tuple[str, ...]) -> bool:
    """False for rounds of central training, or the rule of a mask that is not there."""
    first, *rest = place
    central = row.tree.get("federation") is None
    if first in FEDERATED:
        return not central
    if first == "mask":
        return row.tree.get("mask") is not None
    if first == "stages" and rest:
        if not rest[0].isdigit() or int(rest[0]) >= len(row.tree["stages"]):
            return False
        is_ridge = row.tree["stages"][int(rest[0])].get("method") == "ridge"
        never = ROUNDS | EPOCHS if is_ridge else ROUNDS if central else EPOCHS
        return not (len(rest) > 1 and rest[1] in never)
    return True


def _is_fixed(row: Row, place: tuple[str, ...], value: str) -> bool:
    """True where a place in the config is part of what a row stands for."""
    if place == ("model", "weights") and row.tree.get("model", {}).get("weights") != "none":
        return "model.weights" in row.fixed and parse_yaml(value, "model.weights") == "none"  # pretrained ones stay so
    places = [place]
    if place[0] == "stages":
        if len(place) < 3 or place[2] in TRAINED:
            return True
        if place[2] == "mask":
            if not row.tree["stages"][int(place[1])].keys() & {"sparse", "mask"}:
                return True  # a mask would make the stage sparse
            places.append(place[2:])
    fixed = [override_place(row.tree, key) for key in row.fixed]
    return any(one[: len(key)] == key[: len(one)] for one in places for key in fixed)


def _is_length(key: str) -> bool:
    """True for how long a stage is, which overrides may change unless names say it."""
    return re.fullmatch(r"stages\.[^.]+\.(rounds|epochs)", key) is not None


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

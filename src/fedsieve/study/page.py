"""The tables, figures and the page of a study, from what lies in its folder."""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from fedsieve.report import figures as drawing
from fedsieve.report.federation import class_map, holdings
from fedsieve.report.folder import RunFolder
from fedsieve.report.html import duration, figure, render, save, size, tick, tile
from fedsieve.report.masks import block_labels
from fedsieve.report.page import tiles
from fedsieve.study import figures
from fedsieve.study.definition import FigureSpec, Reported, SectionSpec, Study, reported_of
from fedsieve.study.figures import Point
from fedsieve.study.results import Result, Verdict, agreement, judge, provenance, read_results

LABELS = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "val_accuracy": "validation accuracy",
    "best_test_accuracy": "best seen on test",
    "head.test_accuracy": "head stage",
    "best_test_at": "best epoch or round on test",
    "head.test_loss": "head stage's test loss",
    "head.seconds": "time of the head stage",
    "last.seconds": "time of the last stage",
    "seconds": "time",
    "last.calibration_seconds": "calibration",
    "bytes_up": "sent up",
    "bytes_down": "sent down",
    "bytes": "sent in all",
    "of_dense": "of dense fp32",
    "numbers_up": "numbers sent up",
    "epsilon": "epsilon spent",
    "drift": "drift, last round",
    "mean_drift": "drift, mean of rounds",
    "steadiness": "steadiness",
    "clients.mean": "clients, mean",
    "clients.std": "clients, deviation",
    "clients.worst_decile": "clients, worst decile",
    "clients.worst": "worst client",
    "personal.global.mean": "global model on clients",
    "personal.local.mean": "own model, mean",
    "personal.local.worst_decile": "own model, worst decile",
    "personal.head.mean": "own head, mean",
    "jaccard": "Jaccard index",
    "jaccard_chance": "by chance",
    "jaccard_deep": "Jaccard index, last third of blocks",
    "jaccard_deepens": "Jaccard index, last third less first",
    "gain": "gain over the stage before",
    "personal_gain": "own model less shared",
    "train_accuracy": "train accuracy",
    "last.active": "active weights",
}
SHARES = ("accuracy", "gain", ".mean", ".std", ".worst", ".worst_decile", "of_dense", "steadiness")
SAMPLE = "sample.npz"
TILES = 24  # predictions on the page
NAMED = 4  # rows that were not run and are named where they would stand
LAST, BEST = "test_accuracy", "best_test_accuracy"
WORDS = {"holds": "hold", "does not hold": "do not hold", "cannot be told": "cannot be told", "not run": "not run"}


def form(measure: str) -> str:
    """How a measure is written: percent, bytes, seconds, whole or number."""
    if measure.endswith(SHARES):
        return "percent"
    if measure.startswith("bytes"):
        return "bytes"
    if measure.endswith("seconds"):
        return "seconds"
    return "whole" if measure.endswith(("numbers_up", "active", "best_test_at")) else "number"


def label(measure: str) -> str:
    return LABELS.get(measure, measure.replace("_", " ")) + (", %" if form(measure) == "percent" else "")


def written(value: float | None, measure: str, sign: bool = False) -> str:
    """A value without its unit, which the head of its column has."""
    if value is None or not math.isfinite(value):
        return "–"
    plus = "+" if sign and value > 0 else ""
    match form(measure):
        case "percent":
            return f"{plus}{100 * value:.2f}"
        case "bytes":
            return plus + size(value)
        case "seconds":
            return plus + (duration(value) if value >= 0 else f"-{duration(-value)}")
        case "whole":
            return f"{plus}{value:,.0f}"
    return f"{plus}{value:.3f}" if 0.01 <= abs(value) < 1000 else f"{plus}{value:.2g}"


def axis(measure: str) -> Callable[[float], str] | None:
    """How numbers beside an axis are written; None: as they are."""
    match form(measure):
        case "percent":
            return lambda value: f"{100 * value:g}"
        case "bytes":
            return tick
        case "seconds":
            return lambda value: f"{value:g} s"
    return None


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    measure: str
    mean: float | None
    spread: float | None
    seeds: int
    reported: Reported | None

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or self.reported is None else self.mean - self.reported.value


@dataclass(frozen=True)
class Line:
    result: Result
    cells: list[Cell]

    @property
    def chosen(self) -> str:
        """What was chosen for the row, and among what."""
        words = []
        for key, value in self.result.chosen.items():
            tried = sorted({trial.settings[key] for trial in self.result.trials})
            edge = ", the edge of what was tried" if self.result.at_edge and key.endswith(".lr") else ""
            words.append(f"{_short_key(key)} {value} of {', '.join(map(str, tried))}{edge}")
        return "; ".join(words)


def _short_key(key: str) -> str:
    last = key.rpartition(".")[2]
    return {"lr": "server rate" if key.startswith("federation") else "rate"}.get(last, last.replace("_", " "))


@dataclass
class Table:
    """Rows of a study by measures: measured, and where a report gives numbers, reported and the difference."""

    measures: list[str]
    lines: list[Line]
    idle: list[Line]  # of rows that were not run: nothing is measured there
    compared: str  # differences are shown of this measure alone: a table has to fit a page
    about: str

    def is_reported(self, measure: str) -> bool:
        place = self.measures.index(measure)
        return any(line.cells[place].reported for line in self.lines)

    def is_compared(self, measure: str) -> bool:
        return measure == self.compared and self.is_reported(measure)

    def is_measured(self, measure: str) -> bool:
        place = self.measures.index(measure)
        return any(line.cells[place].mean is not None for line in self.lines)

    @property
    def shown(self) -> list[str]:
        """Measures that some row has."""
        return [measure for measure in self.measures if self.is_reported(measure) or self.is_measured(measure)]

    @property
    def promised(self) -> list[str]:
        """Measures that a report gives for rows that were not run."""
        return [name for at, name in enumerate(self.measures) if any(line.cells[at].reported for line in self.idle)]

    @property
    def waiting(self) -> str:
        """The rows that were not run, in a line."""
        names = [line.result.row.label for line in self.idle]
        few = names if len(names) <= NAMED else [*names[: NAMED - 1], f"{len(names) - NAMED + 1} more"]
        return f"{'; '.join(few)} ({count(len(names), 'row')})"

    @property
    def notes(self) -> list[str]:
        told = [(line.result.row.label, cell.reported) for line in self.lines + self.idle for cell in line.cells]
        return list(dict.fromkeys(f"{name}: {entry.note}" for name, entry in told if entry and entry.note))


def make_table(measures: Sequence[str], results: Sequence[Result], about: str) -> Table:
    """Where the best value seen on test is shown, the report's accuracy is such a one, and stands beside it."""
    moved = BEST in measures and any(len(result.values(BEST)) for result in results)

    def told(result: Result, measure: str) -> Reported | None:
        if moved and measure in (LAST, BEST):
            return reported_of(result.row, LAST) if measure == BEST else None
        return reported_of(result.row, measure)

    lines = []
    for result in results:
        cells = [
            Cell(name, result.mean(name), result.spread(name), len(result.values(name)), told(result, name))
            for name in measures
        ]
        lines.append(Line(result, cells))
    compared = BEST if moved and measures[0] == LAST else measures[0]
    begun = [line for line in lines if line.result.begun]
    return Table(list(measures), begun, [line for line in lines if not line.result.begun], compared, about)


def markdown(table: Table, differ: bool) -> str:
    """The table in Markdown; `differ` shows differences to what was reported."""
    head, align = ["row", "seeds"], ["---", "---:"]
    for measure in table.shown:
        head.append(label(measure))
        if table.is_reported(measure):
            head += ["reported", "difference"] if differ and table.is_compared(measure) else ["reported"]
    align += ["---:"] * (len(head) - 2)
    rows = [head, align] if table.lines else []
    for line in table.lines:
        chosen = f" ({line.chosen})" if line.chosen else ""
        cells = [f"`{line.result.row.name}` {line.result.row.label}{chosen}", _state(line.result)]
        for cell in line.cells:
            if cell.measure not in table.shown:
                continue
            spread = f" ± {written(cell.spread, cell.measure)}" if cell.spread else ""
            cells.append(f"{written(cell.mean, cell.measure)}{spread}")
            if table.is_reported(cell.measure):
                cells.append(written(cell.reported.value if cell.reported else None, cell.measure))
                if differ and table.is_compared(cell.measure):
                    cells.append(written(cell.difference, cell.measure, sign=True))
        rows.append(cells)
    parts = ["\n".join("| " + " | ".join(cells) + " |" for cells in rows)] if rows else []
    parts += [f"Not run: {_names(table)}."] if table.idle else []
    return "\n\n".join([*parts, table.about]) + "\n"


def _names(table: Table) -> str:
    """The rows that were not run: by name, or where they are many, how many of each group."""
    names = [line.result.row.name for line in table.idle]
    told = [f"`{name}`" for name in names]
    if len(names) > NAMED:
        groups = Counter(name.partition("/")[0] for name in names)
        told = [f"{number} of `{group}/*`" for group, number in groups.items()]
    return f"{', '.join(told)} ({count(len(names), 'row')})"


def count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _state(result: Result) -> str:
    if result.state == "not run":
        return next((outcome.reason for outcome in result.outcomes if outcome.reason), "not run")
    done = len(result.runs)
    return str(done) if result.state == "finished" else f"{done}, {result.state}" if done else result.state


# --- sections --------------------------------------------------------------------------------------------------------


@dataclass
class Section:
    spec: SectionSpec
    table: Table | None
    verdicts: list[Verdict]
    answer: str
    pictures: list[tuple[str, Markup]] = field(default_factory=list)  # title, figure
    tiles: list[dict[str, Any]] = field(default_factory=list)
    crisp: bool = False
    link: str | None = None

    @property
    def has_anything(self) -> bool:
        return bool((self.table and self.table.lines) or self.pictures or self.tiles)

    @property
    def told(self) -> list[Verdict]:
        """Its claims, without those about rows that were not run."""
        return [verdict for verdict in self.verdicts if verdict.word != "not run"]


def write_study(study: Study, out: Path, seeds: int) -> Path:
    """Writes study.html, tables.md, results.csv, runs.csv, choices.csv and figures/ into `out`; returns the page."""
    results = read_results(study, out, list(study.rows.values()), seeds)
    sections = [_section(study, spec, results, out, number) for number, spec in enumerate(study.spec.sections)]
    about = provenance(list(results.values()))
    differ = not study.smoke
    save(out / "tables.md", _markdown_page(study, sections, about, differ))
    save(out / "results.csv", _results_csv(study, results))
    save(out / "runs.csv", _runs_csv(results.values()))
    if any(result.trials for result in results.values()):
        save(out / "choices.csv", _choices_csv(results.values()))
    verdicts = [verdict for section in sections for verdict in section.verdicts]
    page = render(
        "study.html",
        study=study,
        sections=[section for section in sections if section.has_anything],
        idle=[section for section in sections if not section.has_anything],
        about=about,
        described=describe(about),
        results=results,
        seeds=seeds,
        measured=sum(bool(result.runs) for result in results.values()),
        finished=sum(result.state == "finished" for result in results.values()),
        missing=[
            (result.row.name, f"seed {outcome.seed} {outcome.state}", outcome.reason)
            for result in results.values()
            for outcome in result.outcomes
            if outcome.state not in ("finished", "not run")
        ],
        waiting=sum(not result.begun for result in results.values()),
        verdicts=verdicts,
        counts={words: sum(verdict.word == word for verdict in verdicts) for word, words in WORDS.items()},
        differ=differ,
        foreign=_foreign(study),
        gives_numbers=any(row.reported for row in study.rows.values()),
        label=label,
        written=written,
        judged=_judged,
        state=_state,
        count=count,
        command=f"fedsieve study {study.name} {' '.join(study.overrides)}".strip(),
    )
    return save(out / "study.html", page)


def _section(
    study: Study,
    spec: SectionSpec,
    results: Mapping[str, Result],
    out: Path,
    number: int,
) -> Section:
    mine = _chosen(study, results, spec.rows)
    table = make_table(spec.columns, mine, describe(provenance(mine))) if mine else None
    section = Section(spec, table, [judge(claim, results) for claim in spec.claims], _answer(spec, mine))
    for place, item in enumerate(spec.figures):
        shown = [row for row in (_chosen(study, results, item.rows) if item.rows else mine) if row.begun]
        if item.kind == "data":
            section.tiles, section.crisp = _sample(out)
            section.link = "data/explore.html" if (out / "data" / "explore.html").exists() else None
        elif item.kind == "predictions":
            run = _first_run(shown)
            section.tiles = tiles(run.predictions)[:TILES] if run and run.predictions else []
            section.crisp = True
        elif svg := _draw(item, shown):
            save(out / "figures" / f"{number + 1}-{place + 1}.svg", svg)
            section.pictures.append((item.title, figure(svg, f"{spec.title}: {item.title}")))
    return section


def _chosen(study: Study, results: Mapping[str, Result], patterns: Sequence[str]) -> list[Result]:
    names = [row.name for pattern in patterns for row in study.matching(pattern)]
    return [results[name] for name in dict.fromkeys(names)]


def _answer(spec: SectionSpec, results: Sequence[Result]) -> str:
    """What the section's first measure says, in a sentence or two."""
    measure = spec.columns[0] if spec.columns else ""
    ranked = sorted(
        ((mean, result) for result in results if (mean := result.mean(measure)) is not None), key=lambda pair: -pair[0]
    )
    if len(ranked) < 2:
        return ""
    unit = " %" if form(measure) == "percent" else ""

    def described(mean: float, result: Result) -> str:
        spread, seeds = result.spread(measure), len(result.values(measure))
        around = "" if spread is None else f" ± {written(spread, measure)}"
        return f"{result.row.label} ({written(mean, measure)}{around}{unit}, {count(seeds, 'seed')})"

    name = LABELS.get(measure, measure.replace("_", " "))
    words = f"Highest {name}: {described(*ranked[0])}; lowest: {described(*ranked[-1])}."
    both = [(mean, told.value) for mean, result in ranked if (told := reported_of(result.row, measure)) is not None]
    if len(both) > 2:
        same, of = agreement(both)
        words += (
            f" Of {of} pairs of rows that the report gives different numbers for, {same} stand in the same order here."
        )
    return words


def describe(about: Mapping[str, Any]) -> str:
    """Where numbers come from, in one line."""
    if not about["runs"]:
        return "Nothing has run yet."
    seeds = about["seeds"]
    told = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    parts = [", ".join(about[key]) for key in ("backbones", "data", "sizes")]
    parts += [told, f"{about['runs']} runs", f"commit {', '.join(about['commits'])}", ", ".join(about["hardware"])]
    return "; ".join([*parts, f"torch {', '.join(about['torch'])}", f"{duration(about['seconds'])} in all"]) + "."


def _foreign(study: Study) -> list[str]:
    """What the command line changed that makes differences to a report's numbers differences of more than luck."""
    keys = ("model.", "data.")
    return [override for override in study.overrides if override.startswith(keys)]


def _judged(verdict: Verdict) -> str:
    """The difference behind a verdict, in words."""
    if verdict.difference is None:
        return ""
    measure = verdict.claim.measure
    unit = " points" if form(measure) == "percent" else ""
    name = LABELS.get(measure, measure.replace("_", " "))
    words = f"{name} {written(verdict.difference, measure, sign=True)}{unit}"
    if verdict.interval is None:
        return f"{words}, {'one seed' if verdict.word == 'cannot be told' else 'the same with every seed'}"
    low, high = (written(end, measure, sign=True) for end in verdict.interval)
    return f"{words} ({low} to {high}), {verdict.seeds} seeds"


# --- figures ---------------------------------------------------------------------------------------------------------


def _draw(item: FigureSpec, results: Sequence[Result]) -> str | None:
    """A figure as SVG; None where nothing has run that it would show."""
    draw = {"lines": _lines, "dots": _dots, "curves": _curves, "scatter": _scatter}.get(item.kind)
    if draw:
        return draw(item, results)
    run = _first_run(results)
    if item.kind == "overlap":
        return _depths(results)
    if run is None:
        return None
    return _allocation(run) if item.kind == "allocation" else _confusion(run)


def _point(x: Any, item: FigureSpec, result: Result) -> Point:
    told = reported_of(result.row, item.y)
    return Point(x, result.mean(item.y), result.spread(item.y), told.value if told else None)


def _series(by: str, result: Result) -> str:
    """What a legend calls a row: its setting, or that it has none, as where there is no mask."""
    return str(result.settings.get(by, f"no {by.partition('.')[0]}"))


def _lines(item: FigureSpec, results: Sequence[Result]) -> str | None:
    series: dict[str, list[Point]] = {}
    for result in results:
        x = result.settings.get(item.x or "")
        if x is not None:
            name = _series(item.by, result) if item.by else label(item.y)
            series.setdefault(name, []).append(_point(x, item, result))
    if not any(point.mean is not None for points in series.values() for point in points):
        return None
    below = (item.x or "").rpartition(".")[2].replace("_", " ")
    return figures.lines(series, below, label(item.y), axis(item.y), item.log)


def _dots(item: FigureSpec, results: Sequence[Result]) -> str | None:
    points = [_point(None, item, result) for result in results]
    if all(point.mean is None for point in points):
        return None
    names = [result.row.label for result in results]
    return figures.dots(names, points, label(item.y), lambda value: written(value, item.y), axis(item.y))


def _curves(item: FigureSpec, results: Sequence[Result]) -> str | None:
    series = {}
    for result in results:
        if drawn := [curve for run in result.runs if (curve := _curve(run, item.y)) is not None]:
            series[result.row.label] = drawn
    so_far = "" if item.y == "drift" else "s so far"
    units = sorted({run.unit + so_far for result in results for run in result.runs})
    return (
        figures.curves(series, " or ".join(units), label(item.y).removesuffix(", last round"), axis(item.y), item.log)
        if series
        else None
    )


def _curve(run: RunFolder, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """A field of the records by epoch or round of the whole run; of drift, by round of the last stage."""
    stage = run.experiment.stages[-1].name
    rows = [row for row in run.records if row.get(name) is not None and (name != "drift" or row.get("stage") == stage)]
    if not rows:
        return None
    return drawing.column(rows, "round" if name == "drift" else "index"), drawing.column(rows, name)


def _scatter(item: FigureSpec, results: Sequence[Result]) -> str | None:
    series: dict[str, list[tuple[str, float, Point]]] = {}
    for result in results:
        x = result.mean(item.x or "bytes")
        point = _point(None, item, result)
        if x and point.mean is not None:
            name = _series(item.by, result) if item.by else ""
            series.setdefault(name, []).append((result.row.label, x, point))
    if not series:
        return None
    below = item.x or "bytes"
    return figures.scatter(series, label(below), label(item.y), axis(below) or "{:g}".format, axis(item.y))


def _first_run(results: Sequence[Result]) -> RunFolder | None:
    return next((run for result in results for run in result.runs), None)


def _allocation(run: RunFolder) -> str | None:
    if run.clients is None:
        return None
    names = run.predictions.class_names if run.predictions else []
    classes = max(len(names), int(run.clients.label.max(initial=-1)) + 1)
    table = holdings(run.clients, classes)
    return class_map(table, names, run.clients.sizes[table.shown], run.clients.strange[table.shown])


def _confusion(run: RunFolder) -> str | None:
    found = run.predictions
    if found is None:
        return None
    counts = np.zeros((len(found.class_names),) * 2)
    np.add.at(counts, (found.labels, found.predicted), 1)
    return drawing.confusion(counts / np.maximum(counts.sum(1, keepdims=True), 1), found.class_names)


def _depths(results: Sequence[Result]) -> str | None:
    series, chance, names = {}, np.zeros(0), list[str]()
    for result in results:
        found = [run.client_pairs for run in result.runs if run.client_pairs]
        if found:
            names = found[0].block_names
            with np.errstate(all="ignore"):
                series[str(result.settings["mask.rule"])] = _means(np.transpose([_means(one.blocks) for one in found]))
                chance = np.full(len(names), np.mean([np.nanmean(one.chance) for one in found]))
    return figures.depths(series, chance, block_labels(names)) if series else None


def _means(values: np.ndarray) -> np.ndarray:
    """Means over the last of (blocks, m), pairs or runs; nan where none has a value."""
    return np.array([np.nanmean(row) if np.isfinite(row).any() else np.nan for row in values])


def _sample(out: Path) -> tuple[list[dict[str, Any]], bool]:
    """Some training images with their classes, and whether they are small."""
    file = out / "data" / SAMPLE
    if not file.exists():
        return [], False
    with np.load(file, allow_pickle=False) as content:
        images, names = content["images"], content["names"]
    shown = [{"image": tile(image), "label": str(name)} for image, name in zip(images, names, strict=True)]
    return shown, max(images.shape[2:]) < 128


# --- files -----------------------------------------------------------------------------------------------------------


def _markdown_page(study: Study, sections: Sequence[Section], about: Mapping[str, Any], differ: bool) -> str:
    parts = [f"# {study.spec.title}\n", describe(about) + "\n"]
    if study.overrides:
        parts.append(f"Other than in the study: {', '.join(f'`{override}`' for override in study.overrides)}.\n")
    if study.smoke:
        parts.append("In miniature on the embedded data: the numbers mean nothing.\n")
    for section in sections:
        if section.table and section.table.lines:
            parts.append(f"## {section.spec.title}\n")
            parts += [f"- {item.claim.says}: **{item.word}**. {_judged(item)}".rstrip() for item in section.told]
            parts += [""] * bool(section.told)
            parts.append(markdown(section.table, differ))
    waiting = [section for section in sections if section.table and not section.table.lines]
    claims = [item for section in sections for item in section.verdicts if item.word == "not run"]
    parts += ["## Not run\n"] * bool(waiting or claims)
    parts += [f"- {section.spec.title}: {_names(section.table)}" for section in waiting if section.table]
    parts += [""] * bool(waiting)
    parts += ["Claims about rows that were not run:\n", *(f"- {item.claim.says}" for item in claims), ""] * bool(claims)
    return "\n".join(parts)


def _csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([head, *(["" if value is None else value for value in row] for row in rows)])
    return buffer.getvalue()


def _results_csv(study: Study, results: Mapping[str, Result]) -> str:
    """A line for every row and measure that a section shows. Accuracies are fractions."""
    wanted: dict[tuple[str, str], None] = {}
    for spec in study.spec.sections:
        for result in _chosen(study, results, spec.rows):
            wanted |= dict.fromkeys((result.row.name, measure) for measure in spec.columns)
    rows = []
    for name, measure in wanted:
        result, values = results[name], results[name].values(measure)
        told = reported_of(result.row, measure)
        if len(values) or told or result.state != "finished":
            ends = (values.min(), values.max()) if len(values) else (None, None)
            numbers = (len(values), result.mean(measure), result.spread(measure), *ends)
            source = (told.value, told.source) if told else (None, None)
            rows.append((study.name, name, result.row.label, measure, *numbers, *source, result.state))
    head = ["study", "row", "label", "measure", "seeds", "mean", "std", "min", "max", "reported", "source", "state"]
    return _csv(head, rows)


SUMMARY = ("test_accuracy", "test_loss", "val_accuracy", "seconds", "bytes_up", "bytes_down", "drift")


def _runs_csv(results: Iterable[Result]) -> str:
    """A line for every run, also of those that have no result."""
    rows = []
    for result in results:
        chosen = json.dumps(result.chosen) if result.chosen else None
        for outcome in result.outcomes:
            run, where = outcome.run, list[Any](6 * [None])
            numbers = [getattr(run.summary, name) if run and run.summary else None for name in SUMMARY]
            if run:
                experiment, environment = run.experiment, run.environment
                where = [experiment.model.backbone, Path(experiment.model.weights).name, experiment.data.size]
                where += [environment.get(key) for key in ("commit", "device", "torch")]
            state = [outcome.state, outcome.reason or None]
            rows.append([result.row.name, outcome.seed, *state, chosen, *numbers, *where])
    places = ["backbone", "weights", "size", "commit", "device", "torch"]
    return _csv(["row", "seed", "state", "reason", "chosen", *SUMMARY, *places], rows)


def _choices_csv(results: Iterable[Result]) -> str:
    """A line for every setting that was tried, with its accuracy on validation."""
    rows = []
    for result in results:
        for trial in result.trials:
            accuracy = None if trial.accuracy is None or trial.accuracy < 0 else trial.accuracy
            is_chosen = bool(result.chosen) and trial.settings == result.chosen
            rows.append((result.row.name, json.dumps(trial.settings), trial.outcome.state, accuracy, is_chosen))
    return _csv(["row", "settings", "state", "val_accuracy", "chosen"], rows)

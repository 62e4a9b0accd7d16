"""The tables and the page of a study, from what lies in its folder."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from fedsieve.campaign.definition import FigureSpec, Reported, SectionSpec, Study, reported_of
from fedsieve.campaign.engine import Outcome, csv_text
from fedsieve.campaign.evidence import RowResult, Verdict, agreement, judge, read_results
from fedsieve.report.figures import column, confusion
from fedsieve.report.folder import RunFolder
from fedsieve.report.html import figure, render, save, tick, tile
from fedsieve.report.measures import form, label, named
from fedsieve.report.measuring import describe, provenance, spent
from fedsieve.report.page import tiles
from fedsieve.report.rounds import class_map, holdings
from fedsieve.report.series import Point, Scale, blocks, curves, dots, lines, overlap, scale, scatter, written

SAMPLE = "sample.npz"
SUMMARY = ("test_accuracy", "test_loss", "val_accuracy", "seconds", "bytes_up", "bytes_down", "drift")
TILES = 24  # predictions on the page
NAMED = 4  # rows that were not run and are named where they would stand
LAST, BEST = "test_accuracy", "best_test_accuracy"
WORDS = {"holds": "hold", "does not hold": "do not hold", "cannot be told": "cannot be told", "not run": "not run"}


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    measure: str
    mean: float | None
    spread: float | None
    reported: Reported | None

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or self.reported is None else self.mean - self.reported.value


@dataclass(frozen=True)
class TableLine:
    result: RowResult
    cells: list[Cell]

    @property
    def chosen(self) -> str:
        """The settings that were chosen for the row, and the values that were tried."""
        words = []
        for key, value in self.result.chosen.items():
            values = sorted({trial.settings[key] for trial in self.result.trials})
            edge = ", the edge of what was tried" if self.result.at_edge and key.endswith(".lr") else ""
            words.append(f"{_short_key(key)} {value} of {', '.join(map(str, values))}{edge}")
        return "; ".join(words)


def _short_key(key: str) -> str:
    last = key.rpartition(".")[2]
    return {"lr": "server rate" if key.startswith("federation") else "rate"}.get(last, last.replace("_", " "))


@dataclass
class Table:
    """Rows of a study by measures: measured, and where a report gives numbers, reported and the difference."""

    measures: list[str]
    lines: list[TableLine]
    idle: list[TableLine]  # of rows that were not run: nothing is measured there
    compared: str  # differences are shown of this measure alone: a table has to fit a page
    about: str

    def is_reported(self, measure: str) -> bool:
        return any(line.cells[self.measures.index(measure)].reported for line in self.lines)

    def is_compared(self, measure: str) -> bool:
        return measure == self.compared and self.is_reported(measure)

    @property
    def shown(self) -> list[str]:
        """Measures that some row has."""
        cells = [cell for line in self.lines for cell in line.cells if cell.reported or cell.mean is not None]
        return [measure for measure in self.measures if any(cell.measure == measure for cell in cells)]

    @property
    def promised(self) -> list[str]:
        """Measures that a report gives for rows that were not run."""
        names = {cell.measure for line in self.idle for cell in line.cells if cell.reported}
        return [measure for measure in self.measures if measure in names]

    @property
    def waiting(self) -> str:
        """The rows that were not run, in a line."""
        names = [line.result.row.label for line in self.idle]
        few = names if len(names) <= NAMED else [*names[: NAMED - 1], f"{len(names) - NAMED + 1} more"]
        return f"{'; '.join(few)} ({count(len(names), 'row')})"

    @property
    def idle_names(self) -> str:
        """The rows that were not run: by name, or where they are many, how many of each group."""
        rows = [line.result.row for line in self.idle]
        words = [f"`{row.name}`" for row in rows]
        if len(rows) > NAMED:
            words = [f"{number} of `{group}/*`" for group, number in Counter(row.group for row in rows).items()]
        return f"{', '.join(words)} ({count(len(rows), 'row')})"

    @property
    def notes(self) -> list[str]:
        told = [(line.result.row.label, cell.reported) for line in self.lines + self.idle for cell in line.cells]
        return list(dict.fromkeys(f"{name}: {entry.note}" for name, entry in told if entry and entry.note))


def make_table(measures: Sequence[str], results: Sequence[RowResult], about: str) -> Table:
    """A report's accuracy is the best seen on test: it stands in that column, where there is one."""
    moved = BEST in measures and any(len(result.values(BEST)) for result in results)

    def told(result: RowResult, measure: str) -> Reported | None:
        if moved and measure in (LAST, BEST):
            return reported_of(result.row, LAST) if measure == BEST else None
        return reported_of(result.row, measure)

    lines = [
        TableLine(result, [Cell(name, result.mean(name), result.spread(name), told(result, name)) for name in measures])
        for result in results
    ]
    compared = BEST if moved and measures[0] == LAST else measures[0]
    begun = [line for line in lines if line.result.begun]
    return Table(list(measures), begun, [line for line in lines if not line.result.begun], compared, about)


def markdown(table: Table, differ: bool) -> str:
    """The table in Markdown; `differ` shows differences to what was reported."""
    return render("table.md", table=table, differ=differ, **WRITERS)


def count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _state(result: RowResult) -> str:
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
    sections = [_section(study, spec, results, out, number) for number, spec in enumerate(study.spec.sections, 1)]
    about = provenance([run for result in results.values() for run in result.runs])
    verdicts = [verdict for section in sections for verdict in section.verdicts]
    shared = {"study": study, "verdicts": verdicts, "differ": not study.smoke, **WRITERS}
    save(out / "tables.md", render("study.md", sections=sections, described=describe(about), **shared).rstrip() + "\n")
    _write_csvs(study, results, out)
    page = render(
        "study.html",
        sections=[section for section in sections if section.has_anything],
        idle=[section for section in sections if not section.has_anything],
        about=about,
        results=results,
        seeds=seeds,
        counts={words: sum(verdict.word == word for verdict in verdicts) for word, words in WORDS.items()},
        # What makes differences to a report's numbers differences of more than luck.
        foreign=[override for override in study.overrides if override.startswith(("model.", "data."))],
        count=count,
        **shared,
    )
    return save(out / "study.html", page)


def _section(study: Study, spec: SectionSpec, results: Mapping[str, RowResult], out: Path, number: int) -> Section:
    def of(patterns: Iterable[str]) -> list[RowResult]:
        return [results[row.name] for row in study.matching(patterns)]

    mine = of(spec.rows)
    table = (
        make_table(spec.columns, mine, describe(provenance([run for result in mine for run in result.runs])))
        if mine
        else None
    )
    section = Section(spec, table, [judge(claim, results) for claim in spec.claims], _answer(spec, mine))
    for place, item in enumerate(spec.figures, 1):
        shown = [result for result in of(item.rows or spec.rows) if result.begun]
        if item.kind == "data":
            section.tiles, section.crisp = _sample(out)
            section.link = "data/explore.html" if (out / "data" / "explore.html").exists() else None
        elif item.kind == "predictions":
            run = first_run(shown)
            section.tiles = tiles(run.predictions)[:TILES] if run and run.predictions else []
            section.crisp = True
        elif svg := draw(item, shown):
            save(out / "figures" / f"{number}-{place}.svg", svg)
            section.pictures.append((item.title, figure(svg, f"{spec.title}: {item.title}")))
    return section


def _sample(out: Path) -> tuple[list[dict[str, Any]], bool]:
    """Some training images with their classes, and whether they are small."""
    file = out / "data" / SAMPLE
    if not file.exists():
        return [], False
    with np.load(file, allow_pickle=False) as content:
        images, names = content["images"], content["names"]
    shown = [{"image": tile(image), "label": str(name)} for image, name in zip(images, names, strict=True)]
    return shown, max(images.shape[2:]) < 128


def _answer(spec: SectionSpec, results: Sequence[RowResult]) -> str:
    """A sentence or two on the section's first measure."""
    measure = spec.columns[0] if spec.columns else ""
    known = [(mean, result) for result in results if (mean := result.mean(measure)) is not None]
    ranked = sorted(known, key=lambda pair: -pair[0])
    if len(ranked) < 2:
        return ""
    unit = " %" if form(measure) == "percent" else ""

    def described(mean: float, result: RowResult) -> str:
        spread, seeds = result.spread(measure), len(result.values(measure))
        around = "" if spread is None else f" ± {written(spread, measure)}"
        return f"{result.row.label} ({written(mean, measure)}{around}{unit}, {count(seeds, 'seed')})"

    words = f"Highest {named(measure)}: {described(*ranked[0])}; lowest: {described(*ranked[-1])}."
    both = [(mean, told.value) for mean, result in ranked if (told := reported_of(result.row, measure)) is not None]
    if len(both) > 2:
        same, of = agreement(both)
        words += (
            f" Of {of} pairs of rows that the report gives different numbers for, {same} stand in the same order here."
        )
    return words


def _judged(verdict: Verdict) -> str:
    """The difference behind a verdict, in words."""
    if verdict.difference is None:
        return ""
    measure = verdict.claim.measure
    unit = " points" if form(measure) == "percent" else ""
    words = f"{named(measure)} {written(verdict.difference, measure, sign=True)}{unit}"
    if verdict.interval is None:
        return f"{words}, {'one seed' if verdict.word == 'cannot be told' else 'the same with every seed'}"
    low, high = (written(end, measure, sign=True) for end in verdict.interval)
    return f"{words} ({low} to {high}), {verdict.seeds} seeds"


WRITERS = {"label": label, "written": written, "judged": _judged, "state": _state}


# --- figures -----------------------------------------------------------------------------------------------------------


def draw(item: FigureSpec, results: Sequence[RowResult]) -> str | None:
    """A figure as SVG; None where nothing has run that it would show."""
    run = first_run(results)
    match item.kind:
        case "lines":
            return _lines(item, results)
        case "dots":
            points = [_point(None, item, result) for result in results]
            names = [result.row.label for result in results]
            known = any(point.mean is not None for point in points)
            return dots(names, points, scale(item.y), lambda value: written(value, item.y)) if known else None
        case "curves":
            return _curves(item, results)
        case "scatter":
            return _scatter(item, results)
        case "overlap":
            return overlap({str(result.settings["mask.rule"]): result.runs for result in results if result.runs})
        case "blocks":
            return blocks({result.row.label: result.runs for result in results})
        case "allocation" if run and run.clients:
            names = run.predictions.class_names if run.predictions else []
            table = holdings(run.clients, max(len(names), int(run.clients.label.max(initial=-1)) + 1))
            return class_map(table, names, run.clients.sizes[table.shown], run.clients.strange[table.shown])
        case "confusion" if run and run.predictions:
            counts = np.zeros((len(run.predictions.class_names),) * 2)
            np.add.at(counts, (run.predictions.labels, run.predictions.predicted), 1)
            return confusion(counts / np.maximum(counts.sum(1, keepdims=True), 1), run.predictions.class_names)
    return None


def first_run(results: Sequence[RowResult]) -> RunFolder | None:
    return next((run for result in results for run in result.runs), None)


def _point(x: Any, item: FigureSpec, result: RowResult) -> Point:
    told = reported_of(result.row, item.y)
    return Point(x, result.mean(item.y), result.spread(item.y), told.value if told else None)


def series_of(by: str, result: RowResult) -> str:
    """A row's name in a legend: its setting, or that it has none, as where there is no mask."""
    return str(result.settings.get(by, f"no {by.partition('.')[0]}"))


def _lines(item: FigureSpec, results: Sequence[RowResult]) -> str | None:
    series: dict[str, list[Point]] = {}
    for result in results:
        x = result.settings.get(item.x or "")
        if x is not None:
            name = series_of(item.by, result) if item.by else label(item.y)
            series.setdefault(name, []).append(_point(x, item, result))
    if not any(point.mean is not None for points in series.values() for point in points):
        return None
    return lines(series, (item.x or "").rpartition(".")[2].replace("_", " "), scale(item.y, item.log))


def _curves(item: FigureSpec, results: Sequence[RowResult]) -> str | None:
    """Curves by epoch or round of the whole run, by round of the last stage (drift), or by what was spent till then."""
    found = {result.row.label: [_curve(run, item) for run in result.runs] for result in results}
    series = {name: known for name, curves in found.items() if (known := [curve for curve in curves if curve])}
    if not series:
        return None
    units = sorted({run.unit for result in results for run in result.runs})
    below = Scale(" or ".join(units if item.y == "drift" else (f"{unit}s so far" for unit in units)))
    left = scale(item.y, item.log)
    cost = Scale(f"{item.x} so far", tick if item.x == "bytes" else "{:g}".format, log=True)
    return curves(series, cost if item.x else below, left._replace(label=left.label.removesuffix(", last round")))


def _curve(run: RunFolder, item: FigureSpec) -> tuple[np.ndarray, np.ndarray] | None:
    last = run.experiment.stages[-1].name
    x = spent(run, item.x) if item.x else column(run.records, "round" if item.y == "drift" else "index")
    y = column(run.records, item.y)
    of_stage = np.array([item.y != "drift" or record.stage == last for record in run.records], dtype=bool)
    shown = np.isfinite(y) & of_stage & (x > 0)
    return (x[shown], y[shown]) if shown.any() else None


def _scatter(item: FigureSpec, results: Sequence[RowResult]) -> str | None:
    series: dict[str, list[tuple[str, Point]]] = {}
    below = item.x or "bytes"
    for result in results:
        point = _point(result.mean(below), item, result)
        if point.x and point.mean is not None:
            series.setdefault(series_of(item.by, result) if item.by else "", []).append((result.row.label, point))
    return scatter(series, scale(below, log=True), scale(item.y)) if series else None


# --- files -------------------------------------------------------------------------------------------------------------


def _write_csvs(study: Study, results: Mapping[str, RowResult], out: Path) -> None:
    """A line for every row and measure that a section shows, for every run, and for every setting that was tried."""
    shown = dict.fromkeys(
        (row.name, measure)
        for section in study.spec.sections
        for row in study.matching(section.rows)
        for measure in section.columns
    )
    files = {
        "results.csv": [line for name, measure in shown if (line := _result_line(study.name, results[name], measure))],
        "runs.csv": [_run_line(result, outcome) for result in results.values() for outcome in result.outcomes],
        "choices.csv": [
            {
                "row": result.row.name,
                "settings": json.dumps(trial.settings),
                "state": trial.outcome.state,
                "val_accuracy": trial.score,
                "chosen": bool(result.chosen) and trial.settings == result.chosen,
            }
            for result in results.values()
            for trial in result.trials
        ],
    }
    for name, rows in files.items():
        if rows:
            save(out / name, csv_text(rows))


def _result_line(study: str, result: RowResult, measure: str) -> dict[str, Any] | None:
    """A row's measure over its seeds, accuracies as fractions; None where nothing is known of it."""
    values, told = result.values(measure), reported_of(result.row, measure)
    if not len(values) and not told and result.state == "finished":
        return None
    return {
        "study": study,
        "row": result.row.name,
        "label": result.row.label,
        "measure": measure,
        "seeds": len(values),
        "mean": result.mean(measure),
        "std": result.spread(measure),
        "min": values.min() if len(values) else None,
        "max": values.max() if len(values) else None,
        "reported": told.value if told else None,
        "source": told.source if told else None,
        "state": result.state,
    }


def _run_line(result: RowResult, outcome: Outcome) -> dict[str, Any]:
    """A run, also one that has no result."""
    run = outcome.run
    model, data = (run.experiment.model, run.experiment.data) if run else (None, None)
    return {
        "row": result.row.name,
        "seed": outcome.seed,
        "state": outcome.state,
        "reason": outcome.reason or None,
        "chosen": json.dumps(result.chosen) if result.chosen else None,
        **{name: getattr(run.summary, name) if run and run.summary else None for name in SUMMARY},
        "backbone": model and model.backbone,
        "weights": model and Path(model.weights).name,
        "size": data and data.size,
        **{key: run.environment.get(key) if run else None for key in ("commit", "device", "torch")},
    }

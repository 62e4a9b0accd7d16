"""The documents run, and lead where they say."""

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from fedsieve.campaign.definition import STUDIES, load_study
from fedsieve.cli import app
from fedsieve.config import make_experiment

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(?:#([^)\s]*))?\)")
MEASURED = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md", *sorted(ROOT.glob("docs/results/*.md"))]
NUMBER = r"\d+(?:\.\d+)?"
# What tells rows of a results file apart, but for their seeds.
NAMES = (
    "phase",
    "job",
    "row",
    "size",
    "rule",
    "allocation",
    "sparsity",
    "lr",
    "epochs",
    "what",
    "purpose",
    "transform",
)
NAMES += ("weight_decay", "method", "rate", "cohort", "aggregator")


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    notebook = nbformat.read(ROOT / "docs" / "tutorial-python.ipynb", as_version=4)
    shown = [pictures(cell) for cell in notebook.cells]
    for cell in notebook.cells:
        cell.source = cell.source.replace("    rounds: 30\n", "    rounds: 5\n")  # the only thing that takes long
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [pictures(cell) for cell in notebook.cells] == shown and sum(shown) > 5


def pictures(cell) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.get("outputs", []))


def kept(file: str) -> list[dict[str, str]]:
    with (ROOT / "docs" / "results" / file).open(newline="") as table:
        return list(csv.DictReader(table))


def test_what_the_results_were_run_with_can_be_run_and_gives_their_rows(capsys):
    """Settings that studies no longer take, or rows that a kept table has and its command lacks."""
    listed: dict[str, set[str]] = {}
    for study in STUDIES:
        for name in load_study(study).spec.tables:
            app(["study", study, "--table", name, "--list"], standalone_mode=False)
            assert name not in listed, "two tables of one name would be kept in one file"
            listed[name] = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    for file in (ROOT / "docs" / "results" / "studies").glob("*-runs.csv"):
        rows = {row["row"] for row in kept(f"studies/{file.name}")}
        assert rows <= listed[file.name.removesuffix("-runs.csv")], file
    assert {row["method"] for row in kept("frontier.csv")} == listed["frontier"]
    blocks = {f"blocks/{row['rule']}-s{row['sparsity']}" for row in kept("allocation.csv")}
    assert blocks == listed["allocation"]
    heads = defaultdict(set)
    for row in kept("new-head.csv"):
        heads[row["size"]].add(f"new-head/{row['rule']}-{row['scale']}-s{row['sparsity']}")
    assert (heads["64"], heads["128"]) == (listed["new-head"], listed["new-head-128"])
    finals = defaultdict(set)
    for row in kept("rules.csv"):
        if row["phase"] == "final":
            name = "dense" if row["rule"] == "dense" else f"sparse/{row['rule']}-s{row['sparsity']}"
            finals[row["size"]].add(name)
    assert (finals["128"], finals["224"]) == (set(load_study("rules").rows), listed["rules-224"])


def test_the_federation_study_is_what_its_table_was_run_with():
    """Every kept run has its settings beside it."""
    study = load_study("federation")
    for line in kept("federation.csv"):
        row = study.rows[f"{line['phase']}/{line['job'].replace('/', '-')}"]
        share = f"data.val_fraction={0.1 if line['val_accuracy'] else 0}"
        overrides = [
            *re.split(r" (?=[\w.]+=)", line["overrides"]),
            share,
            f"name=federation-{row.name.replace('/', '-')}",
        ]
        assert study.experiment(row, 0) == make_experiment(study.spec.base | {"tracking": []}, overrides), row.name


def test_the_trust_study_has_the_rules_of_its_table():
    cohorts = {"everyone": "everyone", "ten": "ten of twenty"}
    rows = {(cohorts[row.group], row.label) for row in load_study("trust").rows.values()}
    assert {(row["cohort"], row["aggregator"]) for row in kept("trust.csv")} == rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_that_are_there(page):
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path
        assert target.exists(), path
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, anchor


@cache
def spreads() -> list[tuple[float, float, float, float]]:
    """Mean, deviation, minimum and maximum over seeds of everything that a file of results measures."""
    found = []
    for file in ROOT.glob("docs/results/**/*.csv"):
        with file.open(newline="") as table:
            rows = list(csv.DictReader(table))
        if "measure" in rows[0]:
            found += [
                tuple(float(row[key]) for key in ("mean", "std", "min", "max")) for row in rows if int(row["seeds"]) > 1
            ]
            continue
        measured: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)  # the best look of a run that has several
        for row in rows:
            for column, value in row.items():
                first = f"{value} ".split(" ")[0]
                if column in (*NAMES, "seed", "commit") or not re.fullmatch(rf"{NUMBER}(e-?\d+)?", first):
                    continue
                by_seed = measured[(column, *(row[name] for name in NAMES if name in row))]
                seed = row.get("seed", "")
                by_seed[seed] = max(float(first), by_seed.get(seed, 0.0))
        groups = [np.array(list(by_seed.values())) for by_seed in measured.values() if len(by_seed) > 1]
        found += [(values.mean(), values.std(ddof=1), values.min(), values.max()) for values in groups]
    return found + [tuple(100 * value for value in spread) for spread in found]


def shows(text: str, value: float) -> bool:
    """Whether `value` is written as `text`."""
    text, _, power = text.replace(",", "").partition("e")
    scale = 10.0 ** int(power or 0)
    return abs(value - float(text) * scale) <= (0.5 * 10.0 ** -len(text.partition(".")[2]) + 1e-9) * scale


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_means_over_seeds_are_those_of_runs_in_a_file(page):
    """Whether they stand with a deviation, or with a range."""
    text = page.read_text()
    for middle, around in re.findall(rf"({NUMBER})(?: %)? ± ({NUMBER})", text):
        assert any(shows(middle, one) and shows(around, two) for one, two, _, _ in spreads()), f"{middle} ± {around}"
    for line in (line for line in text.splitlines() if line.startswith("|")):
        for three in re.findall(rf"(?<![-+.\d])({NUMBER})(?: %)?(?:\*\*)? \(({NUMBER}) to ({NUMBER})\)", line):
            assert any(all(map(shows, three, (one, low, high))) for one, _, low, high in spreads()), three


@cache
def measures() -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Mean and deviation of all that was measured of each row of a study."""
    found = defaultdict(list)
    for file in ROOT.glob("docs/results/studies/*.csv"):
        with file.open(newline="") as table:
            rows = list(csv.DictReader(table))
        if "measure" in rows[0]:
            for row in rows:
                found[file.name, row["row"]].append((float(row["mean"]), float(row["std"] or 0)))
    return found


def test_numbers_in_line_with_a_mean_are_of_the_same_row_of_a_study():
    """A line of a table belongs to the rows whose means and deviations it shows: its bytes and percentages are theirs, too."""
    checked = 0
    for table in re.findall(r"^\|.*\n\|---.*\n(?:\|.*\n)+", (ROOT / "docs/results/studies.md").read_text(), re.M):
        head, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
        for cells in lines:
            means = [pair for cell in cells for pair in re.findall(rf"({NUMBER}) ± ({NUMBER})", cell)]
            rows = [
                row
                for row in measures().values()
                if any(shows(m, s * x) and shows(d, s * y) for m, d in means for x, y in row for s in (1, 100))
            ]
            for title, cell in zip(head[1:], cells[1:], strict=True):
                shown = (
                    re.sub(rf"{NUMBER} ± {NUMBER}|\(.*?\)|`.*?`|.*, .*", "", cell)
                    if rows and title != "reported"
                    else ""
                )
                for text in re.findall(r"(?<![\w./=-])\d[\d,]*(?:\.\d+)?(?![\w.])", shown):
                    scales = (1, 100, 1e-6, 1e-9)  # shares, MB and GB
                    assert any(shows(text, s * x) for row in rows for x, _ in row for s in scales), (
                        f"{cells[0]}: {text}"
                    )
                    checked += 1
    assert checked > 100


def numbers(node: object) -> Iterator[float]:
    """All numbers in what a JSON file holds."""
    match node:
        case dict():
            for value in node.values():
                yield from numbers(value)
        case list():
            for value in node:
                yield from numbers(value)
        case str():
            yield from map(float, re.findall(NUMBER, node))
        case int() | float():
            yield float(node)


def test_tables_of_benchmarks_show_what_their_files_hold():
    page = ROOT / "docs" / "benchmarks.md"
    for section in page.read_text().split("\n## ")[1:]:
        files = [page.parent / path for path, _ in LINK.findall(section) if path.endswith(".json")]
        held = [number for file in files for number in numbers(json.loads(file.read_text())["rows"])]
        held += [100 * number for number in held]  # shares
        tables = re.findall(r"^\|---.*\n((?:\|.*\n)+)", section, re.M) if files else []
        for cell in (cell for table in tables for line in table.splitlines() for cell in line.split("|")[2:-1]):
            shown = re.sub(r"\(.*?\)|`.*?`", "", cell)  # aims and settings
            for text in re.findall(r"(?<![\w./-])\d[\d,]*(?:\.\d+)?(?:e-\d+)?(?![\w.])", shown):
                assert any(shows(text, number) for number in held), f"{section.splitlines()[0]}: {text}"

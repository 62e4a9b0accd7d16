"""The documents run, and lead where they say."""

import csv
import json
import re
import runpy
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from fedsieve.cli import app

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


def test_what_the_results_were_run_with_can_be_run_and_gives_their_rows(tmp_path, capsys):
    """Settings that studies no longer take, or rows that a table has and its commands lack."""
    folder = ROOT / "docs" / "results" / "studies"
    listed = defaultdict(set)
    for name, command in runpy.run_path(str(folder / "run.py"))["commands"]("DATA", "WEIGHTS", tmp_path, "full"):
        app([*command, "--list"], standalone_mode=False)
        listed[name] |= {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    for file in folder.glob("*-runs.csv"):
        with file.open(newline="") as table:
            assert {row["row"] for row in csv.DictReader(table)} <= listed[file.name.removesuffix("-runs.csv")], file


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

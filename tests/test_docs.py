"""The documents run, and lead where they say."""

import csv
import re
import runpy
from collections import defaultdict
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from fedsieve.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(?:#([^)\s]*))?\)")


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

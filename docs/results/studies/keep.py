"""Keep what a study's folders measured beside this file: `uv run python docs/results/studies/keep.py runs/drift runs/overlap`."""

import csv
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
FIGURES = {
    "drift": {"5-1": "by-round", "6-1": "rules", "7-1": "by-sparsity", "9-1": "at-once", "11-1": "of-clients"},
    "drift-central": {"3-1": "by-sparsity"},  # drift, its table1/*, fig2/* and kinds/* alone
    "overlap": {"4-1": "by-block"},
    "messages": {"10-2": "bytes"},  # drift, its messages/* alone
}


def keep(folder: Path) -> None:
    """Rows with a result, their runs that ended, and what was tried for them; what did not run says nothing here."""
    with (folder / "runs.csv").open(newline="") as file:
        ran = {row["row"] for row in csv.DictReader(file) if row["state"] == "finished"}
    for source, target, measured in (
        ("results.csv", f"{folder.name}.csv", lambda row: row["seeds"] != "0"),
        ("runs.csv", f"{folder.name}-runs.csv", lambda row: row["state"] == "finished"),
        ("choices.csv", f"{folder.name}-choices.csv", lambda row: row["state"] == "finished" and row["row"] in ran),
    ):
        with (folder / source).open(newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if measured(row)]
        if not rows:  # no row of it has anything to choose
            continue
        with (HERE / target).open("w", newline="") as file:
            writer = csv.DictWriter(file, reader.fieldnames or [], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    for number, name in FIGURES.get(folder.name, {}).items():
        shutil.copy(folder / "figures" / f"{number}.svg", HERE / f"{folder.name}-{name}.svg")


if __name__ == "__main__":
    for word in sys.argv[1:]:
        keep(Path(word))

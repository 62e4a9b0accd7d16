"""The runs of trust.md: robust rules against hostile clients, on the embedded digits.

uv run python docs/results/trust.py [--seeds 0 1 2 3]

Writes trust.csv beside this file, a line as each run ends. Runs that are there are not repeated.
"""

import argparse
import csv
import tempfile
from pathlib import Path

import torch

from fedsieve import load_config, run
from fedsieve.runner.environment import describe_environment
from fedsieve.runner.shared import Shared

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EVERYONE, DEMO = ROOT / "configs/digits-robust.yaml", ROOT / "src/fedsieve/assets/demo-federated.yaml"
CLEAN = ["federation.aggregator=mean", "federation.attack=null"]
FLIP = "federation.attack={kind: sign_flip, fraction: 0.2, factor: 10}"
ROWS: dict[tuple[str, str], tuple[Path, list[str]]] = {
    ("everyone", "mean, nobody hostile"): (EVERYONE, CLEAN),
    ("ten of twenty", "mean, nobody hostile"): (DEMO, CLEAN),
}
for cohort, config, rules in (
    (
        "everyone",
        EVERYONE,
        ("mean", "multi_krum, f: 4", "geometric_median, mix: 4", "trimmed_mean, share: 0.2", "median"),
    ),
    (
        "ten of twenty",
        DEMO,
        ("mean", "multi_krum, f: 3, m: 6", "geometric_median, mix: 4", "trimmed_mean, share: 0.4, mix: 4"),
    ),
):
    for rule in rules:
        ROWS[cohort, rule] = config, [f"federation.aggregator={{kind: {rule}}}", FLIP]
COLUMNS = ["cohort", "aggregator", "seed", "test_accuracy", "val_accuracy", "commit", "device", "torch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    seeds = parser.parse_args().seeds
    file, shared, about = HERE / "trust.csv", Shared(), describe_environment(torch.device("cpu"))
    there = set[tuple[str, str, str]]()
    if file.exists():
        with file.open(newline="") as table:
            there = {(row["cohort"], row["aggregator"], row["seed"]) for row in csv.DictReader(table)}
    with file.open("a", newline="") as table:
        writer = csv.writer(table, lineterminator="\n")
        if not there:
            writer.writerow(COLUMNS)
        for seed in seeds:
            for (cohort, rule), (config, overrides) in ROWS.items():
                if (cohort, rule, str(seed)) in there:
                    continue
                with tempfile.TemporaryDirectory() as name:
                    experiment = load_config(config, [f"seed={seed}", "tracking=[]", *overrides])
                    summary = run(experiment, Path(name) / "run", page=False, shared=shared)
                measured = [summary["test_accuracy"], summary["val_accuracy"]]
                writer.writerow([cohort, rule, seed, *measured, *(about[key] for key in ("commit", "device", "torch"))])
                table.flush()
                print(f"{cohort}, {rule}, seed {seed}: {100 * summary['test_accuracy']:.1f} %", flush=True)


if __name__ == "__main__":
    main()

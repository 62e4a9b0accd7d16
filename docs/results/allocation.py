"""Where masks lie: the share of each block that trains, by rule and share frozen.

uv run python docs/results/allocation.py --data CIFAR100 --weights VIT_TINY.safetensors [--smoke]

A head in closed form first, then masks scored on 512 held-out images; allocation.csv and pictures/allocation.svg beside this file.
"""

import argparse
import csv
import json
import tempfile
from collections import defaultdict
from pathlib import Path

from fedsieve.config import parse_config
from fedsieve.report.folder import read_masks, read_run
from fedsieve.report.masks import mask_rows
from fedsieve.runner.experiment import run
from fedsieve.runner.shared import Shared
from fedsieve.study.figures import Point, lines

HERE = Path(__file__).parent
RULES = ("least_sensitive", "most_sensitive", "low_magnitude", "high_magnitude", "low_hybrid", "random")
SPARSITIES = (0.5, 0.9, 0.99)
BASE = """
test: false
data: {source: digits, size: 64, transform: resize, normalize: half, val_fraction: 0.02}
model: {backbone: vit_tiny_patch16_224, weights: none}
federation: {cohort: 1}
mask: {scope: public, fisher: {samples: 512}}
stages:
  - {name: head, train: head, method: ridge}
  - {name: tune, train: backbone, sparse: true, rounds: 1, local: {steps: 1}, batch_size: 8}
tracking: []
"""
SMOKE = (
    "model.options={patch_size: 16, embed_dim: 16, depth: 3, num_heads: 2}",
    "data.size=32",
    "mask.fisher.samples=16",
)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--data", default="digits")
    words.add_argument("--weights", default="none")
    words.add_argument("--smoke", action="store_true", help="a small network, and nothing is written beside this file")
    given = words.parse_args()
    chosen = [f"data.source={json.dumps(given.data)}", f"model.weights={json.dumps(given.weights)}"]
    shared, rows = Shared(), []
    with tempfile.TemporaryDirectory() as name:
        for sparsity in SPARSITIES:
            for rule in RULES:
                place = Path(name) / f"{rule}-{sparsity}"
                settings = [f"mask.rule={rule}", f"mask.sparsity={sparsity}", *(SMOKE if given.smoke else ())]
                run(parse_config(BASE, [*chosen, *settings]), place, page=False, shared=shared)
                mask = next(iter(read_masks(read_run(place), [])["tune"].shared.values()))
                rows += [(rule, sparsity, row.block, row.weights, row.active, row.share) for row in mask_rows(mask)]
                print(rule, sparsity, [f"{row.share:.2f}" for row in mask_rows(mask)], flush=True)
    if given.smoke:
        return
    with (HERE / "allocation.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["rule", "sparsity", "block", "weights", "active", "share"])
        writer.writerows(rows)
    series = defaultdict(list)
    for rule, sparsity, block, _, _, share in rows:
        if sparsity == 0.9:
            series[rule].append(Point(block.replace("blocks.", ""), share, None, None))
    (HERE / "pictures" / "allocation.svg").write_text(
        lines(series, "block", "share that trains, 0.9 frozen", None, False)
    )


if __name__ == "__main__":
    main()

"""How much of a new head each rule lets train: masks over the whole network, before any training.

uv run python docs/results/new-head.py --data CIFAR100 --weights VIT_TINY.safetensors

Masks as in the sparse rows of the overlap study: one threshold, squared gradients of 8 batches of 64 training images with their labels.
Writes new-head.csv beside this file. `jaccard` is that with the mask of the largest weights.
"""

import argparse
import csv
import json
from pathlib import Path

from fedsieve import Mask, parse_config
from fedsieve.mask.overlap import jaccard
from fedsieve.runner.progress import Display
from fedsieve.runner.setup import prepare
from fedsieve.train.sieve import make_mask

RULES = (("high_magnitude", "max"), ("low_magnitude", "max"), ("high_hybrid", "max"), ("high_hybrid", "ranks"))
RULES += (("most_sensitive", "max"), ("least_sensitive", "max"), ("random", "max"))
BASE = """
data: {source: digits, size: 64, transform: resize, normalize: half, val_fraction: 0.1}
model: {backbone: vit_tiny_patch16_224, weights: none}
mask: {rule: random, sparsity: 0.9, fisher: {per: batch, batch_size: 64, labels: true, samples: 512}}
stages: [{name: all, train: all, sparse: true, epochs: 1}]
"""


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--data", default="digits")
    words.add_argument("--weights", default="none")
    given = words.parse_args()
    chosen = [f"data.source={json.dumps(given.data)}", f"model.weights={json.dumps(given.weights)}"]
    with (Path(__file__).parent / "new-head.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["size", "rule", "scale", "sparsity", "active", "head", "head_active", "head_share", "jaccard"])
        for size, sparsities in ((64, (0.3, 0.5, 0.7, 0.9)), (128, (0.9,))):
            setup = prepare(parse_config(BASE, [*chosen, f"data.size={size}"]), Display.silent())
            space = setup.space(setup.experiment.stages[0])
            weights = setup.model.get_parameter("head.weight").numel()
            for sparsity in sparsities:
                largest: Mask | None = None
                for rule, scale in RULES:
                    sieve = setup.experiment.mask
                    assert sieve is not None
                    sieve = sieve.model_copy(update={"rule": rule, "scale": scale, "sparsity": sparsity})
                    mask = make_mask(sieve, setup.model, space, setup.train, 0, "all", setup.autocast)
                    largest = largest or mask
                    head = mask.counts()["head.weight"]
                    row = [
                        size,
                        rule,
                        scale,
                        sparsity,
                        mask.count,
                        weights,
                        head,
                        head / weights,
                        jaccard(mask, largest),
                    ]
                    writer.writerow(row)
                    file.flush()
                    print(*row, flush=True)


if __name__ == "__main__":
    main()

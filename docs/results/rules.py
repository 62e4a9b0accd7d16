"""Which rule, at which sparsity, at its own learning rate: head first, then a sparse backbone, on CIFAR-100.

python docs/results/rules.py --data CIFAR100 --weights VIT_TINY.safetensors --out rules.csv [--smoke]

Every rule and sparsity gets its own rate: a short run per rate on seed 0, compared on validation, the range widened while
the best lies at its edge. Then a longer run at that rate for every seed, tested once, with the weights of its best epoch on validation.
"""

import argparse
import csv
import time
from pathlib import Path

import torch
from rich.console import Console

from fedsieve import parse_config
from fedsieve.config import Sieve
from fedsieve.mask.calibration import RULES, calibrate, hybrid, random_scores
from fedsieve.mask.mask import Mask
from fedsieve.mask.scores import fisher, magnitude
from fedsieve.randomness import generator
from fedsieve.runner.progress import Display
from fedsieve.runner.setup import Setup, fit_stage, prepare
from fedsieve.train.loop import measure, predict
from fedsieve.train.sieve import taking_part

CONFIG = """
data: {source: digits, size: 128, transform: flip, normalize: half, val_fraction: 0.1}
model: {backbone: vit_tiny_patch16_224, weights: none}
mask: {rule: random, sparsity: 0.9}
stages:
  - {name: head, train: head, epochs: 30, batch_size: 512, optimizer: {lr: 0.003}}
  - name: backbone
    train: backbone
    sparse: true
    epochs: 2
    batch_size: 128
    warmup_epochs: 0.1
    optimizer: {lr: 0.01, clip_norm: 1.0}
"""
# Where the search for a rate begins, by rule; it goes on in steps of `FACTOR` while the best is at an edge.
FIRST = {"least_sensitive": 0.3, "low_magnitude": 0.1, "low_hybrid": 0.3}
FACTOR, TRIES = 3.0, 5


class Bench:
    """One seed: data, a network with a trained head, and the scores of its backbone."""

    def __init__(self, seed: int, overrides: list[str]) -> None:
        self.experiment = parse_config(CONFIG, [*overrides, f"seed={seed}"])
        self.setup: Setup = prepare(self.experiment, Display(Console(), quiet=True))
        head, self.stage = self.experiment.stages
        plain = parse_config(CONFIG, [*overrides, f"seed={seed}", "data.transform=resize"])
        transform, self.setup.transform = self.setup.transform, prepare(plain, Display.silent()).transform
        for _ in fit_stage(self.setup, head)[2]:  # on features computed once, without flips
            pass
        self.setup.transform = transform
        self.start = {name: tensor.clone() for name, tensor in self.setup.model.state_dict().items()}
        self.space = self.setup.space(self.stage)
        model, feed = self.setup.model, self.setup.train
        rows = generator(seed, "fisher rows", "backbone").permutation(len(feed))[:1024]
        batches = (feed.batch(rows[i : i + 64]) for i in range(0, len(rows), 64))
        draws = generator(seed, "fisher labels", "backbone", 0).random(len(rows))
        sensitivity = fisher(model, self.space, batches, draws).cpu()
        weights = magnitude(self.space.read(model)).cpu()
        self.taking = taking_part(Sieve(), model, self.space)
        self.scores = {
            "fisher": sensitivity,
            "magnitude": weights,
            "random": random_scores(self.space, seed, "backbone"),
            "hybrid": hybrid(sensitivity, weights, among=self.taking),
        }

    def mask(self, rule: str, sparsity: float, allocation: str) -> Mask:
        score = self.scores[RULES[rule].score]
        lowest = RULES[rule].lowest
        return calibrate(
            lambda *_: score, self.space, sparsity=sparsity, lowest=lowest, maskable=self.taking, allocation=allocation
        )

    def train(self, mask: Mask | None, lr: float, epochs: int, test: bool) -> dict[str, float]:
        self.setup.release()
        self.setup.model.load_state_dict(self.start)
        optimizer = self.stage.optimizer.model_copy(update={"lr": lr})
        stage = self.stage.model_copy(update={"optimizer": optimizer, "epochs": epochs})
        try:
            records = [tick.record for tick in fit_stage(self.setup, stage, mask=mask)[2] if tick.record]
        except Exception as error:  # a rate too high ends in a loss that is not finite
            if "diverged" not in str(error):
                raise
            return {"val_accuracy": 0.0}
        result = {"val_accuracy": records[-1]["val_accuracy"], "images_per_second": records[-1]["images_per_second"]}
        if test:
            feed = self.setup.test_feed()
            logits = predict(self.setup.model, feed, self.setup.autocast)
            result |= measure(logits, feed.labels, "test")
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--weights", default="none")
    parser.add_argument("--out", type=Path, default=Path("rules.csv"))
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--transform", default="flip")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--search-epochs", type=int, default=1)
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.5, 0.9, 0.99])
    parser.add_argument("--allocation", default="global")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="*", type=float, help="search among these only")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no search after so many")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    overrides = [f"data.source={given.data}", f"model.weights={given.weights}", f"data.size={given.size}"]
    overrides.append(f"data.transform={given.transform}")
    if given.smoke:
        overrides += ["data.size=16", "model.options={patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}"]
    began = time.perf_counter()
    benches = [Bench(seed, overrides) for seed in given.seeds]
    print(f"{len(benches)} seeds ready after {time.perf_counter() - began:.0f} s", flush=True)
    with given.out.open("a", newline="") as file:
        writer = csv.writer(file)
        columns = ["phase", "size", "rule", "allocation", "sparsity", "lr", "epochs", "seed", "val_accuracy"]
        writer.writerow([*columns, "test_accuracy", "test_loss", "images_per_second", "seconds"])

        def run(bench: Bench, phase: str, rule: str, sparsity: float, lr: float, epochs: int) -> float:
            clock = time.perf_counter()
            mask = None if rule == "dense" else bench.mask(rule, sparsity, given.allocation)
            found = bench.train(mask, lr, epochs, test=phase == "final")
            measured = [found.get(key, "") for key in ("val_accuracy", "test_accuracy", "test_loss")]
            speed = round(found.get("images_per_second", 0))
            seconds = round(time.perf_counter() - clock, 2)
            row = [phase, given.size, rule, given.allocation, sparsity, lr, epochs, bench.experiment.seed, *measured]
            writer.writerow([*row, speed, seconds])
            file.flush()
            return found["test_accuracy" if phase == "final" and "test_accuracy" in found else "val_accuracy"]

        for sparsity in given.sparsities:
            for rule in given.rules:
                if time.perf_counter() - began > given.seconds:
                    print("out of time", flush=True)
                    return
                tried: dict[float, float] = {}
                first = FIRST.get(rule, 0.03 if sparsity < 0.99 else 0.1)
                waiting = given.rates or [first, first * FACTOR, first / FACTOR]
                while waiting:
                    for lr in waiting:
                        tried[lr] = run(benches[0], "search", rule, sparsity, lr, given.search_epochs)
                    best = max(tried, key=lambda lr: tried[lr])
                    edges = {min(tried): best / FACTOR, max(tried): best * FACTOR}
                    more = best in edges and len(tried) < TRIES and not given.rates
                    waiting = [edges[best]] if more else []
                tests = [run(bench, "final", rule, sparsity, best, given.epochs) for bench in benches]
                words = " ".join(f"{lr:.3g}:{100 * value:.1f}" for lr, value in sorted(tried.items()))
                mean = 100 * sum(tests) / len(tests)
                finals = " ".join(f"{100 * value:.2f}" for value in tests)
                clock = time.perf_counter() - began
                print(f"{clock:4.0f} s {sparsity:5} {rule:16} [{words}] -> {mean:.2f} ({finals})", flush=True)


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()

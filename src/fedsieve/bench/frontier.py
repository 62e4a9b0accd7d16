"""Accuracy per byte and per second: dense FedAvg, LoRA, last blocks and masks on the same clients, data and start.

Every run is an ordinary experiment with a folder of its own, so that a frontier that was stopped goes on where it was.
"""

import csv
import importlib.util
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from fedsieve.bench.result import Result
from fedsieve.config import Experiment, parse_config
from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomic
from fedsieve.report.figures import PANEL, SERIES, drawn
from fedsieve.report.html import size
from fedsieve.runner.experiment import read_experiment, resume, run
from fedsieve.runner.progress import Display
from fedsieve.runner.shared import Shared
from fedsieve.wire.ledger import lines

BASE = """
data: {source: uoft-cs/cifar100, size: 224, transform: flip, normalize: half, val_fraction: 0.1}
model: {backbone: vit_tiny_patch16_224.augreg_in21k_ft_in1k, weights: hub}
federation:
  clients: 100
  partition: {kind: classes, nc: 5}
  cohort: 0.1
  evaluate_every: 20
  server: {optimizer: momentum, lr: 0.3, momentum: 0.9}
stages:
  - {name: head, train: head, method: ridge}
  - {name: tune, train: all, rounds: 400, local: {steps: 1}, batch_size: 50, optimizer: {lr: 0.1}}
tracking: []
"""
SMOKE = [
    "data={source: digits, size: 16, normalize: half, val_fraction: 0.2}",
    "model={backbone: vit_tiny_patch16_224, weights: none, options: {patch_size: 4, embed_dim: 16, depth: 3, num_heads: 2}}",
    "federation={clients: 10, cohort: 2, evaluate_every: 2}",
    "stages.tune.rounds=4",
    "threads=1",
]
METHODS: dict[str, tuple[str, list[str]]] = {
    "dense": ("dense FedAvg, fp32", []),
    "lora": ("LoRA of rank 8 and head, fp32", ["model.lora={}", "stages.tune.train=[lora, head]"]),
    "last_blocks": ("the last two blocks and head, fp32", ["stages.tune.train={last_blocks: 2}"]),
    "client_masks": (
        "a tenth, each client its own mask, fp32",
        [
            "stages.tune.train=backbone",
            "stages.tune.mask={rule: low_hybrid, sparsity: 0.9, scope: client, fisher: {samples: 256}}",
        ],
    ),
    "shared_int8": (
        "a tenth, one shared mask, int8 up, fp16 down",
        [
            "stages.tune.train=backbone",
            "stages.tune.mask={rule: high_magnitude, sparsity: 0.9, scope: shared}",
            "message={up: int8, down: fp16}",
        ],
    ),
}


@dataclass(frozen=True)
class Run:
    """One finished run: what it sent and took until each evaluation, and how good it then was."""

    method: str
    rate: float
    seed: int
    points: list[tuple[int, int, float, float]]  # round, bytes up and down, seconds, validation accuracy
    val_accuracy: float
    test_accuracy: float
    update: float  # bytes of one client's, on average

    def first(self, accuracy: float) -> tuple[int, float]:
        """Bytes and seconds until it was that good on validation."""
        return next((sent, seconds) for _, sent, seconds, found in self.points if found >= accuracy)


def frontier(
    device: torch.device,
    smoke: bool,
    folder: Path,
    overrides: Sequence[str] = (),
    methods: Sequence[str] = tuple(METHODS),
    rates: Sequence[float] = (0.03, 0.1, 0.3),
    seeds: Sequence[int] = (0,),
    display: Display | None = None,
) -> Result:
    """Each method at the rate that is best on validation with the first seed; `folder` gets runs, a CSV and a figure."""
    display, shared = display or Display.silent(), Shared()
    rates = (0.01,) if smoke else rates
    result = Result(
        (
            "method",
            "an update, MB",
            "rate",
            "seeds",
            "validation, %",
            "test, %",
            "sent in all, MB",
            "seconds",
            "MB to target",
            "seconds to target",
            "times dense bytes",
        ),
    )
    if "lora" in methods and importlib.util.find_spec("peft") is None:
        result.skipped.append("lora: skipped, peft is not installed. Install: pip install 'fedsieve[lora]'")
        methods = [method for method in methods if method != "lora"]
    runs: list[Run] = []
    kept: dict[str, list[Run]] = {}
    for method in methods:
        tried = [_run(method, rate, seeds[0], smoke, overrides, device, folder, display, shared) for rate in rates]
        sound = [one for one in tried if one is not None]
        if not sound:
            result.skipped.append(f"{method}: diverged at every rate that was tried")
            continue
        best = max(sound, key=lambda one: one.val_accuracy)
        others = [
            _run(method, best.rate, seed, smoke, overrides, device, folder, display, shared) for seed in seeds[1:]
        ]
        kept[method] = [best, *(one for one in others if one is not None)]
        runs += [*sound, *kept[method][1:]]
    if not kept:
        raise FedsieveError("bench frontier: every run diverged. Lower --rates", 1)
    # The accuracy that all of them reach with every seed, so that nobody is compared with a promise.
    target = min(max(point[3] for point in one.points) for group in kept.values() for one in group)
    costs = {method: [one.first(target) for one in group] for method, group in kept.items()}
    dense = statistics.mean(sent for sent, _ in costs["dense"]) if "dense" in costs else None
    for method, group in kept.items():
        means = {
            "val": 100 * statistics.mean(one.val_accuracy for one in group),
            "test": 100 * statistics.mean(one.test_accuracy for one in group),
            "sent": statistics.mean(one.points[-1][1] for one in group),
            "seconds": statistics.mean(one.points[-1][2] for one in group),
            "bytes": statistics.mean(sent for sent, _ in costs[method]),
            "until": statistics.mean(seconds for _, seconds in costs[method]),
        }
        edge = " (edge)" if len(rates) > 1 and group[0].rate in (min(rates), max(rates)) else ""
        result.rows.append(
            (
                METHODS[method][0],
                1e-6 * group[0].update,
                f"{group[0].rate:g}{edge}",
                len(group),
                means["val"],
                means["test"],
                1e-6 * means["sent"],
                means["seconds"],
                1e-6 * means["bytes"],
                means["until"],
                means["bytes"] / dense if dense else None,
            )
        )
    result.note = (
        f"Every method starts from the same closed-form head and sees the same cohorts. The target, {100 * target:.1f} % on validation, is "
        f"the best that all reach. Rates tried: {', '.join(f'{rate:g}' for rate in rates)}, chosen on validation with seed {seeds[0]}; "
        "`edge` says that a rate outside might be better. Bytes count both directions, the head, masks and calibration; seconds "
        f"count from the head on and include evaluation, compilation and calibration. {folder}: runs (`fedsieve report` draws their pages), frontier.csv, frontier.svg."
    )
    write_atomic(folder / "frontier.csv", _table(runs))
    write_atomic(folder / "frontier.svg", _figure({METHODS[name][0]: group[0] for name, group in kept.items()}))
    return result


def make_experiment(method: str, rate: float, seed: int, smoke: bool, overrides: Sequence[str]) -> Experiment:
    """The experiment of one run."""
    chosen = [
        *(SMOKE if smoke else []),
        *overrides,
        *METHODS[method][1],
        f"stages.tune.optimizer.lr={rate!r}",
        f"seed={seed}",
    ]
    return parse_config(BASE, [f"name=frontier-{method}", *chosen], where="bench frontier")


def _run(
    method: str,
    rate: float,
    seed: int,
    smoke: bool,
    overrides: Sequence[str],
    device: torch.device,
    folder: Path,
    display: Display,
    shared: Shared,
) -> Run | None:
    """Run an experiment, or take up what is there of it; None where it diverges."""
    experiment = make_experiment(method, rate, seed, smoke, overrides).model_copy(update={"device": str(device)})
    place = folder / "runs" / f"{method}-{rate:g}-{seed}"
    display.say(f"{METHODS[method][0]}, rate {rate:g}, seed {seed}: {place}")
    try:
        there = (place / "config.yaml").exists()
        if there and read_experiment(place) != experiment:
            raise FedsieveError(f"{place} is a run with other settings. Use another --folder, or remove it")
        summary = (
            resume(place, page=False, shared=shared) if there else run(experiment, place, page=False, shared=shared)
        )
    except FedsieveError as error:
        if "diverged" not in str(error):
            raise
        display.say(f"  {error}")
        return None
    updates = [line.size for line in lines(place / "ledger.csv") if line.stage == "tune" and line.what == "update"]
    accuracies = summary["val_accuracy"], summary["test_accuracy"]
    return Run(method, rate, seed, read_points(place / "metrics.jsonl"), *accuracies, statistics.mean(updates))


def read_points(metrics: Path) -> list[tuple[int, int, float, float]]:
    """Of a run's records: rounds so far, bytes up and down, seconds and validation accuracy at every evaluation.

    Seconds are those after the head, which is the same for all and computed for the first alone.
    """
    points = []
    sent, seconds = 0, 0.0
    for number, line in enumerate(metrics.read_text().splitlines()):
        record: Mapping[str, Any] = json.loads(line)
        sent += record["bytes_up"] + record["bytes_down"]
        if record["stage"] == "tune":
            seconds += record["seconds"]
        if "val_accuracy" in record:
            points.append((number + 1, sent, seconds, record["val_accuracy"]))
    return points


def _table(runs: Sequence[Run]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["method", "rate", "seed", "round", "bytes", "seconds", "val_accuracy", "test_accuracy"])
    for one in runs:
        for number, sent, seconds, accuracy in one.points:
            writer.writerow(
                [one.method, one.rate, one.seed, number, sent, f"{seconds:.3f}", accuracy, one.test_accuracy]
            )
    return buffer.getvalue()


@drawn
def _figure(runs: Mapping[str, Run]) -> Figure:
    """Validation accuracy of each method against what was sent, and against time."""
    figure = Figure(figsize=(2 * PANEL[0], PANEL[1]), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, place, label in zip(panels, (1, 2), ("bytes up and down", "seconds"), strict=True):
        for colour, (name, one) in zip(SERIES, runs.items(), strict=False):
            accuracy = [100 * point[3] for point in one.points]
            axes.plot([point[place] for point in one.points], accuracy, color=colour, label=name, marker="o", ms=2.5)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _, place=place: size(value) if place == 1 else f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label)
    panels[0].set_ylabel("validation accuracy, %")
    figure.legend(handles=panels[0].get_lines(), loc="outside upper left", ncols=2)
    return figure

"""Accuracy per byte and per second: dense FedAvg, LoRA, last blocks and masks on the same clients, data and start.

Every run is an ordinary experiment with a folder of its own, so that a frontier that was stopped goes on where it was.
"""

import csv
import importlib.util
import io
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from fedsieve.bench.result import Result
from fedsieve.config import Experiment, parse_config
from fedsieve.errors import Diverged, FedsieveError, with_extra
from fedsieve.files import write_atomic
from fedsieve.report.figures import PANEL, SERIES, drawn
from fedsieve.report.html import size
from fedsieve.runner.claim import is_free
from fedsieve.runner.environment import describe_environment
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

DIVERGED = "diverged.txt"


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
    before: bool  # whether it was there, finished or begun
    origin: str  # hardware and versions

    @property
    def moved(self) -> bool:
        """Whether it was ever better than the head it starts from."""
        head, *later = (accuracy for *_, accuracy in self.points)
        return max(later, default=head) > head

    def first(self, accuracy: float) -> tuple[int, float] | None:
        """Bytes and seconds until it was that good on validation; None where it never was."""
        return next(((sent, seconds) for _, sent, seconds, found in self.points if found >= accuracy), None)


def frontier(
    device: torch.device,
    smoke: bool,
    folder: Path,
    overrides: Sequence[str] = (),
    methods: Sequence[str] = tuple(METHODS),
    rates: Sequence[float] = (0.03, 0.1, 0.3),
    seeds: Sequence[int] = (0,),
    target: float | None = None,
    display: Display | None = None,
) -> Result:
    """Each method at the rate that is best on validation with the first seed; `folder` gets runs, a CSV and a figure.

    What it takes is told until a validation accuracy of `target`, or the best that all reach.
    Runs that are there are taken over: finished ones whatever device they ran on. The CSV has all of these settings, and the
    figure all methods, also those that were not asked for this time.
    """
    display, shared = display or Display.silent(), Shared()
    rates = (0.01,) if smoke else rates
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedsieveError(f"--folder: {folder} cannot be a folder of runs: {error.strerror}. Name another") from None
    result = Result(
        (
            "method",
            "an update, MB",
            "rate",
            "seeds",
            "validation, %",
            "test, %",
            "±",
            "sent in all, MB",
            "seconds",
            "MB to target",
            "seconds to target",
            "times dense bytes",
            "times dense seconds",
        ),
    )
    if "lora" in methods and importlib.util.find_spec("peft") is None:
        result.skipped.append(f"lora: skipped, peft is not installed. Run {with_extra('lora')}")
        methods = [method for method in methods if method != "lora"]
    there, runs = _finished(folder, smoke, overrides), list[Run]()
    kept: dict[str, list[Run]] = {}
    lost: list[str] = []
    for method in methods:
        tried = [_run(method, rate, seeds[0], smoke, overrides, device, folder, display, shared) for rate in rates]
        sound = [one for one in tried if one is not None]
        lost += [f"{method} at {rate:g}" for rate, one in zip(rates, tried, strict=True) if one is None]
        if not sound:
            result.skipped.append(f"{method}: diverged at every rate that was tried")
            continue
        best = max(sound, key=lambda one: one.val_accuracy)
        others = [
            _run(method, best.rate, seed, smoke, overrides, device, folder, display, shared) for seed in seeds[1:]
        ]
        lost += [f"{method}, seed {seed}" for seed, one in zip(seeds[1:], others, strict=True) if one is None]
        kept[method] = [best, *(one for one in others if one is not None)]
        runs += [*sound, *kept[method][1:]]
    if not kept:
        raise FedsieveError("bench frontier: every run diverged. Lower --rates", 1)
    # The accuracy that all of them reach with every seed, so that nobody is compared with a promise.
    shared_best = min(max(point[3] for point in one.points) for group in kept.values() for one in group)
    reached = shared_best if target is None else target
    costs = {method: _means(one.first(reached) for one in group) for method, group in kept.items()}
    dense = costs.get("dense", (None, None))
    unmoved = [name for name, group in kept.items() if any(not one.moved for one in group)]
    for method, group in kept.items():
        means = {
            "val": 100 * statistics.mean(one.val_accuracy for one in group),
            "test": 100 * statistics.mean(one.test_accuracy for one in group),
            "sent": statistics.mean(one.points[-1][1] for one in group),
            "seconds": statistics.mean(one.points[-1][2] for one in group),
        }
        sent, until = costs[method]
        edge = " (edge)" if len(rates) > 1 and group[0].rate in (min(rates), max(rates)) else ""
        result.rows.append(
            (
                METHODS[method][0],
                1e-6 * group[0].update,
                f"{group[0].rate:g}{edge}",
                len(group),
                means["val"],
                means["test"],
                100 * statistics.stdev(one.test_accuracy for one in group) if len(group) > 1 else None,
                1e-6 * means["sent"],
                means["seconds"],
                None if sent is None else 1e-6 * sent,
                until,
                *(
                    None if own is None or not cost else own / cost
                    for own, cost in zip((sent, until), dense, strict=True)
                ),
            )
        )
    result.note = (
        f"Every method starts from the same closed-form head and sees the same cohorts. The target is {100 * reached:.1f} % on validation"
        f"{', the best that all reach' if target is None else ''}, seen where runs are evaluated. Rates tried: {', '.join(f'{rate:g}' for rate in rates)}, chosen on validation with seed {seeds[0]}; "
        "`edge` says that a rate outside might be better. Bytes count both directions, the head, masks and calibration; seconds "
        f"count from the head on and include evaluation, compilation and calibration.{_taken_over(runs, device)}"
        + (f" Diverged: {'; '.join(lost)}." if lost else "")
        + (f" Not better than the head they start from, with some seed: {', '.join(unmoved)}." if unmoved else "")
        + ("" if smoke else f" {folder}: runs (`fedsieve report` draws their pages), frontier.csv, frontier.svg.")
    )
    asked = {(one.method, one.rate, one.seed) for one in runs}
    rest = [one for one in there if (one.method, one.rate, one.seed) not in asked]
    figure = {one.method: one for one in sorted(rest, key=lambda one: one.val_accuracy) if one.seed == seeds[0]}
    figure |= {method: group[0] for method, group in kept.items()}
    write_atomic(folder / "frontier.csv", _table([*runs, *rest]))
    write_atomic(
        folder / "frontier.svg", _figure({METHODS[name][0]: figure[name] for name in METHODS if name in figure})
    )
    return result


def _means(costs: Iterable[tuple[int, float] | None]) -> tuple[float | None, float | None]:
    """Mean bytes and seconds; None where some run never got there."""
    found = list(costs)
    if None in found:
        return None, None
    sent, seconds = (statistics.mean(each) for each in zip(*(one for one in found if one), strict=True))
    return sent, seconds


def _taken_over(runs: Sequence[Run], device: torch.device) -> str:
    """A sentence on runs that were there before, and on hardware and versions other than these."""
    before = [one for one in runs if one.before]
    if not before:
        return ""
    here = _origin(describe_environment(device))
    elsewhere = Counter(one.origin for one in before if one.origin != here)
    where = "; ".join(f"{count} on {origin}" for origin, count in elsewhere.items())
    return f" {len(before)} of {len(runs)} runs were there before, finished or begun{f': {where}' if where else ''}."


def _origin(environment: Mapping[str, Any]) -> str:
    keys = ("device", "cpu", "cpu_count", "torch", "commit")
    told = "{}, {} x {}, torch {}, commit {}"
    return told.format(*map(environment.get, keys)) if environment.get("cpu") else "unknown hardware and versions"


def _finished(folder: Path, smoke: bool, overrides: Sequence[str]) -> list[Run]:
    """The finished runs of these settings that are in a folder."""
    found = []
    for place in sorted((folder / "runs").iterdir()):
        if (place / "summary.json").exists():
            there = _settings(place)
            method, rate, seed = there.name.removeprefix("frontier-"), there.stages[-1].optimizer.lr, there.seed
            if method not in METHODS:
                continue
            wanted = make_experiment(method, rate, seed, smoke, overrides)
            if there == wanted.model_copy(update={"device": there.device}):
                found.append(_read(place, method, rate, seed, before=True))
    return found


def make_experiment(method: str, rate: float, seed: int, smoke: bool, overrides: Sequence[str]) -> Experiment:
    """The experiment of one run."""
    chosen = [
        *(SMOKE if smoke else []),
        *overrides,
        *METHODS[method][1],
        f"stages.tune.optimizer.lr={rate!r}",
        f"seed={seed}",
    ]
    experiment = parse_config(BASE, [f"name=frontier-{method}", *chosen], where="bench frontier")
    if not experiment.test or not experiment.data.val_fraction:
        raise FedsieveError(
            "bench frontier compares on validation and test: leave test and data.val_fraction as they are"
        )
    return experiment


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
    before = place.exists() and not is_free(place)
    if before:
        _check(place, experiment)
    try:
        if (place / DIVERGED).exists():
            raise Diverged((place / DIVERGED).read_text())
        if before:
            resume(place, page=False, shared=shared)
        else:
            run(experiment, place, page=False, shared=shared)
    except Diverged as error:
        write_atomic(place / DIVERGED, str(error))  # it would again
        display.say(f"  {error}")
        return None
    return _read(place, method, rate, seed, before)


def _check(place: Path, experiment: Experiment) -> None:
    """Refuse a run that is not the asked one; only one that is not finished needs the device it was begun on."""
    there = _settings(place)
    if there.model_copy(update={"device": experiment.device}) != experiment:
        raise FedsieveError(f"{place} is a run with other settings. Use another --folder, or remove it")
    ended = any((place / name).exists() for name in ("summary.json", DIVERGED))
    if there.device != experiment.device and not ended:
        raise FedsieveError(
            f"{place} is not finished and was begun on {there.device}: --device {there.device} goes on with it. Or remove "
            f"it, to run it on {experiment.device}"
        )


def _settings(place: Path) -> Experiment:
    if not (place / "config.yaml").exists():
        raise _damaged(place, ValueError("it has no config.yaml"))
    try:
        return read_experiment(place)
    except FedsieveError as error:
        raise _damaged(place, error) from None


def _read(place: Path, method: str, rate: float, seed: int, before: bool) -> Run:
    """What a finished run's files say, where they agree."""
    try:
        summary, where = json.loads((place / "summary.json").read_text()), place / "environment.json"
        messages = list(lines(place / "ledger.csv"))
        points = read_points(place / "metrics.jsonl")
        sent = summary["bytes_up"] + summary["bytes_down"]
        if sum(line.size for line in messages) != sent:
            raise ValueError("ledger.csv lacks messages")
        if points[-1][:2] != (summary["rounds"], sent):
            raise ValueError("metrics.jsonl lacks rounds")
        update = statistics.mean(line.size for line in messages if line.stage == "tune" and line.what == "update")
        accuracies = float(summary["val_accuracy"]), float(summary["test_accuracy"])
        origin = _origin(json.loads(where.read_text()) if where.exists() else {})
        return Run(method, rate, seed, points, *accuracies, update, before, origin)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _damaged(place, error) from None


def _damaged(place: Path, error: Exception) -> FedsieveError:
    why = f"{Path(error.filename).name}: {error.strerror}" if isinstance(error, OSError) else str(error).splitlines()[0]
    return FedsieveError(
        f"{place}: this run is damaged ({why}). Remove it and repeat the command, which runs it again", 1
    )


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
            points.append((number + 1, sent, seconds, float(record["val_accuracy"])))
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
            points = [
                (point[place], 100 * point[3]) for point in one.points if point[place]
            ]  # the head took no seconds
            axes.plot(*zip(*points, strict=True), color=colour, label=name, marker="o", ms=2.5)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _, place=place: size(value) if place == 1 else f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label)
    panels[0].set_ylabel("validation accuracy, %")
    figure.legend(handles=panels[0].get_lines(), loc="outside upper left", ncols=2)
    return figure

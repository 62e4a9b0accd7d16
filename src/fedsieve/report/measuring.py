"""The numbers of a finished run: fields of its summary, or made of its records, messages and masks (measures.py names them)."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.mask.overlap import AROUND
from fedsieve.report.folder import RunFolder, read_masks
from fedsieve.report.html import duration
from fedsieve.report.masks import Pairs, tensor_rows
from fedsieve.report.measures import STEADY, TARGET
from fedsieve.report.traffic import of_dense, read_traffic, so_far

UPDATES = ("update", "update.pad")  # plain, or padded for a secure sum


def measure(run: RunFolder, name: str) -> float | None:
    """A number of one run: a field of its summary, of a stage (`head.test_loss`, `last.seconds`), or made here."""
    if name in MADE:
        return MADE[name](run)
    if target := TARGET.fullmatch(name):
        return _until(run, target[1], float(target[2]) / 100)
    if run.summary is None:
        return None
    stages = run.summary.stages
    first, _, rest = name.partition(".")
    part: Any = run.summary
    if rest and (first == "last" or first in stages):
        if rest == "seconds":
            return _seconds(run, first if first in stages else run.experiment.stages[-1].name)
        part, name = stages.get(first) or list(stages.values())[-1], rest
    elif first == "clients":
        part, name = run.summary.client_accuracy, rest
    elif first == "personal":
        method, _, name = rest.partition(".")
        part = run.summary.personal.get(method)
    value = getattr(part, name, None)
    return None if value is None else float(value)


def spent(run: RunFolder, what: str) -> np.ndarray:
    """Bytes sent, or typical seconds of the last stage, up to the end of each record's round or epoch (NaN: unknown)."""
    if what == "bytes":
        return so_far(run.records, read_traffic(run))
    last = run.experiment.stages[-1].name
    timed = [record.stage == last and record.seconds is not None for record in run.records]
    total = _seconds(run, last)
    return np.cumsum(timed) * (math.nan if total is None else total / sum(timed))


def _until(run: RunFolder, what: str, accuracy: float) -> float | None:
    """The bytes or seconds spent when the server's validation accuracy was first seen to be that high."""
    seen = ((place, record.val_accuracy) for place, record in enumerate(run.records))
    place = next((place for place, found in seen if found is not None and found >= accuracy), None)
    found = math.nan if place is None else float(spent(run, what)[place])
    return None if math.isnan(found) else found


def _column(run: RunFolder, *names: str) -> list[float]:
    """The first of these fields that the last stage's records have."""
    last = run.experiment.stages[-1].name
    for name in names:
        if values := [record[name] for record in run.records if record.stage == last and name in record]:
            return values
    return []


def _seconds(run: RunFolder, *stages: str) -> float | None:
    """The median seconds of an epoch or round, times their number, summed over stages (None: too few were timed).

    The first row of a process also compiles and computes features. A plain sum would depend on the order of rows.
    """
    total = 0.0
    for stage in stages:
        values = [record.seconds for record in run.records if record.stage == stage and record.seconds is not None]
        if len(values) < 2:
            return None
        total += len(values) * float(np.median(values))
    return total


def _steadiness(run: RunFolder) -> float | None:
    """How far the last evaluations deviate from a straight line: a run that still rises is not unsteady for that."""
    values = np.array(_column(run, "test_accuracy", "val_accuracy")[-STEADY:])
    if len(values) < STEADY:
        return None
    line = np.polynomial.Polynomial.fit(np.arange(STEADY), values, 1)
    return float(np.std(values - line(np.arange(STEADY))))


def _pairs(run: RunFolder, part: Callable[[Pairs], np.ndarray]) -> float | None:
    """How far clients' own masks agree: a mean over all pairs."""
    return None if run.client_pairs is None else float(np.nanmean(part(run.client_pairs)))


def _third(found: Pairs, last: bool) -> np.ndarray:
    """The agreement in the last, or first, third of the blocks; what lies around them is no block."""
    inner = [place for place, name in enumerate(found.block_names) if name not in AROUND]
    count = max(1, len(inner) // 3)
    return found.blocks[inner[-count:] if last else inner[:count]]


def _total(run: RunFolder, one: str, two: str, sign: int) -> float | None:
    """The sum, or the difference, of two measures."""
    a, b = measure(run, one), measure(run, two)
    return None if a is None or b is None else a + sign * b


def _numbers_up(run: RunFolder) -> float | None:
    """How many numbers all updates carried, counted as the drift report does: for every weight its value and, where
    only some are sent, one index for each dimension of its tensor."""
    if run.messages is None or run.summary is None:
        return None
    stage = run.experiment.stages[-1]
    sent = sum(n for (name, _, _, what, _), n in run.messages.items() if name == stage.name and what == "update")
    trained = run.summary.stages[stage.name].trained
    if run.experiment.mask_of(stage) is None:
        return None if trained is None else float(sent * trained)
    own = read_masks(run, []).get(stage.name)
    masks = list(own.clients.values()) or list(own.shared.values()) if own else []
    each = [
        sum(count * (1 + len(shape)) for count, shape in zip(mask.counts().values(), mask.space.shapes, strict=True))
        for mask in masks
    ]
    return sent * float(np.mean(each)) if each else None


def _bytes_per_update(run: RunFolder) -> float | None:
    """The mean length of a client's update in the last stage."""
    last = run.experiment.stages[-1].name
    sizes = [(key[4], n) for key, n in (run.messages or {}).items() if key[0] == last and key[3] in UPDATES]
    return sum(size * n for size, n in sizes) / sum(n for _, n in sizes) if sizes else None


def _head_share(run: RunFolder) -> float | None:
    """The share of the head's weights that the last stage's first mask lets train."""
    masks = read_masks(run, []).get(run.experiment.stages[-1].name)
    mask = masks.at(1) if masks else None
    heads = [row for row in tensor_rows(mask) if row.name.startswith("head.")] if mask else []
    return sum(row.active for row in heads) / sum(row.weights for row in heads) if heads else None


def _best_test_at(run: RunFolder) -> float | None:
    """The epoch or round of the last stage that did best on test, as reports choose it."""
    last = run.experiment.stages[-1].name
    tested = [record for record in run.records if record.stage == last and "test_accuracy" in record]
    best = max(tested, key=lambda record: record["test_accuracy"], default=None)
    return None if best is None else float(best.round or best["epoch"])


def _gain(run: RunFolder) -> float | None:
    """The test accuracy that the last stage adds to the one before it."""
    names = [stage.name for stage in run.experiment.stages]
    return _total(run, "test_accuracy", f"{names[-2]}.test_accuracy", -1) if names[1:] else None


MADE: dict[str, Callable[[RunFolder], float | None]] = {
    "bytes": lambda run: _total(run, "bytes_up", "bytes_down", 1),
    "of_dense": lambda run: of_dense(read_traffic(run)),
    "best_test_accuracy": lambda run: max(_column(run, "test_accuracy"), default=None),
    "best_test_at": _best_test_at,
    "seconds": lambda run: _seconds(run, *(stage.name for stage in run.experiment.stages)),
    "steadiness": _steadiness,
    "mean_drift": lambda run: float(np.mean(found)) if (found := _column(run, "drift")) else None,
    "train_accuracy": lambda run: next(reversed(_column(run, "train_accuracy")), None),
    "jaccard": lambda run: _pairs(run, lambda found: found.total),
    "jaccard_chance": lambda run: _pairs(run, lambda found: found.chance),
    "jaccard_early": lambda run: _pairs(run, lambda found: _third(found, last=False)),
    "jaccard_deep": lambda run: _pairs(run, lambda found: _third(found, last=True)),
    "jaccard_deepens": lambda run: _total(run, "jaccard_deep", "jaccard_early", -1),
    "numbers_up": _numbers_up,
    "bytes_per_update": _bytes_per_update,
    "head_share": _head_share,
    "epsilon": lambda run: run.summary.privacy.get("epsilon") if run.summary else None,
    "gain": _gain,
    "personal_gain": lambda run: _total(run, "personal.local.mean", "personal.global.mean", -1),
}


# --- where numbers come from -----------------------------------------------------------------------------------------


def provenance(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Network, images, commits, hardware, seeds and time of finished runs."""

    def distinct(part: Callable[[RunFolder], Any]) -> list[str]:
        return sorted({str(value) for value in map(part, runs) if value is not None})

    def weights(run: RunFolder) -> str:
        model = run.experiment.model
        origin = model.weights if model.weights in ("hub", "none", "digits") else Path(model.weights).name
        return f"{model.backbone} ({'from the hub' if origin == 'hub' else f'weights: {origin}'})"

    return {
        "runs": len(runs),
        "backbones": distinct(weights),
        "sizes": distinct(lambda run: f"{run.experiment.data.size} px"),
        "data": distinct(lambda run: Path(run.experiment.data.source).name),
        "seeds": sorted({run.experiment.seed for run in runs}),
        "commits": distinct(lambda run: run.environment.get("commit") or f"version {run.environment.get('fedsieve')}"),
        "hardware": distinct(lambda run: run.environment.get("device")),
        "torch": distinct(lambda run: run.environment.get("torch")),
        "seconds": sum(run.summary.seconds or 0.0 for run in runs if run.summary),
    }


def describe(about: Mapping[str, Any]) -> str:
    """Where numbers come from, in one line."""
    if not about["runs"]:
        return "Nothing has run yet."
    seeds = about["seeds"]
    told = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    parts = [", ".join(about[key]) for key in ("backbones", "data", "sizes")]
    parts += [told, f"{about['runs']} runs", f"commit {', '.join(about['commits'])}", ", ".join(about["hardware"])]
    return "; ".join([*parts, f"torch {', '.join(about['torch'])}", f"{duration(about['seconds'])} in all"]) + "."

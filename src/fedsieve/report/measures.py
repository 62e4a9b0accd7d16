"""The vocabulary of measures: what a run can be measured by, what tables call it, and which runs have it.

They are fields of summary.json and of its stages, or made of the records, messages and masks of a run (measuring.py). Nothing
here needs torch.
"""

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from fedsieve.config import Experiment, Stage
from fedsieve.errors import FedsieveError, did_you_mean

STEADY = 10  # evaluations at the end over which steadiness is taken: fewer show how fast a run learns
RATIO = " / "  # between a measure and the row whose measure it is divided by
TARGET = re.compile(r"(bytes|seconds)_to_(\d+(?:\.\d+)?)")  # until a validation accuracy, in percent
SPREADS = ("mean", "std", "worst_decile", "worst")
Form = Literal["percent", "bytes", "seconds", "whole", "number"]


class Measure(NamedTuple):
    label: str
    needs: str  # of the run, or of a stage


def _has_own_masks(run: Experiment, stage: Stage) -> bool:
    sieve = run.mask_of(stage)
    return run.federation is not None and sieve is not None and sieve.scope == "client"


def _has_masked_head(run: Experiment, stage: Stage) -> bool:
    shared = run.mask_of(stage) is not None and not _has_own_masks(run, stage)
    return shared and any(part in ("all", "head") for part in stage.parts)


def _has_evaluations(run: Experiment, stage: Stage) -> bool:
    every = run.federation.evaluate_every if run.federation else 1
    return (run.test_curve or run.data.val_fraction > 0) and -(-stage.length // every) >= STEADY


def _has_personal(run: Experiment, method: str) -> bool:
    personal = run.federation.personal if run.federation else None
    return run.test and personal is not None and method in ("global", *personal.methods)


NEEDS: dict[str, Callable[[Experiment, Stage], bool]] = {
    "nothing": lambda run, stage: True,
    "a test": lambda run, stage: run.test,
    "a test curve": lambda run, stage: run.test_curve,
    "validation": lambda run, stage: run.data.val_fraction > 0,
    "several stages": lambda run, stage: run.test and len(run.stages) > 1,
    "steps": lambda run, stage: stage.method == "sgd" and stage.length > 1,
    "clients": lambda run, stage: run.federation is not None,
    "rounds": lambda run, stage: run.federation is not None and stage.method == "sgd",
    "evaluations": _has_evaluations,
    "noise": lambda run, stage: run.privacy.dp is not None,
    "personal models": lambda run, stage: _has_personal(run, "local"),
    "a mask": lambda run, stage: run.mask_of(stage) is not None,
    "a mask with the head": _has_masked_head,
    "clients' own masks": _has_own_masks,
}
OF_STAGES = {  # of a stage; without a stage's name, of the whole run
    "test_accuracy": Measure("test accuracy", "a test"),
    "test_loss": Measure("test loss", "a test"),
    "val_accuracy": Measure("validation accuracy", "validation"),
    "val_loss": Measure("validation loss", "validation"),
    "bytes_up": Measure("sent up", "clients"),
    "bytes_down": Measure("sent down", "clients"),
    "drift": Measure("drift, last round", "rounds"),
    "seconds": Measure("time", "steps"),
}
OF_MASKS = {  # of a stage alone
    "calibration_seconds": Measure("calibration", "a mask"),
    "active": Measure("active weights", "a mask"),
}
OF_RUNS = {  # made of the last stage, or of the whole run
    "bytes": Measure("sent in all", "clients"),
    "of_dense": Measure("of dense fp32", "clients"),
    "numbers_up": Measure("numbers sent up", "clients"),
    "bytes_per_update": Measure("an update", "rounds"),
    "best_test_accuracy": Measure("best seen on test", "a test curve"),
    "best_test_at": Measure("best epoch or round on test", "a test curve"),
    "jaccard": Measure("Jaccard index", "clients' own masks"),
    "jaccard_chance": Measure("by chance", "clients' own masks"),
    "jaccard_deep": Measure("Jaccard index, last third of blocks", "clients' own masks"),
    "jaccard_deepens": Measure("Jaccard index, last third less first", "clients' own masks"),
    "head_share": Measure("share of the head that trains", "a mask with the head"),
    "train_accuracy": Measure("train accuracy", "nothing"),
    "mean_drift": Measure("drift, mean of rounds", "rounds"),
    "steadiness": Measure("steadiness", "evaluations"),
    "epsilon": Measure("epsilon spent", "noise"),
    "gain": Measure("gain over the stage before", "several stages"),
    "personal_gain": Measure("own model less shared", "personal models"),
}
LABELS = {name: measure.label for name, measure in (OF_STAGES | OF_RUNS).items()} | {
    "head.test_accuracy": "head stage",
    "head.test_loss": "head stage's test loss",
    "head.seconds": "time of the head stage",
    "last.seconds": "time of the last stage",
    "last.calibration_seconds": "calibration",
    "last.active": "active weights",
    "clients.mean": "clients, mean",
    "clients.std": "clients, deviation",
    "clients.worst_decile": "clients, worst decile",
    "clients.worst": "worst client",
    "personal.global.mean": "global model on clients",
    "personal.local.mean": "own model, mean",
    "personal.local.worst_decile": "own model, worst decile",
    "personal.head.mean": "own head, mean",
}
SHARES = ("accuracy", "gain", ".mean", ".std", ".worst", ".worst_decile", "of_dense", "steadiness", "head_share")


def fills(run: Experiment, name: str) -> bool:
    """True where a finished run of an experiment has this measure. A measure that no run could have is refused."""
    stages = {stage.name: stage for stage in run.stages} | {"last": run.stages[-1]}
    *first, field = [name] if TARGET.fullmatch(name) else name.split(".")
    match first:
        case [] if target := TARGET.fullmatch(field):
            return run.data.val_fraction > 0 and (target[1] == "seconds" or run.federation is not None)
        case [] if found := (OF_STAGES | OF_RUNS).get(field):
            asked = stages.values() if field == "seconds" else [stages["last"]]
            return all(NEEDS[found.needs](run, stage) for stage in asked)
        case ["clients"] if field in SPREADS:
            return run.test and run.federation is not None
        case ["personal", method] if field in SPREADS:
            return _has_personal(run, method)
        case [stage] if found := (OF_STAGES | OF_MASKS).get(field):
            return stage in stages and NEEDS[found.needs](run, stages[stage])
    hint = f" It belongs to a stage: last.{field}." if not first and field in OF_MASKS else ""
    raise FedsieveError(f'there is no measure "{name}".{hint}{did_you_mean(name, [*OF_STAGES, *OF_RUNS])}')


def form(name: str) -> Form:
    """How a measure, or a field of a record, is written."""
    if RATIO in name:
        return "number"
    if name.endswith(SHARES):
        return "percent"
    if name.startswith("bytes"):
        return "bytes"
    if name.startswith("seconds_to") or name.endswith("seconds"):
        return "seconds"
    return "whole" if name.endswith(("numbers_up", "active", "best_test_at")) else "number"


def named(name: str) -> str:
    """A measure in words."""
    name, _, row = name.partition(RATIO)
    words = LABELS.get(name, name.replace("_", " "))
    if target := TARGET.fullmatch(name):
        words = f"{'sent' if target[1] == 'bytes' else 'time'} to {target[2]} % on validation"
    return words + (f", times {row}" if row else "")


def label(name: str) -> str:
    """A measure as the head of its column."""
    return named(name) + (", %" if form(name) == "percent" else "")

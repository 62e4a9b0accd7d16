"""The page of one run: what came out, how it got there, where it errs, and how to do it again."""

import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.report import figures
from fedsieve.report.folder import Predictions, RunFolder, StageMasks, read_masks, read_run
from fedsieve.report.html import TILE, figure, flatten, render, save, tile
from fedsieve.report.intervals import wilson
from fedsieve.report.masks import Allocation
from fedsieve.report.rounds import describe_federation
from fedsieve.report.summary import StageSummary

WORST_CONFUSIONS = 12
ALL_BARS = 40  # up to so many classes every one has a bar; beyond, the best and the worst
SOME_BARS = 15


def write_report(folder: Path) -> Path:
    """Writes report.html, and its figures under figures/, into the run folder `folder`; returns the page."""
    run = read_run(folder)
    drawings = _curves(run)
    classes = _classes(run.predictions) if run.predictions else None
    damage: list[str] = []
    found = read_masks(run, damage)
    masks = _masks(run, found, damage)
    federation = describe_federation(run, found)
    others = [federation.drawings if federation else {}, classes["drawings"] if classes else {}]
    mask_drawings = {f"mask-{mask.name}-{part}": svg for mask in masks for part, svg in mask.drawings.items()}
    for name, svg in {**drawings, **mask_drawings, **others[0], **others[1]}.items():
        save(folder / "figures" / f"{name}.svg", svg)
    if run.predictions and len(run.predictions.sample_rows):
        right = (run.predictions.labels == run.predictions.predicted)[run.predictions.sample_rows]
        frames = [figures.GREEN if hit else figures.RED for hit in right]
        save(folder / "figures" / "predictions.png", figures.sheet(run.predictions.sample_images, frames))
    page = render(
        "report.html",
        run=run,
        problems=list(dict.fromkeys([*run.problems, *([run.torn] if run.torn else []), *damage])),
        stages=run.summary.stages if run.summary else {},
        masks=masks,
        dense=StageSummary(),
        summary=run.summary,
        federation=federation,
        last=run.records[-1] if run.records else None,
        planned=sum(stage.length for stage in run.experiment.stages),
        interval=_interval(run),
        watched=_watched(run) if any("test_accuracy" in row for row in run.records) else None,
        curves={name: figure(svg, f"{name} by {run.unit}") for name, svg in drawings.items()},
        classes=classes,
        tiles=tiles(run.predictions) if run.predictions else [],
        environment=flatten(run.environment) if run.environment else {},
        crisp=run.predictions is not None and max(run.predictions.sample_images.shape[2:], default=0) < TILE,
        folder=shlex.quote(run.name),
    )
    return save(folder / "report.html", page)


def _masks(run: RunFolder, found: dict[str, StageMasks], damage: list[str]) -> list[Allocation]:
    """The shared mask of every sparse stage, the chosen round's where it changed; one that is not the run's is told."""
    settings = {stage.name: run.experiment.mask_of(stage) for stage in run.experiment.stages}
    masks = []
    for stage, own in found.items():
        ended = run.summary.stages.get(stage, StageSummary()) if run.summary else StageSummary()
        first = own.begun(ended.best_at or max(own.shared, default=0))
        if not first:
            continue
        mask, file, told = own.shared[first], f"{stage}.round-{first}" if first > 1 else stage, ended.mask_id
        if told and not mask.id.startswith(told):
            damage.append(
                f"masks/{file}.safetensors is not the mask of the run: its id is {mask.id}, the summary's {told}"
            )
        setting = settings.get(stage)
        masks.append(Allocation(stage, mask, max(1, setting.min_active_per_tensor) if setting else 1))
    return masks


def _watched(run: RunFolder) -> str:
    """How often test data was looked at."""
    every = run.experiment.federation.evaluate_every if run.experiment.federation else 1
    return f"every {run.unit}" if every == 1 else f"every {every} {run.unit}s"


def _curves(run: RunFolder) -> dict[str, str]:
    if not run.records:
        return {}
    chosen = [
        row["index"]
        for row in run.records
        if row.get("epoch", row.get("round")) == (run.chosen(str(row.get("stage"))) or math.inf)
    ]
    drawings = {
        "accuracy": figures.curves(run.records, "accuracy", chosen, scale=100, watched=_watched(run)),
        "loss": figures.curves(run.records, "loss", chosen, watched=_watched(run)),
    }
    for field, label in (("lr", "learning rate"), ("seconds", "seconds")):
        if np.isfinite(figures.column(run.records, field)).any():
            drawings[label.replace(" ", "-")] = figures.by_index(run.records, field, label, log=field == "lr")
    return drawings


def _interval(run: RunFolder) -> tuple[float, float] | None:
    """95 % interval of the test accuracy (Wilson): what another test set of this size could well have said."""
    if not run.summary or run.summary.test_accuracy is None or not run.predictions:
        return None
    p = run.summary.test_accuracy
    return wilson(p, len(run.predictions.labels)) if 0 <= p <= 1 else None


def _classes(predictions: Predictions) -> dict[str, Any]:
    """Confusion matrix, worst confusions and accuracy per class, as figures and rows of a table."""
    names = predictions.class_names
    counts = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(counts, (predictions.labels, predictions.predicted), 1)
    totals = counts.sum(1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    wrong = counts * ~np.eye(len(names), dtype=bool)
    order = np.argsort(-wrong, axis=None, kind="stable")[:WORST_CONFUSIONS]
    pairs = [divmod(int(cell), len(names)) for cell in order]
    worst = [(names[i], names[j], int(wrong[i, j]), shares[i, j]) for i, j in pairs if wrong[i, j]]

    present = np.flatnonzero(totals[:, 0])  # a class without test images has no accuracy
    accuracy = 100 * shares.diagonal()
    ranked = present[np.argsort(-accuracy[present], kind="stable")]
    drawings = {"confusion": figures.confusion(shares, names)}

    def bars(rows: np.ndarray) -> str:
        return figures.bars([names[row] for row in rows], accuracy[rows], "accuracy, %", top=100)

    if len(ranked) <= ALL_BARS:
        drawings["classes"] = bars(ranked)
    else:
        drawings["classes-best"] = bars(ranked[:SOME_BARS])
        drawings["classes-worst"] = bars(ranked[-SOME_BARS:])
        drawings["classes-histogram"] = figures.histogram(accuracy[present], "accuracy of a class, %")
    drawings["confidence"] = figures.sureness(predictions.confidence, predictions.labels == predictions.predicted)
    return {
        "drawings": drawings,
        "inline": {name: figure(svg, name.replace("-", " ")) for name, svg in drawings.items()},
        "worst": worst,
        "count": len(names),
        "numbered": len(names) > figures.LABELLED_CLASSES,
    }


def tiles(predictions: Predictions) -> list[dict[str, Any]]:
    names = predictions.class_names
    return [
        {
            "image": tile(image),
            "right": predictions.labels[row] == predictions.predicted[row],
            "label": names[predictions.labels[row]],
            "predicted": names[predictions.predicted[row]],
            "confidence": float(predictions.confidence[row]),
        }
        for row, image in zip(predictions.sample_rows, predictions.sample_images, strict=True)
    ]

"""Reading a run folder. What is damaged becomes a sentence in `problems`, so that a page can still be made."""

import json
import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from fedsieve.config import Experiment, parse_config
from fedsieve.errors import FedsieveError


class Scores(BaseModel):
    """How a stage, or the whole run, ended. Accuracies are fractions; val_* are None where nothing was held out."""

    test_accuracy: float | None = None
    test_loss: float | None = None
    val_accuracy: float | None = None
    val_loss: float | None = None
    seconds: float | None = None
    trained: int | None = None
    parameters: int | None = None


class StageSummary(Scores):
    best_at: int | None = None  # the chosen epoch of the stage, counted from 1
    epochs: int | None = None
    # Of a sparse stage's mask:
    sparsity: float | None = None  # of the maskable weights
    active: int | None = None
    mask_id: str | None = None
    rule: str | None = None
    calibration_seconds: float | None = None


class Summary(Scores):
    device: str | None = None
    images_per_second: float | None = None
    stages: dict[str, StageSummary] = {}


@dataclass(frozen=True)
class Predictions:
    """The test set as the final model saw it: n images, m of them kept as pictures."""

    labels: np.ndarray  # (n,)
    predicted: np.ndarray  # (n,)
    confidence: np.ndarray  # (n,)
    class_names: list[str]
    sample_rows: np.ndarray  # (m,) into the n
    sample_images: np.ndarray  # (m, 3, h, w) uint8


@dataclass(frozen=True)
class RunFolder:
    path: Path
    experiment: Experiment
    config_text: str
    environment: dict[str, Any]
    epochs: list[dict[str, Any]]
    summary: Summary | None
    predictions: Predictions | None
    problems: list[str]

    @property
    def name(self) -> str:
        """What the folder itself is called, also for `.` and `runs/x/..`."""
        return self.path.resolve().name

    @property
    def missing(self) -> str | None:
        """Why there is no result; None where there is one."""
        if self.summary is None:
            damage = [problem for problem in self.problems if problem.startswith("summary.json")]
            return damage[0] if damage else "unfinished: no summary.json yet"
        accuracy = self.summary.test_accuracy
        return None if accuracy is not None and math.isfinite(accuracy) else "no test accuracy in summary.json"

    def chosen(self, stage: str) -> int | None:
        """The epoch of `stage` whose weights were kept, where one was selected on validation data."""
        ended = self.summary.stages.get(stage) if self.summary else None
        return ended.best_at if ended and ended.val_accuracy is not None else None


def read_run(path: Path) -> RunFolder:
    """The run folder at `path`; refused without a readable config.yaml."""
    config = path / "config.yaml"
    try:
        text = config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise FedsieveError(
            f"{path}: not a run folder: no readable config.yaml in it. "
            "`fedsieve run` makes one, with config.yaml, metrics.jsonl and summary.json"
        ) from None
    problems: list[str] = []
    return RunFolder(
        path=path,
        experiment=parse_config(text, where=str(config)),
        config_text=text,
        environment=_read_environment(path / "environment.json", problems),
        epochs=_read_metrics(path / "metrics.jsonl", problems),
        summary=_read_summary(path / "summary.json", problems),
        predictions=_read_predictions(path / "predictions.npz", problems),
        problems=problems,
    )


def _read_text(path: Path, problems: list[str]) -> str | None:
    if not path.exists():
        return None  # not written yet: an unfinished run, no damage
    try:
        return path.read_text(encoding="utf-8", errors="replace")  # damage then shows where the text is parsed
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None


def _read_environment(path: Path, problems: list[str]) -> dict[str, Any]:
    text = _read_text(path, problems)
    try:
        value = json.loads(text) if text is not None else {}
    except ValueError as error:
        problems.append(f"{path.name} is damaged: {error}")
        return {}
    return value if isinstance(value, dict) else {"environment": value}


def _read_metrics(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """One dict per epoch, in order. A torn last line is what a killed run leaves, and is no problem."""
    lines = (_read_text(path, problems) or "").splitlines()
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            rows[int(row.get("index", number))] = row  # the last wins: a resumed run may repeat an epoch
        except (ValueError, TypeError, AttributeError, OverflowError):
            if number < len(lines):
                problems.append(f"{path.name}, line {number} is damaged and left out")
    return [{**rows[index], "index": index} for index in sorted(rows)]


def _read_summary(path: Path, problems: list[str]) -> Summary | None:
    text = _read_text(path, problems)
    if text is None:
        return None
    try:
        summary = Summary.model_validate(json.loads(text))
        if summary.trained is None and summary.stages:
            summary.trained = list(summary.stages.values())[-1].trained
        return summary
    except ValidationError as error:
        first = error.errors()[0]
        problems.append(f"{path.name} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}")
    except ValueError as error:
        problems.append(f"{path.name} is damaged: {error}")
    return None


def _read_predictions(path: Path, problems: list[str]) -> Predictions | None:
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            predictions = Predictions(
                labels=file["labels"].astype(np.int64),
                predicted=file["predicted"].astype(np.int64),
                confidence=file["confidence"].astype(np.float64),
                class_names=[str(name) for name in file["class_names"]],
                sample_rows=file["sample_rows"].astype(np.int64),
                sample_images=file["sample_images"],
            )
        _check(predictions)
        return predictions
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        problems.append(f"{path.name} is damaged: {error}")
        return None


def _check(predictions: Predictions) -> None:
    n, m = len(predictions.labels), len(predictions.sample_rows)
    images = predictions.sample_images
    if not predictions.labels.shape == predictions.predicted.shape == predictions.confidence.shape == (n,) or n == 0:
        raise ValueError("labels, predicted and confidence are not three vectors of one length")
    for values, end in (
        (predictions.labels, len(predictions.class_names)),
        (predictions.predicted, len(predictions.class_names)),
        (predictions.sample_rows, n),
    ):
        if len(values) and not (values.min() >= 0 and values.max() < end):
            raise ValueError(f"a number outside 0 to {end - 1}")
    if m and (images.dtype != np.uint8 or images.ndim != 4 or images.shape[:2] != (m, 3)):
        raise ValueError(f"sample_images are {images.dtype} {images.shape}, not uint8 ({m}, 3, height, width)")

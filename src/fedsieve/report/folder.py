"""Reading a run folder. What is damaged becomes a sentence in `problems`, so that a page can still be made."""

import json
import math
import re
import warnings
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from fedsieve.config import Experiment, parse_config
from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.report.masks import Pairs, pairs
from fedsieve.report.summary import Summary
from fedsieve.train.record import Record
from fedsieve.wire.ledger import lines

# Messages by (stage, round from 1, direction, what, bytes), and how many there were.
Messages = Counter[tuple[str, int, str, str, int]]
CLIENT_MASKS = 40  # more are counted, but not kept
UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


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
class ClientTable:
    """The K clients of a federation: what they hold, and how well the final model serves them."""

    accuracy: np.ndarray  # (K,) fractions; NaN where the test set has none of a client's classes
    sizes: np.ndarray  # (K,) images
    strangers: np.ndarray  # clients that never trained
    client: np.ndarray  # (m,) a client,
    label: np.ndarray  # (m,) a class that it holds,
    examples: np.ndarray  # (m,) and how many images of it

    @property
    def strange(self) -> np.ndarray:
        """Which clients never trained, bool (K,)."""
        return np.isin(np.arange(len(self.sizes)), self.strangers)


@dataclass(frozen=True)
class RunFolder:
    path: Path
    experiment: Experiment
    config_text: str
    environment: dict[str, Any]
    records: list[Record]  # one for every epoch, or round
    summary: Summary | None
    predictions: Predictions | None
    clients: ClientTable | None
    messages: Messages | None
    problems: list[str]

    @property
    def name(self) -> str:
        """What the folder itself is called, also for `.` and `runs/x/..`."""
        return self.path.resolve().name

    @property
    def unit(self) -> str:
        """What a record is one of."""
        federated = self.experiment.federation is not None or any("round" in row for row in self.records)
        return "round" if federated else "epoch"

    @property
    def missing(self) -> str | None:
        """Why there is no result; None where there is one."""
        if self.summary is None:
            return self.unreadable("summary.json") or "unfinished: no summary.json yet"
        tested = self.experiment.test
        accuracy = self.summary.test_accuracy if tested else self.summary.validation
        if accuracy is not None and math.isfinite(accuracy):
            return None
        return f"no {'test' if tested else 'validation'} accuracy in summary.json"

    @cached_property
    def torn(self) -> str | None:
        """What a finished run lost of its records and messages, which many numbers are made of; None where nothing."""
        if self.summary is None:
            return None
        for name, stage in self.summary.stages.items():
            length, there = stage.rounds or stage.epochs or 0, sum(row.get("stage") == name for row in self.records)
            if there < length:
                return f"metrics.jsonl is {self._state('metrics.jsonl')}: {there} of the {length} {self.unit}s of stage {name}"
        if unreadable := self.unreadable("metrics.jsonl", "ledger.csv", "predictions.npz", "clients.npz"):
            return unreadable
        listed = Counter[tuple[str, str]]()
        for (name, _, way, _, size), count in (self.messages or {}).items():
            listed[name, way] += count * size
            listed["", way] += count * size
        for name, told in {"": self.summary, **self.summary.stages}.items():
            for way, total in (("up", told.bytes_up), ("down", told.bytes_down)):
                if total is not None and listed[name, way] != total:
                    sent = f"sent {way}" + (f" in stage {name}" if name else "")
                    return f"ledger.csv is {self._state('ledger.csv')}: {listed[name, way]:,} of the {total:,} bytes {sent}"
        return None

    def unreadable(self, *files: str) -> str | None:
        """The first problem with these files; None where all that are there can be read."""
        return next((problem for problem in self.problems if problem.startswith(files)), None)

    def _state(self, file: str) -> str:
        return "damaged" if (self.path / file).exists() else "missing"

    def chosen(self, stage: str) -> int | None:
        """The epoch or round of `stage` whose weights were kept, where one was selected on validation data."""
        ended = self.summary.stages.get(stage) if self.summary else None
        selected = ended and (ended.val_accuracy is not None or ended.client_val_accuracy is not None)
        return ended.best_at if ended and selected else None

    @cached_property
    def client_pairs(self) -> Pairs | None:
        """How far clients' own masks of the last stage agree; None where fewer than two have one, or some are damaged."""
        damage: list[str] = []
        stage, ledger = self.experiment.stages[-1].name, self.path / "ledger.csv"
        own = read_masks(self, damage).get(stage)
        if own and own.clients and self.messages is not None:
            trained = {
                line.client for line in lines(ledger) if (line.stage, line.what) == (stage, "update") and line.size
            }
            if len(own.sizes) < len(trained):
                damage.append(f"{len(own.sizes)} of {len(trained)} clients' masks are there")
        if damage:
            warnings.warn(f"{self.path}: {damage[0]}: how far clients' masks agree is left out", stacklevel=2)
            return None
        return pairs(list(own.clients.values())) if own and len(own.clients) > 1 else None


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
        records=_read_metrics(path / "metrics.jsonl", problems),
        summary=_read_summary(path / "summary.json", problems),
        predictions=_read_predictions(path / "predictions.npz", problems),
        clients=_read_clients(path / "clients.npz", problems),
        messages=_read_ledger(path / "ledger.csv", problems),
        problems=problems,
    )


@dataclass
class StageMasks:
    """The masks of one stage."""

    shared: dict[int, Mask] = field(default_factory=dict)  # by the round, from 1, in which each came into use
    clients: dict[int, Mask] = field(default_factory=dict)  # clients' own; some of them where there are many
    sizes: list[int] = field(default_factory=list)  # active weights of every client's own mask

    def at(self, number: int) -> Mask | None:
        """The shared mask in use in a round."""
        return self.shared.get(self.begun(number))

    def begun(self, number: int) -> int:
        """The round in which the shared mask that is in use in another came into use; 0 where none is known."""
        return max((first for first in self.shared if first <= number), default=0)


def read_masks(run: RunFolder, damage: list[str]) -> dict[str, StageMasks]:
    """The masks in a run folder by stage, in the order of the stages; a damaged file becomes a sentence in `damage`."""
    names = [stage.name for stage in run.experiment.stages]
    files: dict[str, dict[tuple[str, int], Path]] = {name: {} for name in names}
    for path in sorted((run.path / "masks").glob("*.safetensors")):
        found = re.fullmatch(r"(.+)\.(round|client)-(\d+)", path.stem)
        stage, kind, number = found.groups() if found and found[1] in names else (path.stem, "round", "1")
        files.setdefault(stage, {})[kind, int(number)] = path
    masks: dict[str, StageMasks] = {}
    for stage, own in files.items():
        clients = sorted(number for kind, number in own if kind == "client")
        kept = {clients[place] for place in evenly(len(clients), CLIENT_MASKS)}
        for (kind, number), path in sorted(own.items()):
            try:
                mask = Mask.load(path)
            except FedsieveError as error:
                damage.append(str(error).replace(str(path), f"masks/{path.name}"))
                continue
            into = masks.setdefault(stage, StageMasks())
            if kind == "round":
                into.shared[number] = mask
                continue
            into.sizes.append(mask.count)
            if number in kept:
                into.clients[number] = mask
    return masks


def evenly(count: int, most: int) -> list[int]:
    """All of `count` places, or at most so many of them, evenly spread."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most)).tolist()})


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


def _read_metrics(path: Path, problems: list[str]) -> list[Record]:
    """One record per epoch or round, in order. A torn last line is what a killed run leaves, and is no problem."""
    lines = (_read_text(path, problems) or "").splitlines()
    records: dict[int, Record] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = Record.read(line)
        except ValueError:
            if number < len(lines):
                problems.append(f"{path.name}, line {number} is damaged and left out")
            continue
        record.index = number if record.index is None else record.index
        records[record.index] = record  # the last wins: a resumed run may repeat some
    return [records[index] for index in sorted(records)]


def _read_summary(path: Path, problems: list[str]) -> Summary | None:
    text = _read_text(path, problems)
    if text is None:
        return None
    try:
        summary = Summary.read(json.loads(text))
        if summary.trained is None and summary.stages:
            summary.trained = list(summary.stages.values())[-1].trained
        return summary
    except ValidationError as error:
        first = error.errors()[0]
        problems.append(f"{path.name} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}")
    except ValueError as error:
        problems.append(f"{path.name} is damaged: {error}")
    return None


def _open_arrays(path: Path) -> Any:
    if not zipfile.is_zipfile(path):  # which numpy would take for a pickle, and advise to load unsafely
        raise ValueError("not an npz file")
    return np.load(path, allow_pickle=False)


def _read_predictions(path: Path, problems: list[str]) -> Predictions | None:
    if not path.exists():
        return None
    try:
        with _open_arrays(path) as file:
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
    except UNREADABLE as error:
        problems.append(f"{path.name} is damaged: {error}")
        return None


def _read_clients(path: Path, problems: list[str]) -> ClientTable | None:
    if not path.exists():
        return None
    try:
        with _open_arrays(path) as file:
            clients = ClientTable(
                accuracy=file["accuracy"].astype(np.float64),
                **{name: file[name].astype(np.int64) for name in ("sizes", "strangers", "client", "label", "examples")},
            )
        count = len(clients.sizes)
        if not clients.accuracy.shape == clients.sizes.shape == (count,) or not count:
            raise ValueError("accuracy and sizes are not two vectors of one length")
        if not clients.client.shape == clients.label.shape == clients.examples.shape == (len(clients.client),):
            raise ValueError("client, label and examples are not three vectors of one length")
        for values, end in ((clients.client, count), (clients.strangers, count), (clients.label, math.inf)):
            if len(values) and not (values.min() >= 0 and values.max() < end):
                raise ValueError(f"a number outside 0 to {end - 1}")
        return clients
    except UNREADABLE as error:
        problems.append(f"{path.name} is damaged: {error}")
        return None


def _read_ledger(path: Path, problems: list[str]) -> Messages | None:
    if not path.exists():
        return None
    try:
        return Counter(
            (line.stage, line.round, line.direction, line.what, line.size) for line in lines(path) if line.size
        )
    except (OSError, ValueError) as error:
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

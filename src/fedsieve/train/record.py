"""What one epoch or round leaves: a line of metrics.jsonl."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import TypeAdapter


@dataclass(eq=False, kw_only=True)
class Record(Mapping[str, Any]):
    """The numbers of one epoch or round. What was not measured is None.

    Fields are attributes. As a mapping a record has the measured fields only, for code that takes a field's name from a user.
    """

    index: int | None = None  # among all records of a run, from 1
    stage: str
    epoch: int | None = None  # of the stage, from 1
    round: int | None = None  # of the stage, from 1
    train_loss: float | None = None
    train_accuracy: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    client_val_loss: float | None = None  # on images that clients keep for validation
    client_val_accuracy: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    lr: float | None = None
    seconds: float | None = None
    images_per_second: float | None = None
    # Of a federation:
    cohort: int | None = None
    replies: int | None = None  # updates in the mean
    refused: dict[str, int] | None = None  # clients without one, by reason
    drift: float | None = None  # mean distance of a client's weights from the server's
    drift_by_block: dict[str, float] | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    epsilon: float | None = None  # spent so far
    simulated_seconds: float | None = None  # that the server would have waited for devices
    metrics: dict[str, float] | None = None  # further ones, by names such as val_perplexity
    # Of a head in closed form:
    strength: float | None = None
    temperature: float | None = None

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name) if name in FIELDS else (self.metrics or {}).get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in FIELDS if getattr(self, name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def loss(self) -> float | None:
        """The training loss."""
        return self.train_loss

    def note(self, **measured: Any) -> None:
        """Add what was measured. Names that are no fields are of `metrics`, which hold finite numbers only."""
        for name, value in measured.items():
            if name in FIELDS:
                setattr(self, name, value)
            elif not name.startswith(MEASURED):
                raise AttributeError(f"a record has no field {name}")
            elif math.isfinite(value):
                self.metrics = {**(self.metrics or {}), name: value}

    def starting_with(self, *prefixes: str) -> dict[str, float]:
        """The measured fields whose names start so."""
        every = [*self.items(), *(self.metrics or {}).items()]
        return {name: value for name, value in every if name.startswith(prefixes)}

    def line(self) -> str:
        """The record as a line of metrics.jsonl."""
        return json.dumps(dict(self), allow_nan=False) + "\n"

    @classmethod
    def read(cls, line: str) -> "Record":
        """The record in a line; ValueError where the line is damaged. Fields of other versions are left out."""
        return _ADAPTER.validate_python(json.loads(line))


def merit(measured: Mapping[str, Any], prefix: str) -> float | None:
    """What the best epoch or round is chosen by: accuracy, or the loss, negated, where accuracy is not measured."""
    if (accuracy := measured.get(f"{prefix}_accuracy")) is not None:
        return accuracy
    loss = measured.get(f"{prefix}_loss")
    return None if loss is None else -loss


MEASURED = ("train_", "val_", "client_val_", "test_")
FIELDS = tuple(item.name for item in fields(Record))
_ADAPTER = TypeAdapter(Record)

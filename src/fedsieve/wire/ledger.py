"""The ledger: every message of a run, one line each, as long as it was on the wire."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedsieve.errors import FedsieveError

COLUMNS = "stage,round,client,direction,what,bytes,status"
Direction = Literal["up", "down"]


class Line(NamedTuple):
    """One message: `size` in bytes, `status` "ok" or the reason why it was refused; 0 bytes where none was sent."""

    stage: str
    round: int  # from 1
    client: int
    direction: Direction
    what: str
    size: int
    status: str


class Ledger:
    """An append-only CSV file. Opened at the offset of a checkpoint, it forgets what was written after it."""

    def __init__(self, path: str | Path, offset: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115
        if self._file.tell() < offset:
            raise FedsieveError(f"{self.path}: {offset:,} bytes were written and {self._file.tell():,} are left", 1)
        self._file.truncate(offset)
        self._file.seek(offset)
        if not offset:
            self._file.write(f"{COLUMNS}\n".encode())
        self._file.flush()
        self.total: dict[str, int] = {"up": 0, "down": 0}
        for line in lines(self.path):
            self.total[line.direction] += line.size

    def add(
        self, stage: str, round: int, client: int, direction: Direction, what: str, size: int, status: str = "ok"
    ) -> None:
        """Count a message of `size` bytes; `status` is "ok", or the reason why it was refused."""
        self.total[direction] += size
        self._file.write(f"{stage},{round},{client},{direction},{what},{size},{status}\n".encode())

    @property
    def offset(self) -> int:
        """The length of the file, with all that was added."""
        self._file.flush()
        return self._file.tell()

    def sync(self) -> None:
        """Bring everything to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self._file.close()


def totals(path: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The bytes up and down of each stage, int64 arrays over its rounds from 1; a last line that was cut is left out."""
    sums: dict[str, dict[str, dict[int, int]]] = {}
    for line in lines(path):
        by_round = sums.setdefault(line.stage, {"up": {}, "down": {}})[line.direction]
        by_round[line.round] = by_round.get(line.round, 0) + line.size
    result = {}
    for stage, both in sums.items():
        rounds = range(1, 1 + max(max(by_round, default=0) for by_round in both.values()))
        up, down = (np.array([both[way].get(number, 0) for number in rounds], dtype=np.int64) for way in both)
        result[stage] = (up, down)
    return result


def lines(path: str | Path) -> Iterator[Line]:
    """Every message of a ledger; a last line that was cut is left out."""
    with open(path, encoding="utf-8") as file:
        next(file, None)
        for text in file:
            if not text.endswith("\n"):
                return
            stage, round, client, direction, what, size, status = text.rstrip("\n").split(",", 6)
            way: Direction = "up" if direction == "up" else "down"
            yield Line(stage, int(round), int(client), way, what, int(size), status)

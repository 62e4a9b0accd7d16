"""The ledger: every message of a run, one line each, as long as it was on the wire."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import xxhash

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
    status: str = "ok"


class Ledger:
    """An append-only CSV file. Opened at the offset of a checkpoint, it forgets what was written after it.

    `digest` is what the content up to there gave; a file that was changed since is refused.
    """

    def __init__(self, path: str | Path, offset: int = 0, digest: str | None = None) -> None:
        self.path = Path(path)
        self.total: dict[str, int] = {"up": 0, "down": 0}
        self._digest = xxhash.xxh3_128()
        if offset:
            self._take_over(offset, digest)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115
        self._file.truncate(offset)
        self._file.seek(offset)
        if not offset:
            self._write(f"{COLUMNS}\n")
        self._file.flush()

    def _take_over(self, offset: int, digest: str | None) -> None:
        try:
            with open(self.path, "rb") as file:
                content = file.read(offset)
            if len(content) < offset:
                raise ValueError(f"{offset:,} bytes were written and {len(content):,} are left")
            for line in parse(content.decode(errors="replace").splitlines(keepends=True)):
                self.total[line.direction] += line.size
            self._digest.update(content)
            if digest is not None and self.digest != digest:
                raise ValueError("every line can be read, but some are not what was written")
        except (OSError, ValueError) as error:
            problem = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            raise FedsieveError(
                f"{self.path}: not as this run left it: {problem}. Put the file back, or begin anew: "
                f"`fedsieve run {self.path.parent / 'config.yaml'} --out DIR`",
                1,
            ) from None

    def add(self, line: Line) -> None:
        """Count a message."""
        self.total[line.direction] += line.size
        self._write(",".join(map(str, line)) + "\n")

    def _write(self, text: str) -> None:
        data = text.encode()
        self._file.write(data)
        self._digest.update(data)

    @property
    def digest(self) -> str:
        """Of the content, with all that was added."""
        return self._digest.hexdigest()

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
    """Every message of a ledger; a last line that was cut is left out. ValueError names a line that is none."""
    with open(path, encoding="utf-8", errors="replace") as file:
        yield from parse(file)


def parse(texts: Iterable[str]) -> Iterator[Line]:
    """The messages in the lines of a ledger, of which the first names the columns."""
    for number, text in enumerate(texts, start=1):
        if not text.endswith("\n"):
            return
        if number == 1:
            continue
        try:
            stage, round, client, direction, what, size, status = text.rstrip("\n").split(",", 6)
            if direction not in get_args(Direction):
                raise ValueError
            way: Direction = "up" if direction == "up" else "down"
            yield Line(stage, int(round), int(client), way, what, int(size), status)
        except ValueError:
            raise ValueError(f"line {number} is no message: {text.strip()[:60]!r}") from None

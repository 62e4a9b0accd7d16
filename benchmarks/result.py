"""What a benchmark gives, and how times are taken."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from rich.console import Console

Cell = str | int | float | None


@dataclass
class Result:
    """A table, the sentences that say how to read it and what bounds its numbers, and what could not be measured."""

    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    note: str = ""
    limit: str = ""  # default: the arithmetic and memory traffic of the device, measured after the benchmark
    skipped: list[str] = field(default_factory=list)
    incomplete: str = ""  # why rows are missing


def columns(names: str) -> tuple[str, ...]:
    """The columns of a table, from a line with bars between their names."""
    return tuple(names.split(" | "))


class Incomplete(Exception):
    """What its cause left of a benchmark: the rows that were there before."""

    def __init__(self, result: Result) -> None:
        super().__init__("incomplete")
        self.result = result


@contextmanager
def keeping(result: Result) -> Iterator[None]:
    """Whatever stops a benchmark leaves the rows that are there."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not result.rows:
            raise
        raise Incomplete(result) from error


def say(text: str) -> None:
    """Print what is measured on the way to the table, apart from the table itself."""
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


def shown(cell: Cell) -> str:
    """A cell as people read it: three digits that count, thousands apart."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or abs(cell) >= 100:
        return f"{cell:,.0f}"
    if 0 < abs(cell) < 0.001:
        return f"{cell:.1e}"
    return f"{cell:.3f}" if abs(cell) < 1 else f"{cell:.2f}" if abs(cell) < 10 else f"{cell:.1f}"


class Medians(dict[str, float]):
    """Median seconds of calls that took turns, and how many turns there were."""

    turns = 0


class Stopped(KeyboardInterrupt):
    """Stopped by hand, with the medians of the turns that were over."""

    def __init__(self, medians: Medians) -> None:
        super().__init__()
        self.medians = medians


def alternate(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    repeats: int,
    seconds: float = float("inf"),
    warm: bool = False,
) -> Medians:
    """Median seconds of each call. The calls take turns, so that a disturbance of the machine falls on all of them.

    They are called once before, unless they are `warm`. No turn but the first begins once `seconds` have passed. Stopped by
    hand after a turn, it raises `Stopped`.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    if not warm:
        for call in calls.values():
            call()
    start = time.perf_counter()
    try:
        for number in range(repeats):
            if number and time.perf_counter() - start > seconds:
                break
            for name, call in calls.items():
                times[name].append(timed(call, device))
    except KeyboardInterrupt:
        if not all(times.values()):
            raise
        raise Stopped(_medians(times)) from None
    return _medians(times)


def _medians(times: Mapping[str, Sequence[float]]) -> Medians:
    """Of the turns that all took."""
    turns = min(map(len, times.values()), default=0)
    medians = Medians({name: statistics.median(taken[:turns]) for name, taken in times.items()})
    medians.turns = turns
    return medians


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, until the device is done with it."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

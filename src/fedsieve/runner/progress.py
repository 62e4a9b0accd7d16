"""Progress of a run: bars in a terminal, one line per epoch anywhere else."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from fedsieve.train.loop import Tick


class Display:
    """Progress of one run. Use as a context manager."""

    def __init__(self, console: Console, quiet: bool = False, transient: bool = False) -> None:
        self.console = console
        self.quiet = quiet
        self.transient = transient  # bars go when the run ends
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._newest: dict[str, dict[str, Any]] = {}  # by stage: not every round is evaluated

    @classmethod
    def silent(cls) -> "Display":
        """One that shows nothing, for callers who only want the result."""
        return cls(Console(), quiet=True)

    def __enter__(self) -> "Display":
        if self.console.is_terminal and not self.quiet:
            self._bars = Progress(  # 80 columns hold it all, with a stage's name of a dozen letters
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=10),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
                console=self.console,
                transient=self.transient,
            )
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, text: str) -> None:
        """One line above the bars."""
        if not self.quiet:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, stage: str, tick: Tick) -> None:
        """Move the stage's bar, or start it; after an epoch, show what it gave."""
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, total=tick.steps, note="")
            self._bars.update(self._tasks[stage], completed=tick.step)
            if tick.record:
                newest = self._newest[stage] = {**self._newest.get(stage, {}), **tick.record}
                self._bars.update(self._tasks[stage], note=brief(newest))
        elif tick.record:
            unit = "round" if "round" in tick.record else "epoch"
            note = describe(tick.record)
            self.say(f"{stage} {unit} {tick.record[unit]}: {note}, {tick.record['seconds']:.1f} s")


def brief(record: Mapping[str, Any]) -> str:
    """The numbers of an epoch or a round that fit next to a bar."""
    measured = [name for name in ("val_accuracy", "client_val_accuracy", "test_accuracy") if name in record]
    words = [f"{name.removesuffix('_accuracy')[-3:]} {100 * record[name]:.1f} %" for name in measured[:1]]
    if not words and "train_loss" in record:
        words.append(f"loss {record['train_loss']:.3f}")
    if "drift" in record:
        words.append(f"drift {record['drift']:.2g}")
    if "bytes_up" in record:
        words.append(f"{record['bytes_up'] / 1e6:.3g}/{record['bytes_down'] / 1e6:.3g} MB")
    return ", ".join(words)


def describe(record: Mapping[str, Any]) -> str:
    """An epoch or a round in a few words."""
    words = []
    if "train_loss" in record:
        words += [f"loss {record['train_loss']:.3f}", f"train {100 * record['train_accuracy']:.1f} %"]
    if "val_accuracy" in record:
        words.append(f"val {100 * record['val_accuracy']:.1f} %")
    if "client_val_accuracy" in record:
        words.append(f"clients' val {100 * record['client_val_accuracy']:.1f} %")
    if "test_accuracy" in record:
        words.append(f"test {100 * record['test_accuracy']:.1f} %")
    if "drift" in record:
        words.append(f"drift {record['drift']:.3g}")
    if "epsilon" in record:
        words.append(f"epsilon {record['epsilon']:.2f}")
    if "bytes_up" in record:
        words.append(f"{record['bytes_up'] / 1e6:.2f} MB up, {record['bytes_down'] / 1e6:.2f} down")
    if record.get("refused"):
        words.append(", ".join(f"{count} {reason}" for reason, count in record["refused"].items()))
    return ", ".join(words)

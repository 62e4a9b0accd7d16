"""`fedsieve bench NAME`: finds benchmarks, and shows and writes what they measure. Each is imported when it is asked for."""

import importlib.metadata
import importlib.util
import inspect
import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from benchmarks.options import Setting
from fedsieve.errors import FedsieveError, did_you_mean

if TYPE_CHECKING:
    import torch

    from benchmarks.result import Result

BENCHMARKS = {
    "round": "Images a second of whole federated rounds, against the plain loop, pfl and Flower.",
    "memory": "Peak memory of a round against the clients at once and against sparsity, and how many clients fit.",
    "scale": "What a round costs as clients grow from 100 to a million and the cohort stays, and its memory.",
    "overhead": "A round in which nobody trains, against pfl and Flower; on a GPU, a round beyond its local steps.",
    "start": "Seconds from the command to the end of the first round, phase by phase, with cold and warm caches.",
    "wire": "Bytes of messages against dense, the entropy limit, COO, bitmasks, zstd and top-k, and their speed.",
    "mask": "Seconds of Fisher scores, per sample against per batch, and of calibration.",
    "loop": "The share of the central training loop that is forward, backward and step.",
    "networks": "Which networks of timm, torchvision and transformers stack, how, and how fast.",
    "sparse": "Step time and memory with masks of each granularity, against dense.",
    "optimizer": "The optimizer step at several densities, against torch's fused dense one.",
    "distributed": "Rounds of 1,000 small clients on two processes, against one.",
    "secagg": "Seconds and bytes of secure sums, with dropouts, next to Flower's.",
    "fuzz": "A million damaged and forged messages, each refused or taken rightly.",
    "data": "Seconds to decode 60,000 images, and to load them from the cache.",
}

Device = Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda` or `cuda:N`.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="In miniature: shows that it works; the times mean nothing.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="Also write it as JSON.", show_default=False)
]


class _Benchmarks(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A benchmark with the options that its function declares. A word that is none is answered in one line."""
        if args[0] not in self.commands:
            near = did_you_mean(args[0], self.commands)
            raise FedsieveError(f'bench: "{args[0]}" is no benchmark.{near} `fedsieve bench list` names them')
        if args[0] == "list":
            return super().resolve_command(ctx, args)
        alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        alone.command(args[0], help=BENCHMARKS[args[0]])(_command(args[0]))
        return args[0], typer.main.get_command(alone), args[1:]


app = typer.Typer(
    cls=_Benchmarks,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    help="Measure: one table of ratios taken side by side in one run, with the hardware and its limits next to it.",
)
console = Console()


@app.callback(invoke_without_command=True)
def _alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        names()


@app.command("list")
def names() -> None:
    """The benchmarks."""
    for name, text in BENCHMARKS.items():
        console.print(f"[bold]{name:12}[/]{text}", highlight=False, soft_wrap=True)


for _name, _text in BENCHMARKS.items():
    app.command(_name, help=_text)(lambda: None)  # for --help, which imports none of them


def _command(name: str) -> Callable[..., None]:
    """A benchmark as typer reads it. Module and function have its name; its options are parameters, or fields of its plan."""
    home = "rounds" if name == "round" else name
    module = import_module(f"benchmarks.{home}")
    declared = inspect.signature(getattr(module, "Plan", getattr(module, home))).parameters
    settings = {
        key: extra
        for key, parameter in declared.items()
        for extra in get_args(parameter.annotation)
        if isinstance(extra, Setting)
    }

    def command(device: Device = "auto", smoke: Smoke = False, out: Out = None, **given: Any) -> None:
        def measure(where: "torch.device") -> "Result":
            chosen = {
                key: settings[key].read(f"--{key.replace('_', '-')}", value)
                for key, value in given.items()
                if value is not None
            }
            return getattr(module, home)(where, smoke, **chosen)

        _show(name, device, smoke, out, measure)

    *shared, _ = inspect.signature(command).parameters.values()
    own = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[each.kind, each.info])
        for key, each in settings.items()
    ]
    command.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    return command


# --- results ---------------------------------------------------------------------------------------------------------


def _show(
    name: str,
    device: str,
    smoke: bool,
    out: Path | None,
    measure: Callable[["torch.device"], "Result"],
) -> None:
    """Measure, print the table and write it, with the device's limits unless the benchmark states others."""
    try:
        result, environment, cause = _measure(name, device, smoke, out, measure)
    except KeyboardInterrupt:
        raise FedsieveError(f"bench {name}: stopped. What it measured is not kept", 130) from None
    except FedsieveError as error:  # runs turn signals into advice about their own folders
        if error.exit_code < 128:
            raise
        raise FedsieveError(f"bench {name}: stopped. What it measured is not kept", error.exit_code) from None
    from benchmarks.result import shown
    from fedsieve.files import write_json

    for package in ("pfl", "flwr", "ray"):
        if importlib.util.find_spec(package):
            environment[package] = importlib.metadata.version(package)
    table = Table(title=f"bench {name}{', incomplete' if cause else ''}", title_justify="left")
    for number, column in enumerate(result.columns):
        words = any(isinstance(row[number], str) for row in result.rows)
        table.add_column(column, justify="left" if words else "right")
    for row in result.rows:
        table.add_row(*map(shown, row))
    hardware = (
        f"{environment['device']}, {environment['cpu']} x {environment['cpu_count']}, {environment['threads']} threads"
    )
    named = ("torch", "timm", "pfl", "flwr", "ray", "python", "fedsieve", "commit")
    versions = ", ".join(f"{key} {environment[key]}" for key in named if environment.get(key))
    # Where nobody looks at a window, nothing is folded to fit one.
    wide = console if console.is_terminal else Console(width=180)
    wide.print(table)
    for text in (result.note, f"limits: {result.limit}", f"hardware: {hardware}", f"versions: {versions}"):
        console.print(text, highlight=False, soft_wrap=True)
    for reason in result.skipped:
        console.print(reason, highlight=False, style="yellow", soft_wrap=True)
    if out is not None:
        write_json(out, {"benchmark": name, "smoke": smoke, **vars(result), "environment": environment})
    if cause is not None:
        code = 130 if isinstance(cause, KeyboardInterrupt) else getattr(cause, "exit_code", 1)
        raise FedsieveError(f"bench {name}: incomplete: {result.incomplete}", code) from None


def _measure(
    name: str, device: str, smoke: bool, out: Path | None, measure: Callable[["torch.device"], "Result"]
) -> tuple["Result", dict[str, Any], BaseException | None]:
    """What was measured, where, and what ended it before its end, if anything."""
    from benchmarks.limits import measure_limits
    from benchmarks.result import Incomplete
    from fedsieve.runner.environment import choose_device, describe_environment

    where, cause = choose_device(device), None
    if out is not None:
        _check_out(out, name)
    try:
        result = measure(where)
    except Incomplete as error:
        result, cause = error.result, error.__cause__
        kind = "" if isinstance(cause, FedsieveError) else f"{type(cause).__name__}: "
        result.incomplete = "stopped" if isinstance(cause, KeyboardInterrupt) else f"{kind}{str(cause)[:200]}"
    result.limit = result.limit or measure_limits(where, smoke).sentence()
    return result, describe_environment(where), cause


def _check_out(out: Path, name: str) -> None:
    """Refuse, before anything is measured, a file that could not be written after it."""
    if out.is_dir():
        raise FedsieveError(f"--out: {out} is a folder; name a file, such as {out / name}.json")
    if out.exists() and not out.is_file():
        raise FedsieveError(f"--out: {out} is there and no regular file; name another")
    try:
        parent = Path(os.path.realpath(out)).parent  # a link's target is what is written
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise FedsieveError(
            f"--out: {out} cannot be written: {error.strerror}. Name a file in another folder"
        ) from None

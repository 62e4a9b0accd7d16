"""The command line's root: the app, what its commands share, and how a mistake ends."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

import fedsieve
from fedsieve import launch
from fedsieve.errors import FedsieveError, did_you_mean, with_extra
from fedsieve.plugins import take_plugins

if TYPE_CHECKING:
    pass

# torch and timm take seconds to import: commands import what they need, so that --help and a wrong config answer at once.

app = typer.Typer(
    name="fedsieve",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune pretrained models, sparsely, centrally or across clients. Start with `fedsieve demo`.\n\n"
    "Every command takes `--plugin FILE.py` or `--plugin PACKAGE`: code of yours that adds words with `fedsieve.register`.",
)
console = Console()

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Override any field by its dotted path: `data.size=64`, `stages.head.epochs=3`, `stages.0.train={last_blocks: 2}`.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help="The run folder to make. Default: runs/NAME, numbered if taken.",
        show_default=False,
    ),
]
RunFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A run folder, as `fedsieve run` makes it.", show_default=False)
]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The experiment.", show_default=False)]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would happen (weights, bytes, memory, steps) and stop.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the summary.")]


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        console.print(fedsieve.__version__, highlight=False)
        raise typer.Exit
    if launch.ranks() > 1 and context.invoked_subcommand not in ("run", "resume", "demo"):
        raise FedsieveError(
            f"torchrun started {launch.ranks()} processes, but only run, resume and demo share their work among them. Start "
            f"`fedsieve {context.invoked_subcommand or ''}` without torchrun"
        )


@contextlib.contextmanager
def new_folder(out: Path | None, name: str) -> Iterator[Path]:
    """`out`, or else a new folder `runs/NAME`, numbered if taken. It is deleted again if it stays empty."""
    if out is not None or launch.rank():  # other ranks write nothing
        yield out or Path("runs")
        return
    try:
        Path("runs").mkdir(exist_ok=True)
        folder = _make_numbered(Path("runs") / name)
    except OSError as error:
        raise FedsieveError(f"runs cannot be written: {error.strerror}. Name a folder elsewhere with --out") from None
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


def _make_numbered(first: Path) -> Path:
    """Make a folder. Of several processes that ask for one name at a time, each gets a number of its own."""
    folder, number = first, 1
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
            folder = first.with_name(f"{first.name}-{number}")


def need_flower(command: str, *packages: str) -> None:
    """Refuse a command whose packages are missing, or whose Flower has other requests and files than we know."""
    import importlib.metadata
    import importlib.util

    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise FedsieveError(f"{command}: the package {package} is missing: {with_extra('flower')}")
    found = importlib.metadata.version("flwr")
    if (version := tuple(map(int, found.split(".")[:2]))) != (1, 41):
        age = "old" if version < (1, 41) else "new"
        raise FedsieveError(f"{command}: flwr {found} is too {age}, 1.41 is needed: {with_extra('flower')}")


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


def one_of(key: str, word: str, allowed: tuple[str, ...]) -> Any:
    if word not in allowed:
        raise FedsieveError(
            f'{key}: "{word}" is not allowed.{did_you_mean(word, allowed)} Allowed: {", ".join(allowed)}'
        )
    return word


def main(arguments: list[str] | None = None, call: Callable[..., Any] = app) -> None:
    """Run the command line; a user's mistake ends in a message, without a traceback."""
    try:
        call(args=take_plugins(sys.argv[1:] if arguments is None else arguments))
    except FedsieveError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(f"{error.filename or 'the disk'}: {error.strerror or error}", 1)


def _fail(message: str, code: int) -> NoReturn:
    if launch.speaks():
        Console(stderr=True).print("[bold red]error:[/] ", end="")
        print(message, file=sys.stderr)
    sys.exit(code)

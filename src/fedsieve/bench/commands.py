"""The doors to the benchmarks: `fedsieve bench NAME`. Each imports what it measures only when it is asked for."""

import importlib.metadata
import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from fedsieve.errors import FedsieveError, did_you_mean

if TYPE_CHECKING:
    import torch

    from fedsieve.bench.result import Result


class _Benchmarks(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A word that is no benchmark is answered in one line."""
        if args[0] not in self.commands:
            near = did_you_mean(args[0], self.commands)
            raise FedsieveError(f'bench: "{args[0]}" is no benchmark.{near} `fedsieve bench list` names them')
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Benchmarks,
    rich_markup_mode="markdown",
    help="Measure: one table of ratios taken side by side in one run, with the hardware and its limits next to it.",
)
console = Console()

Device = Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda` or `cuda:N`.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="In miniature: shows that it works; the times mean nothing.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="Also write it as JSON.", show_default=False)
]
Repeats = Annotated[int | None, typer.Option(min=1, help="Turns that medians are taken of.", show_default=False)]


def listed(text: str) -> Any:
    """An option of several values, with commas between them; without it, the benchmark's own."""
    return typer.Option(metavar="A,B,...", help=text, show_default=False)


@app.callback(invoke_without_command=True)
def _alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        names()


@app.command("list")
def names() -> None:
    """The benchmarks."""
    for command in app.registered_commands:
        if command.name != "list" and command.callback is not None:
            text = command.help or command.callback.__doc__ or ""
            console.print(
                f"[bold]{command.name or command.callback.__name__:12}[/]{text}", highlight=False, soft_wrap=True
            )


@app.command("round")
def round_(
    device: Device = "auto",
    smoke: Smoke = False,
    out: Out = None,
    networks: Annotated[str | None, listed("`small` (ViT-S/16), `tiny` (ViT-Ti/16).")] = None,
    pixels: Annotated[str | None, listed("Sizes of the images, such as 64,128,224.")] = None,
    cohorts: Annotated[str | None, listed("Clients in a round, such as 1,10,20,50.")] = None,
    ways: Annotated[str | None, listed("Which of the ways to run a round; a wrong word shows them all.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Images of each client.", show_default=False)] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Local epochs.", show_default=False)] = None,
    repeats: Repeats = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="No further turn of a group of ways begins after these.", show_default=False),
    ] = None,
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="All ways take turns with each other, in less time; they must fit into memory at once. Otherwise peers do, and then each of ours with the fastest plain loop.",
        ),
    ] = False,
) -> None:
    """Images a second of whole federated rounds, against the plain loop, pfl and Flower."""

    def measure(where: "torch.device") -> "Result":
        from fedsieve.bench.rounds import NETWORKS, WAYS, default_plan, rounds

        if seconds is not None and math.isnan(seconds):
            raise FedsieveError("--seconds: nan is not allowed. Allowed: numbers from 0")
        given = {
            "networks": _words("--networks", networks, tuple(NETWORKS)),
            "pixels": _sizes(pixels),
            "cohorts": _numbers("--cohorts", cohorts),
            "ways": _words("--ways", ways, WAYS),
            "images": images,
            "epochs": epochs,
            "repeats": repeats,
            "seconds": seconds,
            "together": together,
        }
        return rounds(where, smoke, replace(default_plan(where, smoke), **_given(given)), _say)

    _show("round", device, smoke, out, measure)


@app.command()
def memory(
    device: Device = "auto",
    smoke: Smoke = False,
    out: Out = None,
    network: Annotated[
        str | None, typer.Option(help="`small` (ViT-S/16) or `tiny` (ViT-Ti/16).", show_default=False)
    ] = None,
    pixels: Annotated[int | None, typer.Option(help="Size of the images.", show_default=False)] = None,
    cohorts: Annotated[str | None, listed("Clients at once, such as 1,10,20.")] = None,
    sparsities: Annotated[str | None, listed("Such as 0,0.5,0.9.")] = None,
    at_most: Annotated[int | None, typer.Option(min=1, help="Where the search for the largest cohort stops.")] = None,
) -> None:
    """Peak memory of a round against the clients at once and against sparsity, and how many clients fit."""

    def measure(where: "torch.device") -> "Result":
        from fedsieve.bench.memory import memory
        from fedsieve.bench.rounds import NETWORKS

        _words("--network", network, tuple(NETWORKS), single=True)
        given = {
            "network": network,
            "pixels": None if pixels is None else _sizes(str(pixels), "multiples of 16")[0],
            "cohorts": _numbers("--cohorts", cohorts),
            "sparsities": _numbers(
                "--sparsities",
                sparsities,
                "numbers from 0 to below 1, as in 0,0.9",
                lambda sparsity: 0 <= sparsity < 1,
                float,
            ),
            "at_most": at_most,
        }
        return memory(where, smoke, say=_say, **_given(given))

    _show("memory", device, smoke, out, measure)


@app.command()
def scale(
    device: Device = "auto",
    smoke: Smoke = False,
    out: Out = None,
    clients: Annotated[str | None, listed("How many clients there are, such as 100,1000000.")] = None,
    cohorts: Annotated[str | None, listed("How many take part in a round.")] = None,
    repeats: Repeats = None,
) -> None:
    """What a round costs as clients grow from 100 to a million and the cohort stays, and its memory."""

    def measure(where: "torch.device") -> "Result":
        from fedsieve.bench.scale import scale

        given = {"clients": _numbers("--clients", clients), "cohorts": _numbers("--cohorts", cohorts)}
        return scale(where, smoke, **_given(given | {"repeats": repeats}))

    _show("scale", device, smoke, out, measure)


@app.command()
def overhead(
    device: Device = "auto",
    smoke: Smoke = False,
    out: Out = None,
    peers: Annotated[str | None, listed("`pfl`, `flower`, `none`.")] = None,
    repeats: Repeats = None,
) -> None:
    """A round in which nobody trains, against pfl and Flower; on a GPU, a round beyond its local steps."""

    def measure(where: "torch.device") -> "Result":
        from fedsieve.bench.overhead import PEERS, overhead

        found = _words("--peers", peers, (*PEERS, "none"))
        if found and "none" in found and len(found) > 1:
            raise FedsieveError(f"--peers: {peers} is not allowed: none stands alone")
        chosen = None if found is None else tuple(word for word in found if word != "none")
        return overhead(where, smoke, **_given({"peers": chosen, "repeats": repeats}))

    _show("overhead", device, smoke, out, measure)


@app.command()
def start(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Fields of the experiment.", show_default=False)
    ] = None,
    device: Device = "auto",
    smoke: Smoke = False,
    out: Out = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG.yaml", help="A federated experiment. Default: on embedded data.", show_default=False
        ),
    ] = None,
    repeats: Repeats = None,
) -> None:
    """Seconds from the command to the end of the first round, phase by phase, with cold and warm caches."""

    def measure(where: "torch.device") -> "Result":
        from fedsieve.bench.start import start

        _refuse(overrides, {"device": "--device"})
        return start(where, smoke, config, overrides or [], **_given({"repeats": repeats}))

    _show("start", device, smoke, out, measure)


@app.command()
def frontier(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Fields of all experiments.", show_default=False),
    ] = None,
    device: Device = "auto",
    smoke: Smoke = False,
    out: Out = None,
    data: Annotated[str | None, typer.Option(metavar="SOURCE", help="CIFAR-100: hub id or folder.")] = None,
    weights: Annotated[str | None, typer.Option(metavar="FILE", help="Pretrained weights of the backbone.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For runs, frontier.csv and frontier.svg. Default: frontier; with --smoke, one that vanishes.",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[str | None, listed("Which methods; a wrong word shows them all.")] = None,
    rates: Annotated[str | None, listed("Learning rates to try, such as 0.03,0.1,0.3.")] = None,
    seeds: Annotated[str | None, listed("Seeds: the first chooses the rate.")] = None,
    target: Annotated[
        float | None,
        typer.Option(min=0, max=100, metavar="PERCENT", help="Validation accuracy that costs are told to."),
    ] = None,
) -> None:
    """Accuracy per byte and per second: dense FedAvg, LoRA, last blocks, client masks, a shared mask with int8."""

    def measure(where: "torch.device") -> "Result":
        from fedsieve.bench.frontier import METHODS, frontier
        from fedsieve.runner.progress import Display

        _refuse(overrides, {"device": "--device", "seed": "--seeds", "stages.tune.optimizer.lr": "--rates"})
        if smoke and rates:
            raise FedsieveError("--smoke has a rate of its own: leave --rates out")
        chosen = [f"data.source={json.dumps(data)}"] if data else []
        if weights:  # a file has no tag
            chosen += [f"model.weights={json.dumps(weights)}", "model.backbone=vit_tiny_patch16_224"]
        given = {
            "methods": _words("--methods", methods, tuple(METHODS)),
            "rates": _numbers(
                "--rates", rates, "numbers above 0, as in 0.03,0.1", lambda rate: 0 < rate < math.inf, float
            ),
            "seeds": _numbers("--seeds", seeds, "whole numbers from 0, as in 0,1", lambda seed: seed >= 0),
            "target": None if target is None else target / 100,
            "display": Display(Console(stderr=True)),
        }
        with tempfile.TemporaryDirectory() as vanishing:
            place = folder or Path(vanishing if smoke else "frontier")
            return frontier(where, smoke, place, [*chosen, *(overrides or [])], **_given(given))

    _show("frontier", device, smoke, out, measure, goes_on=not smoke or folder is not None)


def _plain(name: str, text: str) -> None:
    """A benchmark without settings of its own: the function `name` of the module `name`."""

    @app.command(name, help=text)
    def command(device: Device = "auto", smoke: Smoke = False, out: Out = None) -> None:
        def measure(where: "torch.device") -> "Result":
            return getattr(import_module(f"fedsieve.bench.{name}"), name)(where, smoke)

        _show(name, device, smoke, out, measure)


_plain("wire", "Bytes of messages against dense, the entropy limit, COO, bitmasks, zstd and top-k, and their speed.")
_plain("mask", "Seconds of Fisher scores, per sample against per batch, and of calibration.")
_plain("loop", "The share of the central training loop that is forward, backward and step.")
_plain("sparse", "Step time and memory with masks of each granularity, against dense.")
_plain("optimizer", "The optimizer step at several densities, against torch's fused dense one.")
_plain("distributed", "Rounds of 1,000 small clients on two processes, against one.")
_plain("secagg", "Seconds and bytes of secure sums, with dropouts, beside Flower's.")
_plain("fuzz", "A million damaged and forged messages, each refused or taken rightly.")
_plain("data", "Seconds to decode 60,000 images, and to load them from the cache.")


# --- what they share ------------------------------------------------------------------------------------------------


def _show(
    name: str,
    device: str,
    smoke: bool,
    out: Path | None,
    measure: Callable[["torch.device"], "Result"],
    goes_on: bool = False,
) -> None:
    """Measure, print the table and write it; beside it stand the device's limits, where the benchmark states no others.

    `goes_on`: a benchmark that keeps what it did, and takes it up again when it is repeated.
    """
    kept = "The same command goes on where it was" if goes_on else "What it measured is not kept"
    try:
        result, environment, cause = _measure(name, device, smoke, out, measure)
    except KeyboardInterrupt:
        raise FedsieveError(f"bench {name}: stopped. {kept}", 130) from None
    except FedsieveError as error:  # runs turn signals into advice about their own folders
        if error.exit_code < 128:
            raise
        raise FedsieveError(f"bench {name}: stopped. {kept}", error.exit_code) from None
    from fedsieve.bench.result import shown
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
    from fedsieve.bench.limits import measure_limits
    from fedsieve.bench.result import Incomplete
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


def _say(text: str) -> None:
    """What is measured on the way to the table, beside what the command prints."""
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


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


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _words(flag: str, text: str | None, allowed: tuple[str, ...], single: bool = False) -> Any:
    """The words of a list with commas, or a `single` one; None where it was not given."""
    if text is None:
        return None
    words = (text,) if single else tuple(word.strip() for word in text.split(","))
    for word in words:
        if word not in allowed:
            raise FedsieveError(
                f'{flag}: "{word}" is not allowed.{did_you_mean(word, allowed)} Allowed: {", ".join(allowed)}'
            )
    return words


def _numbers(
    flag: str,
    text: str | None,
    allowed: str = "whole numbers from 1, as in 1,10",
    fits: Callable[[float], bool] = lambda number: number >= 1,
    kind: type[int] | type[float] = int,
) -> Any:
    """The numbers of a list with commas, each once; None where it was not given."""
    if text is None:
        return None
    try:
        numbers = dict.fromkeys(kind(word) for word in text.split(","))
        if not all(map(fits, numbers)):
            raise ValueError
    except ValueError:
        raise FedsieveError(f"{flag}: {text} is not allowed. Allowed: {allowed}") from None
    return tuple(numbers)


def _sizes(pixels: str | None, allowed: str = "multiples of 16, as in 64,224") -> Any:
    """Sizes that the networks' patches of 16 pixels fill."""
    return _numbers("--pixels", pixels, allowed, lambda size: size > 0 and size % 16 == 0)


def _refuse(overrides: Sequence[str] | None, options: Mapping[str, str]) -> None:
    """Refuse fields that the benchmark sets itself, naming the option that sets them."""
    for text in overrides or ():
        key = text.partition("=")[0].strip()
        if key in options:
            raise FedsieveError(f"{text}: the benchmark sets {key} itself. Use {options[key]}")

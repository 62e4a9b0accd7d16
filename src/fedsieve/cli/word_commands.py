"""`fedsieve list` and `fedsieve bench`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

import fedsieve
from fedsieve.cli.root import app, console, one_of
from fedsieve.errors import FedsieveError

if TYPE_CHECKING:
    pass


@app.command(name="list")
def list_(
    what: Annotated[
        str | None, typer.Argument(help="What to list; without it, what can be listed.", show_default=False)
    ] = None,
    pattern: Annotated[
        str | None, typer.Argument(help="For models: a wildcard such as `vit_*dino*`.", show_default=False)
    ] = None,
) -> None:
    """Show the words a config may use: models, datasets, transforms, heads, trackers and so on."""
    from fedsieve.runner.listing import LISTINGS

    if what is None:
        for name, (text, _) in LISTINGS.items():
            console.print(f"[bold]{name:15}[/]{text}", highlight=False, soft_wrap=True)
        return
    _, entries = LISTINGS[one_of("list", what, tuple(LISTINGS))]
    found = list(entries(pattern))
    if not found:
        raise FedsieveError(f"list: no {what} match {pattern}")
    for name, text in found:
        console.print(f"[bold]{escape(name)}[/]  {escape(text)}" if text else name, highlight=False, soft_wrap=True)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def bench(words: Annotated[list[str] | None, typer.Argument(metavar="NAME [OPTIONS]")] = None) -> None:
    """Measure: one table of ratios taken side by side in one run, with the hardware and its limits next to it."""
    checkout = str(Path(fedsieve.__file__).parents[2])
    if not Path(checkout, "benchmarks", "commands.py").exists():
        raise FedsieveError(
            "bench: the benchmarks are not part of the installed package: clone fedsieve's repository, and run `uv run fedsieve bench NAME` in it"
        )
    if checkout not in sys.path:
        sys.path.insert(0, checkout)
    from benchmarks.commands import app as benchmarks

    benchmarks(words or [], prog_name="fedsieve bench")

"""Commands for many runs: sweeps and studies."""

import json
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsieve.cli.root import ConfigFile, Overrides, Quiet, app, console, one_of, percent
from fedsieve.errors import FedsieveError

if TYPE_CHECKING:
    from fedsieve.campaign.sweep_page import Standing


@app.command()
def sweep(
    config: ConfigFile,
    overrides: Overrides = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="KEY=VALUES",
            help="A setting to search, named like an override: `mask.sparsity=0.5,0.9,0.99` takes these values, "
            "`stages.head.optimizer.momentum=0:0.95` draws from a range, `stages.head.optimizer.lr=log:1e-3:1` a range by orders of magnitude, "
            "`log:1e-3:1:4` four points of it. Once for every setting.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="`grid`: every combination; `bayes`: what looks promising so far.")
    ] = "bayes",
    trials: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Trials in all. Default: 30, or the whole grid.", show_default=False),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Stop trials that fall behind the median of those that ended.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="The sweep's folder. Default: runs/NAME-sweep.", show_default=False
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Search settings for the best validation accuracy. The test set stays closed.

    Every trial is a run in `DIR/trials`. Started again with the same words, the sweep goes on where it was; started twice
    at once, the two share the work. It leaves `sweep.html`, `sweep.csv` and `best.yaml`, a config to `fedsieve run`.
    """
    word = one_of("--method", method, ("grid", "bayes"))
    from fedsieve.campaign.axes import Space

    space = Space(config, vary or [], word, overrides or [])  # a typo is answered before torch is imported
    from fedsieve.campaign.sweep import sweep as search

    folder = out or Path("runs") / f"{space.base.name}-sweep"
    result = search(space, folder, trials, prune, None if quiet else console)
    _show_sweep(result, folder)


def _show_sweep(result: "Standing", folder: Path) -> None:
    from fedsieve.campaign.axes import brief

    ended = sorted((t for t in result.trials if t.state == "complete"), key=lambda t: (-(t.accuracy or 0.0), t.number))
    counts = Counter(trial.state for trial in result.trials)
    table = Table(title=", ".join(f"{count} {state}" for state, count in counts.items()), title_justify="left")
    table.add_column("trial", justify="right")
    for name in brief(list(result.trials[0].values)) if result.trials else ():
        table.add_column(name, justify="right")
    for column in ("validation", "seconds"):
        table.add_column(column, justify="right")
    for trial in ended[:10]:
        settings = [value if isinstance(value, str) else json.dumps(value) for value in trial.values.values()]
        table.add_row(str(trial.number), *settings, percent(trial.accuracy), f"{trial.seconds or 0:.1f}")
    console.print(table)
    if result.best is None:
        running = "; others are still running" if counts["running"] else ""
        raise FedsieveError(f"no trial came to an end{running}. {folder / 'sweep.csv'} says why", 1)
    for hint in result.hints:
        console.print(hint, highlight=False, soft_wrap=True)
    console.print(
        f"`fedsieve run {folder / 'best.yaml'}` trains the best settings again and opens the test set",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"page: {result.page}", highlight=False, soft_wrap=True)


@app.command()
def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A study, or `list`.")] = "list",
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="The study folder, new or begun. Default: runs/study-NAME, of a table runs/TABLE.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            "--rows",
            metavar="PATTERN",
            help="Only rows with such names, `table1/*`; may be given again.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds 0 to N-1 of every row. Default: 3.", show_default=False)
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(
            "--table",
            metavar="NAME",
            help="The rows and settings of one of the study's tables; a wrong name shows them.",
            show_default=False,
        ),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="LR,LR...", help="Give every row the best of these rates on validation.", show_default=False
        ),
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Every row in miniature, with one seed: shows that it runs, nothing else.")
    ] = False,
    show_rows: Annotated[bool, typer.Option("--list", help="Print the rows and stop.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only write tables and page of what is in DIR.")] = False,
    limit: Annotated[
        float | None,
        typer.Option(min=1, metavar="SECONDS", help="Stop after so long, also inside a run.", show_default=False),
    ] = None,
    keep_all: Annotated[
        bool, typer.Option("--keep-all", help="Keep checkpoints, and every seed's weights and clients' masks.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run a study's grid of experiments and write its tables, figures and page: reported beside measured.

    The same command goes on where it was stopped. `fedsieve study list` shows the studies.
    """
    from fedsieve.campaign.definition import STUDIES, load_study

    if name == "list":
        for known in STUDIES:
            console.print(f"[bold]{known:16}[/]{escape(load_study(known).spec.title)}", highlight=False, soft_wrap=True)
        return
    if limit is not None and not limit <= threading.TIMEOUT_MAX:  # nan, too
        raise FedsieveError(
            f"--limit: {limit:g} seconds is not allowed. Allowed: from 1 to {threading.TIMEOUT_MAX:.0f}"
        )
    chosen = replace(load_study(name, overrides or [], _rates(rates), smoke, table=table), keep_all=keep_all)
    given = chosen.spec.tables.get(table or "")
    some = chosen.select(rows or (given.rows if given else []))
    if show_rows:
        for row in some:
            told = f" [dim](reported: {escape(', '.join(row.reported))})[/]" if row.reported else ""
            console.print(f"[bold]{escape(row.name)}[/]  {escape(row.label)}{told}", highlight=False, soft_wrap=True)
        return
    from fedsieve.campaign.study import check_folder, run_study, show_study, unsound

    if smoke and (seeds or 1) > 1:
        raise FedsieveError("--smoke runs one seed of every row: leave --seeds out")
    seeds = 1 if smoke else seeds or (given.seeds if given else 3)
    folder = out or Path("runs") / ((table or f"study-{name}") + "-smoke" * smoke)
    if show:
        if rows:
            raise FedsieveError("--show shows all rows that are there: leave --rows out")
        if overrides or rates or smoke or table:
            check_folder(chosen, folder)
        page = show_study(name, folder, seeds)
        if lacking := unsound(folder):
            told = f"{lacking} begun runs have no result: the page, runs.csv and choices.csv in {folder} say why"
            console.print(told, style="yellow", highlight=False, soft_wrap=True)
    else:
        page = run_study(chosen, folder, some, seeds, Console(quiet=True) if quiet else console, limit)
    console.print(f"page: {page}", highlight=False, soft_wrap=True)


def _rates(text: str | None) -> list[float]:
    try:
        rates = [] if text is None else [float(word) for word in text.split(",")]
    except ValueError:
        rates = [-1.0]
    if any(not 0 < rate < float("inf") for rate in rates):
        raise FedsieveError(f"--rates: {text} is not a list of rates such as 0.003,0.01,0.03")
    return rates

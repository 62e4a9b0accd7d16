"""Commands for runs: make, continue, measure, export, explore and show them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsieve import launch
from fedsieve.cli.root import (
    ConfigFile,
    DryRun,
    Out,
    Overrides,
    Quiet,
    RunFolder,
    app,
    console,
    need_flower,
    new_folder,
    one_of,
    percent,
)
from fedsieve.config import load_config, parse_config
from fedsieve.errors import FedsieveError

if TYPE_CHECKING:
    from fedsieve.config import Experiment
    from fedsieve.report.comparison import Comparison


@app.command()
def demo(
    overrides: Overrides = None,
    out: Out = None,
    federated: Annotated[
        bool, typer.Option("--federated", help="Across 20 clients instead of on one machine.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the demo's YAML and stop.")] = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
) -> None:
    """Fine-tune a small pretrained vision transformer on embedded data, with nothing to download.

    The demo is an ordinary experiment: save `fedsieve demo --show` to a file, change it, and `fedsieve run` it.
    """
    from fedsieve.runner.prepare import asset

    name = "demo-federated.yaml" if federated else "demo.yaml"
    if show:
        print(asset(name), end="")
        return
    _run(parse_config(asset(name), overrides or [], where=name), out, dry_run, quiet)


@app.command()
def run(
    config: ConfigFile, overrides: Overrides = None, out: Out = None, dry_run: DryRun = False, quiet: Quiet = False
) -> None:
    """Run an experiment and leave a run folder: config, metrics, checkpoints, figures and a page to read.

    A wrong config ends with exit code 2 before anything is loaded. A run that was stopped goes on with `fedsieve resume`.
    """
    _run(load_config(config, overrides or []), out, dry_run, quiet)


def _run(experiment: "Experiment", out: Path | None, dry_run: bool, quiet: bool) -> None:
    if dry_run:
        if launch.rank():
            return
        from fedsieve.runner.claim import check_free
        from fedsieve.runner.plan import plan

        if out is not None:
            check_free(out)
        table = Table("what", "how much", title=f"{experiment.name}: what would happen", title_justify="left")
        for what, how_much in plan(experiment):
            table.add_row(what, how_much)
        console.print(table)
        return
    from fedsieve.runner.progress import Display
    from fedsieve.runner.run import run as run_experiment

    with new_folder(out, experiment.name) as folder:
        summary = run_experiment(experiment, folder, Display(console, quiet))
    _show_summary(summary, folder)


def _show_summary(summary: dict[str, Any], folder: Path) -> None:
    table = Table(title=f"{summary['name']}, seed {summary['seed']}, {summary['device']}", title_justify="left")
    table.add_column("stage")
    unit = "round" if "rounds" in summary else "epoch"
    for column in ("weights", "active", f"chosen {unit}", "validation", "test", "seconds"):
        table.add_column(column, justify="right")
    for name, stage in summary["stages"].items():
        table.add_row(
            name,
            f"{stage['trained']:,}",
            f"{stage.get('active', stage['trained']):,}",
            f"{stage['best_at']} of {stage['epochs']}",
            percent(stage.get("client_val_accuracy") if stage["val_accuracy"] is None else stage["val_accuracy"]),
            percent(stage["test_accuracy"]),
            f"{stage['seconds']:.1f}",
        )
    console.print(table)
    tested = f"test accuracy {percent(summary['test_accuracy'])} on {summary['test_images']:,} images"
    tested = tested if summary["test_images"] else "the test set stays closed (test: false)"
    console.print(f"{tested}, {summary['seconds']:.0f} s in all", highlight=False)
    if "bytes_up" in summary:
        _show_federation(summary, folder)
    console.print(f"page: {folder / 'report.html'}", highlight=False, soft_wrap=True)


def _show_federation(summary: dict[str, Any], folder: Path) -> None:
    from fedsieve.report.folder import read_run
    from fedsieve.report.html import size
    from fedsieve.report.traffic import of_dense, read_traffic

    share = of_dense(read_traffic(read_run(folder)))
    beside = "" if share is None else f", {percent(share)} of dense fp32 FedAvg"
    up, down = size(summary["bytes_up"]), size(summary["bytes_down"])
    lines = [f"{summary['rounds']:,} rounds, {up} up, {down} down{beside}"]
    facts = []
    if served := summary.get("client_accuracy"):
        facts += [
            f"clients' accuracy {percent(served.get('mean'))}",
            f"worst decile {percent(served.get('worst_decile'))}",
        ]
    if summary["drift"] is not None:
        facts += [f"last drift {summary['drift']:.3g}"]
    lines += [", ".join(facts)] if facts else []
    if personal := summary.get("personal"):
        means = ", ".join(f"{method} {percent(told.get('mean'))}" for method, told in personal.items())
        lines += [f"personal models of {next(iter(personal.values()))['clients']:,} clients: {means}"]
    if summary["refused"]:
        lines += ["refused: " + ", ".join(f"{count} {reason}" for reason, count in summary["refused"].items())]
    console.print("\n".join(lines), highlight=False)


@app.command()
def resume(folder: RunFolder, quiet: Quiet = False) -> None:
    """Continue a run that was stopped or killed; it ends with the same weights and metrics as if it had not been."""
    from fedsieve.runner.progress import Display
    from fedsieve.runner.run import resume as resume_experiment

    _show_summary(resume_experiment(folder, Display(console, quiet)), folder)


@app.command()
def flower(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.yaml", help="The experiment, or a run folder to go on with.", show_default=False
        ),
    ],
    overrides: Overrides = None,
    out: Out = None,
    sites: Annotated[
        int | None, typer.Option(metavar="N", help="As federation.clients=N.", show_default=False, min=1)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For partition kind `sites`: a folder with one folder of images for each site, in the order of their names.",
            show_default=False,
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Sites that work at a time. Default: one for every core.", show_default=False, min=1
        ),
    ] = None,
    deadline: Annotated[
        float, typer.Option(metavar="S", help="Seconds that sites have for an answer.", min=1.0)
    ] = 600.0,
    quiet: Quiet = False,
) -> None:
    """Run an experiment on Flower: clients are sites that are asked over a network and keep their files themselves.

    Server and sites are simulated on this machine. `fedsieve deploy` and `fedsieve node` run the same on many machines:
    docs/flower.md shows it from the first key to the final report.
    """
    need_flower("flower", "flwr", "ray")
    begun = (config / "config.yaml").exists()
    chosen = [*(overrides or []), *([f"federation.clients={sites}"] if sites else [])]
    if begun and (chosen or out):
        raise FedsieveError(f"{config} is a run that has begun: it goes on as it is, without overrides or --out")
    experiment = load_config(config / "config.yaml" if begun else config, chosen)
    from fedsieve.flower.simulation import simulate

    with new_folder(config if begun else out, experiment.name) as folder:
        summary = simulate(experiment, folder, Console(quiet=quiet), data, processes, deadline)
    _show_summary(summary, folder)


@app.command()
def evaluate(
    folder: RunFolder,
    overrides: Overrides = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="SOURCE", help="Other data with the same classes: hub id, folder or digits."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="`test` or `train` (validation included). Default: test; of other data without a test split, all.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="`cpu`, `cuda`, `cuda:N`; default: as in the run.")] = None,
) -> None:
    """Measure a finished run's chosen model, on its own test split or on other data."""
    from fedsieve.runner.testing import evaluate as evaluate_run

    chosen = list(overrides or [])
    chosen += [f"data.source={json.dumps(data)}"] if data else []
    chosen += [f"device={device}"] if device else []
    part = None if split is None else one_of("--split", split, ("test", "train"))
    result = evaluate_run(folder, chosen, part)
    console.print(
        f"{result['source']} ({result['split']}): accuracy {percent(result['accuracy'])}, loss {result['loss']:.4f}, "
        f"{result['images']:,} images",
        highlight=False,
    )


@app.command()
def export(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="A finished run folder, or a patch.", show_default=False)
    ],
    to: Annotated[
        Path,
        typer.Option(
            "--to", metavar="FILE", help="The .safetensors file to write; with --peft, the folder.", show_default=False
        ),
    ],
    backbone_only: Annotated[bool, typer.Option("--backbone-only", help="Leave the head out.")] = False,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Only what changed: a patch on the pretrained weights, and the head.")
    ] = False,
    peft: Annotated[bool, typer.Option("--peft", help="LoRA and the head as a folder that peft loads.")] = False,
    weights: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="For a patch: where its pretrained weights are now.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> None:
    """Write a finished run's model with a model card, and print the Python that uses it.

    The model is a file that timm loads, a patch, or a peft folder. A patch can be laid on its pretrained weights again.
    """
    from fedsieve.runner.export import Form
    from fedsieve.runner.export import export as export_run
    from fedsieve.runner.progress import Display

    choices: dict[Form, bool] = {"backbone": backbone_only, "patch": sparse, "peft": peft}
    chosen: list[Form] = [form for form, wanted in choices.items() if wanted]
    if len(chosen) > 1:
        raise FedsieveError("export: --backbone-only, --sparse and --peft write different files. Choose one")
    said = export_run(source, to, chosen[0] if chosen else "whole", weights, force, Display(console))
    print(said)  # as it is: rich would change brackets and colons


@app.command()
def explore(config: ConfigFile, overrides: Overrides = None, out: Out = None) -> None:
    """Look at an experiment's training data before training: counts, samples, neighbours, spread, outliers."""
    from fedsieve.report.explore import explore as explore_data

    experiment = load_config(config, overrides or [])
    with new_folder(out, f"{experiment.name}-explore") as folder:
        page = explore_data(experiment, folder, lambda text: console.print(text))
    console.print(f"page: {page}", highlight=False, soft_wrap=True)


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="One run folder, or several to compare; a folder of runs, or a sweep, stands for all of them.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="The comparison page. Default: comparison.html.", show_default=False
        ),
    ] = None,
) -> None:
    """Write the page of one run again, or a page that compares several.

    Runs that differ only in their seeds stand together; differences come with 95 % intervals.
    """
    from fedsieve.report.comparison import compare, find_runs, write_comparison
    from fedsieve.report.page import write_report

    if absent := [str(folder) for folder in folders if not folder.exists()]:
        raise FedsieveError(f"report: {', '.join(absent)} is not there")
    runs = find_runs(folders)
    if len(runs) == 1 and out is None:
        page = write_report(runs[0])
    else:
        found = compare(runs)
        _show_comparison(found)
        if not found.groups:
            raise FedsieveError("report: none of these is a run with a result")
        page = write_comparison(found, out or Path("comparison.html"))
    console.print(f"page: {page}", highlight=False, soft_wrap=True)


def _show_comparison(found: "Comparison") -> None:
    table = Table()
    table.add_column("experiment", overflow="fold")  # a name that is cut may be another's
    measured = "test accuracy, %" if found.measure == "test_accuracy" else "validation accuracy, %"
    for column in ("seeds", measured, "to the best, points (95 % interval)"):
        table.add_column(column, justify="right")
    gaps = {row.one.label: row for row in found.behind}
    for group in found.groups:
        mean, spread, row = group.mean(found.measure), group.spread(found.measure), gaps.get(group.label)
        score = "-" if mean is None else f"{100 * mean:.2f}"
        score += "" if spread is None else f" ± {100 * spread:.2f}"
        gap = f"{100 * row.value:+.2f}" if row else ""
        gap += f" ({100 * row.interval[0]:+.2f} to {100 * row.interval[1]:+.2f})" if row and row.interval else ""
        table.add_row(escape(group.label), str(group.size), score, gap)
    console.print(table)
    for folder, reason in found.missing:
        console.print(f"not in the numbers: {folder}: {reason}", highlight=False, markup=False, soft_wrap=True)

"""The command line. Every command is a thin door to a function that a notebook could call as well."""

import contextlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import fedsieve
from fedsieve import launch
from fedsieve.bench.commands import app as bench_app
from fedsieve.config import load_config, parse_config
from fedsieve.errors import FedsieveError, did_you_mean, with_extra

if TYPE_CHECKING:
    from fedsieve.config import Experiment
    from fedsieve.mask.mask import Mask
    from fedsieve.report.comparison import Comparison
    from fedsieve.sweep.search import Result

# torch and timm take seconds to import: commands import what they need, so that --help and a wrong config answer at once.

app = typer.Typer(
    name="fedsieve",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune pretrained models, sparsely, centrally or across clients. Start with `fedsieve demo`.",
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
    """Fine-tune a small pretrained vision transformer on embedded data, in a minute, with nothing to download.

    The demo is an ordinary experiment: save `fedsieve demo --show` to a file, change it, and `fedsieve run` it.
    """
    from fedsieve.runner.setup import asset

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
    from fedsieve.runner.experiment import run as run_experiment
    from fedsieve.runner.progress import Display

    with _folder(out, experiment.name) as folder:
        summary = run_experiment(experiment, folder, Display(console, quiet))
    _show_summary(summary, folder)


@contextlib.contextmanager
def _folder(out: Path | None, name: str) -> Iterator[Path]:
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
            _percent(stage.get("client_val_accuracy") if stage["val_accuracy"] is None else stage["val_accuracy"]),
            _percent(stage["test_accuracy"]),
            f"{stage['seconds']:.1f}",
        )
    console.print(table)
    tested = f"test accuracy {_percent(summary['test_accuracy'])} on {summary['test_images']:,} images"
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
    beside = "" if share is None else f", {_percent(share)} of dense fp32 FedAvg"
    up, down = size(summary["bytes_up"]), size(summary["bytes_down"])
    lines = [f"{summary['rounds']:,} rounds, {up} up, {down} down{beside}"]
    facts = []
    if served := summary.get("client_accuracy"):
        facts += [
            f"clients' accuracy {_percent(served.get('mean'))}",
            f"worst decile {_percent(served.get('worst_decile'))}",
        ]
    if summary["drift"] is not None:
        facts += [f"last drift {summary['drift']:.3g}"]
    lines += [", ".join(facts)] if facts else []
    if personal := summary.get("personal"):
        means = ", ".join(f"{method} {_percent(told.get('mean'))}" for method, told in personal.items())
        lines += [f"personal models of {next(iter(personal.values()))['clients']:,} clients: {means}"]
    if summary["refused"]:
        lines += ["refused: " + ", ".join(f"{count} {reason}" for reason, count in summary["refused"].items())]
    console.print("\n".join(lines), highlight=False)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


@app.command()
def resume(folder: RunFolder, quiet: Quiet = False) -> None:
    """Continue a run that was stopped or killed; it ends with the same weights and metrics as if it had not been."""
    from fedsieve.runner.experiment import resume as resume_experiment
    from fedsieve.runner.progress import Display

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
    to_app: Annotated[
        Path | None,
        typer.Option("--app", metavar="DIR", help="Write the app that `flwr run` takes, and stop.", show_default=False),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run an experiment on Flower: clients are sites that are asked over a network and keep their files themselves.

    Without more, server and sites are simulated on this machine. With `--app`, the same is written as an app for a SuperLink
    and SuperNodes on many machines: docs/flower.md shows it from the first key to the final report.
    """
    import importlib.metadata
    import importlib.util

    for package in ("flwr", "ray"):
        if importlib.util.find_spec(package) is None and (package == "flwr" or to_app is None):
            raise FedsieveError(f"flower: the package {package} is missing: {with_extra('flower')}")
    if tuple(map(int, (found := importlib.metadata.version("flwr")).split(".")[:2])) < (1, 41):
        raise FedsieveError(f"flower: flwr {found} is too old, 1.41 is needed: {with_extra('flower')}")
    begun = (config / "config.yaml").exists()
    chosen = [*(overrides or []), *([f"federation.clients={sites}"] if sites else [])]
    if begun and (chosen or out):
        raise FedsieveError(f"{config} is a run that has begun: it goes on as it is, without overrides or --out")
    experiment = load_config(config / "config.yaml" if begun else config, chosen)
    if to_app is not None:
        from fedsieve.flower.project import write_app

        file = write_app(experiment, to_app, str((out or Path("runs") / experiment.name).absolute()), deadline)
        console.print(f"app: {file}\n`flwr run {to_app} SUPERLINK` runs it", highlight=False, soft_wrap=True)
        return
    from fedsieve.flower.simulation import simulate

    with _folder(config if begun else out, experiment.name) as folder:
        summary = simulate(experiment, folder, Console(quiet=quiet), data, processes, deadline)
    _show_summary(summary, folder)


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
    word = _one_of("--method", method, ("grid", "bayes"))
    from fedsieve.sweep.space import Space

    space = Space(config, vary or [], word, overrides or [])  # a typo is answered before torch is imported
    from fedsieve.sweep.search import sweep as search

    folder = out or Path("runs") / f"{space.base.name}-sweep"
    result = search(space, folder, trials, prune, None if quiet else console)
    _show_sweep(result, folder)


def _show_sweep(result: "Result", folder: Path) -> None:
    from fedsieve.sweep.space import brief

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
        table.add_row(str(trial.number), *settings, _percent(trial.accuracy), f"{trial.seconds or 0:.1f}")
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
    from fedsieve.runner.finished import evaluate as evaluate_run

    chosen = list(overrides or [])
    chosen += [f"data.source={json.dumps(data)}"] if data else []
    chosen += [f"device={device}"] if device else []
    part = None if split is None else _one_of("--split", split, ("test", "train"))
    result = evaluate_run(folder, chosen, part)
    console.print(
        f"{result['source']} ({result['split']}): accuracy {_percent(result['accuracy'])}, loss {result['loss']:.4f}, "
        f"{result['images']:,} images",
        highlight=False,
    )


@app.command()
def export(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="A finished run folder, or a patch.", show_default=False)
    ],
    to: Annotated[
        Path, typer.Option("--to", metavar="FILE", help="The .safetensors file to write.", show_default=False)
    ],
    backbone_only: Annotated[bool, typer.Option("--backbone-only", help="Leave the head out.")] = False,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Only what changed: a patch on the pretrained weights, and the head.")
    ] = False,
    weights: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="For a patch: where its pretrained weights are now.", show_default=False),
    ] = None,
) -> None:
    """Write a finished run's model as a safetensors file that timm loads, or as a patch; or lay a patch on its base."""
    from fedsieve.runner.finished import export as export_run
    from fedsieve.runner.progress import Display

    said = export_run(source, to, backbone_only, sparse, weights, Display(console))
    console.print(said, highlight=False, soft_wrap=True)


@app.command()
def explore(config: ConfigFile, overrides: Overrides = None, out: Out = None) -> None:
    """Look at an experiment's training data before training: counts, samples, neighbours, spread, outliers."""
    from fedsieve.runner.finished import explore as explore_data

    experiment = load_config(config, overrides or [])
    with _folder(out, f"{experiment.name}-explore") as folder:
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


mask_app = typer.Typer(
    no_args_is_help=True, help="Look at masks: which weights of a model may train.", rich_markup_mode="markdown"
)
app.add_typer(mask_app, name="mask")
app.add_typer(bench_app, name="bench")
Page = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="Also write a page with pictures.", show_default=False),
]


@mask_app.command("show")
def mask_show(
    file: Annotated[Path, typer.Argument(metavar="MASK", help="A mask file, such as RUN/masks/STAGE.safetensors.")],
    out: Page = None,
) -> None:
    """Where a mask's active weights are, block by block."""
    from fedsieve.report.masks import mask_rows, write_mask_page

    mask = _load_mask(file)
    table = Table(title=f"{file.stem}, id {mask.id}", title_justify="left")
    table.add_column("block")
    for column in ("tensors", "weights", "active", "share", "emptied", "frozen"):
        table.add_column(column, justify="right")
    for row in mask_rows(mask):
        values = (row.tensors, row.weights, row.active)
        table.add_row(row.block, *(f"{v:,}" for v in values), _percent(row.share), str(row.emptied), str(row.frozen))
    console.print(table)
    console.print(f"{mask.count:,} of {mask.space.size:,} weights active ({_percent(mask.density)})", highlight=False)
    if out is not None:
        console.print(f"page: {write_mask_page({file.stem: mask}, out)}", highlight=False, soft_wrap=True)


@mask_app.command("diff")
def mask_diff(
    files: Annotated[list[Path], typer.Argument(metavar="MASK MASK...", help="Two masks, or more for a page.")],
    out: Page = None,
) -> None:
    """What masks share: block by block for two, with the overlap that chance would give; pictures for any number."""
    from fedsieve.mask.overlap import jaccard
    from fedsieve.report.masks import diff_rows, write_mask_page

    if len(files) < 2 or (len(files) > 2 and out is None):
        raise FedsieveError("mask diff: name two masks, or more together with --out FILE for a page")
    masks = {str(file): _load_mask(file) for file in files}
    if len(files) == 2:
        one, two = masks.values() if len(masks) == 2 else 2 * list(masks.values())
        try:
            one.check(two.space)
        except FedsieveError as error:
            raise FedsieveError(f"{files[0]} and {files[1]} cannot be compared: {error}") from None
        table = Table(title=f"{files[0]} against {files[1]}", title_justify="left")
        table.add_column("block")
        for column in ("in both", "only the first", "only the second", "Jaccard", "by chance"):
            table.add_column(column, justify="right")
        for row in diff_rows(one, two):
            shares = ("-" if value != value else f"{value:.3f}" for value in (row.jaccard, row.chance))
            table.add_row(row.block, f"{row.both:,}", f"{row.only_a:,}", f"{row.only_b:,}", *shares)
        console.print(table)
        same = "equal masks" if one == two else f"Jaccard {jaccard(one, two):.3f} over all weights"
        console.print(same, highlight=False)
    if out is not None:
        console.print(f"page: {write_mask_page(masks, out)}", highlight=False, soft_wrap=True)


def _load_mask(file: Path) -> "Mask":
    from fedsieve.mask.mask import Mask

    if file.is_dir():
        inside = sorted([*file.glob("masks/*.safetensors"), *file.glob("*.safetensors")])
        found = f"Masks in it: {', '.join(map(str, inside))}" if inside else "No mask is in it"
        raise FedsieveError(f"{file}: a folder, not a mask file. {found}")
    return Mask.load(file)


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
            help="The study folder, new or begun. Default: runs/study-NAME.",
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
    from fedsieve.study.definition import STUDIES, load_study

    if name == "list":
        for known in STUDIES:
            console.print(f"[bold]{known:16}[/]{escape(load_study(known).spec.title)}", highlight=False, soft_wrap=True)
        return
    if limit is not None and not limit <= threading.TIMEOUT_MAX:  # nan, too
        raise FedsieveError(
            f"--limit: {limit:g} seconds is not allowed. Allowed: from 1 to {threading.TIMEOUT_MAX:.0f}"
        )
    chosen = load_study(name, overrides or [], _rates(rates), smoke)
    some = chosen.select(rows or [])
    if show_rows:
        for row in some:
            told = f" [dim](reported: {escape(', '.join(row.reported))})[/]" if row.reported else ""
            console.print(f"[bold]{escape(row.name)}[/]  {escape(row.label)}{told}", highlight=False, soft_wrap=True)
        return
    from fedsieve.study.grid import check_folder, run_study, show_study, unsound

    if smoke and (seeds or 1) > 1:
        raise FedsieveError("--smoke runs one seed of every row: leave --seeds out")
    seeds = 1 if smoke else seeds or 3
    folder = out or Path("runs") / (f"study-{name}-smoke" if smoke else f"study-{name}")
    if show:
        if rows:
            raise FedsieveError("--show shows all rows that are there: leave --rows out")
        if overrides or rates or smoke:
            check_folder(chosen, folder)
        page = show_study(name, folder, seeds)
        if lacking := unsound(folder):
            told = f"{lacking} begun runs have no result: the page, runs.csv and choices.csv in {folder} say why"
            console.print(told, style="yellow", highlight=False, soft_wrap=True)
    else:
        page = run_study(chosen, folder, some, seeds, console, quiet, keep_all, limit)
    console.print(f"page: {page}", highlight=False, soft_wrap=True)


def _rates(text: str | None) -> list[float]:
    try:
        rates = [] if text is None else [float(word) for word in text.split(",")]
    except ValueError:
        rates = [-1.0]
    if any(not 0 < rate < float("inf") for rate in rates):
        raise FedsieveError(f"--rates: {text} is not a list of rates such as 0.003,0.01,0.03")
    return rates


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
    _, entries = LISTINGS[_one_of("list", what, tuple(LISTINGS))]
    found = list(entries(pattern))
    if not found:
        raise FedsieveError(f"list: no {what} match {pattern}")
    for name, text in found:
        console.print(f"[bold]{escape(name)}[/]  {escape(text)}" if text else name, highlight=False, soft_wrap=True)


def _one_of(key: str, word: str, allowed: tuple[str, ...]) -> Any:
    if word not in allowed:
        raise FedsieveError(
            f'{key}: "{word}" is not allowed.{did_you_mean(word, allowed)} Allowed: {", ".join(allowed)}'
        )
    return word


def main(arguments: list[str] | None = None, call: Callable[..., Any] = app) -> None:
    """Run the command line; a user's mistake ends in a message, without a traceback."""
    try:
        call(args=arguments)
    except FedsieveError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(f"{error.filename or 'the disk'}: {error.strerror or error}", 1)


def _fail(message: str, code: int) -> NoReturn:
    if launch.speaks():
        Console(stderr=True).print("[bold red]error:[/] ", end="")
        print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

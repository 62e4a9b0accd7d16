"""Runs one experiment into one run folder, so that it can be killed at any moment and continued exactly."""

import contextlib
import errno
import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedsieve import launch
from fedsieve.config import Experiment, Stage, to_yaml
from fedsieve.errors import FedsieveError, Stopped
from fedsieve.federation.registry import Transport
from fedsieve.federation.state import ServerState
from fedsieve.federation.team import LostRank, Team
from fedsieve.files import write_atomic, write_json
from fedsieve.model.weights import FINAL, digest
from fedsieve.report.summary import FILE, Summary
from fedsieve.runner.checkpoint import list_checkpoints
from fedsieve.runner.claim import check_free, claimed, held
from fedsieve.runner.environment import choose_device, describe_environment, device_name
from fedsieve.runner.federated import CLIENTS, make_context, saved_context, sum_up, write_clients
from fedsieve.runner.journal import Journal, restore_finished
from fedsieve.runner.meeting import check_place, meet_nodes
from fedsieve.runner.model_files import read_experiment, save_model
from fedsieve.runner.preflight import check_hub, preflight
from fedsieve.runner.prepare import config_digest, prepare
from fedsieve.runner.progress import Display
from fedsieve.runner.ranks import check_launch, check_ranks, help_out, leading, share
from fedsieve.runner.run_cache import RunCache
from fedsieve.runner.setup import Setup
from fedsieve.runner.stages import StageRun, Venue, Watch, begin_stage, count_weights
from fedsieve.runner.testing import test_clients, test_stages, watcher, write_predictions
from fedsieve.runner.tracking import make_trackers
from fedsieve.train.feed import Feed

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
ENVIRONMENT = "environment.json"


def run(
    experiment: Experiment,
    folder: str | Path,
    display: Display | None = None,
    page: bool = True,
    cache: RunCache | None = None,
    transport: Transport | None = None,
) -> dict[str, Any]:
    """Run an experiment in a new folder and return its summary (also in summary.json).

    Without `page`, report.html is not drawn, which takes some seconds: `fedsieve report FOLDER` can do it later. Runs of
    one process can pass on what they loaded in `cache`. With a `transport`, clients are nodes elsewhere. Under torchrun,
    ranks other than 0 help rank 0, and their process ends here when it does.
    """
    folder, display = Path(folder), display or Display.silent()
    check_launch(experiment)
    if launch.rank():
        help_out(experiment)
    check_free(folder)
    preflight(experiment, cache)
    check_hub(experiment)
    make_trackers(experiment.tracking)  # report a missing package now, not after the data was read
    with claimed(folder):
        try:
            write_atomic(folder / "config.yaml", to_yaml(experiment))
        except OSError as error:
            raise FedsieveError(f"--out: {folder} cannot be written: {error.strerror}") from None
        return _execute(experiment, folder, display, page, cache, transport)


def resume(
    folder: str | Path,
    display: Display | None = None,
    page: bool = True,
    cache: RunCache | None = None,
    transport: Transport | None = None,
) -> dict[str, Any]:
    """Continue a run from its newest intact checkpoint. A finished run is only shown again."""
    folder, display = Path(folder), display or Display.silent()
    experiment = read_experiment(folder)
    if (summary := _read_json(folder / FILE)) and "stages" in summary:
        if launch.rank():
            raise SystemExit
        display.say(f"{folder}: this run is finished")
        restore_finished(folder, summary["stages"], display.say)
        if page:
            _write_page(folder)
        return summary
    check_launch(experiment, resumed=True)
    if launch.rank():
        help_out(experiment)
    if experiment.executor == "distributed" and launch.ranks() == 1:
        display.say("executor: distributed, but this process is alone: it trains all clients itself")
    threads = _read_json(folder / ENVIRONMENT).get("threads")
    if isinstance(threads, int) and threads > 0:
        torch.set_num_threads(threads)  # sums are split by thread, so the same weights need the same number
    preflight(experiment, cache)
    with held(folder):
        return _execute(experiment, folder, display, page, cache, transport)


def _read_json(file: Path) -> dict[str, Any]:
    """The mapping in a file; empty where the file is missing or damaged, since all that is read here can be made again."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_page(folder: Path) -> None:
    from fedsieve.report.page import write_report  # figures take seconds to import: not before the first round

    write_report(folder)


# --- the process -----------------------------------------------------------------------------------------------------


class Signals:
    """Requests to stop. While training is `under_way`, the first one waits for the end of the step."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.under_way = False

    def note(self, number: int, _: Any) -> None:
        """Handle a signal."""
        again, self.received = self.received is not None, number
        if again or not self.under_way:
            raise KeyboardInterrupt


@contextlib.contextmanager
def stop_signals() -> Iterator[Signals]:
    """Listen for Ctrl-C and SIGTERM, in the main thread, where Python delivers them."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, signals.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _execute(
    experiment: Experiment,
    folder: Path,
    display: Display,
    page: bool,
    cache: RunCache | None,
    transport: Transport | None,
) -> dict[str, Any]:
    check_place(experiment, folder, transport)
    with leading(experiment) as team, stop_signals() as signals, display:
        try:
            runner = Runner(experiment, folder, display, cache or RunCache(keep=False), team, transport)
            summary = runner.run(signals)
            if page:
                _write_page(folder)
            return summary.content()
        except KeyboardInterrupt:
            raise Stopped(
                f"stopped. {_intact(folder)}`{launch.command()} resume {folder}` goes on",
                signals.received or signal.SIGINT,
            ) from None
        except LostRank as error:
            raise FedsieveError(f"{error}. {_intact(folder)}`{launch.command()} resume {folder}` goes on", 1) from None
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise FedsieveError(
                f"{error.filename or folder}: the disk is full ({error.strerror}). {_intact(folder)}Make room, then "
                f"`{launch.command()} resume {folder}`",
                1,
            ) from None


def _intact(folder: Path) -> str:
    checkpoints = list_checkpoints(folder / "checkpoints")
    return f"The last checkpoint, {checkpoints[-1]}, is intact. " if checkpoints else ""


# --- the run ---------------------------------------------------------------------------------------------------------


class Runner:
    """Takes one run from its start, or its newest checkpoint, to its summary."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        display: Display,
        cache: RunCache,
        team: Team | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.experiment, self.folder, self.display = experiment, folder, display
        self.elsewhere = transport is not None
        if experiment.threads is not None:
            torch.set_num_threads(experiment.threads)
        self._note_environment()
        self.journal = Journal(folder, experiment, display.say)
        setup = prepare(experiment, display, cache)
        self.initial = {name: tensor.cpu().clone() for name, tensor in setup.model.state_dict().items()}
        marks = {
            "config.yaml": config_digest(experiment),
            "model.weights": digest(setup.model),
            "data.source": setup.data_fingerprint,
        }
        self.journal.restore(marks, setup.device)
        for stage, theta in zip(experiment.stages, self.journal.state.chosen, strict=False):
            setup.space(stage).write(setup.model, theta)
        self.setup, self.venue = self._locate(setup, marks, team, transport)
        self.context = self.venue.context

    def _note_environment(self) -> None:
        device, file = choose_device(self.experiment.device), self.folder / ENVIRONMENT
        check_ranks(self.experiment, device, _read_json(file).get("ranks"))
        if not file.exists():
            write_json(file, describe_environment(device) | {"ranks": launch.ranks()})
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def _locate(
        self, setup: Setup, marks: dict[str, str], team: Team | None, transport: Transport | None
    ) -> tuple[Setup, Venue]:
        """Find out where the clients are, if there are any, and have ranks and nodes prepare."""
        if self.experiment.federation is None:
            return setup, Venue(self.folder)
        saved = self.journal.state.federation
        context = make_context(setup, self.initial, self.folder, marks["config.yaml"], saved, team)
        registry = None
        if team:
            share(team, replace(setup, train=context.train), marks)
        if transport is not None:
            registry, context = meet_nodes(context, setup, marks["model.weights"], self.folder, transport)
        if not (self.folder / CLIENTS).exists():
            write_clients(context.population, None, self.folder / CLIENTS)
        return replace(setup, train=context.train), Venue(self.folder, context, registry)

    def run(self, signals: Signals) -> Summary:
        """Train every stage that is not over, test them all, and write the summary."""
        with self.journal.open(make_trackers(self.experiment.tracking)):
            try:
                test = self.setup.test_feed() if self.experiment.test_curve else None
                for stage in self.experiment.stages[len(self.journal.state.finished) :]:
                    self.train(stage, watcher(self.setup, stage, test), signals)
                summary = self.test()
                self.journal.finish(summary)
                return summary
            finally:
                if self.context is not None:
                    self.context.ledger.close()

    # --- training ----------------------------------------------------------------------------------------------------

    def train(self, stage: Stage, watch: Watch, signals: Signals) -> None:
        """Train one stage, from its start or from the state in the journal."""
        state = self.journal.state
        run = begin_stage(self.setup, self.venue, stage, state.stage, watch)
        state.stage = run.state
        signals.under_way = True
        for tick in run.ticks():
            state.ticks += 1
            if tick.record:
                self.journal.write(tick.record)
            self.display.step(stage.name, tick)
            if not run.state.done:
                self._maybe_save(stage, signals)
        signals.under_way = False
        run.close()
        bits = run.state.best_mask if isinstance(run.state, ServerState) else None
        state.chosen.append(run.space.read(self.setup.model))
        state.masks.append(torch.empty(0, dtype=torch.uint8) if bits is None else bits)
        state.finished[stage.name] = run.summary()
        state.stage = None
        self._warn(stage, run)
        self.save()

    def _maybe_save(self, stage: Stage, signals: Signals) -> None:
        """Save when it is time, or when the process was asked to stop; then stop."""
        asked = signals.received
        # Nodes elsewhere cannot repeat what they have done.
        if asked is not None or self.elsewhere or self.journal.due:
            self.save()
        if asked is not None:
            raise Stopped(
                f'stopped in stage "{stage.name}"; nothing is lost. `{launch.command()} resume {self.folder}` goes on '
                "from here",
                asked,
            )

    def save(self) -> None:
        """Write a checkpoint, with what a federation has to add to it."""
        state, context = self.journal.state, self.context
        if context is not None:
            state.federation = saved_context(context, state.ticks, state.federation)
        self.journal.save()
        if context is not None:
            context.memory.prune(state.federation["memories"])

    def _warn(self, stage: Stage, run: StageRun) -> None:
        """Point out what someone who only looks at the end would miss: a stage that did harm, or did nothing."""
        now, *before = (finished.val_accuracy for finished in reversed(self.journal.state.finished.values()))
        if before and now is not None and before[0] is not None and now < before[0]:
            self.display.say(
                f"{stage.name}: the model became worse, {100 * before[0]:.1f} % on validation before and {100 * now:.1f} % at best "
                "since. A lower rate (optimizer.lr, federation.server.lr) may help"
            )
        if isinstance(run.state, ServerState) and stage.method != "ridge" and not run.state.taken:
            self.display.say(f"{stage.name}: no round had enough replies, so the weights never moved")

    # --- the end -----------------------------------------------------------------------------------------------------

    def test(self) -> Summary:
        """Open the test set, unless it stays closed, measure every stage's chosen weights on it, and sum up the run."""
        setup, experiment, state = self.setup, self.experiment, self.journal.state
        test = setup.test_feed() if experiment.test and experiment.data.source != "none" else None
        setup.model.load_state_dict(self.initial)
        stages, logits = test_stages(setup, state, test)
        correct = None
        if test is not None:
            if isinstance(test, Feed):
                write_predictions(setup, logits, test, self.folder / "predictions.npz")
            if setup.recipe.accuracy and test.labels.dim() == 1:
                correct = (logits.argmax(1) == test.labels).cpu().numpy()
        save_model(self.folder / FINAL, setup)
        last = stages[experiment.stages[-1].name]
        described: dict[str, Any] = {"train_images": len(setup.train), "test_images": 0 if test is None else len(test)}
        if self.context is not None:
            described |= sum_up(self.context, stages)
            if experiment.test and (correct is not None or experiment.own_images):
                clients, tested = test_clients(setup, self.venue, state.masks[-1], correct, test)
                described |= clients
                if test is None:  # only nodes have images to test on
                    described["test_images"] = tested.images
                    last.test_accuracy, last.test_loss = tested.metrics["test_accuracy"], tested.metrics["test_loss"]
        return Summary(
            name=experiment.name,
            seed=experiment.seed,
            test_accuracy=last.test_accuracy,
            test_loss=last.test_loss,
            val_accuracy=last.val_accuracy,
            val_loss=last.val_loss,
            best_at=last.best_at,
            trained=last.trained,
            seconds=self.journal.seconds,
            device=device_name(setup.device),
            peak_memory=torch.cuda.max_memory_allocated(setup.device) if setup.device.type == "cuda" else None,
            val_images=len(setup.validation),
            classes=len(setup.class_names),
            parameters=count_weights(setup.model),
            stages=stages,
            **described,
        )

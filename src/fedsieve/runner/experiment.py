"""Running one experiment into one run folder, so that it can be killed at any moment and continued exactly."""

import contextlib
import errno
import io
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fedsieve import launch
from fedsieve.config import Experiment, Stage, load_config, to_yaml
from fedsieve.data.partitions import client_accuracies
from fedsieve.data.store import to_rows
from fedsieve.errors import FedsieveError
from fedsieve.federation.personal import PersonalModels, chosen_clients
from fedsieve.federation.sites import Transport
from fedsieve.federation.state import Context, ServerState
from fedsieve.federation.team import LostRank, Team
from fedsieve.files import write_atomic, write_json
from fedsieve.mask.mask import Mask
from fedsieve.model.build import Classifier, build_classifier
from fedsieve.model.space import ParamSpace
from fedsieve.model.weights import FINAL, digest
from fedsieve.randomness import generator
from fedsieve.runner.checkpoint import list_checkpoints, load_newest, save_checkpoint
from fedsieve.runner.claim import check_free, claimed, held
from fedsieve.runner.environment import choose_device, describe_environment, device_name
from fedsieve.runner.federated import (
    CLIENTS,
    client_summary,
    describe_privacy,
    describe_rounds,
    fit_ridge,
    fit_rounds,
    make_context,
    personal_summary,
    write_clients,
)
from fedsieve.runner.progress import Display
from fedsieve.runner.ranks import check_launch, check_ranks, help_out, leading, share
from fedsieve.runner.remote import Tested, check_place, meet_sites, test_at_sites
from fedsieve.runner.setup import Setup, check_hub, config_digest, featured, fit_stage, preflight, prepare
from fedsieve.runner.shared import Shared
from fedsieve.runner.tracking import Tracker, make_trackers
from fedsieve.train.feed import Feed
from fedsieve.train.loop import StageState, Tick, measure, predict
from fedsieve.train.sieve import make_mask, reached_sparsity
from fedsieve.wire.ledger import totals

SAMPLES = 48  # test images kept for the page
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def run(
    experiment: Experiment,
    folder: str | Path,
    display: Display | None = None,
    page: bool = True,
    shared: Shared | None = None,
    transport: Transport | None = None,
) -> dict[str, Any]:
    """Run an experiment into a new folder and return its summary (also in summary.json).

    Without `page`, no report.html is drawn, which takes some seconds: `fedsieve report FOLDER` can do it later. Runs of one
    process may hand what they loaded from one to the next in `shared`. With a `transport`, clients are sites elsewhere. Under
    torchrun, ranks other than 0 help rank 0, and end here when it ends.
    """
    folder, display = Path(folder), display or Display.silent()
    check_launch(experiment)
    if launch.rank():
        help_out(experiment)
    check_free(folder)
    preflight(experiment, shared)
    check_hub(experiment)
    make_trackers(experiment.tracking)  # a missing package is told now, not after the data was read
    with claimed(folder):
        try:
            write_atomic(folder / "config.yaml", to_yaml(experiment))
        except OSError as error:
            raise FedsieveError(f"--out: {folder} cannot be written: {error.strerror}") from None
        return _execute(experiment, folder, display, page, shared, transport)


def resume(
    folder: str | Path,
    display: Display | None = None,
    page: bool = True,
    shared: Shared | None = None,
    transport: Transport | None = None,
) -> dict[str, Any]:
    """Continue a run where its newest intact checkpoint left it; a finished run is only shown again."""
    folder, display = Path(folder), display or Display.silent()
    experiment = read_experiment(folder)
    if (summary := _read_json(folder / "summary.json")) and "stages" in summary:
        if launch.rank():
            raise SystemExit
        display.say(f"{folder}: this run is finished")
        if page:
            _write_page(folder)
        return summary
    check_launch(experiment, resumed=True)
    if launch.rank():
        help_out(experiment)
    if experiment.executor == "distributed" and launch.ranks() == 1:
        display.say("executor: distributed, but this process is alone: it trains all clients itself")
    threads = _read_json(folder / "environment.json").get("threads")
    if isinstance(threads, int) and threads > 0:
        torch.set_num_threads(threads)  # sums are split by thread, so the same weights need the same number
    with held(folder):
        return _execute(experiment, folder, display, page, shared, transport)


def _write_page(folder: Path) -> None:
    from fedsieve.report.page import write_report  # figures take seconds to import: not before the first round

    write_report(folder)


def _read_json(file: Path) -> dict[str, Any]:
    """The mapping in a file; empty where it is missing or damaged, since all that is read so can be made again."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_experiment(folder: Path) -> Experiment:
    """The experiment of a run folder."""
    if not (folder / "config.yaml").exists():
        raise FedsieveError(f"{folder}: not a run folder (it has no config.yaml). `fedsieve run` makes one")
    return load_config(folder / "config.yaml")


def _execute(
    experiment: Experiment,
    folder: Path,
    display: Display,
    page: bool,
    shared: Shared | None,
    transport: Transport | None,
) -> dict[str, Any]:
    check_place(experiment, folder, transport)
    with leading(experiment) as team, _stop_signals() as signals, display:
        try:
            summary = _Run(experiment, folder, display, signals, shared or Shared(keep=False), team, transport).go()
            if page:
                _write_page(folder)
            return summary
        except KeyboardInterrupt:
            raise FedsieveError(
                f"stopped. {_intact(folder)}`{launch.command()} resume {folder}` goes on",
                128 + (signals.received or signal.SIGINT),
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


def restore_metrics(file: Path, lines: list[str], say: Callable[[str], None]) -> None:
    """Bring a metrics file back to the lines that a checkpoint knows; what was written after them is written again.

    A damaged file costs nothing: the checkpoint has a copy of it.
    """
    content = "".join(lines).encode()
    try:
        there = file.read_bytes()
    except FileNotFoundError:
        there = b""
    if there == content:
        return
    if not there.startswith(content):
        say(f"{file} was changed or cut. It is restored from the checkpoint")
    write_atomic(file, content)


class _Run:
    """One process's work on one run folder. What a checkpoint holds is set in `__init__`, all in one place."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        display: Display,
        signals: "_Signals",
        shared: Shared,
        team: Team | None,
        transport: Transport | None,
    ) -> None:
        self.experiment, self.folder, self.display, self.signals = experiment, folder, display, signals
        self.shared, self.team, self.transport = shared, team, transport
        self.ticks = 0  # steps of all stages so far: the number of the next checkpoint
        self.lines: list[str] = []  # of metrics.jsonl
        self.seconds = 0.0  # up to the last checkpoint
        self.finished: list[dict[str, Any]] = []  # a summary of every stage that is over,
        self.chosen: list[Tensor] = []  # its chosen weights,
        self.masks: list[Tensor] = []  # and, of a federation, the bits of the mask they were trained with, if any
        self.state: StageState | ServerState | None = None  # of the stage under way,
        self.calibration_seconds, self.mask_id = 0.0, ""  # and of its mask
        self.ledger_bytes, self.ledger_digest = 0, ""  # the ledger's length and digest,
        self.memories: list[dict[str, int]] = []  # and what clients remembered, at the last checkpoints
        self.given: dict[str, Any] = {}  # under differential privacy, what was given out
        self.context: Context | None = None  # of a federation

    def go(self) -> dict[str, Any]:
        self.clock = time.perf_counter()
        if self.experiment.threads is not None:
            torch.set_num_threads(self.experiment.threads)
        device, environment = choose_device(self.experiment.device), self.folder / "environment.json"
        check_ranks(self.experiment, device, _read_json(environment).get("ranks"))
        if not environment.exists():
            write_json(environment, describe_environment(device) | {"ranks": launch.ranks()})
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        saved = load_newest(self.folder / "checkpoints", self.display.say)
        self.setup = prepare(self.experiment, self.display, self.shared)
        self.initial = {name: tensor.cpu().clone() for name, tensor in self.setup.model.state_dict().items()}
        self.marks = {
            "config.yaml": config_digest(self.experiment),
            "model.weights": digest(self.setup.model),
            "data.source": self.setup.data_fingerprint,
        }
        if saved:
            self._restore(*saved)
        if self.experiment.federation is not None:
            self.context = make_context(
                self.experiment,
                self.setup,
                self.initial,
                self.folder,
                self.display.say,
                self.ledger_bytes,
                self.ledger_digest,
                self.memories[-1] if self.memories else None,
                self.marks["config.yaml"],
                self.given,
                self.team,
            )
            if self.team:
                share(self.team, self.setup, self.marks)
            if self.transport is not None:
                weights = self.marks["model.weights"]
                self.context.sites = meet_sites(self.context, self.setup, weights, self.folder, self.transport)
            if not (self.folder / CLIENTS).exists():
                write_clients(self.context.population, None, self.folder / CLIENTS)
        restore_metrics(self.folder / "metrics.jsonl", self.lines, self.display.say)
        with (self.folder / "metrics.jsonl").open("ab") as self.metrics:
            history = [json.loads(line) for line in self.lines]
            trackers = make_trackers(self.experiment.tracking)
            for tracker in trackers:
                tracker.start(self.folder, self.experiment, history)
            summary = None
            try:
                self._train(trackers)
                summary = self._finish()
            finally:
                for tracker in trackers:
                    tracker.finish(summary)
        return summary

    def _train(self, trackers: list[Tracker]) -> None:
        """Every stage that is not over yet."""
        test = self.setup.test_feed() if self.experiment.test_curve else None
        for stage in self.experiment.stages[len(self.finished) :]:
            watch = dict if test is None else self._tester(stage, test)
            mask = None
            space: ParamSpace
            ticks: Iterator[Tick]
            if stage.method == "ridge":
                space, self.state, ticks = fit_ridge(self.setup, self.context, stage, watch)
            elif self.context:
                assert not isinstance(self.state, StageState)
                space, self.state, ticks = fit_rounds(self.setup, self.context, stage, self.state, watch, self.folder)
            else:
                assert not isinstance(self.state, ServerState)
                mask = self._mask(stage)
                space, self.state, ticks = fit_stage(self.setup, stage, self.state, watch, mask)
            self.signals.under_way = True
            for tick in ticks:
                self.ticks += 1
                if tick.record:
                    record = {"index": len(self.lines) + 1} | tick.record
                    self.lines.append(json.dumps(record, allow_nan=False) + "\n")
                    self.metrics.write(self.lines[-1].encode())
                    self.metrics.flush()
                    for tracker in trackers:
                        tracker.log(record)
                self.display.step(stage.name, tick)
                if not self.state.done:
                    self._maybe_save(stage)
            self.signals.under_way = False
            self.setup.release()
            self.chosen.append(space.read(self.setup.model))
            bits = self.state.best_mask if isinstance(self.state, ServerState) else None
            self.masks.append(torch.empty(0, dtype=torch.uint8) if bits is None else bits)
            self.finished.append(
                {
                    "name": stage.name,
                    "val_accuracy": self.state.chosen.get("val_accuracy"),
                    "val_loss": self.state.chosen.get("val_loss"),
                    "best_at": self.state.best_at,
                    "epochs": self.state.length,
                    "seconds": self.state.seconds,
                    "trained": space.size,
                }
                | ({} if mask is None else self._describe(mask, stage))
                | self._describe_federation(stage)
            )
            self._warn(stage)
            self.state, self.mask_id = None, ""
            self._save()

    def _warn(self, stage: Stage) -> None:
        """Say what someone who looks at the end alone would miss: a stage that did harm, and one that did nothing."""
        now, *before = (finished["val_accuracy"] for finished in reversed(self.finished))
        if before and now is not None and before[0] is not None and now < before[0]:
            self.display.say(
                f"{stage.name}: the model became worse, {100 * before[0]:.1f} % on validation before and {100 * now:.1f} % at best "
                "since. A lower rate (optimizer.lr, federation.server.lr) may help"
            )
        if isinstance(self.state, ServerState) and stage.method != "ridge" and not self.state.taken:
            self.display.say(f"{stage.name}: no round had enough replies, so the weights never moved")

    def _mask(self, stage: Stage) -> Mask | None:
        """The mask of a sparse stage: calibrated on the weights the stage starts from, and kept in the run folder."""
        sieve = self.experiment.mask_of(stage)
        if sieve is None:
            return None
        space, file = self.setup.space(stage), self.folder / "masks" / f"{stage.name}.safetensors"
        if file.exists():
            try:
                mask = Mask.load(file, space)
                if mask.id != (self.mask_id or mask.id):
                    raise FedsieveError(f"{file}: not the mask that this stage began with")
                self.mask_id = mask.id
                return mask
            except FedsieveError as error:
                self.display.say(f"{error}; calibrating again")

        def said(number: int, mask: Mask) -> None:
            rounds = f"calibration round {number + 1} of {sieve.calibration_rounds}"
            self.display.say(f"{stage.name}: {rounds}, {mask.count:,} of {space.size:,} weights active")

        setup, began = self.setup, time.perf_counter()
        mask = make_mask(sieve, setup.model, space, setup.train, self.experiment.seed, stage.name, setup.autocast, said)
        self.calibration_seconds = time.perf_counter() - began
        file.parent.mkdir(exist_ok=True)
        mask.save(file)
        self.mask_id = mask.id
        return mask

    def _describe(self, mask: Mask, stage: Stage) -> dict[str, Any]:
        """What the summary says of a mask."""
        sieve = self.experiment.mask_of(stage)
        assert sieve is not None
        return {
            "rule": sieve.rule,
            "sparsity": sieve.sparsity,
            "reached_sparsity": reached_sparsity(mask, sieve, self.setup.model),
            "active": mask.count,
            "active_share": mask.count / sum(parameter.numel() for parameter in self.setup.model.parameters()),
            "mask_id": mask.id,
            "calibration_seconds": self.calibration_seconds,
        }

    def _describe_federation(self, stage: Stage) -> dict[str, Any]:
        """What the summary says of a federated stage: rounds, mask, drift, refusals, bytes."""
        if self.context is None or not isinstance(self.state, ServerState):
            return {}
        self.context.ledger.sync()
        sums = {"bytes_up": 0, "bytes_down": 0}  # where nobody could be reached
        if found := totals(self.context.ledger.path).get(stage.name):
            sums = {"bytes_up": int(found[0].sum()), "bytes_down": int(found[1].sum())}
        return describe_rounds(self.state, stage, self.experiment, self.setup) | sums

    def _maybe_save(self, stage: Stage) -> None:
        """Save when it is time, or when the process was asked to stop; then stop."""
        signal_number = self.signals.received
        # What sites have done cannot be had again by doing it again.
        due = self.transport or time.perf_counter() - self.clock >= self.experiment.checkpoint.every_seconds
        if signal_number is not None or due:
            self._save()
        if signal_number is not None:
            raise FedsieveError(
                f'stopped in stage "{stage.name}"; nothing is lost. `{launch.command()} resume {self.folder}` goes on '
                "from here",
                128 + signal_number,
            )

    def _save(self) -> None:
        os.fsync(self.metrics.fileno())  # the checkpoint has these lines too
        now = time.perf_counter()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        if self.context:
            self.context.ledger.sync()
            self.ledger_bytes, self.ledger_digest = self.context.ledger.offset, self.context.ledger.digest
            versions = self.context.store.write(self.ticks)
            self.memories = [*self.memories, versions][-self.experiment.checkpoint.keep :]
            self.given = self.context.account.numbers() if self.context.account else {}
        numbers = {
            "given": self.given,
            "ledger_bytes": self.ledger_bytes,
            "ledger_digest": self.ledger_digest,
            "memories": self.memories,
            "ticks": self.ticks,
            "lines": self.lines,
            "seconds": self.seconds,
            "calibration_seconds": self.calibration_seconds,
            "mask_id": self.mask_id,
            "finished": self.finished,
            "marks": self.marks,
            "state": self.state.numbers() if self.state else None,
        }
        tensors = {f"chosen.{number}": tensor for number, tensor in enumerate(self.chosen)}
        tensors |= {f"mask.{number}": bits for number, bits in enumerate(self.masks)}
        if self.state:
            tensors |= {f"state.{name}": tensor for name, tensor in self.state.tensors().items()}
        save_checkpoint(self.folder / "checkpoints", self.ticks, numbers, tensors, self.experiment.checkpoint.keep)
        if self.context:
            self.context.store.prune(self.memories)

    def _restore(self, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take over a checkpoint."""
        if "lines" not in numbers:
            raise FedsieveError(
                f"{self.folder}: this run was started by an older version of fedsieve. Resume it with that version, or "
                "start a new run"
            )
        for key, mark in self.marks.items():
            if numbers["marks"].get(key) != mark:
                raise FedsieveError(
                    f"{self.folder}: {key} is not what this run began with: its content has changed. Put the original "
                    "back, or start a new run"
                )
        self.ticks, self.lines, self.seconds = numbers["ticks"], numbers["lines"], numbers["seconds"]
        self.finished, self.calibration_seconds = numbers["finished"], numbers["calibration_seconds"]
        self.mask_id, self.given = numbers["mask_id"], numbers["given"]
        self.ledger_bytes, self.ledger_digest = numbers["ledger_bytes"], numbers["ledger_digest"]
        self.memories = numbers["memories"]
        device = self.setup.device
        self.chosen = [tensors[f"chosen.{number}"].to(device) for number in range(len(self.finished))]
        self.masks = [tensors[f"mask.{number}"] for number in range(len(self.finished))]
        for stage, theta in zip(self.experiment.stages, self.chosen, strict=False):
            self.setup.space(stage).write(self.setup.model, theta)
        if numbers["state"]:
            parts = {key.removeprefix("state."): tensor for key, tensor in tensors.items() if key.startswith("state.")}
            kind = StageState if self.experiment.federation is None else ServerState
            self.state = kind.restore(numbers["state"], parts, device)
        unit = "epoch" if self.experiment.federation is None else "round"
        where = f"{unit} {self.state.length + 1} of stage" if self.state else "the end of stage"
        name = self.experiment.stages[len(self.finished) - (self.state is None)].name
        self.display.say(f"resuming at {where} {name}, step {self.ticks:,}")

    def _tester(self, stage: Stage, test: Feed) -> Callable[[], dict[str, float]]:
        predicted = self._predictor(stage, test)
        return lambda: measure(predicted(), test.labels, "test")

    def _predictor(self, stage: Stage, test: Feed) -> Callable[[], Tensor]:
        """Gives the logits of the model as it is then; where only a head trains, of features that are computed once."""
        setup = self.setup
        forward: nn.Module = setup.model
        if stage.train == "head":
            forward, [test] = setup.model.head, featured(setup, "test", test)
        return lambda: predict(forward, test, setup.autocast)

    def _finish(self) -> dict[str, Any]:
        """Open the test set, unless it stays closed, measure every stage's chosen weights on it, and write it down."""
        setup = self.setup
        test = setup.test_feed() if self.experiment.test and self.experiment.data.source != "none" else None
        setup.model.load_state_dict(self.initial)
        stages = {}
        for stage, theta, finished in zip(self.experiment.stages, self.chosen, self.finished, strict=True):
            setup.space(stage).write(setup.model, theta)
            rest = {key: value for key, value in finished.items() if key != "name"}
            found = {"test_loss": math.nan, "test_accuracy": math.nan}
            if test is not None:
                logits = self._predictor(stage, test)()
                found = measure(logits, test.labels, "test")
            # A model that diverged in its very last step has a loss no JSON reader takes.
            stages[stage.name] = {key: value if math.isfinite(value) else None for key, value in found.items()} | rest
        if test is not None:
            self._write_predictions(logits, test)
        save_model(self.folder / FINAL, setup)
        last = stages[self.experiment.stages[-1].name]
        images, clients = 0 if test is None else len(test), dict[str, Any]()
        if self.context and self.experiment.test:
            correct = None if test is None else (logits.argmax(1) == test.labels).cpu().numpy()
            clients, found, seen = self._test_clients(self.context, correct, test)
            if test is None:  # nobody but sites has images to test on
                images = seen
                last |= found
        summary = {
            "name": self.experiment.name,
            "seed": self.experiment.seed,
            **{key: last[key] for key in ("test_accuracy", "test_loss", "val_accuracy", "val_loss", "best_at")},
            "seconds": self.seconds + time.perf_counter() - self.clock,
            "device": device_name(setup.device),
            "peak_memory": torch.cuda.max_memory_allocated(setup.device) if setup.device.type == "cuda" else None,
            "train_images": int(self.context.population.shards.sizes.sum()) if self.context else len(setup.train),
            "val_images": len(setup.validation),
            "test_images": images,
            "classes": len(setup.class_names),
            "parameters": sum(parameter.numel() for parameter in setup.model.parameters()),
            **self._summarise_federation(stages),
            **clients,
            "stages": stages,
        }
        write_json(self.folder / "summary.json", summary)
        return summary

    def _summarise_federation(self, stages: dict[str, Any]) -> dict[str, Any]:
        """The whole run in a federation's terms: the newest mask and drift, all stages' rounds and bytes."""
        if self.context is None:
            return {}

        def newest(key: str) -> Any:  # a head in closed form has neither mask nor drift
            return next((stage[key] for stage in reversed(stages.values()) if stage.get(key) is not None), None)

        refused: dict[str, int] = {}
        for stage in stages.values():
            for reason, count in stage["refused"].items():
                refused[reason] = refused.get(reason, 0) + count
        return {
            "rounds": sum(stage["rounds"] for stage in stages.values()),
            "bytes_up": self.context.ledger.total["up"],
            "bytes_down": self.context.ledger.total["down"],
            "sparsity": newest("sparsity"),
            "mask_id": newest("mask_id"),
            "drift": newest("drift"),
            "refused": refused,
            "privacy": describe_privacy(self.context),
        }

    def _test_clients(
        self, context: Context, correct: np.ndarray | None, test: Feed | None
    ) -> tuple[dict[str, Any], dict[str, float], int]:
        """How the final model, and personal ones, serve clients; what sites found on images of their own, and on how many.

        `correct` (T,) is what the model got right of `test`.
        """
        people, own, final = context.population, self.experiment.own_images, self.experiment.stages[-1]
        personal, sieve = people.settings.personal, self.experiment.mask_of(final)
        shared = sieve is not None and sieve.scope != "client"
        mask = Mask(self.setup.space(final), self.masks[-1].numpy()) if personal and shared else None
        chosen = chosen_clients(people, personal.clients) if personal else np.arange(0)
        tested, models = Tested(), dict[str, np.ndarray]()
        if context.sites and (own or personal):
            tested = test_at_sites(context, final, mask, chosen)
            accuracy, models = tested.accuracy, tested.personal
        if not own:
            assert correct is not None and test is not None
            accuracy = client_accuracies(correct, test.labels.cpu().numpy(), people.counts, len(people))
        if personal and not models:
            assert test is not None
            made = PersonalModels(context, chosen, mask, test)
            models = {method: made.accuracies(method) for method in personal.methods}
        described = {"client_accuracy": client_summary(people, accuracy, self.folder / CLIENTS)}
        if personal:
            described["personal"] = personal_summary(
                people, chosen, {"global": accuracy[chosen], **models}, self.folder
            )
        return described, tested.found, tested.images

    def _write_predictions(self, logits: Tensor, test: Feed) -> None:
        """Answers to the whole test set, and some of its pictures, for the page."""
        confidence, predicted = logits.softmax(1).max(1)
        sample = generator(self.experiment.seed, "samples").permutation(len(test))[:SAMPLES]
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            labels=test.labels.cpu().numpy(),
            predicted=predicted.cpu().numpy(),
            confidence=confidence.cpu().numpy().astype(np.float16),
            class_names=np.array(self.setup.class_names),
            sample_rows=sample,
            sample_images=test.store.batch(to_rows(test.rows[sample])).cpu().numpy(),
        )
        write_atomic(self.folder / "predictions.npz", buffer.getvalue())


# --- finished models -------------------------------------------------------------------------------------------------


def save_model(file: Path, setup: Setup) -> None:
    """All weights in one file that knows its classes and how its inputs were normalised."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in setup.model.state_dict().items()}
    metadata = {
        "class_names": json.dumps(setup.class_names),
        "mean": json.dumps(setup.transform.mean),
        "std": json.dumps(setup.transform.std),
    }
    write_atomic(file, safetensors.torch.save(tensors, metadata))


def load_model(folder: Path) -> tuple[Experiment, Classifier, dict[str, Any]]:
    """The experiment, the chosen model and its metadata (class_names, mean, std) of a finished run folder."""
    experiment = read_experiment(folder)
    file = folder / FINAL
    if not file.exists():
        raise FedsieveError(
            f"{folder}: this run is not finished, so it has no chosen model. `fedsieve resume {folder}`"
        )
    try:
        with safetensors.safe_open(file, "pt") as content:
            metadata = {key: json.loads(value) for key, value in content.metadata().items()}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        bare = experiment.model.model_copy(update={"weights": "none"})
        model = build_classifier(bare, len(metadata["class_names"]), experiment.data.size, experiment.seed)
        model.load_state_dict(tensors)
    except (safetensors.SafetensorError, KeyError, RuntimeError, json.JSONDecodeError, AttributeError) as error:
        raise FedsieveError(f"{file}: damaged: {str(error).splitlines()[0][:200]}", 1) from None
    return experiment, model, metadata


# --- the process -----------------------------------------------------------------------------------------------------


class _Signals:
    """Requests to stop. While training is `under_way` the first waits for the step to end; otherwise it stops at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.under_way = False

    def note(self, number: int, _: Any) -> None:
        again, self.received = self.received is not None, number
        if again or not self.under_way:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Signals]:
    """Listen for Ctrl-C and SIGTERM, in the main thread, where Python delivers them."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, signals.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The stages of a run behind one protocol: central training, rounds across clients, a head in closed form."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from fedsieve.config import Stage
from fedsieve.errors import FedsieveError
from fedsieve.federation.calibrate import sieve_at
from fedsieve.federation.clients import Clients
from fedsieve.federation.executors import Task
from fedsieve.federation.local import LocalClients, local_channel, local_clients
from fedsieve.federation.maskbook import MaskBook
from fedsieve.federation.registry import Registry
from fedsieve.federation.remote import RemoteClients
from fedsieve.federation.ridge import Members, OnePlace, Solver, install
from fedsieve.federation.server import Rounds
from fedsieve.federation.state import ServerContext, ServerState
from fedsieve.mask.mask import Mask
from fedsieve.model.build import OnFeatures, dense_names
from fedsieve.model.space import ParamSpace
from fedsieve.report.summary import StageSummary
from fedsieve.runner.setup import Setup, feature_feeds
from fedsieve.train.feed import Examples
from fedsieve.train.loop import CentralTask, StageState, Tick, measure, predict, train_stage
from fedsieve.train.record import Record
from fedsieve.train.savings import spare_frozen
from fedsieve.train.sieve import Scoring, reached_sparsity
from fedsieve.wire.ledger import totals

Watch = Callable[[], dict[str, float]]  # measures what nothing is selected on


class StageRun(Protocol):
    """One stage, from its start or from a saved state. At the end of `ticks` the model has the chosen weights."""

    @property
    def space(self) -> ParamSpace: ...

    @property
    def state(self) -> StageState | ServerState: ...

    def ticks(self) -> Iterator[Tick]:
        """Train until the stage is over. After each tick the state can be saved."""

    def summary(self) -> StageSummary:
        """How the stage ended."""

    def close(self) -> None:
        """Leave the model as the next stage expects it."""


@dataclass(frozen=True)
class Venue:
    """The place of a stage: the run folder, and where clients are."""

    folder: Path
    context: ServerContext | None = None  # None: training is central
    registry: Registry | None = None  # of nodes elsewhere; None: clients are in this process


def begin_stage(
    setup: Setup, venue: Venue, stage: Stage, state: StageState | ServerState | None, watch: Watch
) -> StageRun:
    """Start a stage, or continue it from `state`."""
    if stage.method == "ridge":
        return HeadStage(setup, venue, stage, watch)
    if venue.context is None:
        assert not isinstance(state, ServerState)
        return CentralStage(setup, stage, state, watch, *stage_mask(setup, venue.folder, stage, state))
    assert not isinstance(state, StageState)
    return FederatedStage(setup, venue, stage, state, watch)


# --- central ---------------------------------------------------------------------------------------------------------


def stage_mask(setup: Setup, folder: Path, stage: Stage, state: StageState | None) -> tuple[Mask | None, float]:
    """The mask of a sparse stage, and the seconds that its calibration took.

    It is calibrated on the weights that the stage starts from, and kept in the run folder.
    """
    sieve = setup.experiment.mask_of(stage)
    if sieve is None:
        return None, 0.0
    space, file = setup.space(stage), folder / "masks" / f"{stage.name}.safetensors"
    if sieve.file is not None:
        return Mask.load(sieve.file, space), 0.0
    if file.exists():
        try:
            mask = Mask.load(file, space)
            if state is not None and mask.id != state.mask_id:
                raise FedsieveError(f"{file}: not the mask that this stage began with")
            return mask, 0.0 if state is None else state.calibration_seconds
        except FedsieveError as error:
            setup.say(f"{error}; calibrating again")

    def say(number: int, mask: Mask) -> None:
        rounds = f"calibration round {number + 1} of {sieve.calibration_rounds}"
        setup.say(f"{stage.name}: {rounds}, {mask.count:,} of {space.size:,} weights active")

    clock = time.perf_counter()
    scoring = Scoring(sieve, setup.model, space, setup.train, setup.autocast, setup.experiment.seed)
    mask = scoring.mask(stage.name, say)
    file.parent.mkdir(exist_ok=True)
    mask.save(file)
    return mask, time.perf_counter() - clock


class CentralStage:
    """A stage that trains where all images are."""

    def __init__(
        self,
        setup: Setup,
        stage: Stage,
        state: StageState | None = None,
        watch: Watch = dict,
        mask: Mask | None = None,
        calibration_seconds: float = 0.0,
    ) -> None:
        self.setup, self.stage, self.watch, self.mask = setup, stage, watch, mask
        self.space = setup.space(stage)
        self.theta = self.space.bind(setup.model)
        self.undo: Callable[[], None] | None = None
        if mask is not None:
            mask.check(self.space)
            if stage.optimizer.rescale is None:  # which asks for the norm of the whole gradient
                with setup.autocast():  # a GPU multiplies in bf16 faster than it gathers rows
                    slow = setup.device.type == "cpu" or not torch.is_autocast_enabled(setup.device.type)
                self.undo = spare_frozen(setup.model, mask, rows=slow)
        self.state = state or StageState.start(self.theta.detach().clone())
        if mask is not None:
            self.state.mask_id, self.state.calibration_seconds = mask.id, calibration_seconds

    def ticks(self) -> Iterator[Tick]:
        """Train until the stage is over."""
        setup, train, validation = self.setup, self.setup.train, self.setup.validation
        model: nn.Module = setup.model
        if self.stage.train == "head" and setup.keeps_features:
            # The backbone is frozen and sees the same pixels every epoch: run it once.
            train, validation = feature_feeds(setup)
            model = setup.classifier.head

        def validate() -> dict[str, float]:
            return setup.validate(model, validation) | self.watch()

        seed, autocast = setup.experiment.seed, setup.autocast
        recipe = replace(setup.recipe, objective=self.stage.objective.made())
        task = CentralTask(
            self.stage, model, self.theta, train, seed, autocast, self.mask, setup.speed, setup.say, recipe
        )
        return train_stage(task, self.state, validate)

    def summary(self) -> StageSummary:
        """How the stage ended."""
        mask, sieve, model = self.mask, self.setup.experiment.mask_of(self.stage), self.setup.model
        described: dict[str, Any] = {}
        if mask is not None and sieve is not None:
            described = {
                "rule": sieve.rule.kind,
                "sparsity": sieve.sparsity,
                "reached_sparsity": reached_sparsity(mask, sieve, model),
                "active": mask.count,
                "active_share": mask.count / count_weights(model),
                "mask_id": mask.id,
                "calibration_seconds": self.state.calibration_seconds,
            }
        return StageSummary(**outcome(self.state, self.space), **described)

    def close(self) -> None:
        """Give the model its own forward pass back, which a sparse stage may have changed."""
        if self.undo is not None:
            self.undo()
            self.undo = None


def outcome(state: StageState | ServerState, space: ParamSpace) -> dict[str, Any]:
    """The fields of the summary that every stage has."""
    return {
        "val_accuracy": state.chosen.get("val_accuracy"),
        "val_loss": state.chosen.get("val_loss"),
        "best_at": state.best_at,
        "epochs": state.length,
        "seconds": state.seconds,
        "trained": space.size,
    }


def count_weights(model: nn.Module) -> int:
    """All weights of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


# --- across clients --------------------------------------------------------------------------------------------------


class FederatedStage:
    """A stage of rounds across clients, in this process or at nodes elsewhere."""

    def __init__(
        self, setup: Setup, venue: Venue, stage: Stage, state: ServerState | None = None, watch: Watch = dict
    ) -> None:
        assert venue.context is not None
        self.setup, self.stage = setup, stage
        self.space = setup.space(stage)
        self.context = context = with_stage(venue.context, stage, self.space)
        theta = self.space.bind(setup.model)
        forward: nn.Module = setup.model
        train, validation = setup.train, setup.validation
        if stage.train == "head" and setup.keeps_features:
            train, validation = feature_feeds(setup)
            forward = OnFeatures(setup.classifier.head)

        def save_mask(name: str, mask: Mask) -> None:
            file = venue.folder / "masks" / f"{stage.name}{name and '.'}{name}.safetensors"
            file.parent.mkdir(exist_ok=True)
            mask.save(file)

        def validate() -> dict[str, float]:
            return setup.validate(forward, validation) | watch()

        if state is None and (spent := stage.spent):
            context.say(f"{stage.name}: {spent}")
        state = state or ServerState(theta.detach().clone())
        book = MaskBook(context, stage, self.space, theta, state.masks, save_mask)
        clients: Clients
        if venue.registry is None:
            correction = context.population.settings.correction
            task = Task(
                forward,
                self.space,
                theta,
                train,
                stage.optimizer,
                correction,
                context.autocast,
                context.speed,
                context.recipe,
            )
            clients = local_clients(context, task, book, state.clients_at_once)
        else:
            clients = RemoteClients(context, venue.registry, stage.name, state.memory, book)
        self.rounds = Rounds(context, stage, book, clients, state, validate)

    @property
    def state(self) -> ServerState:
        """The server's state."""
        return self.rounds.state

    def ticks(self) -> Iterator[Tick]:
        """Rounds until the stage is over."""
        return self.rounds.rounds()

    def summary(self) -> StageSummary:
        """How the stage ended."""
        return federated_summary(self.setup, self.context, self.stage, self.state)

    def close(self) -> None:
        """Nothing to leave."""


def with_stage(context: ServerContext, stage: Stage, space: ParamSpace) -> ServerContext:
    """The context with the objective of a stage, and with its mask, where that is a file."""
    sieve = context.experiment.mask_of(stage)
    recipe = replace(context.recipe, objective=stage.objective.made())
    if sieve is not None and sieve.file is not None:
        return replace(context, recipe=recipe, masks={**context.masks, stage.name: Mask.load(sieve.file, space)})
    return replace(context, recipe=recipe)


class HeadStage:
    """A head in closed form, where all images are or from sums over clients: one step."""

    def __init__(self, setup: Setup, venue: Venue, stage: Stage, watch: Watch = dict) -> None:
        self.setup, self.venue, self.stage, self.watch = setup, venue, stage, watch
        self.space = setup.space(stage)
        self.state = ServerState(self.space.read(setup.model))

    def ticks(self) -> Iterator[Tick]:
        """The one step. At the end the model has the head."""
        clock, setup, state, space = time.perf_counter(), self.setup, self.state, self.space
        train, validation = feature_feeds(setup)
        classes, width = space.shapes[space.names.index("head.weight")]
        place = self._place(train)
        solver = Solver(self.stage.ridge, width, classes, place.total, place.send)
        held = None if validation.features is None else (validation.features, validation.labels)
        chosen = install(setup.classifier, space, state, solver.head(held))
        record = Record(stage=self.stage.name)
        record.note(**chosen)
        place.note(record, state)
        if len(train):
            record.note(**measure(predict(setup.classifier.head, train, setup.autocast), train.labels, "train"))
        record.note(**setup.validate(setup.classifier.head, validation), **self.watch())
        state.chosen = record.starting_with("val_")
        record.seconds = state.seconds = time.perf_counter() - clock
        yield Tick(1, 1, record)

    def _place(self, train: Examples) -> OnePlace | Members:
        name, context = self.stage.name, self.venue.context
        if context is None:
            assert train.features is not None
            return OnePlace(train.features, train.labels)
        clients: Clients
        if self.venue.registry is not None:
            clients = RemoteClients(context, self.venue.registry, name, self.state.memory)
        else:
            clients = LocalClients(context, name, train, local_channel(context, name))
        return Members(context, clients, name, self.space)

    def summary(self) -> StageSummary:
        """How the stage ended."""
        if self.venue.context is None:
            return StageSummary(**outcome(self.state, self.space))
        return federated_summary(self.setup, self.venue.context, self.stage, self.state)

    def close(self) -> None:
        """Nothing to leave."""


def federated_summary(setup: Setup, context: ServerContext, stage: Stage, state: ServerState) -> StageSummary:
    """How a federated stage ended: rounds, mask, drift, refusals, bytes."""
    space, model, ledger = setup.space(stage), setup.model, context.ledger
    ledger.sync()
    up, down = 0, 0  # where nobody could be reached
    if found := totals(ledger.path).get(stage.name):
        up, down = int(found[0].sum()), int(found[1].sum())
    described: dict[str, Any] = {"rounds": state.round, "drift": state.drift, "refused": state.refused}
    described |= {"dense": ParamSpace.of(model, dense_names(model, stage.train)).size}
    described |= {key: value for key, value in state.chosen.items() if key.startswith("client_val_")}
    if state.simulated_seconds:
        described["simulated_seconds"] = state.simulated_seconds
    if (sieve := context.experiment.mask_of(stage)) is not None:
        asked = sieve_at(sieve, state.best_generation - 1, stage.length)
        described |= {"rule": sieve.rule.kind, "sparsity": asked.sparsity, "scope": sieve.scope}
        described["calibration_seconds"] = state.masks.seconds
        if state.best_mask is not None:
            mask = Mask(space, state.best_mask.numpy())
            described["reached_sparsity"] = reached_sparsity(mask, sieve, model)
            described |= {"active": mask.count, "active_share": mask.count / count_weights(model), "mask_id": mask.id}
    return StageSummary(**outcome(state, space), **described, bytes_up=up, bytes_down=down)

"""Federated training as an object: step it round by round, inspect it, change it, save it.

It is one stage of rounds across clients in this process: the same server, clients and journal as those of a run folder.
"""

import contextlib
import copy
import html
import json
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
from rich.progress import track
from torch import Tensor, nn

from fedsieve.config import (
    FAMILIES,
    AggregatorChoice,
    Attack,
    Correction,
    Experiment,
    Local,
    Message,
    ObjectiveChoice,
    Optimizer,
    Partition,
    Privacy,
    Rule,
    Server,
    Sieve,
    make_experiment,
    parse_yaml,
    to_yaml,
)
from fedsieve.data.partitions import Shards, make_partition, shards_of
from fedsieve.errors import FedsieveError
from fedsieve.federation.means import check_numbers
from fedsieve.federation.population import dealt
from fedsieve.federation.state import ServerState
from fedsieve.files import write_atomic
from fedsieve.mask.mask import Mask
from fedsieve.model.weights import digest
from fedsieve.randomness import generator
from fedsieve.runner.federated import make_context, saved_context
from fedsieve.runner.journal import Journal
from fedsieve.runner.material import Material, Names, class_labels
from fedsieve.runner.stages import FederatedStage, Venue
from fedsieve.train.feed import tensor_feed
from fedsieve.train.loop import evaluate
from fedsieve.train.record import Record
from fedsieve.wire.ledger import Ledger

STAGE = "train"
ENDLESS = 2**31 - 1  # rounds, where the user does not say how many
ABOUT = "federate.json"

Clients = Shards | Sequence[Any]
Callback = Callable[["Federated", Record], None]


@dataclass(frozen=True)
class Evaluation:
    """What was measured on some examples. Accuracy is None where labels are not classes."""

    loss: float
    accuracy: float | None
    metrics: Mapping[str, float]
    examples: int


def partition(labels: Any, *, clients: int, kind: Any = "iid", seed: int = 0, **settings: Any) -> Shards:
    """Deal examples with these labels to clients. `settings` are those of the kind, such as alpha for "dirichlet".

    `fedsieve list partitions` shows the kinds. A function of (labels, clients, generator) also works as `kind`.
    """
    try:
        chosen = Partition.of({"kind": kind, **settings} if isinstance(kind, str) else kind)
    except ValueError as error:
        raise FedsieveError(f"partition: {error}") from None
    values = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if chosen.kind in ("classes", "dirichlet") and (values.ndim != 1 or values.dtype.kind not in "iu"):
        raise FedsieveError(
            f"partition: {chosen.kind} deals by class, so labels must be whole numbers (N,), not {values.dtype} {values.shape}. "
            "Use iid or quantity"
        )
    if values.ndim != 1 or values.dtype.kind not in "iu":  # only how many there are matters
        values = np.zeros(len(values), dtype=np.int64)
    if chosen.kind in ("natural", "sites"):
        raise FedsieveError(
            f"partition: {chosen.kind} belongs to a config. Give `clients=` one index array per client instead"
        )
    return make_partition(chosen, values, clients, generator(seed, "partition"))


def federate(
    model: nn.Module,
    *,
    train: Any,
    clients: Clients,
    validation: Any = None,
    test: Any = None,
    cohort: int | float = 0.1,
    trains: Names | None = None,
    mask: Sieve | Mask | None = None,
    local: Local | None = None,
    optimizer: Optimizer | str | Callable[..., Any] = "sgd",
    server: Server | str | Any = "sgd",
    message: Message | None = None,
    privacy: Privacy | None = None,
    objective: ObjectiveChoice | str | Any = "cross_entropy",
    aggregator: AggregatorChoice | str | Any = "mean",
    attack: Attack | str | Callable[..., Any] | None = None,
    correction: Correction | str | Any = "none",
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    outputs: str | Callable[[Any], Any] | None = None,
    columns: tuple[Sequence[str] | str, str] | None = None,
    mode: str = "train",
    statistics: str = "frozen",
    rounds: int | None = None,
    schedule: str = "constant",
    federation: Mapping[str, Any] | None = None,
    seed: int = 0,
    device: str = "auto",
    executor: str = "auto",
) -> "Federated":
    """Prepare federated training of a model on tensors. Nothing trains before `rounds()` is called.

    `model` maps a batch of inputs to outputs; it is copied. `train` holds all examples, and `clients` says who holds which:
    what `partition` gives, or a list of index arrays. Words, settings classes and objects of your own are accepted alike.
    `federation` takes further keys of a config's federation section, such as {"weighting": "uniform"}.
    """
    if not isinstance(clients, Shards | Sequence) or not len(clients):
        raise FedsieveError("clients: give what fs.partition returns, or a list with one index array per client")
    if not isinstance(model, nn.Module):
        raise FedsieveError(f"model: give an instance of nn.Module, not {model!r}")
    tree: dict[str, Any] = {
        "name": "federate",
        "seed": seed,
        "device": device,
        "executor": executor,
        "test": False,
        "data": {"source": "digits", "val_fraction": 0.0},
        "message": message or Message(),
        "privacy": privacy or Privacy(),
        "federation": {
            "clients": len(clients),
            "cohort": cohort,
            "aggregator": aggregator,
            "attack": attack,
            "server": server,
            "correction": correction,
            **(federation or {}),
        },
        "stages": [
            {
                "name": STAGE,
                "train": "all",
                "rounds": rounds or ENDLESS,
                "local": local or Local(),
                "optimizer": optimizer,
                "objective": objective,
                "schedule": schedule,
                "mask": Sieve(rule=Rule.of("given")) if isinstance(mask, Mask) else mask,
            }
        ],
        "tracking": [],
    }
    if privacy is not None and privacy.dp is not None and rounds is None:
        raise FedsieveError("privacy: dp accounts for all rounds before the first: give rounds=")
    if schedule == "cosine" and rounds is None:
        raise FedsieveError("schedule: cosine needs to know how many rounds there are: give rounds=")
    material = Material(model, train, validation, test, columns, trains, outputs, metrics or {}, mode, statistics)
    experiment = make_experiment(tree, where="federate")
    return Federated(material, experiment, clients, given=mask if isinstance(mask, Mask) else None)


class Federated:
    """Federated training that you can step: `for record in fed.rounds(30): ...`."""

    def __init__(
        self,
        material: Material,
        experiment: Experiment,
        clients: Clients,
        given: Mask | None = None,
        saved: Path | None = None,
    ) -> None:
        self.material, self.history = material, list[Record]()
        self._folder = Path(tempfile.mkdtemp(prefix="fedsieve-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        if saved is not None:
            shutil.copytree(saved, self._folder, dirs_exist_ok=True)
        self._notes: list[str] = []
        self._setup = material.setup(experiment, self._notes.append)
        count = len(self._setup.train)
        self._shards = clients if isinstance(clients, Shards) else shards_of(clients, count, "clients")
        if len(self._shards.order) != count:
            raise FedsieveError(f"clients: they hold {len(self._shards.order):,} examples, and train has {count:,}")
        self._initial = {name: value.cpu().clone() for name, value in self._setup.model.state_dict().items()}
        marks = {"model": digest(self._setup.model), "train": self._setup.data_fingerprint}
        self._journal = Journal(self._folder, experiment, self._notes.append)
        try:
            self._journal.restore(marks, self._setup.device)
        except FedsieveError as error:
            hint = ". Pass the weights that training began with" if "model is not" in str(error) else ""
            raise FedsieveError(str(error).replace(str(self._folder), str(saved)) + hint) from None
        stack = contextlib.ExitStack()
        stack.enter_context(self._journal.open([]))
        settings = experiment.federation
        assert settings is not None
        people = dealt(settings, experiment.seed, self._shards, class_labels(self._setup.train))
        check_numbers(experiment, people.cohort_size, people.trainers)
        self._setup = replace(self._setup, people=people)
        saved_state = self._journal.state.federation
        self._context = make_context(self._setup, self._initial, self._folder, "", saved_state)
        stack.callback(self._context.ledger.close)
        weakref.finalize(self, stack.close)
        state = self._journal.state
        assert state.stage is None or isinstance(state.stage, ServerState)
        self.history += [Record.read(line) for line in state.lines]
        if given is not None:
            self._context = replace(self._context, masks={STAGE: given})
        self._begin(state.stage)

    def _begin(self, state: ServerState | None) -> None:
        """Start the stage, or continue it from a state, under the settings of now."""
        setup = self._setup
        setup.model.load_state_dict(self._initial)
        venue = Venue(self._folder, self._context)
        self._run = FederatedStage(setup, venue, setup.experiment.stages[0], state)
        self._journal.state.stage = self._run.state

    # --- training ----------------------------------------------------------------------------------------------------

    def rounds(
        self, count: int | None = None, callbacks: Sequence[Callback] | Callback = (), progress: bool | None = None
    ) -> Iterator[Record]:
        """Train round by round, and give each round's record. Callbacks are called with (this object, the record).

        `progress` shows a bar; by default in a terminal. Nothing happens until you iterate.
        """
        length = self._setup.experiment.stages[0].length
        left = length - self.round
        if count is not None and (type(count) is not int or count < 1):
            raise FedsieveError(f"rounds: give a whole number, 1 or more, not {count!r}")
        if count is None and length == ENDLESS:
            raise FedsieveError("rounds: say how many, as in rounds(30)")
        if count is not None and count > left:
            raise FedsieveError(f"rounds: {count:,} are asked for, and {left:,} of rounds={length:,} are left")
        numbers = range(left if count is None else count)
        shown = sys.stderr.isatty() if progress is None else progress
        for _ in track(numbers, "rounds", transient=True) if shown else numbers:
            record = self._run.rounds.advance()
            self._journal.state.ticks += 1
            self._journal.write(record)
            self.history.append(record)
            for callback in [callbacks] if callable(callbacks) else callbacks:
                callback(self, record)
            yield record

    def train(
        self, count: int | None = None, callbacks: Sequence[Callback] | Callback = (), progress: bool | None = None
    ) -> Self:
        """Train to the end of `rounds`, or for `count` rounds."""
        for _ in self.rounds(count, callbacks, progress):
            pass
        return self

    def evaluate(self, data: Any = None) -> Evaluation:
        """Measure the server's weights on `data`; by default on the test examples, else validation, else training."""
        setup = self._setup
        feed = next(one for one in (setup.test_feed(), setup.validation, setup.train) if len(one))
        if data is not None:
            feed = tensor_feed(data, setup.device, self.material.columns)
        self._run.rounds.show(self._run.state.theta)
        found = {
            name.removeprefix("val_"): value
            for name, value in evaluate(setup.model, feed, setup.autocast, setup.recipe).items()
        }
        return Evaluation(found.pop("loss"), found.pop("accuracy", None), found, len(feed))

    # --- what there is to see ----------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Rounds done."""
        return self._run.state.round

    @property
    def model(self) -> nn.Module:
        """A copy of your module with the server's weights."""
        self._run.rounds.show(self._run.state.theta)
        made = copy.deepcopy(self.material.model)
        made.load_state_dict(self._setup.model.state_dict())
        return made

    @property
    def ledger(self) -> Ledger:
        """Every message so far: `ledger.total` has the bytes up and down."""
        return self._context.ledger

    @property
    def settings(self) -> Experiment:
        """All settings, as a config holds them."""
        return self._setup.experiment

    @property
    def mask(self) -> Mask | None:
        """The mask in use; None where all weights train, or before the first round has made it."""
        return self._run.rounds.book.mask or self._context.masks.get(STAGE)

    @mask.setter
    def mask(self, mask: Mask | Sieve | None) -> None:
        given = mask if isinstance(mask, Mask) else None
        sieve = Sieve(rule=Rule.of("given")) if given is not None else mask
        state = self._run.state
        state.masks.mask = state.masks.ranks = None
        state.server = {}  # its buffers belong to the weights of the old mask
        if sieve is None:
            state.masks.moved = None
        self._context = replace(self._context, masks={} if given is None else {STAGE: given})
        self._change({"mask": sieve})

    @property
    def lr(self) -> float:
        """The learning rate of local steps."""
        return self._setup.experiment.stages[0].optimizer.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        settings = self._setup.experiment.stages[0].optimizer
        self._change({"optimizer": type(settings)(**{**dict(settings), "lr": lr})})

    @property
    def cohort(self) -> int | float:
        """Clients per round: a share, or a number."""
        assert self._setup.experiment.federation is not None
        return self._setup.experiment.federation.cohort

    @cohort.setter
    def cohort(self, cohort: int | float) -> None:
        self._change({}, {"cohort": cohort})

    def _change(self, stage: Mapping[str, Any], federation: Mapping[str, Any] | None = None) -> None:
        """Continue under other settings."""
        experiment = self._setup.experiment
        tree = {name: getattr(experiment, name) for name in type(experiment).model_fields}
        tree["stages"] = [{**dict(experiment.stages[0]), **stage}]
        tree["federation"] = {**dict(experiment.federation or {}), **(federation or {})}
        experiment = make_experiment(tree, where="change")
        state = self._run.state
        assert experiment.federation is not None
        self._setup = replace(self._setup, experiment=experiment)
        people = replace(self._context.population, settings=experiment.federation)
        check_numbers(experiment, people.cohort_size, people.trainers)
        self._context = replace(self._context, experiment=experiment, population=people)
        self._begin(state)

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"Federated({facts})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self._facts().items()
        )
        return f"<table>{rows}</table>"

    def _facts(self) -> dict[str, str]:
        book, total = self._run.rounds.book, self.ledger.total
        stage, length = self._setup.experiment.stages[0], self._setup.experiment.stages[0].length
        active = (
            f"{book.count:,} of {book.space.size:,}" if book.ready else f"a mask of {book.space.size:,}, not made yet"
        )
        facts = {
            "round": f"{self.round:,}" + ("" if length == ENDLESS else f" of {length:,}"),
            "clients": f"{len(self._shards):,}, {self._context.population.cohort_size:,} per round",
            "weights": active,
            "optimizer": f"{stage.optimizer.kind} at {stage.optimizer.lr:g}",
            "bytes": f"{total['up']:,} up, {total['down']:,} down",
        }
        if self.history:
            facts["loss"] = f"{self.history[-1].train_loss:.4g}"
        return facts

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write everything that training needs to continue to the same bits. Your code and data are not written."""
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FedsieveError(f"{folder}: exists already. Name a new folder, or delete it first")
        journal, context = self._journal, self._context
        journal.state.federation = saved_context(context, journal.state.ticks, journal.state.federation)
        journal.save()
        write_atomic(self._folder / "config.yaml", to_yaml(self._setup.experiment))
        np.savez(self._folder / "clients.npz", order=self._shards.order, offsets=self._shards.offsets)
        trains = self._setup.trains
        names = [name for name, _ in self._setup.model.named_parameters() if trains is None or trains(name)]
        about = {
            "pieces": sorted(self._pieces()),
            "trains": names,
            "mode": self.material.mode,
            "statistics": self.material.statistics,
            "columns": self.material.columns,
            "outputs": self.material.outputs if isinstance(self.material.outputs, str) else None,
        }
        write_atomic(self._folder / ABOUT, json.dumps(about))
        if (given := context.masks.get(STAGE)) is not None:
            given.save(self._folder / "given.safetensors")
        shutil.copytree(self._folder, folder, dirs_exist_ok=True)

    def _pieces(self) -> dict[str, str]:
        """The arguments that hold code of the user's: none of it is saved."""
        experiment, pieces = self._setup.experiment, dict[str, str]()
        stage, federation = experiment.stages[0], experiment.federation
        assert federation is not None
        chosen: dict[str, Any] = {"optimizer": stage.optimizer, "objective": stage.objective}
        chosen |= {name: getattr(federation, name) for name in ("server", "aggregator", "attack", "correction")}
        if stage.mask is not None:
            chosen["mask"] = stage.mask.rule
        for name, word in chosen.items():
            if word is not None and word.foreign and FAMILIES[word.family].words.get(word.kind) is not type(word):
                pieces[name] = word.kind
        if self.material.metrics:
            pieces["metrics"] = ", ".join(self.material.metrics)
        if callable(self.material.outputs):
            pieces["outputs"] = "a function"
        return pieces

    @classmethod
    def load(
        cls,
        folder: str | Path,
        model: nn.Module,
        *,
        train: Any,
        validation: Any = None,
        test: Any = None,
        **pieces: Any,
    ) -> Self:
        """Continue what `save` wrote, to the same bits. Pass the model and the data again, and code of your own by its name."""
        folder = Path(folder)
        try:
            about = json.loads((folder / ABOUT).read_text())
            written = parse_yaml((folder / "config.yaml").read_text(), f"{folder}/config.yaml")
            with np.load(folder / "clients.npz", allow_pickle=False) as file:
                shards = Shards(file["order"], file["offsets"])
            stage, federation = written["stages"][0], written["federation"]
        except (OSError, ValueError, KeyError, IndexError, TypeError, BadZipFile) as error:
            raise FedsieveError(f"{folder}: not what Federated.save wrote: {error}") from None
        needed = set(about["pieces"])
        if missing := sorted(needed - set(pieces)):
            raise FedsieveError(
                f"load: pass {', '.join(f'{name}=' for name in missing)} again: code of yours is not saved"
            )
        if unknown := sorted(set(pieces) - needed):
            raise FedsieveError(f"load: {unknown[0]} is saved, and cannot be passed again")
        for name, piece in pieces.items():
            if name in ("optimizer", "objective"):
                stage[name] = _again(name, piece, stage[name])
            elif name in ("server", "aggregator", "attack", "correction"):
                federation[name] = _again(name, piece, federation[name])
            elif name == "mask":
                stage["mask"]["rule"] = piece.rule if isinstance(piece, Sieve) else FAMILIES["rule"].of(piece)
        experiment = make_experiment(written, where=f"{folder}/config.yaml")
        columns = about["columns"] and (about["columns"][0], about["columns"][1])
        outputs = pieces.get("outputs", about["outputs"])
        options = (pieces.get("metrics", {}), about["mode"], about["statistics"])
        material = Material(model, train, validation, test, columns, about["trains"], outputs, *options)
        given = folder / "given.safetensors"
        return cls(material, experiment, shards, Mask.load(given) if given.exists() else None, saved=folder)


def _again(family: str, piece: Any, written: Mapping[str, Any]) -> Any:
    """A word around an object of the user's, with the settings that were saved next to it."""
    word = FAMILIES[family].of(piece)
    common = {name: value for name, value in written.items() if name in FAMILIES[family].model_fields}
    return type(word)(**{**dict(word), **common})

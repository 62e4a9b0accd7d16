"""The round loop: broadcast, local training, messages, mean, server step, evaluation.

`ServerState` goes in and comes out of every round, and every draw has an address, so that a stage continued from a saved
state repeats exactly what it would have done.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsieve.config import Experiment, Sieve, Stage
from fedsieve.errors import Diverged, FedsieveError
from fedsieve.federation.executors import Cohort, Executor, Stacked, Task, Trained, make_executor
from fedsieve.federation.population import Population
from fedsieve.federation.server import carried, server_step
from fedsieve.federation.store import ClientStore
from fedsieve.federation.work import Work, local_work
from fedsieve.mask.calibration import RULES
from fedsieve.mask.mask import Mask
from fedsieve.mask.overlap import block_of
from fedsieve.mask.selection import select
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.train.feed import Autocast, Feed
from fedsieve.train.loop import Tick, predict
from fedsieve.train.replay import Speed
from fedsieve.train.schedule import learning_rate
from fedsieve.train.sieve import calibrated, scorer, squared_gradients, taking_part
from fedsieve.wire.codec import Coding, MessageError, decode, decode_many, encode, encode_many
from fedsieve.wire.ledger import Ledger

EVERYONE = 2**32 - 1  # the client number of a message that is the same for all
METRICS = ParamSpace(("metrics",), ((2,),))  # what clients send of their validation: loss and correct answers, summed


@dataclass
class ServerState:
    """Where a federated stage stands. Vectors are of the stage's ParamSpace, or of the weights that train in it."""

    theta: Tensor  # the server's weights
    server: dict[str, Tensor] = field(default_factory=dict)  # the server optimizer's buffers
    best: Tensor | None = None  # the chosen round's weights; None until a round was validated
    mask: Tensor | None = None  # the bits of the shared mask,
    moved: Tensor | None = None  # and of all weights that may differ from the stage's start
    ranks: Tensor | None = None  # the last scores of the shared mask's weights: smaller devices train the first of them
    control: Tensor | None = None  # SCAFFOLD's c
    round: int = 0  # rounds done
    blending: bool = False  # whether clients know their shares in a blend
    generation: int = 0  # masks made so far
    known: dict[str, int] = field(default_factory=dict)  # the newest mask that each client has
    given: list[int] = field(default_factory=list)  # clients whose own mask the server has
    refused: dict[str, int] = field(default_factory=dict)  # replies that did not count, by reason
    drift: float | None = None  # of the last round
    best_at: int | None = None
    chosen: dict[str, float] = field(default_factory=dict)
    calibration_seconds: float = 0.0
    seconds: float = 0.0
    clients_at_once: int | None = None
    done: bool = False

    @property
    def length(self) -> int:
        """Rounds done."""
        return self.round

    def numbers(self) -> dict[str, Any]:
        """Everything but the tensors."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in TENSORS}

    def __post_init__(self) -> None:
        self.places: Tensor | None = None  # the weights of `moved`, by number: only these need saving

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by names that `restore` understands; of vectors, what may differ from the stage's start."""
        own = {name: getattr(self, name) for name in TENSORS if name != "server"}
        own |= {f"server.{name}": tensor for name, tensor in self.server.items()}
        if self.places is not None:
            for name in ("theta", "best"):
                own[name] = None if own[name] is None else own[name].index_select(0, self.places)
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    def complete(self, base: Tensor, moved: Tensor | None) -> None:
        """After `restore`: make whole vectors of what was saved, laid over the weights that the stage starts from."""
        for name in ("theta", "best"):
            values = getattr(self, name)
            if values is not None and moved is not None:
                setattr(self, name, base.index_copy(0, moved, values))

    @classmethod
    def restore(cls, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> "ServerState":
        """The state that gave these `numbers()` and `tensors()`."""
        moved = {name: tensor if name in ("mask", "moved") else tensor.to(device) for name, tensor in tensors.items()}
        server = {name.removeprefix("server."): t for name, t in moved.items() if name.startswith("server.")}
        own: dict[str, Any] = {name: t for name, t in moved.items() if not name.startswith("server.")}
        return cls(**own, server=server, **numbers)


TENSORS = ("theta", "server", "best", "mask", "moved", "ranks", "control")


@dataclass
class Context:
    """What the stages of a federated experiment share."""

    experiment: Experiment
    population: Population
    model: nn.Module  # the whole classifier
    initial: Mapping[str, Tensor]  # its weights as every device has them from the beginning
    train: Feed  # images, also where a stage trains on features
    validation: Feed
    autocast: Autocast
    speed: Speed
    executor: str  # sequential or stacked
    ledger: Ledger
    store: ClientStore
    say: Callable[[str], None] = lambda _: None
    keep_mask: Callable[[str, Mask], None] = lambda *_: None  # a name without the stage's, and a new mask


class Federated:
    """One stage across clients. `rounds()` trains until it is done, yielding after every round."""

    def __init__(
        self,
        context: Context,
        stage: Stage,
        space: ParamSpace,
        forward: nn.Module,
        theta: Tensor,
        feed: Feed,
        validate: Callable[[], dict[str, float]],
        state: ServerState | None = None,
    ) -> None:
        """`theta` is the bound vector of `space`, `forward` what is called on the inputs of `feed`."""
        self.context, self.stage, self.space, self.theta, self.feed = context, stage, space, theta, feed
        self.experiment, self.population = context.experiment, context.population
        settings = context.experiment.federation
        assert settings is not None
        self.settings, self.message = settings, context.experiment.message
        self.sieve = context.experiment.mask_of(stage)
        self.own_masks = self.sieve is not None and self.sieve.scope == "client"
        self.validate, self.device = validate, theta.device
        self.base = theta.detach().clone()  # what every client starts the stage from
        self.task = Task(
            forward, space, theta, feed, stage.optimizer, settings.correction, context.autocast, context.speed
        )
        if state is not None and state.moved is not None:
            state.complete(self.base, self._as_mask(state.moved).indices().to(self.device))
        self.state = state or ServerState(self.base.clone())
        self.up = Coding(self.message.up, self.message.group, self.message.top_k)
        self.down = Coding(self.message.down, self.message.group)
        self.ready = False  # whether the mask is in use
        self.executor: Executor | None = None
        self.context_bytes: int | None = None
        self.tiers: dict[float, Mask] = {}
        self.works: dict[int, dict[int, Work]] = {}  # drawn ahead, by round and client

    @property
    def length(self) -> int:
        """How many rounds the stage has."""
        return self.stage.length

    # --- the loop ----------------------------------------------------------------------------------------------------

    def rounds(self) -> Iterator[Tick]:
        """Rounds until the stage is over. At the end the model has the chosen round's weights."""
        state = self.state
        while not state.done:
            clock, sent = time.perf_counter(), dict(self.context.ledger.total)
            if self._mask_is_due():
                self._calibrate()
                state.calibration_seconds += time.perf_counter() - clock
            if self.settings.blend and not state.blending:
                self._prepare_blending()
            record = self._round()
            for way, size in self.context.ledger.total.items():  # calibration is a part of the round it goes before
                record[f"bytes_{way}"] = size - sent[way]
            state.round += 1
            last = state.round == self.length
            asked: dict[int, int] = {}
            if last or state.round % self.settings.evaluate_every == 0:
                if self.settings.client_validation:
                    asked = self._ask(record)
                self._show(state.theta)
                record |= self.validate()
            record["seconds"] = time.perf_counter() - clock
            state.seconds += record["seconds"]
            self._check(record)
            self._choose(record, last)
            if state.done:
                for client, size in asked.items():  # no round follows in which they would receive it anyway
                    self.context.ledger.add(self.stage.name, state.round - 1, client, "down", "model", size)
                    record["bytes_down"] += size
                self._show(state.theta if state.best is None else state.best)
            yield Tick(state.round, self.length, record)

    def _round(self) -> dict[str, Any]:
        """One communication round: cohort, broadcast, local training, replies, server step."""
        state, stage, number = self.state, self.stage, self.state.round
        cohort = self.population.cohort(stage.name, number).tolist()
        fates = {client: self.population.fate(stage.name, number, client) for client in cohort}
        refused = {client: fate for client, fate in fates.items() if fate in ("unavailable", "crash")}
        reached = [client for client in cohort if fates[client] != "unavailable"]
        self._broadcast(reached)
        trains = [client for client in reached if client not in refused]
        rate = learning_rate(number, self.length, stage.optimizer.lr, stage.schedule, stage.warmup_rounds)
        tally = _Tally(self._k, self.theta)
        if trains:
            self._train(trains, rate, fates, refused, tally)
            if not tally.trained:
                self._diverged(number + 1)
        if tally.replies >= self.settings.minimum_replies:
            self._step(tally)
        else:
            refused |= {client: "too few replies" for client in trains if client not in refused}
        for reason in refused.values():
            state.refused[reason] = state.refused.get(reason, 0) + 1
        state.drift = tally.drift / tally.trained if tally.trained else None
        record: dict[str, Any] = {"stage": stage.name, "round": number + 1}
        if tally.images:
            record |= {
                "train_loss": tally.loss / tally.images,
                "train_accuracy": tally.correct / tally.images,
                "images_per_second": tally.images / max(tally.seconds, 1e-9),
            }
        if tally.trained:
            record |= {
                "drift": state.drift,
                "drift_by_block": {name: value / tally.trained for name, value in tally.drift_by_block.items()},
            }
        return record | {
            "lr": rate,
            "cohort": len(cohort),
            "replies": tally.replies,
            "refused": _counted(refused.values()),
        }

    def _train(
        self, clients: list[int], rate: float, fates: Mapping[int, str], refused: dict[int, str], tally: "_Tally"
    ) -> None:
        """Local training of all that were reached, and their replies."""
        ahead = self.works.pop(self.state.round, {})
        works = [ahead.get(client) or self._work(client, self.state.round) for client in clients]
        cohort = Cohort(works, self._start(clients), self._holds(clients), self._controls(clients))
        received = self._taken(self.theta.detach(), self.support).clone()
        clock = time.perf_counter()
        for trained in self._running_executor().train(cohort, rate):
            self._look_ahead()
            if (
                cohort.start.dim() == 2
            ):  # an update is counted from the weights that were sent, not from a blend of them
                part = slice(trained.clients.start, trained.clients.stop)
                trained.moved += cohort.start[part] - received
            tally.add(trained.sums, self._spans, trained.moved)  # waits for the device
            tally.seconds += time.perf_counter() - clock
            members = [clients[place] for place in trained.clients]
            self._replies(members, trained, fates, refused, tally)
            if self.settings.blend:  # clients keep their own weights
                for client, row in zip(members, trained.moved, strict=True):
                    own = {f"{self.stage.name}.own": (received + row).half()}
                    self.context.store.put(client, self.state.round, **own)
            clock = time.perf_counter()

    def _step(self, tally: "_Tally") -> None:
        """Move the server by the mean update."""
        state = self.state
        mean = tally.mean(self.settings.divide_by == "holders").to(state.theta.dtype)
        schedule = self.settings.server.schedule
        lr = learning_rate(state.round, self.length, self.settings.server.lr, schedule)
        step = server_step(self.settings.server, lr, mean, state.server)
        if self.support is None:
            state.theta += step
        else:
            state.theta.index_add_(0, self.support, step)
        for client, (old, change) in tally.controls.items():  # the mean of the clients' c_k stays the server's c
            assert state.control is not None
            state.control += change / self.population.trainers
            self.context.store.put(client, state.round, **{f"{self.stage.name}.control": old + change})

    def _check(self, record: Mapping[str, Any]) -> None:
        if not all(math.isfinite(value) for value in record.values() if isinstance(value, float)):
            self._diverged(self.state.round)

    def _diverged(self, number: int) -> NoReturn:
        name = self.stage.name
        raise Diverged(
            f'stage "{name}" diverged in round {number}: the loss is not finite, or weights are too large to send. '
            f"Lower stages.{name}.optimizer.lr (now {self.stage.optimizer.lr:g}) or federation.server.lr (now "
            f"{self.settings.server.lr:g}), or add warmup_rounds or optimizer.clip_norm"
        )

    def _choose(self, record: Mapping[str, Any], last: bool) -> None:
        """Keep the weights of the best round so far, and see whether the stage is over."""
        state = self.state
        by = "val_accuracy" if len(self.context.validation) else "client_val_accuracy"
        if by in record and (state.best is None or record[by] > state.chosen[by]):
            state.best, state.best_at = state.theta.clone(), state.round
            state.chosen = {key: value for key, value in record.items() if key.startswith(("val_", "client_val_"))}
        patience = self.stage.early_stopping
        waited = state.round - (state.best_at or 0)
        state.done = last or (patience is not None and by in record and waited >= patience)
        if state.done and state.best is None:
            state.best_at = state.round

    # --- evaluation on clients ---------------------------------------------------------------------------------------

    def _ask(self, record: dict[str, Any]) -> dict[int, int]:
        """Have the next round's clients measure the new weights, as they receive them, on images they never train on.

        This round's clients would flatter the model that they have just trained. Gives the bytes each of them received.
        """
        self._check(record)  # what diverged cannot be sent
        population, name, number = self.population, self.stage.name, self.state.round
        fates = {client: population.fate(name, number, client) for client in population.cohort(name, number).tolist()}
        lost = ("unavailable", "crash")
        clients = [client for client, fate in fates.items() if population.held[client] and fate not in lost]
        if not clients:
            return {}
        size = self._broadcast([])
        held = self.feed.take(np.concatenate([population.validation(client) for client in clients]))
        logits = predict(self.task.model, held, self.context.autocast).double()
        losses, correct = F.cross_entropy(logits, held.labels, reduction="none"), logits.argmax(1) == held.labels
        if not bool(losses.isfinite().all()):
            record["client_val_loss"] = math.nan
            return {}
        parts = torch.stack([losses, correct], 1).cpu().split(population.held[clients].tolist())
        total, count = torch.zeros(2, dtype=torch.float64), 0
        for client, part in zip(clients, parts, strict=True):
            message = encode(part.sum(0), Coding("fp64"), METRICS, round=number, client=client, n=len(part))
            self.context.ledger.add(name, number - 1, client, "up", "metrics", len(message), fates[client])
            record["bytes_up"] += len(message)
            if fates[client] == "ok":
                reply = decode(message, Coding("fp64"), METRICS, round=number, client=client)
                total, count = total + reply.values, count + reply.n
        if count:
            record["client_val_loss"], record["client_val_accuracy"] = (total / count).tolist()
        return dict.fromkeys(clients, size)

    # --- masks -------------------------------------------------------------------------------------------------------

    def _mask_is_due(self) -> bool:
        if self.sieve is None or self.own_masks:
            if not self.ready:
                self._use(None)
            return False
        if self.state.mask is None:
            return True
        if not self.ready:  # resumed
            self._use(self._as_mask(self.state.mask))
        # The first mask is that of round 0, the next that of round `refresh`.
        return self.sieve.refresh is not None and self.state.generation <= self.state.round // self.sieve.refresh

    def _as_mask(self, bits: Tensor) -> Mask:
        return Mask(self.space, bits.numpy())

    def _sieve_now(self) -> Sieve:
        """The sieve at this round: with `start_sparsity`, the sparsity moves with each new mask."""
        sieve = self.sieve
        assert sieve is not None
        if sieve.start_sparsity is None or sieve.refresh is None:
            return sieve
        masks = max(1, (self.length - 1) // sieve.refresh)
        share = min(1.0, self.state.generation / masks)
        now = sieve.start_sparsity + share * (sieve.sparsity - sieve.start_sparsity)
        return sieve.model_copy(update={"sparsity": now})

    def _calibrate(self) -> None:
        """A new shared mask, from clients' summed scores or from the server's own images."""
        state, sieve, generation = self.state, self._sieve_now(), self.state.generation
        self._show(state.theta)
        address = (self.stage.name,) if generation == 0 else (self.stage.name, generation)
        seed, ledger = self.experiment.seed, self.context.ledger
        public = sieve.scope == "public"
        held = self.context.validation if len(self.context.validation) else self.context.train
        rng = generator(seed, "calibration cohort", *address)
        count = min(sieve.clients or self.population.cohort_size, self.population.trainers)
        scoring = self.population.trainer(np.sort(rng.choice(self.population.trainers, count, replace=False))).tolist()
        known: list[Mask | None] = [None]

        def sensitivity(active: Mask, number: int) -> Tensor:
            total = torch.zeros(self.space.size, dtype=torch.float64)
            if public:
                rows = generator(seed, "fisher rows", *address).permutation(len(held))[: sieve.fisher.samples]
                part, seen = self._squares(sieve, held, active, number, rows, *address)
                return (part / seen).float().cpu()
            seen = 0
            if not number:
                self._inform(scoring)
            if number:  # the mask so far goes to those who score
                size = len(self._mask_message(active, known[0]))
                for client in scoring:
                    ledger.add(self.stage.name, state.round, client, "down", "mask", size)
            known[0] = active
            places = active.indices()
            for client in scoring:
                mine = self.population.examples(client)
                rows = generator(seed, "fisher rows", *address, client).permutation(mine)
                part, n = self._squares(
                    sieve,
                    self.context.train,
                    active,
                    number,
                    rows[: -(-sieve.fisher.samples // count)],
                    *address,
                    client,
                )
                message = encode(
                    part.cpu()[places].float(), Coding("fp32"), active, round=state.round, client=client, n=n
                )
                ledger.add(self.stage.name, state.round, client, "up", "scores", len(message))
                reply = decode(message, Coding("fp32"), active, round=state.round, client=client)
                total[places] += reply.values.double()
                seen += reply.n
            return (total / seen).float()

        last: list[Tensor] = []
        score = scorer(sieve, self.context.model, self.space, sensitivity, seed, *address)

        def noting(active: Mask, number: int) -> Tensor:
            last[:] = [score(active, number)]
            return last[0]

        def said(number: int, mask: Mask) -> None:
            self.context.say(
                f"{self.stage.name}: calibration round {number + 1} of {sieve.calibration_rounds}, "
                f"{mask.count:,} of {self.space.size:,} weights active"
            )

        mask = calibrated(sieve, self.context.model, self.space, noting, said)
        old = None if state.mask is None else self._as_mask(state.mask).indices().to(self.device)
        moved = mask if state.moved is None else mask | self._as_mask(state.moved)
        state.mask, state.moved = torch.from_numpy(mask.bits.copy()), torch.from_numpy(moved.bits.copy())
        state.generation += 1
        if self.settings.devices:
            state.ranks = last[0][mask.indices()]
        if old is not None:  # what the server learnt of weights that still train stays
            new = mask.indices().to(self.device)
            state.server = {
                name: carried(values, old, new, self.settings.server.tau**2 if name == "second" else 0.0)
                for name, values in state.server.items()
            }
        self._use(mask)
        self.context.keep_mask("" if generation == 0 else f"round-{state.round}", mask)

    def _squares(
        self, sieve: Sieve, feed: Feed, active: Mask, number: int, rows: np.ndarray, *address: int | str
    ) -> tuple[Tensor, int]:
        model, autocast, seed = self.context.model, self.context.autocast, self.experiment.seed
        return squared_gradients(sieve, model, self.space, feed, active, number, rows, autocast, seed, *address)

    def _use(self, mask: Mask | None) -> None:
        """Train the weights of `mask` from here on (None: all)."""
        self.mask, self.ready = mask, True
        self.support = None if mask is None else mask.indices().to(self.device)
        self._k = self.space.size if mask is None else mask.count
        moved = mask if self.state.moved is None else self._as_mask(self.state.moved)
        # One object where they are equal, so that whether anything else has moved is told by a glance.
        self._set_moved(mask if mask is not None and moved == mask else moved)
        self._spans = _block_spans(self.space, self.support)
        self.executor, self.tiers = None, {}
        if self.settings.correction.kind == "scaffold" and self.state.control is None:
            self.state.control = torch.zeros(self._k, dtype=self.theta.dtype, device=self.device)

    def _set_moved(self, moved: Mask | None) -> None:
        """`moved`: all weights that may differ from what clients start the stage with; None: any."""
        if self.own_masks and moved is None:
            moved = Mask.zeros(self.space)
        self.moved = moved
        self.moved_index = None if moved is None else moved.indices().to(self.device)
        self.state.places = self.moved_index if self.state.moved is not None else None

    def _tier(self, client: int) -> Mask | None:
        """The part of the shared mask that a client's device trains; None where it trains all of it."""
        density = self.population.device(client).density
        if self.mask is None or density == 1:
            return None
        if density not in self.tiers:
            assert self.sieve is not None and self.state.ranks is not None
            scores = torch.zeros(self.space.size)
            scores[self.mask.indices()] = self.state.ranks.cpu().float()
            inside, sizes = self.mask, sorted({device.density for device in self.settings.devices}, reverse=True)
            for share in (size for size in sizes if size < 1):
                kept = select(
                    scores,
                    inside.to_bool(),
                    max(1, round(share * self.mask.count)),
                    self.space,
                    lowest=RULES[self.sieve.rule].lowest,
                    min_active_per_tensor=0,
                    maskable=taking_part(self.sieve, self.context.model, self.space),
                )
                inside = self.tiers[share] = Mask.from_bool(self.space, kept)
        return self.tiers[density]

    def _own_mask(self, client: int) -> Mask:
        """The mask that a client calibrated when it first took part, on its own images and the weights it received."""
        memory = self.context.store.get(client)
        name = f"{self.stage.name}.mask"
        if name not in memory:
            assert self.sieve is not None
            mask = client_mask(self.context, self.sieve, self.space, client, self.stage.name)
            memory = {name: torch.from_numpy(mask.bits.copy())}
            self.context.store.put(client, self.state.round, **memory)
            self.context.keep_mask(f"client-{client}", mask)
        return self._as_mask(memory[name])

    def _prepare_blending(self) -> None:
        """Fisher blending: every client learns its share F_k / sum_j F_j of each weight that trains."""
        context, state, name = self.context, self.state, self.stage.name
        everything = Mask.ones(self.space) if self.mask is None else self.mask
        settings, seed = self.sieve or Sieve(), self.experiment.seed
        clients = self.population.trainer(np.arange(self.population.trainers)).tolist()
        total = torch.zeros(self._k, dtype=torch.float64, device=self.device)
        for client in clients:
            mine = self.population.examples(client)
            rows = generator(seed, "blend rows", name, client).permutation(mine)[: settings.fisher.samples]
            part, count = self._squares(settings, context.train, everything, 0, rows, name, "blend", client)
            own = self._taken(part.to(self.device) / count, self.support).float()
            message = encode(own, Coding("fp32"), everything, round=state.round, client=client)
            context.ledger.add(name, state.round, client, "up", "scores", len(message))
            total += decode(message, Coding("fp32"), everything, device=self.device).values
            context.store.put(client, state.round, **{f"{name}.share": own})
        for client in clients:
            own = context.store.get(client, self.device)[f"{name}.share"].double()
            share = torch.where(total > 0, own / total.clamp(min=1e-300), 0.0)
            context.ledger.add(name, state.round, client, "down", "scores", Coding("fp32").size(self._k))
            context.store.put(client, state.round, **{f"{name}.share": share.half()})
        state.blending = True

    # --- down --------------------------------------------------------------------------------------------------------

    def _broadcast(self, clients: Sequence[int]) -> int:
        """Send the server's weights, and lay them over the model as the clients receive them. Gives their bytes."""
        state, ledger, name = self.state, self.context.ledger, self.stage.name
        over = self.space if self.moved is None else self.moved
        values = self._taken(state.theta, self.moved_index)
        absolute = self.down.format in ("fp32", "coo")  # exact; other formats send the difference from the start
        base = None if absolute else self._taken(self.base, self.moved_index)
        key = int(generator(self.experiment.seed, "rounding", name, state.round, "down").integers(2**63))
        try:
            message = encode(
                (values if base is None else values - base).float(),
                self.down,
                over,
                round=state.round,
                client=EVERYONE,
                key=key,
            )
        except FedsieveError:  # not finite, or too large for the format
            self._diverged(state.round + 1)
        received = decode(message, self.down, over, round=state.round, device=self.device).values.to(self.theta.dtype)
        self._lay(received if base is None else base + received, self.moved_index)
        enclosed = 0
        generation = state.generation
        if self.own_masks and self.moved is not None:
            generation = self.moved.count + 1  # any number that changes when the mask does
        for client in clients:
            ledger.add(name, state.round, client, "down", "model", len(message))
            if str(client) not in state.known:
                ledger.add(name, state.round, client, "down", "context", self._context_size())
            if state.known.get(str(client), 0) != generation and self._mask_travels:
                enclosed = enclosed or len(self._mask_message(self.moved))
                ledger.add(name, state.round, client, "down", "mask", enclosed)
                if self.mask is not None and self.mask is not self.moved:  # which of all that moved trains now
                    size = len(self._mask_message(self.mask, self.moved))
                    ledger.add(name, state.round, client, "down", "mask", size)
                if (tier := self._tier(client)) is not None:
                    size = len(self._mask_message(tier, self.mask))
                    ledger.add(name, state.round, client, "down", "mask", size)
            if state.control is not None:
                size = len(message) if self.moved is self.mask else self.down.size(self._k)
                ledger.add(name, state.round, client, "down", "control", size)
            state.known[str(client)] = generation
        return len(message)

    def _inform(self, clients: Sequence[int]) -> None:
        """Count what clients need to score the server's weights: what earlier stages changed, and what this one moved."""
        state, name = self.state, self.stage.name
        size = 0
        if state.moved is not None:
            moved = self._as_mask(state.moved)
            values = state.theta.index_select(0, moved.indices().to(self.device)).float()
            size = len(encode(values, Coding("fp32"), moved, round=state.round, client=EVERYONE, enclose=True))
        for client in clients:
            if str(client) not in state.known:
                self.context.ledger.add(name, state.round, client, "down", "context", self._context_size())
                state.known[str(client)] = 0
            if size:
                self.context.ledger.add(name, state.round, client, "down", "model", size)

    @property
    def _mask_travels(self) -> bool:
        """Whether clients must be sent the mask: one drawn at random they draw themselves."""
        return self.sieve is not None and (self.sieve.rule != "random" or self.own_masks)

    def _mask_message(self, mask: Mask | None, within: Mask | None = None) -> bytes:
        assert mask is not None
        return encode(None, Coding("none"), mask, round=self.state.round, client=EVERYONE, enclose=True, within=within)

    def _context_size(self) -> int:
        """Bytes of what earlier stages changed and this one does not send: a client needs them once, when it joins."""
        if self.context_bytes is None:
            model = self.context.model
            whole = ParamSpace.of(model)
            changed = (whole.read(model) != whole.flatten(self.context.initial).to(self.device)).cpu()
            views = whole.unflatten(changed)
            for tensor, start in self.space.unflatten(self.base).items():
                views[tensor].copy_((start != self.context.initial[tensor].to(self.device)).cpu())
            size = 0
            if changed.any():
                mask = Mask.from_bool(whole, changed)
                values = torch.zeros(mask.count)
                size = len(encode(values, Coding("fp32"), mask, round=0, client=EVERYONE, enclose=True))
            self.context_bytes = size
        return self.context_bytes

    # --- clients -----------------------------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Draw the next round's work while the device is still busy with this one's."""
        number = self.state.round + 1
        if self.device.type == "cuda" and number < self.length and number not in self.works:
            cohort = self.population.cohort(self.stage.name, number).tolist()
            self.works = {number: {client: self._work(client, number) for client in cohort}}

    def _work(self, client: int, number: int) -> Work:
        stage, share = self.stage, self.population.device(client).work
        examples = self.population.examples(client)
        return local_work(
            client,
            examples,
            stage.local,
            stage.batch_size,
            self.feed,
            self.experiment.seed,
            stage.name,
            number,
            share=share,
        )

    def _start(self, clients: Sequence[int]) -> Tensor:
        """What each client begins with: the received weights, or their blend with its own last ones."""
        received = self._taken(self.theta.detach(), self.support).clone()
        if not self.settings.blend:
            return received
        return torch.stack([blended(self.context, received, client, self.stage.name) for client in clients])

    def _holds(self, clients: Sequence[int]) -> Tensor | None:
        """Which of the trained weights each client may move; None where all may move all."""
        if self.own_masks:
            return torch.stack([self._own_mask(client).to_bool(self.device) for client in clients])
        tiers = [self._tier(client) for client in clients]
        if all(tier is None for tier in tiers):
            return None
        assert self.mask is not None and self.support is not None
        rows = [(self.mask if tier is None else tier).to_bool(self.device)[self.support] for tier in tiers]
        return torch.stack(rows)

    def _controls(self, clients: Sequence[int]) -> Tensor | None:
        """c - c_k of every client."""
        if self.state.control is None:
            return None
        return torch.stack([self.state.control - self._control(client) for client in clients])

    def _control(self, client: int) -> Tensor:
        name = f"{self.stage.name}.control"
        own = self.context.store.get(client, self.device).get(name)
        return torch.zeros_like(self.state.control) if own is None else own  # type: ignore[arg-type]

    def _running_executor(self) -> Executor:
        if self.executor is None:
            sizes = self.population.sizes
            clients = self.state.clients_at_once or self.experiment.clients_at_once or self.population.cohort_size
            self.executor = make_executor(
                self.context.executor,
                self.task,
                self.support,
                min(clients, self.population.cohort_size),
                min(self.stage.batch_size, int(sizes.max())),
                self.context.say,
            )
        if isinstance(self.executor, Stacked):
            self.state.clients_at_once = self.executor.clients
            if self.moved is not self.mask:
                self.executor.sync()
        return self.executor

    # --- up ----------------------------------------------------------------------------------------------------------

    def _replies(
        self,
        clients: list[int],
        trained: Trained,
        fates: Mapping[int, str],
        refused: dict[int, str],
        tally: "_Tally",
    ) -> None:
        """Encode each client's update, lose or damage what the trace says, decode, and add what is good."""
        moved = trained.moved
        residual = f"{self.stage.name}.residual"
        if self.message.error_feedback:
            kept = [self.context.store.get(client, self.device).get(residual) for client in clients]
            moved = torch.stack([row if old is None else row + old for row, old in zip(moved, kept, strict=True)])
        sizes = self.population.sizes
        found: dict[int, Tensor] = {}
        for members, over, places in self._groups(clients):
            rows = torch.tensor([clients.index(client) for client in members], device=self.device)
            values = moved[rows] if places is None else moved[rows][:, places]
            ns = [int(sizes[client]) for client in members]
            enclose = self.own_masks and members[0] not in self.state.given
            messages = self._sent(members, values, over, ns, "update", enclose)
            received = self._received(members, messages, over, fates, refused, enclose)
            for client, row, reply in zip(members, rows.tolist(), received, strict=True):
                if self.message.error_feedback:
                    rest = moved[row].clone()
                    if reply is not None:
                        if places is None:
                            rest -= reply
                        else:
                            rest[places] -= reply
                    self.context.store.put(client, self.state.round, **{residual: rest})
                if reply is not None and fates[client] == "ok":
                    if enclose:
                        self.state.given.append(client)
                    found[client] = reply
                    weight = float(sizes[client]) if self.settings.weighting == "examples" else 1.0
                    tally.count(reply, weight, places)
        if trained.gradients is not None:
            self._control_replies(clients, trained.gradients, found, tally)
        if self.own_masks and found:
            grown = self.moved
            for client in found:
                grown = self._own_mask(client) if grown is None else grown | self._own_mask(client)
            if grown is not None and grown != self.moved:
                self.state.moved = torch.from_numpy(grown.bits.copy())
                self._set_moved(grown)

    def _groups(self, clients: list[int]) -> Iterator[tuple[list[int], Mask | ParamSpace, Tensor | None]]:
        """Clients that train the same weights: the mask of these, and their places among the k trained ones."""
        if self.own_masks:
            for client in clients:
                mask = self._own_mask(client)
                yield [client], mask, mask.indices().to(self.device)
            return
        whole: Mask | ParamSpace = self.space if self.mask is None else self.mask
        tiers = {client: self._tier(client) for client in clients}
        for tier in dict.fromkeys(tiers.values()):
            members = [client for client in clients if tiers[client] is tier]
            if tier is None:
                yield members, whole, None
            else:
                assert self.support is not None
                yield members, tier, torch.searchsorted(self.support, tier.indices().to(self.device))

    def _sent(
        self, clients: list[int], values: Tensor, over: Mask | ParamSpace, ns: list[int], what: str, enclose: bool
    ) -> list[bytes]:
        name, number = self.stage.name, self.state.round
        keys = [
            int(generator(self.experiment.seed, "rounding", name, number, what, client).integers(2**63))
            for client in clients
        ]
        return encode_many(
            values.float(),
            self.up,
            over,
            round=number,
            clients=clients,
            ns=ns,
            keys=keys,
            enclose=enclose,
            check=False,
        )

    def _received(
        self,
        clients: list[int],
        messages: list[bytes],
        over: Mask | ParamSpace,
        fates: Mapping[int, str],
        refused: dict[int, str],
        enclosed: bool,
    ) -> list[Tensor | None]:
        """What the server makes of the messages: None where one is refused."""
        arrived = [
            _damaged(message, self.experiment.seed, self.stage.name, self.state.round, client)
            if fates[client] == "corrupt"
            else message
            for client, message in zip(clients, messages, strict=True)
        ]
        expected = over.space if enclosed and isinstance(over, Mask) else over
        replies = decode_many(
            arrived,
            self.up,
            expected,
            enclosed=enclosed,
            round=self.state.round,
            clients=clients,
            device=self.device,
        )
        results: list[Tensor | None] = []
        for client, message, reply in zip(clients, messages, replies, strict=True):
            status = "ok"
            if fates[client] == "late":
                status = "late"
            elif isinstance(reply, MessageError):
                status = reply.reason
            if status != "ok":
                refused[client] = status
            self.context.ledger.add(self.stage.name, self.state.round, client, "up", "update", len(message), status)
            results.append(None if isinstance(reply, MessageError) else reply.values.to(self.theta.dtype))
        return results

    def _control_replies(
        self, clients: list[int], gradients: Tensor, found: Mapping[int, Tensor], tally: "_Tally"
    ) -> None:
        """SCAFFOLD: the change of each client's control variate travels like its update."""
        over: Mask | ParamSpace = self.space if self.mask is None else self.mask
        old = {client: self._control(client) for client in clients}
        changes = torch.stack([gradients[row] - old[client] for row, client in enumerate(clients)])
        messages = self._sent(clients, changes, over, [0] * len(clients), "control", False)
        replies = decode_many(messages, self.up, over, round=self.state.round, clients=clients, device=self.device)
        for client, message, reply in zip(clients, messages, replies, strict=True):
            self.context.ledger.add(self.stage.name, self.state.round, client, "up", "control", len(message))
            if client in found and not isinstance(reply, MessageError):
                # A client keeps what was understood, so that rounding never pulls the two apart.
                tally.controls[client] = old[client], reply.values.to(self.theta.dtype)

    # --- weights -----------------------------------------------------------------------------------------------------

    def _taken(self, vector: Tensor, index: Tensor | None) -> Tensor:
        return vector if index is None else vector.index_select(0, index)

    @torch.no_grad()
    def _lay(self, values: Tensor, index: Tensor | None) -> None:
        """Set the model's weights at `index`."""
        if index is None:
            self.theta.copy_(values)
        else:
            self.theta.index_copy_(0, index, values)

    def _show(self, vector: Tensor) -> None:
        """Give the model these weights."""
        with torch.no_grad():
            self.theta.copy_(vector)


def client_mask(context: Context, sieve: Sieve, space: ParamSpace, client: int, *address: int | str) -> Mask:
    """The mask that a client calibrates on its own images, at the weights that the model has."""
    model, seed, feed = context.model, context.experiment.seed, context.train
    address = (*address, client)
    rows = generator(seed, "fisher rows", *address).permutation(context.population.examples(client))
    rows = rows[: sieve.fisher.samples]

    def sensitivity(active: Mask, number: int) -> Tensor:
        total, count = squared_gradients(
            sieve, model, space, feed, active, number, rows, context.autocast, seed, *address
        )
        return (total / count).float().cpu()

    return calibrated(sieve, model, space, scorer(sieve, model, space, sensitivity, seed, *address))


def blended(context: Context, received: Tensor, client: int, stage: str) -> Tensor:
    """Received weights mixed with the client's own last ones by its shares; as received where it has none."""
    memory = context.store.get(client, received.device)
    own, share = (memory.get(f"{stage}.{name}") for name in ("own", "share"))
    if own is None or share is None:
        return received
    share = share.to(received.dtype)
    return share * own.to(received.dtype) + (1 - share) * received


class _Tally:
    """Running sums of one round, in float64, in the order of the clients."""

    def __init__(self, k: int, like: Tensor) -> None:
        self.total = torch.zeros(k, dtype=torch.float64, device=like.device)
        self.weight = 0.0
        self.holders: Tensor | None = None  # weight by coordinate, where clients hold different ones
        self.controls: dict[int, tuple[Tensor, Tensor]] = {}  # SCAFFOLD: old value and change, by client
        self.replies = self.trained = 0
        self.loss = self.correct = self.images = self.seconds = self.drift = 0.0
        self.drift_by_block: dict[str, float] = {}

    def add(self, sums: Tensor, spans: Sequence[tuple[str, int, int]], moved: Tensor) -> None:
        """Count what some clients did: loss, correct answers, images, and how far they went.

        A client that went astray is left out; its message will be refused.
        """
        squares = torch.stack([moved[:, first:last].double().square().sum(1) for _, first, last in spans])
        sound = squares.sum(0).isfinite() & sums.isfinite().all(1)
        squares = squares[:, sound]
        loss, correct, images = sums[sound].sum(0).tolist()
        self.loss, self.correct, self.images = self.loss + loss, self.correct + correct, self.images + images
        drift = squares.sum(0).sqrt().sum().item()
        by_block: dict[str, Tensor] = {}
        for (name, _, _), part in zip(spans, squares, strict=True):
            by_block[name] = by_block[name] + part if name in by_block else part
        distances = torch.stack([part.sqrt().sum() for part in by_block.values()]).tolist()
        for name, distance in zip(by_block, distances, strict=True):
            self.drift_by_block[name] = self.drift_by_block.get(name, 0.0) + distance
        self.drift += drift
        self.trained += squares.shape[1]

    def count(self, values: Tensor, weight: float, places: Tensor | None) -> None:
        """Add one client's update."""
        if places is None:
            self.total.add_(values.double(), alpha=weight)
            if self.holders is not None:
                self.holders += weight
        else:
            if self.holders is None:  # those who came before held everything
                self.holders = torch.full_like(self.total, self.weight)
            self.total.index_add_(0, places, values.double(), alpha=weight)
            self.holders.index_add_(0, places, torch.full_like(places, weight, dtype=torch.float64))
        self.weight += weight
        self.replies += 1

    def mean(self, holders: bool) -> Tensor:
        """The weighted mean update; coordinates that nobody holds stay where they are."""
        if holders and self.holders is not None:
            return torch.where(self.holders > 0, self.total / self.holders.clamp(min=1e-300), 0.0)
        return self.total / self.weight


def _block_spans(space: ParamSpace, support: Tensor | None) -> list[tuple[str, int, int]]:
    """Runs of trained weights that lie in one block: its name, and where they begin and end among the k."""
    cuts = list(space.offsets)
    if support is not None:
        cuts = torch.searchsorted(support.cpu(), torch.tensor(space.offsets)).tolist()
    runs = []
    for name, group in groupby(range(len(space.names)), key=lambda index: block_of(space.names[index])):
        members = list(group)
        runs.append((name, cuts[members[0]], cuts[members[-1] + 1]))
    return [run for run in runs if run[1] < run[2]]


def _damaged(message: bytes, seed: int, *address: int | str) -> bytes:
    """A message with one bit turned over on its way."""
    place = int(generator(seed, "damage", *address).integers(8 * len(message)))
    damaged = bytearray(message)
    damaged[place // 8] ^= 1 << place % 8
    return bytes(damaged)


def _counted(words: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts

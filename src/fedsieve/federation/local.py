"""Clients in this process: all of a simulation, or the one of a node. They train, send their updates and answer questions."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.config import Stage
from fedsieve.federation.channel import Channel, Parcel, Reply, Tally
from fedsieve.federation.clients import Ask, Exchange, Refusal, SecretSum, TrainReply, Update, Worked
from fedsieve.federation.distributed import Distributed, cohort_executor
from fedsieve.federation.executors import Cohort, Executor, Sequential, Task, Trained
from fedsieve.federation.maskbook import MaskBook
from fedsieve.federation.parts import ClientPart, Upload, client_parts
from fedsieve.federation.secure import ASTRAY, PAD, Departures, Inputs, Kept, departures
from fedsieve.federation.state import Context, ServerContext
from fedsieve.federation.vectors import squares_by_span
from fedsieve.federation.work import Draws, Work, local_work
from fedsieve.privacy.secagg import Arrival, in_process
from fedsieve.train.feed import Examples, tensor_feed
from fedsieve.wire.codec import Coding, Decoded, MessageError


@dataclass(frozen=True, eq=False)
class TrainedGroup:
    """Some clients after their training: their numbers, their work, and the values they want to send."""

    clients: list[int]
    worked: Worked
    trained: Trained
    moved: Tensor  # (clients, k), as it is sent


class Training:
    """Trains clients of a stage from the weights that the model has."""

    def __init__(
        self,
        context: Context,
        stage: Stage,
        task: Task,
        book: MaskBook,
        parts: Sequence[ClientPart],
        at_once: int | None,
    ) -> None:
        """`at_once`: how many clients fit at a time, if an earlier round has found that out."""
        self.context, self.stage, self.task, self.book, self.parts = context, stage, task, book, parts
        self.at_once = at_once
        self._executor: Executor | Distributed | None = None
        self._support: Tensor | None = None  # that the executor was made for
        self._ahead: dict[int, dict[int, Work]] = {}  # works drawn ahead, by round and client

    def run(self, clients: Sequence[int], round: int, lr: float) -> Iterator[TrainedGroup]:
        """Train clients, as many at a time as fit."""
        ahead = self._ahead.pop(round, {})
        works = [ahead.get(client) or self._work(client, round) for client in clients]
        received = self.book.taken(self.task.theta.detach()).clone()
        for part in self.parts:
            part.begin(clients, round)

        def at(members: range) -> list[int]:
            return [clients[place] for place in members]

        def start(members: range) -> Tensor:
            rows = [part.start(at(members), received) for part in self.parts]
            return next((row for row in rows if row is not None), received)

        def holds(members: range) -> Tensor | None:
            return self.book.holds(at(members))

        def control(members: range) -> Tensor | None:
            rows = [part.control(at(members)) for part in self.parts]
            return next((row for row in rows if row is not None), None)

        def statistics(members: range) -> Tensor | None:
            rows = [part.statistics(at(members)) for part in self.parts]
            return next((row for row in rows if row is not None), None)

        clock = time.perf_counter()
        for trained in self.executor().train(Cohort(works, start, holds, control, statistics), lr):
            self._look_ahead(round + 1)
            members = at(trained.clients)
            for part in self.parts:
                trained = part.trained(members, trained, received, round)
            squares = squares_by_span(trained.moved, self.book.spans).cpu()  # waits for the device
            worked = Worked(trained.sums, squares, time.perf_counter() - clock)
            moved = trained.moved
            for part in self.parts:
                moved = part.sent(members, moved, round)
            yield TrainedGroup(members, worked, trained, moved)
            clock = time.perf_counter()

    def _work(self, client: int, round: int) -> Work:
        stage, people = self.stage, self.context.population
        draws = Draws(self.task.feed, self.context.experiment.seed, (stage.name, round))
        share = people.device(client).work
        return local_work(client, people.examples(client), stage.local, stage.batch_size, draws, share)

    def alone(self, feed: Examples, round: int, lr: float) -> Tensor:
        """The update (k,) that a further client with these examples would make of the weights that the model has."""
        task, seed = replace(self.task, feed=feed), self.context.experiment.seed
        draws, newcomer = Draws(feed, seed, (self.stage.name, round)), len(self.context.population)
        work = local_work(newcomer, np.arange(len(feed)), self.stage.local, self.stage.batch_size, draws)
        received = self.book.taken(self.task.theta.detach()).clone()
        [trained] = Sequential(task, self.book.support).train(Cohort([work], received), lr)
        return trained.moved[0]

    def _look_ahead(self, round: int) -> None:
        """Draw the next round's work while the device is still busy with this one's."""
        if self.book.device.type == "cuda" and round < self.stage.length and round not in self._ahead:
            cohort = self.context.population.cohort(self.stage.name, round).tolist()
            self._ahead = {round: {client: self._work(client, round) for client in cohort}}

    def executor(self) -> Executor | Distributed:
        """The executor for the weights that train now, made when it is first needed."""
        book, people = self.book, self.context.population
        if self._executor is None or self._support is not book.support:
            self._support = book.support
            self._executor = cohort_executor(
                self.context,
                self.task,
                book.support,
                people.cohort_size,
                self.at_once or self.context.experiment.clients_at_once,
                min(self.stage.batch_size, int(people.sizes.max())),
            )
        if self._executor.clients > 1 or self.at_once:  # stacked; fewer than before, where memory ran out
            self.at_once = self._executor.clients
        if book.moved is not book.mask:
            self._executor.sync()
        return self._executor


class LocalClients:
    """Clients of one stage that compute here. Failures are simulated: a client's fate in a round is drawn by the seed.

    With `final`, it is known at once whether an update is taken. A node hears of it with the next question.
    """

    def __init__(
        self,
        context: Context,
        stage: str,
        feed: Examples,
        channel: Channel,
        training: Training | None = None,
        final: bool = True,
    ) -> None:
        """`feed` holds what clients compute on; without `training`, they only answer questions."""
        self.context, self.stage, self.feed, self.channel = context, stage, feed, channel
        self._training, self.final = training, final
        self.people, self.memory = context.population, context.memory
        message = context.experiment.message
        self.up = Coding(message.up, message.group, message.top_k)
        self.secret = context.experiment.privacy.aggregation == "secagg"
        self.inputs = Inputs(context.experiment.privacy, context.experiment.seed, stage)
        self.lost: dict[int, str] = {}
        self.waited = 0.0
        self.fates: dict[int, str] = {}  # of the clients that were called last
        self.leaves: Departures = {}  # and when they fall out of a secure sum
        self.rows: dict[int, Kept] = {}  # what clients keep for a secure sum
        self.under_way = 0, 0.0  # the round, and its learning rate

    @property
    def training(self) -> Training:
        """Their local training."""
        assert self._training is not None, "these clients only answer questions"
        return self._training

    @property
    def task(self) -> Task:
        """The task that all clients of the stage share."""
        return self.training.task

    @property
    def at_once(self) -> int | None:
        """The number of clients that train at a time, where memory limits it."""
        return self._training.at_once if self._training else None

    def features_of(self, client: int) -> tuple[Tensor, Tensor]:
        """The features and labels of the images that a client trains on."""
        assert self.feed.features is not None
        rows = torch.from_numpy(self.people.examples(client)).to(self.feed.labels.device)
        return self.feed.features[rows], self.feed.labels[rows]

    # --- messages down -----------------------------------------------------------------------------------------------

    def call(self, cohort: Sequence[int], round: int) -> list[int]:
        """Draw the fates of the clients of a round. Returns those that can be reached."""
        self.fates = {client: self.people.fate(self.stage, round, client) for client in cohort}
        self.leaves = departures(self.channel.seed, self.stage, round, self.fates) if self.secret else {}
        if any(device.delay for device in self.people.settings.devices):
            self.waited = self.people.waiting(self.stage, round, self.fates)
        return [client for client in cohort if self.fates[client] != "unavailable"]

    def tell(self, parcel: Parcel, clients: Sequence[int], values: Tensor | None = None) -> Decoded:
        """Send the same to each of `clients`, and give it as they receive it."""
        message = self.channel.down(parcel, clients, values)
        self.hear(parcel.what, message.values, parcel.round)
        return message

    def hear(self, what: str, values: Tensor, round: int) -> None:
        """Let the parts of local training take up a message."""
        for part in self._training.parts if self._training else ():
            part.hear(what, values, round)

    # --- training ----------------------------------------------------------------------------------------------------

    def train(self, cohort: Sequence[int], round: int, lr: float) -> Iterator[TrainReply]:
        """Train the clients that can, and give their messages as the server receives them."""
        silent = {client: why for client in cohort if (why := self._silence(client))}
        tally, gone = self.channel.tally, [client for client, why in silent.items() if why == "unavailable"]
        tally.silence("model", gone, round, "down", "unavailable")
        tally.silence("update", [client for client in silent if client not in gone], round, "up", "crash")
        yield from (Refusal(client, why) for client, why in silent.items())
        self.rows, self.under_way = {}, (round, lr)
        if trains := [client for client in cohort if client not in silent]:
            for group in self.training.run(trains, round, lr):
                yield group.worked
                if self.secret:
                    self._keep(group)
                else:
                    yield from self._upload(group, round)

    def update(self, data: Any) -> Tensor:
        """The update (k,) that a client with this data would send in the round under way."""
        return self.training.alone(tensor_feed(data, self.training.book.device), *self.under_way)

    def _silence(self, client: int) -> str:
        """The reason why nothing comes from a client. Under secure sums, a client that crashes later trains first."""
        fate = self.fates[client]
        later = client in self.leaves and self.leaves[client][0] > PAD
        return fate if fate in ("unavailable", "crash") and not later else ""

    def _keep(self, group: TrainedGroup) -> None:
        """Keep updates for a secure sum."""
        for client, row in zip(group.clients, group.moved.float().cpu().numpy(), strict=True):
            self.rows[client] = Kept(row, weight=int(self.people.weights[client]))

    def _upload(self, group: TrainedGroup, round: int) -> Iterator[TrainReply]:
        """Send the messages of some clients. All of a client's messages count, or none."""
        clients, moved, book = group.clients, group.moved, self.training.book
        places: dict[int, Tensor | None] = {}  # in the order in which groups send
        replies: dict[int, dict[str, Reply]] = {client: {} for client in clients}
        for members, over, held in book.groups(clients):
            rows = moved
            if len(members) != len(clients):
                rows = moved[torch.tensor([clients.index(client) for client in members], device=moved.device)]
            values = rows if held is None else rows[:, held]
            parcel = Parcel("update", round, over, self.up, enclose=book.encloses(members[0]))
            ns = self.people.sizes[members].tolist()
            for client, reply in zip(
                members, self.channel.up(parcel, members, values.float(), ns, self.fates), strict=True
            ):
                replies[client]["update"], places[client] = reply, held
        for part in self.training.parts:
            if (further := part.enclosed(clients, group.trained, round)) is not None:
                parcel, values = further
                heard = self.channel.up(parcel, clients, values, [0] * len(clients), self.fates)
                for client, reply in zip(clients, heard, strict=True):
                    replies[client][parcel.what] = reply
        for client, held in places.items():
            yield self._settle(Upload(client, moved[clients.index(client)], held, replies[client]), round)

    def _settle(self, upload: Upload, round: int) -> Update | Refusal:
        """Judge the upload of a client, and have the client remember the outcome."""
        client, errors = upload.client, [reply for reply in upload.replies.values() if isinstance(reply, MessageError)]
        if not self.final:
            self.memory.propose(client, round, {taken: self._remembered(upload, taken) for taken in (True, False)})
        elif kept := self._remembered(upload, taken=not errors):
            self.memory.put(client, round, **kept)
        if errors:
            return Refusal(client, errors[0].reason)
        messages = {what: reply for what, reply in upload.replies.items() if isinstance(reply, Decoded)}
        update = messages["update"]
        weight = float(update.n) if self.people.settings.weighting == "examples" else 1.0
        return Update(client, update.values.to(self.task.theta.dtype), weight, upload.places, messages)

    def _remembered(self, upload: Upload, taken: bool) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        for part in self.training.parts:
            kept |= part.remembered(upload, taken)
        return kept

    # --- questions ---------------------------------------------------------------------------------------------------

    def answers(self, ask: Ask, clients: Sequence[int], needed: bool) -> Iterator[Reply]:
        """Each client's answer, one after another."""
        parcel, fates = Parcel(ask.what, ask.round, ask.over, ask.coding), None if needed else self.fates
        for client, values, n in ask.parts(self, self._present(clients, needed)):
            yield self.channel.up(parcel, [client], values[None], [n], fates)[0]

    def keep(self, ask: Ask, clients: Sequence[int], needed: bool) -> list[int]:
        """Have clients keep their answers, in the precision that they would be sent in."""
        present = self._present(clients, needed)
        fates = {client: self.fates[client] for client in present} if not needed else {}
        self.leaves = departures(self.channel.seed, self.stage, ask.round, fates)
        precision = torch.float32 if ask.coding.format == "fp32" else torch.float64
        self.rows = {
            client: Kept.answer(ask.over, values.to(precision), n) for client, values, n in ask.parts(self, present)
        }
        return list(self.rows)

    def _present(self, clients: Sequence[int], needed: bool) -> list[int]:
        """The clients that live to answer a question."""
        return [client for client in clients if needed or self.fates.get(client) != "crash"]

    # --- secure sums -------------------------------------------------------------------------------------------------

    def kept(self) -> list[int]:
        """All clients that were reached, including those that crash on the way."""
        return [client for client, fate in self.fates.items() if fate != "unavailable"]

    def exchange(self, secret: SecretSum) -> Exchange:
        """A secure sum among the clients here. Simulated failures drop clients on the way."""
        return LocalExchange(self, secret)

    def integers(self, secret: SecretSum, client: int) -> np.ndarray:
        """The values that a client adds to a secure sum."""
        return self.inputs.of(secret, client, self.rows[client])


class LocalExchange:
    """One secure sum within this process."""

    def __init__(self, clients: LocalClients, secret: SecretSum) -> None:
        leaves = {client: clients.leaves[client] for client in secret.clients if client in clients.leaves}
        if secret.what != "update" and not secret.what.endswith(".scale"):
            leaves = {}  # who would be lost was so in the sum before
        empty, sums = np.zeros(secret.count, f"<u{secret.bits // 8}"), {}
        for client in secret.clients:
            kept = clients.rows.get(client)
            sound = kept is not None and (secret.what != "update" or bool(np.isfinite(kept.row).all()))
            if kept is not None and not sound and leaves.get(client, (PAD, ""))[0] >= PAD:
                leaves[client] = PAD, ASTRAY
                clients.channel.tally.silence("update", [client], secret.round, "up", ASTRAY)
            sums[client] = clients.integers(secret, client) if sound else empty
        clients.inputs.warn()
        late = {client: (phase, why) for client, (phase, why) in leaves.items() if why in ("late", "corrupt")}
        drops = {client: phase for client, (phase, _) in leaves.items() if client not in late}
        self.why: Mapping[int, str] = {client: leaves[client][1] for client in drops}

        def deliver(client: int, phase: int, answer: bytes) -> bytes:
            if late.get(client) == (phase, "late"):
                raise MessageError("late", f"client {client} answered after the deadline")
            if late.get(client) == (phase, "corrupt"):
                return clients.channel.damaged(answer, secret.round, secret.what, client)
            return answer

        self.carry = in_process(sums, secret.threshold, drops, secret.round, deliver)

    def __call__(self, phase: int, messages: Mapping[int, bytes]) -> Iterator[Arrival]:
        """Bring a phase's messages to the clients, and give their answers."""
        return iter(self.carry(phase, messages))


def local_clients(context: ServerContext, task: Task, book: MaskBook, at_once: int | None = None) -> LocalClients:
    """The clients of a stage, all in this process. `at_once` is known from earlier rounds."""
    training = Training(context, book.stage, task, book, client_parts(context, book), at_once)
    return LocalClients(context, book.stage.name, task.feed, local_channel(context, book.stage.name), training)


def local_channel(context: ServerContext, stage: str) -> Channel:
    """The channel of a stage whose clients are in this process."""
    device = context.train.labels.device
    return Channel(Tally(context.ledger, stage), context.experiment.seed, device)

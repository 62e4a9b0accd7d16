"""Optional parts of a round, chained by their hooks. None of them knows the others.

A `ClientPart` works where clients train; a `ServerPart` where the server is. SCAFFOLD has one of each.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsieve.config import Sieve
from fedsieve.federation.asks import Shares
from fedsieve.federation.attacks import Scene
from fedsieve.federation.calibrate import client_masks
from fedsieve.federation.channel import EXACT, STATISTICS, Parcel, Reply, rounding_key
from fedsieve.federation.clients import Clients, Update
from fedsieve.federation.executors import Trained
from fedsieve.federation.maskbook import MaskBook
from fedsieve.federation.state import Context, ServerContext, ServerState
from fedsieve.federation.sums import Sums
from fedsieve.foreign import called, expect
from fedsieve.mask.mask import Mask
from fedsieve.privacy import zero_sum
from fedsieve.randomness import generator
from fedsieve.train.modes import RunningStatistics, changing
from fedsieve.wire.codec import Coding, Decoded


@dataclass(frozen=True, eq=False)
class Upload:
    """An update on its way: what a client sends, which of the k values that is, and what came of each message."""

    client: int
    values: Tensor  # (k,), before the message rounds it
    places: Tensor | None
    replies: Mapping[str, Reply]  # by what the message is; an update comes first


class ClientPart:
    """Hooks into local training. Each does nothing unless a part says otherwise."""

    def begin(self, clients: Sequence[int], round: int) -> None:
        """Before clients train."""

    def hear(self, what: str, values: Tensor, round: int) -> None:
        """Take up a message from the server."""

    def start(self, clients: Sequence[int], received: Tensor) -> Tensor | None:
        """The weights (clients, k) that clients train from; None: the received ones (k,)."""
        return None

    def control(self, clients: Sequence[int]) -> Tensor | None:
        """What clients add to each gradient, (clients, k)."""
        return None

    def statistics(self, clients: Sequence[int]) -> Tensor | None:
        """Running statistics that clients begin with, (s,) or (clients, s); None: those of the model."""
        return None

    def trained(self, clients: Sequence[int], trained: Trained, received: Tensor, round: int) -> Trained:
        """Look at what clients trained, and change it where it does not count as their work."""
        return trained

    def sent(self, clients: Sequence[int], moved: Tensor, round: int) -> Tensor:
        """What clients send instead of what they trained, (clients, k)."""
        return moved

    def enclosed(self, clients: Sequence[int], trained: Trained, round: int) -> tuple[Parcel, Tensor] | None:
        """A further message of each client, and its values (clients, k)."""
        return None

    def remembered(self, upload: Upload, taken: bool) -> Mapping[str, Tensor]:
        """What a client keeps of an upload that was taken or refused."""
        return {}


class OwnMasks(ClientPart):
    """Clients calibrate masks of their own when they first take part, on their own images and the received weights."""

    def __init__(self, context: Context, book: MaskBook) -> None:
        self.context, self.book = context, book

    def begin(self, clients: Sequence[int], round: int) -> None:
        book, clock = self.book, time.perf_counter()
        assert book.sieve is not None
        lacking = [client for client in clients if book.own_name not in self.context.memory.get(client)]
        masks = client_masks(self.context, book.sieve, book.space, lacking, book.stage.name)
        for client, mask in zip(lacking, masks, strict=True):
            book.keep_own(client, mask, round)
        book.state.seconds += time.perf_counter() - clock


class Blending(ClientPart):
    """Clients mix what they receive with their own last weights, each weight by the client's share of sensitivity.

    Fisher blending of the drift report, eq. 5: beta = F_k / sum_j F_j.
    """

    def __init__(self, context: Context, stage: str) -> None:
        self.context, self.stage = context, stage
        self.blends: dict[int, Tensor] = {}  # of those who train now

    def start(self, clients: Sequence[int], received: Tensor) -> Tensor:
        for client in clients:
            self.blends[client] = blended(self.context, received, client, self.stage)
        return torch.stack([self.blends[client] for client in clients])

    def trained(self, clients: Sequence[int], trained: Trained, received: Tensor, round: int) -> Trained:
        """Count an update from the weights that were sent, not from a blend of them; clients keep their own weights."""
        moved = trained.moved + (torch.stack([self.blends.pop(client) for client in clients]) - received)
        for client, row in zip(clients, moved, strict=True):
            self.context.memory.put(client, round, **{f"{self.stage}.own": (received + row).half()})
        return replace(trained, moved=moved)

    def hear(self, what: str, values: Tensor, round: int) -> None:
        """From the clients' summed sensitivities, each client's share in them."""
        if what != "scores":
            return
        total, people = values.double(), self.context.population
        for client in people.all_trainers:
            own = self.context.memory.get(client, total.device)[f"{self.stage}.share"].double()
            share = torch.where(total > 0, own / total.clamp(min=1e-300), 0.0)
            self.context.memory.put(client, round, **{f"{self.stage}.share": share.half()})


def blended(context: Context, received: Tensor, client: int, stage: str) -> Tensor:
    """Received weights mixed with the client's own last ones by its shares; as received where it has none."""
    memory = context.memory.get(client, received.device)
    own, share = (memory.get(f"{stage}.{name}") for name in ("own", "share"))
    if own is None or share is None:
        return received
    share = share.to(received.dtype)
    return share * own.to(received.dtype) + (1 - share) * received


class Hostile(ClientPart):
    """Hostile clients send something else than what they trained."""

    def __init__(self, context: Context, stage: str) -> None:
        attack = context.population.settings.attack
        assert attack is not None
        self.context, self.attack, self.stage = context, attack, stage

    def sent(self, clients: Sequence[int], moved: Tensor, round: int) -> Tensor:
        hostile = self.context.population.hostile
        if not hostile.intersection(clients):
            return moved
        moved = moved.clone()
        for client, row in zip(clients, moved, strict=True):
            if client in hostile:
                row.copy_(self._instead(row.clone(), client, round))
        return moved

    def _instead(self, update: Tensor, client: int, round: int) -> Tensor:
        """The values that a hostile client sends in place of its update."""
        attack, memory, name = self.attack, self.context.memory, f"{self.stage}.stale"
        if attack.home is None:  # it trained on wrong labels, as well as it could
            return update
        if attack.foreign:
            where = f"federation.attack: {attack.kind}"
            sent = called(attack.made(), where, update)
            expect(sent, update.shape, where, "an update", finite=False)
            return sent

        def first(now: Tensor) -> Tensor:
            earlier = memory.get(client, now.device).get(name)
            if earlier is None:
                memory.put(client, round, **{name: now})
            return now if earlier is None else earlier

        seed = self.context.experiment.seed
        return attack.made()(update, Scene(lambda: generator(seed, "attack", self.stage, round, client), first))


class ErrorFeedback(ClientPart):
    """Clients add to an update what did not get through before, and keep what does not get through now.

    A client knows no more than the answer to its upload. If it was accepted, the client keeps what rounding took; if it was
    refused, whatever the reason, the whole update. Whether enough others answered for the round to count it never learns.
    """

    def __init__(self, context: Context, stage: str) -> None:
        self.memory, self.name = context.memory, f"{stage}.residual"

    def sent(self, clients: Sequence[int], moved: Tensor, round: int) -> Tensor:
        kept = [self.memory.get(client, moved.device).get(self.name) for client in clients]
        return torch.stack([row if old is None else row + old for row, old in zip(moved, kept, strict=True)])

    def remembered(self, upload: Upload, taken: bool) -> Mapping[str, Tensor]:
        rest, reply = upload.values.clone(), upload.replies["update"]
        if taken and isinstance(reply, Decoded):
            rest[slice(None) if upload.places is None else upload.places] -= reply.values.to(rest.dtype)
        return {self.name: rest} if rest.isfinite().all() else {}  # what went astray is not worth keeping


class ControlVariates(ClientPart):
    """SCAFFOLD's c_k (Karimireddy et al. 2020). Its change travels next to the update.

    Client and server both add what was understood, so that rounding never pulls the two apart: the mean of the clients'
    c_k stays the server's c.
    """

    def __init__(self, context: Context, book: MaskBook, coding: Coding) -> None:
        self.context, self.book, self.coding, self.name = context, book, coding, f"{book.stage.name}.control"
        self.server: Tensor | None = None  # c, as it was received

    def hear(self, what: str, values: Tensor, round: int) -> None:
        if what == "control":
            self.server = values.to(self.book.base.dtype)

    def control(self, clients: Sequence[int]) -> Tensor | None:
        if self.server is None:
            return None
        return torch.stack([self.server - self._own(client) for client in clients])

    @staticmethod
    def parcel(book: MaskBook, round: int, coding: Coding) -> Parcel:
        """The message in which the change of a control variate travels."""
        return Parcel("control", round, book.trains, coding)

    def enclosed(self, clients: Sequence[int], trained: Trained, round: int) -> tuple[Parcel, Tensor] | None:
        assert trained.gradients is not None
        changes = trained.gradients - torch.stack([self._own(client) for client in clients])
        return self.parcel(self.book, round, self.coding), changes.float()

    def remembered(self, upload: Upload, taken: bool) -> Mapping[str, Tensor]:
        reply = upload.replies["control"]
        if not taken or not isinstance(reply, Decoded):
            return {}
        own = self._own(upload.client)
        return {self.name: own + reply.values.to(own.dtype)}

    def _own(self, client: int) -> Tensor:
        own = self.context.memory.get(client, self.book.device).get(self.name)
        return self.book.base.new_zeros(self.book.count) if own is None else own


class FederatedStatistics(ClientPart):
    """Clients begin with the server's running statistics, and send theirs next to the update."""

    def __init__(self, context: Context) -> None:
        self.space = RunningStatistics(context.model).space
        self.received: Tensor | None = None

    def hear(self, what: str, values: Tensor, round: int) -> None:
        if what == STATISTICS:
            self.received = values

    def statistics(self, clients: Sequence[int]) -> Tensor | None:
        return self.received

    def enclosed(self, clients: Sequence[int], trained: Trained, round: int) -> tuple[Parcel, Tensor] | None:
        assert trained.statistics is not None
        return Parcel(STATISTICS, round, self.space, EXACT), trained.statistics.float()


class OwnStatistics(ClientPart):
    """Each client has running statistics of its own, which are never sent (Li et al. 2021, FedBN)."""

    def __init__(self, context: Context) -> None:
        self.context, self.begun = context, RunningStatistics(context.model).read()
        self.ended: dict[int, Tensor] = {}  # of those who train now

    def statistics(self, clients: Sequence[int]) -> Tensor | None:
        kept = [self.context.memory.get(client, self.begun.device).get(STATISTICS) for client in clients]
        return torch.stack([self.begun if own is None else own for own in kept])

    def trained(self, clients: Sequence[int], trained: Trained, received: Tensor, round: int) -> Trained:
        """Note the statistics; under secure sums no verdict comes, and they are kept at once."""
        assert trained.statistics is not None
        self.ended = dict(zip(clients, trained.statistics, strict=True))
        if self.context.experiment.privacy.aggregation == "secagg":
            for client, own in self.ended.items():
                self.context.memory.put(client, round, **{STATISTICS: own})
        return trained

    def remembered(self, upload: Upload, taken: bool) -> Mapping[str, Tensor]:
        own = self.ended[upload.client]
        return {STATISTICS: own} if taken and bool(own.isfinite().all()) else {}


class ZeroSumPads(ClientPart):
    """Clients add pads to their weighted updates that cancel over the cohort (the secure report; for comparison only)."""

    def __init__(self, context: Context, stage: str) -> None:
        self.context, self.stage = context, stage
        self.cohort: list[int] = []

    def begin(self, clients: Sequence[int], round: int) -> None:
        self.cohort = list(clients)

    def sent(self, clients: Sequence[int], moved: Tensor, round: int) -> Tensor:
        privacy, weights = self.context.experiment.privacy, self.context.population.weights
        rows = [
            zero_sum.padded(
                int(weights[client]) * row.double(),
                client,
                self.cohort,
                self.stage,
                round,
                offset=privacy.pad_offset,
                scale=privacy.pad_scale,
            )
            for client, row in zip(clients, moved, strict=True)
        ]
        return torch.stack(rows)


class ServerPart:
    """Hooks into the server's side of a round."""

    def begin(self, round: int) -> None:
        """Before a round, when its mask is in use."""

    def broadcast(self, clients: Sequence[int], round: int) -> None:
        """After clients were sent the model."""

    def receive(self, update: Update) -> None:
        """When an update is accepted."""

    def end(self, round: int) -> None:
        """After a round."""

    def measured(self, clients: Sequence[int], round: int) -> None:
        """When clients were sent the model to measure it."""

    def choose(self) -> None:
        """When the round's weights are the best so far."""

    def finish(self) -> None:
        """When the stage is over, and the model has the chosen weights."""


class ServerControl(ServerPart):
    """SCAFFOLD's c, the mean of all clients' control variates."""

    def __init__(self, context: Context, clients: Clients, book: MaskBook, state: ServerState, coding: Coding) -> None:
        self.context, self.clients, self.book, self.state, self.coding = context, clients, book, state, coding

    def broadcast(self, clients: Sequence[int], round: int) -> None:
        state, seed = self.state, self.context.experiment.seed
        if state.control is None:
            state.control = self.book.base.new_zeros(self.book.count)
        key = rounding_key(seed, self.book.stage.name, round, "control")
        parcel = Parcel("control", round, self.book.trains, self.coding, key)
        self.clients.tell(parcel, clients, state.control.float())

    def receive(self, update: Update) -> None:
        assert self.state.control is not None
        change = update.messages["control"].values.to(self.state.control.dtype)
        self.state.control += change / self.context.population.trainers


class ServerStatistics(ServerPart):
    """The server's running statistics: the mean of those that clients sent with accepted updates, weighted as these are."""

    def __init__(self, context: ServerContext, clients: Clients, state: ServerState) -> None:
        self.running, self.clients, self.state = RunningStatistics(context.model), clients, state
        if state.statistics is None:
            state.statistics = self.running.read()
        self.running.write(state.statistics)
        self.total, self.weight, self.before = torch.zeros(()), 0.0, 0

    def begin(self, round: int) -> None:
        assert self.state.statistics is not None
        self.total, self.weight = torch.zeros_like(self.state.statistics, dtype=torch.float64), 0.0
        self.before = self.state.taken

    def broadcast(self, clients: Sequence[int], round: int) -> None:
        assert self.state.statistics is not None
        self.clients.tell(Parcel(STATISTICS, round, self.running.space, EXACT), clients, self.state.statistics.float())

    def receive(self, update: Update) -> None:
        self.total += update.weight * update.messages[STATISTICS].values.to(self.total.device, torch.float64)
        self.weight += update.weight

    def end(self, round: int) -> None:
        """Take over the mean, unless too few replies came for the round to count."""
        assert self.state.statistics is not None
        if self.state.taken > self.before and self.weight:
            self.state.statistics = (self.total / self.weight).to(self.state.statistics.dtype)
            self.running.write(self.state.statistics)

    def measured(self, clients: Sequence[int], round: int) -> None:
        self.broadcast(clients, round)

    def choose(self) -> None:
        self.state.best_statistics = self.state.statistics

    def finish(self) -> None:
        if self.state.best_statistics is not None:
            self.running.write(self.state.best_statistics)


class ServerShares(ServerPart):
    """Before the first round of a stage that blends, every client learns its share of each weight's sensitivity."""

    def __init__(
        self,
        context: Context,
        clients: Clients,
        sums: Sums,
        book: MaskBook,
        state: ServerState,
        introduce: Callable[[Sequence[int], int], None],
    ) -> None:
        self.context, self.clients, self.sums, self.book, self.state = context, clients, sums, book, state
        self.introduce = introduce

    def begin(self, round: int) -> None:
        if self.state.blending:
            return
        everyone = self.context.population.all_trainers
        self.introduce(everyone, round)
        over = self.book.mask or Mask.ones(self.book.space)
        total, _ = self.sums(Shares(round, self.book.sieve or Sieve(), over), everyone)
        self.clients.tell(Parcel("scores", round, over, EXACT), everyone, total.float())
        self.state.blending = True


class ServerMasks(ServerPart):
    """The server learns which masks clients with masks of their own have."""

    def __init__(self, book: MaskBook) -> None:
        self.book = book

    def receive(self, update: Update) -> None:
        self.book.hear(update.client)

    def end(self, round: int) -> None:
        self.book.grow()


def enclosed_parcels(context: Context, book: MaskBook, round: int) -> list[Parcel]:
    """The messages that a client sends with its update, as its parts enclose them."""
    message, parcels = context.experiment.message, list[Parcel]()
    if context.population.settings.correction.kind == "scaffold":
        parcels.append(ControlVariates.parcel(book, round, Coding(message.up, message.group, message.top_k)))
    if changing(context.model, context.recipe) == "federated":
        parcels.append(Parcel(STATISTICS, round, RunningStatistics(context.model).space, EXACT))
    return parcels


def server_parts(
    context: ServerContext,
    clients: Clients,
    sums: Sums,
    book: MaskBook,
    state: ServerState,
    introduce: Callable[[Sequence[int], int], None],
) -> list[ServerPart]:
    """The parts that an experiment asks for where the server is."""
    settings, message = context.population.settings, context.experiment.message
    statistics, down = changing(context.model, context.recipe), Coding(message.down, message.group)
    asked: list[tuple[bool, Callable[[], ServerPart]]] = [
        (book.per_client, lambda: ServerMasks(book)),
        (settings.blend, lambda: ServerShares(context, clients, sums, book, state, introduce)),
        (settings.correction.kind == "scaffold", lambda: ServerControl(context, clients, book, state, down)),
        (statistics == "federated", lambda: ServerStatistics(context, clients, state)),
    ]
    return [make() for wanted, make in asked if wanted]


def client_parts(context: Context, book: MaskBook) -> list[ClientPart]:
    """The parts that an experiment asks for where clients train, in the order in which they act."""
    settings, stage, message = context.population.settings, book.stage.name, context.experiment.message
    statistics, up = changing(context.model, context.recipe), Coding(message.up, message.group, message.top_k)
    asked: list[tuple[bool, Callable[[], ClientPart]]] = [
        (book.per_client, lambda: OwnMasks(context, book)),
        (settings.blend, lambda: Blending(context, stage)),
        (settings.attack is not None, lambda: Hostile(context, stage)),
        (message.error_feedback, lambda: ErrorFeedback(context, stage)),
        (settings.correction.kind == "scaffold", lambda: ControlVariates(context, book, up)),
        (statistics == "federated", lambda: FederatedStatistics(context)),
        (statistics == "local", lambda: OwnStatistics(context)),
        (context.experiment.privacy.aggregation == "zero_sum", lambda: ZeroSumPads(context, stage)),
    ]
    return [make() for wanted, make in asked if wanted]

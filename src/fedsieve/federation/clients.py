"""Clients as the server sees them: what it may ask of them, what they answer, and the replies of one round.

`LocalClients` answers in this process, `RemoteClients` by nodes elsewhere. The server does not know which.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.federation.channel import Parcel, Reply
from fedsieve.federation.executors import Task
from fedsieve.federation.state import Context
from fedsieve.federation.vectors import Span
from fedsieve.model.space import Layout
from fedsieve.privacy.secagg import Arrival
from fedsieve.wire.codec import Coding, Decoded


class NotFinite(FedsieveError):
    """A client's answer is not finite, so that the stage has diverged."""


Contribution = tuple[int, Tensor, int]  # a client, its values (k,), and its n


@dataclass(frozen=True, eq=False)
class Update:
    """An accepted update: how far some values of a client moved, and how much that counts."""

    client: int
    values: Tensor  # (k,), or one for each of `places`
    weight: float
    places: Tensor | None = None  # which of the k values the client holds; None: all
    messages: Mapping[str, Decoded] = field(default_factory=dict)  # all that the client sent, by what it is


@dataclass(frozen=True)
class Refusal:
    """The reason why nothing of a client counts in a round."""

    client: int
    reason: str


@dataclass(frozen=True, eq=False)
class Worked:
    """The local training of some clients, accepted or not."""

    sums: Tensor  # (clients, 3) float64, over examples seen: loss, correct answers where they are counted, and number
    squares: Tensor  # (spans, clients) float64: how far each span of weights went, squared
    seconds: float
    astray: int = 0  # further clients whose numbers are not finite


TrainReply = Worked | Update | Refusal


@dataclass(frozen=True, eq=False)
class SecretSum:
    """The terms of one secure sum: its subject, its integers and its clients."""

    what: str
    round: int
    clients: Sequence[int]
    bits: int
    count: int  # integers that each client adds
    threshold: int
    terms: Mapping[str, Any]  # what a client must know to turn its values into integers
    places: np.ndarray | None = None  # which of its values it adds; None: all


class Exchange(Protocol):
    """Carries the phases of one secure sum."""

    why: Mapping[int, str]  # clients that are known to vanish on the way, and why

    def __call__(self, phase: int, messages: Mapping[int, bytes]) -> Iterable[Arrival]:
        """Bring a phase's messages to the clients, and give their answers."""


class Features(Protocol):
    """Where features and labels are."""

    def features_of(self, client: int) -> tuple[Tensor, Tensor]:
        """The features and labels of the images that a client trains on."""


class Place(Features, Protocol):
    """Where clients compute their answers: this process, for all clients or, at a node, for one."""

    context: Context
    stage: str

    @property
    def task(self) -> Task:
        """The task that all clients of the stage share."""


class Ask(Protocol):
    """A question to clients whose answers are only ever summed: scores, metrics, statistics, losses."""

    @property
    def what(self) -> str:
        """The name of the question, and of the message that answers it."""

    @property
    def round(self) -> int: ...

    @property
    def over(self) -> Layout:
        """The weights that the values of an answer belong to."""

    @property
    def coding(self) -> Coding:
        """The format of the values of an answer."""

    @property
    def continues(self) -> bool:
        """True where clients that fell out of the question before stay out."""

    def terms(self, client: int) -> Mapping[str, Any]:
        """The details that a client elsewhere needs to answer, in JSON's types."""

    def parts(self, place: Place, clients: Sequence[int]) -> Iterator[Contribution]:
        """The answers of `clients`, computed at their place."""


class Clients(Protocol):
    """The clients of one stage."""

    lost: dict[int, str]  # clients that fell out of the last question to all, and why
    waited: float  # simulated seconds until the last reply of the round that was called

    @property
    def at_once(self) -> int | None:
        """The number of clients that train at a time, where memory limits it."""

    def call(self, cohort: Sequence[int], round: int) -> list[int]:
        """Find out which clients of a cohort can be reached in a round. The calls that follow are about this round."""

    def tell(self, parcel: Parcel, clients: Sequence[int], values: Tensor | None = None) -> Decoded:
        """Send the same to each of `clients`, and give it as they receive it."""

    def train(self, cohort: Sequence[int], round: int, lr: float) -> Iterator[TrainReply]:
        """Have the clients of a round train, and give their replies in the order of the cohort.

        Under secure aggregation updates stay with the clients, and only `Worked` and `Refusal` are given.
        """

    def kept(self) -> list[int]:
        """The clients that are asked to take part in the secure sum of this round's updates."""

    def answers(self, ask: Ask, clients: Sequence[int], needed: bool) -> Iterator[Reply]:
        """The answers of `clients`; where all are `needed`, of all that can be had, or the run ends."""

    def keep(self, ask: Ask, clients: Sequence[int], needed: bool) -> list[int]:
        """Have clients keep their answers for a secure sum. Returns the clients that did."""

    def exchange(self, secret: SecretSum) -> Exchange:
        """Start a secure sum of the values that clients have kept."""


# --- the replies of one round ------------------------------------------------------------------------------------------


class Receiver(Protocol):
    """Receives accepted updates, with their further messages."""

    def receive(self, update: Update) -> None: ...


class Replies:
    """Iterates over the accepted updates of a round. Clients train as they are pulled, so memory does not grow."""

    def __init__(self, stream: Iterable[TrainReply], spans: Sequence[Span], receivers: Sequence[Receiver] = ()) -> None:
        self.stream, self.effort, self.receivers = stream, Effort(spans), receivers
        self.count = 0  # how many are in the mean, or would have been if they were enough
        self.taken: list[int] = []  # clients whose updates are in the mean
        self.refused: dict[int, str] = {}  # why others are not

    def __iter__(self) -> Iterator[Update]:
        for reply in self.stream:
            match reply:
                case Worked():
                    self.effort.add(reply)
                case Refusal():
                    self.refused[reply.client] = reply.reason
                case Update():
                    self.taken.append(reply.client)
                    self.count += 1
                    for receiver in self.receivers:
                        receiver.receive(reply)
                    yield reply

    def finish(self) -> None:
        """Pull whatever is left, where updates stay with the clients."""
        for _ in self:
            pass

    def settle(self, taken: Iterable[int], refused: Mapping[int, str]) -> None:
        """Note which clients are in a secure sum of updates, and why others are not."""
        self.taken = list(taken)
        self.count = len(self.taken)
        self.refused |= refused

    def waste(self, reason: str) -> list[int]:
        """Refuse all that were taken, after all; gives these clients."""
        wasted, self.taken = self.taken, []
        self.refused |= dict.fromkeys(wasted, reason)
        return wasted


class Effort:
    """Sums over the local training of one round, without clients whose numbers are not finite."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.trained = self.astray = 0
        self.loss = self.images = self.seconds = self.drift = 0.0
        self.correct: float | None = None  # where it is counted
        self.drift_by_block: dict[str, float] = {}

    def add(self, worked: Worked) -> None:
        """Add the loss, correct answers, images and drift of some clients.

        A client whose numbers are not finite is left out; its message will be refused.
        """
        self.seconds += worked.seconds
        self.astray += worked.astray
        if not len(worked.sums):
            return
        sums, squares = worked.sums.cpu(), worked.squares.cpu()
        sound = squares.sum(0).isfinite() & sums.isfinite().all(1)
        squares = squares[:, sound]
        loss, *correct, images = sums[sound].sum(0).tolist()
        self.loss, self.images = self.loss + loss, self.images + images
        self.correct = (self.correct or 0.0) + correct[0] if correct else None
        drift = squares.sum(0).sqrt().sum().item()
        by_block: dict[str, Tensor] = {}
        for (name, _, _), part in zip(self.spans, squares, strict=True):
            by_block[name] = by_block[name] + part if name in by_block else part
        distances = torch.stack([part.sqrt().sum() for part in by_block.values()]).tolist()
        for name, distance in zip(by_block, distances, strict=True):
            self.drift_by_block[name] = self.drift_by_block.get(name, 0.0) + distance
        self.drift += drift
        self.trained += squares.shape[1]
        self.astray += len(sums) - squares.shape[1]

    @property
    def mean_drift(self) -> float | None:
        """The mean L2 distance between a client's weights and those it received."""
        return self.drift / self.trained if self.trained else None

    def measured(self) -> dict[str, Any]:
        """The fields of a round's record that clients' training fills."""
        fields: dict[str, Any] = {}
        if self.images:
            fields |= {
                "train_loss": self.loss / self.images,
                "train_accuracy": None if self.correct is None else self.correct / self.images,
                "images_per_second": self.images / max(self.seconds, 1e-9),
            }
        if self.trained:
            by_block = {name: value / self.trained for name, value in self.drift_by_block.items()}
            fields |= {"drift": self.mean_drift, "drift_by_block": by_block}
        return fields

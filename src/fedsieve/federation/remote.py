"""Clients that are nodes elsewhere: the server's questions travel to them in envelopes, and their answers come back.

A `Node` works with the same codec, draws and functions as a run in one process, so that both give the same weights.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fedsieve.errors import FedsieveError
from fedsieve.federation.channel import FP64, Parcel, Reply, Tally
from fedsieve.federation.clients import Ask, Exchange, Refusal, SecretSum, TrainReply, Update, Worked
from fedsieve.federation.maskbook import MaskBook
from fedsieve.federation.parts import enclosed_parcels
from fedsieve.federation.registry import Registry
from fedsieve.federation.secure import ASTRAY
from fedsieve.federation.state import ServerContext
from fedsieve.federation.vectors import Span
from fedsieve.model.space import ParamSpace
from fedsieve.privacy.secagg import Arrival
from fedsieve.train.objectives import PLAIN, Recipe
from fedsieve.wire.codec import Coding, Decoded, MessageError
from fedsieve.wire.envelope import unwrap, wrap

ENVELOPE = "envelope"  # what the ledger calls the bytes around messages
SUM = "sum"  # a message of a secure sum, and the question that it comes with
PROBLEMS = ("memory", "run", ASTRAY)  # reasons a node may give in a word; others it gives in a sentence
Answer = dict[str, bytes] | MessageError  # messages by what they are


def effort_space(spans: Sequence[Span], recipe: Recipe = PLAIN) -> ParamSpace:
    """The layout of a node's report on its training: loss, correct answers and images, and squared distances by span."""
    return ParamSpace(("sums", "squares"), ((recipe.training_columns,), (len(spans),)))


def personal_space(methods: int) -> ParamSpace:
    """The layout of a node's report on its personal models: the accuracy of each, -1 where nothing could be tested."""
    return ParamSpace(("accuracy",), ((methods,),))


class Mailbox:
    """Envelopes to the nodes of one stage, and their answers.

    Messages wait for the next question to their client, and travel with it. The mailbox remembers which version of each
    node's memory is the valid one; a question that was not answered changes nothing.
    """

    def __init__(self, registry: Registry, tally: Tally, memory: dict[str, int], book: MaskBook | None) -> None:
        self.registry, self.tally, self.memory, self.book = registry, tally, memory, book
        self.waiting: dict[int, list[tuple[dict[str, Any], bytes | memoryview]]] = {}
        self.sizes: dict[int, int] = {}  # of the last answers

    def put(self, client: int, about: Mapping[str, Any], message: bytes | memoryview) -> None:
        """Have a message travel with the next question to a client."""
        self.waiting.setdefault(client, []).append((dict(about), message))

    def ask(self, what: str, round: int, terms: Mapping[int, Mapping[str, Any]]) -> dict[int, Answer]:
        """Ask the clients of `terms` something, and give the messages of their answers, or why there are none."""
        envelopes, self.sizes = {}, {}
        for client, said in terms.items():
            parts = self.waiting.pop(client, [])
            head = {**self._address(what, client, round), "memory": self.memory.get(str(client), 0)}
            head |= {"parts": [about for about, _ in parts], **said}
            envelopes[client] = wrap(head, [message for _, message in parts])
            for about, message in parts:
                if about["what"] != SUM:  # which whoever leads the sum counts
                    self.tally.note(round, client, "down", about["what"], len(message))
            around = len(envelopes[client]) - sum(len(message) for _, message in parts)
            self.tally.note(round, client, "down", ENVELOPE, around)
        for client in self.waiting:  # is not asked, so what it was to hear is dropped
            self._doubt(client)
        self.waiting.clear()
        answers = self.registry.ask(envelopes)
        return {client: self._opened(client, what, round, answers[client]) for client in terms}

    def take(self, parcel: Parcel, client: int, answer: Answer, device: torch.device | str) -> Reply:
        """One message of an answer, decoded and counted."""
        reply: Reply
        if isinstance(answer, MessageError):
            reply, size = answer, self.sizes.pop(client, 0)
        else:
            size = len(answer.get(parcel.what, b""))
            try:
                if parcel.what not in answer:
                    raise MessageError("missing", f"site {client} did not send its {parcel.what}")
                reply = parcel.open(answer[parcel.what], client, device)
            except MessageError as error:
                reply = error
        status = reply.reason if isinstance(reply, MessageError) else "ok"
        self.tally.note(parcel.round, client, "up", parcel.what, size, status)
        return reply

    def refuse(self, client: int) -> None:
        """Refuse the last update of a node: its valid memory is that of a client whose update was refused."""
        self.memory[str(client)] = -abs(self.memory[str(client)])

    def _address(self, what: str, client: int, round: int) -> dict[str, Any]:
        return {"run": self.registry.run, "client": client, "ask": what, "stage": self.tally.stage, "round": round}

    def _opened(self, client: int, what: str, round: int, answer: bytes | MessageError) -> Answer:
        """The messages in an answer. Updates what the server knows about the node."""
        try:
            if isinstance(answer, MessageError):
                raise answer
            self.sizes[client] = len(answer)
            head, messages = unwrap(answer)
            if problem := head.get("problem"):
                self._hear(client, str(head.get("kind")), str(problem))
            wanted = self._address(what, client, round)
            if {key: head.get(key) for key in wanted} != wanted or type(head.get("memory")) is not int:
                raise MessageError("head", f"site {client} answered something else than it was asked")
            parts = head.get("parts")
            if not isinstance(parts, list) or len(parts) != len(messages):
                raise MessageError("head", f"site {client} sent messages that it does not name")
        except MessageError as error:
            self._doubt(client)
            return error
        self.tally.note(round, client, "up", ENVELOPE, len(answer) - sum(map(len, messages)))
        self.memory[str(client)] = head["memory"]
        if self.book:
            self.book.confirm(client)
        return dict(zip(map(str, parts), messages, strict=True))

    def _doubt(self, client: int) -> None:
        if self.book:
            self.book.doubt(client)

    def _hear(self, client: int, kind: str, problem: str) -> None:
        """Handle a node's problem: it could not answer."""
        self.registry.say(f"site {client}: {problem}")
        if kind in ("memory", "run"):  # it has lost what it knew: start over with it
            self.memory.pop(str(client), None)
            if self.book:
                self.book.forget(client)
        if kind == "run":
            self.registry.forget(client)
        raise MessageError(kind if kind in PROBLEMS else "site", problem)


class RemoteClients:
    """The clients of one stage, each at a node elsewhere."""

    at_once = None

    def __init__(
        self,
        context: ServerContext,
        registry: Registry,
        stage: str,
        memory: dict[str, int],
        book: MaskBook | None = None,
    ) -> None:
        """`memory` holds the valid version of each node's memory; without a `book`, clients only answer questions."""
        self.context, self.registry, self.book, self.people = context, registry, book, context.population
        self.device = context.train.labels.device
        self.mailbox = Mailbox(registry, Tally(context.ledger, stage), memory, book)
        self.tally, self.stage = self.mailbox.tally, stage
        message = context.experiment.message
        self.up = Coding(message.up, message.group, message.top_k)
        self.secret = context.experiment.privacy.aggregation == "secagg"
        self.lost: dict[int, str] = {}
        self.waited = 0.0
        self._here: list[int] = []  # clients of this round that can be reached
        self._kept: list[int] = []  # clients that keep an update for a secure sum

    # --- messages down -----------------------------------------------------------------------------------------------

    def call(self, cohort: Sequence[int], round: int) -> list[int]:
        """Find out which clients can be reached. Other failures show when answers are due."""
        here = self.registry.here()
        self._here = [client for client in cohort if client in here]
        return self._here

    def tell(self, parcel: Parcel, clients: Sequence[int], values: torch.Tensor | None = None) -> Decoded:
        """Have the same travel to each of `clients`, and give it as they will receive it."""
        message = parcel.seal(values)
        for client in clients:
            self.mailbox.put(client, {"what": parcel.what, "within": parcel.within and parcel.within.id}, message)
        return parcel.open(message, device=self.device)

    def _terms(self, client: int) -> Mapping[str, Any]:
        return self.book.terms(client) if self.book else {}

    # --- training ----------------------------------------------------------------------------------------------------

    def train(self, cohort: Sequence[int], round: int, lr: float) -> Iterator[TrainReply]:
        """Have nodes train, and give the replies of those that answer in time."""
        gone = [client for client in cohort if client not in self._here]
        self.tally.silence("model", gone, round, "down", "unavailable")
        yield from (Refusal(client, "unavailable") for client in gone)
        clock = time.perf_counter()
        answers = self.mailbox.ask("train", round, {client: {**self._terms(client), "lr": lr} for client in self._here})
        yield Worked(torch.empty(0, 3), torch.empty(0, 0), time.perf_counter() - clock)
        if self.secret:
            failed = {client: answer.reason for client, answer in answers.items() if isinstance(answer, MessageError)}
            for client, reason in failed.items():
                self.tally.silence("update", [client], round, "up", reason)
                yield Refusal(client, reason)
            self._kept = [client for client in self._here if client not in failed]
            return
        for client in self._here:
            yield from self._taken(client, round, answers.pop(client))

    def _taken(self, client: int, round: int, answer: Answer) -> Iterator[TrainReply]:
        """The training of a node, and its update if that is sound. All of its messages count, or none."""
        book = self.book
        assert book is not None
        if not isinstance(answer, MessageError):
            yield self._worked(client, round, answer)
        places: torch.Tensor | None = None
        if book.encloses(client):  # its mask may be any
            parcels = [Parcel("update", round, book.space, self.up, enclose=True)]
        else:
            ((_, over, places),) = book.groups([client])
            parcels = [Parcel("update", round, over, self.up)]
        if not isinstance(answer, MessageError):
            parcels += enclosed_parcels(self.context, book, round)
        replies = {parcel.what: self.mailbox.take(parcel, client, answer, self.device) for parcel in parcels}
        if errors := [reply for reply in replies.values() if isinstance(reply, MessageError)]:
            if not isinstance(answer, MessageError):
                self.mailbox.refuse(client)
            yield Refusal(client, errors[0].reason)
            return
        messages = {what: reply for what, reply in replies.items() if isinstance(reply, Decoded)}
        update = messages["update"]
        if update.mask is not None:
            book.keep_own(client, update.mask, round)
            places = update.mask.indices().to(self.device)
        weight = float(update.n) if self.people.settings.weighting == "examples" else 1.0
        yield Update(client, update.values.to(book.base.dtype), weight, places, messages)

    def _worked(self, client: int, round: int, answer: Answer) -> Worked:
        """The training of a node, without numbers where they are not finite."""
        assert self.book is not None
        over = effort_space(self.book.spans, self.context.recipe)
        reply = self.mailbox.take(Parcel("effort", round, over, FP64), client, answer, self.device)
        if isinstance(reply, MessageError):
            return Worked(torch.empty(0, 3), torch.empty(0, 0), 0.0, int(reply.reason == ASTRAY))
        return Worked(over.view(reply.values, "sums")[None], over.view(reply.values, "squares")[:, None], 0.0)

    # --- questions ---------------------------------------------------------------------------------------------------

    def answers(self, ask: Ask, clients: Sequence[int], needed: bool) -> Iterator[Reply]:
        """The answers of all that give one; the ledger says why others do not. Too few of those needed end the run."""
        parcel = Parcel(ask.what, ask.round, ask.over, ask.coding)
        replies = {
            client: self.mailbox.take(parcel, client, answer, self.device)
            for client, answer in self._ask(ask, clients, needed).items()
        }
        if needed:
            self.lost |= {client: reply.reason for client, reply in replies.items() if isinstance(reply, MessageError)}
            self._check_enough(ask.what, clients)
        yield from (reply for reply in replies.values() if not isinstance(reply, MessageError))

    def keep(self, ask: Ask, clients: Sequence[int], needed: bool) -> list[int]:
        """Have nodes keep their answers, and give those that did."""
        answers = self._ask(ask, clients, needed)
        failed = {client: answer.reason for client, answer in answers.items() if isinstance(answer, MessageError)}
        for client, reason in failed.items():
            self.tally.silence(ask.what, [client], ask.round, "up", reason)
        if needed:
            self.lost |= failed
            self._check_enough(ask.what, clients)
        return [client for client in answers if client not in failed]

    def _ask(self, ask: Ask, clients: Sequence[int], needed: bool) -> dict[int, Answer]:
        """Ask nodes; of those needed, all that can be reached and did not fall out before."""
        if needed:
            clients = self.reached(ask.what, clients, ask.round, again=ask.continues)
        terms = {client: {**self._terms(client), **ask.terms(client)} for client in clients}
        return self.mailbox.ask(ask.what, ask.round, terms)

    def reached(self, what: str, clients: Sequence[int], round: int, again: bool = False) -> list[int]:
        """Those of `clients` that can be reached; `again`, without those that fell out of the question before."""
        if not again:
            self.lost = {}
        here = self.registry.here()
        gone = [client for client in clients if client not in here and client not in self.lost]
        self.tally.silence(what, gone, round, "down", "unavailable")
        self.lost |= dict.fromkeys(gone, "unavailable")
        return [client for client in clients if client not in self.lost]

    def _check_enough(self, what: str, clients: Sequence[int]) -> None:
        count, minimum = len(clients) - len(self.lost), self.people.settings.minimum_replies
        if count < minimum:
            raise FedsieveError(
                f'stage "{self.stage}": {count} of {len(clients)} sites sent their {what}, and '
                f"federation.minimum_replies is {minimum}. The run can go on from its last checkpoint when they are back",
                1,
            )

    # --- secure sums -------------------------------------------------------------------------------------------------

    def kept(self) -> list[int]:
        """The nodes that have trained."""
        return self._kept

    def exchange(self, secret: SecretSum) -> Exchange:
        """A secure sum among nodes."""
        return RemoteExchange(self.mailbox, secret)


class RemoteExchange:
    """One secure sum among nodes."""

    def __init__(self, mailbox: Mailbox, secret: SecretSum) -> None:
        self.mailbox, self.secret = mailbox, secret
        self.why: Mapping[int, str] = {}

    def __call__(self, phase: int, messages: Mapping[int, bytes]) -> Iterable[Arrival]:
        """Bring a phase's messages to the nodes, and give their answers."""
        mailbox, secret = self.mailbox, self.secret
        for client, message in messages.items():
            mailbox.put(client, {"what": SUM}, message)
        terms = {**secret.terms, "sum": secret.what, "phase": phase}
        for client, answer in mailbox.ask(SUM, secret.round, dict.fromkeys(messages, terms)).items():
            if isinstance(answer, MessageError):
                yield client, mailbox.sizes.pop(client, 0), answer
            else:
                found = answer.get(SUM, b"")
                yield client, len(found), found

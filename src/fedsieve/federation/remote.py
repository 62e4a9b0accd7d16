"""The server's half of a stage whose clients are elsewhere: the round loop with envelopes where it had clients at hand.

What it sends, a `Site` answers. Both halves work with the same codec, draws and functions as a run in one process, so
that all three give the same weights.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.federation.channel import EVERYONE, NO_VALUES, Channel, Part, Reply, Told
from fedsieve.federation.rounds import FP64, Effort, Federated, Span
from fedsieve.federation.secure import ASTRAY, Losses
from fedsieve.federation.sites import Sites
from fedsieve.federation.state import Context, ServerState
from fedsieve.federation.sums import Update
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.privacy.secagg import Arrival, Exchange
from fedsieve.wire.codec import Coding, Message, MessageError, decode, encode
from fedsieve.wire.envelope import unwrap, wrap

ENVELOPE = "envelope"  # what the ledger calls the bytes around messages
SUM = "sum"  # a message of a secure sum, and the question that it comes with
PROBLEMS = ("memory", "run", ASTRAY)  # what may keep a site from answering, beside what it says in words
Answer = dict[str, bytes] | MessageError  # messages by what they are


def effort_space(spans: Sequence[Span]) -> ParamSpace:
    """What a client says of its training: loss, correct answers and images, and squared distances by span."""
    return ParamSpace(("sums", "squares"), ((3,), (len(spans),)))


def personal_space(methods: int) -> ParamSpace:
    """What a client says of its personal models: the accuracy of each, -1 where nothing could be tested."""
    return ParamSpace(("accuracy",), ((methods,),))


class RemoteChannel(Channel):
    """The wire to sites. What goes down waits for the next question to its client, and travels with it.

    Between questions the server remembers what each site knows and which version of its memory is the valid one
    (`ServerState.known` and `.memory`); a question that was not answered changes neither.
    """

    def __init__(self, context: Context, stage: str, state: ServerState, device: torch.device | str) -> None:
        super().__init__(context.ledger, context.experiment.seed, stage, device, context.experiment.privacy)
        assert context.sites is not None
        self.sites: Sites = context.sites
        self.state, self.say = state, context.say
        self.minimum = context.population.settings.minimum_replies
        self.sure = dict(state.known)  # what sites have shown to know
        self.waiting: dict[int, list[tuple[dict[str, Any], bytes]]] = {}
        self.sizes: dict[int, int] = {}  # of the last answers

    def down(
        self,
        what: str,
        clients: Sequence[int],
        round: int,
        over: Mask | ParamSpace,
        values: Tensor | None = None,
        coding: Coding = NO_VALUES,
        *,
        key: int = 0,
        enclose: bool = False,
        within: Mask | None = None,
    ) -> Message:
        """Have the same sent to each of `clients`, and give it as they will receive it."""
        message = encode(values, coding, over, round=round, client=EVERYONE, key=key, enclose=enclose, within=within)
        about = {"what": what, "within": within and within.id}
        for client in clients:
            self.waiting.setdefault(client, []).append((about, message))
        expected = over.space if enclose and isinstance(over, Mask) else over
        return decode(message, coding, expected, enclosed=enclose, within=within, round=round, device=self.device)

    def collect(
        self,
        what: str,
        clients: Sequence[int],
        round: int,
        over: Mask | ParamSpace,
        coding: Coding,
        parts: Iterable[Part],
        fates: Mapping[int, str] | None,
        told: Told,
    ) -> Iterator[Reply]:
        """What each site makes of its own images; a site that falls out is left out, and the ledger says why.

        Without `fates`, all are needed as far as they can be had: too few end the run.
        """
        ask = self.reached if fates is None else self.request
        answers = ask(what, clients, round, told)
        replies = {client: self.take(what, client, round, over, coding, answer) for client, answer in answers.items()}
        if fates is None:
            self.lost |= {client: reply.reason for client, reply in replies.items() if isinstance(reply, MessageError)}
            self._check_enough(what, len(clients) - len(self.lost), len(clients))
        yield from (reply for reply in replies.values() if not isinstance(reply, MessageError))

    def gathered(
        self,
        what: str,
        clients: Sequence[int],
        round: int,
        parts: Iterable[Part],
        fates: Mapping[int, str] | None,
        told: Told,
    ) -> Iterator[Part]:
        ask = self.reached if fates is None else self.request
        answers = ask(what, clients, round, told)
        gone = {client: answer.reason for client, answer in answers.items() if isinstance(answer, MessageError)}
        for client, reason in gone.items():
            self.silence(what, [client], round, "up", reason)
        if fates is None:
            self.lost |= gone
            self._check_enough(what, len(clients) - len(self.lost), len(clients))
        yield from ((client, torch.empty(0), 0) for client in answers if client not in gone)

    def secret_exchange(self, what: str, round: int, terms: Mapping[str, Any]) -> Exchange:
        def exchange(phase: int, messages: Mapping[int, bytes]) -> Iterator[Arrival]:
            for client, message in messages.items():
                self.waiting[client] = [({"what": SUM}, message)]
            told = {**terms, "sum": what, "phase": phase}
            for client, answer in self.request(SUM, list(messages), round, lambda _: told).items():
                if isinstance(answer, MessageError):
                    yield client, self.sizes.pop(client, 0), answer
                else:
                    found = answer.get(SUM, b"")
                    yield client, len(found), found

        return exchange

    def reached(self, what: str, clients: Sequence[int], round: int, told: Told) -> dict[int, Answer]:
        """The answers of those who can be reached, and did not fall out before."""
        if not told(clients[0]).get("number"):  # otherwise a later round of the same calibration
            self.lost = {}
        here = self.sites.here()
        gone = [client for client in clients if client not in here and client not in self.lost]
        self.silence(what, gone, round, "down", "unavailable")
        self.lost |= dict.fromkeys(gone, "unavailable")
        return self.request(what, [client for client in clients if client not in self.lost], round, told)

    def _check_enough(self, what: str, count: int, asked: int) -> None:
        if count < self.minimum:
            raise FedsieveError(
                f'stage "{self.stage}": {count} of {asked} sites sent their {what}, and '
                f"federation.minimum_replies is {self.minimum}. The run can go on from its last checkpoint when they are back",
                1,
            )

    def request(self, ask: str, clients: Sequence[int], round: int, told: Told) -> dict[int, Answer]:
        """Ask sites something, and give the messages of their answers, or why there are none."""
        envelopes, self.sizes = {}, {}
        for client in clients:
            parts = self.waiting.pop(client, [])
            head = {"run": self.sites.run, "client": client, "ask": ask, "stage": self.stage, "round": round}
            head |= {"memory": self.state.memory.get(str(client), 0), "parts": [about for about, _ in parts]}
            envelopes[client] = wrap({**head, **told(client)}, [message for _, message in parts])
            for about, message in parts:
                if about["what"] != SUM:  # which whoever leads the sum counts
                    self.note(round, client, "down", about["what"], len(message))
            around = len(envelopes[client]) - sum(len(message) for _, message in parts)
            self.note(round, client, "down", ENVELOPE, around)
        self.waiting.clear()
        answers = self.sites.ask(envelopes)
        return {client: self._opened(client, ask, round, answers[client]) for client in clients}

    def take(
        self,
        what: str,
        client: int,
        round: int,
        over: Mask | ParamSpace,
        coding: Coding,
        answer: Answer,
        enclose: bool = False,
    ) -> Reply:
        """One message of an answer, decoded and counted."""
        reply: Reply
        if isinstance(answer, MessageError):
            reply, size = answer, self.sizes.pop(client, 0)
        else:
            size = len(answer.get(what, b""))
            expected = over.space if enclose and isinstance(over, Mask) else over
            try:
                if what not in answer:
                    raise MessageError("missing", f"site {client} did not send its {what}")
                reply = decode(
                    answer[what], coding, expected, enclosed=enclose, round=round, client=client, device=self.device
                )
            except MessageError as error:
                reply = error
        self.note(round, client, "up", what, size, reply.reason if isinstance(reply, MessageError) else "ok")
        return reply

    def refuse(self, client: int) -> None:
        """What a site has just sent is not taken: its memory is that of a client whose update was refused."""
        self.state.memory[str(client)] = -abs(self.state.memory[str(client)])

    def _opened(self, client: int, ask: str, round: int, answer: bytes | MessageError) -> Answer:
        """The messages in an answer, and what it means for what the server knows of the site."""
        state, name = self.state, str(client)
        try:
            if isinstance(answer, MessageError):
                raise answer
            self.sizes[client] = len(answer)
            head, messages = unwrap(answer)
            if problem := head.get("problem"):
                self._hear(client, str(head.get("kind")), str(problem))
            wanted = {"run": self.sites.run, "client": client, "ask": ask, "stage": self.stage, "round": round}
            if {key: head.get(key) for key in wanted} != wanted or type(head.get("memory")) is not int:
                raise MessageError("head", f"site {client} answered something else than it was asked")
            parts = head.get("parts")
            if not isinstance(parts, list) or len(parts) != len(messages):
                raise MessageError("head", f"site {client} sent messages that it does not name")
        except MessageError as error:
            if name in self.sure:
                state.known[name] = self.sure[name]
            else:
                state.known.pop(name, None)
            state.ahead = [other for other in state.ahead if other != client]
            return error
        self.note(round, client, "up", ENVELOPE, len(answer) - sum(map(len, messages)))
        state.memory[name] = head["memory"]
        if name in state.known:
            self.sure[name] = state.known[name]
        return dict(zip(map(str, parts), messages, strict=True))

    def _hear(self, client: int, kind: str, problem: str) -> None:
        """A site could not do what it was asked."""
        self.say(f"site {client}: {problem}")
        if kind in ("memory", "run"):  # it has lost what it knew: begin anew with it
            self.sure.pop(str(client), None)
            self.state.memory.pop(str(client), None)
            self.state.given = [other for other in self.state.given if other != client]
        if kind == "run":
            self.sites.forget(client)
        raise MessageError(kind if kind in PROBLEMS else "site", problem)


class RemoteRounds(Federated):
    """One stage across sites."""

    channel: RemoteChannel

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.channel = RemoteChannel(self.context, self.stage.name, self.state, self.device)

    def _fates(self, clients: Sequence[int], number: int) -> dict[int, str]:
        """Who can be reached. What else becomes of a client is seen when it answers, or does not."""
        here = self.channel.sites.here()
        return {client: "ok" if client in here else "unavailable" for client in clients}

    def _told(self, client: int) -> dict[str, Any]:
        """What a site must know beside its messages: which masks are in use, and whether the server has its own."""
        tier = None if self.own_masks else self._tier(client)
        masks = {"moved": self.moved, "mask": self.mask, "tier": tier}
        known = {name: mask and mask.id for name, mask in masks.items()}
        return {**known, "generation": self.state.generation, "given": client in self.state.given}

    def _aggregate(
        self,
        trains: list[int],
        reached: list[int],
        rate: float,
        effort: Effort,
        fates: Mapping[int, str],
        lost: Losses,
        refused: dict[int, str],
    ) -> tuple[Tensor | None, int]:
        if self.mode == "plain":
            return self._mean(self._updates(trains, rate, effort, refused), len(trains))
        answers = self._trained(trains, rate, effort)  # updates stay where they are until they are summed
        gone = {client: answer.reason for client, answer in answers.items() if isinstance(answer, MessageError)}
        for client, reason in gone.items():
            self.channel.silence("update", [client], self.state.round, "up", reason)
        refused |= gone
        return self._secure_mean(iter(()), [client for client in trains if client not in gone], {}, refused)

    def _trained(self, clients: list[int], rate: float, effort: Effort) -> dict[int, Answer]:
        """What sites answer when they have trained."""
        clock, number = time.perf_counter(), self.state.round
        answers = self.channel.request("train", clients, number, lambda client: {**self._told(client), "lr": rate})
        effort.seconds += time.perf_counter() - clock
        return answers

    def _updates(self, clients: list[int], rate: float, effort: Effort, refused: dict[int, str]) -> Iterator[Update]:
        """The sound updates of all sites that answered in time, in the order of the clients."""
        answers, number, state = self._trained(clients, rate, effort), self.state.round, self.state
        for client in clients:
            answer = answers.pop(client)
            over, places = next((over, places) for _, over, places in self._groups([client]))
            enclose = self.own_masks and client not in state.given
            self._take_effort(effort, client, answer)
            change = self._take_control(client, answer)
            reply = self.channel.take("update", client, number, over, self.up, answer, enclose)
            for part in (change, reply):
                if isinstance(part, MessageError):
                    refused[client] = part.reason
            if client in refused or isinstance(reply, MessageError):
                if not isinstance(answer, MessageError):
                    self.channel.refuse(client)
                continue
            if reply.mask is not None:
                self._keep_own_mask(client, reply.mask)
                places = reply.mask.indices().to(self.device)
            if isinstance(change, Message):
                assert state.control is not None
                state.control += change.values.to(self.theta.dtype) / self.population.trainers
            weight = float(reply.n) if self.settings.weighting == "examples" else 1.0
            yield Update(client, reply.values.to(self.theta.dtype), weight, places)
        if self.own_masks:
            self._grow([client for client in clients if client not in refused])

    def _groups(self, clients: list[int]) -> Iterator[tuple[list[int], Mask | ParamSpace, Tensor | None]]:
        """As in one process; the mask that a site has made, and not sent yet, is any."""
        if self.own_masks and clients[0] not in self.state.given:
            yield clients, self.space, None
        else:
            yield from super()._groups(clients)

    def _take_effort(self, effort: Effort, client: int, answer: Answer) -> None:
        """Count what a client did; one that went astray says nothing finite."""
        if isinstance(answer, MessageError):
            return
        over = effort_space(self._spans)
        reply = self.channel.take("effort", client, self.state.round, over, FP64, answer)
        if isinstance(reply, MessageError):
            effort.astray += reply.reason == "not finite"
            return
        effort.add(over.view(reply.values, "sums")[None], self._spans, over.view(reply.values, "squares")[:, None])

    def _take_control(self, client: int, answer: Answer) -> Reply | None:
        """SCAFFOLD: the change of a client's control variate. It counts with the update or not at all."""
        if self.state.control is None or isinstance(answer, MessageError):
            return None
        return self.channel.take("control", client, self.state.round, self.mask or self.space, self.up, answer)

    def _keep_own_mask(self, client: int, mask: Mask) -> None:
        """The server's copy of a mask that a site made for itself."""
        bits = torch.from_numpy(mask.bits.copy())
        self.context.store.put(client, self.state.round, **{f"{self.stage.name}.mask": bits})
        self.context.keep_mask(f"client-{client}", mask)
        self.state.given.append(client)

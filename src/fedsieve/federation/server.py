"""The server of a federated stage: choose a cohort, broadcast, have clients train, aggregate, step, record.

`ServerState` goes in and comes out of every round, and every draw has an address, so that a stage continued from a saved
state repeats exactly what it would have done. `Clients` knows where clients run. Optional features are `ServerPart`s.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from fedsieve.config import Stage
from fedsieve.errors import Diverged, FedsieveError
from fedsieve.federation.asks import Metrics, Scores
from fedsieve.federation.calibrate import Calibration, sieve_at
from fedsieve.federation.channel import EXACT, Parcel, Tally, rounding_key
from fedsieve.federation.clients import Clients, NotFinite, Replies
from fedsieve.federation.maskbook import MaskBook
from fedsieve.federation.means import choose_mean
from fedsieve.federation.parts import ServerPart, server_parts
from fedsieve.federation.server_optimizers import after_new_mask, foreign_step, fresh, server_step
from fedsieve.federation.state import ServerContext, ServerState
from fedsieve.federation.sums import Sums
from fedsieve.federation.vectors import pieces
from fedsieve.mask.mask import Mask
from fedsieve.model.space import Layout
from fedsieve.train.loop import Tick
from fedsieve.train.record import Record, merit
from fedsieve.train.schedule import learning_rate
from fedsieve.train.sieve import Measure
from fedsieve.wire.codec import Coding

TOO_FEW = "too few replies"


class Rounds:
    """One stage across clients. `rounds()` trains until it is done, yielding after every round."""

    def __init__(
        self,
        context: ServerContext,
        stage: Stage,
        book: MaskBook,
        clients: Clients,
        state: ServerState,
        validate: Callable[[], dict[str, float]] = dict,
    ) -> None:
        assert context.experiment.federation is not None
        self.context, self.stage, self.theta, self.book, self.clients = context, stage, book.theta, book, clients
        self.state, self.validate, self.settings = state, validate, context.experiment.federation
        self.population, self.seed = context.population, context.experiment.seed
        self.before = context.changed_weights()  # what no device has from the beginning
        self.down = Coding(context.experiment.message.down, context.experiment.message.group)
        self.tally = Tally(context.ledger, stage.name)
        self.sums = Sums(context, clients, stage.name, book.device)
        self.mean = choose_mean(context, clients, book, self.sums.secure, self.tally)
        self.parts: list[ServerPart] = server_parts(context, clients, self.sums, book, state, self.introduce)
        self.announced: Layout | None = None  # the weights for which the expected noise was announced last
        state.complete(book.base)

    def rounds(self) -> Iterator[Tick]:
        """Rounds until the stage is over. At the end the model has the chosen round's weights."""
        state = self.state
        while not state.done:
            record = self.advance()
            self.choose(record, state.round == self.stage.length)
            if state.done:
                self.show(state.theta if state.best is None else state.best)
                for part in self.parts:
                    part.finish()
            yield Tick(state.round, self.stage.length, record)

    def advance(self) -> Record:
        """One more round, with its mask, and its evaluation where one is due."""
        state, clock, sent = self.state, time.perf_counter(), dict(self.context.ledger.total)
        self.prepare()
        record = self.round()
        state.round += 1
        if state.round == self.stage.length or state.round % self.settings.evaluate_every == 0:
            if self.settings.client_validation:
                record.note(**self.measure(record))
            self.show(state.theta)
            record.note(**self.validate())
        total = self.context.ledger.total  # with what was sent before the round, and after it
        record.note(**{f"bytes_{way}": size - sent[way] for way, size in total.items()})
        record.seconds = time.perf_counter() - clock
        state.seconds += record.seconds
        self._check(record)
        return record

    def prepare(self) -> None:
        """Make the mask of the coming round, and tell clients what they must know before it."""
        if self.book.due(self.state.round):
            self.calibrate()
        self._announce()
        for part in self.parts:
            part.begin(self.state.round)

    def round(self) -> Record:
        """One communication round."""
        state, stage, number = self.state, self.stage, self.state.round
        cohort = self.population.cohort(stage.name, number).tolist()
        reached = self.clients.call(cohort, number)
        self.broadcast(reached, number)
        for part in self.parts:
            part.broadcast(reached, number)
        rate = learning_rate(number, stage.length, stage.optimizer.lr, stage.schedule, stage.warmup_rounds)
        replies = Replies(self.clients.train(cohort, number, rate), self.book.spans, self.parts)
        mean = self.mean(replies, number)
        if replies.effort.astray and not replies.effort.trained:
            self._diverged(number + 1)
        enough = replies.count >= self.settings.minimum_replies or self.context.account is not None
        if mean is not None and enough:
            state.taken += 1
            self.step(mean)
        else:
            self.tally.silence("update", replies.waste(TOO_FEW), number, "up", TOO_FEW)
        for part in self.parts:
            part.end(number)
        state.clients_at_once = self.clients.at_once
        return self.record(replies, rate, len(cohort))

    def broadcast(self, reached: Sequence[int], round: int) -> None:
        """Bring clients up to date, and lay the server's weights over the model as they receive them.

        `round` is the one that the bytes are counted in.
        """
        self.introduce(reached, round)
        book, key = self.book, rounding_key(self.seed, self.stage.name, self.state.round, "down")
        lacking = [client for client in reached if client not in book.state.ahead]
        parcel = Parcel("model", round, book.moved or book.space, self.down, key)
        try:
            message = self.clients.tell(parcel, lacking, book.outgoing(self.state.theta, self.down))
        except FedsieveError:  # not finite, or too large for the format
            self._diverged(self.state.round + 1)
        book.lay(message.values, self.down, self.theta)
        book.state.ahead = []

    def introduce(self, clients: Sequence[int], round: int) -> None:
        """Send masks, and the weights that earlier stages changed, to clients that lack them."""
        self._tell_before(clients, round)
        for parcel, members in self.book.introductions(clients, round):
            self.clients.tell(parcel, members)

    def step(self, mean: Tensor) -> None:
        """Move the server by the mean update."""
        state, server, support = self.state, self.settings.server, self.book.support
        lr = learning_rate(state.round, self.stage.length, server.lr, server.schedule)
        whole = None
        if server.foreign:
            whole = foreign_step(server, lr, self.book.taken(state.theta), mean.to(state.theta.dtype), state.server)
        elif not state.server:
            state.server = fresh(server, mean, state.theta.dtype)
        for part in pieces(len(mean), mean.device):
            if whole is None:
                buffers = {name: buffer[part] for name, buffer in state.server.items()}
                step = server_step(server, lr, mean[part].to(state.theta.dtype), buffers)
            else:
                step = whole[part]
            if support is None:
                state.theta[part] += step
            else:
                state.theta.index_add_(0, support[part], step)

    def record(self, replies: Replies, rate: float, cohort: int) -> Record:
        """The record of a round. Adds to the state's counts."""
        state, reasons = self.state, Counter(replies.refused.values())
        for reason, count in reasons.items():
            state.refused[reason] = state.refused.get(reason, 0) + count
        state.drift = replies.effort.mean_drift
        record = Record(stage=self.stage.name, round=state.round + 1, lr=rate, cohort=cohort)
        record.note(replies=replies.count, refused=dict(reasons), **replies.effort.measured())
        if self.context.account is not None:
            record.epsilon = self.context.account.spent()
        if any(device.delay for device in self.settings.devices):
            record.simulated_seconds = self.clients.waited
            state.simulated_seconds += self.clients.waited
        return record

    # --- masks -------------------------------------------------------------------------------------------------------

    def calibrate(self) -> None:
        """Make a new mask for all. The server optimizer keeps its buffers for weights that still train."""
        book, state, clock = self.book, self.state, time.perf_counter()
        assert book.sieve is not None
        generation, old = book.state.generation, book.restored(book.state.mask)
        sieve = sieve_at(book.sieve, generation, self.stage.length)
        self.show(state.theta)
        if (given := self.context.masks.get(self.stage.name)) is not None:
            mask, scores = given, torch.zeros(given.space.size)
        else:
            calibration = Calibration(self.context, self.stage.name, book.space, sieve, generation)
            measure = calibration.public if sieve.scope == "public" else self._summed_scores(calibration)
            mask, scores = calibration.mask(measure)
        book.renew(mask, scores)
        if old is not None:
            places = [one.indices().to(self.theta.device) for one in (old, mask)]
            state.server = after_new_mask(self.settings.server, state.server, *places)
        book.save("" if generation == 0 else f"round-{state.round + 1}", mask)
        book.state.seconds += time.perf_counter() - clock

    def _summed_scores(self, calibration: Calibration) -> Measure:
        """Scores as sums over some clients. Before each calibration round they hear which weights are left to score."""
        scoring, round = calibration.scoring(), self.state.round
        known: Mask | None = None

        def measure(what: str, active: Mask, number: int) -> Tensor:
            nonlocal known
            if known is None:
                self._inform(scoring)
            elif known is not active:
                self.clients.tell(Parcel("mask", round, active, enclose=True, within=known), scoring)
            known = active
            ask = Scores(round, what, calibration.sieve, active, number, len(scoring), calibration.address)
            total, seen = self.sums(ask, scoring)
            scores = torch.zeros(active.space.size, device=total.device)
            return scores.index_copy_(0, active.indices().to(total.device), (total / seen).float())

        return measure

    def _inform(self, clients: Sequence[int]) -> None:
        """Send the server's weights to clients that score, as far as they differ from theirs."""
        self._tell_before(clients, self.state.round)
        if (moved := self.book.restored(self.book.state.moved)) is not None:
            values = self.state.theta.index_select(0, moved.indices().to(self.theta.device)).float()
            self.clients.tell(Parcel("model", self.state.round, moved, EXACT, enclose=True), clients, values)

    def _tell_before(self, clients: Sequence[int], round: int) -> None:
        """Send newcomers the weights that earlier stages changed. Every device has the rest."""
        newcomers = self.book.newcomers(clients)
        if newcomers and self.before is not None:
            mask, values = self.before
            self.clients.tell(Parcel("context", round, mask, EXACT, enclose=True), newcomers, values.float())

    def _announce(self) -> None:
        """Say what noise to expect for the weights that train."""
        if self.context.account is not None and self.announced is not self.book.trains:
            self.announced = self.book.trains
            self.context.say(self.context.account.outlook(self.stage.name, self.book.count))

    # --- evaluation and choice ---------------------------------------------------------------------------------------

    def measure(self, record: Record) -> dict[str, float]:
        """Have the next round's clients measure the new weights, as they receive them, on images they never train on.

        This round's clients would flatter the model that they have just trained.
        """
        self._check(record)  # what diverged cannot be sent
        number = self.state.round
        called = self.clients.call(self.population.cohort(self.stage.name, number).tolist(), number)
        reached = [client for client in called if self.population.held[client]]
        self.broadcast(reached, number - 1)
        for part in self.parts:
            part.measured(reached, number - 1)
        self.book.state.ahead = reached
        try:
            total, count = self.sums(ask := Metrics(number - 1, self.context.recipe), reached, needed=False)
        except NotFinite:
            self._diverged(number)
        if not count:
            return {}
        means = zip(ask.recipe.measured, (total / count).tolist(), strict=True)
        return {f"client_val_{name}": mean for name, mean in means}

    def choose(self, record: Record, last: bool) -> None:
        """Keep the weights of the best round so far, and see whether the stage is over."""
        state = self.state
        by = "val" if len(self.context.validation) else "client_val"
        found, best = merit(record, by), merit(state.chosen, by)
        if found is not None and (state.best is None or best is None or found > best):
            state.best = state.theta.clone()
            self._note_choice()
            state.chosen = record.starting_with("val_", "client_val_")
        patience = self.stage.early_stopping
        waited = state.round - (state.best_at or 0)
        state.done = last or (patience is not None and found is not None and waited >= patience)
        if state.done and state.best is None:
            self._note_choice()

    def _note_choice(self) -> None:
        """Note the number and the mask of the chosen round."""
        state = self.state
        state.best_at, state.best_generation, state.best_mask = state.round, self.book.state.generation, self.book.bits
        for part in self.parts:
            part.choose()

    def show(self, vector: Tensor) -> None:
        """Give the model these weights."""
        with torch.no_grad():
            self.theta.copy_(vector)

    def _check(self, record: Record) -> None:
        if not all(math.isfinite(value) for value in record.values() if isinstance(value, float)):
            self._diverged(self.state.round)

    def _diverged(self, number: int) -> NoReturn:
        name, blame = self.stage.name, ""
        if self.context.account is not None:
            blame = (
                ". The noise of privacy.dp may be the cause: a smaller clip_norm or a larger epsilon means less of it"
            )
        elif self.population.hostile and self.settings.aggregator.kind == "mean":
            blame = ". Hostile clients may be the cause: federation.aggregator names rules that bear some"
        raise Diverged(
            f'stage "{name}" diverged in round {number}: the loss is not finite, or weights are too large to send. '
            f"Lower stages.{name}.optimizer.lr (now {self.stage.optimizer.lr:g}) or federation.server.lr (now "
            f"{self.settings.server.lr:g}), or add warmup_rounds or optimizer.clip_norm{blame}"
        )

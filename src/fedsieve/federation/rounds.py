"""The round loop: choose a cohort, send down, local work, receive, aggregate, server step, record.

`ServerState` goes in and comes out of every round, and every draw has an address, so that a stage continued from a saved
state repeats exactly what it would have done.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsieve.config import Sieve, Stage
from fedsieve.errors import Diverged, FedsieveError
from fedsieve.federation.attacks import instead
from fedsieve.federation.blending import blended, tell_shares
from fedsieve.federation.calibrate import client_masks, is_due, nested_tiers, one_mask, sieve_at
from fedsieve.federation.channel import EXACT, Part
from fedsieve.federation.distributed import Distributed, cohort_executor
from fedsieve.federation.executors import Cohort, Executor, Task, Trained
from fedsieve.federation.secure import PAD, Losses, losses, secure_mean, zero_sum_mean
from fedsieve.federation.server import after_new_mask, fresh, server_step
from fedsieve.federation.state import Context, ServerState
from fedsieve.federation.sums import Update, pieces, private_mean, robust_mean, sum_over_clients, weighted_mean
from fedsieve.federation.work import Work, local_work
from fedsieve.mask.mask import Mask
from fedsieve.mask.overlap import block_of
from fedsieve.model.space import ParamSpace
from fedsieve.train.feed import Feed
from fedsieve.train.loop import Tick, predict
from fedsieve.train.schedule import learning_rate
from fedsieve.wire.codec import Coding, MessageError

TOO_FEW = "too few replies"
Span = tuple[str, int, int]  # a block, and where some of its weights begin and end among the k that train
FP64 = Coding("fp64")
METRICS = ParamSpace(("metrics",), ((2,),))  # what clients send of their validation: loss and correct answers, summed


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
        self.before = context.changed_weights()  # and of this, what no device has from the beginning
        self.task = Task(
            forward, space, theta, feed, stage.optimizer, settings.correction, context.autocast, context.speed
        )
        if state is not None and state.moved is not None:
            state.complete(self.base, self._as_mask(state.moved).indices().to(self.device))
        self.state = state or ServerState(self.base.clone())
        self.channel = context.channel(stage.name, self.device)
        self.mode = context.experiment.privacy.aggregation
        self.up = Coding(self.message.up, self.message.group, self.message.top_k)
        self.down = Coding(self.message.down, self.message.group)
        self.ready = False  # whether the mask is in use
        self.executor: Executor | Distributed | None = None
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
            self._prepare()
            record = self._round()
            state.round += 1
            last = state.round == self.length
            if last or state.round % self.settings.evaluate_every == 0:
                if self.settings.client_validation:
                    self._ask(record)
                self._show(state.theta)
                record |= self.validate()
            for way, size in self.context.ledger.total.items():  # with what went before the round, and after it
                record[f"bytes_{way}"] = size - sent[way]
            record["seconds"] = time.perf_counter() - clock
            state.seconds += record["seconds"]
            self._check(record)
            self._choose(record, last)
            if state.done:
                self._show(state.theta if state.best is None else state.best)
            yield Tick(state.round, self.length, record)

    def _prepare(self) -> None:
        """The mask of the coming round, and what clients must know before it."""
        state = self.state
        if not self.ready and (state.mask is not None or self.sieve is None or self.own_masks):  # begun, or resumed
            self._use(None if state.mask is None else self._as_mask(state.mask))
        if self.sieve is not None and not self.own_masks and is_due(self.sieve, state):
            clock = time.perf_counter()
            self._calibrate(sieve_at(self.sieve, state.generation, self.length))
            state.calibration_seconds += time.perf_counter() - clock
        if self.settings.blend and not state.blending:
            everything = Mask.ones(self.space) if self.mask is None else self.mask
            self._introduce(self.population.trainer(np.arange(self.population.trainers)).tolist(), state.round)
            tell_shares(self.context, self.channel, self.space, self.sieve or Sieve(), everything, state.round)
            state.blending = True

    def _round(self) -> dict[str, Any]:
        """One communication round."""
        stage, number = self.stage, self.state.round
        cohort = self.population.cohort(stage.name, number).tolist()
        fates = self._fates(cohort, number)
        lost = losses(self.experiment.seed, stage.name, number, fates) if self.mode == "secagg" else {}
        sends = [client for client, (phase, _) in lost.items() if phase > PAD]  # and then vanishes from a secure sum
        refused = {
            client: fate for client, fate in fates.items() if fate in ("unavailable", "crash") and client not in sends
        }
        reached = [client for client in cohort if fates[client] != "unavailable"]
        self._send(reached, number)
        self._send_control(reached)
        trains = [client for client in reached if client not in refused]
        self.channel.silence(
            "model", [client for client in cohort if client not in reached], number, "down", "unavailable"
        )
        self.channel.silence("update", [client for client in reached if client in refused], number, "up", "crash")
        rate = learning_rate(number, self.length, stage.optimizer.lr, stage.schedule, stage.warmup_rounds)
        effort = Effort()
        # Clients train and answer as the mean asks for them. Whatever else is to be made of updates is made here.
        mean, replies = self._aggregate(trains, reached, rate, effort, fates, lost, refused)
        if effort.astray and not effort.trained:
            self._diverged(number + 1)
        if mean is not None and (replies >= self.settings.minimum_replies or self.context.account is not None):
            self.state.taken += 1
            self._step(mean)
        else:
            wasted = [client for client in trains if client not in refused]
            self.channel.silence("update", wasted, number, "up", TOO_FEW)
            refused |= dict.fromkeys(wasted, TOO_FEW)
        record = self._record(effort, rate, len(cohort), replies, refused)
        if any(device.delay for device in self.settings.devices):
            record["simulated_seconds"] = self.population.waiting(stage.name, number, fates)
            self.state.simulated_seconds += record["simulated_seconds"]
        return record

    def _aggregate(
        self,
        trains: list[int],
        reached: list[int],
        rate: float,
        effort: "Effort",
        fates: Mapping[int, str],
        lost: Losses,
        refused: dict[int, str],
    ) -> tuple[Tensor | None, int]:
        """One update from those of all that train, and of how many clients; why others are not in it goes into `refused`."""
        trained = self._sent(self._train(trains, rate, effort))
        if self.mode == "secagg":
            return self._secure_mean(trained, reached, lost, refused)
        if self.mode == "zero_sum":
            return self._zero_sum_mean(trained, refused)
        return self._mean(self._receive(trained, fates, refused), len(trains))

    def _mean(self, updates: Iterator[Update], most: int) -> tuple[Tensor | None, int]:
        """One update from those of all clients, and how many came; None where they are too few for the aggregator."""
        account, rule = self.context.account, self.settings.aggregator
        if account is not None:
            return private_mean(updates, self._k, self.device, account, self.stage.name, self.state.round)
        if rule.kind != "mean":
            return robust_mean(updates, rule, most, self.context.ledger.path.parent)
        return weighted_mean(updates, self._k, self.device, self.settings.divide_by)

    def _secure_mean(
        self, trained: Iterator[tuple[list[int], Trained]], asked: list[int], lost: Losses, refused: dict[int, str]
    ) -> tuple[Tensor | None, int]:
        """The mean update of a secure sum, and of how many clients; None where it was aborted."""
        rows: dict[int, np.ndarray] = {}
        for clients, result in trained:
            rows |= zip(clients, result.moved.float().cpu().numpy(), strict=True)
        if not asked:
            return None, 0
        most = int(self.population.sizes.max()) if self.settings.weighting == "examples" else 1
        mean, found = secure_mean(
            self.channel,
            self.state.round,
            self._k,
            self._segments(asked),
            rows,
            self._weights(asked),
            most,
            lost,
            self.settings.divide_by,
        )
        refused |= found.refused
        return mean, len(found.survivors)

    def _zero_sum_mean(
        self, trained: Iterator[tuple[list[int], Trained]], refused: dict[int, str]
    ) -> tuple[Tensor | None, int]:
        """The mean update of padded messages, and of how many clients; None where pads remain."""
        rows: dict[int, Tensor] = {}
        for clients, result in trained:
            rows |= zip(clients, result.moved, strict=True)
        over = self.mask or self.space
        mean, why = zero_sum_mean(self.channel, self.state.round, over, rows, self._weights(rows))
        refused |= why
        return mean, len(rows) - len(why)

    def _weights(self, clients: Iterable[int]) -> dict[int, int]:
        """What clients count in a mean."""
        by_size = self.settings.weighting == "examples"
        return {client: int(self.population.sizes[client]) if by_size else 1 for client in clients}

    def _sent(self, trained: Iterator[tuple[list[int], Trained]]) -> Iterator[tuple[list[int], Trained]]:
        """What clients send: what they trained, and hostile ones something else."""
        attack, hostile = self.settings.attack, self.population.hostile
        for clients, result in trained:
            if attack is not None and hostile.intersection(clients):
                moved, seed, store = result.moved.clone(), self.experiment.seed, self.context.store
                for client, row in zip(clients, moved, strict=True):
                    if client in hostile:
                        row.copy_(instead(attack, row.clone(), store, seed, self.stage.name, self.state.round, client))
                result = replace(result, moved=moved)
            yield clients, result

    def _fates(self, clients: Sequence[int], number: int) -> dict[int, str]:
        """What becomes of chosen clients in a round."""
        return {client: self.population.fate(self.stage.name, number, client) for client in clients}

    def _train(self, clients: list[int], rate: float, effort: "Effort") -> Iterator[tuple[list[int], Trained]]:
        """Local training of all that were reached, as many at a time as fit."""
        if not clients:
            return
        ahead = self.works.pop(self.state.round, {})
        works = [ahead.get(client) or self._work(client, self.state.round) for client in clients]
        received = self._taken(self.theta.detach(), self.support).clone()
        if self.own_masks:
            self._make_masks(clients)
        blends: dict[int, Tensor] = {}  # by place, of those who train now

        def start(members: range) -> Tensor:
            if not self.settings.blend:
                return received
            for place in members:
                blends[place] = blended(self.context, received, clients[place], self.stage.name)
            return torch.stack([blends[place] for place in members])

        def holds(members: range) -> Tensor | None:
            return self._holds([clients[place] for place in members])

        def control(members: range) -> Tensor | None:
            return self._controls([clients[place] for place in members])

        clock = time.perf_counter()
        for trained in self._running_executor().train(Cohort(works, start, holds, control), rate):
            self._look_ahead()
            if self.settings.blend:  # an update is counted from the weights that were sent, not from a blend of them
                trained.moved += torch.stack([blends.pop(place) for place in trained.clients]) - received
            effort.add(trained.sums, self._spans, squares_by_span(trained.moved, self._spans))  # waits for the device
            effort.seconds += time.perf_counter() - clock
            members = [clients[place] for place in trained.clients]
            yield members, trained
            if self.settings.blend:  # clients keep their own weights
                for client, row in zip(members, trained.moved, strict=True):
                    own = {f"{self.stage.name}.own": (received + row).half()}
                    self.context.store.put(client, self.state.round, **own)
            clock = time.perf_counter()

    def _receive(
        self,
        trained: Iterator[tuple[list[int], Trained]],
        fates: Mapping[int, str],
        refused: dict[int, str],
    ) -> Iterator[Update]:
        """Take up what clients send, and give what is sound; why others are not goes into `refused`.

        With error feedback a client keeps what did not get through. It knows no more than the answer to its upload: accepted,
        and it keeps what rounding took; refused, whatever the reason, and it keeps the whole update. Whether enough others
        answered for the round to count it never learns.
        """
        residual = f"{self.stage.name}.residual"
        for clients, result in trained:
            moved, found = result.moved, list[int]()
            if self.message.error_feedback:
                kept = [self.context.store.get(client, self.device).get(residual) for client in clients]
                moved = torch.stack([row if old is None else row + old for row, old in zip(moved, kept, strict=True)])
            for members, over, places in self._groups(clients):
                rows = torch.tensor([clients.index(client) for client in members], device=self.device)
                mine = moved if len(members) == len(clients) else moved[rows]
                values = mine if places is None else mine[:, places]
                enclose = self.own_masks and members[0] not in self.state.given
                ns = self.population.sizes[members].tolist()
                replies = self.channel.up(
                    "update", members, self.state.round, over, values.float(), self.up, ns, fates=fates, enclose=enclose
                )
                for client, row, reply in zip(members, rows.tolist(), replies, strict=True):
                    rest = moved[row].clone() if self.message.error_feedback else None
                    if isinstance(reply, MessageError):
                        refused[client] = reply.reason
                    else:
                        update = reply.values.to(self.theta.dtype)
                        if rest is not None:
                            rest[slice(None) if places is None else places] -= update
                        if enclose:
                            self.state.given.append(client)
                        found.append(client)
                        weight = float(reply.n) if self.settings.weighting == "examples" else 1.0
                        yield Update(client, update, weight, places)
                    if rest is not None and rest.isfinite().all():  # what went astray is not worth keeping
                        self.context.store.put(client, self.state.round, **{residual: rest})
            if result.gradients is not None:
                self._take_controls(clients, result.gradients, fates)
            if self.own_masks and found:
                self._grow(found)

    def _step(self, mean: Tensor) -> None:
        """Move the server by the mean update."""
        state = self.state
        schedule = self.settings.server.schedule
        lr = learning_rate(state.round, self.length, self.settings.server.lr, schedule)
        if not state.server:
            state.server = fresh(self.settings.server, mean, state.theta.dtype)
        for part in pieces(len(mean), mean.device):
            buffers = {name: buffer[part] for name, buffer in state.server.items()}
            step = server_step(self.settings.server, lr, mean[part].to(state.theta.dtype), buffers)
            if self.support is None:
                state.theta[part] += step
            else:
                state.theta.index_add_(0, self.support[part], step)

    def _record(
        self, effort: "Effort", rate: float, cohort: int, replies: int, refused: Mapping[int, str]
    ) -> dict[str, Any]:
        """What a round leaves in the metrics, and in the state's counts."""
        state, reasons = self.state, Counter(refused.values())
        for reason, count in reasons.items():
            state.refused[reason] = state.refused.get(reason, 0) + count
        state.drift = effort.drift / effort.trained if effort.trained else None
        record: dict[str, Any] = {"stage": self.stage.name, "round": state.round + 1}
        if effort.images:
            record |= {
                "train_loss": effort.loss / effort.images,
                "train_accuracy": effort.correct / effort.images,
                "images_per_second": effort.images / max(effort.seconds, 1e-9),
            }
        if effort.trained:
            by_block = {name: value / effort.trained for name, value in effort.drift_by_block.items()}
            record |= {"drift": state.drift, "drift_by_block": by_block}
        record |= {"lr": rate, "cohort": cohort, "replies": replies, "refused": dict(reasons)}
        if self.context.account is not None:
            record["epsilon"] = self.context.account.spent()
        return record

    def _check(self, record: Mapping[str, Any]) -> None:
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

    def _choose(self, record: Mapping[str, Any], last: bool) -> None:
        """Keep the weights of the best round so far, and see whether the stage is over."""
        state = self.state
        by = "val_accuracy" if len(self.context.validation) else "client_val_accuracy"
        if by in record and (state.best is None or record[by] > state.chosen[by]):
            state.best = state.theta.clone()
            self._note_choice()
            state.chosen = {key: value for key, value in record.items() if key.startswith(("val_", "client_val_"))}
        patience = self.stage.early_stopping
        waited = state.round - (state.best_at or 0)
        state.done = last or (patience is not None and by in record and waited >= patience)
        if state.done and state.best is None:
            self._note_choice()

    def _note_choice(self) -> None:
        """What there is to know of the chosen round beside its weights."""
        state = self.state
        state.best_at, state.best_generation = state.round, state.generation
        bits = state.moved if self.own_masks else state.mask
        state.best_mask = None if bits is None else bits.clone()

    # --- evaluation on clients ---------------------------------------------------------------------------------------

    def _ask(self, record: dict[str, Any]) -> None:
        """Have the next round's clients measure the new weights, as they receive them, on images they never train on.

        This round's clients would flatter the model that they have just trained.
        """
        self._check(record)  # what diverged cannot be sent
        population, name, number = self.population, self.stage.name, self.state.round
        fates = self._fates(population.cohort(name, number).tolist(), number)
        reached = [client for client, fate in fates.items() if population.held[client] and fate != "unavailable"]
        self._send(reached, number - 1)
        self.state.ahead = reached
        clients = [client for client in reached if fates[client] != "crash"]
        if not clients:
            return
        total, count = sum_over_clients(
            self.channel,
            "metrics",
            number - 1,
            METRICS,
            self._measured(clients),
            FP64,
            fates,
            clients=clients,
            told=self._told,
        )
        if count:
            record["client_val_loss"], record["client_val_accuracy"] = (total / count).tolist()

    def _measured(self, clients: list[int]) -> Iterator[Part]:
        """Loss and correct answers of the model, summed over the images that each client holds back."""
        held = self.feed.take(np.concatenate([self.population.validation(client) for client in clients]))
        logits = predict(self.task.model, held, self.context.autocast).double()
        loss, correct = F.cross_entropy(logits, held.labels, reduction="none"), logits.argmax(1) == held.labels
        if not bool(loss.isfinite().all()):
            self._diverged(self.state.round)
        ns = self.population.held[clients].tolist()
        sums = [part.sum(0) for part in torch.stack([loss, correct], 1).split(ns)]
        yield from zip(clients, sums, ns, strict=True)

    def _told(self, client: int) -> dict[str, Any]:
        """What a client that is elsewhere must hear beside its messages."""
        return {}

    # --- masks -------------------------------------------------------------------------------------------------------

    def _as_mask(self, bits: Tensor) -> Mask:
        return Mask(self.space, bits.numpy())

    def _calibrate(self, sieve: Sieve) -> None:
        """A new mask for all; what the server learnt of weights that still train stays."""
        state, generation = self.state, self.state.generation
        self._show(state.theta)
        mask, scores = one_mask(self.context, self.channel, self.space, sieve, state, self._inform)
        old = None if state.mask is None else self._as_mask(state.mask).indices().to(self.device)
        moved = mask if state.moved is None else mask | self._as_mask(state.moved)
        state.mask, state.moved = torch.from_numpy(mask.bits.copy()), torch.from_numpy(moved.bits.copy())
        state.generation, state.ahead = state.generation + 1, []
        if self.settings.devices:
            state.ranks = scores[mask.indices()]
        if old is not None:
            new = mask.indices().to(self.device)
            state.server = after_new_mask(self.settings.server, state.server, old, new)
        self._use(mask)
        self.context.keep_mask("" if generation == 0 else f"round-{state.round + 1}", mask)

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
        if self.context.account is not None:
            self.context.say(self.context.account.outlook(self.stage.name, self._k))
        if self.settings.correction.kind == "scaffold" and self.state.control is None:
            self.state.control = torch.zeros(self._k, dtype=self.theta.dtype, device=self.device)

    def _set_moved(self, moved: Mask | None) -> None:
        """`moved`: all weights that may differ from what clients start the stage with; None: any."""
        if self.own_masks and moved is None:
            moved = Mask.zeros(self.space)
        self.moved = moved
        self.moved_index = None if moved is None else moved.indices().to(self.device)
        self.origin = self._taken(self.base, self.moved_index)  # what differences are sent from
        self.state.places = self.moved_index if self.state.moved is not None else None

    def _tier(self, client: int) -> Mask | None:
        """The part of the shared mask that a client's device trains; None where it trains all of it."""
        density = self.population.device(client).density
        if self.mask is None or density == 1:
            return None
        if not self.tiers:
            assert self.sieve is not None and self.state.ranks is not None
            self.tiers = nested_tiers(self.context, self.sieve, self.mask, self.state.ranks)
        return self.tiers[density]

    def _segments(self, clients: Sequence[int]) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Places among the k trained weights with the clients that hold them, from what all hold to what few do."""
        densities = {client: self.population.device(client).density for client in clients}
        before = torch.zeros(self._k, dtype=torch.bool)
        for density in sorted(set(densities.values())):
            holders = [client for client in clients if densities[client] >= density]
            tier = self._tier(next(client for client in clients if densities[client] == density))
            held = torch.ones_like(before)
            if tier is not None and self.mask is not None:
                held = tier.to_bool()[self.mask.indices()]
            yield (held & ~before).nonzero().flatten().numpy(), holders
            before = held

    def _make_masks(self, clients: Sequence[int]) -> None:
        """Have newcomers calibrate masks of their own, on their own images and the weights that they received."""
        assert self.sieve is not None
        name, clock = f"{self.stage.name}.mask", time.perf_counter()
        lacking = [client for client in clients if name not in self.context.store.get(client)]
        masks = client_masks(self.context, self.sieve, self.space, lacking, self.stage.name)
        for client, mask in zip(lacking, masks, strict=True):
            self.context.store.put(client, self.state.round, **{name: torch.from_numpy(mask.bits.copy())})
            self.context.keep_mask(f"client-{client}", mask)
        self.state.calibration_seconds += time.perf_counter() - clock

    def _own_mask(self, client: int) -> Mask:
        """The mask that a client calibrated when it first took part."""
        return self._as_mask(self.context.store.get(client)[f"{self.stage.name}.mask"])

    def _grow(self, clients: Sequence[int]) -> None:
        """After clients with masks of their own answered, all their weights may have moved."""
        grown = self.moved
        for client in clients:
            grown = self._own_mask(client) if grown is None else grown | self._own_mask(client)
        if grown is not None and grown != self.moved:
            self.state.moved = torch.from_numpy(grown.bits.copy())
            self._set_moved(grown)

    # --- down --------------------------------------------------------------------------------------------------------

    def _send(self, clients: Sequence[int], number: int) -> None:
        """Bring clients up to date, and lay the server's weights over the model as they receive them.

        `number` is the round that the bytes are counted in.
        """
        self._introduce(clients, number)
        state, channel = self.state, self.channel
        lacking = [client for client in clients if client not in state.ahead]
        over = self.moved or self.space
        values = self._taken(state.theta, self.moved_index)
        if not self._absolute:
            values = values - self.origin
        sent, key = values.float(), channel.key(state.round, "down")
        try:
            message = channel.down("model", lacking, number, over, sent, self.down, key=key)
        except FedsieveError:  # not finite, or too large for the format
            self._diverged(state.round + 1)
        self._take_model(message.values)
        state.ahead = []

    def _take_model(self, values: Tensor) -> None:
        """Lay the server's weights over the model, as a message brought them."""
        received = values.to(self.theta.dtype)
        if not self._absolute:
            received = self.origin + received
        self._lay(received, self.moved_index)

    def _send_control(self, clients: Sequence[int]) -> None:
        """SCAFFOLD: send the server's control variate, and keep it as the clients receive it."""
        state, channel = self.state, self.channel
        if state.control is not None:
            over, key = self.mask or self.space, channel.key(state.round, "control")
            message = channel.down("control", clients, state.round, over, state.control.float(), self.down, key=key)
            self.control = message.values.to(self.theta.dtype)

    def _introduce(self, clients: Sequence[int], number: int) -> None:
        """Send what clients lack beside the weights of this stage: what earlier stages changed, and masks."""
        state, channel = self.state, self.channel
        self._tell_before(clients, number)
        generation = state.generation
        if self.own_masks and self.moved is not None:
            generation = self.moved.count + 1  # any number that changes when the mask does
        lacking = [client for client in clients if state.known[str(client)] != generation]
        if lacking and self.moved is not None and self._mask_travels:
            channel.down("mask", lacking, number, self.moved, enclose=True)
            if self.mask is not None and self.mask is not self.moved:  # which of all that moved trains now
                channel.down("mask", lacking, number, self.mask, enclose=True, within=self.moved)
            tiers = {client: self._tier(client) for client in lacking}
            for tier in filter(None, dict.fromkeys(tiers.values())):
                members = [client for client in lacking if tiers[client] is tier]
                channel.down("mask", members, number, tier, enclose=True, within=self.mask)
        state.known |= dict.fromkeys(map(str, clients), generation)

    def _tell_before(self, clients: Sequence[int], number: int) -> None:
        """Send newcomers what earlier stages changed: the rest is as every device has it."""
        newcomers = [client for client in clients if str(client) not in self.state.known]
        if newcomers and self.before is not None:
            mask, values = self.before
            self.channel.down("context", newcomers, number, mask, values.float(), EXACT, enclose=True)
        self.state.known |= dict.fromkeys(map(str, newcomers), 0)

    def _inform(self, clients: Sequence[int]) -> None:
        """Send what clients need to score the server's weights: all that differs from what they have."""
        state = self.state
        self._tell_before(clients, state.round)
        if state.moved is not None:
            moved = self._as_mask(state.moved)
            values = state.theta.index_select(0, moved.indices().to(self.device)).float()
            self.channel.down("model", clients, state.round, moved, values, EXACT, enclose=True)

    @property
    def _absolute(self) -> bool:
        """Whether weights are sent as they are, in exact formats, and not as their difference from the stage's start."""
        return self.down.format in ("fp32", "coo")

    @property
    def _mask_travels(self) -> bool:
        """Whether clients must be sent the mask: one drawn at random they draw themselves."""
        return self.sieve is not None and (self.sieve.rule != "random" or self.own_masks)

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
        return torch.stack([self.control - self._control(client) for client in clients])

    def _control(self, client: int) -> Tensor:
        name = f"{self.stage.name}.control"
        own = self.context.store.get(client, self.device).get(name)
        return torch.zeros_like(self.control) if own is None else own

    def _running_executor(self) -> Executor | Distributed:
        if self.executor is None:
            self.executor = cohort_executor(
                self.context,
                self.task,
                self.support,
                self.population.cohort_size,
                self.state.clients_at_once or self.experiment.clients_at_once,
                min(self.stage.batch_size, int(self.population.sizes.max())),
            )
        if self.executor.clients > 1 or self.state.clients_at_once:  # stacked; fewer than before, where memory ran out
            self.state.clients_at_once = self.executor.clients
        if self.moved is not self.mask:
            self.executor.sync()
        return self.executor

    # --- up -------------------------------------------------------------------------------------------------------------

    def _groups(self, clients: list[int]) -> Iterator[tuple[list[int], Mask | ParamSpace, Tensor | None]]:
        """Clients that train the same weights: the mask of these, and their places among the k trained ones."""
        if self.own_masks:
            for client in clients:
                mask = self._own_mask(client)
                yield [client], mask, mask.indices().to(self.device)
            return
        whole = self.mask or self.space
        tiers = {client: self._tier(client) for client in clients}
        for tier in dict.fromkeys(tiers.values()):
            members = [client for client in clients if tiers[client] is tier]
            if tier is None:
                yield members, whole, None
            else:
                assert self.support is not None
                yield members, tier, torch.searchsorted(self.support, tier.indices().to(self.device))

    def _take_controls(self, clients: list[int], gradients: Tensor, fates: Mapping[int, str]) -> None:
        """SCAFFOLD: the change of each client's control variate travels like its update.

        Client and server both add what was understood, so that rounding never pulls the two apart: the mean of the
        clients' c_k stays the server's c.
        """
        over = self.mask or self.space
        old = [self._control(client) for client in clients]
        changes = (gradients - torch.stack(old)).float()
        number = self.state.round
        replies = self.channel.up("control", clients, number, over, changes, self.up, [0] * len(clients), fates=fates)
        for client, mine, reply in zip(clients, old, replies, strict=True):
            if not isinstance(reply, MessageError):
                change = reply.values.to(self.theta.dtype)
                assert self.state.control is not None
                self.state.control += change / self.population.trainers
                self.context.store.put(client, number, **{f"{self.stage.name}.control": mine + change})

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


class Effort:
    """What the clients of one round did: sums over those that did not go astray."""

    def __init__(self) -> None:
        self.trained = self.astray = 0
        self.loss = self.correct = self.images = self.seconds = self.drift = 0.0
        self.drift_by_block: dict[str, float] = {}

    def add(self, sums: Tensor, spans: Sequence[Span], squares: Tensor) -> None:
        """Count what some clients did: loss, correct answers, images, and how far they went (`squares_by_span`).

        A client that went astray is left out; its message will be refused.
        """
        sums, squares = sums.cpu(), squares.cpu()
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
        self.astray += len(sums) - squares.shape[1]


def squares_by_span(moved: Tensor, spans: Sequence[Span]) -> Tensor:
    """How far clients (clients, k) went in each span, squared: (spans, clients), float64."""
    return torch.stack([_squares(moved, first, last) for _, first, last in spans])


def _squares(moved: Tensor, first: int, last: int) -> Tensor:
    """The sum of squares of columns first to last of (clients, k), in float64."""
    return torch.stack(
        [
            moved[:, part].to(torch.float64, copy=True).square_().sum(1)
            for part in pieces(last - first, moved.device, first)
        ]
    ).sum(0)


def _block_spans(space: ParamSpace, support: Tensor | None) -> list[Span]:
    """Runs of trained weights that lie in one block: its name, and where they begin and end among the k."""
    cuts = list(space.offsets)
    if support is not None:
        cuts = torch.searchsorted(support.cpu(), torch.tensor(space.offsets)).tolist()
    runs = []
    for name, group in groupby(range(len(space.names)), key=lambda index: block_of(space.names[index])):
        members = list(group)
        runs.append((name, cuts[members[0]], cuts[members[-1] + 1]))
    return [run for run in runs if run[1] < run[2]]

"""How a cohort trains: one client after another, or all at once on one device. Both give the same updates.

Clients train the k weights of a `support` (places in the space's vector; None: all), each from its own start values, and
may each be held to a part of it (`holds`). An executor gives back what moved, and never decides anything.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config import Correction, Optimizer
from fedsieve.errors import FedsieveError
from fedsieve.federation.work import Work, side_by_side
from fedsieve.model.calling import Inputs
from fedsieve.model.scheme import WAYS, Way
from fedsieve.model.space import ParamSpace
from fedsieve.model.stack import Stack, computed_in
from fedsieve.train.feed import Autocast, Examples
from fedsieve.train.local_step import bounded, corrected, pulled, settings_of, step_of, sums_of
from fedsieve.train.modes import RunningStatistics, batch_of, changing, own_draws, seed_layers, training, why_alone
from fedsieve.train.objectives import PLAIN, Recipe, correct, widened
from fedsieve.train.replay import COMPILING, TOLD, Replay, Speed, compiled


@dataclass(frozen=True)
class Task:
    """What all clients of a stage do alike."""

    model: nn.Module  # what is called on the feed's inputs: the classifier, or its head on features
    space: ParamSpace
    theta: Tensor  # the space's bound vector: writing to it changes the model
    feed: Examples
    optimizer: Optimizer
    correction: Correction
    autocast: Autocast
    speed: Speed = "eager"
    recipe: Recipe = PLAIN


Rows = Tensor | Callable[[range], Tensor | None]  # of clients, (clients, k), or what makes them of some clients' places


@dataclass
class Cohort:
    """The clients that train now, in order. What is None is absent; rows that are made are made as few at a time as train."""

    works: Sequence[Work]
    start: Rows  # or (k,), where all start alike
    holds: Rows | None = None  # bool: which of the k values each client may move
    control: Rows | None = None  # what SCAFFOLD adds to each gradient, c - c_k
    statistics: Rows | None = (
        None  # running ones that clients begin with, (s,) where all begin alike; None: the model's
    )

    def rows(self, members: range) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Start values, (k,) or (members, k), what each of these clients may move, and its control."""
        start, holds, control = (rows_of(rows, members) for rows in (self.start, self.holds, self.control))
        assert start is not None
        return start, holds, control


@dataclass
class Trained:
    """Some clients' results."""

    clients: range  # their places in the cohort
    moved: Tensor  # (clients, k): how far each value went
    sums: Tensor  # (clients, 3) float64, over examples seen: loss, correct answers where they are counted, and number
    gradients: Tensor | None = None  # (clients, k): the mean raw gradient, where a control variate needs it
    statistics: Tensor | None = None  # (clients, s): running ones that clients end with, where they change


@dataclass(frozen=True, eq=False)
class _Round:
    """What clients that train one after another share."""

    start: Tensor  # the weights (k,) of the model
    settings: dict[str, Any]
    update: Callable[..., None]
    teacher: Callable[[Inputs], Tensor] | None


class Sequential:
    """One client after another, with plain modules: slow, obvious, and what the other executors must equal."""

    clients = 1  # at once

    def __init__(self, task: Task, support: Tensor | None) -> None:
        self.task, self.support = task, support

    def sync(self) -> None:
        """Nothing to do: it trains the model itself."""

    def train(self, cohort: Cohort, lr: float) -> Iterator[Trained]:
        """Each client's result, as soon as it is there."""
        task, statistics = self.task, RunningStatistics(self.task.model)
        update = step_of(task.optimizer)
        start_of_round = self._take(task.theta.detach()).clone()
        round = _Round(start_of_round, settings_of(task.optimizer, lr), update, _teacher(task))
        for number in range(len(cohort.works)):
            self._put(start_of_round)  # which clients make masks of their own at
            place = range(number, number + 1)
            every = (*cohort.rows(place), rows_of(cohort.statistics, place))
            start, holds, control, own = (rows[0] if rows is not None and rows.dim() == 2 else rows for rows in every)
            assert start is not None
            with training(task.model, task.recipe), own_draws(task.theta.device):
                if own is not None:
                    statistics.write(own)
                trained = self._client(cohort.works[number], start, holds, control, round)
                if changing(task.model, task.recipe) in ("federated", "local"):
                    trained.statistics = statistics.read()[None]
            trained.clients = place
            yield trained
        self._put(start_of_round)

    def _client(
        self, work: Work, start: Tensor, holds: Tensor | None, control: Tensor | None, round: "_Round"
    ) -> Trained:
        """One client's local steps."""
        task, theta, update = self.task, self.task.theta, round.update
        weights, state = start.clone(), dict[str, Any]()
        sums = torch.zeros(task.recipe.training_columns, dtype=torch.float64, device=theta.device)
        total = torch.zeros_like(start) if task.correction.kind == "scaffold" else None
        for step in range(work.steps):
            there = work.examples[step] >= 0
            draws = None if work.draws is None else torch.from_numpy(work.draws[step][there]).to(theta.device)
            *raw, labels = task.feed.fetch(work.examples[step][there])
            inputs = task.feed.inputs(*raw, *([] if draws is None else [draws]))
            self._put(round.start)
            distant = round.teacher(inputs) if round.teacher else None
            self._put(weights)
            theta.grad.zero_()  # type: ignore[union-attr]
            if task.recipe.mode == "train":
                seed_layers(work.address, work.client, step)
            with batch_of(work.client, len(labels)):
                loss, seen = self._loss(inputs, labels, distant)
            loss.backward()
            sums += seen
            with torch.no_grad():
                assert theta.grad is not None
                gradient = self._take(theta.grad)
                if total is not None:
                    total += gradient
                dense = theta.grad.square().sum() - gradient.square().sum() if task.optimizer.rescale else None
                gradient = corrected(gradient, weights, start, task.correction, control)
                gradient = bounded(gradient[None], None if dense is None else dense[None], holds, task.optimizer)[0]
                before = weights.clone() if holds is not None else None
                update(weights, gradient, state, round.settings)
                if holds is not None:
                    weights = torch.where(holds, weights, before)  # type: ignore[arg-type]
        gradients = None if total is None else (total / work.steps)[None]
        return Trained(range(0), (weights - start)[None], sums[None], gradients)

    def _loss(self, inputs: Inputs, labels: Tensor, distant: Tensor | None) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, and its sums of `Trained`."""
        task, recipe = self.task, self.task.recipe
        if not recipe.on_outputs:
            with task.autocast():
                losses = widened(recipe.model_losses(task.model, inputs, labels))
            losses = losses.expand(len(labels)) if losses.dim() == 0 else losses
            return losses.mean(), sums_of(losses, None, torch.ones_like(losses, dtype=torch.bool)[None])[0]
        with task.autocast():
            outputs = task.model(inputs)
        outputs = widened(outputs)
        losses = recipe.losses(outputs, labels)
        right = correct(outputs, labels) if recipe.accuracy else None
        sums = sums_of(losses, right, torch.ones_like(losses, dtype=torch.bool)[None])[0]
        return pulled(losses, outputs, labels, distant, task.correction).mean(), sums

    def _take(self, vector: Tensor) -> Tensor:
        return vector if self.support is None else vector.index_select(0, self.support)

    @torch.no_grad()
    def _put(self, values: Tensor) -> None:
        if self.support is None:
            self.task.theta.copy_(values)
        else:
            self.task.theta.index_copy_(0, self.support, values)


class Stacked:
    """All clients at once on one device: their weights stacked, their batches side by side, a step one CUDA graph.

    `clients` are stacked at a time, as many as fit: where memory runs out, half as many are tried.
    """

    def __init__(
        self,
        task: Task,
        support: Tensor | None,
        clients: int,
        batch: int,
        say: Callable[[str], None] | None = None,
        way: Way = "rules",
    ) -> None:
        self.task, self.support, self.batch, self.say, self.way = task, support, batch, say, way
        for parameter in task.model.parameters():
            parameter.requires_grad_(False)
        self._build(clients)

    def _build(self, clients: int) -> None:
        task, self.clients = self.task, clients
        self.stack = Stack(
            task.model,
            task.space,
            self.support,
            clients,
            computed_in(task.autocast, task.theta.device),
            whole=task.optimizer.rescale is not None,
            # Compilers do not see through what is mapped over clients.
            compile=lambda network: compiled(network, task.speed if self.way == "rules" else "graph", task.model),
            way=self.way,
        )
        k = task.space.size if self.support is None else len(self.support)
        self.weights = task.theta.detach().new_zeros(clients, k)  # in place always: recorded steps read from here
        self.teacher = _teacher(task)
        self.gradient = Replay(self._differentiate, on=task.speed != "eager", say=self.say)

    def sync(self) -> None:
        """Take over weights of the model outside the support that have changed since the executor was made."""
        self.stack.refresh()

    def check(self) -> None:
        """Refuse a network that cannot be stacked."""
        task = self.task
        inputs, _ = task.feed.batch(np.arange(min(2, len(task.feed))))
        self.stack.check(inputs)
        with task.autocast():  # types that do not go together show here
            self.stack.trial(inputs)

    @torch.enable_grad()
    def _differentiate(self, labels: Tensor, there: Tensor, *raw: Tensor) -> tuple[Tensor, ...]:
        """Gradients (clients, k) at `weights`, the sums of `Trained`, and the squared norm of what was not asked for."""
        task, clients = self.task, self.clients
        self.stack.load(self.weights)
        with torch.no_grad():
            inputs = task.feed.inputs(*raw)
            distant = self.teacher(inputs) if self.teacher else None
        with task.autocast():
            outputs = self.stack(inputs)
        outputs, counted = widened(outputs), there.view(clients, -1)
        plain = task.recipe.losses(outputs, labels)
        sums = sums_of(plain, correct(outputs, labels) if task.recipe.accuracy else None, counted)
        losses = pulled(plain, outputs, labels, distant, task.correction).view(clients, -1)
        means = torch.where(counted, losses, 0).sum(1) / counted.sum(1).clamp(min=1)
        dense = self.stack.gradients(means.sum())
        gradient = self.stack.gather(dense, self.weights)
        rest = gradient.new_zeros(clients)
        if task.optimizer.rescale:
            rest = torch.stack([part.to(gradient.dtype).square().sum(1) for part in dense]).sum(0)
            rest = rest - gradient.square().sum(1)
        return gradient, sums, rest

    def train(self, cohort: Cohort, lr: float) -> Iterator[Trained]:
        """The results of as many clients as are stacked, one group after the other."""
        first = 0
        while first < len(cohort.works):
            try:
                members = range(first, min(first + self.clients, len(cohort.works)))
                with training(self.task.model, self.task.recipe):
                    result = self._group(cohort.works, members, lr, *cohort.rows(members))
            except torch.cuda.OutOfMemoryError:
                if self.clients == 1:
                    raise
                fewer = -(-self.clients // 2)
                warnings.warn(
                    f"{self.clients} clients at once do not fit in memory: going on with {fewer}", stacklevel=2
                )
                del self.stack, self.gradient, self.weights
                torch.cuda.empty_cache()
                self._build(fewer)
                continue
            yield result
            first += len(result.clients)

    @torch.no_grad()
    def _group(
        self,
        all_works: Sequence[Work],
        members: range,
        lr: float,
        start: Tensor,
        holds: Tensor | None,
        control: Tensor | None,
    ) -> Trained:
        task, device = self.task, self.task.theta.device
        works = [all_works[number] for number in members]
        holds = None if holds is None else _filled(holds, self.clients)
        control = None if control is None else _filled(control, self.clients)
        self.weights.copy_(start if start.dim() == 1 else _filled(start, self.clients))
        begin = self.weights.clone()
        examples, draws = side_by_side(works, self.clients, self.batch)
        present = torch.from_numpy(examples >= 0).to(device)
        placed = None if draws is None else torch.from_numpy(draws).to(device)
        steps = [work.steps for work in works]
        active = torch.tensor([*steps, *[0] * (self.clients - len(works))], device=device)
        settings, state = settings_of(task.optimizer, lr), dict[str, Any]()
        update = step_of(task.optimizer)
        sums = torch.zeros(self.clients, task.recipe.training_columns, dtype=torch.float64, device=device)
        total = torch.zeros_like(begin) if task.correction.kind == "scaffold" else None
        for step in range(max(steps)):
            *raw, labels = task.feed.fetch(examples[step].reshape(-1).clip(0))
            extra = () if placed is None else (placed[step].flatten(0, 1),)
            gradient, seen, rest = self.gradient(labels, present[step].flatten(), *raw, *extra)
            sums += seen
            going = None if step < min(steps) else (step < active)[:, None]
            if total is not None:
                total += gradient if going is None else gradient * going
            before = self.weights.clone() if holds is not None or going is not None else None
            gradient = corrected(gradient, self.weights, begin, task.correction, control)
            gradient = bounded(gradient, rest if task.optimizer.rescale else None, holds, task.optimizer)
            update(self.weights, gradient, state, settings)
            if before is not None:
                kept = holds if going is None else going if holds is None else holds & going
                assert kept is not None
                self.weights.copy_(torch.where(kept, self.weights, before))
        count = len(works)
        moved = (self.weights - begin)[:count]
        gradients = None if total is None else (total / active.clamp(min=1)[:, None])[:count]
        return Trained(members, moved, sums[:count], gradients)


Executor = Sequential | Stacked


def make_executor(
    kind: str, task: Task, support: Tensor | None, clients: int, batch: int, say: Callable[[str], None]
) -> Executor:
    """The asked executor; a network that cannot be stacked trains one client after another, with a warning.

    So does one with layers that have no rule, on a CPU: `fedsieve bench networks` shows that mapping them is slower there.
    """
    if kind == "stacked":
        try:
            inputs, _ = task.feed.batch(np.arange(min(2, len(task.feed))))
            if task.recipe is not PLAIN and (why := why_alone(task.recipe, task.model, inputs)):
                raise FedsieveError(why)
            with training(task.model, task.recipe):
                return stacked(task, support, clients, batch, say, WAYS if task.theta.is_cuda else ("rules",))
        except FedsieveError as error:
            warnings.warn(
                f"executor: clients cannot be stacked ({error}), and train one after another, slower",
                stacklevel=2,
            )
            for name, parameter in task.model.named_parameters():
                parameter.requires_grad_(name in _inside(task))
    return Sequential(task, support)


def stacked(
    task: Task, support: Tensor | None, clients: int, batch: int, say: Callable[[str], None], ways: Sequence[Way]
) -> Stacked:
    """An executor that stacks the network in the first of the ways that is right for it."""
    fault: FedsieveError | None = None
    for way in ways:
        try:
            executor = Stacked(task, support, clients, batch, say, way)
            executor.check()
        except FedsieveError as error:
            fault = fault or error
            continue
        if way != "rules":
            reason = next(iter(executor.stack.scheme.strange.values()), fault)
            warnings.warn(f"executor: {reason}. {executor.stack.scheme.mapping()}", stacklevel=3)
        elif task.speed in COMPILING:
            say(TOLD)
        return executor
    assert fault is not None
    raise fault


def _inside(task: Task) -> set[str]:
    """The parameters of the task's model that are bound to its vector."""
    low = task.theta.data_ptr()
    high = low + task.theta.nbytes
    return {name for name, parameter in task.model.named_parameters() if low <= parameter.data_ptr() < high}


def rows_of(rows: Rows | None, members: range) -> Tensor | None:
    if rows is None or callable(rows):
        return rows and rows(members)
    return rows if rows.dim() == 1 else rows[members.start : members.stop]


def _filled(rows: Tensor, count: int) -> Tensor:
    """`rows` and as many repeats of the first as make `count`."""
    return rows if len(rows) == count else torch.cat([rows, rows[:1].expand(count - len(rows), *rows.shape[1:])])


def _teacher(task: Task) -> Callable[[Inputs], Tensor] | None:
    """The round's global model, for FedNTD: what the model is before a client's weights are laid over it."""
    if task.correction.kind != "fedntd":
        return None

    @torch.no_grad()
    def teach(inputs: Inputs) -> Tensor:
        with training(task.model, PLAIN), task.autocast():
            return widened(task.model(inputs))

    return teach

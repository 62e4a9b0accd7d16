"""A cohort over several processes: each rank trains the clients dealt to it, and rank 0 hands on what comes back.

Clients are dealt by how many images they train on, and every rank trains its own with the executor of one process, so
that the results are those of one process.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsieve.config import Correction, Optimizer
from fedsieve.federation.executors import Cohort, Executor, Stacked, Task, Trained, make_executor, rows_of
from fedsieve.federation.state import Context
from fedsieve.federation.team import Batch, Desk, Pace, Request, Split, Team
from fedsieve.federation.work import Work
from fedsieve.model.build import Classifier, OnFeatures
from fedsieve.model.space import ParamSpace


@dataclass(frozen=True)
class Begin(Request):
    """Make an executor like that of rank 0."""

    kind: str
    names: tuple[str, ...]  # of what trains
    support: Tensor | None
    rows: np.ndarray  # of the feed, with its labels and features
    labels: Tensor
    features: Tensor | None
    optimizer: Optimizer
    correction: Correction
    clients: int
    batch: int

    @classmethod
    def like(cls, executor: Executor) -> "Begin":
        task, stacked = executor.task, isinstance(executor, Stacked)
        return cls(
            kind="stacked" if stacked else "sequential",
            names=task.space.names,
            support=executor.support,
            rows=task.feed.rows,
            labels=task.feed.labels,
            features=task.feed.features,
            optimizer=task.optimizer,
            correction=task.correction,
            clients=executor.clients,
            batch=executor.batch if isinstance(executor, Stacked) else 0,
        )

    def perform(self, desk: Desk) -> Iterator[Batch]:
        device = desk.train.labels.device
        space = ParamSpace.of(desk.model, self.names)
        theta = space.bind(desk.model)
        features = None if self.features is None else self.features.to(device)
        feed, forward = desk.train.over(self.rows, self.labels.to(device), features), desk.model
        if features is not None:
            assert isinstance(desk.model, Classifier)
            forward = OnFeatures(desk.model.head)
        task = Task(
            forward, space, theta, feed, self.optimizer, self.correction, desk.autocast, desk.speed, desk.recipe
        )
        support = None if self.support is None else self.support.to(device)
        desk.equip(make_executor(self.kind, task, support, self.clients, self.batch, lambda _: None))
        return iter(())


@dataclass(frozen=True)
class Refresh(Request):
    """Take over weights outside the support that have changed."""

    def perform(self, desk: Desk) -> Iterator[Batch]:
        desk.executor.sync()
        return iter(())


@dataclass(frozen=True)
class Train(Request):
    """Train some clients, and give what `Trained` holds of them."""

    works: Sequence[Work]
    start: Tensor | None  # None: from the weights that the model has
    holds: Tensor | None
    control: Tensor | None
    lr: float
    statistics: Tensor | None = None

    def perform(self, desk: Desk) -> Iterator[Batch]:
        executor: Executor = desk.executor
        theta, support = executor.task.theta.detach(), executor.support
        start, holds, control, statistics = (
            None if rows is None else rows.to(theta.device)
            for rows in (self.start, self.holds, self.control, self.statistics)
        )
        if start is None:
            start = theta.clone() if support is None else theta.index_select(0, support)
        for trained in executor.train(Cohort(self.works, start, holds, control, statistics), self.lr):
            yield trained.moved, trained.sums, trained.gradients, trained.statistics


class Distributed:
    """A cohort over all ranks, each with an executor like `inner`, which is that of rank 0."""

    def __init__(self, team: Team, inner: Executor) -> None:
        self.team, self.inner = team, inner
        self.task, self.support = inner.task, inner.support
        self.stale, self.pace = False, Pace()
        assert team.desk is not None
        team.desk.equip(inner)
        team.update()
        team.tell(Begin.like(inner))

    @property
    def clients(self) -> int:
        """The number of clients that a rank trains at once."""
        return self.inner.clients

    def sync(self) -> None:
        """As of the executor of one process."""
        self.inner.sync()
        self.stale = True

    def train(self, cohort: Cohort, lr: float) -> Iterator[Trained]:
        """Results in the order of the cohort, as soon as they are there."""
        team, stacked = self.team, isinstance(self.inner, Stacked)
        team.update()
        if self.stale:
            team.tell(Refresh())
            self.stale = False
        theta = self.task.theta.detach()
        known = theta if self.support is None else theta.index_select(0, self.support)
        known = known.clone()

        def request(places: list[int]) -> Train:
            rows = [cohort.rows(range(place, place + 1)) for place in places]
            starts, holds, controls = (list(column) for column in zip(*rows, strict=True))
            start: Tensor | None = starts[0]
            if starts[0].dim() == 1:
                start = None if torch.equal(starts[0], known) else starts[0]
            else:
                start = torch.cat(starts)
            if any(row is not None for row in holds):  # None: all
                every = torch.ones(1, len(known), dtype=torch.bool, device=known.device)
                holds = [every if row is None else row for row in holds]
            works = [cohort.works[place] for place in places]
            own = [rows_of(cohort.statistics, range(place, place + 1)) for place in places]
            statistics = own[0] if own[0] is None or own[0].dim() == 1 else _together(own)
            return Train(works, start, _together(holds), _together(controls), lr, statistics)

        # Stacking decides the last digits, so the clock may only decide who trains what where nothing is stacked.
        split = (
            Split(self.clients, together=self.clients * team.size, most=-(-len(cohort.works) // team.size))
            if stacked
            else Split(self.clients, pace=self.pace)
        )
        for members, (moved, sums, gradients, statistics) in team.spread(
            [int((work.examples >= 0).sum()) for work in cohort.works],
            request,
            4 * known.nbytes,
            split,
        ):
            assert moved is not None and sums is not None
            yield Trained(members, moved, sums, gradients, statistics)


def spread(
    context: Context, costs: Sequence[float], request: Callable[[list[int]], Request], bytes_each: int
) -> Iterator[tuple[range, Batch]]:
    """Have clients worked on by all ranks, or here alone, at the weights that the model has; see `Team.spread`."""
    if context.team:
        context.team.update()
        yield from context.team.spread(costs, request, bytes_each)
        return
    desk = Desk(context.model, context.train, context.autocast, context.speed, context.experiment.seed, context.recipe)
    for place in range(len(costs)):
        for batch in request([place]).perform(desk):
            yield range(place, place + 1), batch


def _together(rows: Sequence[Tensor | None]) -> Tensor | None:
    there = [row for row in rows if row is not None]
    return torch.cat(there) if there else None


def cohort_executor(
    context: Context, task: Task, support: Tensor | None, cohort: int, at_once: int | None, batch: int
) -> Executor | Distributed:
    """The executor for cohorts of up to `cohort` clients, `at_once` on one device (None: as many as fit)."""
    each = -(-cohort // context.team.size) if context.team else cohort
    inner = make_executor(context.executor, task, support, min(at_once or each, each), batch, context.say)
    return Distributed(context.team, inner) if context.team else inner

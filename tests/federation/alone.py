"""Clients without an experiment: they answer given questions, or hold given features."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from torch import Tensor

from fedsieve.config import Message, Privacy
from fedsieve.federation.channel import EXACT, Channel, Parcel, Tally
from fedsieve.federation.local import LocalClients
from fedsieve.federation.ridge import Solver
from fedsieve.federation.secure import Kept
from fedsieve.federation.sums import Sums


@dataclass(frozen=True, eq=False)
class Given:
    """A question whose answers are given."""

    what: str
    round: int
    over: object
    answers: list
    coding: object = EXACT
    continues = False

    def parts(self, place, clients):
        return iter(self.answers)


def alone(privacy=Privacy(), ledger=None, account=None, held=(), stage="stage"):
    """Clients and their sums; `held` are clients' numbers and their features, labels and examples among these."""
    examples = dict(held[2]) if held else {}
    people = SimpleNamespace(examples=examples.get, settings=SimpleNamespace(weighting="examples"), weights={})
    experiment = SimpleNamespace(privacy=privacy, seed=0, message=Message())
    context = SimpleNamespace(experiment=experiment, population=people, ledger=ledger, account=account, memory=None)
    feed = SimpleNamespace(features=held[0], labels=held[1]) if held else None
    clients = LocalClients(context, stage, feed, Channel(Tally(ledger, stage), 0))
    return clients, Sums(context, clients, stage, "cpu")


def summed(ask, **how):
    """The sum of given answers, and of their n."""
    _, sums = alone(**how)
    return sums(ask, [client for client, _, _ in ask.answers])


def weighted_sum(rows, weights, bound, lost, number, privacy):
    """The secure weighted sum of given updates, of clients some of whom are lost."""
    clients, sums = alone(privacy)
    clients.rows = {client: Kept(row, weight=weights[client]) for client, row in rows.items()}
    clients.leaves = lost
    return sums.secure.weighted_sum(number, np.arange(len(next(iter(rows.values())))), list(rows), bound)


def federated_ridge(settings, features: Tensor, labels: Tensor, classes, parts, validation, ledger=None, **how):
    """A head in closed form from clients that hold `parts` of some features."""
    clients, sums = alone(ledger=ledger, held=(features, labels, parts), stage="head", **how)
    members = [client for client, _ in parts]
    solver = Solver(
        settings,
        features.shape[1],
        classes,
        total=lambda ask: sums(ask, members)[0],
        send=lambda over, values: clients.tell(Parcel("head", 0, over, EXACT), members, values).values,
    )
    return solver.head(validation)

"""A linear head in closed form as a stage: one round, in which clients send sums (see `least_squares`)."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from fedsieve.config import Ridge, Stage
from fedsieve.federation.asks import Losses, Statistics
from fedsieve.federation.channel import EXACT, Parcel
from fedsieve.federation.clients import Clients
from fedsieve.federation.least_squares import (
    DEFAULT_STRENGTH,
    SCALES,
    STRENGTHS,
    fit_scale,
    head_space,
    solve,
    statistics_space,
)
from fedsieve.federation.state import ServerContext, ServerState
from fedsieve.federation.sums import Sums
from fedsieve.model.build import Classifier
from fedsieve.model.space import ParamSpace
from fedsieve.train.feed import Examples
from fedsieve.train.loop import Tick, measure, predict
from fedsieve.train.record import Record

Labelled = tuple[Tensor, Tensor]  # features and labels
Solved = tuple[Tensor, Tensor, dict[str, float]]  # weight and bias, and what was chosen


@dataclass(frozen=True, eq=False)
class Solver:
    """Solves for a head of `classes` on features of `width`."""

    settings: Ridge
    width: int
    classes: int
    total: Callable[[Statistics | Losses], Tensor]  # the answers of all clients, summed
    send: Callable[[ParamSpace, Tensor], Tensor]  # sends values to all clients, and gives them as they are received

    def head(self, validation: Labelled | None) -> Solved:
        """Weight and bias, float64, and what was chosen.

        Strength and scale are chosen on `validation` features and labels. Without any, the strength is the default, and the
        scale is fitted on the clients' own images: they receive the head, and send their losses at a grid of scales.
        """
        total = self.total(Statistics(self.width, self.classes))
        # The product of the constant feature with itself counts the images.
        seen = max(1, round(statistics_space(self.width, self.classes).view(total, "gram")[-1].item()))

        def solved(strength: float) -> tuple[Tensor, Tensor]:
            return solve(total, seen, self.width, self.classes, strength)

        strength = self.settings.strength or DEFAULT_STRENGTH
        if self.settings.strength is None and validation is not None:
            features, labels = validation[0].double(), validation[1]
            right = {}
            for candidate in STRENGTHS:
                weight, bias = solved(candidate)
                right[candidate] = int(((features @ weight.T + bias).argmax(1) == labels).sum())
            strength = max(right, key=lambda candidate: (right[candidate], candidate))
        weight, bias = solved(strength)
        scale = self._scale(weight, bias, validation)
        return weight * scale, bias * scale, {"strength": strength, "temperature": 1 / scale}

    def _scale(self, weight: Tensor, bias: Tensor, validation: Labelled | None) -> float:
        if self.settings.temperature is not None:
            return 1 / self.settings.temperature
        if validation is not None:
            return fit_scale(validation[0].double() @ weight.T + bias, validation[1])
        over = head_space(self.width, self.classes)
        sent = over.flatten({"weight": weight.float(), "bias": bias.float()})
        return float(SCALES[int(self.total(Losses(self.send(over, sent), self.classes)).argmin())])


class RidgeHead:
    """A head in closed form from all clients, as a stage of one round."""

    def __init__(
        self,
        context: ServerContext,
        stage: Stage,
        space: ParamSpace,
        feeds: Callable[[], tuple[Examples, Examples]],
        connect: Callable[[Examples, ServerState], Clients],
        validate: Callable[[Examples], dict[str, float]],
    ) -> None:
        """`feeds` gives training and validation images as features of the backbone, and `connect` clients that have these."""
        assert isinstance(context.model, Classifier)
        self.context, self.stage, self.space, self.model = context, stage, space, context.model
        self.feeds, self.connect, self.validate = feeds, connect, validate
        self.state = ServerState(space.read(context.model))

    def rounds(self) -> Iterator[Tick]:
        """The one round. At the end the model has the head."""
        context, state, clock = self.context, self.state, time.perf_counter()
        sent = dict(context.ledger.total)
        train, validation = self.feeds()
        clients, members = self.connect(train, state), context.population.all_trainers
        if (before := context.changed_weights(but=self.space)) is not None:
            mask, values = before  # features are those of the backbone as it is now
            clients.tell(Parcel("context", 0, mask, EXACT, enclose=True), members, values.float())
        chosen = install(self.model, self.space, state, self._solved(clients, members, validation))
        state.refused = dict(Counter(clients.lost.values()))
        record = Record(stage=self.stage.name, round=1, cohort=len(members), refused=state.refused)
        record.note(replies=len(members) - len(clients.lost), **chosen)
        if len(train):
            record.note(**measure(predict(self.model.head, train, context.autocast), train.labels, "train"))
        record.note(**{f"bytes_{way}": context.ledger.total[way] - sent[way] for way in ("up", "down")})
        if context.account:
            record.epsilon = context.account.spent()
        record.note(**self.validate(validation))
        state.chosen = record.starting_with("val_")
        record.seconds = state.seconds = time.perf_counter() - clock
        yield Tick(1, 1, record)

    def _solved(self, clients: Clients, members: list[int], validation: Examples) -> Solved:
        sums = Sums(self.context, clients, self.stage.name, self.state.theta.device)
        classes, width = self.space.shapes[self.space.names.index("head.weight")]
        solver = Solver(
            self.stage.ridge,
            width,
            classes,
            total=lambda ask: sums(ask, members)[0],
            send=lambda over, values: clients.tell(Parcel("head", 0, over, EXACT), members, values).values,
        )
        return solver.head(None if validation.features is None else (validation.features, validation.labels))


def install(model: Classifier, space: ParamSpace, state: ServerState, solved: Solved) -> dict[str, float]:
    """Give the model a solved head, end the stage, and pass on what was chosen."""
    weight, bias, chosen = solved
    parts = {"head.weight": weight, "head.bias": bias}
    theta = space.flatten({name: parts[name].to(state.theta.dtype) for name in space.names})
    space.write(model, theta)
    state.theta, state.round, state.best_at, state.done = theta, 1, 1, True
    return chosen

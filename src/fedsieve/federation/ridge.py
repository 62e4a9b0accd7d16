"""A linear head in closed form, from all images in one place or from sums that clients send (see `least_squares`)."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fedsieve.config import Ridge
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


@dataclass(frozen=True, eq=False)
class OnePlace:
    """All features and labels, where the solver is."""

    features: Tensor
    labels: Tensor

    def features_of(self, client: int) -> Labelled:
        """All of them, whoever asks."""
        return self.features, self.labels

    def total(self, ask: Statistics | Losses) -> Tensor:
        """The answer to a question."""
        return next(ask.parts(self, [0]))[1]

    def send(self, over: ParamSpace, values: Tensor) -> Tensor:
        """Nothing travels."""
        return values

    def note(self, record: Record, state: ServerState) -> None:
        """Nobody else took part."""
        record.epoch = 1


class Members:
    """The clients of a stage, which send sums over their features."""

    def __init__(self, context: ServerContext, clients: Clients, stage: str, space: ParamSpace) -> None:
        """Sends clients what earlier stages changed: features are those of the backbone as it is now."""
        self.context, self.clients, self.members = context, clients, context.population.all_trainers
        self.sums = Sums(context, clients, stage, context.train.labels.device)
        self.sent = dict(context.ledger.total)
        if (before := context.changed_weights(but=space)) is not None:
            mask, values = before
            clients.tell(Parcel("context", 0, mask, EXACT, enclose=True), self.members, values.float())

    def total(self, ask: Statistics | Losses) -> Tensor:
        """The sum of the clients' answers."""
        return self.sums(ask, self.members)[0]

    def send(self, over: ParamSpace, values: Tensor) -> Tensor:
        """Send values to all clients, and give them as they are received."""
        return self.clients.tell(Parcel("head", 0, over, EXACT), self.members, values).values

    def note(self, record: Record, state: ServerState) -> None:
        """Record who took part, bytes and privacy spent."""
        lost, total = self.clients.lost, self.context.ledger.total
        state.refused = dict(Counter(lost.values()))
        record.note(round=1, cohort=len(self.members), replies=len(self.members) - len(lost), refused=state.refused)
        record.note(**{f"bytes_{way}": total[way] - self.sent[way] for way in ("up", "down")})
        if self.context.account:
            record.epsilon = self.context.account.spent()


def install(model: Classifier, space: ParamSpace, state: ServerState, solved: Solved) -> dict[str, float]:
    """Give the model a solved head, end the stage, and pass on what was chosen."""
    weight, bias, chosen = solved
    parts = {"head.weight": weight, "head.bias": bias}
    theta = space.flatten({name: parts[name].to(state.theta.dtype) for name in space.names})
    space.write(model, theta)
    state.theta, state.round, state.best_at, state.done = theta, 1, 1, True
    return chosen

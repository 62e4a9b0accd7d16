"""Questions to clients whose answers are only ever summed: what each answer holds, and how a client computes it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.config import Sieve
from fedsieve.federation.calibrate import client_scores, scored_rows
from fedsieve.federation.channel import EXACT, FP64, STATISTICS
from fedsieve.federation.clients import Contribution, Features, NotFinite, Place
from fedsieve.federation.least_squares import LOSSES, losses_at_scales, statistics, statistics_space
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.train.loop import measure_each
from fedsieve.train.modes import RunningStatistics
from fedsieve.train.objectives import Recipe


def metrics_space(columns: int) -> ParamSpace:
    """Where the sums of what is measured are."""
    return ParamSpace(("metrics",), ((columns,),))


METRICS = metrics_space(2)  # loss and correct answers, summed


@dataclass(frozen=True, eq=False)
class Metrics:
    """What a recipe measures of the server's model, such as loss and accuracy, over examples that each client holds back."""

    round: int
    recipe: Recipe

    what, coding, continues = "metrics", FP64, False

    @property
    def over(self) -> ParamSpace:
        return metrics_space(len(self.recipe.measured))

    def terms(self, client: int) -> Mapping[str, Any]:
        """Nothing but the masks in use, which every such question names."""
        return {}

    def parts(self, place: Place, clients: Sequence[int]) -> Iterator[Contribution]:
        """The sums of each client, computed in one pass over all their images."""
        if not clients:
            return
        people, task = place.context.population, place.task
        own, parts = self.recipe.statistics == "local", []
        for group in [[client] for client in clients] if own or self.recipe.metrics else [clients]:
            held = task.feed.take(np.concatenate([people.validation(client) for client in group]))
            kept = place.context.memory.get(group[0], held.labels.device).get(STATISTICS) if own else None
            with RunningStatistics(task.model).set_to(kept):
                parts.append(measure_each(task.model, held, task.autocast, self.recipe))
        values = torch.cat(parts)
        if not bool(values[:, 0].isfinite().all()):
            raise NotFinite("the loss on examples that clients hold back is not finite")
        ns = people.held[list(clients)].tolist()
        yield from zip(clients, (part.sum(0) for part in values.split(ns)), ns, strict=True)


@dataclass(frozen=True, eq=False)
class Scores:
    """Gradients of the weights that are still active, or their squares, summed over images of each client."""

    round: int
    evidence: str  # "fisher": squares; "gradient": with their signs
    sieve: Sieve
    over: Mask  # the weights that are still active
    number: int  # of the calibration round
    among: int  # clients that score
    address: tuple[int | str, ...]  # of the calibration's draws

    what, coding = "scores", EXACT

    @property
    def continues(self) -> bool:
        """Whether clients that fell out of the question before stay out."""
        return self.number > 0

    def terms(self, client: int) -> Mapping[str, Any]:
        """The place of the question in its calibration."""
        return {
            "evidence": self.evidence,
            "number": self.number,
            "among": self.among,
            "address": self.address,
            "over": self.over.id,
        }

    def parts(self, place: Place, clients: Sequence[int]) -> Iterator[Contribution]:
        """The scores of each client's share of the images."""
        context, count = place.context, -(-self.sieve.fisher.samples // self.among)
        asked = [(scored_rows(context, client, count, *self.address), (*self.address, client)) for client in clients]
        scored = client_scores(context, self.evidence, self.sieve, self.over, self.number, asked)
        for client, (values, n) in zip(clients, scored, strict=True):
            yield client, values.float(), n


@dataclass(frozen=True, eq=False)
class Shares:
    """Each client's mean squared gradients of the weights that train, which it also remembers, to blend by."""

    round: int
    sieve: Sieve
    over: Mask

    what, coding, continues = "scores", EXACT, False

    def terms(self, client: int) -> Mapping[str, Any]:
        """Blending works in one process only."""
        return {}

    def parts(self, place: Place, clients: Sequence[int]) -> Iterator[Contribution]:
        """The means, in single precision as they are remembered."""
        context, stage, asked = place.context, place.stage, []
        for client in clients:
            rng = generator(context.experiment.seed, "blend rows", stage, client)
            rows = rng.permutation(context.population.examples(client))[: self.sieve.fisher.samples]
            asked.append((rows, (stage, "blend", client)))
        scored = client_scores(context, "fisher", self.sieve, self.over, 0, asked)
        for client, (values, n) in zip(clients, scored, strict=True):
            own = (values / n).float()
            context.memory.put(client, self.round, **{f"{stage}.share": own})
            yield client, own, n


@dataclass(frozen=True, eq=False)
class Statistics:
    """What a ridge head needs: sums of products of features and labels."""

    width: int
    classes: int

    what, round, coding, continues = "statistics", 0, FP64, False

    @property
    def over(self) -> ParamSpace:
        return statistics_space(self.width, self.classes)

    def terms(self, client: int) -> Mapping[str, Any]:
        """Nothing: a client knows its features and the classes."""
        return {}

    def parts(self, place: Features, clients: Sequence[int]) -> Iterator[Contribution]:
        """The statistics of each client's features."""
        for client in clients:
            features, labels = place.features_of(client)
            yield client, statistics(features, labels, self.classes), len(labels)


@dataclass(frozen=True, eq=False)
class Losses:
    """The summed loss of a head at each of a grid of scales."""

    head: Tensor  # of `head_space`, as clients received it
    classes: int

    what, over, round, coding, continues = "losses", LOSSES, 0, FP64, True

    def terms(self, client: int) -> Mapping[str, Any]:
        """Nothing but the head, which is a message."""
        return {}

    def parts(self, place: Features, clients: Sequence[int]) -> Iterator[Contribution]:
        """The losses over each client's features."""
        for client in clients:
            features, labels = place.features_of(client)
            yield client, losses_at_scales(self.head, features, labels, self.classes), len(labels)

"""Personal models: what single clients make of the global model at the end, each tested as its client sees the world.

Every client starts from the global weights, adapts some of them to its own images, and is tested on the test set weighted
to its own shares of classes. Nothing is sent or chosen, and the model is left as it was, to the bit.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config import Correction, Optimizer, PersonalMethod, Sieve
from fedsieve.data.partitions import label_weights
from fedsieve.errors import FedsieveError
from fedsieve.federation.calibrate import client_masks
from fedsieve.federation.distributed import cohort_executor
from fedsieve.federation.executors import Cohort, Task
from fedsieve.federation.parts import blended
from fedsieve.federation.population import Population
from fedsieve.federation.state import Context
from fedsieve.federation.work import Draws, local_work
from fedsieve.mask.calibration import maskable
from fedsieve.mask.mask import Mask
from fedsieve.model.adapters import part_of
from fedsieve.model.build import Classifier, OnFeatures, trainable_names
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.train.feed import Examples, with_features
from fedsieve.train.loop import EVALUATION_BATCH, predict

AT_A_TIME = 64  # clients that have a mask of their own in memory


def chosen_clients(population: Population, count: int | None) -> np.ndarray:
    """The clients that get a personal model, ascending: `count` of all, drawn by the seed, strangers among them."""
    rng = generator(population.seed, "personal clients")
    return np.sort(rng.choice(len(population), count or len(population), replace=False))


def norm_names(model: nn.Module) -> list[str]:
    """The weights and biases of all norm layers; a network without one is refused."""
    space = ParamSpace.of(model)
    try:
        taking = maskable(space, model, ["norm"])
    except FedsieveError:
        raise FedsieveError("federation.personal.methods: norms: this network has no norm layers") from None
    return [name for name, start in zip(space.names, space.offsets, strict=False) if taking[start]]


class PersonalModels:
    """The personal models of some clients. `mask` is the last stage's, where all clients shared one."""

    def __init__(
        self,
        context: Context,
        clients: np.ndarray,
        mask: Mask | None,
        test: Examples,
        save: Callable[[PersonalMethod], None] = lambda _: None,
    ) -> None:
        """`save` is called while the model has the weights of a client."""
        experiment = context.experiment
        assert experiment.federation and experiment.federation.personal and isinstance(context.model, Classifier)
        self.context, self.model, self.settings = context, context.model, experiment.federation.personal
        self.clients, self.mask, self.test, self.save = clients.tolist(), mask, test, save
        self.stage = experiment.stages[-1]
        self.sparse = next((stage for stage in reversed(experiment.stages) if experiment.mask_of(stage)), None)
        examples = [context.population.examples(client) for client in self.clients]
        self.train = context.train.take(np.concatenate(examples))
        self.places = np.split(np.arange(len(self.train)), np.cumsum([len(mine) for mine in examples])[:-1])
        self.test_labels = test.labels.cpu().numpy()

    def accuracies(self, method: PersonalMethod) -> np.ndarray:
        """The accuracy of each client's model, (clients,); NaN where none of its classes is tested."""
        self.context.say(f"personal models: {method}, {len(self.clients):,} clients")
        space = self._space(method)
        theta = space.bind(self.model)
        weights = theta.detach()  # a view
        start = weights.clone()
        mask = self.mask if method in ("local", "blend") else None
        support = None if mask is None else mask.indices().to(theta.device)
        trained = slice(None) if support is None else support
        train, test = self.train, self.test
        if all(part_of(name) == "head" for name in space.names):
            train, test = self._features
        if method == "blend":
            models = self._blended(start[trained])
        else:
            models = self._trained(method, space, theta, support, train)
        found = np.empty(len(self.clients))
        for number, values in models:
            weights[trained] = values
            self.save(method)
            found[number] = self._accuracy(self.clients[number], test)
            weights.copy_(start)
        return found

    def _space(self, method: PersonalMethod) -> ParamSpace:
        """The weights that a method trains."""
        if method == "norms":
            return ParamSpace.of(self.model, norm_names(self.model))
        if method == "head":
            return ParamSpace.of(self.model, trainable_names(self.model, "head"))
        stage = self.sparse if method == "mask" else self.stage
        assert stage is not None
        return ParamSpace.of(self.model, trainable_names(self.model, stage.train))

    def _optimizer(self, method: PersonalMethod) -> Optimizer:
        stage = {"mask": self.sparse, "local": self.stage}.get(method)
        if stage is None or stage.method == "ridge" or not self.settings.as_trained:
            return self.settings.optimizer
        return stage.optimizer

    def _blended(self, start: Tensor) -> Iterator[tuple[int, Tensor]]:
        for number, client in enumerate(self.clients):
            yield number, blended(self.context, start, client, self.stage.name)

    def _trained(
        self, method: PersonalMethod, space: ParamSpace, theta: Tensor, support: Tensor | None, feed: Examples
    ) -> Iterator[tuple[int, Tensor]]:
        """Each client's number and the values (k,) that it ends with, as soon as they are there."""
        context, settings, seed = self.context, self.settings, self.context.experiment.seed
        sieve = self._own_sieve(method)
        start = theta.detach().clone() if support is None else theta.detach()[support]
        forward, optimizer = self._on(feed), self._optimizer(method)
        task = Task(
            forward, space, theta, feed, optimizer, Correction(), context.autocast, context.speed, context.recipe
        )
        executor = cohort_executor(
            context,
            task,
            support,
            len(self.clients),
            context.experiment.clients_at_once or context.population.cohort_size,
            min(settings.batch_size, max(len(places) for places in self.places)),
        )
        everyone, draws = range(len(self.clients)), Draws(feed, seed, ("personal", method))
        step = AT_A_TIME if sieve else len(everyone)  # of masks that are there at a time
        for group in (everyone[first : first + step] for first in everyone[::step]):
            works = [
                local_work(self.clients[number], self.places[number], settings.local, settings.batch_size, draws)
                for number in group
            ]
            masks = self._own_masks(method, sieve, space, [self.clients[number] for number in group]) if sieve else []

            def holds(members: range, masks: list[Mask] = masks) -> Tensor | None:
                return torch.stack([masks[place].to_bool(theta.device) for place in members]) if masks else None

            for trained in executor.train(Cohort(works, start, holds), optimizer.lr):
                for place, moved in zip(trained.clients, trained.moved, strict=True):
                    yield group[place], start + moved

    def _own_sieve(self, method: PersonalMethod) -> Sieve | None:
        """The sieve of clients' own masks; None where they train the same weights."""
        stage = {"mask": self.sparse, "local": self.stage}.get(method)
        sieve = self.context.experiment.mask_of(stage) if stage else None
        return sieve if sieve and (method == "mask" or sieve.scope == "client") else None

    def _own_masks(self, method: PersonalMethod, sieve: Sieve, space: ParamSpace, clients: list[int]) -> list[Mask]:
        """By `mask` new ones; by `local` those that clients had in the last stage, or new ones for those who never trained."""
        name, memory = f"{self.stage.name}.mask", self.context.memory
        kept = {client: memory.get(client).get(name) for client in clients} if method == "local" else {}
        masks = {client: Mask(space, bits.numpy()) for client, bits in kept.items() if bits is not None}
        lacking = [client for client in clients if client not in masks]
        masks |= zip(lacking, client_masks(self.context, sieve, space, lacking, "personal"), strict=True)
        return [masks[client] for client in clients]

    @cached_property
    def _features(self) -> tuple[Examples, Examples]:
        """Own and test images as features of the global backbone; own ones stay images where they change at random."""
        backbone, autocast = self.model.backbone, self.context.autocast
        test = with_features(self.test, backbone, EVALUATION_BATCH, autocast)
        if self.train.random:
            return self.train, test
        return with_features(self.train, backbone, EVALUATION_BATCH, autocast), test

    def _on(self, feed: Examples) -> nn.Module:
        """The network that takes the inputs of a feed."""
        return self.model if feed.features is None else OnFeatures(self.model.head)

    def _accuracy(self, client: int, test: Examples) -> float:
        """The accuracy of the model as it is, on the test images of the client's classes, weighted to its shares."""
        weights = label_weights(self.context.population.counts, client, self.test_labels)
        rows = np.flatnonzero(weights > 0)
        if not len(rows):
            return float("nan")
        mine = test.take(rows)
        logits = predict(self._on(mine), mine, self.context.autocast)
        # A model that diverged is right about nothing.
        correct = (logits.argmax(1) == mine.labels) & logits.isfinite().all(1)
        return float(weights[rows] @ correct.cpu().numpy())


def spread(accuracy: np.ndarray) -> dict[str, Any]:
    """Mean, standard deviation, worst decile (its mean) and worst of some clients' accuracies."""
    known = np.sort(accuracy[np.isfinite(accuracy)])
    if not len(known):
        return {"clients": 0}
    worst = known[: max(1, round(0.1 * len(known)))]
    return {
        "clients": len(known),
        "mean": float(known.mean()),
        "std": float(known.std()),
        "worst_decile": float(worst.mean()),
        "worst": float(known[0]),
    }


def spread_apart(accuracy: np.ndarray, strangers: np.ndarray) -> dict[str, Any]:
    """The `spread` of clients that may train and, where there are any, of strangers; `strangers` (clients,) is bool."""
    return spread(accuracy[~strangers]) | ({"strangers": spread(accuracy[strangers])} if strangers.any() else {})

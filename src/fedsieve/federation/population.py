"""The clients of a federation: their images and devices, the cohort of each round, and simulated failures."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from fedsieve.config import Device, Federation
from fedsieve.data.partitions import ClassCounts, Shards, class_counts, make_partition
from fedsieve.federation.attacks import hostile_clients
from fedsieve.privacy.dp import poisson_cohort
from fedsieve.randomness import generator


@dataclass(frozen=True, eq=False)
class Population:
    """All clients. Client k holds the examples `shards.client(k)` of the training feed."""

    settings: Federation
    seed: int
    shards: Shards
    counts: ClassCounts
    strangers: np.ndarray  # clients that never train, ascending
    secret: bytes | None = None  # under differential privacy, what cohorts are drawn by instead of the seed

    def __len__(self) -> int:
        return len(self.shards)

    def examples(self, client: int) -> np.ndarray:
        """The images that a client trains on."""
        return self.shards.client(client)[self.held[client] :]

    def validation(self, client: int) -> np.ndarray:
        """The images that a client never trains on: the first of a shard, whose order is random."""
        return self.shards.client(client)[: self.held[client]]

    @cached_property
    def held(self) -> np.ndarray:
        """The number of images that each client keeps for validation, (K,): at least one if another is left to train on."""
        share, sizes = self.settings.client_validation, self.shards.sizes
        return np.clip(np.rint(share * sizes).astype(np.int64), int(share > 0), sizes - 1)

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of images that each client trains on, (K,). Cached, so that rounds do not compute it for all clients."""
        return self.shards.sizes - self.held

    @cached_property
    def weights(self) -> np.ndarray:
        """The weight of each client in a mean, (K,)."""
        return self.sizes if self.settings.weighting == "examples" else np.ones_like(self.sizes)

    @property
    def trainers(self) -> int:
        """The number of clients that may train."""
        return len(self) - len(self.strangers)

    @cached_property
    def hostile(self) -> set[int]:
        """Clients that attack."""
        attack = self.settings.attack
        return set(hostile_clients(self.seed, len(self), attack.fraction).tolist()) if attack else set()

    @property
    def rate(self) -> float:
        """The share of clients in a round."""
        return self.cohort_size / self.trainers if isinstance(self.settings.cohort, int) else self.settings.cohort

    @property
    def cohort_size(self) -> int:
        """The number of clients in a round; under differential privacy, its mean."""
        return self.settings.cohort_size(self.trainers)

    @property
    def all_trainers(self) -> list[int]:
        """The clients that may train, ascending."""
        return self.trainer(np.arange(self.trainers)).tolist()

    def trainer(self, number: np.ndarray) -> np.ndarray:
        """Clients that may train by their number among these, without a list of them all."""
        # The j-th stranger has strangers[j] - j trainers before it.
        return number + np.searchsorted(self.strangers - np.arange(len(self.strangers)), number, side="right")

    def cohort(self, stage: str, round: int) -> np.ndarray:
        """The clients of a round, ascending, drawn without replacement; by a secret, each on its own."""
        if self.secret is not None:
            return self.trainer(poisson_cohort(self.secret, self.trainers, self.rate, stage, round))
        if self.settings.sampling == "shuffled":
            rounds = self.trainers // self.cohort_size  # of a pass; the few whom it leaves over are others each time
            first = round % rounds * self.cohort_size
            return self.trainer(
                np.sort(_shuffled(self.seed, stage, round // rounds, self.trainers)[first : first + self.cohort_size])
            )
        rng = generator(self.seed, "cohort", stage, round)
        return self.trainer(np.sort(rng.choice(self.trainers, self.cohort_size, replace=False, shuffle=False)))

    def device(self, client: int) -> Device:
        """The device of a client: dealt by a draw of its own."""
        devices = self.settings.devices
        if not devices:
            return Device()
        shares = np.cumsum([device.share for device in devices])
        drawn = generator(self.seed, "device", client).random() * shares[-1]
        return devices[min(int(np.searchsorted(shares, drawn, side="right")), len(devices) - 1)]

    def fate(self, stage: str, round: int, client: int) -> str:
        """The fate of a chosen client in a round: "ok", "unavailable", "crash", "late" or "corrupt"."""
        failures = self.settings.failures
        if not (failures.unavailable or failures.crash or failures.corrupt or failures.deadline):
            return "ok"
        unavailable, crash, corrupt = generator(self.seed, "failures", stage, round, client).random(3)
        if unavailable < failures.unavailable:
            return "unavailable"
        if crash < failures.crash:
            return "crash"
        if failures.deadline is not None and self.delay(stage, round, client) > failures.deadline:
            return "late"
        return "corrupt" if corrupt < failures.corrupt else "ok"

    def delay(self, stage: str, round: int, client: int) -> float:
        """Simulated seconds that a client takes to answer."""
        mean = self.device(client).delay
        return float(generator(self.seed, "delay", stage, round, client).exponential(mean)) if mean else 0.0

    def waiting(self, stage: str, round: int, fates: Mapping[int, str]) -> float:
        """Simulated seconds from the broadcast to the last reply, or to the deadline, if somebody is late or silent."""
        deadline = self.settings.failures.deadline
        waits = [0.0]
        for client, fate in fates.items():
            if fate in ("late", "crash"):
                waits.append(deadline or 0.0)  # without one, a crash is noticed at once
            elif fate != "unavailable":
                waits.append(self.delay(stage, round, client))
        return max(waits)


@lru_cache(maxsize=2)
def _shuffled(seed: int, stage: str, number: int, trainers: int) -> np.ndarray:
    """The order in which a pass over all clients calls them."""
    return generator(seed, "pass", stage, number).permutation(trainers)


def make_population(
    settings: Federation, labels: np.ndarray, seed: int, groups: np.ndarray | None = None
) -> Population:
    """Deal the training examples to clients, and set strangers apart."""
    shards = make_partition(settings.partition, labels, settings.clients or 100, generator(seed, "partition"), groups)
    return dealt(settings, seed, shards, labels)


def dealt(settings: Federation, seed: int, shards: Shards, labels: np.ndarray) -> Population:
    """The clients that hold these shards of examples, some of them set apart as strangers."""
    rng = generator(seed, "strangers")
    strangers = np.sort(rng.choice(len(shards), settings.strangers(len(shards)), replace=False))
    return Population(settings, seed, shards, class_counts(shards, labels), strangers)

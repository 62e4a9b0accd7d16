"""What a training loop sees of the data: rows in, model inputs and labels out, both on the device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.data.store import ImageStore, to_rows
from fedsieve.data.tensors import TensorStore, fingerprint, read_tensors
from fedsieve.data.transforms import Transform
from fedsieve.model.calling import Inputs

Autocast = Callable[[], AbstractContextManager]


class Examples:
    """Examples of one split: example i is row `rows[i]` of a store, and `labels[i]` is its label.

    With `features` (N, width), inputs are those instead of what is stored: a frozen backbone needs to be run only once.
    """

    rows: np.ndarray
    labels: Tensor
    features: Tensor | None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def random(self) -> bool:
        """Whether inputs change at random in training."""
        return False

    def changes(self, rng: np.random.Generator, count: int) -> np.ndarray | None:
        """Random parameters (count, P) of `count` examples, on the host; None where nothing is random."""
        return None

    def fetch(self, examples: np.ndarray, draws: Tensor | None = None) -> tuple[Tensor, ...]:
        """Tensors that `inputs` needs of the given examples (with their draws), and last the labels."""
        raise NotImplementedError

    def inputs(self, *raw: Tensor) -> Inputs:
        """Model inputs of fetched tensors."""
        raise NotImplementedError

    def over(self, rows: np.ndarray, labels: Tensor, features: Tensor | None = None) -> Self:
        """Other examples of the same store."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator) -> Tensor | None:
        """Random parameters of one pass over all examples, on the device; None where nothing is random."""
        draws = self.changes(rng, len(self))
        return None if draws is None else torch.from_numpy(draws).to(self.labels.device)

    def batch(self, examples: np.ndarray, draws: Tensor | None = None) -> tuple[Inputs, Tensor]:
        """Inputs and labels of the given examples."""
        *raw, labels = self.fetch(examples, draws)
        return self.inputs(*raw), labels

    def take(self, examples: np.ndarray) -> Self:
        """Only these examples, in this order."""
        index = to_rows(examples).to(self.labels.device)
        features = None if self.features is None else self.features[index]
        return self.over(self.rows[examples], self.labels[index], features)

    def in_order(self, batch_size: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Every example once, in order, as in evaluation."""
        for start in range(0, len(self), batch_size):
            yield self.batch(np.arange(start, min(start + batch_size, len(self))))


@dataclass(frozen=True)
class Feed(Examples):
    """Images, which a transform makes into inputs."""

    store: ImageStore
    transform: Transform
    rows: np.ndarray
    labels: Tensor
    features: Tensor | None = None

    @property
    def random(self) -> bool:
        """Whether the transform is; features stay as they are."""
        return self.features is None and self.transform.random

    def changes(self, rng: np.random.Generator, count: int) -> np.ndarray | None:
        """The transform's random parameters."""
        return self.transform.draw(rng, count, *self.store.height_width) if self.random else None

    def fetch(self, examples: np.ndarray, draws: Tensor | None = None) -> tuple[Tensor, ...]:
        """Images or features of the given examples, their draws, and last the labels."""
        index = to_rows(examples).to(self.store.device, non_blocking=True)
        labels = self.labels[index]
        if self.features is not None:
            return self.features[index], labels
        images = self.store.batch(to_rows(self.rows[examples]))
        return (images, labels) if draws is None else (images, draws[index], labels)

    def inputs(self, *raw: Tensor) -> Tensor:
        """Images transformed at random with their draws, as in evaluation without; features as they are."""
        images, *draws = raw
        if self.features is not None:
            return images
        return self.transform.train(images, *draws) if draws else self.transform.evaluate(images)

    def over(self, rows: np.ndarray, labels: Tensor, features: Tensor | None = None) -> Self:
        """Other examples of the same images."""
        return replace(self, rows=rows, labels=labels, features=features)


@dataclass(frozen=True)
class TensorFeed(Examples):
    """A user's own tensors, which the model takes as they are. Labels may be of any shape and type."""

    store: TensorStore
    rows: np.ndarray
    labels: Tensor
    features: Tensor | None = None

    @property
    def fingerprint(self) -> str:
        """A digest of all inputs and labels."""
        return fingerprint(self.store, self.rows, self.labels)

    def fetch(self, examples: np.ndarray, draws: Tensor | None = None) -> tuple[Tensor, ...]:
        """Tensors of the given examples, and last the labels."""
        labels = self.labels[to_rows(examples).to(self.labels.device)]
        if self.features is not None:
            return self.features[to_rows(examples).to(self.labels.device)], labels
        return *self.store.batch(to_rows(self.rows[examples]).to(self.store.device)), labels

    def inputs(self, *raw: Tensor) -> Inputs:
        """Tensors in the structure that they were given in."""
        return raw[0] if self.features is not None else self.store.shaped(raw)

    def over(self, rows: np.ndarray, labels: Tensor, features: Tensor | None = None) -> Self:
        """Other examples of the same tensors."""
        return replace(self, rows=rows, labels=labels, features=features)


def tensor_feed(
    data: Any, device: torch.device | str = "cpu", columns: tuple[Sequence[str] | str, str] | None = None
) -> TensorFeed:
    """A feed of a user's data: (inputs, labels), a torch Dataset with a length, or a datasets.Dataset and its `columns`."""
    store, labels = read_tensors(data, torch.device(device), columns)
    return TensorFeed(store, np.arange(len(labels)), labels)


AnyExamples = TypeVar("AnyExamples", bound=Examples)


@torch.no_grad()
def with_features(feed: AnyExamples, backbone: nn.Module, batch_size: int, autocast: Autocast) -> AnyExamples:
    """The same examples as features of a frozen backbone, computed once."""
    parts = []
    for inputs, _ in feed.in_order(batch_size):
        with autocast():
            parts.append(backbone(inputs).float())
    return feed.over(feed.rows, feed.labels, torch.cat(parts))

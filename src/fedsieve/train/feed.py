"""What a training loop sees of the data: rows in, model inputs and labels out, both on the device."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.data.store import ImageStore, to_rows
from fedsieve.data.transforms import Transform

Autocast = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class Feed:
    """Examples of one split: example i is row `rows[i]` of the store, and `labels[i]` is its class.

    With `features` (N, width), inputs are those instead of images: a frozen backbone needs to be run only once.
    """

    store: ImageStore
    transform: Transform
    rows: np.ndarray
    labels: Tensor
    features: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def draw(self, rng: np.random.Generator) -> Tensor | None:
        """Random parameters of one pass over all examples, on the device; None where nothing is random."""
        if self.features is not None or not self.transform.random:
            return None
        draws = self.transform.draw(rng, len(self), *self.store.height_width)
        return torch.from_numpy(draws).to(self.store.device)

    def fetch(self, examples: np.ndarray, draws: Tensor | None = None) -> tuple[Tensor, ...]:
        """What `inputs` needs of the given examples (images or features, and their draws), and last the labels."""
        index = to_rows(examples).to(self.store.device, non_blocking=True)
        labels = self.labels[index]
        if self.features is not None:
            return self.features[index], labels
        images = self.store.batch(to_rows(self.rows[examples]))
        return (images, labels) if draws is None else (images, draws[index], labels)

    def inputs(self, images: Tensor, draws: Tensor | None = None) -> Tensor:
        """Model inputs: images transformed at random with `draws`, as in evaluation without; features as they are."""
        if self.features is not None:
            return images
        return self.transform.evaluate(images) if draws is None else self.transform.train(images, draws)

    def batch(self, examples: np.ndarray, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the given examples."""
        *raw, labels = self.fetch(examples, draws)
        return self.inputs(*raw), labels

    def take(self, examples: np.ndarray) -> "Feed":
        """Only these examples, in this order."""
        index = to_rows(examples).to(self.labels.device)
        features = None if self.features is None else self.features[index]
        return replace(self, rows=self.rows[examples], labels=self.labels[index], features=features)

    def in_order(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Every example once, in order, as in evaluation."""
        for start in range(0, len(self), batch_size):
            yield self.batch(np.arange(start, min(start + batch_size, len(self))))


@torch.no_grad()
def with_features(feed: Feed, backbone: nn.Module, batch_size: int, autocast: Autocast) -> Feed:
    """The same examples as features of a frozen backbone, computed once."""
    parts = []
    for inputs, _ in feed.in_order(batch_size):
        with autocast():
            parts.append(backbone(inputs).float())
    return Feed(feed.store, feed.transform, feed.rows, feed.labels, torch.cat(parts))

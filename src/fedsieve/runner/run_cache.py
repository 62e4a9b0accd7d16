"""A cache that the runs of one process share, so that a grid of them loads images and networks once.

Compiled steps are not here: torch.compile itself knows networks of the same shape again.
"""

import copy
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from fedsieve.config import Data, Model
from fedsieve.data.image_tables import Split
from fedsieve.data.sources import ImageSet, load_images
from fedsieve.data.store import ImageStore
from fedsieve.model.build import Classifier
from fedsieve.model.weights import load_classifier

T = TypeVar("T")
# What decides which pixels a split has; the rest of a data section says how they are used.
PIXELS = {"source", "subset", "revision", "image_column", "label_column", "train_split", "test_split", "test_fraction"}
PIXELS |= {"size", "cache", "class_names"}


class RunCache:
    """Decoded images, images on the device, networks as they start, features of frozen backbones.

    Results do not depend on it: what is kept is what a run alone would make. A run alone keeps nothing.
    """

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self._kept: dict[tuple[Hashable, ...], Any] = {}

    def once(self, key: tuple[Hashable, ...], make: Callable[[], T], most: int | None = None) -> T:
        """Give what `make` first made for this key.

        Keeps at most `most` entries per prefix; the least recently used go first.
        """
        if not self.keep:
            return make()
        found = self._kept.pop(key) if key in self._kept else make()
        self._kept[key] = found  # the one asked for latest comes last
        if most is not None:
            for old in [other for other in self._kept if other[0] == key[0]][:-most]:
                del self._kept[old]
        return found

    def images(self, data: Data, split: Split, say: Callable[[str], None] = lambda _: None) -> ImageSet:
        """One split, read once."""
        key = ("images", split, data.model_dump_json(include=PIXELS))
        return self.once(key, lambda: load_images(data, split, say))

    def store(self, data: Data, split: Split, images: ImageSet, device: torch.device) -> ImageStore:
        """Its images where training wants them."""
        key = ("store", split, images.fingerprint, device, data.placement)
        return self.once(key, lambda: ImageStore(images.images, device, data.placement))

    def classifier(self, config: Model, classes: int, size: int, seed: int) -> Classifier:
        """A network of the caller's own, with the weights that a run with this seed starts from."""
        key = ("classifier", config.model_dump_json(), classes, size, seed)
        model = self.once(key, lambda: load_classifier(config, classes, size, seed))
        return copy.deepcopy(model) if self.keep else model

"""The setup that the stages of an experiment share: device, data, model, and features of a frozen backbone."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from fedsieve.config import Data, Experiment, Stage
from fedsieve.data.image_tables import Split
from fedsieve.data.sources import keep_classes
from fedsieve.data.transforms import Transform
from fedsieve.errors import FedsieveError
from fedsieve.federation.population import Population
from fedsieve.model.build import Classifier, trainable_names
from fedsieve.model.space import ParamSpace
from fedsieve.model.weights import digest
from fedsieve.runner.estimate import images_trained
from fedsieve.runner.run_cache import RunCache
from fedsieve.train.feed import Autocast, Examples, Feed, with_features
from fedsieve.train.loop import EVALUATION_BATCH, evaluate
from fedsieve.train.objectives import PLAIN, Recipe
from fedsieve.train.replay import Speed

# Pixels that a run trains on, from which on compiling pays: 44 s cold for ViT-S/16 on an H200, which 0.5 M images of 224 px or
# 3.5 M of 64 px win back (docs/benchmarks.md).
WORTH_COMPILING = 2e10
FEATURES = 6  # sets that are kept: two splits of three backbones; those of trained ones do not come again


@dataclass(frozen=True)
class Setup:
    """The setup that the stages of one experiment share."""

    experiment: Experiment
    device: torch.device
    autocast: Autocast
    train: Examples
    validation: Examples
    open_test: Callable[[], Examples]
    class_names: list[str]
    data_fingerprint: str
    model: nn.Module
    say: Callable[[str], None]  # to the user, one line
    cache: RunCache
    transform: Transform | None = None  # None: inputs are a user's own
    recipe: Recipe = PLAIN
    people: Population | None = None  # clients that exist already; None: as the partition deals
    trains: Callable[[str], bool] | None = None  # which parameters train, by name; None: the parts that a stage names

    def test_feed(self) -> Examples:
        """The test split, opened. Called once, at the end, unless the experiment asks for test curves."""
        return self.open_test()

    @property
    def classifier(self) -> Classifier:
        """The model, which has a backbone and a head."""
        assert isinstance(self.model, Classifier)
        return self.model

    @property
    def keeps_features(self) -> bool:
        """Whether a frozen backbone gives the same features in every epoch, so that they are computed once."""
        return isinstance(self.model, Classifier) and self.transform is not None and not self.transform.random

    @property
    def speed(self) -> Speed:
        """How steps are run."""
        return chosen_speed(self.experiment, self.device, images_trained(self.experiment, len(self.train)))

    def space(self, stage: Stage) -> ParamSpace:
        """The weights that a stage trains."""
        if self.trains is None:
            return ParamSpace.of(self.model, trainable_names(self.model, stage.train))
        names = [name for name, _ in self.model.named_parameters() if self.trains(name)]
        return ParamSpace.of(self.model, names)

    def validate(self, forward: nn.Module, validation: Examples) -> dict[str, float]:
        """Loss and accuracy on validation examples; nothing where there are none."""
        return evaluate(forward, validation, self.autocast, self.recipe)


def chosen_executor(experiment: Experiment, device: torch.device) -> str:
    """The executor of a cohort, on every rank: sequential or stacked."""
    if experiment.executor == "distributed":
        return "stacked" if device.type == "cuda" or experiment.clients_at_once else "sequential"
    if experiment.executor == "auto":
        return "stacked" if device.type == "cuda" else "sequential"
    return experiment.executor


def chosen_speed(experiment: Experiment, device: torch.device, images: float) -> Speed:
    """How steps on so many images are run: compiled, where `auto` may choose and that saves more time than it takes."""
    if experiment.compile != "auto":
        return experiment.compile
    if device.type != "cuda":
        return "eager"
    return "full" if images * experiment.data.size**2 > WORTH_COMPILING else "graph"


def open_split(
    data: Data,
    split: Split,
    class_names: list[str],
    transform: Transform,
    device: torch.device,
    cache: RunCache | None = None,
) -> Feed:
    """A whole split as a feed; one that does not have the classes of the model is refused."""
    cache = cache or RunCache(keep=False)
    images = cache.images(data, split)
    rows, labels, names = keep_classes(images, np.arange(len(images)), data.classes)
    if names != class_names:
        raise FedsieveError(
            f"data.source: the classes of {data.source} ({split}) are not those of the model: "
            f"{_few(names)} instead of {_few(class_names)}"
        )
    return Feed(cache.store(data, split, images, device), transform, rows, labels.to(device))


def _few(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def feature_feeds(setup: Setup) -> tuple[Feed, Feed]:
    """Training and validation images as features of the backbone."""
    assert isinstance(setup.train, Feed) and isinstance(setup.validation, Feed)
    train, validation = featured(setup, "train", setup.train, setup.validation)
    return train, validation


def featured(setup: Setup, split: Split, *feeds: Feed) -> list[Feed]:
    """Images as features of the backbone, as in evaluation; those of all feeds of a split at once.

    They are computed in the split's order, so that they are the same whatever a seed holds out for validation.
    """
    rows, first = np.unique(np.concatenate([feed.rows for feed in feeds]), return_index=True)
    if not len(rows):
        return list(feeds)
    whole = replace(feeds[0], rows=rows, labels=torch.cat([feed.labels for feed in feeds])[first])
    backbone, data, precision = setup.classifier.backbone, setup.data_fingerprint, setup.experiment.precision
    # Not all of a network shows in its weights: the number of heads does not.
    network = setup.experiment.model.model_dump_json(include={"backbone", "options", "lora"}), digest(backbone)
    which = hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()
    key = ("features", network, data, split, whole.transform, which, setup.device, precision)
    made = setup.cache.once(
        key, lambda: with_features(whole, backbone, EVALUATION_BATCH, setup.autocast).features, FEATURES
    )
    whole = replace(whole, features=made)
    return [whole.take(np.searchsorted(rows, feed.rows)) if len(feed) else feed for feed in feeds]

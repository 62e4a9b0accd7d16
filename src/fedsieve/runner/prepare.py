"""From a validated experiment to things that can be trained."""

import hashlib
from importlib import resources
from typing import Any

import numpy as np
import safetensors.torch
from torch import Tensor

from fedsieve.config import Data, Experiment, Model, parse_config, words_in
from fedsieve.data.image_tables import cache_folder
from fedsieve.data.sources import keep_classes
from fedsieve.data.splits import hold_out
from fedsieve.data.transforms import HALF, IMAGENET, channel_statistics, make_transform
from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomic
from fedsieve.model.build import trainable_names
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.runner.environment import choose_device, make_autocast, set_deterministic
from fedsieve.runner.progress import Display
from fedsieve.runner.run_cache import RunCache
from fedsieve.runner.setup import Setup, open_split
from fedsieve.runner.stages import CentralStage
from fedsieve.train.feed import Feed
from fedsieve.train.sieve import check_sieve

Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def config_digest(experiment: Experiment) -> str:
    """A digest of what decides the weights: not of where they are computed, logged, cached or saved, or if tested."""
    incidental: Any = {
        "device": True,
        "tracking": True,
        "checkpoint": True,
        "test": True,
        "data": {"cache", "placement"},
    }
    plugins = sorted({word.origin for word in words_in(experiment)} - {""})
    content = experiment.model_dump_json(exclude=incidental) + "".join(plugins)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def prepare(experiment: Experiment, display: Display, cache: RunCache | None = None, server: bool = True) -> Setup:
    """Load data and model, or take what earlier runs left in `cache`.

    Where clients are sites with images of their own, as the `server` has them, or as a site does. `preflight` comes first.
    """
    cache, device = cache or RunCache(keep=False), choose_device(experiment.device)
    set_deterministic(experiment.deterministic)
    data = experiment.data
    images = cache.images(data, "train", display.say)
    if sites := server and experiment.own_images:  # who train on their own: what the server holds is for validation
        rows, held = np.arange(0), np.arange(len(images))
    else:
        rows, held = split_rows(experiment, images.labels.numpy())
    # Split first, choose classes second: the split is then the same whatever the classes.
    train_rows, train_labels, class_names = keep_classes(images, rows, data.classes)
    held_rows, held_labels, _ = keep_classes(images, held, data.classes)
    if not len(train_rows) and not sites:
        chosen = "" if data.classes is None else " of data.classes"
        raise FedsieveError(f"data.val_fraction: {data.val_fraction:g} leaves no image{chosen} to train on")
    transform = make_transform(data, *statistics(data, images.images, train_rows))
    store = cache.store(data, "train", images, device)
    config = with_weights_file(experiment, display)
    model = cache.classifier(config, len(class_names), data.size, experiment.seed)
    for stage in experiment.stages:
        trainable_names(model, stage.train)
        if (sieve := experiment.mask_of(stage)) is not None:
            check_sieve(sieve, model, ParamSpace.of(model, trainable_names(model, stage.train)))
    return Setup(
        experiment=experiment,
        device=device,
        autocast=make_autocast(experiment, device),
        train=Feed(store, transform, train_rows, train_labels.to(device)),
        validation=Feed(store, transform, held_rows, held_labels.to(device)),
        open_test=lambda: open_split(data, "test", class_names, transform, device, cache),
        class_names=class_names,
        data_fingerprint=images.fingerprint,
        model=model.to(device),
        say=display.say,
        cache=cache,
        transform=transform,
    )


def split_rows(experiment: Experiment, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows to train on, and those to validate on."""
    data = experiment.data
    rows, held = hold_out(labels, data.val_fraction, data.stratified, generator(experiment.seed, "validation split"))
    if data.val_fraction and not len(held):
        raise FedsieveError(
            f"data.val_fraction: {data.val_fraction:g} of {len(labels)} images leaves none to validate on"
        )
    return rows, held


def statistics(data: Data, images: Tensor, rows: np.ndarray) -> Statistics:
    """Mean and standard deviation of the colours, as the experiment normalises them."""
    if data.normalize == "data":
        return channel_statistics(images, rows)
    return IMAGENET if data.normalize == "imagenet" else HALF


def with_weights_file(experiment: Experiment, display: Display) -> Model:
    """The model's config with `weights: digits` replaced by a file, which is made on first use."""
    if experiment.model.weights != "digits":
        return experiment.model
    recipe = pretraining(experiment)
    key = hashlib.blake2b(recipe.model_dump_json(exclude={"name", "tracking", "checkpoint"}).encode(), digest_size=16)
    file = cache_folder(experiment.data) / "weights" / f"{key.hexdigest()}.safetensors"
    if not file.exists():
        display.say("pretraining a small backbone on the digits 0 to 4, once")
        setup = prepare(recipe, display)
        for stage in recipe.stages:
            for tick in CentralStage(setup, stage).ticks():
                display.step(stage.name, tick)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in setup.classifier.backbone.state_dict().items()}
        write_atomic(file, safetensors.torch.save(tensors))
    return experiment.model.model_copy(update={"weights": str(file)})


def pretraining(experiment: Experiment) -> Experiment:
    """The experiment that makes `weights: digits`: the same network on the first half of the classes.

    It keeps the experiment's split, so that pretraining sees no image on which something is later measured.
    """
    recipe = parse_config(asset("pretrain.yaml"))
    data = experiment.data.model_copy(update={"classes": [0, 1, 2, 3, 4], "transform": recipe.data.transform})
    model = experiment.model.model_copy(update={"weights": "none", "head": "linear", "lora": None, "adapter": None})
    same = {name: getattr(experiment, name) for name in ("seed", "device", "deterministic")}
    return recipe.model_copy(update=same | {"data": data, "model": model})


def asset(name: str) -> str:
    """The text of a file that ships inside the package."""
    return (resources.files("fedsieve") / "assets" / name).read_text(encoding="utf-8")

"""From a validated experiment to things that can be trained: device, data, model."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from fedsieve import hub
from fedsieve.config import Data, Device, Experiment, Model, Sieve, Stage, parse_config
from fedsieve.data.sources import Split, cache_folder, keep_classes, kind_of
from fedsieve.data.splits import hold_out
from fedsieve.data.transforms import HALF, IMAGENET, Transform, channel_statistics, make_transform
from fedsieve.errors import FedsieveError
from fedsieve.federation.calibrate import check_tiers
from fedsieve.federation.personal import norm_names
from fedsieve.files import write_atomic
from fedsieve.mask.mask import Mask
from fedsieve.model.adapters import check_reached
from fedsieve.model.build import Classifier, build_classifier, check_backbone, trainable_names
from fedsieve.model.space import ParamSpace
from fedsieve.model.weights import digest, weights_file
from fedsieve.randomness import generator
from fedsieve.runner.environment import choose_device, make_autocast, set_deterministic
from fedsieve.runner.estimate import images_trained
from fedsieve.runner.progress import Display
from fedsieve.runner.shared import Shared
from fedsieve.train.feed import Autocast, Feed, with_features
from fedsieve.train.loop import EVALUATION_BATCH, StageState, Tick, measure, predict, train_stage
from fedsieve.train.replay import Speed
from fedsieve.train.savings import spare_frozen
from fedsieve.train.sieve import check_sieve

# What decides how weights are scored, and not whether a mask of so many can be made.
SCORING = {"rule", "fisher", "calibration_rounds", "schedule", "alpha", "scale", "shrink"}
Statistics = tuple[tuple[float, ...], tuple[float, ...]]
# Pixels that a run trains on, from which on compiling pays: 44 s cold for ViT-S/16 on an H200, which 0.5 M images of 224 px or
# 3.5 M of 64 px win back (docs/benchmarks.md).
WORTH_COMPILING = 2e10
STEP = 32  # pixels between the sizes that are tried where a network does not take the asked one


def config_digest(experiment: Experiment) -> str:
    """A digest of what decides the weights: not of where they are computed, logged, cached or saved, or if tested."""
    incidental: Any = {
        "device": True,
        "tracking": True,
        "checkpoint": True,
        "test": True,
        "data": {"cache", "placement"},
    }
    return hashlib.blake2b(experiment.model_dump_json(exclude=incidental).encode(), digest_size=16).hexdigest()


def preflight(experiment: Experiment, shared: Shared | None = None) -> torch.device:
    """Refuse, before a weight or an image is loaded, what cannot run on this machine; gives the device."""
    device, shared = choose_device(experiment.device), shared or Shared(keep=False)
    if experiment.clients_at_once and chosen_executor(experiment, device) == "sequential":
        raise FedsieveError(
            f"clients_at_once goes with executor: stacked, and on {device.type} auto is sequential: say executor: stacked"
        )
    kind_of(experiment.data.source)
    check_backbone(experiment.model)
    if experiment.model.weights not in ("hub", "none", "digits"):
        weights_file(experiment.model)
    if experiment.model.weights == "hub":
        hub.is_reachable()
    key = ("blank", experiment.model.model_dump_json(), experiment.data.size)
    model = shared.once(key, lambda: blank_model(experiment, classes=2))
    for stage in experiment.stages:
        trainable_names(model, stage.train)
        if (sieve := experiment.mask_of(stage)) is not None:
            devices = experiment.federation.devices if experiment.federation else ()
            asked = (*key, str(stage.train), sieve.model_dump_json(exclude=SCORING), str(devices))
            shared.once(asked, partial(_check_mask, sieve, devices, model, stage))
    personal = experiment.federation.personal if experiment.federation else None
    if personal and "norms" in personal.methods:
        norm_names(model)
    if experiment.privacy.dp and device.type == "cuda" and not experiment.deterministic:
        raise FedsieveError(
            "privacy.dp: a run that is resumed must repeat its rounds bit for bit, since it repeats their noise. On a GPU that "
            "takes deterministic: true"
        )
    return device


def _check_mask(sieve: Sieve, devices: Sequence[Device], model: Classifier, stage: Stage) -> None:
    space = ParamSpace.of(model, trainable_names(model, stage.train))
    # How large the head is only the data says: its masks are checked once they are read.
    if not any(name.startswith("head.") for name in space.names):
        check_sieve(sieve, model, space)
        check_tiers(sieve, devices, model, space)


def check_hub(experiment: Experiment) -> None:
    """Refuse images and weights of the hub where it cannot be reached and there is no copy of them."""
    data, model, lacks = experiment.data, experiment.model, dict[str, str]()
    if "hub" not in (kind_of(data.source), model.weights) or hub.is_reachable():
        return
    owner = data.source.partition("/")[0]
    if kind_of(data.source) == "hub" and not any((cache_folder(data) / "datasets").glob(f"{owner}___*")):
        lacks["data.source=FOLDER"] = data.source
    if model.weights == "hub" and not hub.has_weights(model.backbone):
        lacks["model.weights=FILE"] = f"the weights of {model.backbone}"
    if lacks:
        raise FedsieveError(
            f"the hub cannot be reached, and there is no local copy of {' or '.join(lacks.values())}. Without a network, name "
            f"your own: {' '.join(lacks)}",
            1,
        )


def chosen_executor(experiment: Experiment, device: torch.device) -> str:
    """What trains a cohort, on every rank: sequential or stacked."""
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


def blank_model(experiment: Experiment, classes: int) -> Classifier:
    """The experiment's network without memory for its weights, shown to take images of the asked size."""
    size, bare = experiment.data.size, experiment.model.model_copy(update={"weights": "none"})
    try:
        model, logits = _on_meta(bare, classes, size, experiment.seed)
    except FedsieveError as error:
        if not (sizes := working_sizes(bare, size)):  # the size is not to blame
            raise
        raise FedsieveError(
            f"data.size: {bare.backbone} does not take images of {size} px. Sizes that work include "
            f"{', '.join(map(str, sizes))}. ({error})"
        ) from None
    if bare.lora:
        check_reached(model, logits)
    return model


def _on_meta(config: Model, classes: int, size: int, seed: int = 0) -> tuple[Classifier, Tensor]:
    """A network without memory for its weights, and what it makes of images of this size."""
    with torch.device("meta"):
        model = build_classifier(config, classes, size, seed)
        try:
            return model, model(torch.empty(2, 3, size, size))
        except Exception as error:  # networks fail in their own ways
            raise FedsieveError(
                f"model: {config.backbone} fails on images of {size} px: {str(error).splitlines()[0][:200]}"
            ) from None


def working_sizes(config: Model, size: int) -> list[int]:
    """Sizes that a network takes: the nearest on both sides of `size`, and the one it was made for.

    Empty if it takes `size` itself, without LoRA and adapters.
    """
    import timm

    plain = config.model_copy(update={"lora": None, "adapter": None})

    def works(asked: int) -> bool:
        try:
            return _on_meta(plain, 2, asked) is not None
        except FedsieveError:
            return False

    if works(size):
        return []
    declared = timm.get_pretrained_cfg(config.backbone.partition(".")[0], allow_unregistered=True)
    below = [*range((size - 1) // STEP * STEP, 0, -STEP)][:2]
    above = [(size // STEP + number) * STEP for number in (1, 2)]
    own = [declared.input_size[-1]] if declared is not None else []
    found = {next(filter(works, sizes), 0) for sizes in (below, above, own)}  # the nearest of each
    return sorted(found - {0})


@dataclass
class Setup:
    """What the stages of one experiment share."""

    experiment: Experiment
    device: torch.device
    autocast: Autocast
    transform: Transform
    train: Feed
    validation: Feed
    class_names: list[str]
    data_fingerprint: str
    model: Classifier
    say: Callable[[str], None] | None = None  # to the user, one line
    shared: Shared = field(default_factory=lambda: Shared(keep=False))
    undo: Callable[[], None] | None = None  # of what the stage under way did to the model

    def test_feed(self) -> Feed:
        """The test split, opened. Called once, at the end, unless the experiment asks for test curves."""
        return open_split(self.experiment.data, "test", self.class_names, self.transform, self.device, self.shared)

    @property
    def speed(self) -> Speed:
        """How steps are run."""
        return chosen_speed(self.experiment, self.device, images_trained(self.experiment, len(self.train)))

    def release(self) -> None:
        """Give the model its own forward pass back, which a sparse stage may have changed."""
        if self.undo is not None:
            self.undo()
            self.undo = None

    def space(self, stage: Stage) -> ParamSpace:
        return ParamSpace.of(self.model, trainable_names(self.model, stage.train))

    def validate(self, forward: Callable[[Tensor], Tensor], validation: Feed) -> dict[str, float]:
        if len(validation) == 0:
            return {}
        return measure(predict(forward, validation, self.autocast), validation.labels, "val")


def open_split(
    data: Data,
    split: Split,
    class_names: list[str],
    transform: Transform,
    device: torch.device,
    shared: Shared | None = None,
) -> Feed:
    """A whole split as a feed; one that does not have the classes of the model is refused."""
    shared = shared or Shared(keep=False)
    images = shared.images(data, split)
    rows, labels, names = keep_classes(images, np.arange(len(images)), data.classes)
    if names != class_names:
        raise FedsieveError(
            f"data.source: the classes of {data.source} ({split}) are not those of the model: "
            f"{_few(names)} instead of {_few(class_names)}"
        )
    return Feed(shared.store(data, split, images, device), transform, rows, labels.to(device))


def _few(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def prepare(experiment: Experiment, display: Display, shared: Shared | None = None, server: bool = True) -> Setup:
    """Load data and model, or take what earlier runs left in `shared`.

    Where clients are sites with images of their own, as the `server` has them, or as a site does.
    """
    shared = shared or Shared(keep=False)
    device = preflight(experiment, shared)
    set_deterministic(experiment.deterministic)
    data = experiment.data
    images = shared.images(data, "train", display.say)
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
    store = shared.store(data, "train", images, device)
    config = with_weights_file(experiment, display)
    model = shared.classifier(config, len(class_names), data.size, experiment.seed)
    for stage in experiment.stages:
        trainable_names(model, stage.train)
        if (sieve := experiment.mask_of(stage)) is not None:
            check_sieve(sieve, model, ParamSpace.of(model, trainable_names(model, stage.train)))
    return Setup(
        experiment=experiment,
        device=device,
        autocast=make_autocast(experiment, device),
        transform=transform,
        train=Feed(store, transform, train_rows, train_labels.to(device)),
        validation=Feed(store, transform, held_rows, held_labels.to(device)),
        class_names=class_names,
        data_fingerprint=images.fingerprint,
        model=model.to(device),
        say=display.say,
        shared=shared,
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


def fit_stage(
    setup: Setup,
    stage: Stage,
    state: StageState | None = None,
    watch: Callable[[], dict[str, float]] = dict,
    mask: Mask | None = None,
) -> tuple[ParamSpace, StageState, Iterator[Tick]]:
    """Start a stage, or continue it from `state`: its space, its living state, and the steps to iterate over.

    `watch` adds numbers to every epoch's record that nothing is selected on.
    """
    space = setup.space(stage)
    setup.release()
    theta = space.bind(setup.model)
    if mask is not None:
        mask.check(space)
        if stage.optimizer.rescale is None:  # which asks for the norm of the whole gradient
            with setup.autocast():  # a GPU multiplies in bf16 faster than it gathers rows
                slow = setup.device.type == "cpu" or not torch.is_autocast_enabled(setup.device.type)
            setup.undo = spare_frozen(setup.model, mask, rows=slow)
    state = state or StageState.start(theta.detach().clone())
    train, validation = setup.train, setup.validation
    model: nn.Module = setup.model
    if stage.train == "head" and not setup.transform.random:
        # The backbone is frozen and sees the same pixels every epoch: run it once.
        train, validation = feature_feeds(setup)
        model = setup.model.head

    def validate() -> dict[str, float]:
        return setup.validate(model, validation) | watch()

    steps = train_stage(
        stage,
        model,
        theta,
        state,
        train,
        validate,
        setup.experiment.seed,
        setup.autocast,
        mask,
        setup.speed,
        setup.say,
    )
    return space, state, steps


FEATURES = 6  # sets that are kept: two splits of three backbones; those of trained ones do not come again


def feature_feeds(setup: Setup) -> tuple[Feed, Feed]:
    """Training and validation images as features of the backbone."""
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
    backbone, data, precision = setup.model.backbone, setup.data_fingerprint, setup.experiment.precision
    # Not all of a network shows in its weights: the number of heads does not.
    network = setup.experiment.model.model_dump_json(include={"backbone", "options", "lora"}), digest(backbone)
    which = hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()
    key = ("features", network, data, split, whole.transform, which, setup.device, precision)
    made = setup.shared.once(
        key, lambda: with_features(whole, backbone, EVALUATION_BATCH, setup.autocast).features, FEATURES
    )
    whole = replace(whole, features=made)
    return [whole.take(np.searchsorted(rows, feed.rows)) if len(feed) else feed for feed in feeds]


# --- the embedded pretrained model -----------------------------------------------------------------------------------


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
            _, _, ticks = fit_stage(setup, stage)
            for tick in ticks:
                display.step(stage.name, tick)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in setup.model.backbone.state_dict().items()}
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

"""Refusing, before a weight or an image is loaded, what cannot run on this machine."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fedsieve import hub
from fedsieve.config import Device, Experiment, Model, Sieve, Stage
from fedsieve.data.image_tables import cache_folder, kind_of
from fedsieve.errors import FedsieveError
from fedsieve.federation.calibrate import check_tiers
from fedsieve.federation.personal import norm_names
from fedsieve.model.adapters import check_reached
from fedsieve.model.build import Classifier, build_classifier, check_backbone, trainable_names
from fedsieve.model.space import ParamSpace
from fedsieve.model.weights import weights_file
from fedsieve.runner.environment import choose_device
from fedsieve.runner.run_cache import RunCache
from fedsieve.runner.setup import chosen_executor
from fedsieve.train.sieve import check_sieve

# What decides how weights are scored, and not whether a mask of this size can be made.
SCORING = {"rule", "fisher", "calibration_rounds", "schedule", "alpha", "scale", "shrink"}
STEP = 32  # pixels between the sizes that are tried where a network does not take the asked one


def preflight(experiment: Experiment, cache: RunCache | None = None) -> torch.device:
    """Refuse, before a weight or an image is loaded, what cannot run on this machine; gives the device."""
    device, cache = choose_device(experiment.device), cache or RunCache(keep=False)
    if experiment.clients_at_once and chosen_executor(experiment, device) == "sequential":
        raise FedsieveError(
            f"clients_at_once needs executor: stacked, and on {device.type} auto means sequential. Set executor=stacked"
        )
    kind_of(experiment.data.source)
    check_backbone(experiment.model)
    if experiment.model.weights not in ("hub", "none", "digits"):
        weights_file(experiment.model)
    if experiment.model.weights == "hub":
        hub.is_reachable()
    key = ("blank", experiment.model.model_dump_json(), experiment.data.size)
    model = cache.once(key, lambda: blank_model(experiment, classes=2))
    for stage in experiment.stages:
        trainable_names(model, stage.train)
        if (sieve := experiment.mask_of(stage)) is not None:
            devices = experiment.federation.devices if experiment.federation else ()
            asked = (*key, str(stage.train), sieve.model_dump_json(exclude=SCORING), str(devices))
            cache.once(asked, partial(_check_mask, sieve, devices, model, stage))
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

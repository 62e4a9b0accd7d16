"""The plan of an experiment, without running it: images, weights, steps, bytes, memory."""

import contextlib
import math

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fedsieve.config import Experiment, Sieve, Stage
from fedsieve.data.sources import choose_classes, count_images, survey
from fedsieve.data.store import free_memory
from fedsieve.model.build import dense_names, trainable_names
from fedsieve.model.space import ParamSpace
from fedsieve.model.weights import load_classifier
from fedsieve.privacy.dp import outlook, planned, sigma_of, spent
from fedsieve.privacy.secagg import threshold_of
from fedsieve.report.html import size
from fedsieve.runner.environment import device_name
from fedsieve.runner.estimate import Estimate, People, Sizes, context_bytes, estimate
from fedsieve.runner.federated import populate
from fedsieve.runner.meeting import check_alone
from fedsieve.runner.preflight import blank_model, preflight
from fedsieve.runner.prepare import split_rows
from fedsieve.runner.ranks import check_launch
from fedsieve.runner.tracking import make_trackers
from fedsieve.train.sieve import check_sieve, taking_part


def plan(experiment: Experiment) -> list[tuple[str, str]]:
    """Rows of (what, how much)."""
    check_launch(experiment)
    check_alone(experiment)
    device = preflight(experiment)
    make_trackers(experiment.tracking)
    data = experiment.data
    rows, test, classes, image_bytes = count_images(data)
    every, names, _ = survey(data, "train")
    train_rows, _ = split_rows(experiment, every)
    train_rows, labels = choose_classes(every, train_rows, data.classes, len(names))
    train = len(train_rows)
    held = rows - train
    model = blank_model(experiment, classes)
    if experiment.model.weights not in ("hub", "none", "digits"):  # a file: whether it fits costs no download
        load_classifier(experiment.model, classes, data.size, experiment.seed)
    for stage in experiment.stages:
        if (sieve := experiment.mask_of(stage)) is not None:  # the head is of its real size now
            check_sieve(sieve, model, ParamSpace.of(model, trainable_names(model, stage.train)))
    everything = ParamSpace.of(model)
    lines = [
        ("device", f"{device_name(device)}, {size(free_memory(device))} free"),
        (
            "images",
            f"{train:,} train, {held:,} validation, {test:,} test, {classes} classes; {size(rows * image_bytes)} stored",
        ),
        (
            "model",
            f"{experiment.model.backbone} at {experiment.data.size} px: {everything.size:,} weights, {size(4 * everything.size)}",
        ),
    ]
    people, images = None, float(train)
    if experiment.federation:
        people = People.of(populate(experiment, labels, train_rows))
        images *= (1 - experiment.federation.client_validation) / people.clients
        apart = f", {people.clients - people.trainers:,} of them strangers" if people.trainers < people.clients else ""
        many = f"{people.clients:,}{apart}; {people.cohort:,} in a round, about {images:.0f} images each"
        lines.append(("clients", many))
        sigma = sigma_of(experiment, people.rate) if experiment.privacy.dp else 0.0
        lines += trust_lines(experiment, people, sigma)
    total = 0
    sent: list[Estimate] = []
    changed: dict[str, float] = {}  # how many weights of each tensor earlier stages changed
    for stage in experiment.stages:
        space = ParamSpace.of(model, trainable_names(model, stage.train))
        sieve = experiment.mask_of(stage)
        cached = stage.train == "head" and experiment.data.transform == "resize"
        length, steps = work(stage, people, images)
        total += steps
        lines += [
            (f"stage {stage.name}", length),
            ("  trains", trains(model, space, everything.size, sieve)),
            ("  memory", memory(model, space, stage, experiment, cached)),
        ]
        if people:
            taking = space.size if sieve is None else int(taking_part(sieve, model, space).sum())
            known = space.names if stage.method == "ridge" else ()  # statistics need no head
            before = context_bytes({name: count for name, count in changed.items() if name not in known}, everything)
            dense = ParamSpace.of(model, dense_names(model, stage.train)).size
            sent.append(estimate(experiment, stage, people, Sizes(space, taking, dense, before)))
            lines += bytes_lines(experiment, stage, sent[-1])
            if experiment.privacy.dp and stage.method != "ridge":
                k = space.size if sieve is None else round((1 - sieve.sparsity) * taking)
                lines.append(("  noise", outlook(stage.name, sigma, people.rate, people.trainers, k)))
            density = (1 - sieve.sparsity) * taking / space.size if sieve else 1.0
            changed |= dict(zip(space.names, (density * math.prod(shape) for shape in space.shapes), strict=True))
        else:
            lines.append(("  bytes sent", "none: the training is central"))
    largest = max(ParamSpace.of(model, trainable_names(model, stage.train)).size for stage in experiment.stages)
    if sent:
        lines.append(("bytes in all", beside_dense(sent)))
    lines += [
        ("steps in all", f"{total:,}"),
        (
            "disk",
            f"about {size(4 * (3 * largest * experiment.checkpoint.keep + everything.size))} of checkpoints and weights",
        ),
    ]
    return lines


def work(stage: Stage, people: People | None, images: float) -> tuple[str, int]:
    """The length of a stage in words and in steps; `images` are all, or those of one client."""
    steps = math.ceil(images / stage.batch_size)
    if stage.method == "ridge":
        return f"closed form, {f'one round with all {people.trainers:,} clients' if people else 'one pass'}", 0
    if people is None:
        return f"{stage.epochs} epochs x {steps:,} steps of {stage.batch_size} images", stage.length * steps
    steps = stage.local.steps or steps * (stage.local.epochs or 1)
    text = f"{stage.length:,} rounds x {people.cohort:,} clients x {steps:,} steps of {stage.batch_size} images"
    return f"{text}; {stage.spent}" if stage.spent else text, stage.length * people.cohort * steps


def bytes_lines(experiment: Experiment, stage: Stage, sent: Estimate) -> list[tuple[str, str]]:
    """The bytes that a federated stage would send."""
    clients = sent.exchanges // stage.length
    most = "at most " if sent.at_most else ""

    def ordinary(message: float, values: int, format: str) -> str:
        if not message:
            return "nothing"
        what = f"{values:,} values in {format}" if values else "keys and shares"
        return f"{size(clients * message)} a round: {clients:,} x {size(message)}, {what}"

    ridge = stage.method == "ridge"
    secure = experiment.privacy.aggregation == "secagg"
    fixed = f"fixed point of {64 if ridge else experiment.privacy.bits} bits, all phases of the secure sum"
    up = ordinary(sent.message_up, sent.values_up, fixed if secure else "fp64" if ridge else experiment.message.up)
    down = ordinary(sent.message_down, sent.values_down, "fp32" if ridge else experiment.message.down)
    lines = [("  bytes up", up), ("  bytes down", f"{most}{down}")]
    if sent.extra_up or sent.extra_down:
        lines.append(
            ("  beside that", f"about {size(sent.extra_up)} up, {size(sent.extra_down)} down, for masks and newcomers")
        )
    return lines


def trust_lines(experiment: Experiment, people: People, sigma: float) -> list[tuple[str, str]]:
    """The protection of clients, and of the server against them."""
    privacy, settings = experiment.privacy, experiment.federation
    assert settings is not None
    said = []
    if privacy.aggregation == "secagg":
        least = threshold_of(privacy.threshold, people.cohort)
        said.append(f"secagg: sums of {people.cohort:,} clients, of whom {least:,} must stay")
    if privacy.aggregation == "zero_sum":
        said.append("zero_sum: for comparison; it hides nothing from a server that knows the seeds")
    if privacy.dp:
        rounds, releases = planned(experiment)
        total = spent(sigma, people.rate, rounds, privacy.dp.delta, releases)
        said.append(
            f"epsilon {total:.3g} at delta {privacy.dp.delta:g} over {rounds:,} rounds, noise multiplier {sigma:.3g}"
        )
    if settings.aggregator.kind != "mean":
        said.append(f"{settings.aggregator.kind} of the updates")
    if settings.attack:
        count, rule = round(settings.attack.fraction * people.clients), settings.aggregator
        most = min(count, people.cohort)
        said.append(
            f"{count:,} hostile clients ({settings.attack.kind}), up to {most:,} of {people.cohort:,} in a round"
        )
        if rule.kind != "mean" and (bears := rule.bears(people.cohort)) < most:
            said.append(f"{rule.kind} as it is set leaves {bears:,} of them aside")
    return [("trust", "; ".join(said))] if said else []


def beside_dense(sent: list[Estimate]) -> str:
    """All bytes of a run, compared with dense fp32 in the same rounds."""
    total, dense = sum(part.total for part in sent), sum(part.dense_total for part in sent)
    most = "at most" if any(part.at_most for part in sent) else "about"
    return f"{most} {size(total)}, {100 * total / dense:.1f} % of dense fp32 ({size(dense)}); less where clients fail"


def trains(model: nn.Module, space: ParamSpace, whole: int, sieve: Sieve | None) -> str:
    """The number of weights of a stage that move."""
    if sieve is None:
        return f"{space.size:,} weights, {100 * space.size / whole:.1f} % of all (density 1: no mask)"
    taking = int(taking_part(sieve, model, space).sum())
    k = round((1 - sieve.sparsity) * taking)
    note = "" if sieve.granularity == "weight" else f" at most, in whole groups ({sieve.granularity})"
    density = f"density {1 - sieve.sparsity:.3g} of {taking:,} maskable"
    return f"{k:,} weights{note}, {100 * k / whole:.1f} % of all ({density})"


def memory(model: nn.Module, space: ParamSpace, stage: Stage, experiment: Experiment, cached: bool) -> str:
    """Weights, gradient, momentum, the best epoch's copy, and what one batch keeps for the backward pass."""
    state = 4 * space.size * 4
    activations = saved_bytes(model, space, stage, experiment.data.size) if not cached else 0
    note = "; features of the frozen backbone are computed once" if cached else ""
    note += ", for one client at a time" if experiment.federation and stage.method != "ridge" else ""
    if activations is None:
        return f"{size(state)} for weights and optimizer{note}"
    return f"{size(state)} for weights and optimizer, {size(activations)} for a batch in fp32{note}"


def saved_bytes(model: nn.Module, space: ParamSpace, stage: Stage, pixels: int) -> int | None:
    """Bytes that autograd keeps for one training step, counted on tensors without content; None if that fails."""
    saved: dict[StorageWeakRef, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        # The same activation is often kept by two operations; it is one piece of memory.
        saved[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return tensor

    inside = set(space.names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in inside)
    weights = {StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()}
    with contextlib.suppress(RuntimeError, NotImplementedError):
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = model(torch.empty(stage.batch_size, 3, pixels, pixels, device="meta"))
        total = sum(count for key, count in saved.items() if key not in weights)
        del output
        return total
    return None

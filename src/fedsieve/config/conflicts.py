"""Conflicts between settings of different parts. Each part has a function that yields a sentence for each of its own.

docs/trust.md explains those of secure sums, privacy, aggregators and attacks.
"""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from fedsieve.config.strict import changed_keys

if TYPE_CHECKING:
    from fedsieve.config.schema import Experiment, Federation


def all_conflicts(experiment: "Experiment") -> Iterator[str]:
    """Yields a sentence for each conflict between the parts of an experiment."""
    federation = experiment.federation
    yield from chain.from_iterable(part(experiment) for part in ALWAYS)
    if federation is None:
        yield from central_training(experiment)
    else:
        yield from chain.from_iterable(part(experiment, federation) for part in FEDERATED)


def stages(experiment: "Experiment") -> Iterator[str]:
    names = [stage.name for stage in experiment.stages]
    federation = experiment.federation
    held = experiment.data.val_fraction or (federation and federation.client_validation)
    for stage in experiment.stages:
        if names.count(stage.name) > 1:
            yield f'stages: two are named "{stage.name}"; every stage needs its own name'
        if stage.early_stopping and not held:
            yield (
                f"stages.{stage.name}.early_stopping needs validation data, but data.val_fraction is 0. "
                "Set a fraction or drop early_stopping"
            )
        if stage.sparse and not (stage.mask or experiment.mask):
            yield f"stages.{stage.name}.sparse needs a mask: give one at the top or on the stage"
    if experiment.mask and not experiment.sieves:
        yield "mask is given, but no stage takes it: set sparse: true on a stage"


def ridge_heads(experiment: "Experiment") -> Iterator[str]:
    head = experiment.model.head
    for stage in (stage for stage in experiment.stages if stage.method == "ridge"):
        if head != "linear":
            yield f"stages.{stage.name}.method: ridge solves for a linear head; model.head is {head}"
        for key in changed_keys(stage, "epochs", "rounds", "budget"):
            yield f"stages.{stage.name}.{key}: a ridge head is solved in one round: drop it"


def added_layers(experiment: "Experiment") -> Iterator[str]:
    for part in ("lora", "adapter"):
        given = getattr(experiment.model, part) is not None
        training = [stage.name for stage in experiment.stages if part in stage.parts]
        if training and not given:
            yield f"stages.{training[0]}.train: {part} needs model.{part}, such as model: {{{part}: {{}}}}"
        if given and not training:
            yield f"model.{part} is given, but no stage trains it: set train: {part}, or train: [{part}, head], on a stage"


def images(experiment: "Experiment") -> Iterator[str]:
    data = experiment.data
    if experiment.test_curve and not experiment.test:
        yield "test_curve tests after every epoch, but test is false. Drop one of them"
    if data.source == "none" and not experiment.own_images:
        yield "data.source: none is for a server whose clients hold the images: partition: {kind: sites}"
    if experiment.own_images and data.normalize == "data":
        yield "data.normalize: data would differ from site to site: say imagenet or half"
    if data.source == "none" and experiment.test_curve:
        yield "test_curve needs images to test on, and data.source is none"
    if experiment.model.weights == "digits" and data.source != "digits":
        yield 'model.weights is "digits", which needs data.source: digits'


def central_training(experiment: "Experiment") -> Iterator[str]:
    for stage in (stage for stage in experiment.stages if stage.method == "sgd"):
        if changed_keys(stage, "warmup_rounds", "local"):
            key, instead = ("warmup_rounds", "warmup_epochs") if stage.warmup_rounds else ("local", "epochs")
            yield f"stages.{stage.name}.{key} needs a federation, and none is given: say {instead}"
        if stage.epochs is None:
            yield f"stages.{stage.name}.epochs: required, but not given"
        if stage.rounds or stage.budget:
            yield f"stages.{stage.name}.rounds: training is central (no federation is given): say epochs"
    for key in changed_keys(experiment, "message", "privacy", "clients_at_once"):
        yield f"{key} needs a federation, and none is given"
    for sieve in experiment.sieves:
        for key in changed_keys(sieve, "scope", "clients", "refresh", "start_sparsity"):
            yield f"mask.{key} needs a federation, and none is given"
    if experiment.executor != "auto":
        yield f"executor: {experiment.executor} runs a cohort of clients, but no federation is given"


def federated_training(experiment: "Experiment", federation: "Federation") -> Iterator[str]:
    for stage in (stage for stage in experiment.stages if stage.method == "sgd"):
        if stage.warmup_epochs:
            yield f"stages.{stage.name}.warmup_epochs: in a federation the rate warms up by rounds: say warmup_rounds"
        if stage.epochs is not None:
            yield f"stages.{stage.name}.epochs: in a federation a stage has rounds, and local.epochs or local.steps"
        if not (stage.rounds or stage.budget):
            yield f"stages.{stage.name}.rounds: required in a federation, but not given"
    if experiment.executor == "sequential" and experiment.clients_at_once:
        yield "clients_at_once needs executor: stacked; sequential trains one client after another"
    natural = federation.partition.kind == "natural"  # how many clients that has, only the data says
    if not natural and (sentence := too_many(experiment, federation.clients or 100)):
        yield sentence


def same_mask(experiment: "Experiment", federation: "Federation") -> Iterator[str]:
    """Conflicts of what needs one mask, the same for all clients or in all rounds of a stage."""
    own, changing, tiered = experiment.own_masks, experiment.changing_masks, federation.tiered
    if tiered and (own or not experiment.sieves):
        yield "federation.devices: a density below 1 is a part of a shared mask, and there is none"
    if federation.blend and (own or changing):
        yield "federation.blend needs one shared mask for the whole stage"
    if experiment.message.error_feedback and changing:
        yield "message.error_feedback needs one mask for the whole stage, but mask.refresh is given"


def masks(experiment: "Experiment", federation: "Federation") -> Iterator[str]:
    for stage in experiment.stages:
        if (sieve := experiment.mask_of(stage)) is None:
            continue
        if sieve.refresh and sieve.scope == "client":
            yield "mask.refresh needs a shared or public mask"
        if sieve.refresh and sieve.refresh >= stage.length:
            yield (
                f"mask.refresh: stage {stage.name} is over after {stage.length} rounds, before {sieve.refresh} have passed "
                "and a new mask is due"
            )
        if sieve.start_sparsity is not None and sieve.refresh is None:
            yield "mask.start_sparsity needs mask.refresh: the sparsity changes with each new mask"
        if sieve.clients and sieve.scope != "shared":
            yield f"mask.clients says how many score a shared mask, and mask.scope is {sieve.scope}"
        if sieve.clients and not sieve.rule.scored:
            yield f"mask.clients says how many score, and mask.rule {sieve.rule.kind} needs no scores of theirs"


def personal_models(experiment: "Experiment", federation: "Federation") -> Iterator[str]:
    methods = federation.personal.methods if federation.personal else []
    if "mask" in methods and not experiment.sieves:
        yield (
            "federation.personal.methods: mask makes each client a mask by a stage's settings, and no stage has any. "
            "Give a mask, or drop the method"
        )
    if "blend" in methods and not (federation.blend and experiment.stages[-1].method == "sgd"):
        yield (
            "federation.personal.methods: blend mixes in weights that clients keep from the last stage's rounds: it "
            "needs federation.blend: true and a last stage that is not solved by ridge"
        )


def too_many(experiment: "Experiment", clients: int) -> str | None:
    """The sentence on the first setting that asks for more clients than there are; None where none does."""
    federation = experiment.federation
    assert federation is not None
    trainers = clients - federation.strangers(clients)
    if not trainers:
        return f"federation.held_out: {federation.held_out:g} of {clients:,} clients leaves none to train"
    cohort, personal = federation.cohort_size(trainers), federation.personal
    there = f"there are {clients:,}"
    training = there if trainers == clients else f"{there}, of which {trainers:,} train (federation.held_out)"
    wanted = [
        ("federation.cohort", cohort, trainers, training),
        ("federation.minimum_replies", federation.minimum_replies, cohort, f"a round has {cohort:,}"),
        ("federation.personal.clients", personal.clients if personal else None, clients, there),
        *(("mask.clients", sieve.clients, trainers, training) for sieve in experiment.sieves),
    ]
    for key, count, most, why in wanted:
        if count is not None and count > most:
            return f"{key}: {count:,} clients are asked for, but {why}"
    return None


def chosen_words(experiment: "Experiment", federation: "Federation") -> Iterator[str]:
    """The conflicts that the chosen words declare themselves."""
    words = [federation.aggregator, federation.server, federation.correction, federation.attack, federation.partition]
    for word in words:
        if word is not None:
            yield from word.clashes(experiment)


def secure_sums(experiment: "Experiment", federation: "Federation") -> Iterator[str]:
    mode, message, threshold = experiment.privacy.aggregation, experiment.message, experiment.privacy.threshold
    if mode == "plain":
        return
    if experiment.own_masks:
        yield (
            f"mask.scope: client does not work with privacy.aggregation: {mode}: a weight that one client alone trains would be "
            "given away by the sum. Use scope: shared or public"
        )
    if mode == "zero_sum" and federation.tiered:
        yield "federation.devices: with zero_sum all clients send the same weights, but some have a density below 1"
    most = max((device.density for device in federation.devices), default=1.0)
    largest = sum(device.share for device in federation.devices if device.density == most)
    if mode == "secagg" and federation.tiered and largest < threshold:
        yield (
            f"federation.devices: {100 * largest:g} % of the clients train all of the mask, fewer than privacy.threshold asks for "
            f"({100 * threshold:g} %): a sum of the others' part would tell too much of each. Give more devices the "
            "largest density"
        )
    if message.up != "fp32":
        yield (
            f"message.up: {message.up} does not work with privacy.aggregation: {mode}, whose values travel "
            f"{'in fixed point of privacy.bits' if mode == 'secagg' else 'in fp32, so that pads cancel'}: drop it"
        )
    for key in changed_keys(message, "top_k", "error_feedback"):
        yield (
            f"message.{key} does not work with privacy.aggregation: {mode}: every client sends all values of the mask, and "
            "their rounding is part of the sum"
        )
    if mode == "zero_sum" and changed_keys(federation, "failures"):
        yield (
            "federation.failures: zero_sum loses every round in which a client does not answer, since its pad is missing from the "
            "sum. privacy.aggregation: secagg survives dropouts"
        )


def private_rounds(experiment: "Experiment", federation: "Federation") -> Iterator[str]:
    mode = experiment.privacy.aggregation
    if experiment.privacy.dp is None:
        return
    if mode != "plain":
        yield (
            f"privacy.dp does not work with aggregation: {mode}. A secure sum gives nothing below its threshold, so that one "
            "client more could bring others' updates in with it, and the noise would not cover that. Drop one of the two"
        )
    if experiment.own_masks:
        yield (
            "privacy.dp does not work with mask.scope: client: the masks themselves tell of their clients. Use public, or shared "
            "with privacy.dp.scores"
        )
    if federation.weighting != "uniform":
        yield "privacy.dp counts every client once: set federation.weighting: uniform"
    if federation.sampling == "shuffled":
        yield "privacy.dp draws every client on its own in each round, which federation.sampling: shuffled does not: drop it"
    if federation.minimum_replies > 1:
        yield "privacy.dp gives out noise in every round, whoever answers: drop federation.minimum_replies"
    if federation.blend:
        yield "federation.blend sends sums of all clients' scores, which privacy.dp does not account for"
    if federation.client_validation:
        yield "federation.client_validation is measured on clients, which privacy.dp does not account for: use data.val_fraction"


def private_sums(experiment: "Experiment", federation: "Federation") -> Iterator[str]:
    """Conflicts of the sums behind masks and ridge heads with privacy.dp."""
    if (dp := experiment.privacy.dp) is None:
        return
    held = experiment.data.val_fraction > 0
    scopes = {sieve.scope for sieve in experiment.sieves if sieve.rule.scored}
    heads = [stage.ridge for stage in experiment.stages if stage.method == "ridge"]
    if "shared" in scopes and dp.scores is None:
        yield (
            "mask.scope: shared gives out sums of clients' scores. Account for them with privacy.dp.scores: {clip_norm: ..., "
            "noise_multiplier: ...}, let the server score its own images (scope: public), or use a rule of magnitude"
        )
    if "public" in scopes and not held:
        yield (
            "mask.scope: public would score training images, since data.val_fraction is 0, and these are the clients' under "
            "privacy.dp. Hold some out"
        )
    if dp.scores is not None and "shared" not in scopes:
        yield "privacy.dp.scores is given, but no mask is made from clients' scores: drop it"
    if heads and dp.statistics is None:
        yield (
            "method: ridge gives out sums of clients' features. Account for them with privacy.dp.statistics: {clip_norm: ..., "
            "noise_multiplier: ...}, or train the head in rounds"
        )
    if not heads and dp.statistics is not None:
        yield "privacy.dp.statistics is given, but no stage is solved by ridge"
    if not held and any(head.temperature is None for head in heads):
        yield (
            "method: ridge fits its temperature on clients where data.val_fraction is 0, which privacy.dp does not account "
            "for: give ridge.temperature, or hold images out"
        )


ALWAYS = (stages, ridge_heads, added_layers, images)
FEDERATED = (
    *(federated_training, same_mask, masks, personal_models),
    *(chosen_words, secure_sums, private_rounds, private_sums),
)

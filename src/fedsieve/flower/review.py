"""The page that a person at a site reads before accepting an experiment: what leaves, how often, how much, how protected."""

import math
from collections.abc import Iterator

from fedsieve.config import Experiment, Stage
from fedsieve.errors import FedsieveError
from fedsieve.flower.site import SiteSettings


def review(experiment: Experiment, site: SiteSettings, digest: str) -> str:
    """The page, as lines of text."""
    settings = experiment.federation
    if settings is None:
        raise FedsieveError("federation: this experiment is central, and no site takes part in it")
    clients = settings.clients
    cohort = settings.cohort_size(clients) if clients else settings.cohort
    title = f"Experiment {experiment.name}"
    lines = [title, "=" * len(title), f"digest: {digest}", ""]
    lines += [f"A round draws {cohort} of {clients or 'all'} clients. This site is client {site.client}."]
    lines += ["", "What leaves this site:"]
    lines += [f"- {line}" for line in _leaving(experiment)]
    lines += ["", "How it is protected:"]
    lines += [f"- {line}" for line in _protections(experiment)]
    lines += ["", "What is read here:"]
    lines += [f"- {line}" for line in _reading(experiment, site)]
    objection = site.policy.objection(experiment)
    lines += ["", f"Against this site's policy: {objection}." if objection else "This site's policy allows it."]
    lines += [
        f"{what} in all: at most {limit:,}" for what in ("rounds", "bytes") if (limit := getattr(site.policy, what))
    ]
    return "\n".join(lines)


def _leaving(experiment: Experiment) -> Iterator[str]:
    settings, secret = experiment.federation, experiment.privacy.aggregation == "secagg"
    assert settings is not None
    yield "Once: the number of its images."
    sizes = _message_sizes(experiment)
    for stage in experiment.stages:
        if stage.method == "ridge":
            yield f"Stage {stage.name}, once: sums of products of features and labels over its images{sizes[stage.name]}."
            continue
        sieve = experiment.mask_of(stage)
        if sieve is not None and sieve.rule.scored:
            yield f"Stage {stage.name}, when a mask is made: a score for each weight, summed over its images."
        if sieve is not None and sieve.scope == "client":
            yield f"Stage {stage.name}: its own mask, which tells which weights matter for its images."
        yield f"Stage {stage.name}, up to {stage.length:,} times: an update of the weights that train{sizes[stage.name]}."
        if settings.client_validation:
            times = math.ceil(stage.length / settings.evaluate_every)
            yield f"Stage {stage.name}, up to {times:,} times: loss and correct answers on images that it holds back."
    if not secret:
        yield "With each update: training loss, correct answers, and how far each block of the network moved."
    if settings.personal:
        yield f"At the end: the accuracy of its personal models ({', '.join(settings.personal.methods)})."
    if experiment.test and experiment.own_images:
        yield "At the end: accuracy and loss on its own test images."


def _protections(experiment: Experiment) -> Iterator[str]:
    privacy = experiment.privacy
    yield "TLS hides all of this from others on the way."
    if privacy.aggregation == "secagg":
        share = f"{100 * privacy.threshold:.0f} %"
        yield f"Secure sums: the server learns sums over at least {share} of a round's clients, if it follows the protocol."
    else:
        yield "None against the server: it sees every message of this site by itself."
    if privacy.dp is None:
        yield "No noise is added: the final model may reveal that an image was trained on."


def _reading(experiment: Experiment, site: SiteSettings) -> Iterator[str]:
    if experiment.own_images:
        yield f"images: {site.data or 'none are named: add data to site.yaml'}"
    else:
        yield f"images: {experiment.data.source}, which all clients share out among them"
    yield f"weights: {site.weights or experiment.model.weights} for {experiment.model.backbone}"
    if experiment.model.options:
        yield f"options of the network: {experiment.model.options}"


def _message_sizes(experiment: Experiment) -> dict[str, str]:
    """How large a site's message of each stage is, where the experiment alone says so."""
    if experiment.data.class_names is None or experiment.federation is None or experiment.federation.clients is None:
        return dict.fromkeys((stage.name for stage in experiment.stages), "")
    from fedsieve.model.build import dense_names, trainable_names
    from fedsieve.model.space import ParamSpace
    from fedsieve.report.html import size
    from fedsieve.runner.estimate import People, Sizes, estimate
    from fedsieve.runner.preflight import blank_model
    from fedsieve.train.sieve import taking_part

    settings, clients = experiment.federation, experiment.federation.clients
    cohort = settings.cohort_size(clients)
    people, model = (
        People(clients, clients, cohort, cohort / clients),
        blank_model(experiment, len(experiment.data.class_names)),
    )

    def of(stage: Stage) -> str:
        space, sieve = ParamSpace.of(model, trainable_names(model, stage.train)), experiment.mask_of(stage)
        taking = space.size if sieve is None else int(taking_part(sieve, model, space).sum())
        dense = ParamSpace.of(model, dense_names(model, stage.train)).size
        sent = estimate(experiment, stage, people, Sizes(space, taking, dense, 0.0))
        return f" ({sent.values_up:,} values, {size(sent.message_up)})"

    return {stage.name: of(stage) for stage in experiment.stages}

"""Opens a node from its operator's settings and the experiment that a server sends."""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedsieve
from fedsieve.config import Experiment, load_config, parse_config
from fedsieve.data.partitions import Shards, class_counts
from fedsieve.errors import FedsieveError
from fedsieve.federation.memory import ClientMemory
from fedsieve.federation.node import Node, problem
from fedsieve.federation.population import Population
from fedsieve.federation.sent import note
from fedsieve.federation.state import Context
from fedsieve.files import write_atomic
from fedsieve.model.weights import digest
from fedsieve.randomness import generator
from fedsieve.runner.federated import populate
from fedsieve.runner.identity import experiment_digest
from fedsieve.runner.prepare import prepare
from fedsieve.runner.progress import Display
from fedsieve.runner.setup import Setup, chosen_executor, chosen_speed
from fedsieve.wire.envelope import unwrap, wrap

EXPERIMENT = "experiment.yaml"


@dataclass(frozen=True)
class Host:
    """Settings of a site's operator: its client number, its folder, and what it replaces by its own."""

    client: int
    folder: Path
    data: str | None = None  # of a site with images of its own: instead of the experiment's data.source
    weights: str | None = None  # instead of the experiment's model.weights
    device: str | None = None
    accepted: str | None = None  # the digest of the only experiment that the questions may be about

    def own(self, experiment: Experiment) -> Experiment:
        """An experiment with what is the site's own put in."""
        data, model = experiment.data, experiment.model
        if experiment.own_images:
            if self.data is None:
                raise FedsieveError(
                    "the experiment is for sites with images of their own, and this one names none (data)"
                )
            data = data.model_copy(update={"source": self.data, "val_fraction": 0.0})
        if self.weights is not None:
            model = model.model_copy(update={"weights": self.weights})
        if self.accepted is not None:
            data = data.model_copy(update={"cache": None})
            if self.weights is None and model.weights not in ("hub", "none", "digits"):
                raise FedsieveError(
                    f"model.weights is {model.weights}, a file of the server's: name this site's own (weights in site.yaml)"
                )
        own: dict[str, Any] = {"data": data, "model": model, "device": self.device or experiment.device}
        return experiment.model_copy(update=own | {"tracking": []})


def answer(envelope: bytes, host: Host) -> bytes:
    """The answer of the node of `host`. A refusal names its reason for the server."""
    head: dict[str, Any] = {}
    folder = host.folder
    try:
        head, messages = unwrap(envelope)
        run = str(head.get("run"))
        if not re.fullmatch(r"[0-9a-f]{8,64}", run):
            raise FedsieveError("the question names no run")
        folder = host.folder / run
        if head.get("ask") == "hello":
            return _hello(head, host, folder)
        if not (folder / EXPERIMENT).exists():
            folder = host.folder
            lost = f"{folder / run} is not there: the site has not met this run, or its files are lost"
            return problem(folder, head, lost, "run")
        _check_accepted(host, (folder / EXPERIMENT).read_text(encoding="utf-8"))
        if head.get("client") != host.client:
            raise FedsieveError(f"the question is for site {head.get('client')}, and this is site {host.client}")
        return _open(host, folder).answer(head, messages)
    except FedsieveError as error:
        return problem(folder, head, str(error), "site")
    except (KeyError, TypeError, ValueError) as error:
        return problem(folder, head, f"the question is not as agreed: {type(error).__name__}: {error}", "site")


def _hello(head: dict[str, Any], host: Host, folder: Path) -> bytes:
    """Check that this node matches the server's experiment: package, experiment, label map and weights."""
    if head.get("version") != fedsieve.__version__:
        raise FedsieveError(
            f"the site has fedsieve {fedsieve.__version__}, and the server has {head.get('version')}: install the same"
        )
    text = str(head.get("experiment"))
    _check_accepted(host, text)
    experiment = parse_config(text, where="the server's experiment")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / EXPERIMENT, text)
    _open.cache_clear()
    node = _open(host, folder)
    prepared = _prepared(host.own(experiment).model_dump_json())
    setup = prepared.setup
    if setup.class_names != head.get("classes"):
        raise FedsieveError(f"the label map is another: {_differences(setup.class_names, head.get('classes'))}")
    if prepared.weights != head.get("weights"):
        raise FedsieveError("the pretrained weights are not the server's: use the same file, and the same seed")
    images = len(node.context.train)
    envelope = wrap({"run": head["run"], "client": host.client, "ask": "hello", "images": images})
    note(folder, head, [{"what": "images", "n": images}], len(envelope))
    return envelope


def _check_accepted(host: Host, text: str) -> None:
    """Refuse questions about an experiment other than the one that was accepted, before it is even parsed."""
    if host.accepted is not None and experiment_digest(text) != host.accepted:
        raise FedsieveError("the question is about another experiment than the one that the site has accepted")


def _differences(mine: list[str], theirs: Any) -> str:
    """The first difference between two label maps, in a few words."""
    theirs = list(map(str, theirs)) if isinstance(theirs, list) else []
    for number, (one, two) in enumerate(zip(mine, theirs, strict=False)):
        if one != two:
            return f'class {number} is "{one}" here and "{two}" at the server'
    return f"{len(mine)} classes here and {len(theirs)} at the server"


@lru_cache(maxsize=64)
def _open(host: Host, folder: Path) -> Node:
    """The node of a run that it has joined. One process may be asked many times, and simulate many nodes."""
    experiment = host.own(load_config(folder / EXPERIMENT))
    prepared = _prepared(experiment.model_dump_json())
    setup, people = prepared.setup, prepared.people
    if not 0 <= host.client < len(people):
        raise FedsieveError(f"there is no site {host.client}: they are numbered 0 to {len(people) - 1}")
    mine = people.shards.client(host.client)
    if experiment.own_images:
        mine = generator(experiment.seed, "partition", host.client).permutation(len(setup.train))
    train = setup.train.take(mine)
    context = Context(
        experiment=experiment,
        population=alone(people, host.client, train.labels.cpu().numpy()),
        model=setup.model,
        initial=prepared.initial,
        train=train,
        validation=setup.validation,
        autocast=setup.autocast,
        speed=chosen_speed(experiment, setup.device, images=0),  # few, of all that a federation trains on
        executor=chosen_executor(experiment, setup.device),
        memory=ClientMemory(folder / "memory"),
    )
    return Node(context, host.client, folder, setup.test_feed)


@dataclass(frozen=True)
class _Prepared:
    """Shared by all nodes of one process: data, a model, its weights as every device has them, and their digest."""

    setup: Setup
    initial: dict[str, Tensor]
    weights: str
    people: Population


@lru_cache(maxsize=1)
def _prepared(config: str) -> _Prepared:
    experiment = Experiment.model_validate_json(config)
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)
    setup = prepare(experiment, Display.silent(), server=False)
    initial = {name: tensor.detach().clone() for name, tensor in setup.model.state_dict().items()}
    return _Prepared(
        setup, initial, digest(setup.model), populate(experiment, setup.train.labels.cpu().numpy(), setup.train.rows)
    )


def alone(people: Population, client: int, labels: np.ndarray) -> Population:
    """The population as one of its clients sees it: it holds all images there are."""
    offsets = np.repeat([0, len(labels)], [client + 1, len(people) - client])
    shards = Shards(np.arange(len(labels)), offsets)
    return Population(people.settings, people.seed, shards, class_counts(shards, labels), people.strangers)

"""The beginning of a run whose clients are elsewhere: what cannot be done there is refused, and sites are met."""

import json
import secrets
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

import fedsieve
from fedsieve.config import Experiment, Stage, to_yaml
from fedsieve.data.partitions import Shards
from fedsieve.errors import FedsieveError
from fedsieve.federation.asks import METRICS
from fedsieve.federation.channel import EXACT, FP64, Parcel
from fedsieve.federation.registry import Registry, Transport
from fedsieve.federation.remote import RemoteClients, personal_space
from fedsieve.federation.state import ServerContext
from fedsieve.files import write_json
from fedsieve.mask.mask import Mask
from fedsieve.runner.setup import Setup
from fedsieve.wire.codec import Decoded
from fedsieve.wire.envelope import wrap

SITES = "sites.json"
PAUSE = 0.5  # seconds from one look at who is here to the next


def check_remote(experiment: Experiment) -> None:
    """Refuse what works only where all clients are in one process."""
    settings = experiment.federation
    if settings is None:
        raise FedsieveError("federation: sites need one, and this experiment is central")
    if experiment.executor == "distributed":
        raise FedsieveError(
            "executor: distributed shares clients out among processes, and sites have their own: drop it"
        )
    failures = settings.failures
    simulated = {
        "failures.unavailable": failures.unavailable,
        "failures.crash": failures.crash,
        "failures.corrupt": failures.corrupt,
        "devices.delay": any(device.delay for device in settings.devices),
    }
    for name, value in simulated.items():
        if value:
            raise FedsieveError(f"federation.{name} is simulated, and with sites elsewhere what fails fails: drop it")
    if settings.attack:
        raise FedsieveError(
            "federation.attack is simulated, and with sites elsewhere who is hostile is not ours to say"
        )
    if experiment.privacy.dp:
        raise FedsieveError(
            "privacy.dp does not work with sites elsewhere: a round that is repeated after a kill may have other replies, and "
            "the same noise on two sums is none on their difference. `fedsieve run`"
        )
    if experiment.privacy.aggregation == "zero_sum":
        raise FedsieveError(
            "privacy.aggregation: zero_sum is for comparison in one process. With sites: secagg, or plain"
        )
    if experiment.privacy.aggregation == "secagg" and any(device.density < 1 for device in settings.devices):
        raise FedsieveError(
            "federation.devices: with sites elsewhere, secagg sums updates of the same weights: density 1"
        )
    if settings.blend:
        raise FedsieveError("federation.blend does not work with sites elsewhere yet: drop it, or `fedsieve run`")
    for sieve in filter(None, map(experiment.mask_of, experiment.stages)):
        if settings.personal and sieve.scope == "client":
            raise FedsieveError(
                "federation.personal does not go with mask.scope: client where clients are sites elsewhere"
            )
        own = experiment.own_images
        if sieve.scope == "public" and (experiment.data.source == "none" if own else not experiment.data.val_fraction):
            key = "data.source" if own else "data.val_fraction"
            raise FedsieveError(
                f"mask.scope: public is scored on images that the server holds, and {key} leaves it none"
            )


def check_alone(experiment: Experiment) -> None:
    """Refuse what one process cannot do without sites."""
    if experiment.own_images:
        raise FedsieveError(
            "federation.partition.kind: sites are elsewhere, and this process is alone: `fedsieve flower` runs with them"
        )


def check_place(experiment: Experiment, folder: Path, transport: Transport | None) -> None:
    """Refuse to run an experiment with clients elsewhere where they are not, and the other way round."""
    if transport is not None:
        check_remote(experiment)
        return
    check_alone(experiment)
    if (folder / SITES).exists():
        raise FedsieveError(f"{folder}: the clients of this run are sites: `fedsieve flower {folder}` goes on with it")


def meet_nodes(
    context: ServerContext, setup: Setup, weights: str, folder: Path, transport: Transport
) -> tuple[Registry, ServerContext]:
    """Wait until all sites are here (of a run that has begun before, enough of them), each of which fits the experiment.

    Gives the registry of these sites, and the context without training images.
    """
    experiment, settings, people = context.experiment, context.population.settings, context.population
    file, run, images = folder / SITES, secrets.token_hex(8), dict(enumerate(people.shards.sizes.tolist()))
    if experiment.own_images:
        images = {}
    if begun := file.exists():
        met = json.loads(file.read_text())
        run, images = met["run"], {int(client): count for client, count in met["images"].items()}
    greeting = wrap(
        {
            "ask": "hello",
            "run": run,
            "version": fedsieve.__version__,
            "experiment": to_yaml(experiment),
            "classes": setup.class_names,
            "weights": weights,
        }
    )
    registry = Registry(transport, run, len(people), greeting, context.say)
    registry.images = images
    needed = settings.minimum_replies if begun else len(people)
    began = time.monotonic()
    while len(here := registry.here()) < needed:
        if time.monotonic() - began > transport.wait:
            missing = [str(client) for client in range(len(people)) if client not in here]
            why = "".join(f"\nnode {node}: {reason}" for node, reason in registry.refused.items())
            raise FedsieveError(
                f"{len(here)} of {len(people)} sites are here after {transport.wait:g} s, and {needed} are needed. Missing: "
                f"{', '.join(missing[:20])}{', ...' if missing[20:] else ''}{why}",
                1,
            )
        time.sleep(PAUSE)
    write_json(file, {"run": run, "images": registry.images})
    if experiment.own_images:
        offsets = np.cumsum([0, *(registry.images[client] for client in range(len(people)))])
        people = replace(people, shards=Shards(np.arange(offsets[-1]), offsets))
    # From here on nobody can look at training images that a server should not have.
    return registry, replace(context, population=people, train=context.train.take(np.arange(0)))


@dataclass
class Tested:
    """Results of the tests that nodes run at the end of a run."""

    accuracy: np.ndarray = field(default_factory=lambda: np.empty(0))  # (K,), of each client on its own test images
    metrics: dict[str, float] = field(default_factory=dict)  # accuracy and loss over all these images
    images: int = 0  # their number
    personal: dict[str, np.ndarray] = field(default_factory=dict)  # accuracies of personal models, by method


def test_at_nodes(
    context: ServerContext, registry: Registry, stage: Stage, mask: Mask | None, chosen: np.ndarray
) -> Tested:
    """Have nodes measure the final model, and those `chosen` what they make of it for themselves."""
    nodes, people, number = RemoteClients(context, registry, stage.name, {}), context.population, stage.length - 1
    own = context.experiment.own_images
    clients = list(range(len(people))) if own else chosen.tolist()
    if (changed := context.changed_weights()) is not None:
        places, values = changed
        nodes.tell(Parcel("context", number, places, EXACT, enclose=True), clients, values.float())
    if mask is not None:
        nodes.tell(Parcel("mask", number, mask, enclose=True), chosen.tolist())
    methods = people.settings.personal.methods if people.settings.personal else []
    known = np.isin(np.arange(len(people)), chosen)
    terms = {
        client: {"personal": bool(known[client]), "mask": mask and mask.id}
        for client in nodes.reached("test", clients, number)
    }
    tested = Tested(np.full(len(people), np.nan), personal={name: np.full(len(chosen), np.nan) for name in methods})
    total = torch.zeros(2, dtype=torch.float64)
    for client, answer in nodes.mailbox.ask("test", number, terms).items():
        reply = nodes.mailbox.take(Parcel("test", number, METRICS, FP64), client, answer, "cpu") if own else None
        if isinstance(reply, Decoded):
            total, tested.images = total + reply.values, tested.images + reply.n
            tested.accuracy[client] = reply.values[1].item() / max(reply.n, 1)
        if not known[client]:
            continue
        parcel = Parcel("personal", number, personal_space(len(methods)), FP64)
        reply = nodes.mailbox.take(parcel, client, answer, "cpu")
        if isinstance(reply, Decoded):
            for name, value in zip(methods, reply.values.tolist(), strict=True):
                tested.personal[name][chosen == client] = value if value >= 0 else np.nan
    loss, right = (total / max(tested.images, 1)).tolist()
    tested.metrics = {"test_accuracy": right, "test_loss": loss}
    return tested

"""The beginning of a run whose clients are elsewhere: what cannot be done there is refused, and sites are met."""

import json
import secrets
import time
from pathlib import Path

import numpy as np

import fedsieve
from fedsieve.config import Experiment, to_yaml
from fedsieve.errors import FedsieveError
from fedsieve.federation.sites import DEADLINE, Sites, Transport
from fedsieve.federation.state import Context
from fedsieve.files import write_json
from fedsieve.runner.setup import Setup
from fedsieve.wire.envelope import wrap

SITES = "sites.json"
PAUSE = 0.5  # seconds from one look at who is here to the next


def check_remote(experiment: Experiment) -> None:
    """Refuse what works only where all clients are in one process."""
    settings = experiment.federation
    if settings is None:
        raise FedsieveError("federation: sites need one, and this experiment is central")
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
    for name in ("blend", "personal"):
        if getattr(settings, name):
            raise FedsieveError(f"federation.{name} does not work with sites elsewhere yet: drop it, or `fedsieve run`")
    for sieve in filter(None, map(experiment.mask_of, experiment.stages)):
        if sieve.scope == "public" and not experiment.data.val_fraction:
            raise FedsieveError("mask.scope: public is scored on images of the server's: set data.val_fraction")


def meet_sites(context: Context, setup: Setup, weights: str, folder: Path, transport: Transport) -> Sites:
    """Wait until all sites are here (of a run that has begun before, enough of them), each of which fits the experiment."""
    experiment, settings, people = context.experiment, context.population.settings, context.population
    check_remote(experiment)
    file, run = folder / SITES, secrets.token_hex(8)
    if begun := file.exists():
        run = json.loads(file.read_text())["run"]
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
    seconds = settings.failures.deadline or DEADLINE
    sites = Sites(transport, run, len(people), greeting, seconds, context.say)
    sites.images = dict(enumerate(people.shards.sizes.tolist()))
    needed = settings.minimum_replies if begun else len(people)
    began = time.monotonic()
    while len(here := sites.here()) < needed:
        if time.monotonic() - began > transport.wait:
            missing = [str(client) for client in range(len(people)) if client not in here]
            why = "".join(f"\nnode {node}: {reason}" for node, reason in sites.refused.items())
            raise FedsieveError(
                f"{len(here)} of {len(people)} sites are here after {transport.wait:g} s, and {needed} are needed. Missing: "
                f"{', '.join(missing[:20])}{', ...' if missing[20:] else ''}{why}",
                1,
            )
        time.sleep(PAUSE)
    write_json(file, {"run": run, "images": sites.images})
    # From here on nobody can look at training images that a server should not have.
    setup.train = context.train = setup.train.take(np.arange(0))
    return sites

"""The context of an experiment's federated stages: clients made from its data, a ledger, memory, a privacy account."""

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.config import Experiment, too_many
from fedsieve.data.partitions import Shards
from fedsieve.data.sources import load_column
from fedsieve.errors import FedsieveError
from fedsieve.federation.attacks import label_flip
from fedsieve.federation.means import check_numbers
from fedsieve.federation.memory import ClientMemory
from fedsieve.federation.personal import spread_apart
from fedsieve.federation.population import Population, dealt, make_population
from fedsieve.federation.state import ServerContext
from fedsieve.federation.team import Team
from fedsieve.files import write_atomic
from fedsieve.privacy.dp import Account, bound_key, load_or_make_key
from fedsieve.report.summary import ClientSpread, StageSummary
from fedsieve.runner.setup import Setup, chosen_executor
from fedsieve.train.feed import Examples
from fedsieve.wire.ledger import Ledger

CLIENTS = "clients.npz"
PERSONAL = "personal.npz"


def populate(experiment: Experiment, labels: np.ndarray, rows: np.ndarray) -> Population:
    """Deal training images to clients: their `labels`, and which `rows` of the source they are."""
    settings = experiment.federation
    assert settings is not None
    groups = None
    if settings.partition.kind == "natural":
        groups = load_column(experiment.data, "train", settings.partition.fields["column"])[rows]
    if experiment.own_images:
        assert settings.clients is not None
        nothing = Shards(np.arange(0), np.zeros(settings.clients + 1, dtype=np.int64))
        population = dealt(settings, experiment.seed, nothing, np.arange(0))
    else:
        population = make_population(settings, labels, experiment.seed, groups)
    if why := too_many(experiment, len(population)):
        raise FedsieveError(why)
    check_numbers(experiment, population.cohort_size, population.trainers)
    return population


def make_context(
    setup: Setup,
    initial: Mapping[str, Tensor],
    folder: Path,
    mark: str,
    saved: Mapping[str, Any],
    team: Team | None = None,
) -> ServerContext:
    """The context of the federated stages. `saved` comes from `saved_context` at the last checkpoint, or is empty.

    Under differential privacy `mark` names the settings that the noise belongs to.
    """
    experiment, train, account = setup.experiment, setup.train, None
    population = setup.people or populate(experiment, train.labels.cpu().numpy(), train.rows)
    if experiment.privacy.dp is not None:
        given = saved.get("account", {})
        key = bound_key(load_or_make_key(folder / "checkpoints" / "dp.key", resumed=bool(given)), mark)
        account = Account(experiment, population.rate, population.trainers, key, given)
        population = replace(population, secret=key)
    if population.settings.attack is not None and population.settings.attack.kind == "label_flip":
        train = flipped(train, population, len(setup.class_names))
    if team and team.size > (cohort := population.cohort_size):
        setup.say(
            f"executor: {team.size} ranks, but only {cohort} clients in a round: {team.size - cohort} have nothing to do"
        )
    memories = saved.get("memories", [])
    return ServerContext(
        experiment=experiment,
        population=population,
        model=setup.model,
        initial=initial,
        train=train,
        validation=setup.validation,
        autocast=setup.autocast,
        speed=setup.speed,
        executor=chosen_executor(experiment, setup.device),
        ledger=Ledger(folder / "ledger.csv", saved.get("ledger_bytes", 0), saved.get("ledger_digest", "")),
        memory=ClientMemory(folder / "clients", memories[-1] if memories else None),
        account=account,
        say=setup.say,
        team=team,
        recipe=setup.recipe,
    )


def flipped(train: Examples, population: Population, classes: int) -> Examples:
    """Training images with wrong labels at hostile clients."""
    labels = train.labels.clone()
    for client in population.hostile:
        rows = torch.from_numpy(population.examples(client)).to(labels.device)
        labels[rows] = label_flip(labels[rows], classes)
    return train.over(train.rows, labels, train.features)


def saved_context(context: ServerContext, number: int, before: Mapping[str, Any]) -> dict[str, Any]:
    """The federation's part of checkpoint `number`; `before` is that of the last one.

    Files of clients that no kept checkpoint names may go once this one is written.
    """
    context.ledger.sync()
    memories = [*before.get("memories", []), context.memory.write(number)]
    return {
        "ledger_bytes": context.ledger.offset,
        "ledger_digest": context.ledger.digest,
        "memories": memories[-context.experiment.checkpoint.keep :],
        "account": context.account.numbers() if context.account else {},
    }


def client_summary(population: Population, accuracy: np.ndarray, file: Path) -> ClientSpread:
    """Clients' accuracies with the global model, each weighted by its own shares of classes; details in `file`."""
    write_clients(population, accuracy, file)
    return ClientSpread(**spread_apart(accuracy, np.isin(np.arange(len(population)), population.strangers)))


def write_clients(population: Population, accuracy: np.ndarray | None, file: Path) -> None:
    """The images of each client, and the model's accuracy for it; an unfinished run has no accuracies yet."""
    if accuracy is None:
        accuracy = np.full(len(population), np.nan)
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        accuracy=accuracy,
        sizes=population.shards.sizes,
        strangers=population.strangers,
        client=population.counts.client,
        label=population.counts.label,
        examples=population.counts.examples,
    )
    write_atomic(file, buffer.getvalue())


def personal_summary(
    population: Population, clients: np.ndarray, accuracy: Mapping[str, np.ndarray], folder: Path
) -> dict[str, ClientSpread]:
    """Accuracies of personal models on their `clients`, by method, next to the global model's. Details are in personal.npz."""
    strangers = np.isin(clients, population.strangers)
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        methods=np.array(list(accuracy)),
        clients=clients,
        strangers=clients[strangers],
        accuracy=np.stack(list(accuracy.values())),
    )
    write_atomic(folder / PERSONAL, buffer.getvalue())
    return {method: ClientSpread(**spread_apart(found, strangers)) for method, found in accuracy.items()}


def sum_up(context: ServerContext, stages: Mapping[str, StageSummary]) -> dict[str, Any]:
    """The fields of a run's summary that only a federation has: all rounds and bytes, the newest mask and drift."""

    def newest(name: str) -> Any:  # a head in closed form has neither mask nor drift
        values = (getattr(stage, name) for stage in reversed(list(stages.values())))
        return next((value for value in values if value is not None), None)

    refused = Counter[str]()
    for stage in stages.values():
        refused.update(stage.refused)
    return {
        "train_images": int(context.population.shards.sizes.sum()),
        "rounds": sum(stage.rounds or 0 for stage in stages.values()),
        "bytes_up": context.ledger.total["up"],
        "bytes_down": context.ledger.total["down"],
        "sparsity": newest("sparsity"),
        "mask_id": newest("mask_id"),
        "drift": newest("drift"),
        "refused": dict(refused),
        "privacy": describe_privacy(context),
    }


def describe_privacy(context: ServerContext) -> dict[str, Any]:
    """The privacy fields of the summary."""
    account, attack = context.account, context.population.settings.attack
    described: dict[str, Any] = {"aggregation": context.experiment.privacy.aggregation}
    if account is not None:
        settings = account.settings
        described |= {"epsilon": account.spent(), "delta": settings.delta, "noise_multiplier": account.sigma}
        described |= {"clip_norm": settings.clip_norm, "rounds": account.rounds, "releases": len(account.releases)}
    described["aggregator"] = context.population.settings.aggregator.kind
    if attack is not None:
        described |= {"attack": attack.kind, "hostile": sorted(context.population.hostile)}
    return described

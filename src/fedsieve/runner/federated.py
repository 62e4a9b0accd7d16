"""Federated stages of an experiment: clients from its data, rounds from its stages, and what clients see at the end."""

import io
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config import Experiment, Stage, too_many
from fedsieve.data.partitions import Shards
from fedsieve.data.sources import load_column
from fedsieve.errors import FedsieveError
from fedsieve.federation.attacks import label_flip
from fedsieve.federation.calibrate import sieve_at
from fedsieve.federation.channel import EXACT, Channel
from fedsieve.federation.personal import spread_apart
from fedsieve.federation.population import Population, dealt, make_population
from fedsieve.federation.remote import RemoteChannel, RemoteRounds
from fedsieve.federation.ridge import federated_ridge
from fedsieve.federation.rounds import Federated
from fedsieve.federation.state import Context, ServerState
from fedsieve.federation.store import ClientStore
from fedsieve.federation.sums import check_numbers
from fedsieve.federation.team import Team
from fedsieve.files import write_atomic
from fedsieve.mask.mask import Mask
from fedsieve.model.build import OnFeatures, dense_names
from fedsieve.model.space import ParamSpace
from fedsieve.privacy.dp import Account, bound_key, load_or_make_key
from fedsieve.runner.setup import Setup, chosen_executor, feature_feeds
from fedsieve.train.loop import Tick, measure, predict
from fedsieve.train.sieve import reached_sparsity
from fedsieve.wire.ledger import Ledger

Watch = Callable[[], dict[str, float]]
CLIENTS = "clients.npz"
PERSONAL = "personal.npz"


def populate(experiment: Experiment, labels: np.ndarray, rows: np.ndarray) -> Population:
    """Deal training images to clients: their `labels`, and which `rows` of the source they are."""
    settings = experiment.federation
    assert settings is not None
    groups = None
    if settings.partition.kind == "natural":
        assert settings.partition.column is not None
        groups = load_column(experiment.data, "train", settings.partition.column)[rows]
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
    experiment: Experiment,
    setup: Setup,
    initial: Mapping[str, Tensor],
    folder: Path,
    say: Callable[[str], None],
    offset: int = 0,
    digest: str | None = None,
    versions: Mapping[str, int] | None = None,
    mark: str = "",
    given: Mapping[str, Any] | None = None,
    team: Team | None = None,
) -> Context:
    """What the federated stages share; the ledger goes on at `offset`, clients remember what `versions` names.

    Under differential privacy, `mark` stands for the settings that the noise belongs to, and `given` is what the account said
    when the run was left.
    """
    population, account = populate(experiment, setup.train.labels.cpu().numpy(), setup.train.rows), None
    if experiment.privacy.dp is not None:
        key = bound_key(load_or_make_key(folder / "checkpoints" / "dp.key", resumed=bool(given)), mark)
        account = Account(experiment, population.rate, population.trainers, key, given or {})
        population = replace(population, secret=key)
    if population.settings.attack is not None and population.settings.attack.kind == "label_flip":
        labels = setup.train.labels.clone()
        for client in population.hostile:
            rows = torch.from_numpy(population.examples(client)).to(labels.device)
            labels[rows] = label_flip(labels[rows], len(setup.class_names))
        setup.train = replace(setup.train, labels=labels)
    if team and team.size > (cohort := population.cohort_size):
        say(
            f"executor: {team.size} ranks, but only {cohort} clients in a round: {team.size - cohort} have nothing to do"
        )
    return Context(
        experiment=experiment,
        population=population,
        model=setup.model,
        initial=initial,
        train=setup.train,
        validation=setup.validation,
        autocast=setup.autocast,
        speed=setup.speed,
        executor=chosen_executor(experiment, setup.device),
        ledger=Ledger(folder / "ledger.csv", offset, digest),
        store=ClientStore(folder / "clients", versions),
        account=account,
        say=say,
        team=team,
    )


def fit_rounds(
    setup: Setup, context: Context, stage: Stage, state: ServerState | None, watch: Watch, folder: Path
) -> tuple[ParamSpace, ServerState, Iterator[Tick]]:
    """Start a federated stage, or continue it from `state`: its space, its living state, and the rounds to iterate over."""
    space = setup.space(stage)
    setup.release()
    theta = space.bind(setup.model)
    forward: nn.Module = setup.model
    train, validation = setup.train, setup.validation
    if stage.train == "head" and not setup.transform.random:
        train, validation = feature_feeds(setup)
        forward = OnFeatures(setup.model.head)

    def keep_mask(name: str, mask: Mask) -> None:
        file = folder / "masks" / f"{stage.name}{name and '.'}{name}.safetensors"
        file.parent.mkdir(exist_ok=True)
        mask.save(file)

    def validate() -> dict[str, float]:
        return setup.validate(forward, validation) | watch()

    context.keep_mask = keep_mask
    if state is None and (told := stage.spent):
        context.say(f"{stage.name}: {told}")
    loop = Federated if context.sites is None else RemoteRounds
    federated = loop(context, stage, space, forward, theta, train, validate, state)
    return space, federated.state, federated.rounds()


def fit_ridge(
    setup: Setup, context: Context | None, stage: Stage, watch: Watch
) -> tuple[ParamSpace, ServerState, Iterator[Tick]]:
    """A head in closed form, from all clients (or centrally) in one round."""
    space = setup.space(stage)
    setup.release()
    state = ServerState(space.read(setup.model))

    def solved() -> Iterator[Tick]:
        clock = time.perf_counter()
        sent = dict(context.ledger.total) if context else {}
        train, validation = feature_feeds(setup)
        features = train.features
        if features is None:  # images are elsewhere
            features = torch.empty(0, space.shapes[space.names.index("head.weight")][1], device=setup.device)
        clients = [(0, np.arange(len(train)))]
        if context:
            people = context.population
            numbers = people.trainer(np.arange(people.trainers)).tolist()
            clients = [(client, people.examples(client)) for client in numbers]

        device = train.labels.device
        channel = Channel(None, setup.experiment.seed, stage.name, device)
        if context:
            channel = context.channel(stage.name, device)
        if context and context.sites:
            channel = RemoteChannel(context, stage.name, state, device)
        if context and (before := context.changed_weights(but=space)) is not None:
            mask, values = before  # features are those of the backbone as it is now
            channel.down("context", [client for client, _ in clients], 0, mask, values.float(), EXACT, enclose=True)
        held = None if validation.features is None else (validation.features, validation.labels)
        weight, bias, chosen = federated_ridge(
            stage.ridge, features, train.labels, len(setup.class_names), clients, held, channel
        )
        parts = {"head.weight": weight, "head.bias": bias}
        theta = space.flatten({name: parts[name].to(state.theta.dtype) for name in space.names})
        space.write(setup.model, theta)
        state.theta, state.round, state.best_at, state.done = theta, 1, 1, True
        record: dict[str, Any] = {"stage": stage.name, "round" if context else "epoch": 1}
        if len(train):
            record |= measure(predict(setup.model.head, train, setup.autocast), train.labels, "train")
        record |= chosen
        if context:
            record |= {f"bytes_{way}": context.ledger.total[way] - sent[way] for way in ("up", "down")}
            state.refused = dict(Counter(channel.lost.values()))
            replies = len(clients) - len(channel.lost)
            record |= {"cohort": len(clients), "replies": replies, "refused": state.refused}
        if context and context.account:
            record["epsilon"] = context.account.spent()
        record |= setup.validate(setup.model.head, validation) | watch()
        state.chosen = {key: value for key, value in record.items() if key.startswith("val_")}
        record["seconds"] = state.seconds = time.perf_counter() - clock
        yield Tick(1, 1, record)

    return space, state, solved()


def client_summary(population: Population, accuracy: np.ndarray, file: Path) -> dict[str, Any]:
    """How well the global model serves each client, whose test set has its own shares of classes; details in `file`."""
    write_clients(population, accuracy, file)
    return spread_apart(accuracy, np.isin(np.arange(len(population)), population.strangers))


def write_clients(population: Population, accuracy: np.ndarray | None, file: Path) -> None:
    """Who holds what, and how well the model serves each; a run that is not finished has no accuracies yet."""
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
) -> dict[str, Any]:
    """How well personal models serve their `clients`, by method, beside the global one. Details are in personal.npz."""
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
    return {method: spread_apart(found, strangers) for method, found in accuracy.items()}


def describe_rounds(state: ServerState, stage: Stage, experiment: Experiment, setup: Setup) -> dict[str, Any]:
    """What the summary says of a federated stage beside what it says of any."""
    described: dict[str, Any] = {"rounds": state.round, "drift": state.drift, "refused": state.refused}
    described["dense"] = ParamSpace.of(setup.model, dense_names(setup.model, stage.train)).size
    described |= {key: value for key, value in state.chosen.items() if key.startswith("client_val_")}
    if state.simulated_seconds:
        described["simulated_seconds"] = state.simulated_seconds
    sieve = experiment.mask_of(stage)
    if sieve is None:
        return described
    asked = sieve_at(sieve, state.best_generation - 1, stage.length)
    described |= {"rule": sieve.rule, "sparsity": asked.sparsity, "scope": sieve.scope}
    described["calibration_seconds"] = state.calibration_seconds
    if state.best_mask is not None:
        mask = Mask(setup.space(stage), state.best_mask.numpy())
        whole = sum(parameter.numel() for parameter in setup.model.parameters())
        described["reached_sparsity"] = reached_sparsity(mask, sieve, setup.model)
        described |= {"active": mask.count, "active_share": mask.count / whole, "mask_id": mask.id}
    return described


def describe_privacy(context: Context) -> dict[str, Any]:
    """What the summary says of what the server learnt of single clients."""
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

"""Whole federated rounds: images per second against the plain loop and against other frameworks, on the same work."""

import contextlib
import functools
import gc
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.limits import measure_limits, training_flops
from benchmarks.options import REPEATS, fills, numbers, option, read_numbers, words
from benchmarks.peers import Arrays, flower_rounds, missing, pfl_rounds
from benchmarks.result import Result, Stopped, alternate, columns, keeping, say, timed
from fedsieve.config import Data, Experiment, parse_config
from fedsieve.data.store import ImageStore
from fedsieve.data.transforms import HALF, make_transform
from fedsieve.errors import FedsieveError
from fedsieve.federation.executors import Stacked, Task
from fedsieve.federation.local import LocalClients, Training, local_clients
from fedsieve.federation.maskbook import MaskBook
from fedsieve.federation.memory import ClientMemory
from fedsieve.federation.population import make_population
from fedsieve.federation.server import Rounds
from fedsieve.federation.state import ServerContext, ServerState
from fedsieve.model.build import Classifier, build_classifier, trainable_names
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.runner.environment import make_autocast
from fedsieve.train.feed import Feed
from fedsieve.train.replay import Speed, compiled
from fedsieve.wire.ledger import Ledger

SMALL = "{patch_size: 4, embed_dim: 48, depth: 4, num_heads: 4}"
NETWORKS = {"small": ("ViT-S/16", "vit_small_patch16_224"), "tiny": ("ViT-Ti/16", "vit_tiny_patch16_224")}
# How a round can be run. Of the peers, those in PLAIN are the loop a notebook has.
PLAIN = {"plain": "plain loop", "plain-bf16": "plain loop, bf16", "plain-compiled": "plain loop, bf16, compiled"}
PEERS = PLAIN | {"pfl": "pfl", "flower": "Flower's simulation"}
OURS: dict[str, tuple[str, str, Speed]] = {
    "sequential": ("fedsieve, one by one", "sequential", "eager"),
    "single-graph": ("fedsieve, one by one, graph", "stacked", "graph"),
    "single-full": ("fedsieve, one by one, full", "stacked", "full"),
    "stacked": ("fedsieve, stacked", "stacked", "eager"),
    "stacked-graph": ("fedsieve, stacked, graph", "stacked", "graph"),
    "stacked-blocks": ("fedsieve, stacked, blocks", "stacked", "blocks"),
    "stacked-full": ("fedsieve, stacked, full", "stacked", "full"),
}
WAYS = (*PEERS, *OURS)
ON_GPU = (*PEERS, "single-graph", "single-full", "stacked-graph", "stacked-blocks", "stacked-full")
ON_CPU = ("plain", "pfl", "flower", "sequential", "stacked")
TOGETHER = (
    "All ways take turns with each other, in less time; they must fit into memory at once. Otherwise peers do, and then "
    "each of ours with the fastest plain loop."
)
BATCH = 64
DENSE = ("mask=null", "stages.bench.sparse=false", "message={up: fp32, down: fp32}")  # instead of a mask
ACTORS = 8  # Flower's clients on one GPU at a time


def make_experiment(backbone: str, options: str, pixels: int, clients: int, batch: int, *overrides: str) -> Experiment:
    """One local step of all clients; a shared random mask on the backbone, int8 up, fp16 down."""
    experiment = f"""
data: {{source: digits, size: {pixels}, transform: flip, normalize: half}}
model: {{backbone: {backbone}, weights: none, options: {options}}}
federation: {{clients: {clients}, cohort: {clients}, server: {{optimizer: momentum, lr: 0.3}}}}
mask: {{rule: random, sparsity: 0.9}}
message: {{up: int8, down: fp16}}
stages:
  - {{name: bench, train: backbone, sparse: true, rounds: 1000000, local: {{steps: 1}}, batch_size: {batch}, schedule: constant,
      optimizer: {{lr: 1.0e-3}}}}
"""
    return parse_config(experiment, overrides)


def make_model(experiment: Experiment, device: torch.device) -> Classifier:
    """The network of an experiment, for 100 classes."""
    return build_classifier(experiment.model, 100, experiment.data.size, 0).to(device)


def make_feed(experiment: Experiment, images: int, device: torch.device, distinct: int | None = None) -> Feed:
    """Random small images with random labels; of many examples, only some may be `distinct`."""
    rng = generator(0, "bench")
    stored = min(images, distinct or images)
    pixels = torch.from_numpy(rng.integers(0, 256, (stored, 3, 32, 32), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 100, images)).to(device)
    config: Data = experiment.data
    return Feed(ImageStore(pixels, device), make_transform(config, *HALF), np.arange(images) % stored, labels)


@contextlib.contextmanager
def federation(
    experiment: Experiment, feed: Feed, executor: str, speed: Speed, model: Classifier | None = None
) -> Iterator[Rounds]:
    """A federated stage on `feed`, ledger and all, in a folder that vanishes. By default its network is made here."""
    model = model or make_model(experiment, feed.store.device)
    settings, device = experiment.federation, feed.store.device
    assert settings is not None
    space = ParamSpace.of(model, trainable_names(model, "backbone"))
    nothing = Feed(feed.store, feed.transform, np.arange(0), feed.labels[:0])
    with tempfile.TemporaryDirectory() as folder:
        context = ServerContext(
            experiment=experiment,
            population=make_population(settings, feed.labels.cpu().numpy(), 0),
            model=model,
            initial={name: tensor.detach().cpu().clone() for name, tensor in model.named_parameters()},
            train=feed,
            validation=nothing,
            autocast=make_autocast(experiment, device),
            speed=speed,
            executor=executor,
            ledger=Ledger(Path(folder) / "ledger.csv"),
            memory=ClientMemory(Path(folder) / "clients"),
        )
        theta = space.bind(model)
        stage = experiment.stages[0]
        task = Task(model, space, theta, feed, stage.optimizer, settings.correction, context.autocast, speed)
        state = ServerState(task.theta.detach().clone())
        book = MaskBook(context, stage, task.space, task.theta, state.masks)
        yield Rounds(context, stage, book, local_clients(context, task, book), state)


def training_of(stage: Rounds) -> Training:
    """The local training of a stage whose clients are here."""
    assert isinstance(stage.clients, LocalClients)
    return stage.clients.training


@dataclass(frozen=True)
class Case:
    """The work of one round: `cohort` clients of `images` images, `epochs` passes over them in batches."""

    backbone: str
    options: str
    pixels: int
    cohort: int
    images: int
    epochs: int

    @property
    def seen(self) -> int:
        """Images of one round."""
        return self.cohort * self.images * self.epochs

    @functools.cached_property
    def experiment(self) -> Experiment:
        local = f"stages.bench.local={{epochs: {self.epochs}}}"
        return make_experiment(self.backbone, self.options, self.pixels, self.cohort, BATCH, local)

    def feed(self, device: torch.device) -> Feed:
        return make_feed(self.experiment, self.cohort * self.images, device)

    def network(self, device: torch.device) -> Classifier:
        """The whole classifier, of which the backbone trains."""
        model = make_model(self.experiment, device)
        model.head.requires_grad_(False)
        return model

    def shards(self, feed: Feed) -> list[np.ndarray]:
        """The examples of every client."""
        assert self.experiment.federation is not None
        shards = make_population(self.experiment.federation, feed.labels.cpu().numpy(), 0).shards
        return [shards.client(number) for number in range(self.cohort)]


class PlainClient:
    """Local training as a notebook has it: eager or compiled, gradients times the mask, then torch's SGD with momentum."""

    def __init__(self, case: Case, device: torch.device, way: str) -> None:
        self.case, self.way, self.device = case, way, device
        self.model, self.feed = case.network(device), case.feed(device)
        self.shards, self.draws = case.shards(self.feed), self.feed.draw(generator(0, "bench draws"))
        self.trained = dict(self.model.backbone.named_parameters())
        drawn = torch.Generator().manual_seed(0)
        self.mask = {
            name: (torch.rand(weights.shape, generator=drawn) < 0.1).to(device)
            for name, weights in self.trained.items()
        }
        self.forward = compiled(self.model.__call__, "full" if way == "plain-compiled" else "eager", self.model)

    def train(self, number: int) -> int:
        """Train on one client's images from the model's weights on; gives how many images it has."""
        case, mine = self.case, self.shards[number]
        optimizer = torch.optim.SGD(self.trained.values(), lr=1e-3, momentum=0.9)
        for _, start in itertools.product(range(case.epochs), range(0, len(mine), BATCH)):
            inputs, labels = self.feed.batch(mine[start : start + BATCH], self.draws)
            optimizer.zero_grad()
            with _autocast(self.way, self.device):
                loss = F.cross_entropy(self.forward(inputs), labels)
            loss.backward()
            for name, weights in self.trained.items():
                if weights.grad is not None:
                    weights.grad.mul_(self.mask[name])
            optimizer.step()
        return len(mine)

    def round(self) -> None:
        """Clients one after another, and the mean of their weights."""
        _set_precision(self.way)
        with torch.no_grad():
            weights = {name: tensor.clone() for name, tensor in self.trained.items()}
            total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for number in range(self.case.cohort):
            _lay(self.trained, weights)
            n = self.train(number)
            with torch.no_grad():
                for name, tensor in self.trained.items():
                    total[name] += tensor * n
        _lay(self.trained, {name: tensor / len(self.feed) for name, tensor in total.items()})


@torch.no_grad()
def _lay(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


def _seconds(flag: str, value: float) -> float:
    return read_numbers(flag, str(value), "numbers from 0", lambda number: number >= 0, float)[0]  # nan is none


@dataclass(frozen=True)
class Plan:
    """What `rounds` measures: every network at every size with every cohort, in every way."""

    networks: Annotated[Sequence[str], words("`small` (ViT-S/16), `tiny` (ViT-Ti/16).", NETWORKS)] = ("small",)
    pixels: Annotated[
        Sequence[int], numbers("Sizes of the images, such as 64,128,224.", "multiples of 16, as in 64,224", fills)
    ] = (64, 224)
    cohorts: Annotated[Sequence[int], numbers("Clients in a round, such as 1,10,20,50.")] = (10,)
    ways: Annotated[Sequence[str], words("Which of the ways to run a round; a wrong word shows them all.", WAYS)] = (
        ON_GPU
    )
    images: Annotated[int, option(int, "Images of each client.", min=1)] = 500
    epochs: Annotated[int, option(int, "Local epochs.", min=1)] = 4
    repeats: Annotated[int, REPEATS] = 3
    seconds: Annotated[
        float, option(float, "No further turn of a group of ways begins after these.", min=0, read=_seconds)
    ] = 30.0
    together: Annotated[bool, option(bool, TOGETHER, "--together")] = False
    options: str = "{}"  # of the networks


def default_plan(device: torch.device, smoke: bool) -> Plan:
    """Some minutes on either device."""
    if smoke:
        return Plan(("tiny",), (16,), (2,), ON_CPU, images=6, epochs=1, repeats=1, options=SMALL)
    return Plan() if device.type == "cuda" else Plan(("tiny",), (64,), (4,), ON_CPU, images=64, epochs=1)


def rounds(device: torch.device, smoke: bool, plan: Plan | None = None, **given: Any) -> Result:
    """Every way does the same work: peers take turns with each other, and each of ours with the fastest plain loop; or all at once.

    `given` are fields of the plan.
    """
    plan = replace(plan or default_plan(device, smoke), **given)
    limits = measure_limits(device, smoke)
    result = Result(
        columns(
            "network | pixels | cohort | how | images/s | plain beside it, images/s | times plain | turns | "
            "seconds a round | of peak, % | first, s"
        ),
        note=f"Whole rounds: {plan.images} images a client, {plan.epochs} local epochs, batch {BATCH}; batches, transforms, local "
        "training, mean, server step. fedsieve trains a tenth of the weights (shared mask) and encodes, decodes and counts "
        "int8 messages; the plain loop masks gradients and sends nothing; pfl and Flower train all weights. `times plain` is "
        "against the fastest plain loop, which took turns with the row and made `plain beside it` in them, medians of so many `turns`; `of peak` counts forward and backward of a dense network against "
        "the data sheet; `first` is the first round, compilation and recording included.",
        limit=limits.sentence(),
        skipped=[why for peer in ("pfl", "flower") if peer in plan.ways and (why := missing(peer))],
    )
    ways = [way for way in plan.ways if way not in ("pfl", "flower") or not missing(way)]
    if not any(way in PLAIN for way in ways):
        raise FedsieveError(f"bench round: --ways needs a plain loop to compare with: {', '.join(PLAIN)}")
    with keeping(result):
        for network, pixels, cohort in itertools.product(plan.networks, plan.pixels, plan.cohorts):
            name, backbone = NETWORKS[network]
            name = name if plan.options == "{}" else "a small ViT"
            case = Case(backbone, plan.options, pixels, cohort, plan.images, plan.epochs)
            flops = training_flops(case.experiment.model, pixels, "backbone")
            for way, taken, reference, turns, first in _measured(case, ways, device, plan, result.skipped):
                rate = case.seen / taken
                used = 100 * rate * flops / limits.peak if limits.peak else None
                how = PEERS[way] if way in PEERS else OURS[way][0]
                rates = rate, case.seen / reference, reference / taken
                result.rows.append((name, pixels, cohort, how, *rates, turns, taken, used, first))
                say(f"{name}, {pixels} px, {cohort} clients, {how}: {rate:,.0f} images/s, first round {first:.1f} s")
    return result


def _measured(
    case: Case, ways: Sequence[str], device: torch.device, plan: Plan, skipped: list[str]
) -> Iterator[tuple[str, float, float, int, float]]:
    """Each way, with seconds of a round, of the fastest plain loop in the same turns, their number, and the first round's seconds.

    `skipped` hears of peers that fail: what others do must not cost the table.
    """
    calls: dict[str, Callable[[], object]] = {}
    first: dict[str, float] = {}
    stopped: Stopped | None = None
    with contextlib.ExitStack() as stack:
        for way in (way for way in ways if plan.together or way in PEERS):
            try:
                calls[way] = stack.enter_context(open_way(way, case, device))
                first[way] = timed(calls[way], device)
            except Exception as error:
                if way in PLAIN or way in OURS:
                    raise
                calls.pop(way, None)
                skipped.append(f"{way}, {case.pixels} px: failed, {type(error).__name__}: {str(error)[:200]}")
        try:
            taken = alternate(calls, device, plan.repeats, plan.seconds, warm=True)
        except Stopped as error:
            taken, stopped = error.medians, error
    best = min((way for way in taken if way in PLAIN), key=lambda way: taken[way])
    for way in taken:
        yield way, taken[way], taken[best], taken.turns, first[way]
    if stopped:
        raise stopped
    plain = calls[best]
    del calls
    for way in (way for way in ways if way not in taken and way in OURS):
        # One of ours at a time: what it holds on the device must not crowd out the next.
        release(device)
        yield way, *_beside(plain, way, case, device, plan)
    release(device)


def _beside(
    plain: Callable[[], object], way: str, case: Case, device: torch.device, plan: Plan
) -> tuple[float, float, int, float]:
    with open_way(way, case, device) as own:
        first = timed(own, device)
        taken = alternate({"plain": plain, "own": own}, device, plan.repeats, plan.seconds, warm=True)
    return taken["own"], taken["plain"], taken.turns, first


@contextlib.contextmanager
def open_way(way: str, case: Case, device: torch.device) -> Iterator[Callable[[], object]]:
    """A function that does one round of a case in the given way."""
    if way in PLAIN:
        yield PlainClient(case, device, way).round
    elif way == "pfl":
        yield pfl_case(case, device, case.network(device))
    elif way == "flower":
        initial = [weights.detach().cpu().numpy() for weights in case.network(device).backbone.parameters()]
        gpus = 1 / min(ACTORS, case.cohort) if device.type == "cuda" else 0.0
        client = functools.partial(flower_client, case, device.type)
        with flower_rounds(client, initial, case.cohort, gpus) as step:
            yield step
    else:
        _, executor, speed = OURS[way]
        at_once = 1 if way.startswith("single") else None
        experiment = case.experiment.model_copy(update={"clients_at_once": at_once})
        with federation(experiment, case.feed(device), executor, speed, case.network(device)) as stage:
            going = stage.rounds()

            def step() -> None:
                _set_precision("fedsieve")
                next(going)
                if executor == "stacked" and not isinstance(training_of(stage).executor(), Stacked):
                    raise FedsieveError(
                        f"bench round: {case.backbone} at {case.pixels} px was not stacked, as the warning says: leave {way} out of --ways"
                    )

            yield step


def pfl_case(case: Case, device: torch.device, model: Classifier) -> Callable[[], None]:
    """A function that does one round of a case with pfl."""
    feed = case.feed(device)
    draws = feed.draw(generator(0, "bench draws"))
    users = [list(feed.fetch(mine, draws)) for mine in case.shards(feed)]

    def loss(*batch: Tensor) -> Tensor:
        *raw, labels = batch
        return F.cross_entropy(model(feed.inputs(*raw)).float(), labels)

    step = pfl_rounds(model, loss, users, 1e-3, BATCH, case.epochs)

    def round() -> None:
        _set_precision("pfl")
        step()

    return round


@functools.lru_cache(maxsize=1)
def _flower_worker(case: Case, device: str) -> PlainClient:
    """What one of Ray's processes keeps from client to client."""
    if device == "cpu":
        torch.set_num_threads(1)  # a client has one core
    worker = PlainClient(case, torch.device(device), "plain-bf16" if device == "cuda" else "plain")
    worker.mask = {name: torch.ones_like(mask) for name, mask in worker.mask.items()}
    return worker


def flower_client(case: Case, device: str, weights: Arrays, number: int) -> tuple[Arrays, int]:
    """What a client of Flower's does with the weights it receives."""
    worker = _flower_worker(case, device)
    _lay(worker.trained, dict(zip(worker.trained, map(torch.from_numpy, weights), strict=True)))
    n = worker.train(number)
    return [parameter.detach().cpu().numpy() for parameter in worker.trained.values()], n


def release(device: torch.device) -> None:
    """Give back what the last measurement held on the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _set_precision(way: str) -> None:
    torch.set_float32_matmul_precision("high" if way == "plain" else "highest")


def _autocast(way: str, device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16) if way != "plain" else contextlib.nullcontext()

"""Whole federated rounds: images per second against the plain loop, and what a round costs beyond its local steps."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsieve.bench.result import Result, synchronize
from fedsieve.config import Data, Experiment, parse_config
from fedsieve.data.store import ImageStore
from fedsieve.data.transforms import HALF, make_transform
from fedsieve.federation.executors import Cohort, Sequential, Trained
from fedsieve.federation.population import make_population
from fedsieve.federation.rounds import Federated
from fedsieve.federation.state import Context
from fedsieve.federation.store import ClientStore
from fedsieve.model.build import Classifier, build_classifier, trainable_names
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.runner.checkpoint import save_checkpoint
from fedsieve.runner.environment import make_autocast
from fedsieve.train.feed import Feed
from fedsieve.train.replay import Speed
from fedsieve.wire.ledger import Ledger

SMALL = "{patch_size: 4, embed_dim: 48, depth: 4, num_heads: 4}"


def make_experiment(backbone: str, options: str, pixels: int, clients: int, batch: int, local: str) -> Experiment:
    """A shared random mask at density 0.1 on the backbone, int8 up, fp16 down."""
    return parse_config(f"""
data: {{source: digits, size: {pixels}, transform: flip, normalize: half}}
model: {{backbone: {backbone}, weights: none, options: {options}}}
mask: {{rule: random, sparsity: 0.9}}
federation: {{clients: {clients}, cohort: {clients}, server: {{optimizer: momentum, lr: 0.3}}}}
message: {{up: int8, down: fp16}}
stages:
  - {{name: bench, train: backbone, sparse: true, rounds: 1000000, local: {local}, batch_size: {batch}, schedule: constant,
      optimizer: {{lr: 1.0e-3}}}}
""")


def make_feed(experiment: Experiment, images: int, device: torch.device) -> Feed:
    """Random small images with random labels."""
    rng = generator(0, "bench")
    pixels = torch.from_numpy(rng.integers(0, 256, (images, 3, 32, 32), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 100, images)).to(device)
    config: Data = experiment.data
    return Feed(ImageStore(pixels, device), make_transform(config, *HALF), np.arange(images), labels)


@contextlib.contextmanager
def federation(
    experiment: Experiment, model: Classifier, feed: Feed, executor: str, speed: Speed
) -> Iterator[Federated]:
    """A federated stage on `feed`, ledger and all, in a folder that vanishes."""
    settings, device = experiment.federation, feed.store.device
    assert settings is not None
    space = ParamSpace.of(model, trainable_names(model, "backbone"))
    nothing = Feed(feed.store, feed.transform, np.arange(0), feed.labels[:0])
    with tempfile.TemporaryDirectory() as folder:
        context = Context(
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
            store=ClientStore(Path(folder) / "clients"),
        )
        theta = space.bind(model)
        yield Federated(context, experiment.stages[0], space, model, theta, feed, dict)


def plain_round(
    experiment: Experiment, model: Classifier, feed: Feed, mask: dict[str, Tensor], autocast: Any
) -> Callable[[], None]:
    """The round a notebook has: clients one after another, eager, gradients times the mask, state dicts averaged.

    One local epoch: its rate is that of four, but for a little less averaging.
    """
    stage, settings = experiment.stages[0], experiment.federation
    assert settings is not None
    population = make_population(settings, feed.labels.cpu().numpy(), 0)
    draws = feed.draw(generator(0, "bench draws"))

    def run() -> None:
        weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for client in range(len(population)):
            with torch.no_grad():
                for name, tensor in model.named_parameters():
                    tensor.copy_(weights[name])
            optimizer = torch.optim.SGD(model.backbone.parameters(), lr=1e-3, momentum=0.9)
            mine = population.shards.client(client)
            for start in range(0, len(mine), stage.batch_size):
                inputs, labels = feed.batch(mine[start : start + stage.batch_size], draws)
                optimizer.zero_grad()
                with autocast():
                    loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                for name, tensor in model.backbone.named_parameters():
                    if tensor.grad is not None:
                        tensor.grad.mul_(mask[f"backbone.{name}"])
                optimizer.step()
            for name, tensor in model.named_parameters():
                total[name] += tensor.detach() * len(mine)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                tensor.copy_(total[name] / len(feed))

    return run


def rounds(device: torch.device, smoke: bool) -> Result:
    """10 clients of 500 images, 4 local epochs, batch 64: the plain loop against this library's executors, side by side."""
    large = device.type == "cuda" and not smoke
    result = Result(
        ("network", "how", "images/s", "seconds a round", "times the plain loop", "first round, s"),
        note="Whole rounds: batches, transforms, masks, int8 messages encoded, decoded and counted, mean, server step. The "
        "plain loop is eager PyTorch, one client after another, without messages; its faster precision is the reference.",
    )
    cases = [("vit_small_patch16_224", "{}", 64), ("vit_small_patch16_224", "{}", 224)]
    cases = cases if large else [("vit_tiny_patch16_224", SMALL, 16)]
    images, local, repeats = (5000, "{epochs: 4}", 3) if large else (60, "{epochs: 1}", 1)
    for backbone, options, pixels in cases:
        experiment = make_experiment(backbone, options, pixels, 10, 64, local)
        feed = make_feed(experiment, images, device)
        count = images * (experiment.stages[0].local.epochs or 1)

        def fresh(experiment: Experiment = experiment, pixels: int = pixels) -> Classifier:
            return build_classifier(experiment.model, 100, pixels, 0).to(device)

        plain: dict[str, float] = {}
        mask = {name: torch.rand(tensor.shape, device=device) < 0.1 for name, tensor in fresh().named_parameters()}
        kinds = ("tf32", "bf16") if device.type == "cuda" else ("fp32",)
        for kind in kinds:
            autocast = _precision(kind, device)
            call = plain_round(experiment, fresh(), feed, mask, autocast)
            call()
            plain[kind] = _seconds(call, device, 1) * count / images
            result.rows.append(
                (f"{backbone}, {pixels} px", f"plain loop, {kind}", *_numbers(count, plain[kind], plain[kind]), "-")
            )
        reference = min(plain.values())
        speeds: tuple[tuple[str, Speed], ...] = (("stacked", "graph"), ("stacked", "full"))
        for executor, speed in speeds if device.type == "cuda" else (("sequential", "eager"), ("stacked", "eager")):
            torch.set_float32_matmul_precision("highest")
            with federation(experiment, fresh(), feed, executor, speed) as stage:
                going = stage.rounds()
                began = time.perf_counter()
                next(going)
                synchronize(device)
                first = time.perf_counter() - began
                taken = _seconds(lambda going=going: next(going), device, repeats)  # type: ignore[misc]
            name = executor if speed == "eager" else f"{executor}, {speed}"
            result.rows.append((f"{backbone}, {pixels} px", name, *_numbers(count, taken, reference), f"{first:.1f}"))
    return result


def overhead(device: torch.device, smoke: bool) -> Result:
    """What a round costs beyond its local steps: one-step rounds on a GPU; on a CPU, rounds whose clients do nothing."""
    result = Result(
        ("network", "round, ms", "local steps, ms", "beyond them, ms", "checkpoint, ms"),
        note="Shared mask at density 0.1, 10 clients, one local step of 50 images each; messages int8 up, fp16 down, encoded, "
        "decoded and counted; no evaluation. On a CPU the local steps are left out, and clients send random updates.",
    )
    gpu, small = device.type == "cuda", ("a small ViT", "vit_tiny_patch16_224", SMALL, 16)
    tiny, large = (
        [(f"{name}, {pixels} px", network, "{}", pixels) for pixels in (64, 224)]
        for name, network in (("ViT-Ti/16", "vit_tiny_patch16_224"), ("ViT-S/16", "vit_small_patch16_224"))
    )
    repeats = 3 if smoke else 20
    for name, network, options, pixels in [small] if smoke else [*tiny, *large[:1]] if gpu else [tiny[0], large[0]]:
        experiment = make_experiment(network, options, pixels, 10, 50, "{steps: 1}")
        feed = make_feed(experiment, 200 if smoke else 5000, device)
        model = build_classifier(experiment.model, 100, pixels, 0).to(device)
        with federation(
            experiment, model, feed, "stacked" if gpu else "sequential", "graph" if gpu else "eager"
        ) as stage:
            if not gpu:
                _leave_out_training(stage)
            going = stage.rounds()
            next(going)
            whole = [_seconds(lambda going=going: next(going), device, 1) for _ in range(repeats)]  # type: ignore[misc]
            inside = [0.0]
            if gpu:
                inside = _time_training(stage, device)  # apart, since waiting for it would slow the round down
                for _ in range(repeats):
                    next(going)
            save = _seconds(lambda stage=stage: _save(stage), device, min(repeats, 5))  # type: ignore[misc]
        took, local = statistics.median(whole), statistics.median(inside)
        result.rows.append((name, *(f"{1e3 * seconds:.1f}" for seconds in (took, local, took - local, save))))
    return result


def _leave_out_training(stage: Federated) -> None:
    """Let clients send random updates instead of training."""

    def idle(cohort: Cohort, lr: float) -> Iterator[Trained]:
        count, k = len(cohort.works), stage._k
        if not updates:
            updates.append(1e-3 * torch.randn(count, k, generator=torch.Generator().manual_seed(0)))
        yield Trained(range(count), updates[0], torch.ones(count, 3, dtype=torch.float64))

    updates: list[Tensor] = []
    executor = Sequential(stage.task, None)
    executor.train = idle  # type: ignore[method-assign]
    stage._running_executor = lambda: executor  # type: ignore[method-assign]


def _save(stage: Federated) -> None:
    """A checkpoint, as a run writes it."""
    folder = stage.context.ledger.path.parent / "checkpoints"
    save_checkpoint(folder, stage.state.round, stage.state.numbers(), stage.state.tensors(), keep=2)


def _time_training(stage: Federated, device: torch.device) -> list[float]:
    """A list that grows by the seconds of every cohort's local training from here on."""
    executor, times = stage._running_executor(), list[float]()
    train = executor.train

    def timed(*arguments: Any) -> Iterator[Any]:
        synchronize(device)
        began = time.perf_counter()
        results = list(train(*arguments))
        synchronize(device)
        times.append(time.perf_counter() - began)
        return iter(results)

    executor.train = timed  # type: ignore[method-assign, assignment]
    return times


def _precision(kind: str, device: torch.device) -> Any:
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")

    def autocast() -> Any:
        return torch.autocast(device.type, torch.bfloat16) if kind == "bf16" else contextlib.nullcontext()

    return autocast


def _seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _numbers(count: int, seconds: float, reference: float) -> tuple[str, str, str]:
    return f"{count / seconds:,.0f}", f"{seconds:.3f}", f"{reference / seconds:.2f}"

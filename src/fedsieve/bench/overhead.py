"""What a round costs beyond its local steps: against other frameworks where clients do nothing, and inside real rounds."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.bench.peers import Arrays, flower_rounds, missing, pfl_rounds
from fedsieve.bench.result import Cell, Result, alternate, timed
from fedsieve.bench.rounds import NETWORKS, SMALL, federation, make_experiment, make_feed
from fedsieve.config import Experiment
from fedsieve.federation.executors import Cohort, Sequential, Trained
from fedsieve.federation.rounds import Federated
from fedsieve.model.build import build_classifier
from fedsieve.runner.checkpoint import save_checkpoint

CLIENTS = 10
PEERS = {"pfl": "pfl, in memory", "flower": "Flower's simulation"}


def overhead(device: torch.device, smoke: bool, peers: Sequence[str] = tuple(PEERS), repeats: int = 5) -> Result:
    """On a CPU, rounds in which clients train nothing; on a GPU, what one-step rounds take beyond their steps."""
    result = Result(
        ("how", "network", "round, ms", "beyond local steps, ms", "times fedsieve dense", "checkpoint, ms", "MB up"),
    )
    if device.type == "cuda" and not smoke:
        result.note = (
            f"{CLIENTS} clients, one local step of 50 images each, shared mask at density 0.1, messages int8 up and fp16 down, "
            "encoded, decoded and counted; no evaluation. Peers are measured on a CPU: --device cpu."
        )
        for pixels in (64, 224):
            result.rows += [_one_step(network, pixels, device, 4 * repeats) for network in ("tiny", "small")]
        return result
    result.note = (
        f"No-op rounds: {CLIENTS} clients receive the weights and send an update of them, nobody trains, all in turns. fedsieve "
        "encodes, decodes, checks and counts every message both ways and measures drift; pfl hands tensors over in memory; Flower "
        "serialises arrays to and from Ray's processes. The bare mean only adds up the clients' vectors."
    )
    _no_op(result, device, smoke, peers, 1 if smoke else repeats)
    return result


# --- nothing but the round ------------------------------------------------------------------------------------------


def _no_op(result: Result, device: torch.device, smoke: bool, peers: Sequence[str], repeats: int) -> None:
    backbone, options, pixels = ("vit_tiny_patch16_224", SMALL, 16) if smoke else ("vit_small_patch16_224", "{}", 64)
    result.skipped = [why for peer in peers if (why := missing(peer))]
    with contextlib.ExitStack() as stack:
        calls: dict[str, Callable[[], object]] = {}
        stages: dict[str, Federated] = {}
        for name, dense in (("fedsieve, dense, fp32", True), ("fedsieve, a tenth, int8", False)):
            experiment = make_experiment(backbone, options, pixels, CLIENTS, 50, "{steps: 1}", dense=dense)
            stages[name] = stack.enter_context(_idle(experiment, pixels, device))
            going = stages[name].rounds()
            calls[name] = partial(next, going)
        weights = [np.zeros(shape, np.float32) for shape in next(iter(stages.values())).space.shapes]
        size = sum(array.size for array in weights)
        if "pfl" in peers and not missing("pfl"):
            calls[PEERS["pfl"]] = _pfl(weights)
        if "flower" in peers and not missing("flower"):
            calls[PEERS["flower"]] = stack.enter_context(flower_rounds(_unchanged, weights, CLIENTS))
        calls["a bare mean"] = partial(_mean, torch.ones(size), torch.empty(size))
        taken = alternate(calls, device, repeats)
        reference = taken["fedsieve, dense, fp32"]
        for name, seconds in taken.items():
            stage = stages.get(name)
            up = stage.context.ledger.total["up"] / stage.state.round / 1e6 if stage else None
            save = 1e3 * statistics.median(timed(partial(_save, stage), device) for _ in range(3)) if stage else None
            ms = 1e3 * seconds
            result.rows.append((name, f"{size:,} weights", ms, ms, seconds / reference, save, up))


@contextlib.contextmanager
def _idle(experiment: Experiment, pixels: int, device: torch.device) -> Iterator[Federated]:
    """A federation whose clients send a random update instead of training."""
    feed = make_feed(experiment, 10 * CLIENTS, device)
    model = build_classifier(experiment.model, 100, pixels, 0).to(device)
    with federation(experiment, model, feed, "sequential", "eager") as stage:
        updates: list[Tensor] = []

        def idle(cohort: Cohort, lr: float) -> Iterator[Trained]:
            if not updates:
                updates.append(1e-3 * torch.randn(1, stage._k, generator=torch.Generator().manual_seed(0)))
            for number in range(len(cohort.works)):  # one after another, as a CPU trains them
                yield Trained(range(number, number + 1), updates[0], torch.ones(1, 3, dtype=torch.float64))

        executor = Sequential(stage.task, None)
        executor.train = idle  # type: ignore[method-assign]
        stage._running_executor = lambda: executor  # type: ignore[method-assign]
        yield stage


class _Weights(nn.Module):
    """Parameters of given shapes, and nothing to compute."""

    def __init__(self, arrays: Arrays) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.from_numpy(array.copy())) for array in arrays])


def _pfl(weights: Arrays) -> Callable[[], None]:
    users = [[np.zeros((1, 1), np.float32)] for _ in range(CLIENTS)]
    return pfl_rounds(_Weights(weights), lambda _: torch.zeros(()), users, lr=0.1, batch=1, epochs=0, bf16=False)


def _unchanged(weights: Arrays, number: int) -> tuple[Arrays, int]:
    return weights, 1


def _mean(update: Tensor, total: Tensor) -> None:
    total.zero_()
    for _ in range(CLIENTS):
        total.add_(update, alpha=1 / CLIENTS)


# --- real rounds ----------------------------------------------------------------------------------------------------


def _one_step(network: str, pixels: int, device: torch.device, repeats: int) -> tuple[Cell, ...]:
    """One-step rounds on a GPU, with and without the local steps."""
    name, backbone = NETWORKS[network]
    experiment = make_experiment(backbone, "{}", pixels, CLIENTS, 50, "{steps: 1}")
    model = build_classifier(experiment.model, 100, pixels, 0).to(device)
    with federation(experiment, model, make_feed(experiment, 5000, device), "stacked", "graph") as stage:
        going = stage.rounds()
        next(going)
        whole = statistics.median(timed(lambda: next(going), device) for _ in range(repeats))
        inside = _time_training(stage, device)  # apart, since waiting for it would slow the round down
        for _ in range(repeats):
            next(going)
        save = statistics.median(timed(lambda: _save(stage), device) for _ in range(5))
        up = stage.context.ledger.total["up"] / stage.state.round / 1e6
    local = statistics.median(inside)
    times = 1e3 * whole, 1e3 * (whole - local)
    return (f"fedsieve, a tenth, int8, {pixels} px", name, *times, None, 1e3 * save, up)


def _save(stage: Federated) -> None:
    """A checkpoint, as a run writes it."""
    folder = stage.context.ledger.path.parent / "checkpoints"
    save_checkpoint(folder, stage.state.round, stage.state.numbers(), stage.state.tensors(), keep=2)


def _time_training(stage: Federated, device: torch.device) -> list[float]:
    """A list that grows by the seconds of every cohort's local training from here on."""
    executor, times = stage._running_executor(), list[float]()
    train = executor.train

    def measured(*arguments: Any) -> Iterator[Any]:
        results: list[Any] = []
        times.append(timed(lambda: results.extend(train(*arguments)), device))
        return iter(results)

    executor.train = measured  # type: ignore[method-assign, assignment]
    return times

"""What a round costs beyond its local steps: against other frameworks where clients do nothing, and inside real rounds."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.options import REPEATS, option, read_words
from benchmarks.peers import Arrays, flower_rounds, missing, pfl_rounds
from benchmarks.result import Cell, Result, alternate, timed
from benchmarks.rounds import DENSE, NETWORKS, SMALL, federation, make_experiment, make_feed, training_of
from fedsieve.config import Experiment
from fedsieve.errors import FedsieveError
from fedsieve.federation.executors import Cohort, Sequential, Trained
from fedsieve.federation.local import LocalClients, Training, local_channel
from fedsieve.federation.server import Rounds
from fedsieve.federation.work import Draws, local_work
from fedsieve.runner.checkpoint import save_checkpoint

CLIENTS = 10
PEERS = {"pfl": "pfl, in memory", "flower": "Flower's simulation"}


def _peers(flag: str, text: str) -> tuple[str, ...]:
    if text.strip() == "none":
        return ()
    found = read_words(flag, text, (*PEERS, "none"))
    if "none" in found:
        raise FedsieveError(f"{flag}: {text} is not allowed: none stands alone")
    return found


def overhead(
    device: torch.device,
    smoke: bool,
    peers: Annotated[Sequence[str], option(str, "`pfl`, `flower`, `none`.", metavar="A,B,...", read=_peers)] = tuple(
        PEERS
    ),
    repeats: Annotated[int, REPEATS] = 5,
) -> Result:
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
        stages: dict[str, Rounds] = {}
        for name, overrides in (("fedsieve, dense, fp32", DENSE), ("fedsieve, a tenth, int8", ())):
            experiment = make_experiment(backbone, options, pixels, CLIENTS, 50, *overrides)
            stages[name] = stack.enter_context(_idle(experiment, device))
            going = stages[name].rounds()
            calls[name] = partial(next, going)
        weights = [np.zeros(shape, np.float32) for shape in next(iter(stages.values())).book.space.shapes]
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


class Idle(Sequential):
    """Sends the same random update for every client, and trains nothing."""

    @cached_property
    def update(self) -> Tensor:
        count = self.task.space.size if self.support is None else len(self.support)
        return 1e-3 * torch.randn(1, count, generator=torch.Generator().manual_seed(0))

    def train(self, cohort: Cohort, lr: float) -> Iterator[Trained]:
        """One client after another, as a CPU trains them."""
        for number in range(len(cohort.works)):
            yield Trained(range(number, number + 1), self.update, torch.ones(1, 3, dtype=torch.float64))


class IdleTraining(Training):
    """Local training by an idle executor."""

    @cached_property
    def idle(self) -> Idle:
        return Idle(self.task, self.book.support)

    def executor(self) -> Idle:
        """The same in every round."""
        return self.idle


@contextlib.contextmanager
def _idle(experiment: Experiment, device: torch.device) -> Iterator[Rounds]:
    """A federation whose clients send a random update instead of training."""
    feed = make_feed(experiment, 10 * CLIENTS, device)
    with federation(experiment, feed, "sequential", "eager") as made:
        context, stage, book, real = made.context, made.stage, made.book, training_of(made)
        training = IdleTraining(context, stage, real.task, book, real.parts, None)
        clients = LocalClients(context, stage.name, feed, local_channel(context, stage.name), training)
        yield Rounds(context, stage, book, clients, made.state)


class _Weights(nn.Module):
    """Parameters of given shapes, and nothing to compute."""

    def __init__(self, arrays: Arrays) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.from_numpy(array.copy())) for array in arrays])


def _pfl(weights: Arrays) -> Callable[[], None]:
    users = [[np.zeros((1, 1), np.float32)] for _ in range(CLIENTS)]
    return pfl_rounds(_Weights(weights), lambda _: torch.zeros(()), users, lr=0.1, batch=1, epochs=0)


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
    experiment = make_experiment(backbone, "{}", pixels, CLIENTS, 50)
    with federation(experiment, make_feed(experiment, 5000, device), "stacked", "graph") as stage:
        going = stage.rounds()
        next(going)
        whole = statistics.median(timed(lambda: next(going), device) for _ in range(repeats))
        inside = []
        for _ in range(repeats):
            inside.append(_train(stage, device))
            next(going)
        save = statistics.median(timed(lambda: _save(stage), device) for _ in range(5))
        up = stage.context.ledger.total["up"] / stage.state.round / 1e6
    local = statistics.median(inside)
    times = 1e3 * whole, 1e3 * (whole - local)
    return (f"fedsieve, a tenth, int8, {pixels} px", name, *times, None, 1e3 * save, up)


def _save(stage: Rounds) -> None:
    """A checkpoint, as a run writes it."""
    folder = stage.context.ledger.path.parent / "checkpoints"
    save_checkpoint(folder, stage.state.round, stage.state.numbers(), stage.state.tensors(), keep=2)


def _train(stage: Rounds, device: torch.device) -> float:
    """Seconds of the local training of the coming round's cohort, apart from the round, which waiting for it would slow down."""
    training, people, number = training_of(stage), stage.population, stage.state.round
    local, draws = stage.stage, Draws(training.task.feed, stage.seed, (stage.stage.name, number))
    works = [
        local_work(client, people.examples(client), local.local, local.batch_size, draws)
        for client in people.cohort(local.name, number).tolist()
    ]
    cohort = Cohort(works, stage.book.taken(stage.theta.detach()).clone())
    return timed(lambda: list(training.executor().train(cohort, local.optimizer.lr)), device)

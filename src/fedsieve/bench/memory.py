"""Peak device memory of a round against the number of clients at once and against sparsity, and how many fit."""

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from fedsieve.bench.result import Cell, Result
from fedsieve.bench.rounds import BATCH, NETWORKS, SMALL, federation, make_experiment, make_feed, release
from fedsieve.data.store import free_memory
from fedsieve.federation.executors import Stacked
from fedsieve.federation.rounds import Federated
from fedsieve.model.build import build_classifier
from fedsieve.train.replay import Speed


def memory(
    device: torch.device,
    smoke: bool,
    network: str = "small",
    pixels: int = 224,
    cohorts: Sequence[int] = (1, 2, 5, 10, 20),
    sparsities: Sequence[float] = (0.0, 0.5, 0.9, 0.99),
    at_most: int | None = None,
) -> Result:
    """One local step of 64 images a client, all clients at once."""
    gpu = device.type == "cuda"
    options, batch = "{}", BATCH
    if smoke:
        network, pixels, cohorts, sparsities, options, batch = "tiny", 16, (1, 2), (0.0, 0.9), SMALL, 4
    most = at_most or (1024 if gpu and not smoke else 2 if smoke else max(cohorts))
    name, backbone = ("a small ViT", "vit_tiny_patch16_224") if smoke else NETWORKS[network]
    total = torch.cuda.get_device_properties(device).total_memory if gpu else free_memory(device)
    result = Result(
        ("what", "sparsity", "clients at once", "peak, MB", "a client more, MB", "against dense", "of the memory, %"),
        note=f"{name} at {pixels} px, {batch} images a client and step, one round, stacked"
        + (
            ", steps as CUDA graphs: the peak of torch's allocator beyond network and images. "
            if gpu
            else ", eager: growth of the process's peak. "
        )
        + "A larger cohort trains in groups of as many clients as fit: its updates, k values a client and group, are all that it adds.",
        limit=f"the {'device' if gpu else 'machine'} has {total / 1e9:,.1f} GB",
    )

    def peak(clients: int, sparsity: float) -> float | None:
        with _stage(backbone, options, pixels, clients, batch, sparsity, device) as stage:
            return peak_bytes(lambda: next(stage.rounds()), device)

    def add(
        what: str, sparsity: float, clients: int, found: float | None, more: float | None, dense: float | None
    ) -> None:
        ratio = found / dense if found and dense else None
        share = 100 * found / total if found is not None else None
        megabytes: list[Cell] = [None if value is None else value / 1e6 for value in (found, more)]
        result.rows.append((what, sparsity, clients, *megabytes, ratio, share))

    before: tuple[int, float] | None = None
    for clients in cohorts:
        found = peak(clients, 0.9)
        more = (found - before[1]) / (clients - before[0]) if found is not None and before else None
        add("cohort", 0.9, clients, found, more, None)
        before = None if found is None else (clients, found)
    middle = cohorts[len(cohorts) // 2]
    dense = None
    for sparsity in sparsities:
        found = peak(middle, sparsity)
        dense = dense or (found if sparsity == 0 else None)
        add("sparsity", sparsity, middle, found, None, dense)
    largest = search(lambda clients: _fits(backbone, options, pixels, clients, batch, device), most)
    stopped = ", as far as was tried" if largest == most else ""
    result.rows.append((f"largest cohort at once{stopped}", 0.9, largest, None, None, None, None))
    return result


@contextlib.contextmanager
def _stage(
    backbone: str, options: str, pixels: int, clients: int, batch: int, sparsity: float, device: torch.device
) -> Iterator[Federated]:
    """A cohort that trains one step at once."""
    local = "{steps: 1}"
    experiment = make_experiment(
        backbone, options, pixels, clients, batch, local, sparsity=sparsity or 0.5, dense=sparsity == 0
    )
    model = build_classifier(experiment.model, 100, pixels, 0).to(device)
    speed: Speed = "graph" if device.type == "cuda" else "eager"
    with federation(experiment, model, make_feed(experiment, batch * clients, device), "stacked", speed) as stage:
        yield stage
    del stage, model
    release(device)


def _fits(backbone: str, options: str, pixels: int, clients: int, batch: int, device: torch.device) -> bool:
    """Whether so many clients train at once: the executor itself goes on with half where they do not."""
    with warnings.catch_warnings(), _stage(backbone, options, pixels, clients, batch, 0.9, device) as stage:
        warnings.simplefilter("ignore")
        try:
            next(stage.rounds())
        except torch.cuda.OutOfMemoryError:
            return False
        executor = stage.executor
        if not isinstance(executor, Stacked) or executor.clients != clients:
            return False
        return device.type != "cuda" or executor.gradient.graph is not None


def search(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where whatever is smaller than one that fits does too; 0 if none."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def peak_bytes(call: Callable[[], object], device: torch.device) -> float | None:
    """Bytes by which a call's peak exceeds what was there before; None where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    found = host_bytes(call)
    return None if found is None else found[0]


def host_bytes(call: Callable[[], object]) -> tuple[int, int] | None:
    """By how much the process grew in a call, at its peak and in the end; None where the system does not tell."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is given back, so that it counts when it is taken again
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts over
        before = _status("VmRSS")
    except (OSError, KeyError, AttributeError):
        call()
        return None
    call()
    ctypes.CDLL(None).malloc_trim(0)
    return max(0, _status("VmHWM") - before), max(0, _status("VmRSS") - before)


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[key].split()[0]) * 1024

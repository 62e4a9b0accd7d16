"""Peak device memory of a round against the number of clients at once and against sparsity, and how many fit."""

import ctypes
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated

import torch

from benchmarks.options import fills, numbers, option, read_numbers, read_word
from benchmarks.result import Cell, Result, keeping, say
from benchmarks.rounds import (
    BATCH,
    DENSE,
    NETWORKS,
    SMALL,
    federation,
    make_experiment,
    make_feed,
    release,
    training_of,
)
from fedsieve.data.store import free_memory
from fedsieve.errors import FedsieveError
from fedsieve.federation.executors import Stacked
from fedsieve.train.replay import Speed


def _network(flag: str, word: str) -> str:
    return read_word(flag, word, tuple(NETWORKS))


def _pixels(flag: str, value: int) -> int:
    return read_numbers(flag, str(value), "multiples of 16", fills)[0]


def memory(
    device: torch.device,
    smoke: bool,
    network: Annotated[str | None, option(str, "`small` (ViT-S/16) or `tiny` (ViT-Ti/16).", read=_network)] = None,
    pixels: Annotated[int | None, option(int, "Size of the images.", read=_pixels)] = None,
    cohorts: Annotated[Sequence[int] | None, numbers("Clients at once, such as 1,10,20.")] = None,
    sparsities: Annotated[
        Sequence[float],
        numbers("Such as 0,0.5,0.9.", "numbers from 0 to below 1, as in 0,0.9", lambda share: 0 <= share < 1, float),
    ] = (0.0, 0.5, 0.9, 0.99),
    at_most: Annotated[int | None, option(int, "Where the search for the largest cohort stops.", min=1)] = None,
) -> Result:
    """One local step, all clients at once: ViT-S/16 at 224 px on a GPU, ViT-Ti/16 at 64 px on a CPU, if not said otherwise."""
    gpu = device.type == "cuda"
    options, batch = "{}", BATCH if gpu else 16
    network, pixels = network or ("small" if gpu else "tiny"), pixels or (224 if gpu else 64)
    cohorts = cohorts or ((1, 2, 5, 10, 20) if gpu else (1, 2, 4, 8))
    most = at_most or (1024 if gpu else max(cohorts))  # a machine whose memory is used up kills, and does not say no
    if smoke:
        network, pixels, cohorts, sparsities, options, batch, most = "tiny", 16, (1, 2), (0.0, 0.9), SMALL, 4, 2
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
        limit=f"{total / 1e9:,.1f} GB, {'what the device has' if gpu else 'what the machine has free'}",
    )

    def tried(clients: int, sparsity: float = 0.9) -> tuple[bool, float | None]:
        fits, found = _try(backbone, options, pixels, clients, batch, sparsity, device)
        peak = "" if found is None else f", peak {found / 1e6:,.0f} MB"
        say(f"{clients} clients, sparsity {sparsity:g}: {'fits' if fits else 'does not fit'}{peak}")
        return fits, found

    def add(
        what: str, sparsity: float, clients: int, found: float | None, more: float | None, dense: float | None
    ) -> None:
        ratio = found / dense if found and dense else None
        share = 100 * found / total if found is not None else None
        megabytes: list[Cell] = [None if value is None else value / 1e6 for value in (found, more)]
        result.rows.append((what, sparsity, clients, *megabytes, ratio, share))

    with keeping(result):
        before: tuple[int, float] | None = None
        guess = 1
        tried(1)  # the first also takes what libraries hold from then on
        for clients in cohorts:
            found = tried(clients)[1]
            more = (found - before[1]) / (clients - before[0]) if found is not None and before else None
            add("cohort", 0.9, clients, found, more, None)
            guess = int(total / more) if more else guess
            before = None if found is None else (clients, found)
        middle = cohorts[len(cohorts) // 2]
        dense = None
        for sparsity in sparsities:
            found = tried(middle, sparsity)[1]
            dense = dense or (found if sparsity == 0 else None)
            add("sparsity", sparsity, middle, found, None, dense)
        largest = search(lambda clients: tried(clients)[0], most, guess)
        stopped = ", as far as was tried" if largest == most else ""
        result.rows.append((f"largest cohort at once{stopped}", 0.9, largest, None, None, None, None))
    return result


def _try(
    backbone: str, options: str, pixels: int, clients: int, batch: int, sparsity: float, device: torch.device
) -> tuple[bool, float | None]:
    """Whether so many clients train a step at once, and the peak of their round in bytes, where the system tells it."""
    release(device)  # what an earlier trial held
    overrides = [f"mask.sparsity={sparsity}"] if sparsity else DENSE
    experiment = make_experiment(backbone, options, pixels, clients, batch, *overrides)
    speed: Speed = "graph" if device.type == "cuda" else "eager"
    feed = make_feed(experiment, batch * clients, device)
    with warnings.catch_warnings(record=True) as told, federation(experiment, feed, "stacked", speed) as stage:
        warnings.simplefilter("always")  # where memory runs out, the executor says so and goes on with half
        try:
            found = peak_bytes(lambda: next(stage.rounds()), device)
        except torch.cuda.OutOfMemoryError:
            return False, None
        executor, why = training_of(stage).executor(), " ".join(str(warning.message) for warning in told)
        if not isinstance(executor, Stacked) and "out of memory" not in why:
            raise FedsieveError(f"bench memory: {backbone} at {pixels} px: {why}")
        fits = isinstance(executor, Stacked) and executor.clients == clients
        if isinstance(executor, Stacked) and device.type == "cuda":
            fits = fits and executor.gradient.graph is not None
        return fits, found if fits else None


def search(fits: Callable[[int], bool], most: int, guess: int = 1) -> int:
    """The largest number up to `most` that fits, where whatever is smaller than one that fits does too; 0 if none.

    It is looked for from `guess` on, in growing steps.
    """
    low, high = 0, most + 1
    at, step = min(max(guess, 1), most), max(guess // 16, 1)
    while low < at < high:
        if fits(at):
            low, at = at, at + step
        else:
            high, at = at, at - step
        step *= 2
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

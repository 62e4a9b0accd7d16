"""What a round costs, and how much memory it takes, as the number of clients grows and the cohort stays."""

import contextlib
import statistics
from collections.abc import Callable, Sequence
from typing import Annotated

import torch

from benchmarks.memory import host_bytes
from benchmarks.options import REPEATS, numbers
from benchmarks.result import Cell, Result, alternate, columns, timed
from benchmarks.rounds import SMALL, federation, make_experiment, make_feed, make_model
from fedsieve.federation.server import Rounds
from fedsieve.train.loop import Tick

PIXELS = 16
IMAGES = 2  # of each client
DISTINCT = 1000  # images that are really there, so that only clients and examples grow


def scale(
    device: torch.device,
    smoke: bool,
    clients: Annotated[Sequence[int], numbers("How many clients there are, such as 100,1000000.")] = (
        100,
        1_000,
        10_000,
        100_000,
        1_000_000,
    ),
    cohorts: Annotated[Sequence[int], numbers("How many take part in a round.")] = (1, 10, 100),
    repeats: Annotated[int, REPEATS] = 15,
) -> Result:
    """Rounds of one local step of a small network, all in turns: more and more clients, then larger and larger cohorts."""
    if smoke:
        clients, cohorts, repeats = (100, 1_000), (1, 2), 1
    result = Result(
        columns(
            "clients | cohort | dealing, s | peak while dealing, MB | kept, MB | round, ms | beyond local steps, "
            "ms | times the first"
        ),
        note=f"Simulated data, {IMAGES} examples a client, iid; a small ViT, one local step of a client's images, shared mask, int8 up, "
        "fp16 down. `dealing` is all that comes before the first round but the network; memory is the process's, grown by it. "
        "Rounds took turns. The upper rows have one cohort and should be flat, the lower ones one number of clients and should "
        "follow the cohort.",
    )
    middle = len(clients) // 2
    cases = [(number, cohorts[len(cohorts) // 2]) for number in clients]
    cases += [(clients[middle], cohort) for cohort in cohorts]
    with contextlib.ExitStack() as stack:
        calls: dict[str, Callable[[], object]] = {}
        told: list[list[Tick]] = []
        rows: list[tuple[Cell, ...]] = []
        for place, (number, cohort) in enumerate(cases):
            stage, *costs = _deal(stack, number, cohort, device)
            rows.append((number, cohort, *costs))
            calls[str(place)], ticks = _stepper(stage)
            told.append(ticks)
        taken = alternate(calls, device, repeats)
    for place, (row, ticks) in enumerate(zip(rows, told, strict=True)):
        seconds = taken[str(place)]
        records = [tick.record for tick in ticks[1:] if tick.record]
        local = statistics.median(IMAGES * cases[place][1] / record["images_per_second"] for record in records)
        first = taken[str(0 if place < len(clients) else len(clients))]
        result.rows.append((*row, 1e3 * seconds, 1e3 * (seconds - local), seconds / first))
    return result


def _deal(
    stack: contextlib.ExitStack, clients: int, cohort: int, device: torch.device
) -> tuple[Rounds, float, float | None, float | None]:
    """A federation, the seconds it took to make, and the megabytes: at the peak, and kept."""
    overrides = f"federation.cohort={cohort}"
    experiment = make_experiment("vit_tiny_patch16_224", SMALL, PIXELS, clients, IMAGES, overrides)
    model = make_model(experiment, device)
    gpu = device.type == "cuda"
    stages, seconds = list[Rounds](), list[float]()

    def deal() -> None:
        feed = make_feed(experiment, clients * IMAGES, device, DISTINCT)
        way = federation(experiment, feed, *(("stacked", "graph") if gpu else ("sequential", "eager")), model)
        stages.append(stack.enter_context(way))

    found = host_bytes(lambda: seconds.append(timed(deal, device)))
    peak, kept = (None, None) if found is None else (found[0] / 1e6, found[1] / 1e6)
    return stages[0], seconds[0], peak, kept


def _stepper(stage: Rounds) -> tuple[Callable[[], object], list[Tick]]:
    """A function that does a round, and the list of what it told."""
    going, ticks = stage.rounds(), list[Tick]()
    return lambda: ticks.append(next(going)), ticks

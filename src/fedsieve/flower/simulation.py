"""Flower's simulation: the server and all sites of an experiment on one machine, sites in Ray's processes."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from fedsieve.config import Experiment
from fedsieve.errors import FedsieveError
from fedsieve.flower import DEADLINE
from fedsieve.flower.app import serve
from fedsieve.flower.grid import GridTransport, from_record, to_record
from fedsieve.runner.hosting import Host, answer
from fedsieve.runner.meeting import check_remote
from fedsieve.runner.preflight import preflight
from fedsieve.runner.progress import Display

WAIT = 30.0  # seconds for all sites to be there; what is refused here will not come back with other files


def simulate(
    experiment: Experiment,
    folder: Path,
    console: Console,
    data: Path | None = None,
    processes: int | None = None,
    deadline: float = DEADLINE,
) -> dict[str, Any]:
    """Run an experiment into a folder, or continue what is there, on Flower's simulation engine; gives the summary.

    Sites keep their files in the run folder; `processes` of them work at a time. `data` holds a folder of images for each site,
    where sites have images of their own.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # a GPU stays visible to processes that reserve none
    from flwr.simulation import run_simulation

    check_remote(experiment)
    preflight(experiment)
    assert experiment.federation is not None
    count = experiment.federation.clients
    if count is None:  # of a natural partition, only the data say
        raise FedsieveError(
            "federation.partition: Flower's simulation must know the number of sites, which natural does not say"
        )
    sources = _folders(experiment, data, count)
    found: dict[str, Any] = {}
    display = Display(console)
    server, home, stopped = ServerApp(), folder.absolute() / "sites", threading.Event()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        transport = GridTransport(grid, WAIT, deadline, display.say, stopped)
        found.update(serve(experiment, folder, display, transport))

    site = ClientApp()

    @site.query()
    def ask(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        host = Host(client, home / str(client), data=sources[client])
        return Message(to_record(answer(from_record(message.content), host)), reply_to=message)

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    backend: dict[str, dict[str, Any]] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": processes or os.cpu_count() or 1, "log_to_driver": False, "logging_level": "ERROR"},
    }
    try:
        with _gentle_stop(stopped):
            run_simulation(server, site, num_supernodes=count, backend_config=backend)
    except (KeyboardInterrupt, FedsieveError) as error:
        if isinstance(error, FedsieveError) and not stopped.is_set():
            raise
        raise FedsieveError(f"stopped. `fedsieve flower {folder}` goes on", 130) from None
    except RuntimeError as error:
        raise FedsieveError(f"Flower's simulation failed: {_first_cause(error)}", 1) from error
    finally:
        stopped.set()  # the server has a thread of its own, which would wait for its sites
    return found


@contextmanager
def _gentle_stop(stopped: threading.Event) -> Iterator[None]:
    """Ctrl-C ends the server, and with it the engine; one that was ended first could wait for its own processes for ever."""

    def stop(*_: object) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    here = threading.current_thread() is threading.main_thread()
    ours = here and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _first_cause(error: BaseException) -> BaseException:
    return _first_cause(error.__cause__) if error.__cause__ else error


def _folders(experiment: Experiment, data: Path | None, count: int) -> list[str | None]:
    """Where each site's own images are."""
    if not experiment.own_images:
        if data is not None:
            raise FedsieveError("--data is for sites with images of their own: federation.partition={kind: sites}")
        return [None] * count
    if data is None or not data.is_dir():
        lacking = "" if data is None else f"{data} is no folder: "
        raise FedsieveError(f"--data: {lacking}name one that holds a folder of images for each site")
    folders = sorted(str(path.absolute()) for path in data.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(folders) != count:
        raise FedsieveError(f"--data: {data} holds {len(folders)} folders, and federation.clients is {count}")
    return list(folders)

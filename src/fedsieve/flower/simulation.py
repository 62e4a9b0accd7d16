"""Flower's simulation: the server and all sites of an experiment on one machine, sites in Ray's processes."""

import logging
import os
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from fedsieve.config import Experiment
from fedsieve.errors import FedsieveError
from fedsieve.flower.app import client_app, serve
from fedsieve.runner.remote import check_remote
from fedsieve.runner.setup import preflight
from fedsieve.runner.site import Place, answer


def simulate(experiment: Experiment, folder: Path, console: Console, sites: int, processes: int) -> dict[str, Any]:
    """Run an experiment into a folder, or continue what is there, on Flower's simulation engine; gives the summary.

    Sites keep their files in the run folder; `processes` of them work at a time.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from flwr.simulation import run_simulation

    check_remote(experiment)
    preflight(experiment)
    found: dict[str, Any] = {}
    server, home = ServerApp(), folder.absolute() / "sites"

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        found.update(serve(grid, experiment, folder, 60.0, console))

    def answer_here(envelope: bytes, message: Message, context: Context) -> bytes:
        client = int(context.node_config["partition-id"])
        return answer(envelope, Place(client, home / str(client)))

    logging.getLogger("flwr").setLevel(logging.ERROR)
    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": processes, "log_to_driver": False},
    }
    try:
        run_simulation(server, client_app(answer_here), num_supernodes=sites, backend_config=resources)
    except FedsieveError:
        raise
    except RuntimeError as error:
        raise FedsieveError(f"Flower's simulation ended: {error.__cause__ or error}", 1) from None
    return found

"""The ServerApp and the ClientApp that a bundle names. Flower's simulation has a ClientApp of its own."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsieve.errors import FedsieveError
from fedsieve.flower import DEADLINE, WAIT
from fedsieve.flower.grid import GridTransport

# Imported where it is used: the app is loaded by processes that do not need torch.
if TYPE_CHECKING:
    from fedsieve.config import Experiment
    from fedsieve.runner.progress import Display


def serve(experiment: "Experiment", folder: Path, display: "Display", transport: GridTransport) -> dict[str, Any]:
    """Run the experiment of a ServerApp into a folder, or continue what is there."""
    from fedsieve.runner.model_files import read_experiment
    from fedsieve.runner.prepare import config_digest
    from fedsieve.runner.run import resume, run

    if not (folder / "config.yaml").exists():
        return run(experiment, folder, display, transport=transport)
    if config_digest(read_experiment(folder)) != config_digest(experiment):
        raise FedsieveError(f"{folder} holds a run of another experiment: name another folder with out")
    return resume(folder, display, transport=transport)


server = ServerApp()


@server.main()
def _main(grid: Grid, context: Context) -> None:
    from rich.console import Console

    from fedsieve.config import parse_config
    from fedsieve.runner.progress import Display

    given = context.run_config
    experiment = parse_config(str(given.get("experiment", "")), where="the app's experiment")
    folder = Path(str(given.get("out") or experiment.name)).expanduser().absolute()
    console = Console(soft_wrap=True)
    display = Display(console)
    try:
        wait, deadline = float(given.get("wait", WAIT)), float(given.get("deadline", DEADLINE))
        serve(experiment, folder, display, GridTransport(grid, wait, deadline, display.say, threading.Event()))
    except FedsieveError as error:
        console.print(f"error: {error}", highlight=False, markup=False)
        raise


client = ClientApp()


@client.query()
def _refuse(message: Message, context: Context) -> Message:
    """Answer no question: a SuperNode runs whatever bundle it receives, so a site must not be one."""
    raise FedsieveError("a SuperNode cannot take part: start the site with `fedsieve node`")

"""The ServerApp and the ClientApp. `flwr run` finds them here; `fedsieve flower` simulates them on one machine."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsieve.errors import FedsieveError
from fedsieve.flower.grid import GridTransport, from_record, to_record
from fedsieve.flower.warm import IDLE, answer_warm

# Flower starts a process for every message, which only hands it on: what takes long to import is imported where it is used.
if TYPE_CHECKING:
    from fedsieve.config import Experiment
    from fedsieve.runner.progress import Display

WAIT = 300.0  # seconds for all sites to come,
DEADLINE = 600.0  # and for each to answer
OPTIONS = ("data", "weights", "device", "experiment")  # what a site may take of its own


def client_app(answer: Callable[[bytes, Message, Context], bytes]) -> ClientApp:
    """A ClientApp that answers envelopes."""
    app = ClientApp()

    @app.query()
    def ask(message: Message, context: Context) -> Message:
        return Message(to_record(answer(from_record(message.content), message, context)), reply_to=message)

    return app


def answer_at_site(envelope: bytes, message: Message, context: Context) -> bytes:
    """What the site of a SuperNode answers, as its operator has set it up with --node-config."""
    given = dict(context.node_config)
    client = given.get("partition-id")
    if type(client) is not int:
        raise FedsieveError('--node-config: say which site this is, as in --node-config "partition-id=0"')
    folder = Path(str(given.get("folder", f"fedsieve-site-{client}"))).expanduser().absolute()
    place: dict[str, Any] = {"client": client, "folder": str(folder)}
    place |= {name: str(given[name]) for name in OPTIONS if name in given}
    return answer_warm(envelope, place, message.metadata.ttl, float(given.get("idle", IDLE)))


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


client = client_app(answer_at_site)

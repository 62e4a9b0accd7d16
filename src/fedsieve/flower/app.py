"""The ServerApp and the ClientApp. `flwr run` finds them here; `fedsieve flower` simulates them on one machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from fedsieve.config import Experiment, parse_config
from fedsieve.errors import FedsieveError
from fedsieve.flower.grid import GridTransport, from_record, to_record
from fedsieve.runner.site import Place, answer

WAIT = 300.0  # seconds for all sites to come


def client_app(place: Callable[[Context], Place]) -> ClientApp:
    """A ClientApp that answers as the site at `place`."""
    app = ClientApp()

    @app.query()
    def ask(message: Message, context: Context) -> Message:
        return Message(to_record(answer(from_record(message.content), place(context))), reply_to=message)

    return app


def place_of(context: Context) -> Place:
    """The site of a SuperNode, as its operator has set it with --node-config."""
    given = dict(context.node_config)
    client = given.get("partition-id")
    if type(client) is not int:
        raise FedsieveError('--node-config: say which site this is, as in --node-config "partition-id=0"')
    texts = {name: str(given[name]) for name in ("data", "weights", "device") if name in given}
    pinned = Path(str(given["experiment"])).expanduser() if "experiment" in given else None
    folder = Path(str(given.get("folder", f"fedsieve-site-{client}"))).expanduser().absolute()
    return Place(client, folder, experiment=pinned, **texts)


def serve(grid: Grid, experiment: Experiment, folder: Path, wait: float, console: Console) -> dict[str, Any]:
    """Run the experiment of a ServerApp into a folder, or continue what is there."""
    from fedsieve.runner.experiment import read_experiment, resume, run
    from fedsieve.runner.progress import Display
    from fedsieve.runner.setup import config_digest

    display = Display(console)
    transport = GridTransport(grid, wait, display.say)
    if not (folder / "config.yaml").exists():
        return run(experiment, folder, display, transport)
    if config_digest(read_experiment(folder)) != config_digest(experiment):
        raise FedsieveError(f"{folder} holds a run of another experiment: name another folder with out")
    return resume(folder, display, transport)


server = ServerApp()


@server.main()
def _main(grid: Grid, context: Context) -> None:
    given = context.run_config
    experiment = parse_config(str(given.get("experiment", "")), where="the app's experiment")
    folder = Path(str(given.get("out") or experiment.name)).expanduser().absolute()
    console = Console(soft_wrap=True)
    try:
        serve(grid, experiment, folder, float(given.get("wait", WAIT)), console)
    except FedsieveError as error:
        console.print(f"error: {error}", highlight=False, markup=False)
        raise


client = client_app(place_of)

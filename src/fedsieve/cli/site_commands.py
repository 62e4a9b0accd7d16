"""`fedsieve deploy`, at the server, and `fedsieve node`, at each site."""

from pathlib import Path
from typing import Annotated

import typer

from fedsieve.cli.root import ConfigFile, Out, Overrides, app, console, need_flower
from fedsieve.config import load_config, to_yaml
from fedsieve.errors import FedsieveError

deploy_app = typer.Typer(
    no_args_is_help=True,
    help="A server that sites elsewhere connect to: its keys, SuperLink and proxy. docs/flower.md shows it all.",
    rich_markup_mode="markdown",
)
node_app = typer.Typer(
    invoke_without_command=True,
    help="A site that keeps its images. Without a command: run the site whose folder this is.",
    rich_markup_mode="markdown",
)
app.add_typer(deploy_app, name="deploy")
app.add_typer(node_app, name="node")

ServerFolder = Annotated[
    Path, typer.Argument(metavar="SERVER", help="A folder, as `fedsieve deploy init` makes it.", show_default=False)
]
SiteFolder = Annotated[
    Path, typer.Argument(metavar="SITE", help="A folder, as `fedsieve node init` makes it.", show_default=False)
]


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@deploy_app.command("init")
def deploy_init(
    folder: Annotated[Path, typer.Argument(metavar="SERVER", help="The folder to make.", show_default=False)],
    address: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="What sites will call. The certificate names it.", show_default=False),
    ],
    listen: Annotated[
        str | None,
        typer.Option(metavar="IP", help="The address that the proxy listens on. Default: all.", show_default=False),
    ] = None,
    inside: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", help="The SuperLink's port on loopback. Default: the next one.", show_default=False
        ),
    ] = None,
) -> None:
    """Make a server's folder: a certificate authority, certificates, and the configuration of SuperLink and proxy."""
    from fedsieve.flower.deployment import init_server

    print_ = init_server(folder, address, listen, inside)
    _say(f"server: {folder}\ngive {folder / 'ca.crt'} to every site. Its fingerprint is {print_}")


@deploy_app.command("superlink")
def deploy_superlink(folder: ServerFolder) -> None:
    """Run the SuperLink, on loopback only."""
    from fedsieve.flower.deployment import run_superlink

    run_superlink(folder)


@deploy_app.command("register")
def deploy_register(
    folder: ServerFolder,
    keys: Annotated[
        list[Path], typer.Argument(metavar="KEY.pub...", help="The public keys of sites.", show_default=False)
    ],
) -> None:
    """Let sites in: register their public keys."""
    from fedsieve.flower.deployment import register
    from fedsieve.flower.keys import fingerprint

    if absent := [str(key) for key in keys if not key.is_file()]:
        raise FedsieveError(f"deploy register: {', '.join(absent)} is not there")
    register(folder, keys)
    for key in keys:
        _say(f"registered: {key}, fingerprint {fingerprint(key)}")


@deploy_app.command("run")
def deploy_run(
    folder: ServerFolder,
    config: ConfigFile,
    overrides: Overrides = None,
    out: Out = None,
    deadline: Annotated[
        float, typer.Option(metavar="S", help="Seconds that sites have for an answer.", min=1.0)
    ] = 600.0,
) -> None:
    """Run an experiment with the sites that are connected; it goes on when this command has ended."""
    from fedsieve.flower.deployment import submit

    experiment = load_config(config, overrides or [])
    place = out or Path("runs") / experiment.name
    _say(f"{submit(folder, experiment, place, deadline)}\nrun folder: {place}")


@deploy_app.callback()
def deploy() -> None:
    need_flower("deploy", "flwr")


@node_app.callback()
def node(context: typer.Context) -> None:
    need_flower("node", "flwr")
    if context.invoked_subcommand is None:
        node_run(Path())


@node_app.command("init")
def node_init(
    folder: Annotated[Path, typer.Argument(metavar="SITE", help="The folder to make.", show_default=False)],
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server's address.", show_default=False)],
    ca: Annotated[Path, typer.Option(metavar="FILE", help="The server's ca.crt.", show_default=False)],
    client: Annotated[int, typer.Option(metavar="N", help="Which client this site is.", min=0, show_default=False)],
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="The site's own images.", show_default=False)] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The pretrained weights, as they are here.", show_default=False)
    ] = None,
    device: Annotated[str | None, typer.Option(help="`cpu`, `cuda`, `cuda:N`; default: what is there.")] = None,
) -> None:
    """Make a site's folder with a key of its own. The private half never leaves it."""
    from fedsieve.flower.keys import fingerprint
    from fedsieve.flower.site import SiteSettings, init_site

    images, file = (None if path is None else str(path.absolute()) for path in (data, weights))
    settings = SiteSettings(server=server, client=client, data=images, weights=file, device=device)
    authority, public = init_site(folder, settings, ca), folder / "key.pub"
    _say(
        f"site: {folder}\nthe server's authority has the fingerprint {authority}: compare it with the server's operator"
    )
    _say(f"give {public} to the server's operator. Its fingerprint is {fingerprint(public)}")


@node_app.command("run")
def node_run(folder: SiteFolder) -> None:
    """Run the one process of a site. It answers for experiments that the site has accepted, and for no others."""
    from fedsieve.flower.driver import run_site

    run_site(folder, _say)


@node_app.command("review")
def node_review(folder: SiteFolder, config: ConfigFile, overrides: Overrides = None) -> None:
    """Show in plain words what would leave this site in an experiment, and under which protection."""
    from fedsieve.flower.review import review
    from fedsieve.flower.site import read_site
    from fedsieve.runner.identity import experiment_digest

    experiment = load_config(config, overrides or [])
    _say(review(experiment, read_site(folder), experiment_digest(to_yaml(experiment))))


@node_app.command("accept")
def node_accept(folder: SiteFolder, config: ConfigFile, overrides: Overrides = None) -> None:
    """Accept an experiment: from now on, this site takes part in it. Delete the file that this names to withdraw."""
    from fedsieve.flower.admission import Accepted
    from fedsieve.flower.site import read_site

    accepted = Accepted(folder, read_site(folder).policy)
    _say(f"accepted: {accepted.add(load_config(config, overrides or []))}")


@node_app.command("verify")
def node_verify(folder: SiteFolder) -> None:
    """Check the logs of what left this site: that no line was changed, added or taken out."""
    from fedsieve.federation.sent import LOG, verify
    from fedsieve.flower.site import read_site

    read_site(folder)
    if not (logs := sorted((folder / "files").glob(f"*/{LOG}"))):
        _say("nothing has left this site yet")
    for log in logs:
        lines, newest = verify(log)
        _say(f"{log}: {lines:,} lines, whole. Newest digest: {newest}")

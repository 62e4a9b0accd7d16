"""The server of a deployment: its keys, the SuperLink on loopback, and the proxy that sites call."""

import ipaddress
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import tomli_w

from fedsieve.config import Experiment
from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomic
from fedsieve.flower import QUIET
from fedsieve.flower.keys import PEM, Authority, fingerprint, write_key
from fedsieve.flower.project import write_app

CONNECTION = "server"  # the name of the SuperLink in Flower's configuration
PATIENCE = 60.0  # seconds for the SuperLink to begin


def init_server(folder: Path, address: str, listen: str | None, inside: int | None = None) -> str:
    """Make a server's folder: keys, certificates and configuration. Gives the fingerprint of `ca.crt`."""
    host, port = split_address("--address", address)
    if folder.exists() and any(folder.iterdir()):
        raise FedsieveError(f"{folder} is there already, with files: name another folder")
    inside = port + 1 if inside is None else inside
    if port == inside:
        raise FedsieveError(f"--inside: {inside} is the port of --address, and the SuperLink needs another")
    authority, proxy, inner = Authority.new(host), folder / "proxy", folder / "superlink"
    public = authority.certificate.public_bytes(PEM)
    folder.mkdir(parents=True, exist_ok=True)
    for part in (proxy, inner):
        part.mkdir(mode=0o700)
        write_atomic(part / "ca.crt", public)
    (proxy / "temporary").mkdir(mode=0o700)
    write_key(folder / "ca.key", authority.key)
    write_atomic(folder / "ca.crt", public)
    authority.issue(proxy, host)
    authority.issue(inner, "localhost", "127.0.0.1")  # the proxy verifies the name, and Flower the address
    write_atomic(proxy / "nginx.conf", proxy_configuration(listen or _listen(host), port, inside))
    connection = {"address": f"localhost:{inside}", "root-certificates": str((inner / "ca.crt").absolute())}
    content = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    write_atomic(folder / "flower" / "config.toml", tomli_w.dumps(content))
    lines = [f"export {name}={value}\n" for name, value in QUIET.items()]
    write_atomic(folder / "environment", "".join([*lines, f'export FLWR_HOME="{(folder / "flower").absolute()}"\n']))
    return fingerprint(folder / "ca.crt")


def proxy_configuration(listen: str, port: int, inside: int) -> str:
    """The configuration of nginx."""
    text = (resources.files("fedsieve") / "assets" / "nginx.conf").read_text(encoding="utf-8")
    return text.replace("{{listen}}", f"{listen}:{port}").replace("{{superlink}}", f"127.0.0.1:{inside}")


def split_address(key: str, address: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host) or not port.isdigit():
        raise FedsieveError(f"{key}: {address} is not HOST:PORT, as in server.example.org:9092")
    if not 0 < int(port) < 2**16:
        raise FedsieveError(f"{key}: {port} is not a port: 1 to 65535")
    return host, int(port)


def _listen(host: str) -> str:
    """The address that the proxy listens on: all of the machine's, unless sites call a loopback address."""
    try:
        return host if ipaddress.ip_address(host).is_loopback else "0.0.0.0"
    except ValueError:
        return "127.0.0.1" if host == "localhost" else "0.0.0.0"


def run_superlink(folder: Path) -> None:
    """Become the SuperLink of this folder. It listens on loopback only."""
    inner, port = folder.absolute() / "superlink", inner_port(folder)
    command = [_program("flower-superlink"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
    command += ["--database", str(inner / "state.db")]
    command += ["--ssl-ca-certfile", str(inner / "ca.crt")]
    command += ["--ssl-certfile", str(inner / "server.pem"), "--ssl-keyfile", str(inner / "server.key")]
    os.execve(command[0], command, environment(folder))


def inner_port(folder: Path) -> int:
    """The port of the SuperLink."""
    file = folder / "flower" / "config.toml"
    try:
        found = re.search(r'^address = "localhost:(\d+)"$', file.read_text(), re.MULTILINE)
    except FileNotFoundError:
        raise FedsieveError(f"{file} is not there: `fedsieve deploy init` makes a server's folder") from None
    if not found:
        raise FedsieveError(f"{file}: no address of a SuperLink on localhost is in it")
    return int(found[1])


def environment(folder: Path) -> dict[str, str]:
    """The environment of Flower's programs: its own programs, this folder's configuration, and no calls home."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, **QUIET, "FLWR_HOME": str((folder / "flower").absolute()), "PATH": path}


def register(folder: Path, files: list[Path]) -> None:
    """Register public keys of sites with the SuperLink."""
    for file in files:
        flwr(folder, "supernode", "register", str(file), CONNECTION)


def submit(folder: Path, experiment: Experiment, out: Path, deadline: float) -> str:
    """Start the run of an experiment at the SuperLink; gives what Flower says about it."""
    app = folder / "apps" / re.sub(r"[^A-Za-z0-9_-]+", "-", experiment.name)
    write_app(experiment, app, str(out.absolute()), deadline)
    return flwr(folder, "run", str(app), CONNECTION)


def flwr(folder: Path, *words: str) -> str:
    """Run Flower's command line against this folder's SuperLink, which may take a while to begin."""
    port, end = inner_port(folder), time.monotonic() + PATIENCE
    while not _listens(port):
        if time.monotonic() > end:
            raise FedsieveError(f"no SuperLink is at 127.0.0.1:{port}: start `fedsieve deploy superlink {folder}`", 1)
        time.sleep(0.2)
    command = [_program("flwr"), *words]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True)
    if done.returncode:
        raise FedsieveError(f"`flwr {' '.join(words)}` failed: {(done.stderr + done.stdout).strip()}", 1)
    return done.stdout.strip()


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0):
            return True
    except OSError:
        return False


def _program(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise FedsieveError(f"{name} is not installed: pip install 'fedsieve[flower]'")
    return found

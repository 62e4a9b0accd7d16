"""Processes of a Flower federation on this machine, none of which is left behind; a certificate that is wrong."""

import contextlib
import datetime
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests import processes

ALL = 1500  # seconds for all that is done with some processes,
ONE = 400  # and for one thing: a free machine takes a tenth
PEM = serialization.Encoding.PEM


class Processes:
    """What is started in `folder`. All of it is ended at the end, also when the tests are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last = time.monotonic() + ALL  # nothing is waited for any longer
        self.mark = f"FEDERATION={folder}"  # fedsieve gives Flower's programs a FLWR_HOME of their own
        own = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "FEDERATION": str(folder),
            "FLWR_HOME": str(folder / "home"),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        }
        self.environment = {**os.environ, **own}

    def __enter__(self) -> "Processes":
        command = [sys.executable, processes.__file__, self.mark]
        self.keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def __exit__(self, *_) -> None:
        self.keeper.communicate()
        assert self.keeper.returncode == 0, "processes that cannot be ended"

    def bash(self, commands: str) -> str:
        """Run commands to their end; what they leave running goes on."""
        with (self.folder / "output.log").open("w+") as log:
            done = subprocess.run(
                ["bash", "-e", "-c", commands],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=min(ONE, self.last - time.monotonic()),
            )
            log.seek(0)
            assert done.returncode == 0, f"{commands}\n{self.logs()}"
            return log.read()

    def alive(self, *words: str) -> list[int]:
        return processes.alive(self.mark, *words)

    def logs(self) -> str:
        files = [file for pattern in ("*.log", "*/*.log") for file in self.folder.glob(pattern)]
        return "\n".join(f"{file}:\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def until(self, done):
        """Wait for something to be so."""
        end = min(time.monotonic() + ONE, self.last)
        while not (found := done()):
            assert time.monotonic() < end, self.logs()
            time.sleep(0.1)
        return found


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that nobody uses."""
    while True:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
            first = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for number in range(1, count):
                held.enter_context(socket.create_server(("127.0.0.1", first + number)))
            return first


def other_authority(file: Path) -> None:
    """The certificate of an authority that has signed nothing here."""
    now, private = datetime.datetime.now(datetime.UTC), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name.from_rfc4514_string("CN=another authority")
    builder = x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
    builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
    file.write_bytes(builder.sign(private, hashes.SHA256()).public_bytes(PEM))

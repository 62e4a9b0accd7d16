"""A SuperLink and SuperNodes as real processes on this machine, with TLS and registered keys, and none left behind."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

PEM, OPENSSH = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH


class Loopback:
    """One SuperLink; SuperNodes as asked for. Everything that is started is found again by its environment, and ended."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "OMP_NUM_THREADS": "1",
        }
        (folder / "home").mkdir()
        authority(folder, "ca")
        authority(folder, "other")
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )

    def __enter__(self) -> "Loopback":
        tls = "--ssl-certfile ca.server.pem --ssl-keyfile ca.server.key --ssl-ca-certfile ca.crt"
        self.start(
            "superlink",
            f"flower-superlink --host 127.0.0.1 --port {self.port} {tls} --enable-supernode-auth "
            "--disable-runtime-dependency-installation",
        )
        self.until(lambda: reachable(self.port), 60, "superlink")
        return self

    def __exit__(self, *_) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + 5
            while (left := self.alive()) and time.monotonic() < end:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                self.reap()
                time.sleep(0.1)
        assert not self.alive()

    def start(self, name: str, command: str) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                shlex.split(command),
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.processes[name]

    def call(self, command: str) -> str:
        return subprocess.run(
            shlex.split(command), cwd=self.folder, env=self.environment, check=True, capture_output=True, text=True
        ).stdout

    def register(self, *names: str) -> None:
        """Make keys, and register their public halves with the SuperLink."""
        for name in names:
            key(self.folder / name)
        waiting = [
            subprocess.Popen(
                ["flwr", "supernode", "register", f"{name}.pub", "here"], cwd=self.folder, env=self.environment
            )
            for name in names
        ]
        assert [process.wait(120) for process in waiting] == [0] * len(names)

    def supernode(self, name: str, settings: str, how: str | None = None) -> subprocess.Popen:
        how = how or f"--root-certificates ca.crt --auth-supernode-private-key {name}"
        command = f"flower-supernode --superlink 127.0.0.1:{self.port} {how} --host 127.0.0.1 --port {free_port()}"
        return self.start(name, f"{command} --node-config {shlex.quote(settings)}")

    def run(self, app: Path) -> int:
        """Submit an app, and give the number of its run."""
        return int(json.loads(self.call(f"flwr run {app} here --format json"))["run-id"])

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def until(self, done, seconds: float, name: str):
        """Wait for something to be so; if it does not come, show what a process said."""
        end = time.monotonic() + seconds
        while not (found := done()):
            assert time.monotonic() < end, f"{name} in {seconds} s:\n{self.log(name)[-4000:]}"
            time.sleep(0.1)
        return found

    def reap(self) -> None:
        for process in self.processes.values():
            process.poll()

    def alive(self, word: str = "") -> list[int]:
        """The processes of this federation, those with `word` in their command."""
        mark, found = f"FLWR_HOME={self.folder / 'home'}".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes() and word.encode() in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
        return found


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def reachable(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def key(file: Path) -> None:
    """A key pair of a SuperNode, as ssh-keygen -t ecdsa -b 384 makes it."""
    private = ec.generate_private_key(ec.SECP384R1())
    file.write_bytes(private.private_bytes(PEM, OPENSSH, serialization.NoEncryption()))
    file.chmod(0o600)
    public = private.public_key()
    text = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    file.with_name(f"{file.name}.pub").write_bytes(text + b"\n")


def authority(folder: Path, name: str) -> None:
    """A certificate authority, and a certificate of it for this machine."""
    import datetime
    import ipaddress

    now = datetime.datetime.now(datetime.UTC)
    keys = {who: ec.generate_private_key(ec.SECP256R1()) for who in ("ca", "server")}

    def certificate(who: str, extension: x509.ExtensionType) -> x509.Certificate:
        builder = x509.CertificateBuilder().serial_number(x509.random_serial_number())
        builder = builder.subject_name(x509.Name.from_rfc4514_string(f"CN={name} {who}"))
        builder = builder.issuer_name(x509.Name.from_rfc4514_string(f"CN={name} ca"))
        builder = builder.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
        builder = builder.public_key(keys[who].public_key()).add_extension(extension, critical=who == "ca")
        return builder.sign(keys["ca"], hashes.SHA256())

    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    (folder / f"{name}.crt").write_bytes(certificate("ca", x509.BasicConstraints(True, None)).public_bytes(PEM))
    (folder / f"{name}.server.pem").write_bytes(certificate("server", here).public_bytes(PEM))
    private = keys["server"].private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / f"{name}.server.key").write_bytes(private)

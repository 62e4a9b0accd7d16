"""The process in which a site trains.

`fedsieve node` hands each envelope to this process, over a socket that its user alone can open. It starts with the first
message, and keeps images and network from one message to the next. It ends with `fedsieve node`, after some idle time, or
when a message takes longer than it may: then its memory is free again, and the connection to the server stays.
"""

import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedsieve.errors import FedsieveError

IDLE = 600.0  # seconds after which it ends
START = 120.0  # seconds that it may take to begin
BEAT = 1.0  # seconds from one look at `fedsieve node` to the next
LONGEST = 103  # bytes of a socket's name, of those that Linux (107) and macOS take
TAKEN = b"taken"


def answer_warm(envelope: bytes, place: dict[str, Any], seconds: float, idle: float = IDLE) -> bytes:
    """What the site at `place` (of `Host`, as text) answers; an error where that takes longer than `seconds`."""
    late, process = threading.Event(), list[int]()

    def give_up() -> None:  # whatever waits for the process then ends
        late.set()
        with suppress(IndexError, ProcessLookupError):
            os.kill(process[-1], signal.SIGKILL)

    timer = threading.Timer(seconds, give_up)
    timer.start()
    try:
        while True:
            with _connected(place["folder"], idle) as connection:
                process.append(_peer(connection))
                taken = False
                with suppress(EOFError, OSError):
                    connection.send_bytes(json.dumps(place).encode())
                    connection.send_bytes(envelope)
                    taken = connection.recv_bytes() == TAKEN
                    return connection.recv_bytes()
            if late.is_set():
                raise FedsieveError(f"the site did not answer in {seconds:g} s", 1)
            if taken:  # otherwise it was just ending, and is replaced
                raise FedsieveError("the site's process ended while it worked", 1)
    finally:
        timer.cancel()


def _peer(connection: Connection) -> int:
    """The process at the other end of a connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as other:
        if sys.platform == "linux":
            return int(struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
        return int(other.getsockopt(0, 2))  # macOS: SOL_LOCAL, LOCAL_PEERPID


def address_of(folder: str) -> str:
    """The socket of a site: a short name, in a folder of the user's own."""
    home = Path(tempfile.gettempdir()) / f"fedsieve-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    status = home.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise FedsieveError(f"{home}: others than you may open it. Delete it, or set TMPDIR to a folder of your own")
    address = str(home / hashlib.blake2b(folder.encode(), digest_size=10).hexdigest())
    if len(os.fsencode(address)) > LONGEST:
        raise FedsieveError(f"{address} is too long for a socket: set TMPDIR to a folder with a shorter name")
    return address


def _connected(folder: str, idle: float) -> Connection:
    """A connection to a site's process, which is started where there is none."""
    address = address_of(folder)
    if (found := _connect(address)) is not None:
        return found
    command = [sys.executable, "-m", "fedsieve.flower.warm", address, str(os.getpid()), str(idle)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        if (found := _connect(address)) is not None:
            return found
        time.sleep(0.05)
    raise FedsieveError(f"the site's process did not begin (exit code {process.poll()})", 1)


def _connect(address: str) -> Connection | None:
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(address)
    except OSError:
        client.close()
        return None
    return Connection(client.detach())


def main(address: str, watched: int, idle: float, answer: Callable[[bytes, dict[str, Any]], bytes]) -> None:
    """Answer one message after another until the process `watched` is gone, or nothing was asked for `idle` seconds."""
    last = [time.monotonic()]  # infinity while it works

    def watch() -> None:
        while not _gone(watched) and time.monotonic() - last[0] < idle:
            time.sleep(BEAT)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    server = socket.socket(socket.AF_UNIX)
    with suppress(FileNotFoundError):
        os.unlink(address)
    server.bind(address)
    server.listen()
    while True:
        connection, _ = server.accept()
        last[0] = float("inf")
        with Connection(connection.detach()) as client, suppress(EOFError, OSError):
            place = json.loads(client.recv_bytes())
            envelope = client.recv_bytes()
            client.send_bytes(TAKEN)
            client.send_bytes(answer(envelope, place))
        last[0] = time.monotonic()


def _gone(process: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _answer(envelope: bytes, place: dict[str, Any]) -> bytes:
    from fedsieve.runner.hosting import Host, answer  # seconds, in which the socket is there already

    return answer(envelope, Host(**{**place, "folder": Path(place["folder"])}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), _answer)

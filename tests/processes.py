"""Processes that tests start. All of them, children's children too, are known by a word of their environment, or by the
folder that this word names.

Run as a script, this waits until whoever started it closes its input or is gone, however that came about, and then ends them.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path


def alive(mark: str, *words: str) -> list[int]:
    """Processes that run with `mark` (NAME=value) in their environment, of those the ones with all `words` in their command."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            inside = mark.encode() in (entry / "environ").read_bytes().split(b"\0")
            inside |= os.readlink(entry / "cwd") == mark.partition("=")[2]  # nginx overwrites its environment
            if inside and int(entry.name) != os.getpid() and all(word in command(int(entry.name)) for word in words):
                found.append(int(entry.name))
    return found


def command(process: int) -> str:
    """How a process was started; nothing where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    sys.stdin.read()
    end = time.monotonic() + 30
    while (left := alive(sys.argv[1])) and time.monotonic() < end:
        kill(left)
        time.sleep(0.1)
    sys.exit(len(left))

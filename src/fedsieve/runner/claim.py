"""Claims on run folders: one process at a time works in a folder, and a new run starts in an empty one."""

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Collection, Iterator
from io import FileIO
from pathlib import Path

from fedsieve.errors import FedsieveError
from fedsieve.runner.checkpoint import list_checkpoints

LOCK = ".lock"


class Busy(FedsieveError):
    """Another process is working in the folder, so nothing in it may be changed."""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes off a run folder. The lock ends with the process, however that ends."""
    lock = _lock(folder)
    try:
        yield
    finally:
        _release(lock)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a folder for a new run, from before anything is written into it.

    A wrong request (exit code 2) that has trained nothing leaves no trace: everything that appeared since is deleted.
    """
    try:
        lock, created = _make(folder)
    except Busy as error:
        raise Busy(f"--out: {error}. Choose another folder for a new run") from None
    except OSError as error:
        raise FedsieveError(f"--out: {folder} cannot be written: {error.strerror}") from None
    try:
        check_free(folder)
        before = {*os.listdir(folder)} - {LOCK}
        try:
            yield
        except FedsieveError as error:
            if error.is_request and not _trained(folder):
                _clear(folder, before)
                if created:
                    with contextlib.suppress(OSError):  # another process may have claimed it by now
                        folder.rmdir()
            raise
    finally:
        _release(lock)


def check_free(folder: Path) -> None:
    """Refuse a folder that a new run cannot have."""
    if not folder.exists() or is_free(folder):
        return
    hint = "it is not empty"
    if (folder / "config.yaml").exists():
        hint = f"`fedsieve resume {folder}` continues it"
        if owner := _owner(folder):
            hint = f"{owner} is working on it, or was killed, in which case {hint}"
    raise FedsieveError(f"--out: {folder} is there already: {hint}. Choose another folder for a new run")


def is_free(folder: Path) -> bool:
    """True for a folder that holds no more than a process leaves when it is killed before its first file is whole."""
    return folder.is_dir() and all(item.name == LOCK or item.name.startswith(".config") for item in folder.iterdir())


def _make(folder: Path) -> tuple[FileIO, bool]:
    """Make a folder where there is none, and lock it; True where it was made."""
    while True:
        try:
            folder.mkdir(parents=True)
            created = True
        except FileExistsError:
            if folder.is_symlink() and not folder.exists():  # a link to nothing
                raise
            created = False
        with contextlib.suppress(FileNotFoundError):  # the process that had claimed it has just deleted it
            return _lock(folder), created


def _lock(folder: Path) -> FileIO:
    """Lock a folder until the file is released, and write into it who did."""
    path = folder / LOCK
    while True:
        lock = FileIO(path, "a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, path):  # a lock on a file that its owner has just deleted keeps nobody off
                break
        except BlockingIOError:
            lock.close()
            for _ in range(20):  # who has just locked it is about to write its name
                if owner := _owner(folder):
                    break
                time.sleep(0.01)
            raise Busy(f"{folder}: another process is working on this run{owner and f' ({owner})'}") from None
        lock.close()
    with contextlib.suppress(OSError):  # a full disk is no reason not to go on
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    return lock


def _is_at(file: FileIO, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _release(lock: FileIO) -> None:
    with contextlib.suppress(OSError):
        lock.truncate(0)
    fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough where a process that was forked has the file too
    lock.close()


def _owner(folder: Path) -> str:
    """The process that holds a folder, or was killed while it did; empty where there is none."""
    try:
        return (folder / LOCK).read_text(errors="replace").strip()
    except OSError:
        return ""


def _trained(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return bool(list_checkpoints(folder / "checkpoints")) or (metrics.exists() and metrics.stat().st_size > 0)


def _clear(folder: Path, keep: Collection[str]) -> None:
    """Delete what is in a folder, the lock last."""
    for item in sorted(folder.iterdir(), key=lambda item: item.name == LOCK):
        if item.name not in keep:
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    item.unlink()

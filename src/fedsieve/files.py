"""Files that are either wholly there or not there at all."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def write_atomic(path: Path, content: bytes | str, private: bool = False) -> None:
    """Write a file so that a reader, or a kill at any moment, sees the old content or the new, never a part.

    A link stays and its target is written; what is there and no regular file stays as it is.
    """
    data = content.encode() if isinstance(content, str) else content
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "there is something that is no regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not private:  # as mkstemp makes it; a result is as readable as any other file of the user's
            os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_sealed(path: Path, body: bytes) -> None:
    """Write a file, atomically, that begins with the SHA-256 of the rest."""
    write_atomic(path, hashlib.sha256(body).digest() + body)


def read_sealed(path: Path) -> bytes:
    """What `write_sealed` wrote; ValueError when it is not exactly that."""
    content = path.read_bytes()
    digest, body = content[:32], content[32:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("its checksum does not match")
    return body


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, written atomically; NaN and infinity are refused, since no other reader takes them."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def with_notes(body: bytes, notes: Mapping[str, str]) -> bytes:
    """Add metadata to a safetensors file. The same content always gives the same bytes.

    safetensors itself writes metadata in a random order.
    """
    end = 8 + int.from_bytes(body[:8], "little")
    header = {"__metadata__": dict(sorted(notes.items())), **json.loads(body[8:end])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at multiples of 8
    return len(text).to_bytes(8, "little") + text + body[end:]


@contextlib.contextmanager
def folder_atomic(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when the block ends well and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        try:
            temporary.rename(path)
        except OSError:
            # Another process filled the same place first; its content is the same by construction.
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""The log of what leaves a node. Each line holds the digest of itself and of all before it, so that no line can be changed or
taken out unnoticed, and a file of its own holds the newest digest, so that the end cannot be cut off unnoticed."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomic

LOG, TIP, CHAIN = "sent.jsonl", "sent.tip", "chain"
START = "0" * 64
BLOCK = 2**16


def note(folder: Path, head: Mapping[str, Any], notes: Sequence[Mapping[str, Any]], size: int) -> None:
    """Write down what leaves a node, before it does: one line for every message, and one for the envelope of them all."""
    about: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
    about |= {name: head.get(name) for name in ("run", "ask", "stage")}
    about["round"] = head["round"] + 1 if type(head.get("round")) is int else None
    folder.mkdir(parents=True, exist_ok=True)
    file, lines = folder / LOG, ""
    chain = _newest(file)
    for entry in (*notes, {"what": "envelope", "bytes": size}):
        text = json.dumps({**about, **entry})
        chain = _link(chain, text)
        lines += f'{text[:-1]}, "{CHAIN}": "{chain}"}}\n'
    with file.open("a") as log:
        log.write(lines)
    write_atomic(folder / TIP, chain)


def verify(file: Path) -> tuple[int, str]:
    """The number of lines of a log that is whole, and its newest digest."""
    chain, number, tip = START, 0, file.with_name(TIP)
    wanted = tip.read_text() if tip.exists() else None
    met = wanted == START
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        text, _, end = line.rpartition(f', "{CHAIN}": "')
        chain = _link(chain, f"{text}}}")
        if end != f'{chain}"}}':
            raise FedsieveError(f"{file}, line {number}: this line or one before it was changed, added or taken out", 1)
        met = met or chain == wanted
    if not met:
        raise FedsieveError(f"{file}: its last lines are missing, or {tip.name} beside it was changed", 1)
    return number, chain


def _link(chain: str, text: str) -> str:
    return hashlib.sha256(f"{chain}\n{text}".encode()).hexdigest()


def _newest(file: Path) -> str:
    """The digest in the last line of a log."""
    if not file.exists():
        return START
    with file.open("rb") as log:
        log.seek(max(0, log.seek(0, 2) - BLOCK))
        last = log.read().splitlines()[-1:]
    try:
        return str(json.loads(last[0])[CHAIN]) if last else START
    except (ValueError, KeyError, TypeError):
        return START  # damaged: `verify` says where

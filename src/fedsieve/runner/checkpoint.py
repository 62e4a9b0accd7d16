"""Checkpoints: one file each, whole or absent, with a checksum that is verified before anything in it is believed.

A file is the SHA-256 of the rest, then safetensors; the numbers travel as JSON in one of its tensors.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedsieve.files import read_sealed, write_sealed

NUMBERS = "numbers"  # the tensor that carries the JSON


def save_checkpoint(
    folder: Path, index: int, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor], keep: int
) -> Path:
    """Write checkpoint `index`, then delete all but the newest `keep`; a failure on the way leaves the old ones."""
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content[NUMBERS] = torch.frombuffer(bytearray(json.dumps(dict(numbers)).encode()), dtype=torch.uint8)
    path = folder / f"{index:010d}.ckpt"
    write_sealed(path, safetensors.torch.save(content))
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("*.ckpt"))


def load_newest(folder: Path, say: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Numbers and tensors of the newest checkpoint that is intact; damaged ones are set aside, and `say` tells so."""
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            return read_checkpoint(path)
        except ValueError as error:
            path.rename(path.with_suffix(".damaged"))
            say(f"{path} is damaged ({error}): set aside, going back to the checkpoint before it")
    if paths:
        say(f"{folder}: no checkpoint is intact, so the run starts over")
    return None


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Numbers and tensors of one checkpoint; ValueError when it is not exactly what was written."""
    body = read_sealed(path)
    try:
        tensors = safetensors.torch.load(body)
        numbers = json.loads(bytes(tensors.pop(NUMBERS).numpy()))
    except (safetensors.SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"its content cannot be read: {error}") from None
    return numbers, tensors

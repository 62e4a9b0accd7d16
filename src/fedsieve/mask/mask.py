"""Mask: which weights of a ParamSpace may train, one bit each."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from safetensors import safe_open
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.files import with_notes, write_atomic
from fedsieve.model.space import ParamSpace

FORMAT = "fedsieve mask 1"


@dataclass(frozen=True, eq=False)
class Mask:
    """A set of active weights: weight i of `space` is active where bit i (little-endian) of `bits` is set.

    Immutable and hashable; 22 M weights take 2.75 MB. Masks of different spaces do not mix: every operation refuses.
    """

    space: ParamSpace
    bits: np.ndarray

    def __post_init__(self) -> None:
        bits, tail = self.bits, self.space.size % 8
        if bits.dtype != np.uint8 or bits.shape != (math.ceil(self.space.size / 8),):
            raise FedsieveError(
                f"a mask of {self.space.size:,} weights needs {math.ceil(self.space.size / 8):,} bytes, "
                f"not {bits.dtype} of shape {bits.shape}"
            )
        if tail and bits[-1] >> tail:
            raise FedsieveError(f"bits are set beyond the {self.space.size:,} weights of the mask")
        # An array over bytes cannot be made writeable again, unlike one that owns its memory.
        object.__setattr__(self, "bits", np.frombuffer(bits.tobytes(), dtype=np.uint8))

    @classmethod
    def from_bool(cls, space: ParamSpace, active: Tensor) -> "Mask":
        """The mask of a bool vector (D,)."""
        if active.dtype != torch.bool or tuple(active.shape) != (space.size,):
            raise FedsieveError(
                f"a mask of this space is made from a bool vector of {space.size:,} weights, "
                f"not from {active.dtype} of shape {tuple(active.shape)}"
            )
        return cls(space, np.packbits(active.detach().cpu().numpy(), bitorder="little"))

    @classmethod
    def ones(cls, space: ParamSpace) -> "Mask":
        """Every weight active."""
        return ~cls.zeros(space)

    @classmethod
    def zeros(cls, space: ParamSpace) -> "Mask":
        """Every weight frozen."""
        return cls(space, np.zeros(math.ceil(space.size / 8), dtype=np.uint8))

    @cached_property
    def id(self) -> str:
        """A digest of the space and the bits: equal masks, and no others, have equal ids."""
        return hashlib.blake2b(self.space.id.encode() + self.bits.tobytes(), digest_size=16).hexdigest()

    @cached_property
    def count(self) -> int:
        """k, the number of active weights."""
        return int(np.bitwise_count(self.bits).sum(dtype=np.int64))

    @property
    def density(self) -> float:
        """The share of the space's weights that is active."""
        return self.count / self.space.size if self.space.size else 0.0

    @property
    def sparsity(self) -> float:
        """The share of the space's weights that is frozen."""
        return 1 - self.density

    def to_bool(self, device: torch.device | str | None = None) -> Tensor:
        """The mask as a bool vector (D,)."""
        return _unpack(self.bits, 0, self.space.size).to(device or "cpu")

    def indices(self) -> Tensor:
        """The active weights' places, ascending, int64 (k,)."""
        return torch.from_numpy(np.flatnonzero(self.to_bool().numpy()))

    def tensor(self, name: str) -> Tensor:
        """The bool mask of one named tensor, in its shape. Only its part is unpacked."""
        if name not in self.space.names:
            raise FedsieveError(f"the mask has no tensor {name}")
        index = self.space.names.index(name)
        start, end = self.space.offsets[index : index + 2]
        return _unpack(self.bits, start, end).view(self.space.shapes[index])

    def tensor_bits(self, index: int) -> np.ndarray:
        """The bytes that hold tensor number `index`, with its neighbours' bits cleared.

        Masks of one space keep a tensor at the same place in these bytes, so they can be compared without unpacking.
        """
        start, end = self.space.offsets[index : index + 2]
        if start == end:
            return np.zeros(0, dtype=np.uint8)
        part = self.bits[start // 8 : math.ceil(end / 8)].copy()
        part[0] &= (0xFF << start % 8) & 0xFF
        part[-1] &= 0xFF >> -end % 8
        return part

    def counts(self) -> dict[str, int]:
        """The number of active weights of each tensor."""
        return {
            name: int(np.bitwise_count(self.tensor_bits(index)).sum(dtype=np.int64))
            for index, name in enumerate(self.space.names)
        }

    @property
    def tensor_counts(self) -> list[int]:
        """The number of active weights of each tensor, in the order of the space."""
        return list(self.counts().values())

    @property
    def mask_id(self) -> str:
        """The id, as a message states which mask its values belong to."""
        return self.id

    def check(self, space: ParamSpace) -> None:
        """Refuse another space than the mask's own, and say what differs."""
        if space.id != self.space.id:
            raise FedsieveError(f"the mask does not fit: {_difference(self.space, space)}")

    def __and__(self, other: "Mask") -> "Mask":
        return Mask(self.space, self.bits & self._bits_of(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Mask(self.space, self.bits | self._bits_of(other))

    def __xor__(self, other: "Mask") -> "Mask":
        return Mask(self.space, self.bits ^ self._bits_of(other))

    def __sub__(self, other: "Mask") -> "Mask":
        return Mask(self.space, self.bits & ~self._bits_of(other))

    def __invert__(self) -> "Mask":
        bits = ~self.bits
        if tail := self.space.size % 8:
            bits[-1] &= (1 << tail) - 1
        return Mask(self.space, bits)

    def __le__(self, other: "Mask") -> bool:
        """Whether every weight active here is active in `other`."""
        return not (self.bits & ~self._bits_of(other)).any()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        return self.space.id == other.space.id and np.array_equal(self.bits, other.bits)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"Mask({self.count:,} of {self.space.size:,} weights active, id {self.id[:8]})"

    def _bits_of(self, other: "Mask") -> np.ndarray:
        if not isinstance(other, Mask):
            raise TypeError(f"a mask combines with a mask, not with {type(other).__name__}")
        other.check(self.space)
        return other.bits

    def save(self, path: str | Path) -> None:
        """Write the mask, with the space it belongs to, as a safetensors file."""
        metadata = {
            "format": FORMAT,
            "names": json.dumps(self.space.names),
            "shapes": json.dumps(self.space.shapes),
            "id": self.id,
        }
        write_atomic(Path(path), with_notes(safetensors.numpy.save({"bits": self.bits}), metadata))

    @classmethod
    def load(cls, path: str | Path, space: ParamSpace | None = None) -> "Mask":
        """The mask in a file that `save` wrote; with `space`, one of another space is refused."""
        path = Path(path)
        if not path.is_file():
            raise FedsieveError(f"{path}: no such file. A mask is a file that calibration has saved")
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise FedsieveError("not a mask file")
                mask = cls(_read_space(metadata), file.get_tensor("bits"))
            if mask.id != metadata.get("id"):
                raise FedsieveError("its content does not match its id")
            if space is not None:
                mask.check(space)
        except Exception as error:  # a damaged file can fail anywhere in the parsers
            reason = (str(error) or type(error).__name__).splitlines()[0][:300]
            code = error.exit_code if isinstance(error, FedsieveError) else 1
            raise FedsieveError(f"{path}: cannot be used as a mask: {reason}", code) from None
        return mask


def _unpack(bits: np.ndarray, start: int, end: int) -> Tensor:
    """Bits start..end as a bool tensor (end - start,)."""
    first = start // 8
    unpacked = np.unpackbits(bits[first : math.ceil(end / 8)], bitorder="little")[start - 8 * first : end - 8 * first]
    return torch.from_numpy(unpacked.view(np.bool_))


def _read_space(metadata: dict[str, str]) -> ParamSpace:
    names, shapes = json.loads(metadata["names"]), json.loads(metadata["shapes"])
    if not (_all(names, str) and isinstance(shapes, list) and all(_all(shape, int) for shape in shapes)):
        raise FedsieveError("its names or shapes are damaged")
    if (
        len(names) != len(shapes)
        or len(set(names)) != len(names)
        or any(size < 0 for shape in shapes for size in shape)
    ):
        raise FedsieveError("its names or shapes are damaged")
    return ParamSpace(tuple(names), tuple(tuple(shape) for shape in shapes))


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _difference(one: ParamSpace, two: ParamSpace) -> str:
    """What tells two spaces apart: sizes, and the first tensor that differs."""
    sizes = f"its space has {_tensors(one.names)} and {one.size:,} weights, the other {_tensors(two.names)} and {two.size:,}"
    pairs = [list(zip(space.names, space.shapes, strict=True)) for space in (one, two)]
    for left, right in zip(*pairs, strict=False):
        if left != right:
            return f"{sizes}; the first difference is {left[0]} {left[1]} against {right[0]} {right[1]}"
    longer, which = (pairs[0], "its own") if len(pairs[0]) > len(pairs[1]) else (pairs[1], "the other")
    return f"{sizes}; only {which} has {longer[min(map(len, pairs))][0]}"


def _tensors(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) != 1)}"

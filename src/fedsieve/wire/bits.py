"""Masks as bytes: range coding (Martin 1979, by constriction) at each tensor's own density.

Eight weights are one symbol, which is ten times as fast as one by one and wastes an eighth as much.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import constriction
import numpy as np

from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace

queue, Categorical = constriction.stream.queue, constriction.stream.model.Categorical


class MessageError(FedsieveError):
    """A message that is refused: `reason` is one of a few fixed words, which the ledger counts."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence, exit_code=1)
        self.reason = reason


# One mask for all is sent to every newcomer, round after round: the last few are not made again.
@lru_cache(maxsize=4)
def pack_mask(mask: Mask, within: Mask | None = None) -> bytes:
    """The mask as bytes; with `within`, a known superset, only as a choice among its weights."""
    active = mask.to_bool().numpy()
    if within is not None:
        if not mask <= within:
            raise FedsieveError("a mask can be sent within another only if its weights are all active there")
        active = active[within.to_bool().numpy()]
    return pack(active, _sizes(mask.space, within))


def unpack_mask(data: bytes | memoryview, space: ParamSpace, within: Mask | None = None) -> Mask:
    """The mask that `pack_mask` made these bytes of."""
    return unpacked(bytes(data), space, within)


@lru_cache(maxsize=4)
def unpacked(data: bytes, space: ParamSpace, within: Mask | None) -> Mask:
    """See `unpack_mask`."""
    if within is not None:
        within.check(space)
    active = unpack(data, _sizes(space, within))
    if within is not None:
        whole = within.to_bool().numpy()
        whole[whole] = active
        active = whole
    return Mask(space, np.packbits(active, bitorder="little"))


def pack(active: np.ndarray, sizes: Sequence[int]) -> bytes:
    """A bool vector in parts of the given sizes: the count of each part, then what is where in one range-coded stream."""
    parts = np.split(active, np.cumsum(sizes)[:-1]) if sizes else []
    counts = [int(np.count_nonzero(part)) for part in parts]
    coder = queue.RangeEncoder()
    for part, count in zip(parts, counts, strict=True):
        symbols = np.packbits(part, bitorder="little").astype(np.int32)
        for start, end, model in _models(len(part), count):
            coder.encode(symbols[start:end], model)
    return pack_counts(counts, sizes) + coder.get_compressed().astype("<u4").tobytes()


def unpack(data: bytes | memoryview, sizes: Sequence[int]) -> np.ndarray:
    """The bool vector that `pack` made these bytes of. Other bytes that would give the same vector are refused."""
    counts, rest = unpack_counts(data, sizes)
    if len(rest) % 4:
        raise MessageError("length", f"a range-coded section of {len(rest):,} bytes is not made of words of four")
    coder = queue.RangeDecoder(np.frombuffer(rest, dtype="<u4").astype(np.uint32))
    active = np.zeros(sum(sizes), dtype=bool)
    end = 0
    for size, count in zip(sizes, counts, strict=True):
        end += size
        if count == size:
            active[end - size : end] = True
        try:
            symbols = [coder.decode(model, to - start) for start, to, model in _models(size, count)]
        except AssertionError:
            raise MessageError("mask", "a range-coded section holds no mask") from None
        if symbols:
            bits = np.unpackbits(np.concatenate(symbols).astype(np.uint8), bitorder="little")
            active[end - size : end] = bits[:size]
    # Decoders read what follows the end as zeros and take any count at its word; encoding again settles both.
    if pack(active, sizes) != bytes(data):
        raise MessageError("mask", "a range-coded section does not have the counts or the end that it states")
    return active


def pack_counts(counts: Iterable[int], sizes: Iterable[int]) -> bytes:
    """One number per part, each in as many bytes as the part's size needs."""
    return b"".join(count.to_bytes(_width(size), "little") for count, size in zip(counts, sizes, strict=True))


def unpack_counts(data: bytes | memoryview, sizes: Sequence[int]) -> tuple[list[int], memoryview]:
    """The numbers `pack_counts` wrote, none larger than its part, and the bytes after them."""
    rest, counts = memoryview(data), []
    for size in sizes:
        counts.append(int.from_bytes(rest[: _width(size)], "little"))
        if len(rest) < _width(size) or counts[-1] > size:
            raise MessageError("mask", f"a count of {counts[-1]:,} active weights of {size:,} cannot be")
        rest = rest[_width(size) :]
    return counts, rest


def entropy(counts: Iterable[int], sizes: Iterable[int]) -> float:
    """The bits that no code can do without, on average, for parts of which so many are active."""
    shares = (
        (size, part / size) for count, size in zip(counts, sizes, strict=True) for part in (count, size - count) if part
    )
    return sum(-size * share * math.log2(share) for size, share in shares)


def _sizes(space: ParamSpace, within: Mask | None) -> list[int]:
    return np.diff(space.offsets).tolist() if within is None else list(within.counts().values())


def _width(size: int) -> int:
    return (size.bit_length() + 7) // 8


def _models(size: int, count: int) -> list[tuple[int, int, Any]]:
    """Which symbols of a part have which model: whole bytes, and what is left over. A full or empty part has none."""
    if count in (0, size):
        return []
    parts = [(0, size // 8, 8), (size // 8, size // 8 + 1, size % 8)]
    return [(start, end, _model(count / size, bits)) for start, end, bits in parts if bits and end > start]


def _model(density: float, bits: int) -> Any:
    """The model of a symbol of so many independent bits. By products alone, which every machine rounds alike."""
    ones = np.bitwise_count(np.arange(2**bits))
    active = np.cumprod([1.0] + [density] * bits)
    frozen = np.cumprod([1.0] + [1.0 - density] * bits)
    return Categorical(active[ones] * frozen[bits - ones], perfect=False)

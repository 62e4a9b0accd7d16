"""Messages: k values of a mask or of a whole space behind a small header, and the mask itself where it is new.

header | mask section, if enclosed | positions, with top_k | values

All numbers are little-endian. Nothing in a message is believed until it is checked: a bad one is refused with a
`MessageError`, whatever its bytes are, and takes no more memory than a good one of the receiver's own space.
"""

import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.model.space import Layout, ParamSpace
from fedsieve.wire.bits import (
    MessageError,
    entropy,
    pack,
    pack_counts,
    pack_mask,
    unpack,
    unpack_counts,
    unpack_mask,
    unpacked,
)
from fedsieve.wire.values import BITS, Coding, Format, dequantise, finite, fits, largest, quantise

__all__ = [
    "Coding",
    "Decoded",
    "MessageError",
    "decode",
    "decode_many",
    "dense_bytes",
    "encode",
    "encode_many",
    "limit_bytes",
]

# Magic, version, format, group; length, round, client, k, bytes of the mask section; n; ids of space and mask.
HEADER = struct.Struct("<3sBHHIIIIIq8s16s")
CHECKSUM = struct.Struct("<Q")
OVERHEAD = HEADER.size + CHECKSUM.size
MAGIC, VERSION = b"fsv", 1
NO_MASK = bytes(16)
THREADED = {"cuda": 2**23}  # bytes from which threads are worth their start: two cores alone are slower by them
_R = TypeVar("_R")
_CODES = {name: code for code, name in enumerate(BITS)}


@dataclass(frozen=True, eq=False)
class Decoded:
    """What a message said: `values` (k,), float32 (float64 in fp64), in the order of the mask's or space's weights."""

    round: int
    client: int
    n: int
    format: Format
    mask_id: str | None
    values: Tensor
    mask: Mask | None = None  # only where the message enclosed it


def encode(
    values: Tensor | None,
    coding: Coding,
    over: Layout,
    *,
    round: int,
    client: int,
    n: int = 0,
    key: int = 0,
    enclose: bool = False,
    within: Mask | None = None,
    check: bool = True,
) -> bytes:
    """One message of the values (k,) of a mask's active weights, or of all weights of a space. See `encode_many`."""
    (message,) = encode_many(
        None if values is None else values[None],
        coding,
        over,
        round=round,
        clients=[client],
        ns=[n],
        keys=[key],
        enclose=enclose,
        within=within,
        check=check,
    )
    return bytes(message)


def encode_many(
    values: Tensor | None,
    coding: Coding,
    over: Layout,
    *,
    round: int,
    clients: Sequence[int],
    ns: Sequence[int],
    keys: Sequence[int] | None = None,
    enclose: bool = False,
    within: Mask | None = None,
    check: bool = True,
) -> list[memoryview]:
    """Messages of rows of values (clients, k), on any device, of the active weights of a mask or of a whole space.

    `ns` are the clients' weights in an average; 64-bit `keys` address the draws that int8 and int4 round by. `enclose`
    adds the mask, `within` a mask that the receiver knows to contain it. Values that are not finite, or not in their
    format, are refused; without `check` they travel as they are, and it is the receiver who refuses.
    """
    if values is None:
        values = torch.zeros(len(clients), 0)
    if not len(values) == len(clients) == len(ns) or (keys is not None and len(keys) != len(clients)):
        raise FedsieveError("a batch of messages needs one row of values, client, n and key for each")
    k = values.shape[1]
    if k != (wanted := 0 if coding.format == "none" else over.count):
        raise FedsieveError(f"a message of {wanted:,} values in {coding.format} cannot be made of {k:,}")
    if check and not (good := fits(values, coding)).all():
        number = int(good.long().argmin())
        size = float(values[number].abs().amax())
        advice = ", which bf16 and int8 are not" if coding.format == "fp16" and math.isfinite(size) else ""
        raise FedsieveError(f"client {clients[number]}: {coding.format} is too narrow for a value of {size:g}{advice}")
    positions = [b""] * len(clients)
    if coding.top_k is not None and values.numel():
        chosen = largest(values, coding.kept(k))
        values = values[chosen].view(len(values), -1)
        positions = [pack(row, [k]) for row in chosen.cpu().numpy()]
    words = None if keys is None else torch.tensor(np.array(keys, dtype=np.uint64).view(np.int64), device=values.device)
    payload = _fetched(quantise(values, coding, words)).numpy()
    section = _section(over, coding, enclose, within)

    def seal(client: int, n: int, place: bytes, row: np.ndarray) -> memoryview:
        return _seal(coding, round, client, n, over, section, place, row)

    return _side_by_side(seal, zip(clients, ns, positions, payload, strict=True), payload.nbytes, values.device)


def decode(
    message: bytes | memoryview,
    coding: Coding,
    over: Layout,
    *,
    enclosed: bool = False,
    within: Mask | None = None,
    round: int | None = None,
    client: int | None = None,
    device: torch.device | str = "cpu",
) -> Decoded:
    """What a message says, or a `MessageError`. See `decode_many`."""
    clients = None if client is None else [client]
    (result,) = decode_many(
        [message], coding, over, enclosed=enclosed, within=within, round=round, clients=clients, device=device
    )
    if isinstance(result, MessageError):
        raise result
    return result


def decode_many(
    messages: Sequence[bytes | memoryview],
    coding: Coding,
    over: Layout,
    *,
    enclosed: bool = False,
    within: Mask | None = None,
    round: int | None = None,
    clients: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> list[Decoded | MessageError]:
    """For each message what it says, or why it is refused; values lie on `device` as rows of one tensor.

    Those of a single message of `encode_many` may lie where the message does: they are to be read, not changed.

    The receiver states what it expects: the coding, and `over` the mask that the values belong to, or the space where they
    are of all its weights or, if `enclosed`, of a mask in the message. `round` and `clients` refuse messages of others.
    """

    def look(number: int, message: bytes | memoryview) -> _Opened | MessageError:
        try:
            opened = _open(message, coding, over, enclosed, within)
            if round is not None and opened.message.round != round:
                raise MessageError("round", f"a message of round {opened.message.round} came in round {round}")
            if clients is not None and opened.message.client != clients[number]:
                raise MessageError("client", f"client {opened.message.client} sent a message as {clients[number]}")
        except MessageError as error:
            return error
        return opened

    results: list[Decoded | MessageError] = []
    batches: dict[int, list[tuple[int, _Opened]]] = {}
    size = sum(map(len, messages))
    for number, opened in enumerate(_side_by_side(look, enumerate(messages), size, torch.device(device))):
        if isinstance(opened, MessageError):
            results.append(opened)
        else:
            results.append(opened.message)
            batches.setdefault(opened.k, []).append((number, opened))
    for k, batch in batches.items():
        values = _values([opened for _, opened in batch], coding, k, device)
        for (number, opened), row, good in zip(batch, values, finite(values).tolist(), strict=True):
            results[number] = (
                replace(opened.message, values=row)
                if good
                else MessageError("not finite", f"client {opened.message.client} sent values that are not finite")
            )
    return results


def limit_bytes(mask: Mask, bits_per_value: float, enclosed: bool) -> float:
    """The information limit of a message: k values of so many bits, and the entropy of each tensor's part of the mask."""
    bits = mask.count * bits_per_value
    if enclosed:
        bits += entropy(mask.counts().values(), np.diff(mask.space.offsets).tolist())
    return bits / 8


def dense_bytes(space: ParamSpace) -> int:
    """What all weights of a space take in fp32."""
    return 4 * space.size


@dataclass(frozen=True)
class _Opened:
    """A message whose frame is sound: all but its values, and where these are."""

    message: Decoded
    k: int
    positions: np.ndarray | None
    payload: memoryview


def _seal(
    coding: Coding,
    round: int,
    client: int,
    n: int,
    over: Layout,
    section: bytes,
    positions: bytes,
    payload: np.ndarray,
) -> memoryview:
    """The parts of a message behind a header and its checksum.

    In numpy's memory, which comes in large pages: 86 MB in small ones take five times as long to get as to fill.
    """
    length = OVERHEAD + len(section) + len(positions) + payload.nbytes
    if not (0 <= n < 2**63 and all(0 <= number < 2**32 for number in (round, client, length))):
        raise FedsieveError(f"a header cannot hold round {round}, client {client}, n {n} and length {length:,}")
    header = HEADER.pack(
        MAGIC,
        VERSION,
        _CODES[coding.format],
        coding.group if coding.grouped else 0,
        length,
        round,
        client,
        over.count,
        len(section),
        n,
        bytes.fromhex(over.space.id),
        _mask_id(over),
    )
    body = (section, positions, payload)
    first = (payload.nbytes - length) % 8  # so that the values begin where any number may
    message = np.empty(first + length, dtype=np.uint8)[first:]
    end = 0
    for part in (header, CHECKSUM.pack(_checksum(header, *body)), *body):
        start, end = end, end + len(part)
        message[start:end] = np.frombuffer(part, dtype=np.uint8)
    return message.data


def _open(message: bytes | memoryview, coding: Coding, over: Layout, enclosed: bool, within: Mask | None) -> _Opened:
    """Check everything about a message but its values."""
    if len(message) < OVERHEAD:
        raise MessageError("truncated", f"{len(message)} bytes are too few for a message")
    view = memoryview(message)
    magic, version, code, group, length, round, client, k, section_bytes, n, space_id, mask_id = HEADER.unpack(
        view[: HEADER.size]
    )
    if magic != MAGIC:
        raise MessageError("magic", "the bytes are no message of fedsieve's")
    if version != VERSION:
        raise MessageError("version", f"the message is of version {version}, and {VERSION} is spoken here")
    if length != len(message):
        reason = "truncated" if length > len(message) else "length"
        raise MessageError(reason, f"a message of {length:,} bytes came as {len(message):,}")
    body = view[OVERHEAD:]
    if CHECKSUM.unpack(view[HEADER.size : OVERHEAD])[0] != _checksum(view[: HEADER.size], body):
        raise MessageError("checksum", "the message was damaged on its way")
    if (code, group) != (_CODES[coding.format], coding.group if coding.grouped else 0):
        raise MessageError("format", f"the values are not in {coding.format} as agreed")
    if n < 0:
        raise MessageError("n", f"a weight of {n} in the average is negative")
    space = over.space
    if space_id.hex() != space.id:
        raise MessageError("space", "the message is about another space of weights")
    if section_bytes > len(body):
        raise MessageError("length", "the mask section is longer than the message")
    section, rest = body[:section_bytes], body[section_bytes:]

    if enclosed:
        mask = _unpack_coordinates(section, space) if coding.format == "coo" else unpack_mask(section, space, within)
        expected: Layout = mask
    else:
        mask, expected = None, over
        if bytes(section) != _section(over, coding, False, None):
            raise MessageError("mask", "the mask section is not as agreed")
    if mask_id != _mask_id(expected):
        raise MessageError("mask", "the values belong to another mask")
    if k != expected.count:
        raise MessageError("count", f"{k:,} values were sent for {expected.count:,} weights")
    sent = coding.size(coding.kept(k))
    if len(rest) < sent or (len(rest) > sent and (coding.top_k is None or not k)):
        raise MessageError("length", f"{len(rest):,} bytes cannot be {k:,} values in {coding.format}")
    positions = None
    if coding.top_k is not None and k:
        positions = unpack(rest[: len(rest) - sent], [k])
        if np.count_nonzero(positions) != coding.kept(k):
            raise MessageError("count", f"{np.count_nonzero(positions):,} values were sent, not {coding.kept(k):,}")
    stated = mask_id.hex() if mask_id != NO_MASK else None
    return _Opened(
        Decoded(round, client, n, coding.format, stated, torch.empty(0), mask), k, positions, rest[len(rest) - sent :]
    )


def _values(batch: list[_Opened], coding: Coding, k: int, device: torch.device | str) -> Tensor:
    """The values (messages, k) of sound frames."""
    kept = coding.kept(k)
    pinned, own = torch.device(device).type == "cuda", isinstance(batch[0].payload.obj, np.ndarray)
    if len(batch) == 1 and own and batch[0].payload and not pinned:
        payload = torch.frombuffer(batch[0].payload, dtype=torch.uint8)[None]
    else:
        # A GPU copies pinned memory four times as fast.
        payload = torch.empty(len(batch), coding.size(kept), dtype=torch.uint8, pin_memory=pinned)

        def fill(row: np.ndarray, opened: _Opened) -> None:
            row[:] = np.frombuffer(opened.payload, dtype=np.uint8)

        _side_by_side(fill, zip(payload.numpy(), batch, strict=True), payload.nbytes, torch.device(device))
    sent = dequantise(payload.to(device), kept, coding)
    chosen = [opened.positions for opened in batch if opened.positions is not None]
    if not chosen:
        return sent
    values = torch.zeros(len(batch), k, dtype=sent.dtype, device=sent.device)
    values[torch.from_numpy(np.stack(chosen)).to(sent.device)] = sent.flatten()
    return values


def _mask_id(over: Layout) -> bytes:
    return NO_MASK if over.mask_id is None else bytes.fromhex(over.mask_id)


def _fetched(payload: Tensor) -> Tensor:
    """Bytes on the host. A GPU writes pinned memory several times as fast."""
    if payload.device.type != "cuda":
        return payload.cpu()
    return torch.empty_like(payload, device="cpu", pin_memory=True).copy_(payload)


def _side_by_side(
    work: Callable[..., _R], items: Iterable[tuple[Any, ...]], size: int, device: torch.device
) -> list[_R]:
    """`work` of each of the items, in threads where a GPU waits for megabytes."""
    if size < THREADED.get(device.type, math.inf):
        return [work(*item) for item in items]
    return list(_threads(os.getpid()).map(lambda item: work(*item), items))


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Started once: a fork has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count())


def _checksum(*parts: Any) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def _section(over: Layout, coding: Coding, enclose: bool, within: Mask | None) -> bytes:
    """What a message says of its mask: nothing, the mask, or, in coo, always the indices."""
    if coding.format == "coo":
        return _coordinates(over)  # type: ignore[arg-type]  # both layouts are hashable
    if not enclose:
        return b""
    if not isinstance(over, Mask):
        raise FedsieveError("the values of a whole space have no mask to enclose")
    return pack_mask(over, within)


def forget() -> None:
    """Let go of masks that were coded lately, so that coding one takes what it takes for the first time."""
    for known in (pack_mask, unpacked, _coordinates):
        known.cache_clear()


@lru_cache(maxsize=2)
def _coordinates(over: Layout) -> bytes:
    """The number of weights of each tensor, then one int64 per weight and dimension, tensor after tensor."""
    space, counts = over.space, over.tensor_counts
    indices = [
        np.stack(np.nonzero(over.tensor(name).numpy()), axis=1).astype("<i8").tobytes()
        for name, shape in zip(space.names, space.shapes, strict=True)
        if shape
    ]
    return pack_counts(counts, np.diff(space.offsets).tolist()) + b"".join(indices)


def _unpack_coordinates(section: memoryview, space: ParamSpace) -> Mask:
    """The mask that `_coordinates` made these bytes of."""
    sizes = np.diff(space.offsets).tolist()
    counts, rest = unpack_counts(section, sizes)
    if len(rest) != sum(8 * count * len(shape) for count, shape in zip(counts, space.shapes, strict=True)):
        raise MessageError("length", "there are not as many indices as the counts say")
    active = np.zeros(space.size, dtype=bool)
    for start, count, shape in zip(space.offsets, counts, space.shapes, strict=False):
        length = 8 * count * len(shape)
        indices, rest = np.frombuffer(rest[:length], dtype="<i8").reshape(count, len(shape)), rest[length:]
        if ((indices < 0) | (indices >= shape)).any():
            raise MessageError("mask", "an index lies outside its tensor")
        strides = np.array([math.prod(shape[axis + 1 :]) for axis in range(len(shape))], dtype=np.int64)
        places = start + indices @ strides
        if (np.diff(places) <= 0).any():
            raise MessageError("mask", "the indices of a tensor do not ascend")
        active[places] = True
    return Mask(space, np.packbits(active, bitorder="little"))

"""Envelopes: what travels between a server and a site that is elsewhere. A head that says what is asked or answered, and
messages of the codec behind it.

magic, version, length of the head, checksum of the head | head (JSON) | messages

Nothing in an envelope is believed until it is checked: a bad one is refused with a `MessageError`.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import xxhash

from fedsieve.wire.bits import MessageError

FRAME = struct.Struct("<3sBIQ")
MAGIC, VERSION = b"fse", 1
LENGTHS = "lengths"  # the key of the head that says how long each message is


def wrap(head: Mapping[str, Any], messages: Sequence[bytes | memoryview] = ()) -> bytes:
    """One envelope."""
    lengths = [len(message) for message in messages]
    text = json.dumps({**head, LENGTHS: lengths}, allow_nan=False, separators=(",", ":")).encode()
    return b"".join((FRAME.pack(MAGIC, VERSION, len(text), xxhash.xxh3_64_intdigest(text)), text, *messages))


def unwrap(envelope: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The head of an envelope, and its messages."""
    if len(envelope) < FRAME.size:
        raise MessageError("truncated", f"{len(envelope)} bytes are too few for an envelope")
    magic, version, size, checksum = FRAME.unpack_from(envelope)
    if magic != MAGIC:
        raise MessageError("magic", "the bytes are no envelope of fedsieve's")
    if version != VERSION:
        raise MessageError("version", f"the envelope is of version {version}, and {VERSION} is spoken here")
    text, rest = envelope[FRAME.size : FRAME.size + size], FRAME.size + size
    if len(text) != size:
        raise MessageError("truncated", "the head of the envelope is cut")
    if xxhash.xxh3_64_intdigest(text) != checksum:
        raise MessageError("checksum", "the head of the envelope was damaged on its way")
    try:
        head = json.loads(text)
        lengths = head.pop(LENGTHS)
        if not all(type(length) is int and length >= 0 for length in lengths):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise MessageError("head", "the head of the envelope is not as agreed") from None
    if rest + sum(lengths) != len(envelope):
        raise MessageError("length", f"{sum(lengths):,} bytes of messages came as {len(envelope) - rest:,}")
    cuts = accumulate(lengths, initial=rest)
    return head, [envelope[start:end] for start, end in pairwise(cuts)]

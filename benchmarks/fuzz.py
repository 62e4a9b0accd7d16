"""A million damaged, forged, replayed and misplaced messages: the decoder and the secure sum refuse each or are right.

Half of them are sealed again, with a length and a checksum that fit, so that what lies behind these checks is reached.
Everything is drawn from one seed, so that what fails can be repeated.
"""

import copy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash

from benchmarks.result import Result, columns
from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.privacy import secagg
from fedsieve.wire import codec
from fedsieve.wire.codec import Coding, MessageError, decode, encode

Rng = np.random.Generator
T = TypeVar("T")
EXACT = ("fp64", "fp32", "bf16", "fp16", "coo", "none")  # formats whose values give the same bytes again
SPACE = ParamSpace(("a", "b", "c"), ((5, 7), (16,), ()))


@dataclass
class Tally:
    """What came of the messages so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0

    def refused(self, take: Callable[[bytes], Any], message: bytes) -> tuple[bool, Any]:
        """Whether a receiver refuses a message, and what it answers where it does not. Any other error is a fault."""
        began = time.perf_counter()
        try:
            answer = take(message)
        except MessageError:
            answer = None
            self.outcomes["refused"] += 1
            return True, None
        except Exception as error:
            raise FedsieveError(f"{type(error).__name__} ({error}) at the message {message.hex()}", 1) from error
        finally:
            self.slowest = max(self.slowest, time.perf_counter() - began)
        self.outcomes["taken"] += 1
        return False, answer

    @property
    def messages(self) -> int:
        """How many were tried."""
        return self.outcomes["refused"] + self.outcomes["taken"]


def fuzz(device: torch.device, smoke: bool) -> Result:
    """Half a million messages each through the decoder and through both sides of secure sums."""
    result = Result(
        columns(
            "receiver | messages | refused | taken, and right | sums exact | sums given up | seconds | slowest, ms"
        ),
        note="Taken messages of the decoder are finite, as long as agreed and, where the format keeps values, encode to the "
        "same bytes again. A sum that took some is the exact sum of what was sent, or is given up without a result. "
        "There is no ratio, since nothing else reads these messages.",
        limit="none: it counts outcomes, and its seconds show only that nothing hangs",
    )
    for name, attempt in (("decoder", decoder), ("secure sum", secure_sums)):
        began, rng, tally = time.perf_counter(), np.random.default_rng(0), Tally()
        while tally.messages < (2000 if smoke else 500_000):
            attempt(rng, tally)
        outcomes = tally.outcomes
        counts = [outcomes[name] for name in ("refused", "taken", "exact", "given up")]
        took = time.perf_counter() - began
        result.rows.append((name, tally.messages, *counts, took, 1e3 * tally.slowest))
    return result


# --- the decoder -----------------------------------------------------------------------------------------------------


def decoder(rng: Rng, tally: Tally) -> None:
    """One good message in a format of its own, and many bad ones made of it and of others."""
    names = ("fp64", "fp32", "bf16", "fp16", "int8", "int4", "sign", "coo", "none")
    form = names[rng.integers(len(names))]
    top_k = float(rng.choice([0.1, 0.5])) if form not in ("coo", "none") and rng.random() < 0.3 else None
    coding = Coding(form, int(rng.choice([8, 64])), top_k)  # type: ignore[arg-type]
    mask = Mask.from_bool(SPACE, torch.from_numpy(rng.random(SPACE.size) < rng.choice([0.0, 0.1, 0.9, 1.0])))
    within = mask | Mask.from_bool(SPACE, torch.from_numpy(rng.random(SPACE.size) < 0.5))
    enclose = form == "none" or rng.random() < 0.4
    known = within if enclose and form != "coo" and rng.random() < 0.5 else None
    over = mask if enclose or rng.random() < 0.7 else SPACE

    def made(values: torch.Tensor | None, over: Mask | ParamSpace, coding: Coding, **numbers: int) -> bytes:
        return encode(values, coding, over, enclose=enclose, within=known, **numbers)  # type: ignore[arg-type]

    def one() -> bytes:
        count = over.count if isinstance(over, Mask) else over.size
        values = None if form == "none" else torch.from_numpy(rng.normal(size=count))
        return made(values, over, coding, round=3, client=7, n=11, key=int(rng.integers(2**62)))

    expected = over.space if enclose and isinstance(over, Mask) else over

    def take(message: bytes) -> codec.Decoded:
        return decode(message, coding, expected, enclosed=enclose, within=known, round=3, client=7)

    good, other = one(), one()
    take(good)
    for _ in range(50):
        bad = _mutated(rng, good, [other, good[::-1]], codec.HEADER.size, _sealed_again)
        refused, found = tally.refused(take, bad)
        if refused:
            continue
        over_now: Mask | ParamSpace = found.mask if enclose else over
        count = 0 if form == "none" else over_now.count if isinstance(over_now, Mask) else over_now.size
        right = found.values.shape == (count,) and bool(found.values.isfinite().all()) and found.client == 7
        if right and form in EXACT and top_k is None:
            values = None if form == "none" else found.values
            right = made(values, over_now, coding, round=found.round, client=found.client, n=found.n) == bad
        if not right:
            raise FedsieveError(f"a message of {form} was taken for what it is not: {bad.hex()}", 1)


def _sealed_again(message: bytes) -> bytes:
    """The message with the length and the checksum that go with it."""
    fields = list(codec.HEADER.unpack(message[: codec.HEADER.size]))
    fields[4] = len(message)
    header, body = codec.HEADER.pack(*fields), message[codec.OVERHEAD :]
    return header + codec.CHECKSUM.pack(xxhash.xxh3_64_intdigest(header + body)) + body


# --- secure sums -----------------------------------------------------------------------------------------------------


def secure_sums(rng: Rng, tally: Tally) -> None:
    """One secure sum in which bad messages come before every good one, to clients and server, and some clients vanish."""
    count, bits = int(rng.integers(3, 6)), int(rng.choice([16, 32, 64]))
    threshold = count // 2 + 1
    ids = np.sort(rng.choice(20, count, replace=False)).tolist()
    sent = {client: rng.integers(0, 2**bits, 4, dtype=f"<u{bits // 8}") for client in ids}
    clients = {client: secagg.SumClient(client, values, 0, threshold) for client, values in sent.items()}
    server = secagg.SumServer(ids, threshold, bits, 4)
    gone = {client: int(rng.integers(4)) for client in ids if rng.random() < 0.1}
    seen: list[bytes] = []
    tainted = False  # whether a bad message was taken: then whoever it concerns may be refused later
    try:
        while messages := server.next():
            phase = server.phase
            for client, message in messages.items():
                if gone.get(client, 4) <= phase:
                    continue
                taken, answer, clients[client] = _through(
                    rng, tally, clients[client], secagg.SumClient.reply, message, seen
                )
                tainted |= taken is not message
                if answer is None:
                    if not tainted:
                        raise FedsieveError(f"client {client} refused a good message: {message.hex()}", 1)
                    continue

                def receive(server: secagg.SumServer, reply: bytes, client: int = client) -> bool:
                    server.receive(client, reply)
                    return True

                taken, accepted, server = _through(rng, tally, server, receive, answer, seen)
                tainted |= taken is not answer
                if accepted is None and not tainted:
                    raise FedsieveError(f"the server refused a good answer: {answer.hex()}", 1)
                if accepted and phase == 2 and taken is not answer:  # a client may send what it likes
                    at = len(answer) - sent[client].nbytes
                    change = [np.frombuffer(body[at:], sent[client].dtype) for body in (taken, answer)]
                    sent[client] = sent[client] + change[0] - change[1]
    except secagg.Aborted:
        left = count - len(gone)
        if not tainted and left >= threshold:
            raise
        tally.outcomes["given up"] += 1
        return
    expected = np.sum([sent[client] for client in server.survivors], axis=0, dtype=sent[ids[0]].dtype)
    if server.total is None or not (server.total == expected).all():
        raise FedsieveError("a secure sum is wrong", 1)
    tally.outcomes["exact"] += 1


def _through(
    rng: Rng, tally: Tally, receiver: T, take: Callable[[T, bytes], Any], good: bytes, seen: list[bytes]
) -> tuple[bytes, Any, T]:
    """Bad messages, then the good one: which was the last to be taken, what came back (None: it was refused), and the receiver.

    Of the bad ones that are taken a few stay so; after the others the receiver is as it was before.
    """
    seen.append(good)
    before = copy.deepcopy(receiver)
    for _ in range(20):
        bad = _mutated(rng, good, seen, secagg.HEADER.size, _summed_again)
        if bad == good:
            continue
        refused, answer = tally.refused(partial(take, receiver), bad)
        if not refused:
            if rng.random() < 0.05:
                return bad, answer, receiver
            receiver = copy.deepcopy(before)
    try:
        return good, take(receiver, good), receiver
    except MessageError:
        return good, None, receiver


def _summed_again(message: bytes) -> bytes:
    fields = list(secagg.HEADER.unpack(message[: secagg.HEADER.size]))
    fields[-1] = len(message)
    header, body = secagg.HEADER.pack(*fields), message[secagg.OVERHEAD :]
    return header + secagg.CHECKSUM.pack(xxhash.xxh3_64_intdigest(header + body)) + body


# --- damage ----------------------------------------------------------------------------------------------------------


def _mutated(rng: Rng, message: bytes, others: list[bytes], header: int, seal: Callable[[bytes], bytes]) -> bytes:
    """A message with something done to it, and perhaps a length and checksum that hide it."""
    start = header + 8  # of the body
    bad = bytearray(message)
    first, second = sorted(rng.integers(0, len(bad) + 1, 2).tolist())
    match rng.integers(9):
        case 0:
            for place in rng.integers(0, 8 * len(bad), rng.integers(1, 4)).tolist():
                bad[place // 8] ^= 1 << place % 8
        case 1:
            del bad[first:]
        case 2:
            bad += rng.bytes(int(rng.integers(1, 100)))
        case 3:
            bad[first:second] = rng.bytes(second - first)
        case 4:
            del bad[first:second]
        case 5:
            bad[first:first] = bad[first:second]
        case 6:  # replayed or reordered, whole or behind the right header
            other = others[rng.integers(len(others))]
            bad = bytearray(other if rng.random() < 0.5 else message[:start] + other[start:])
        case 7:  # a field of the header, or a number in the body, at one of its ends
            place = int(rng.integers(len(bad)))
            bad[place : place + 4] = [bytes(4), b"\xff" * 4, bytes(range(4))][rng.integers(3)]
            del bad[len(message) :]
        case _:  # whole rows lost, doubled or exchanged
            width = int(rng.choice([4, 68, 80, 16, 2]))
            rows = [bytes(bad[at : at + width]) for at in range(start, len(bad), width)]
            if rng.random() < 0.5:
                rows = [row for row in rows if rng.random() < 0.8]
            elif rows:
                rows = [rows[place] for place in rng.integers(0, len(rows), rng.integers(0, len(rows) + 2)).tolist()]
            bad = bad[:start] + b"".join(rows)
    return seal(bytes(bad)) if len(bad) >= start and rng.random() < 0.5 else bytes(bad)

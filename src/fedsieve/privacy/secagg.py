"""Secure aggregation (Bonawitz et al. 2017): a server that follows the protocol learns the sum of vectors and no more.

`SumClient` and `SumServer` exchange bytes only. In each of four phases the server sends to all that are left and each answers:

    phase        server to client                       client to server
    0 advertise  threshold, width, count                two public keys: for shares, for pads
    1 share      everyone's public keys                 a commitment; shares of its own secrets, encrypted for each peer
    2 pad        the shares meant for this client       whose pads it uses; values + self-pad + these pads, in Z_2^b
    3 reveal     whose values arrived                   shares: of these the self-pad's seed, of the rest the pad key

Pads of pairs cancel in the sum. A client may vanish before any phase; those whose values arrived are in the sum, exactly.
Whose key was revealed has its self-pad, whose self-pad was revealed has its key: no client ever gives out both.
"""

import hashlib
import math
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash

from fedsieve.errors import FedsieveError
from fedsieve.privacy.pads import (
    KEY,
    NONCE,
    SEED,
    TAG,
    add_pad,
    agree,
    combine,
    decrypt,
    derive,
    encrypt,
    new_key,
    public,
    split,
)
from fedsieve.wire.bits import MessageError
from fedsieve.wire.ledger import Direction

PHASES = ("advertise", "share", "pad", "reveal")
SERVER = 2**32 - 1  # the sender of the server's messages
MAGIC, VERSION = b"fsp", 1

# Magic, version, phase; session; round, sender, length.
HEADER = struct.Struct("<3sBB16sIII")
CHECKSUM = struct.Struct("<Q")
OVERHEAD = HEADER.size + CHECKSUM.size
_TERMS = struct.Struct("<IBI")  # threshold, bytes of a value, values
_KEYS = struct.Struct(f"<I{KEY}s{KEY}s")  # client, its public keys
_SEALED = struct.Struct(f"<I{NONCE + SEED + KEY + TAG}s")  # client, its encrypted share
_SURVIVOR = struct.Struct("<I")
_COMMITMENT = _DIGEST = 16  # bytes
_SINGLE, _TABLES = ("session", "invitation", "binding", "share_key", "pad_key", "seed"), ("keys", "secrets", "shares")


class Aborted(FedsieveError):
    """A secure sum that ended without a result. The messages that went until then are in `traffic`."""

    def __init__(self, phase: int, answered: int, threshold: int, why: str = "too few clients are left") -> None:
        counts = f"{answered} answered, and {threshold} are needed"
        super().__init__(f'the secure sum was aborted in phase "{PHASES[phase]}": {why} ({counts})', exit_code=1)
        self.phase, self.answered, self.threshold = phase, answered, threshold
        self.traffic: list[Sent] = []


class SumClient:
    """One client in one secure sum. Its state is plain values, so that it can be kept between messages."""

    def __init__(self, client: int, values: np.ndarray, round: int = 0, threshold: int = 2) -> None:
        """`values` (count,) are unsigned integers of 16, 32 or 64 bits; a session with a lower threshold is refused."""
        if values.ndim != 1 or values.dtype != _dtype(8 * values.itemsize):
            raise FedsieveError(f"secure sums are of vectors of unsigned integers, not {values.dtype}{values.shape}")
        self.id, self.values, self.round = client, values, round
        self.phase, self.session, self.invitation = 0, b"", b""
        self.threshold, self.binding = max(threshold, 2), b""
        self.share_key = self.pad_key = self.seed = b""
        self.keys: dict[int, bytes] = {}  # the public keys for pads, of all participants,
        self.secrets: dict[int, bytes] = {}  # and what is agreed with each peer, for shares
        self.shares: dict[int, bytes] = {}  # one of each client's seed and pad key, in one piece

    def reply(self, message: bytes) -> bytes:
        """The answer to the server's message of this phase. One that is refused (`MessageError`) changes nothing."""
        session, body = _open(message, self.phase, self.round, SERVER, self.session)
        answer = (self._advertise, self._share, self._pad, self._reveal)[self.phase](message, body)
        self.session = session
        self.phase += 1
        return _seal(self.phase - 1, self.round, self.id, session, answer)

    def state(self) -> dict[str, Any]:
        """All but the values, as JSON can hold it. Whoever reads it can take the pads off: keep it as secret as they."""
        single = {name: getattr(self, name).hex() for name in _SINGLE}
        tables = {name: {str(key): value.hex() for key, value in getattr(self, name).items()} for name in _TABLES}
        return {"phase": self.phase, "threshold": self.threshold, **single, **tables}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be the client again that gave this `state`."""
        self.phase, self.threshold = state["phase"], state["threshold"]
        for name in _SINGLE:
            setattr(self, name, bytes.fromhex(state[name]))
        for name in _TABLES:
            setattr(self, name, {int(key): bytes.fromhex(value) for key, value in state[name].items()})

    def _advertise(self, message: bytes, body: memoryview) -> bytes:
        """Take the terms; make keys."""
        ((threshold, width, count),) = _rows(_TERMS, body, 1)
        if (width, count) != (self.values.itemsize, len(self.values)):
            raise MessageError("count", f"{count:,} values of {width} bytes are not what client {self.id} has to send")
        if threshold < self.threshold:
            raise MessageError("threshold", f"a threshold of {threshold} is lower than the {self.threshold} agreed on")
        self.threshold, self.invitation = threshold, message
        self.share_key, self.pad_key = new_key(), new_key()
        return public(self.share_key) + public(self.pad_key)

    def _share(self, message: bytes, body: memoryview) -> bytes:
        """Agree on a secret with each peer; share the pad key and a new seed with all."""
        rows = _rows(_KEYS, body)
        everyone = _ascending([client for client, *_ in rows])
        if not self.threshold <= len(everyone) < 2 * self.threshold:
            raise MessageError("threshold", f"{self.threshold} is no majority of {len(everyone)} clients")
        if (self.id, public(self.share_key), public(self.pad_key)) not in rows:
            raise MessageError("key", f"client {self.id} is not there with the keys it sent")
        if len({key for _, *keys in rows for key in keys}) < 2 * len(rows):
            raise MessageError("key", "a public key is there twice")
        binding = _binding(self.invitation, message)
        secrets = {client: agree(self.share_key, key) for client, key, _ in rows if client != self.id}
        seed = os.urandom(SEED)
        parts = (split(secret, self.threshold, len(everyone)) for secret in (seed, self.pad_key))
        shares = dict(zip(everyone, map(b"".join, zip(*parts, strict=True)), strict=True))
        self.binding, self.seed, self.secrets = binding, seed, secrets
        self.keys, self.shares = {client: key for client, _, key in rows}, {self.id: shares[self.id]}
        return _commitment(seed, binding, self.id) + b"".join(
            encrypt(derive(secret, b"share", binding, self.id, peer), shares[peer]) for peer, secret in secrets.items()
        )

    def _pad(self, message: bytes, body: memoryview) -> bytes:
        """Take the peers' shares; pad the values."""
        rows = _rows(_SEALED, body)
        peers = _ascending([client for client, _ in rows])
        if not self.secrets.keys() >= set(peers):
            raise MessageError("participants", "shares came from clients that sent no keys")
        if len(peers) + 1 < self.threshold:
            raise MessageError("threshold", f"{len(peers) + 1} clients are left, and {self.threshold} are needed")
        shares = {
            peer: decrypt(derive(self.secrets[peer], b"share", self.binding, peer, self.id), sealed)
            for peer, sealed in rows
        }
        padded = self.values.copy()
        add_pad(padded, _self_pad(self.seed, self.binding, self.id))
        for peer in peers:
            key = _pair_pad(self.pad_key, self.keys[peer], self.binding, self.id, peer)
            add_pad(padded, key, 1 if self.id < peer else -1)
        self.shares |= shares
        return b"".join((_participants(self.binding, self.shares), padded.data))

    def _reveal(self, message: bytes, body: memoryview) -> bytes:
        """Give out one of the two shares of every client. The request cannot ask for both: it names survivors only."""
        survivors = set(_ascending([client for (client,) in _rows(_SURVIVOR, body)]))
        if len(survivors) < self.threshold:
            raise MessageError("threshold", f"{len(survivors)} clients are left, and {self.threshold} are needed")
        if self.id not in survivors or not survivors <= self.shares.keys():
            raise MessageError("participants", f"the survivors are not some of those whom client {self.id} knows")
        answer = b"".join(
            share[:SEED] if peer in survivors else share[SEED:] for peer, share in sorted(self.shares.items())
        )
        self.share_key = self.pad_key = self.seed = b""
        self.shares, self.secrets = {}, {}
        return answer


class SumServer:
    """The server of one secure sum: `next` opens a phase, `receive` takes its answers; then `survivors` and `total`."""

    def __init__(self, clients: Collection[int], threshold: int, bits: int, count: int, round: int = 0) -> None:
        """The sum of `count` values of so many bits over at least `threshold` of the clients, more than half of them."""
        check_threshold(threshold, len(set(clients)))
        if (
            not 0 <= min(clients) <= max(clients) < SERVER
            or max(round, OVERHEAD + _DIGEST + count * bits // 8) >= 2**32
        ):
            raise FedsieveError(f"a header cannot hold these clients, round {round} or {count:,} values")
        self.threshold, self.dtype, self.round = threshold, _dtype(bits), round
        self.session, self.phase = os.urandom(16), -1
        self.left = sorted(set(clients))  # who may answer in this phase
        self.answers: dict[int, bytes] = {}
        self.invitation = self._seal(0, _TERMS.pack(threshold, self.dtype.itemsize, count))
        self.binding = b""
        self.keys: dict[int, bytes] = {}  # the answers of phase 0, by ascending client,
        self.sealed: dict[int, bytes] = {}  # and of phase 1
        self.survivors: list[int] = []
        self._sum = np.zeros(count, self.dtype)
        self.total: np.ndarray | None = None

    def receive(self, client: int, message: bytes) -> None:
        """Take a client's answer, or refuse it with a `MessageError`, after which a better one may come."""
        _, body = _open(message, self.phase, self.round, client, self.session)
        if client not in self.left:
            raise MessageError("client", f"client {client} has no part in this phase")
        if client in self.answers:
            raise MessageError("duplicate", f"client {client} has answered already")
        if len(body) != self._length():
            raise MessageError("length", f"an answer of {len(body):,} bytes should have {self._length():,}")
        if self.phase == 0:
            for at in (0, KEY):  # a key that nobody can use would stop everyone later
                agree(new_key(), bytes(body[at : at + KEY]))
        if self.phase == 2:
            if body[:_DIGEST] != _participants(self.binding, self.sealed):  # whose pads would not cancel
                raise MessageError(
                    "participants", f"client {client} padded its values for others than those who take part"
                )
            self._sum += np.frombuffer(body[_DIGEST:], self.dtype)
        self.answers[client] = b"" if self.phase == 2 else bytes(body)

    def next(self) -> dict[int, bytes]:
        """End the phase. The messages of the next one by client, none after the last; `Aborted` if too few answered."""
        if self.phase == len(PHASES):
            raise FedsieveError("the secure sum is over")
        if self.phase >= 0:
            self.left = sorted(self.answers)
            if len(self.left) < self.threshold:
                self._abort("too few clients are left")
        messages = (self._invite, self._list_keys, self._pass_shares, self._ask, self._finish)[self.phase + 1]()
        self.phase += 1
        self.answers = {}
        return messages

    def _invite(self) -> dict[int, bytes]:
        return dict.fromkeys(self.left, self.invitation)

    def _list_keys(self) -> dict[int, bytes]:
        self.keys = dict(sorted(self.answers.items()))
        message = self._seal(1, b"".join(_KEYS.pack(client, key[:KEY], key[KEY:]) for client, key in self.keys.items()))
        self.binding = _binding(self.invitation, message)
        return dict.fromkeys(self.left, message)

    def _pass_shares(self) -> dict[int, bytes]:
        self.sealed, size = dict(sorted(self.answers.items())), _SEALED.size - 4
        bodies: dict[int, list[bytes]] = {client: [] for client in self.left}
        for sender, answer in self.sealed.items():
            at = _COMMITMENT
            for peer in (client for client in self.keys if client != sender):
                if peer in bodies:
                    bodies[peer].append(_SEALED.pack(sender, answer[at : at + size]))
                at += size
        return {client: self._seal(2, b"".join(parts)) for client, parts in bodies.items()}

    def _ask(self) -> dict[int, bytes]:
        self.survivors = self.left
        message = self._seal(3, b"".join(map(_SURVIVOR.pack, self.survivors)))
        return dict.fromkeys(self.survivors, message)

    def _finish(self) -> dict[int, bytes]:
        """Take the self-pads of the survivors off the sum, and the pads they have in common with those who vanished."""
        total, places = self._sum, {client: 1 + place for place, client in enumerate(self.keys)}
        helpers, at = self.left[: self.threshold], 0
        for client in self.sealed:
            length = SEED if client in self.survivors else KEY
            secret = combine({places[helper]: self.answers[helper][at : at + length] for helper in helpers})
            at += length
            if client in self.survivors:
                if _commitment(secret, self.binding, client) != self.sealed[client][:_COMMITMENT]:
                    self._abort(f"the shares of client {client}'s seed are not those it gave out")
                add_pad(total, _self_pad(secret, self.binding, client), -1)
                continue
            if public(secret) != self.keys[client][KEY:]:
                self._abort(f"the shares of client {client}'s key are not those it gave out")
            for peer in self.survivors:
                key = _pair_pad(secret, self.keys[peer][KEY:], self.binding, client, peer)
                add_pad(total, key, 1 if client < peer else -1)
        self.total = total
        return {}

    def _abort(self, why: str) -> None:
        phase, self.phase, answers, self.answers = self.phase, len(PHASES), self.answers, {}
        raise Aborted(phase, len(answers), self.threshold, why)

    def _length(self) -> int:
        """How long the body of an answer must be in this phase."""
        return (
            2 * KEY,
            _COMMITMENT + (len(self.keys) - 1) * (_SEALED.size - 4),
            _DIGEST + self._sum.nbytes,
            len(self.survivors) * SEED + (len(self.sealed) - len(self.survivors)) * KEY,
        )[self.phase]

    def _seal(self, phase: int, body: bytes) -> bytes:
        return _seal(phase, self.round, SERVER, self.session, body)


class Sent(NamedTuple):
    """A message of a secure sum, as long as it was on the wire; `status` is "ok", or why it was refused."""

    client: int
    direction: Direction
    phase: str
    size: int
    status: str = "ok"


class SecureSum(NamedTuple):
    """What came of a secure sum: whose values are in it, the sum in Z_2^b (count,), and every message."""

    survivors: list[int]
    total: np.ndarray
    traffic: list[Sent]


Arrival = tuple[int, int, bytes | MessageError]  # a client, the size of its answer, and what came of it
Courier = Callable[[int, Mapping[int, bytes]], Iterable[Arrival]]  # from a phase and its messages


def secure_sum(
    inputs: Mapping[int, np.ndarray],
    threshold: int,
    drops: Mapping[int, int] | None = None,
    round: int = 0,
    deliver: Callable[[int, int, bytes], bytes] = lambda client, phase, answer: answer,
) -> SecureSum:
    """The sum of the clients' unsigned vectors, with all parties in this process and every message as bytes.

    A client in `drops` vanishes before its answer of that phase, 0 to 3; from 3 on its values are in the sum. `deliver`
    takes a client's answer in a phase and gives what arrives of it, or refuses it itself (`MessageError`); whose answer
    is refused is out. With fewer than `threshold` left the sum is `Aborted`.
    """
    first = next(iter(inputs.values()))
    exchange = in_process(inputs, threshold, drops or {}, round, deliver)
    return conduct(SumServer(inputs.keys(), threshold, 8 * first.itemsize, len(first), round), exchange)


def in_process(
    inputs: Mapping[int, np.ndarray],
    threshold: int,
    drops: Mapping[int, int],
    round: int,
    deliver: Callable[[int, int, bytes], bytes],
) -> Courier:
    """Clients of a secure sum in this process. See `secure_sum`."""
    clients = {client: SumClient(client, values, round, threshold) for client, values in inputs.items()}

    def exchange(phase: int, messages: Mapping[int, bytes]) -> Iterator[Arrival]:
        for client, message in messages.items():
            if drops.get(client, len(PHASES)) > phase:
                answer = clients[client].reply(message)
                try:
                    yield client, len(answer), deliver(client, phase, answer)
                except MessageError as error:
                    yield client, len(answer), error

    return exchange


def conduct(server: SumServer, exchange: Courier) -> SecureSum:
    """Lead a secure sum to its end, or until it is `Aborted`. `exchange` brings a phase's messages to clients."""
    traffic = list[Sent]()
    try:
        while messages := server.next():
            phase = PHASES[server.phase]
            traffic += [Sent(client, "down", phase, len(message)) for client, message in messages.items()]
            for client, size, answer in exchange(server.phase, messages):
                status = "ok"
                try:
                    if isinstance(answer, MessageError):
                        raise answer
                    server.receive(client, answer)
                except MessageError as error:
                    status = error.reason
                traffic.append(Sent(client, "up", phase, size, status))
    except Aborted as aborted:
        aborted.traffic = traffic
        raise
    assert server.total is not None
    return SecureSum(server.survivors, server.total, traffic)


def bytes_of(clients: int, values: int) -> tuple[int, int]:
    """Bytes up and down of one client in a sum of so many, all of whom stay, with `values` bytes of values."""
    up = 4 * OVERHEAD + 2 * KEY + _COMMITMENT + (clients - 1) * (_SEALED.size - 4) + _DIGEST + values + clients * SEED
    down = 4 * OVERHEAD + _TERMS.size + clients * _KEYS.size + (clients - 1) * _SEALED.size + clients * _SURVIVOR.size
    return up, down


def threshold_of(share: float, clients: int) -> int:
    """How many of so many clients must stay: a share of them, rounded up, and always a majority."""
    return max(2, clients // 2 + 1, math.ceil(share * clients - 1e-9))


def check_threshold(threshold: int, clients: int) -> None:
    """Refuse a threshold that protects nobody, or that can never be met."""
    if not 2 <= threshold <= clients < 2 * threshold:
        raise FedsieveError(
            f"a secure sum of {clients} clients needs a threshold of at least 2, more than {clients / 2:g} and at most "
            f"{clients}, not {threshold}"
        )


def _dtype(bits: int) -> np.dtype:
    if bits not in (16, 32, 64):
        raise FedsieveError(f"secure sums are of integers of 16, 32 or 64 bits, not {bits}")
    return np.dtype(f"<u{bits // 8}")


def _binding(invitation: bytes, keys: bytes) -> bytes:
    """What keys are bound to: the server's first two messages, so session, round, terms, participants and their keys."""
    return hashlib.sha256(invitation + keys).digest()


def _self_pad(seed: bytes, binding: bytes, client: int) -> bytes:
    return derive(seed, b"self", binding, client, client)


def _commitment(seed: bytes, binding: bytes, client: int) -> bytes:
    """What shows that a seed was put together rightly, and nothing else of it."""
    return derive(seed, b"commitment", binding, client, client)


def _participants(binding: bytes, clients: Collection[int]) -> bytes:
    """Stands for the clients whose shares were passed on, and so for the pairs that have pads."""
    return hashlib.sha256(binding + b"".join(map(_SURVIVOR.pack, sorted(clients)))).digest()[:_DIGEST]


def _pair_pad(key: bytes, peer_key: bytes, binding: bytes, client: int, peer: int) -> bytes:
    return derive(agree(key, peer_key), b"pair", binding, min(client, peer), max(client, peer))


def _seal(phase: int, round: int, sender: int, session: bytes, body: bytes) -> bytes:
    """A message: header, checksum, body."""
    header = HEADER.pack(MAGIC, VERSION, phase, session, round, sender, OVERHEAD + len(body))
    return b"".join((header, CHECKSUM.pack(_checksum(header, body)), body))


def _open(message: bytes, phase: int, round: int, sender: int, session: bytes) -> tuple[bytes, memoryview]:
    """Session and body of a message, if it is whole and the expected one; an empty session stands for any."""
    if len(message) < OVERHEAD:
        raise MessageError("truncated", f"{len(message)} bytes are too few for a message")
    view = memoryview(message)
    magic, version, *stated, length = HEADER.unpack(view[: HEADER.size])
    if magic != MAGIC:
        raise MessageError("magic", "the bytes are no message of a secure sum")
    if version != VERSION:
        raise MessageError("version", f"the message is of version {version}, and {VERSION} is spoken here")
    if length != len(message):
        reason = "truncated" if length > len(message) else "length"
        raise MessageError(reason, f"a message of {length:,} bytes came as {len(message):,}")
    if CHECKSUM.unpack(view[HEADER.size : OVERHEAD])[0] != _checksum(view[: HEADER.size], view[OVERHEAD:]):
        raise MessageError("checksum", "the message was damaged on its way")
    if stated[0] >= len(PHASES):
        raise MessageError("phase", f"there is no phase {stated[0]}")
    expected = (phase, session or stated[1], round, sender)
    for name, said, wanted in zip(("phase", "session", "round", "client"), stated, expected, strict=True):
        if said != wanted:
            raise MessageError(name, f"the message is of another {name} than the one that is under way")
    return stated[1], view[OVERHEAD:]


def _checksum(header: bytes | memoryview, body: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(header)
    digest.update(body)
    return digest.intdigest()


def _rows(form: struct.Struct, body: memoryview, count: int | None = None) -> list[tuple]:
    """A body as rows of one form."""
    if len(body) % form.size or count not in (None, len(body) // form.size):
        raise MessageError("length", f"{len(body):,} bytes are not what was agreed")
    return list(form.iter_unpack(body))


def _ascending(clients: Sequence[int]) -> list[int]:
    """A list of clients in the one order it may have, without repetitions."""
    if any(first >= second for first, second in pairwise(clients)):
        raise MessageError("participants", "the clients do not ascend")
    return list(clients)

"""Messages between a server and its clients: parcels, the ledger's lines about them, and the channel of one process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsieve.mask.mask import Mask
from fedsieve.model.space import Layout
from fedsieve.randomness import generator
from fedsieve.wire.codec import Coding, Decoded, MessageError, decode_many, encode_many
from fedsieve.wire.ledger import Direction, Ledger, Line

EVERYONE = 2**32 - 1  # the client number of a message that is the same for all
STATISTICS = "statistics"  # running ones, as a message and in a client's memory
EXACT, FP64, NO_VALUES = Coding("fp32"), Coding("fp64"), Coding("none")
Reply = Decoded | MessageError
Sealed = Callable[["Parcel", Sequence[memoryview], Sequence[int]], None]  # sees messages that leave, and their n


@dataclass(frozen=True, eq=False)
class Parcel:
    """The kind of a message: what it is about, over which weights, and how its values are written.

    Rounds are numbered from 0 here and in messages, as in all of the code; from 1 in the ledger, as in all that users read.
    """

    what: str
    round: int
    over: Layout
    coding: Coding = NO_VALUES
    key: int = 0  # of the rounding of values that go down
    enclose: bool = False  # whether the message holds the mask too
    within: Mask | None = None  # a mask that the receiver knows to contain it

    def seal(self, values: Tensor | None = None) -> memoryview:
        """One message, the same for every client."""
        rows = None if values is None else values[None]
        (message,) = encode_many(
            rows,
            self.coding,
            self.over,
            round=self.round,
            clients=[EVERYONE],
            ns=[0],
            keys=[self.key],
            enclose=self.enclose,
            within=self.within,
        )
        return message

    def seal_rows(
        self, rows: Tensor, clients: Sequence[int], ns: Sequence[int], keys: Sequence[int]
    ) -> list[memoryview]:
        """A message from each client. Values that are not finite travel too: only the server refuses them."""
        return encode_many(
            rows,
            self.coding,
            self.over,
            round=self.round,
            clients=clients,
            ns=ns,
            keys=keys,
            enclose=self.enclose,
            check=False,
        )

    def open_rows(
        self,
        messages: Sequence[bytes | memoryview],
        clients: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> list[Reply]:
        """Decode each message, or give the reason why it is refused."""
        return decode_many(
            messages,
            self.coding,
            self.over.space if self.enclose else self.over,
            enclosed=self.enclose,
            within=self.within,
            round=self.round,
            clients=clients,
            device=device,
        )

    def open(
        self, message: bytes | memoryview, client: int | None = None, device: torch.device | str = "cpu"
    ) -> Decoded:
        """Decode one message, or raise a `MessageError`."""
        (reply,) = self.open_rows([message], None if client is None else [client], device)
        if isinstance(reply, MessageError):
            raise reply
        return reply


class Tally:
    """The lines of one stage in the ledger (None: nobody counts)."""

    def __init__(self, ledger: Ledger | None, stage: str) -> None:
        self.ledger, self.stage = ledger, stage

    def note(self, round: int, client: int, way: Direction, what: str, size: int, status: str = "ok") -> None:
        """Write down one message."""
        if self.ledger is not None:
            self.ledger.add(Line(self.stage, round + 1, client, way, what, size, status))

    def silence(self, what: str, clients: Sequence[int], round: int, way: Direction, reason: str) -> None:
        """Write down that nothing came of a message, and why."""
        for client in clients:
            self.note(round, client, way, what, 0, reason)


class Channel:
    """Codes and counts messages within one process, and simulates damaged and late ones."""

    def __init__(
        self,
        tally: Tally,
        seed: int,
        device: torch.device | str = "cpu",
        sealed: Sealed = lambda *_: None,
    ) -> None:
        self.tally, self.seed, self.stage, self.device, self.sealed = tally, seed, tally.stage, device, sealed

    def down(self, parcel: Parcel, clients: Sequence[int], values: Tensor | None = None) -> Decoded:
        """Send the same to each of `clients`, and give it as they receive it."""
        message = parcel.seal(values)
        for client in clients:
            self.tally.note(parcel.round, client, "down", parcel.what, len(message))
        return parcel.open(message, device=self.device)

    def up(
        self,
        parcel: Parcel,
        clients: Sequence[int],
        rows: Tensor,
        ns: Sequence[int],
        fates: Mapping[int, str] | None = None,
    ) -> list[Reply]:
        """Take a row of values (clients, k) from each client; one that is late, or damaged on its way, is an error."""
        fates, what, round = fates or {}, parcel.what, parcel.round
        keys = [rounding_key(self.seed, self.stage, round, what, client) for client in clients]
        messages = parcel.seal_rows(rows, clients, ns, keys)
        self.sealed(parcel, messages, ns)
        arrived = [
            self.damaged(message, round, what, client) if fates.get(client) == "corrupt" else message
            for client, message in zip(clients, messages, strict=True)
        ]
        replies = parcel.open_rows(arrived, clients, self.device)
        for place, (client, message) in enumerate(zip(clients, messages, strict=True)):
            if fates.get(client) == "late":
                replies[place] = MessageError("late", f"client {client} answered after the deadline")
            reply = replies[place]
            status = reply.reason if isinstance(reply, MessageError) else "ok"
            self.tally.note(round, client, "up", what, len(message), status)
        return replies

    def damaged(self, message: bytes | memoryview, *address: int | str) -> bytes:
        """A message with one bit turned over on its way."""
        place = int(generator(self.seed, "damage", self.stage, *address).integers(8 * len(message)))
        damaged = bytearray(message)
        damaged[place // 8] ^= 1 << place % 8
        return bytes(damaged)


def rounding_key(seed: int, stage: str, *address: int | str) -> int:
    """The 64-bit key that int8 and int4 round by."""
    return int(generator(seed, "rounding", stage, *address).integers(2**63))

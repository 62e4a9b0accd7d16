"""The wire between a server and the clients of one stage. Whatever goes over it is encoded, counted and decoded here."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.config import Privacy
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.privacy.dp import Account
from fedsieve.privacy.secagg import Exchange
from fedsieve.randomness import generator
from fedsieve.wire.codec import Coding, Message, MessageError, decode, decode_many, encode_many
from fedsieve.wire.ledger import Direction, Ledger

EVERYONE = 2**32 - 1  # the client number of a message that is the same for all
EXACT, NO_VALUES = Coding("fp32"), Coding("none")
Reply = Message | MessageError
Part = tuple[int, Tensor, int]  # a client, its values (k,), and its n
Told = Callable[[int], Mapping[str, Any]]  # what a client that is elsewhere must hear beside its messages


class Channel:
    """What one stage sends down and takes up, noted in the ledger (None: nobody counts).

    Rounds are numbered from 0 here and in messages, as in all of the code; from 1 in the ledger, as in all that users read.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        seed: int,
        stage: str,
        device: torch.device | str = "cpu",
        privacy: Privacy = Privacy(),
        account: Account | None = None,
    ) -> None:
        self.ledger, self.seed, self.stage, self.device = ledger, seed, stage, device
        self.lost: dict[int, str] = {}  # clients that fell out of what is being asked of all, and why
        self.privacy, self.account = privacy, account  # what is made of sums over clients
        # Values of updates in secure sums: how many were clipped, and how many there were.
        self.clipped = self.summed = 0

    def key(self, *address: int | str) -> int:
        """What int8 and int4 round by."""
        return int(generator(self.seed, "rounding", self.stage, *address).integers(2**63))

    def uniforms(self, *address: int | str, count: int) -> np.ndarray:
        """What fixed point rounds by: public, since it says nothing that the sum does not."""
        return generator(self.seed, "rounding", self.stage, *address).random(count)

    def down(
        self,
        what: str,
        clients: Sequence[int],
        round: int,
        over: Mask | ParamSpace,
        values: Tensor | None = None,
        coding: Coding = NO_VALUES,
        *,
        key: int = 0,
        enclose: bool = False,
        within: Mask | None = None,
    ) -> Message:
        """Send the same to each of `clients`, and give it as they receive it."""
        (message,) = encode_many(
            None if values is None else values[None],
            coding,
            over,
            round=round,
            clients=[EVERYONE],
            ns=[0],
            keys=[key],
            enclose=enclose,
            within=within,
        )
        for client in clients:
            self.note(round, client, "down", what, len(message))
        expected = over.space if enclose and isinstance(over, Mask) else over
        return decode(message, coding, expected, enclosed=enclose, within=within, round=round, device=self.device)

    def up(
        self,
        what: str,
        clients: Sequence[int],
        round: int,
        over: Mask | ParamSpace,
        values: Tensor,
        coding: Coding,
        ns: Sequence[int],
        *,
        fates: Mapping[int, str] | None = None,
        enclose: bool = False,
    ) -> list[Reply]:
        """Take a row of `values` (clients, k) from each client; one that is late, or damaged on its way, is an error."""
        fates = fates or {}
        messages = self.encoded(what, clients, round, over, values, coding, ns, enclose)
        arrived = [
            self.damaged(message, round, what, client) if fates.get(client) == "corrupt" else message
            for client, message in zip(clients, messages, strict=True)
        ]
        expected = over.space if enclose and isinstance(over, Mask) else over
        replies = decode_many(
            arrived, coding, expected, enclosed=enclose, round=round, clients=clients, device=self.device
        )
        for place, (client, message) in enumerate(zip(clients, messages, strict=True)):
            if fates.get(client) == "late":
                replies[place] = MessageError("late", f"client {client} answered after the deadline")
            reply = replies[place]
            status = reply.reason if isinstance(reply, MessageError) else "ok"
            self.note(round, client, "up", what, len(message), status)
        return replies

    def encoded(
        self,
        what: str,
        clients: Sequence[int],
        round: int,
        over: Mask | ParamSpace,
        values: Tensor,
        coding: Coding,
        ns: Sequence[int],
        enclose: bool,
    ) -> list[memoryview]:
        """The messages of what clients send up. Values that are not finite travel too: it is the server who refuses."""
        keys = [self.key(round, what, client) for client in clients]
        return encode_many(
            values, coding, over, round=round, clients=clients, ns=ns, keys=keys, enclose=enclose, check=False
        )

    def collect(
        self,
        what: str,
        clients: Sequence[int],
        round: int,
        over: Mask | ParamSpace,
        coding: Coding,
        parts: Iterable[Part],
        fates: Mapping[int, str] | None,
        told: Told,
    ) -> Iterator[Reply]:
        """What clients made of their own images, one after another.

        `clients` and `told` are for those that are elsewhere, and make it by themselves: what their messages do not say.
        """
        for client, values, n in parts:
            yield self.up(what, [client], round, over, values[None], coding, [n], fates=fates)[0]

    def gathered(
        self,
        what: str,
        clients: Sequence[int],
        round: int,
        parts: Iterable[Part],
        fates: Mapping[int, str] | None,
        told: Told,
    ) -> Iterable[Part]:
        """What clients made, to be summed in secret; of clients elsewhere, who made it: it stays there."""
        return parts

    def secret_exchange(self, what: str, round: int, terms: Mapping[str, Any]) -> Exchange | None:
        """What carries a secure sum to clients elsewhere; None: they are at hand."""
        return None

    def silence(self, what: str, clients: Sequence[int], round: int, way: Direction, reason: str) -> None:
        """Note that nothing came of a message, and why."""
        for client in clients:
            self.note(round, client, way, what, 0, reason)

    def note(self, round: int, client: int, way: Direction, what: str, size: int, status: str = "ok") -> None:
        """Write a message into the ledger."""
        if self.ledger is not None:
            self.ledger.add(self.stage, round + 1, client, way, what, size, status)

    def damaged(self, message: bytes | memoryview, *address: int | str) -> bytes:
        """A message with one bit turned over on its way."""
        place = int(generator(self.seed, "damage", self.stage, *address).integers(8 * len(message)))
        damaged = bytearray(message)
        damaged[place // 8] ^= 1 << place % 8
        return bytes(damaged)

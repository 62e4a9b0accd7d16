"""Envelopes in Flower's messages, and Flower's grid as a transport."""

import threading
import time
from collections.abc import Callable, Collection, Mapping

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsieve.errors import FedsieveError
from fedsieve.wire.envelope import wrap

RECORD, NAME = "fedsieve", "envelope"
POLL = 0.25  # seconds from one look for answers to the next
# Flower's error codes. Any other is of an application that failed.
NODE_UNAVAILABLE, REFUSED = 5, 7


def to_record(envelope: bytes) -> RecordDict:
    """An envelope as content of a message. Flower sends large arrays in pieces, which it does not do with other values."""
    array = Array(dtype="uint8", shape=(len(envelope),), stype="fedsieve.envelope", data=envelope)
    return RecordDict({RECORD: ArrayRecord({NAME: array})})


def from_record(content: RecordDict) -> bytes:
    """The envelope in a message's content; without one, nothing, which is refused like any bytes that are no envelope."""
    records = content.array_records
    return records[RECORD][NAME].data if RECORD in records and NAME in records[RECORD] else b""


class GridTransport:
    """Flower's grid. Where `stopped` is set from another thread, what waits for sites ends."""

    def __init__(
        self, grid: Grid, wait: float, deadline: float, say: Callable[[str], None], stopped: threading.Event
    ) -> None:
        self.grid, self.wait, self.deadline, self.say, self.stopped = grid, wait, deadline, say, stopped

    def nodes(self) -> Collection[int]:
        """The nodes that are connected."""
        self._go_on(0)
        return list(self.grid.get_node_ids())

    def ask(self, messages: Mapping[int, bytes]) -> dict[int, bytes | str]:
        """What nodes answer before the deadline."""
        questions = [
            Message(to_record(envelope), dst_node_id=node, message_type="query", ttl=self.deadline)
            for node, envelope in messages.items()
        ]
        found: dict[int, bytes | str] = dict.fromkeys(messages, "late")
        waiting = dict(zip(self.grid.push_messages(questions), messages, strict=True))
        waiting.pop(None, None)  # type: ignore[call-overload]  # what could not be sent
        end = time.monotonic() + self.deadline
        while waiting and time.monotonic() < end:
            self._go_on(POLL)
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id)
                found[node] = self._taken(node, reply)
        self._go_on(0)
        return found

    def _go_on(self, seconds: float) -> None:
        if self.stopped.wait(seconds):
            raise FedsieveError("stopped", 130)

    def _taken(self, node: int, reply: Message) -> bytes | str:
        if reply.has_error():
            if reply.error.code == REFUSED:
                return wrap({"problem": f"the site refuses the run: {reply.error.reason}", "kind": "site"})
            reason = (reply.error.reason or "").partition("\n")[0] or f"Flower error {reply.error.code}"
            self.say(f"node {node}: {reason}")
            return "unavailable" if reply.error.code == NODE_UNAVAILABLE else "crash"
        return from_record(reply.content)

"""Maps clients to the nodes of a network, and refuses nodes that do not match the experiment."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from fedsieve.errors import FedsieveError
from fedsieve.wire.codec import MessageError
from fedsieve.wire.envelope import unwrap

LOST = {
    "unavailable": "it cannot be reached",
    "crash": "it ended without an answer",
    "late": "its answer did not come before the deadline",
}


class Transport(Protocol):
    """Carries bytes to nodes and back. Nodes are numbers without a meaning here."""

    wait: float  # seconds that a run waits for its sites at the beginning
    deadline: float  # seconds that sites have for an answer

    def nodes(self) -> Collection[int]:
        """All that can be reached now."""

    def ask(self, messages: Mapping[int, bytes]) -> Mapping[int, bytes | str]:
        """The answer of each node before the deadline, or a word of `LOST`."""


class Registry:
    """The sites of a run. A node that is new is greeted, and takes part if the site behind it matches the experiment."""

    def __init__(
        self,
        transport: Transport,
        run: str,
        clients: int,
        greeting: bytes,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.transport, self.run, self.clients, self.greeting = transport, run, clients, greeting
        self.say = say
        self.node: dict[int, int] = {}  # of each client
        self.images: dict[int, int] = {}  # that each has said it holds
        self.refused: dict[int, str] = {}  # nodes that do not match, and why

    def here(self) -> set[int]:
        """The clients that can be reached now."""
        nodes = set(self.transport.nodes())
        left = set(self.node.values()) - nodes
        self.node = {client: node for client, node in self.node.items() if node in nodes}
        # A refused node may leave and come back mended, or take the place of one that left.
        self.refused = {} if left else {node: why for node, why in self.refused.items() if node in nodes}
        if new := sorted(nodes - set(self.node.values()) - set(self.refused)):
            for node, answer in sorted(self.transport.ask(dict.fromkeys(new, self.greeting)).items()):
                self._meet(node, answer)
        return set(self.node)

    def ask(self, envelopes: Mapping[int, bytes]) -> dict[int, bytes | MessageError]:
        """The answers of clients, or why nothing came."""
        to = {self.node[client]: envelope for client, envelope in envelopes.items() if client in self.node}
        answers = self.transport.ask(to) if to else {}
        found: dict[int, bytes | MessageError] = {}
        for client in envelopes:
            answer = answers.get(self.node.get(client, -1), "unavailable")
            if isinstance(answer, str):
                found[client] = MessageError(answer, f"site {client}: {LOST[answer]}")
            else:
                found[client] = answer
        return found

    def forget(self, client: int) -> None:
        """Greet the site of a client again before anything else is asked of it."""
        self.node.pop(client, None)

    def _meet(self, node: int, answer: bytes | str) -> None:
        """Hear who is at a node."""
        if isinstance(answer, str):
            self.say(f"node {node} was greeted, and {LOST[answer]}")
            return  # and is greeted again
        try:
            head, _ = unwrap(answer)
            client, images = _introduction(head, self.clients)
        except FedsieveError as error:
            self._refuse(node, str(error))
            return
        if client in self.node:
            self._refuse(node, f"it says that it is site {client}, and so does node {self.node[client]}")
        elif self.images.setdefault(client, images) != images:
            self._refuse(node, f"site {client} held {self.images[client]:,} images, and now {images:,}")
        else:
            self.node[client] = node
            self.say(f"site {client} is here: {images:,} images")

    def _refuse(self, node: int, why: str) -> None:
        self.refused[node] = why
        self.say(f"node {node} is refused: {why}")


def _introduction(head: Mapping[str, Any], clients: int) -> tuple[int, int]:
    """The client and the number of images in a site's answer to a greeting."""
    if problem := head.get("problem"):
        raise FedsieveError(str(problem))
    client, images = head.get("client"), head.get("images")
    if type(client) is not int or type(images) is not int or images < 1:
        raise FedsieveError("its answer to the greeting is not as agreed")
    if not 0 <= client < clients:
        raise FedsieveError(f"it says that it is site {client}, and there are sites 0 to {clients - 1}")
    return client, images

"""A network in one process that carries nothing but bytes, so that what sites and a server say to each other can be tested."""

import shutil
from pathlib import Path

from fedsieve.runner import hosting
from fedsieve.runner.hosting import Host, answer


class Network:
    """Sites 0 to n - 1 behind nodes 100 to 99 + n, each with files in a folder of its own.

    `meddle(node, number, reply)` may change the answer to the n-th question, or lose it by a word. With `restarts`, every
    question finds sites that remember only what is on their disk.
    """

    wait, deadline = 0.0, 600.0

    def __init__(self, folder: Path, sites: int, meddle=None, restarts: bool = False, **own) -> None:
        self.folder, self.restarts, self.own = folder, restarts, own
        self.places = {100 + number: self.place(number) for number in range(sites)}
        self.meddle, self.asked, self.gone = meddle, 0, set()

    def place(self, number: int, **own) -> Host:
        return Host(number, self.folder / str(number), **{**self.own, **own})

    def nodes(self):
        return [node for node in self.places if node not in self.gone]

    def ask(self, messages):
        self.asked += 1
        found = {}
        for node, message in messages.items():
            if self.restarts:
                hosting._open.cache_clear()
            found[node] = answer(bytes(message), self.places[node])
            if self.meddle is not None:
                found[node] = self.meddle(node, self.asked, found[node])
        return found

    def lose_files(self, node: int) -> None:
        shutil.rmtree(self.places[node].folder)
        hosting._open.cache_clear()

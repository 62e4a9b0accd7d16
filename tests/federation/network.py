"""A network in one process that carries nothing but bytes, so that what sites and a server say to each other can be tested."""

from pathlib import Path

from fedsieve.runner.site import Place, answer


class Network:
    """Sites 0 to n - 1 behind nodes 100 to 99 + n. `meddle(node, number, reply)` may change or lose an answer."""

    wait = 0.0

    def __init__(self, folder: Path, sites: int, meddle=lambda node, number, reply: reply, **own) -> None:
        self.places = {100 + site: Place(site, folder / str(site), **own) for site in range(sites)}
        self.meddle, self.asked = meddle, 0

    def nodes(self):
        return list(self.places)

    def ask(self, messages, seconds):
        self.asked += 1
        return {
            node: self.meddle(node, self.asked, answer(bytes(message), self.places[node]))
            for node, message in messages.items()
        }

"""Who is met, refused and met again, as nodes come and go."""

from fedsieve.federation.registry import Registry
from fedsieve.wire.envelope import wrap


class Nodes:
    """Nodes that answer a greeting with what they are set to; all greetings are counted."""

    wait = deadline = 1.0

    def __init__(self):
        self.answers, self.greeted = {}, []

    def nodes(self):
        return self.answers

    def ask(self, messages):
        self.greeted += messages
        return {node: wrap(self.answers[node]) for node in messages}


def is_site(client):
    return {"client": client, "images": 5}


def test_a_refused_node_is_greeted_again_when_it_has_left_and_come_back():
    network, said = Nodes(), []
    sites = Registry(network, "run", 2, b"hello", said.append)
    network.answers = {7: is_site(0), 8: {"problem": "the label map is another"}}
    assert sites.here() == sites.here() == {0} and network.greeted == [7, 8]
    assert "node 8 is refused: the label map is another" in said
    del network.answers[8]
    sites.here()
    network.answers[8] = is_site(1)
    assert sites.here() == {0, 1} and network.greeted == [7, 8, 8]


def test_two_nodes_that_say_they_are_one_site_are_told_once_and_the_second_takes_over_when_the_first_leaves():
    network, said = Nodes(), []
    sites = Registry(network, "run", 2, b"hello", said.append)
    network.answers = {7: is_site(0), 8: is_site(0)}
    assert sites.here() == sites.here() == {0} and sites.node == {0: 7}
    assert [line for line in said if "refused" in line] == [
        "node 8 is refused: it says that it is site 0, and so does node 7"
    ]
    del network.answers[7]
    assert sites.here() == {0} and sites.node == {0: 8}

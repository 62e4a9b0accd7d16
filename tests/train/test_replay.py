import functools

import pytest
import timm
import torch
from torch import nn

from fedsieve.train import replay
from fedsieve.train.replay import Replay, compiled, repeated


def test_the_first_call_is_timed_and_told_once(monkeypatch):
    monkeypatch.setattr(replay, "WORTH_TELLING", 0.0)
    said = []
    double = Replay(lambda value: 2 * value, say=said.append)
    assert [double(torch.tensor(value)).item() for value in (1, 2, 3)] == [2, 4, 6]
    assert len(said) == 1 and "ready after" in said[0]
    assert double.seconds > 0


def test_what_is_never_recorded_tells_nothing(monkeypatch):
    monkeypatch.setattr(replay, "WORTH_TELLING", 0.0)
    said = []
    assert Replay(lambda value: value, on=False, say=said.append)(torch.tensor(1)).item() == 1
    assert not said


def rows(blocks):
    """A network of some blocks in a row, each a row of four layers itself."""
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.Sequential(*(nn.Sequential(*(nn.Tanh() for _ in range(4)), nn.Linear(4, 4)) for _ in range(blocks))),
    )


def test_repeated_blocks_are_found_once_and_as_a_whole():
    network = rows(4)
    assert repeated(network) == list(network[1])
    network[1][2] = nn.Sequential(*(nn.Tanh() for _ in range(4)), nn.Linear(4, 4, bias=False))
    assert not any(block in repeated(network) for block in network[1])
    assert list(rows(3)[1]) != repeated(rows(3))


def test_blocks_that_repeat_are_compiled_once_and_compute_the_same(monkeypatch):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=8, depth=5, num_heads=2)
    images = torch.randn(2, 3, 16, 16)
    plain = model(images)
    call = compiled(model.__call__, "blocks", model)
    torch.testing.assert_close(call(images), plain)
    attention = [graph for graph in graphs if any("attention" in str(node.target) for node in graph.graph.nodes)]
    assert len(attention) == 1  # one block for all five
    assert all("forward" not in vars(block) for block in model.blocks)
    with torch.no_grad():
        model.blocks[3].mlp.fc2.bias += 1  # whose weights it reads when it is called
    torch.testing.assert_close(call(images), model(images))
    assert not torch.allclose(call(images), plain)


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch):
    def backend(graph, _):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    model = rows(4)
    inputs = torch.randn(2, 3)
    with pytest.warns(UserWarning, match="without it, slower"):
        found = compiled(model.__call__, "blocks", model)(inputs)
    torch.testing.assert_close(found, model(inputs))

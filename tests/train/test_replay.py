import torch

from fedsieve.train import replay
from fedsieve.train.replay import Replay


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

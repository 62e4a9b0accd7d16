"""What decides where and in which precision a run computes."""

from contextlib import nullcontext

import pytest
import torch

from fedsieve.runner.environment import make_autocast


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(("capability", "half"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_auto_takes_bf16_only_on_a_gpu_that_computes_in_it(tiny, monkeypatch, capability, half):
    """A T4 (7.5) only emulates bf16."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    autocast = make_autocast(tiny(), torch.device("cuda"))
    assert isinstance(autocast(), nullcontext) != half


def test_bf16_that_is_asked_for_is_taken_anywhere(tiny):
    with make_autocast(tiny("precision=bf16"), torch.device("cpu"))():
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16

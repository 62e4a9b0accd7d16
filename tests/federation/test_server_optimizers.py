import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.words import word

from fedsieve.config import Server
from fedsieve.federation.server_optimizers import after_new_mask, carried, server_step


def reference(settings, deltas, rates):
    """Reddi et al. 2021, algorithms 1 and 2, one number at a time."""
    x, m, tau = 0.0, 0.0, getattr(settings, "tau", 0.0)
    v = tau**2
    for delta, rate in zip(deltas, rates, strict=True):
        if settings.kind == "sgd":
            x += rate * delta
        elif settings.kind == "momentum":
            m = settings.momentum * m + delta
            x += rate * m
        else:
            m = settings.momentum * m + (1 - settings.momentum) * delta
            if settings.kind == "adagrad":
                v = v + delta**2
            elif settings.kind == "yogi":
                v = v - (1 - settings.beta2) * delta**2 * math.copysign(1, v - delta**2) * (v != delta**2)
            else:
                v = settings.beta2 * v + (1 - settings.beta2) * delta**2
            x += rate * m / (math.sqrt(v) + tau)
    return x


OPTIMIZERS = ["sgd", "momentum", "adam", "yogi", "adagrad"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_server_optimizers_equal_the_paper(optimizer):
    settings = word(Server, optimizer, lr=0.3, momentum=0.8, beta2=0.9, tau=0.01)
    deltas = np.random.default_rng(0).normal(size=(6, 4))
    theta, state = torch.zeros(4, dtype=torch.float64), {}
    for delta in deltas:
        theta += server_step(settings, settings.lr, torch.from_numpy(delta), state)
    np.testing.assert_allclose(theta.numpy(), [reference(settings, column, [0.3] * 6) for column in deltas.T])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(0.01, 2)), min_size=1, max_size=6))
def test_the_rate_scales_the_step_but_not_the_buffers(optimizer, rounds):
    """Against the paper's update, with a rate that changes every round as under a schedule."""
    settings = word(Server, optimizer, momentum=0.8, beta2=0.9, tau=0.01)
    theta, state = torch.zeros(1, dtype=torch.float64), {}
    for delta, rate in rounds:
        theta += server_step(settings, rate, torch.tensor([delta], dtype=torch.float64), state)
    np.testing.assert_allclose(theta.item(), reference(settings, *zip(*rounds, strict=True)), rtol=1e-9, atol=1e-12)


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_what_was_learnt_of_a_weight_goes_with_it(old, new):
    places = [torch.tensor(sorted(part), dtype=torch.int64) for part in (old, new)]
    values = 100.0 + places[0]
    found = carried(values, places[0], places[1], fill=-1.0)
    assert found.tolist() == [100.0 + place if place in old else -1.0 for place in sorted(new)]


@given(st.sets(st.integers(0, 30), min_size=1), st.sets(st.integers(0, 30), min_size=1))
def test_momentum_goes_over_to_a_new_mask_as_far_as_asked(old, new):
    places = [torch.tensor(sorted(part), dtype=torch.int64) for part in (old, new)]
    state = {"first": 100.0 + places[0], "second": 200.0 + places[0]}
    found = {
        kind: after_new_mask(Server(optimizer="adam", momentum_correction=kind), dict(state), *places)
        for kind in ("keep", "scale", "reset")
    }
    share, fill = len(old & new) / len(new), Server(optimizer="adam").tau ** 2
    kept = torch.tensor([100.0 + place if place in old else 0.0 for place in sorted(new)])
    torch.testing.assert_close(found["keep"]["first"], kept)
    torch.testing.assert_close(found["scale"]["first"], share * kept)
    for kind in ("keep", "scale"):
        expected = [200.0 + place if place in old else fill for place in sorted(new)]
        assert found[kind]["second"].tolist() == pytest.approx(expected)
    assert found["reset"] == {}

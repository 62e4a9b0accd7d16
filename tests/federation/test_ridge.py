import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge as Reference
from tests.federation.alone import federated_ridge

from fedsieve import run
from fedsieve.config import Ridge
from fedsieve.federation.least_squares import SCALES, STRENGTHS, fit_scale, statistics, statistics_space
from fedsieve.wire.ledger import Ledger, lines


def features(count: int, width: int, classes: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    centres = rng.normal(size=(classes, width))
    return torch.from_numpy((centres[labels] + rng.normal(size=(count, width))).astype(np.float32)), torch.from_numpy(
        labels
    )


def sent(path):
    return [(line.client, line.direction, line.what, line.size) for line in lines(path)]


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(0, 2**31), st.floats(1e-4, 10))
def test_every_partition_gives_the_centralised_solution(clients, seed, strength):
    """Any split of the images over clients, empty clients too, against scikit-learn on all of them."""
    phi, labels = features(60, 5, 4, seed % 1000)
    holder = np.random.default_rng(seed).integers(0, clients, 60)
    parts = [(client, np.flatnonzero(holder == client)) for client in range(clients)]
    weight, bias, chosen = federated_ridge(Ridge(strength=strength, temperature=1.0), phi, labels, 4, parts, None)
    reference = Reference(alpha=strength * 60).fit(phi.double().numpy(), F.one_hot(labels, 4).double().numpy())
    np.testing.assert_allclose(weight.numpy(), reference.coef_, atol=1e-6)
    np.testing.assert_allclose(bias.numpy(), reference.intercept_, atol=1e-6)
    assert chosen == {"strength": strength, "temperature": 1.0}


def test_the_temperature_is_the_most_likely_one():
    _, labels = features(400, 6, 3)
    logits = F.one_hot(labels, 3) + 0.7 * torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    scale = fit_scale(logits, labels)
    losses = {s: F.cross_entropy(logits.double() * s, labels).item() for s in np.geomspace(0.5, 200, 400)}
    assert F.cross_entropy(logits.double() * scale, labels).item() <= min(losses.values()) + 1e-9


def test_strength_and_temperature_are_chosen_on_validation_or_on_the_clients_own_images(tmp_path):
    phi, labels = features(300, 20, 5)
    parts = [(0, np.arange(100)), (1, np.arange(100, 200))]
    held = (phi[200:], labels[200:])
    weight, bias, _ = federated_ridge(Ridge(), phi, labels, 5, parts, held, Ledger(tmp_path / "held.csv"))
    right = ((held[0].double() @ weight.T + bias).argmax(1) == held[1]).double().mean()
    for strength in (1e-6, 1.0, 10.0):
        other = federated_ridge(Ridge(strength=strength), phi, labels, 5, parts, held)
        assert right >= ((held[0].double() @ other[0].T + other[1]).argmax(1) == held[1]).double().mean()
    assert sent(tmp_path / "held.csv") == [(client, "up", "statistics", 68 + 8 * (231 + 105)) for client in (0, 1)]
    _, _, blind = federated_ridge(Ridge(), phi, labels, 5, parts, None, Ledger(tmp_path / "blind.csv"))
    assert blind["strength"] == 1e-3 and 0.005 < blind["temperature"] < 1
    asked = [(client, "down", "head", 68 + 4 * 105) for client in (0, 1)]
    told = [(client, "up", "losses", 68 + 8 * len(SCALES)) for client in (0, 1)]
    assert sent(tmp_path / "blind.csv")[2:] == asked + told


def test_the_strongest_of_equally_good_strengths_is_chosen():
    """Validation cannot tell them apart, so the most regularised head wins."""
    phi, labels = features(90, 6, 3, 1)
    parts, held = [(0, np.arange(60))], (phi[60:], labels[60:])
    right = {}
    for strength in STRENGTHS:
        weight, bias, _ = federated_ridge(Ridge(strength=strength), phi, labels, 3, parts, held)
        right[strength] = int(((held[0].double() @ weight.T + bias).argmax(1) == held[1]).sum())
    best = [strength for strength in STRENGTHS if right[strength] == max(right.values())]
    assert len(best) > 1
    assert federated_ridge(Ridge(), phi, labels, 3, parts, held)[2]["strength"] == best[-1]


@settings(max_examples=20)
@given(st.floats(0.01, 100))
def test_a_temperature_divides_the_logits(temperature):
    phi, labels = features(60, 5, 4)
    plain, same = (
        federated_ridge(Ridge(strength=1e-2, temperature=value), phi, labels, 4, [(0, np.arange(60))], None)
        for value in (1.0, temperature)
    )
    for one, other in zip(plain[:2], same[:2], strict=True):  # weight, bias
        np.testing.assert_allclose(other.numpy() * temperature, one.numpy())
    assert same[2]["temperature"] == pytest.approx(temperature)


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.integers(2, 6))
def test_the_fitted_temperature_does_not_depend_on_who_holds_which_image(seed, clients):
    """Small clients hold wrong labels. Reference: the grid search on all images together."""
    phi, labels = features(120, 6, 3, seed % 1000)
    rng = np.random.default_rng(seed)
    bounds = np.cumsum([0, *[2] * (clients - 1), 120 - 2 * (clients - 1)])
    order = rng.permutation(120)
    parts = [(client, order[bounds[client] : bounds[client + 1]]) for client in range(clients)]
    wrong = torch.from_numpy(np.concatenate([rows for _, rows in parts[:-1]]))
    labels[wrong] = (labels[wrong] + 1) % 3
    weight, bias, chosen = federated_ridge(Ridge(), phi, labels, 3, parts, None)
    logits = (phi.double() @ weight.T + bias) * chosen["temperature"]
    losses = [F.cross_entropy(logits * scale, labels).item() for scale in SCALES]
    assert 1 / chosen["temperature"] == pytest.approx(SCALES[int(np.argmin(losses))])


def test_half_of_a_symmetric_matrix_travels():
    phi, labels = features(10, 4, 3)
    values = statistics(phi, labels, 3)
    assert len(values) == statistics_space(4, 3).size == 15 + 15


@pytest.mark.parametrize("federation", [True, False])
def test_a_ridge_head_is_a_stage(tiny, federated, tmp_path, federation):
    stages = "stages=[{name: head, train: head, method: ridge}]"
    summary = run((federated if federation else tiny)(stages), tmp_path / "run")
    assert summary["test_accuracy"] > 0.4
    assert summary["stages"]["head"]["best_at"] == 1
    if federation:
        assert summary["bytes_up"] > 0 and summary["rounds"] == 1


def test_federated_and_central_ridge_heads_are_the_same(tiny, federated, tmp_path):
    stages = "stages=[{name: head, train: head, method: ridge}]"
    one = run(federated(stages), tmp_path / "one")
    same = [stages, "seed=2", "data.val_fraction=0.2"]
    other = run(tiny(*same), tmp_path / "other")
    assert one["test_accuracy"] == other["test_accuracy"]
    assert one["test_loss"] == pytest.approx(other["test_loss"], rel=1e-5)

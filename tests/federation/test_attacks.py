import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.words import Robust, aggregate

from fedsieve.errors import FedsieveError
from fedsieve.federation import attacks
from fedsieve.randomness import generator


def scene(round=0, earlier=None):
    """What a hostile client of a round can draw on."""
    return attacks.Scene(
        lambda: generator(0, "attack", "stage", round, 17), lambda now: now if earlier is None else earlier
    )


@given(st.integers(0, 2**32), st.integers(1, 200), st.floats(0, 1))
def test_the_hostile_share_is_drawn_once_by_the_seed(seed, clients, share):
    hostile = attacks.hostile_clients(seed, clients, share)
    assert len(set(hostile.tolist())) == len(hostile) == round(share * clients)
    assert all(0 <= client < clients for client in hostile) and (np.diff(hostile) > 0).all()
    assert (hostile == attacks.hostile_clients(seed, clients, share)).all()


def test_another_seed_has_other_hostile_clients():
    assert attacks.hostile_clients(0, 100, 0.2).tolist() != attacks.hostile_clients(1, 100, 0.2).tolist()


@given(st.integers(2, 100))
def test_flipping_labels_twice_gives_them_back(classes):
    labels = torch.arange(classes)
    flipped = attacks.label_flip(labels, classes)
    assert sorted(flipped.tolist()) == labels.tolist() and flipped[0] == classes - 1
    assert attacks.label_flip(flipped, classes).equal(labels)


def test_a_flipped_sign_is_enlarged():
    assert attacks.sign_flip(torch.tensor([1.0, -2.0]), scene()).tolist() == [-10.0, 20.0]


def test_noise_has_its_share_of_the_norm_and_an_address():
    update = torch.linspace(-1, 1, 10_000)
    noise = attacks.gaussian_noise(update, scene(4), factor=3.0)
    assert noise.dtype == update.dtype
    assert noise.norm() == pytest.approx(3 * update.norm().item(), rel=0.05)
    assert noise.equal(attacks.gaussian_noise(update, scene(4), factor=3.0))
    assert not noise.equal(attacks.gaussian_noise(update, scene(5), factor=3.0))
    assert abs(float(torch.corrcoef(torch.stack([noise, update]))[0, 1])) < 0.05


def test_nan_is_all_nan_and_no_aggregator_takes_it():
    sent = attacks.nan(torch.ones(4), scene())
    assert sent.isnan().all()
    with pytest.raises(FedsieveError):
        aggregate("median", [torch.ones(4), torch.ones(4), sent], torch.ones(3))


def test_a_replay_is_the_earlier_update_once_there_is_one():
    now, earlier = torch.ones(3), torch.zeros(3)
    assert attacks.stale_replay(now, scene(earlier=earlier)) is earlier
    assert attacks.stale_replay(now, scene()) is now


@pytest.mark.parametrize("kind", ["median", "trimmed_mean", "krum", "multi_krum", "geometric_median"])
def test_robust_rules_keep_the_direction_that_the_mean_loses(kind):
    rng = np.random.default_rng(0)
    honest = torch.from_numpy((0.1 + rng.normal(size=(8, 500)) * 0.1).astype(np.float32))
    rows = torch.cat([honest, attacks.sign_flip(honest[:2], scene())])
    direction = honest.double().mean(0)
    assert torch.cosine_similarity(rows.double().mean(0), direction, 0) < 0
    found = aggregate(kind, rows, torch.ones(10), Robust(share=0.2, f=2))
    assert torch.cosine_similarity(found, direction, 0) > 0.7

import math
import os
import stat

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedsieve.config import Noised, parse_config
from fedsieve.errors import FedsieveError
from fedsieve.privacy import dp
from fedsieve.privacy.dp import Release, noise_for, spent

KEY = bytes(range(32))
PRIVATE = """
federation: {clients: 40, cohort: 0.5, weighting: uniform}
mask: {rule: least_sensitive, sparsity: 0.9}
privacy:
  dp:
    noise_multiplier: 1.5
    clip_norm: 0.2
    scores: {clip_norm: 3.0, noise_multiplier: 2.0}
    statistics: {clip_norm: 5.0, noise_multiplier: 4.0}
stages: [{name: head, train: head, method: ridge}, {name: main, train: backbone, sparse: true, rounds: 5}]
"""


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Balle and Wang 2018, theorem 8: the exact epsilon of one Gaussian release of sensitivity 1."""

    def delta_of(epsilon: float) -> float:
        a, b = 1 / (2 * sigma), epsilon * sigma
        return stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b)

    low, high = 0.0, 200.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


def renyi_epsilon(sigma: float, rate: float, rounds: int, delta: float) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant([1 + x / 10 for x in range(1, 100)] + list(range(11, 200)))
    return accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), rounds).get_epsilon(delta)


# --- the account -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("times", [1, 20])
def test_full_participation_is_the_closed_form_of_the_gaussian_mechanism(sigma, times):
    exact = gaussian_epsilon(sigma / math.sqrt(times), 1e-5)
    assert exact - 1e-4 <= spent(sigma, 1.0, times, 1e-5) <= exact * 1.002
    assert spent(9.0, 0.1, 0, 1e-5, [Release(sigma, times=times)]) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize(
    ("sigma", "rate", "rounds"), [(1.0, 0.1, 100), (0.8, 0.05, 300), (2.0, 0.01, 1000), (1.1, 0.2, 20)]
)
def test_the_renyi_accountant_says_a_little_more(sigma, rate, rounds):
    # Its bound holds too and is known to be looser, by about a tenth at these settings.
    renyi = renyi_epsilon(sigma, rate, rounds, 1e-5)
    assert 0.8 * renyi < spent(sigma, rate, rounds, 1e-5) <= renyi


def test_many_small_rounds_are_the_central_limit_and_below_a_published_bound():
    # Abadi et al. 2016, figure 2: their moments accountant gives 1.26. Bu et al. 2020: the limit is Gaussian.
    sigma, rate, rounds = 4.0, 0.01, 10_000
    limit = gaussian_epsilon(1 / (rate * math.sqrt(rounds * (math.exp(sigma**-2) - 1))), 1e-5)
    found = spent(sigma, rate, rounds, 1e-5)
    assert found < 1.26 and found == pytest.approx(limit, rel=0.03)


def test_epsilon_grows_with_rounds_and_rate_and_falls_with_noise():
    rounds = [spent(1.0, 0.1, done, 1e-5) for done in range(0, 30, 3)]
    assert rounds[0] == 0 and (np.diff(rounds) > 0).all()
    assert (np.diff([spent(sigma, 0.1, 20, 1e-5) for sigma in (0.5, 0.7, 0.9, 1.1, 2, 4)]) < 0).all()
    assert (np.diff([spent(1.0, rate, 20, 1e-5) for rate in (0.01, 0.1, 0.5, 1.0)]) > 0).all()
    assert spent(0.0, 0.1, 1, 1e-5) == math.inf


@pytest.mark.parametrize(("epsilon", "rate", "rounds"), [(8, 0.1, 50), (1, 0.02, 200), (3, 1.0, 5)])
def test_the_noise_for_an_epsilon_spends_just_that(epsilon, rate, rounds):
    sigma = noise_for(epsilon, 1e-5, rate, rounds)
    assert spent(sigma, rate, rounds, 1e-5) <= epsilon < spent(sigma / 1.002, rate, rounds, 1e-5)


def test_releases_before_training_are_paid_from_the_same_budget():
    scores = Release(3.0)
    alone, training = spent(1.0, 0.1, 0, 1e-5, [scores]), spent(1.0, 0.1, 20, 1e-5)
    both = spent(1.0, 0.1, 20, 1e-5, [scores])
    assert max(alone, training) < both < alone + training
    others = [Release(), Release(12.0, rate=0.5)]
    sigma = noise_for(1, 1e-5, 0.1, 9, others)
    assert sigma > noise_for(1, 1e-5, 0.1, 9)
    assert spent(sigma, 0.1, 9, 1e-5, others) <= 1 < spent(sigma / 1.002, 0.1, 9, 1e-5, others)
    with pytest.raises(FedsieveError, match="by themselves"):
        noise_for(1, 1e-5, 0.1, 20, [Release(0.5)])


def test_where_hardly_anyone_is_drawn_any_noise_will_do():
    assert noise_for(1, 1e-3, 1e-4, 2) < 0.1  # all that could leak is who was drawn, and that within delta


# --- the mechanism ---------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_clipped_values_are_no_longer_than_the_clip_norm(values, clip):
    values = torch.tensor(values, dtype=torch.float64)
    found = dp.clipped(values, clip)
    assert found.norm() <= clip * (1 + 1e-12)
    if values.norm() <= clip:
        assert found.equal(values)
    else:
        torch.testing.assert_close(found / clip, values / values.norm())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_adds_nothing(value):
    assert dp.clipped(torch.tensor([1.0, value]), 1.0).tolist() == [0.0, 0.0]


@settings(max_examples=20)
@given(st.integers(0, 9), st.integers(2, 9))
def test_one_client_more_changes_the_mean_by_its_share_at_most(seed, count):
    updates = torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 30)) * 5)
    sums = [sum(dp.clipped(update, 2.0) for update in part) for part in (updates, updates[1:])]
    means = [dp.noisy_mean(total, 1.0 * 2.0, 0.1 * 50, KEY, "stage", 3) for total in sums]
    assert (means[0] - means[1]).norm() <= 2.0 / (0.1 * 50) + 1e-9


def test_noise_is_gaussian_with_sigma_times_the_clip_norm_also_for_an_empty_cohort():
    mean = dp.noisy_mean(torch.zeros(200_000), 1.5 * 0.2, 0.1 * 40, KEY, "stage", 7)
    noise = mean.numpy() * (0.1 * 40) / (1.5 * 0.2)
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    assert noise.std() == pytest.approx(1, rel=0.01) and abs(noise.mean()) < 0.01


def test_the_expected_ratio_is_the_one_that_is_found():
    mean = dp.noisy_mean(torch.zeros(50_000), 1.5 * 0.2, 0.1 * 400, KEY, "stage", 7)
    assert mean.norm().item() / 0.2 == pytest.approx(dp.expected_ratio(1.5, 0.1, 400, 50_000), rel=0.02)


def test_only_a_ratio_above_one_is_warned_about_with_what_would_help():
    said = dp.outlook("head", 1.0, 0.1, 100, 100)
    assert "1 times as long" in said and "Warning" not in said
    said = dp.outlook("head", 4.0, 0.1, 100, 100)
    assert "Warning" in said and "4 times as many clients" in said and "6.2 % of the density" in said
    assert "fewer rounds" in said


def test_poisson_cohorts_have_their_rate_and_vary_in_size():
    cohorts = [dp.poisson_cohort(KEY, 200, 0.1, "stage", round) for round in range(500)]
    sizes = np.array([len(cohort) for cohort in cohorts])
    assert sizes.mean() == pytest.approx(20, abs=1) and sizes.var() == pytest.approx(18, rel=0.3)
    often = np.bincount(np.concatenate(cohorts), minlength=200)
    assert stats.binomtest(int(often.max()), 500, 0.1).pvalue > 1e-6
    assert all((np.diff(cohort) > 0).all() for cohort in cohorts)
    assert len(dp.poisson_cohort(KEY, 200, 1.0, "stage", 0)) == 200


def test_cohorts_are_independent_across_rounds_stages_and_keys():
    drawn = [
        np.isin(np.arange(4000), dp.poisson_cohort(key, 4000, 0.3, stage, round))
        for key in (KEY, bytes(32))
        for stage in ("head", "all")
        for round in (0, 1)
    ]
    assert np.abs(np.corrcoef(drawn) - np.eye(8)).max() < 5 / math.sqrt(4000)


# --- what a run gives out --------------------------------------------------------------------------------------------


def account(given=None, *overrides: str) -> dp.Account:
    return dp.Account(parse_config(PRIVATE, overrides), 0.5, 40, KEY, given or {})


def test_no_two_releases_share_noise_even_after_a_resume():
    """Subtracting two releases with the same noise would give the exact difference of the sums."""
    k, noised = 4000, Noised(clip_norm=1.0, noise_multiplier=1.0)
    first = account()
    noise = [first.total([], k, noised), first.mean(torch.zeros(k), "main", 0), first.total([], k, noised)]
    resumed = account(first.numbers())
    noise += [
        resumed.total([], k, noised),
        resumed.mean(torch.zeros(k), "main", 1),
        resumed.mean(torch.zeros(k), "b", 1),
    ]
    correlations = np.corrcoef(torch.stack(noise).numpy())
    assert np.abs(correlations - np.eye(len(noise))).max() < 5 / math.sqrt(k)
    assert resumed.numbers() == {"rounds": 3, "releases": [1.0] * 3}


@settings(max_examples=20)
@given(st.integers(0, 99), st.integers(0, 6), st.floats(0.1, 10))
def test_every_clients_part_of_a_release_is_clipped(seed, clients, clip):
    parts = torch.from_numpy(np.random.default_rng(seed).normal(size=(clients, 7)) * 3)
    noised = Noised(clip_norm=clip, noise_multiplier=1.0)
    found = account().total(parts, 7, noised) - account().total([], 7, noised)  # both are first releases: same noise
    expected = sum((part * min(1, clip / part.norm()) for part in parts), torch.zeros(7, dtype=torch.float64))
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "noised", [Noised(clip_norm=3.0, noise_multiplier=2.0), Noised(clip_norm=0.1, noise_multiplier=0.5)]
)
def test_release_noise_is_gaussian_with_multiplier_times_clip_norm(noised):
    noise = account().total([], 100_000, noised).numpy() / (noised.noise_multiplier * noised.clip_norm)
    assert stats.kstest(noise, "norm").pvalue > 1e-3


@settings(max_examples=30)
@given(st.integers(2, 12), st.none() | st.integers(1, 11), st.integers(1, 3), st.integers(1, 2))
def test_the_plan_counts_every_calibration_round_of_every_mask_and_every_head(rounds, refresh, times, heads):
    """A mask is made before round 0, and again before every round whose number is a multiple of `refresh`."""
    refresh = None if refresh is None else min(refresh, rounds - 1)
    stages = [f"{{name: head{number}, train: head, method: ridge}}" for number in range(heads)]
    stages += [f"{{name: main, train: backbone, sparse: true, rounds: {rounds}}}"]
    overrides = [
        f"stages=[{', '.join(stages)}]",
        f"mask.refresh={refresh or 'null'}",
        f"mask.calibration_rounds={times}",
    ]
    planned, releases = dp.planned(parse_config(PRIVATE, overrides))
    made = [number for number in range(rounds) if number % (refresh or rounds) == 0]
    assert planned == rounds and all(release.rate == 1 for release in releases)
    assert sum(release.times for release in releases if release.sigma == 2.0) == times * len(made)
    assert sum(release.times for release in releases if release.sigma == 4.0) == heads


def test_different_settings_get_different_noise_keys():
    marks = ["a", "b", "a, b", ""]
    assert len({dp.bound_key(KEY, mark) for mark in marks} | {dp.bound_key(bytes(32), mark) for mark in marks}) == 8


# --- the secret ------------------------------------------------------------------------------------------------------


def test_a_key_is_private_and_stays_over_a_resume(tmp_path):
    path = tmp_path / "checkpoints" / "dp.key"
    before = os.umask(0)
    try:
        key = dp.load_or_make_key(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(key) == 32
    assert dp.load_or_make_key(path, resumed=True) == key
    assert os.listdir(path.parent) == ["dp.key"]


def test_another_run_draws_something_else_and_a_resumed_one_the_same(tmp_path):
    one, other = (dp.load_or_make_key(tmp_path / name / "dp.key") for name in "ab")
    draws = [dp.uniform(key, 5, "noise", "stage", 3).tolist() for key in (one, one, other)]
    assert draws[0] == draws[1] != draws[2]


def test_purposes_stages_and_rounds_have_streams_of_their_own():
    addresses = [("noise", "a", 1), ("noise", "a", 2), ("noise", "b", 1), ("cohort", "a", 1), ("noise", "a", "1")]
    assert len({dp.uniform(KEY, 1, *address).item() for address in addresses}) == len(addresses)
    drawn = dp.uniform(KEY, 100_000, "noise", "a", 1)
    assert drawn.min() > 0 and drawn.max() < 1 and stats.kstest(drawn, "uniform").pvalue > 1e-3


def test_a_key_that_is_gone_or_open_or_no_key_is_refused(tmp_path):
    path = tmp_path / "dp.key"
    with pytest.raises(FedsieveError, match="is gone"):
        dp.load_or_make_key(path, resumed=True)
    dp.load_or_make_key(path)
    path.chmod(0o640)
    with pytest.raises(FedsieveError, match="chmod 600"):
        dp.load_or_make_key(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(FedsieveError, match="5 bytes"):
        dp.load_or_make_key(path)

"""Intervals against slow references."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import multinomial, norm, ttest_ind, ttest_rel

from fedsieve.report.intervals import Z, matched, paired, unpaired, wilson

values = st.lists(st.floats(0, 1, width=32), min_size=2, max_size=6)


@st.composite
def counts(draw):
    n = draw(st.integers(1, 400))
    one = draw(st.integers(0, n))
    return one, draw(st.integers(0, n - one)), n


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(values, values)
def test_intervals_over_seeds_are_scipy_s(one, two):
    if np.ptp(one) + np.ptp(two) > 1e-6:
        expected = ttest_ind(one, two, equal_var=False).confidence_interval(0.95)
        assert unpaired(one, two) == pytest.approx(tuple(expected), rel=1e-6, abs=1e-9)
    length = min(len(one), len(two))
    one, two = one[:length], two[:length]
    if np.ptp(np.subtract(one, two)) > 1e-6:
        assert paired(one, two) == pytest.approx(tuple(ttest_rel(one, two).confidence_interval(0.95)), abs=1e-9)


def test_repeats_without_any_spread_have_an_interval_of_one_point():
    assert paired([0.5, 0.75], [0.25, 0.5]) == (0.25, 0.25)
    assert unpaired([0.5, 0.5], [0.25, 0.25, 0.25]) == (0.25, 0.25)


@given(counts())
def test_the_ends_over_examples_are_where_the_score_test_begins_to_reject(found):
    """The reference maximises the likelihood under each end by search instead of by formula."""
    one, two, n = found
    for end, sign in zip(matched(one, two, n), (1, -1), strict=True):
        if abs(end) >= 1 - 1e-9:
            assert one - two == n * round(end)
            continue

        def unlikely(share, end=end):
            parts = np.clip([share + end, share, 1 - 2 * share - end], 1e-300, 1)
            return -np.dot([one, two, n - one - two], np.log(parts))

        bounds = (max(0.0, -end), (1 - end) / 2)
        share = minimize_scalar(unlikely, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
        error = math.sqrt(max(n * (2 * share + end - end * end), 1e-300))
        assert (one - two - n * end) / error == pytest.approx(sign * Z, abs=0.02)


@given(counts())
def test_swapping_two_models_turns_the_interval_round(found):
    one, two, n = found
    low, high = matched(one, two, n)
    assert matched(two, one, n) == pytest.approx((-high, -low), abs=1e-9)
    assert -1 <= low <= (one - two) / n <= high <= 1
    if one + two:
        assert (low > 0 or high < 0) == (abs(one - two) / math.sqrt(one + two) > Z), "McNemar's test"


@pytest.mark.parametrize("shares", [(0.1, 0.05), (0.3, 0.02), (0.02, 0.02)])
def test_the_interval_over_examples_holds_the_truth_in_about_95_of_100_cases(shares):
    n = 40
    held = 0.0
    for one in range(n + 1):
        for two in range(n + 1 - one):
            chance = multinomial.pmf([one, two, n - one - two], n, [*shares, 1 - sum(shares)])
            if chance > 1e-7:
                low, high = matched(one, two, n)
                held += chance * (low <= shares[0] - shares[1] <= high)
    assert 0.93 < held <= 1


def test_wilson_s_interval_stays_within_0_and_1():
    assert wilson(0.0, 10)[0] == pytest.approx(0, abs=1e-12) and wilson(1.0, 10)[1] == pytest.approx(1)
    assert norm.cdf(Z) == pytest.approx(0.975)

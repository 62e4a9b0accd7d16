import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.errors import FedsieveError
from fedsieve.privacy.fixed_point import FixedPoint
from fedsieve.privacy.secagg import secure_sum

widths = st.sampled_from([16, 32, 64])


@given(widths, st.integers(1, 2**15 - 1), st.integers(1, 10**9), st.floats(1e-300, 1e300))
def test_no_sum_can_overflow(bits, clients, weight_bound, bound):
    point = FixedPoint(bits, clients, bound, weight_bound)
    assert clients * int(point.levels) < 2 ** (bits - 1)
    for sign in (1, -1):
        one = point.encode(np.array([sign * bound]), 1, np.array([0.0]))
        assert int(one[:1].view(f"<i{bits // 8}")[0]) == sign * int(point.levels)
    assert clients * (point.base - 1) < 2**bits
    assert point.base**point.digits > weight_bound


@given(widths, st.integers(1, 9), st.integers(1, 10**6), st.integers(0, 2**32 - 1))
def test_weighted_means_come_back_within_the_stated_bound(bits, clients, weight_bound, seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, weight_bound + 1, clients)
    values = rng.uniform(-1, 1, (clients, 30)) * 10.0 ** rng.integers(-9, 1, 30)
    point = FixedPoint(bits, clients, float(weight_bound), weight_bound)
    vectors = [point.encode(row, int(weight)) for row, weight in zip(values, weights, strict=True)]
    total, weight = point.decode(np.sum(vectors, axis=0, dtype=vectors[0].dtype))
    plain = weights @ values
    assert weight == weights.sum() and total.dtype == np.float64
    assert (np.abs(total - plain) <= clients * point.step + 1e-14 * clients * weight_bound).all()


def test_a_secure_sum_gives_the_weighted_mean_of_the_survivors():
    rng = np.random.default_rng(0)
    weights = {client: int(rng.integers(1, 500)) for client in range(7)}
    updates = {client: rng.normal(size=1000).clip(-3, 3) for client in range(7)}
    for bits in (16, 32, 64):
        point = FixedPoint(bits, 7, 1500.0, 500)
        inputs = {client: point.encode(updates[client], weights[client]) for client in range(7)}
        survivors, total, _ = secure_sum(inputs, 4, {1: 0, 3: 2, 4: 3})
        sums, weight = point.decode(total)
        assert weight == sum(weights[client] for client in survivors)
        mean = sum(weights[client] * updates[client] for client in survivors) / weight
        assert np.abs(sums / weight - mean).max() <= len(survivors) * point.step / weight + 1e-13


def test_rounding_is_unbiased_and_off_by_less_than_a_step():
    point = FixedPoint(16, 100, 1.0)
    values = np.repeat(np.linspace(-1, 1, 11) * 0.77, 20_000)
    back, _ = point.decode(point.encode(values))
    error = (back - values) / point.step
    assert np.abs(error).max() < 1
    assert np.abs(error.reshape(11, -1).mean(1)).max() < 5 * 0.5 / math.sqrt(20_000)


@given(widths, st.floats(0, 1, exclude_max=True))
def test_given_numbers_decide_the_rounding(bits, draw):
    point = FixedPoint(bits, 4, 1.0)
    values, draws = np.linspace(-1, 1, 9), np.full(9, draw)
    first, second = (point.encode(values, 1, draws) for _ in range(2))
    assert (first == second).all()
    whole = first[:-1].view(f"<i{bits // 8}")
    assert whole[4] == 0 and (whole[0], whole[-1]) == (-int(point.levels), int(point.levels))


@pytest.mark.parametrize("bad", [1.0000001, -1.0000001, math.nan, math.inf, 1e300])
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_values_beyond_the_bound_are_refused(bits, bad):
    with pytest.raises(FedsieveError, match="clip"):
        FixedPoint(bits, 10, 5.0, 5).encode(np.array([0.1, bad]), 5)


@pytest.mark.parametrize("weight", [-1, 6])
def test_weights_beyond_the_bound_are_refused(weight):
    with pytest.raises(FedsieveError, match="weight"):
        FixedPoint(16, 10, 5.0, 5).encode(np.zeros(1), weight)


@pytest.mark.parametrize(
    "arguments", [(8, 2, 1.0), (16, 2**15, 1.0), (16, 0, 1.0), (16, 2, 0.0), (16, 2, math.inf), (16, 2, 1.0, 0)]
)
def test_impossible_formats_are_refused(arguments):
    with pytest.raises(FedsieveError):
        FixedPoint(*arguments)


def test_a_scale_per_tensor_keeps_the_order_of_scores_that_span_many_orders():
    rng = np.random.default_rng(1)
    sizes, scales = [400, 300, 300], np.array([1e-12, 1e-3, 1e6])
    scores = rng.lognormal(sigma=3, size=(10, 1000)) * np.repeat(scales, sizes)
    bound = np.repeat([part.max() for part in np.split(scores, np.cumsum(sizes)[:-1], axis=1)], sizes)
    point = FixedPoint(64, 10, bound)
    total, _ = point.decode(np.sum([point.encode(row) for row in scores], axis=0, dtype=np.uint64))
    np.testing.assert_allclose(total, scores.sum(0), rtol=1e-10)
    assert (np.argsort(total) == np.argsort(scores.sum(0))).all()

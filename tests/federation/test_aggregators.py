import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.words import Robust, aggregate

from fedsieve.errors import FedsieveError
from fedsieve.federation import aggregators
from fedsieve.federation.aggregators import geometric_median

KINDS = ["median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "norm_bound"]
counts = st.integers(4, 12)  # of three, two are always each other's nearest: Krum would have to toss a coin
ROBUST = ["median", "trimmed_mean", "krum", "multi_krum", "geometric_median"]


@pytest.fixture(autouse=True, params=[7, 2**20], ids=["many blocks", "one block"], scope="module")
def _blocks(request):
    """Everything is tried in blocks of a coordinate or two as well."""
    with pytest.MonkeyPatch.context() as patch:
        original = aggregators._blocks
        patch.setattr(aggregators, "_blocks", lambda updates: original(updates, request.param))
        yield


def drawn(seed: int, count: int, k: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, k)).astype(np.float32))


def robust(count: int) -> Robust:
    f = (count - 3) // 2
    return Robust(share=f / count, f=f)


def middle_of(column: list[float], dropped: int) -> float:
    kept = sorted(column)[dropped : len(column) - dropped]
    return sum(kept) / len(kept)


def krum_scores(rows: np.ndarray, f: int) -> list[float]:
    scores = []
    for i, row in enumerate(rows):
        squares = sorted(float(((row - other) ** 2).sum()) for j, other in enumerate(rows) if j != i)
        scores.append(sum(squares[: len(rows) - f - 2]))
    return scores


def krum_order(rows: np.ndarray, f: int) -> list[int]:
    scores = krum_scores(rows, f)
    return sorted(range(len(rows)), key=lambda i: scores[i])


def with_nearest(rows: np.ndarray, f: int) -> np.ndarray:
    """Every row as the mean of the C - f that are nearest to it."""
    means = []
    for row in rows:
        nearest = sorted(rows, key=lambda other: float(((row - other) ** 2).sum()))
        means.append(sum(nearest[: len(rows) - f]) / (len(rows) - f))
    return np.array(means)


def assert_least_distant(point: np.ndarray, rows: np.ndarray, weights: np.ndarray) -> None:
    """The mean distance is convex: its least is where the rows' pulls cancel, or on one that weighs more than the others pull."""
    away = rows - point
    distances = np.linalg.norm(away, axis=1)
    there = distances < 1e-9
    pull = (weights[~there] / distances[~there]) @ away[~there]
    assert np.linalg.norm(pull) <= weights[there].sum() + 1e-6 * weights.sum()


def assert_as_reference(kind: str, found: torch.Tensor, rows: np.ndarray, weights: np.ndarray, chosen: Robust) -> None:
    if kind == "geometric_median":
        assert_least_distant(found.numpy(), rows, weights)
    else:
        np.testing.assert_allclose(found, reference(kind, rows, weights, chosen), atol=1e-12)


def reference(kind: str, rows: np.ndarray, weights: np.ndarray, chosen: Robust) -> np.ndarray:
    count = len(rows)
    if kind == "median":
        return np.array([middle_of(column, (count - 1) // 2) for column in rows.T.tolist()])
    if kind == "trimmed_mean":
        return np.array([middle_of(column, round(chosen.share * count)) for column in rows.T.tolist()])
    if kind == "krum":
        return rows[krum_order(rows, chosen.f)[0]]
    if kind == "multi_krum":
        return rows[krum_order(rows, chosen.f)[: count - chosen.f]].mean(0)
    norms = np.linalg.norm(rows, axis=1)
    limit = sorted(norms)[(count - 1) // 2]
    return np.average([row * min(1, limit / norm) for row, norm in zip(rows, norms, strict=True)], 0, weights)


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(0, 2**32), counts, st.integers(2, 12))
@example(383440, 4, 12)  # the geometric median is close to an update
@settings(max_examples=25)
def test_rules_are_their_references(kind, seed, count, k):
    rows, weights = drawn(seed, count, k), torch.from_numpy(np.random.default_rng(seed).uniform(1, 9, count))
    found = aggregate(kind, rows, weights, robust(count))
    assert found.dtype == torch.float64
    assert_as_reference(kind, found, rows.double().numpy(), weights.numpy(), robust(count))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "multi_krum"])
@given(st.integers(0, 2**32), counts, st.integers(2, 12), st.data())
@settings(max_examples=10)
def test_rules_after_mixing_are_their_references_of_means_of_the_nearest(kind, seed, count, k, data):
    rows, weights = drawn(seed, count, k), torch.from_numpy(np.random.default_rng(seed).uniform(1, 9, count))
    f = data.draw(st.integers(0, (count - 1) // 2))
    chosen = replace(robust(count), mix=f)
    means = with_nearest(rows.double().numpy(), f)
    found = aggregate(kind, rows, weights, chosen)
    if kind == "krum":  # several may be first, with the same nearest ones
        scores = np.array(krum_scores(means, chosen.f))
        first = means[scores <= scores.min() + 1e-9]
        assert np.abs(first - found.numpy()).max(1).min() <= 1e-12
    else:
        assert_as_reference(kind, found, means, weights.numpy(), chosen)


@pytest.mark.parametrize("kind", ROBUST)
def test_after_mixing_clients_far_off_are_as_if_they_had_not_been_there(kind):
    # Two kinds of honest clients, as skewed data makes them: a rule alone goes with one kind, or leaves out the rarer.
    honest = drawn(0, 8, 50) * 0.1 + torch.tensor([1.0] * 5 + [-1.0] * 3)[:, None]
    rows = torch.cat([honest, -100 * honest[:2]])
    alone, after = (
        aggregate(kind, rows, torch.ones(10), Robust(share=0.2, f=2, mix=mix)) - honest.double().mean(0)
        for mix in (None, 2)
    )
    assert after.abs().max() < 1e-6
    assert alone.norm() > 0.5 or kind == "multi_krum"  # which knows how many are hostile


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(0, 2**32), counts, st.integers(2, 12), st.randoms(use_true_random=False))
@settings(max_examples=15)
def test_the_order_of_clients_and_how_they_are_stored_do_not_matter(kind, seed, count, k, random):
    rows, weights = drawn(seed, count, k), torch.arange(1.0, count + 1)
    order = random.sample(range(count), count)
    found = aggregate(kind, rows, weights, robust(count))
    permuted = aggregate(kind, [rows[row] for row in order], weights[order], robust(count))
    torch.testing.assert_close(permuted, found, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", ROBUST)
@given(st.integers(0, 2**32), counts, st.integers(2, 12), st.integers(-8, 8))
@settings(max_examples=15)
def test_a_move_of_all_updates_moves_the_result_alike(kind, seed, count, k, move):
    rows = drawn(seed, count, k).mul(1024).round().div(1024)  # so that the sums are exact
    found, moved = (aggregate(kind, r, torch.ones(count), robust(count)) for r in (rows, rows + move))
    torch.testing.assert_close(moved, found + move, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_of_all_updates_scales_the_result(kind):
    rows = drawn(0, 9, 20)
    for scale in (2.0**-30, 2.0**30):
        found = aggregate(kind, rows * scale, torch.ones(9), robust(9)) / scale
        torch.testing.assert_close(found, aggregate(kind, rows, torch.ones(9), robust(9)))


@st.composite
def attacked(draw):
    """Honest rows, what hostile clients add (any finite float32, in whatever relation to honest rows), and an order."""
    count, k = draw(st.integers(5, 13)), draw(st.integers(1, 8))
    f = draw(st.integers(1, (count - 3) // 2))
    honest = drawn(draw(st.integers(0, 2**32)), count - f, k)
    numbers = st.one_of(st.floats(-3, 3, width=32), st.floats(width=32, allow_nan=False, allow_infinity=False))
    hostile = draw(
        st.one_of(
            st.lists(st.lists(numbers, min_size=k, max_size=k), min_size=f, max_size=f).map(torch.tensor),
            st.floats(-1e6, 1e6, width=32).map(lambda factor: honest[:f] * factor),
            numbers.map(lambda number: torch.full((f, k), number)),
        )
    )
    order = draw(st.permutations(range(count)))
    return honest, torch.cat([honest, hostile])[order], f


@pytest.mark.parametrize("kind", ROBUST)
@pytest.mark.parametrize("mix", [None, 1, 4])
def test_as_many_as_a_rule_keeps_out_cannot_carry_it_away_and_of_those_that_average_one_more_does(kind, mix):
    chosen = Robust(share=0.3, f=3, m=6, mix=mix)
    bears = chosen.rule(kind).bears(10)
    for hostile in (bears, bears + 1):
        rows = torch.cat([drawn(0, 10 - hostile, 20), torch.full((hostile, 20), 1e6)])
        found = aggregate(kind, rows, torch.ones(10), chosen)
        assert hostile > bears or found.abs().max() < 10
        assert hostile == bears or kind not in ("trimmed_mean", "multi_krum") or found.abs().max() > 1000


@given(attacked())
@settings(max_examples=60)
def test_hostile_clients_cannot_leave_the_range_of_honest_ones(case):
    honest, rows, f = case
    count = len(rows)
    for kind in ("median", "trimmed_mean"):
        found = aggregate(kind, rows, torch.ones(count), Robust(share=f / count))
        assert (found >= honest.amin(0) - 1e-12).all() and (found <= honest.amax(0) + 1e-12).all()


@given(attacked())
@settings(max_examples=60)
def test_krum_stays_near_an_honest_update(case):
    # An honest score is at most C - f - 2 squared diameters; of a hostile row's nearest others C - 2 f - 1 are honest.
    honest, rows, f = case
    count, honest = len(rows), honest.double()
    diameter = torch.cdist(honest, honest).max()
    bound = diameter * math.sqrt((count - f - 2) / (count - 2 * f - 1))
    single = aggregate("krum", rows, torch.ones(count), Robust(f=f))
    assert (honest - single).norm(dim=1).min() <= bound * 1.001
    several = aggregate("multi_krum", rows, torch.ones(count), Robust(f=f))
    assert (honest.mean(0) - several).norm() <= (bound + diameter) * 1.001


@given(attacked())
@settings(max_examples=60)
def test_the_geometric_median_stays_near_the_honest_mean(case):
    # Minsker 2015, lemma 2.1.
    honest, rows, f = case
    share, centre = f / len(rows), honest.double().mean(0)
    radius = (honest.double() - centre).norm(dim=1).max()
    found = aggregate("geometric_median", rows, torch.ones(len(rows)))
    assert (found - centre).norm() <= 1.01 * radius * (1 - share) / math.sqrt(1 - 2 * share)


@given(attacked(), st.floats(0.01, 10))
@settings(max_examples=30)
def test_a_norm_bound_bounds_what_a_client_adds(case, limit):
    honest, rows, _ = case
    found = aggregate("norm_bound", rows, torch.ones(len(rows)), Robust(limit=limit))
    assert found.norm() <= limit * 1.001
    median = aggregate("norm_bound", rows, torch.ones(len(rows)))
    assert median.norm() <= honest.double().norm(dim=1).max() * 1.001


def test_the_geometric_median_is_the_majority_and_heeds_weights():
    rows = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [5.0, 5.0], [-9.0, 7.0]])
    torch.testing.assert_close(geometric_median(rows, torch.ones(5)), rows[0].double())
    heavy = geometric_median(rows, torch.tensor([1.0, 1.0, 1.0, 1.0, 9.0]))
    torch.testing.assert_close(heavy, rows[4].double())


@given(st.integers(0, 2**32), counts, st.integers(2, 12), st.sampled_from([-0.3, -1e-2, -1e-3, -1e-4, 1e-6, 1e-3, 0.3]))
def test_the_geometric_median_is_an_update_where_that_outweighs_what_the_others_pull(seed, count, k, more):
    rows = drawn(seed, count, k)
    others = rows[1:].double() - rows[0]
    weights = torch.ones(count, dtype=torch.float64)
    weights[0] = (1 + more) * (others / others.norm(dim=1, keepdim=True)).sum(0).norm()
    found = geometric_median(rows, weights)
    assert found.equal(rows[0].double()) == (more > 0)
    assert_least_distant(found.numpy(), rows.double().numpy(), weights.numpy())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_updates_that_are_not_finite_are_refused(kind, value):
    rows = drawn(0, 7, 9)
    rows[4, 8] = value
    with pytest.raises(FedsieveError, match="update 4"):
        aggregate(kind, rows, torch.ones(7))


@pytest.mark.parametrize(
    ("kind", "count", "chosen", "words"),
    [
        ("krum", 6, Robust(f=2), ["2 f + 3 = 7", "f up to 1 works"]),
        ("multi_krum", 2, Robust(f=1), ["at least", "neither"]),
        ("multi_krum", 7, Robust(f=2, m=6), ["from 1 to 5 works"]),
        ("trimmed_mean", 5, Robust(share=0.5), ["none is left", "up to 0.4 works"]),
        ("median", 4, Robust(mix=2), ["2 mix + 1 = 5", "mix up to 1 works"]),
        ("median", 0, Robust(), ["no updates"]),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(kind, count, chosen, words):
    with pytest.raises(FedsieveError) as caught:
        aggregate(kind, drawn(0, count, 4), torch.ones(count), chosen)
    assert all(word in str(caught.value) for word in words)


@given(st.integers(1, 40))
def test_the_share_that_a_refusal_names_works(count):
    assume(count > 2)
    largest = math.floor(100 * ((count - 1) // 2) / count) / 100
    aggregators.check(Robust(share=largest).rule("trimmed_mean"), count)


def test_a_mapped_file_is_as_good_as_memory(tmp_path):
    rows = drawn(0, 9, 50)
    rows.numpy().tofile(tmp_path / "updates")
    mapped = torch.from_file(str(tmp_path / "updates"), size=450).view(9, 50)
    for kind in KINDS:
        assert aggregate(kind, mapped, torch.ones(9)).equal(aggregate(kind, rows, torch.ones(9)))
    assert mapped.equal(rows)

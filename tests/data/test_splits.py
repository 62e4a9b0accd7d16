import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.data.splits import hold_out
from fedsieve.randomness import generator

labels = st.lists(st.integers(0, 6), min_size=1, max_size=120).map(np.array)


@given(labels, st.floats(0, 0.99), st.booleans(), st.integers(0, 9))
def test_rows_are_dealt_once_and_the_share_is_exact(labels, fraction, stratified, seed):
    kept, held = hold_out(labels, fraction, stratified, generator(seed, "split"))
    assert sorted([*kept, *held]) == list(range(len(labels)))
    assert len(held) == round(fraction * len(labels))
    assert (np.diff(kept) > 0).all() and (np.diff(held) > 0).all()


@given(labels, st.floats(0, 0.99), st.integers(0, 9))
def test_a_stratified_split_keeps_every_class_share_to_within_one(labels, fraction, seed):
    _, held = hold_out(labels, fraction, True, generator(seed, "split"))
    count = round(fraction * len(labels))
    for label in set(labels):
        size = (labels == label).sum()
        assert abs((labels[held] == label).sum() - size * count / len(labels)) < 1 + 1e-9


@given(labels, st.floats(0, 0.99), st.integers(0, 9))
def test_leftover_rows_go_to_the_largest_remainders(labels, fraction, seed):
    _, held = hold_out(labels, fraction, True, generator(seed, "split"))
    quota = {label: (labels == label).sum() * len(held) / len(labels) for label in set(labels)}
    up = {label for label in quota if (labels[held] == label).sum() > int(quota[label] + 1e-9)}
    least = min((quota[label] % 1 for label in up), default=1.0)
    assert all(quota[label] % 1 <= least + 1e-9 or quota[label] % 1 > 1 - 1e-9 for label in quota.keys() - up)


def test_the_seed_moves_the_split():
    labels = np.arange(1000) % 10
    one, two = (hold_out(labels, 0.1, True, generator(seed, "split"))[1] for seed in (0, 1))
    assert len(np.intersect1d(one, two)) < 30

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.privacy.zero_sum import PadsRemain, padded, total

cohorts = st.sets(st.integers(0, 1000), min_size=1, max_size=12)


def sent(cohort, updates, ns, *address, **options):
    return {
        client: padded(n * update.double(), client, cohort, *address, **options)
        for client, update, n in zip(sorted(cohort), updates, ns, strict=True)
    }


def case(cohort, k=6):
    rng = np.random.default_rng(len(cohort))
    return torch.from_numpy(rng.normal(size=(len(cohort), k))).float(), rng.integers(1, 500, len(cohort)).tolist()


@given(cohorts, st.integers(0, 50), st.floats(0.1, 1000))
def test_the_sum_is_that_of_plain_averaging(cohort, offset, scale):
    updates, ns = case(cohort)
    found = total(sent(cohort, updates, ns, "stage", 3, offset=offset, scale=scale), cohort)
    plain = sum(n * update.double() for n, update in zip(ns, updates, strict=True))
    torch.testing.assert_close(found, plain, atol=1e-10 * scale, rtol=1e-12)


@given(st.sets(st.integers(0, 1000), min_size=2, max_size=12), st.data())
def test_any_dropout_is_found_and_would_corrupt_the_sum(cohort, data):
    updates, ns = case(cohort)
    messages = sent(cohort, torch.zeros_like(updates), ns)
    gone = data.draw(st.sets(st.sampled_from(sorted(cohort)), min_size=1))
    left = {client: message for client, message in messages.items() if client not in gone}
    with pytest.raises(PadsRemain, match=f"{len(gone)} of {len(cohort)}"):
        total(left, cohort)
    if left:
        assert sum(left.values()).abs().min() > 0


def test_pads_are_gaussian_and_new_in_every_round():
    nothing, cohort = torch.zeros(20_000), [4, 7, 9]
    first, again, next_round = (padded(nothing, 4, cohort, "stage", r, scale=2.0) for r in (0, 0, 1))
    assert first.equal(again) and not first.equal(next_round)
    assert first.mean().abs() < 0.06 and first.std() == pytest.approx(2.0, rel=0.02)
    last = padded(nothing, 9, cohort, "stage", 0, scale=2.0)
    assert last.std() == pytest.approx(2.0 * 2**0.5, rel=0.02)


def test_whoever_knows_the_seeds_takes_the_pad_off():
    update, cohort = torch.linspace(-1, 1, 50), [1, 2, 3]
    message = padded(10 * update.double(), 2, cohort, offset=77)
    pad = padded(torch.zeros(50), 2, cohort, offset=77)
    torch.testing.assert_close((message - pad) / 10, update.double())

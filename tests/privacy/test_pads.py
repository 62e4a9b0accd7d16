"""Keys, pads and shares on their own. The protocol built from them is tested in test_secagg.py."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.privacy.test_secagg import uniform

from fedsieve.privacy.pads import add_pad, agree, derive, new_key, public, split

CLIENT = st.integers(0, 2**32 - 1)
USES = st.tuples(
    st.binary(min_size=16, max_size=32),
    st.sampled_from([b"share", b"self", b"commitment", b"pair"]),
    st.binary(min_size=32, max_size=32),
    CLIENT,
    CLIENT,
)


@given(USES, USES, st.integers(0, 4))
def test_a_derived_key_depends_on_every_argument(use, other, place):
    """Replace one of the five arguments: the key changes exactly when the argument does."""
    changed = (*use[:place], other[place], *use[place + 1 :])
    assert (derive(*use) == derive(*changed)) == (use == changed)
    assert len(derive(*use)) == 16


def test_two_clients_agree_on_a_secret_that_a_third_does_not_have():
    first, second, third = (new_key() for _ in range(3))
    assert agree(first, public(second)) == agree(second, public(first))
    assert len({agree(one, public(two)) for one, two in ((first, second), (first, third), (second, third))}) == 3


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<u8"])
def test_a_pad_never_repeats_within_a_vector(dtype):
    """If two parts had the same pad, subtracting them would reveal the difference of their values."""
    values = np.zeros(2**20 // np.dtype(dtype).itemsize, dtype)
    add_pad(values, os.urandom(16))
    blocks = values.view("V16")  # of AES
    assert len(np.unique(blocks)) == len(blocks)


@pytest.mark.parametrize("threshold", [2, 3, 4])
def test_fewer_shares_than_the_threshold_look_uniform(threshold):
    """Share one secret many times. Every 16-byte piece, and the sum of any two in GF(2^128), looks random."""
    secret, count = bytes(range(32)), threshold + 1
    seen: dict[tuple[int, int], list[bytes]] = {}
    for _ in range(400):
        pieces = [
            int.from_bytes(share[at : at + 16])
            for share in split(secret, threshold, count)[: threshold - 1]
            for at in (0, 16)
        ]
        for first, one in enumerate(pieces):
            for second, two in enumerate([0, *pieces[:first]]):
                seen.setdefault((first, second), []).append((one ^ two).to_bytes(16))
    assert all(uniform(b"".join(values)) for values in seen.values())
    assert all(len(set(values)) == len(values) for values in seen.values())

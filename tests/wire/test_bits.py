import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.wire import bits
from fedsieve.wire.bits import MessageError, entropy, pack, pack_mask, unpack, unpack_mask

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6)


def space_of(shapes) -> ParamSpace:
    return ParamSpace(tuple(f"t{number}" for number in range(len(shapes))), tuple(shapes))


def random_mask(space: ParamSpace, density: float, seed: int = 0) -> Mask:
    return Mask.from_bool(space, torch.from_numpy(np.random.default_rng(seed).random(space.size) < density))


@st.composite
def masks(draw):
    """Two masks of one space, the second inside the first."""
    space = space_of(draw(shapes))
    outer = random_mask(space, draw(st.sampled_from([0, 0.01, 0.3, 0.9, 1])), draw(st.integers(0, 99)))
    return outer, outer & random_mask(space, draw(st.sampled_from([0, 0.5, 0.9, 1])), draw(st.integers(0, 99)))


def surprise(mask: Mask, within: Mask) -> float:
    """The bits of the entropy, weight by weight."""
    bits = 0.0
    for inside, active in zip(
        mask.space.unflatten(within.to_bool()).values(), mask.space.unflatten(mask.to_bool()).values(), strict=True
    ):
        among = active[inside].tolist()
        bits -= sum(math.log2(among.count(weight) / len(among)) for weight in among)
    return bits


@given(masks())
@example((Mask.ones(space_of([(), (3,), ()])), Mask.zeros(space_of([(), (3,), ()]))))
def test_masks_come_back_and_cost_little_more_than_their_entropy(drawn):
    outer, mask = drawn
    for within in (None, outer):
        data = pack_mask(mask, within)
        assert unpack_mask(data, mask.space, within) == mask
        whole = within or Mask.ones(mask.space)
        bits = surprise(mask, whole)
        assert entropy(mask.counts().values(), whole.counts().values()) == pytest.approx(bits)
        counts = sum(2 for size in whole.counts().values() if size)
        assert len(data) <= 1.01 * bits / 8 + counts + 8


def test_full_and_empty_tensors_cost_their_count():
    space = space_of([(300, 300), (), (0, 4), (200,)])
    for mask in (Mask.ones(space), Mask.zeros(space)):
        assert len(pack_mask(mask)) == 3 + 1 + 0 + 1
        assert unpack_mask(pack_mask(mask), space) == mask


def test_22_million_weights_are_within_a_hundredth_of_the_limit():
    space = space_of([(384, 384)] * 100 + [(384,)] * 50 + [(7_219_601,)])
    density = np.repeat(np.linspace(0.001, 0.3, len(space.shapes)), np.diff(space.offsets))
    mask = Mask.from_bool(space, torch.from_numpy(np.random.default_rng(0).random(space.size) < density))
    data = pack_mask(mask)
    assert len(data) < 1.01 * entropy(mask.counts().values(), np.diff(space.offsets).tolist()) / 8
    assert unpack_mask(data, space) == mask
    tier = mask & random_mask(space, 0.5)
    assert len(pack_mask(tier, mask)) < 1.01 * mask.count / 8
    assert unpack_mask(pack_mask(tier, mask), space, mask) == tier


def test_a_mask_beyond_the_superset_is_refused():
    space = space_of([(9,)])
    with pytest.raises(FedsieveError, match="all active there"):
        pack_mask(Mask.ones(space), Mask.zeros(space))


@given(st.lists(st.integers(0, 400), max_size=4), st.binary(max_size=40))
def test_any_bytes_are_refused_or_the_only_ones_of_their_mask(sizes, data):
    try:
        active = unpack(data, sizes)
    except MessageError as error:
        assert error.reason in ("mask", "length")
    else:
        assert pack(active, sizes) == data


@given(st.integers(1, 1000), st.floats(0, 1), st.integers(0, 99), st.data())
def test_changed_sections_are_refused_or_another_mask(size, density, seed, data):
    active = np.random.default_rng(seed).random(size) < density
    packed = bytearray(pack(active, [size]))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(packed), pack(active, [size]) + b"\0\0\0\0", pack(active, [size])[:-1]):
        try:
            assert not np.array_equal(unpack(damaged, [size]), active)
        except MessageError as error:
            assert error.reason in ("mask", "length")


def test_counts_beyond_their_tensor_are_refused():
    with pytest.raises(MessageError, match="201 active weights of 200"):
        unpack(bytes([201]), [200])
    with pytest.raises(MessageError, match="cannot be"):
        unpack(b"", [200])


def test_a_mask_that_is_sent_again_is_not_coded_again(monkeypatch):
    """As every round with newcomers does. Each `within` is a code of its own, and other bytes are never taken for known ones."""
    coded = []
    monkeypatch.setattr(bits, "pack", lambda *given: coded.append(1) or pack(*given))
    generator = torch.Generator().manual_seed(5)
    space = ParamSpace(("w",), ((1000,),))
    active = torch.rand(space.size, generator=generator)
    mask, wide = (Mask.from_bool(space, active < share) for share in (0.1, 0.5))
    for within in (None, wide):
        coded.clear()
        data = [pack_mask(Mask(space, mask.bits), within) for _ in range(3)]
        assert [unpack_mask(one, space, within) for one in data] == [mask] * 3
        assert len(coded) == 2  # once, and once more to check what was decoded
    for _ in range(2):  # nor is a refusal remembered as a mask
        with pytest.raises(MessageError):
            unpack_mask(data[0][:-4], space, wide)

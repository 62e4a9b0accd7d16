import json

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=6)


def space_of(shapes) -> ParamSpace:
    return ParamSpace(tuple(f"t{number}" for number in range(len(shapes))), tuple(shapes))


@st.composite
def masks(draw, count=1):
    space = space_of(draw(shapes))
    vectors = [draw(st.lists(st.booleans(), min_size=space.size, max_size=space.size)) for _ in range(count)]
    return [Mask.from_bool(space, torch.tensor(vector, dtype=torch.bool)) for vector in vectors]


def members(mask: Mask) -> set[int]:
    return set(mask.indices().tolist())


@given(masks())
def test_packing_keeps_every_bit(drawn):
    (mask,) = drawn
    active = mask.to_bool()
    assert Mask.from_bool(mask.space, active) == mask
    assert active.dtype == torch.bool and active.shape == (mask.space.size,)
    assert mask.indices().dtype == torch.int64 and torch.equal(mask.indices(), active.nonzero().squeeze(1))
    assert mask.bits.nbytes == (mask.space.size + 7) // 8
    assert mask.count == int(active.sum())
    if mask.space.size:
        assert mask.density == mask.count / mask.space.size and mask.sparsity == 1 - mask.density
    views = mask.space.unflatten(active)
    assert mask.counts() == {name: int(view.sum()) for name, view in views.items()}
    for name, view in views.items():
        assert torch.equal(mask.tensor(name), view)


@given(masks(count=2))
def test_algebra_is_that_of_sets(drawn):
    a, b = drawn
    one, two = members(a), members(b)
    everything = set(range(a.space.size))
    assert members(a & b) == one & two
    assert members(a | b) == one | two
    assert members(a - b) == one - two
    assert members(a ^ b) == one ^ two
    assert members(~a) == everything - one
    assert members(Mask.ones(a.space)) == everything and members(Mask.zeros(a.space)) == set()
    assert (a <= b) == (one <= two) and (a >= b) == (one >= two)
    assert (a == b) == (one == two) == (a.id == b.id)
    assert ~~a == a and hash(~~a) == hash(a) and len({a, ~~a}) == 1


def test_a_mask_cannot_be_changed():
    bits = np.array([5], dtype=np.uint8)
    mask = Mask(space_of([(4,)]), bits)
    bits[0] = 0
    assert mask.count == 2
    with pytest.raises(ValueError):
        mask.bits[0] = 1
    with pytest.raises(ValueError):
        mask.bits.flags.writeable = True


def test_bits_that_are_no_weights_are_refused():
    with pytest.raises(FedsieveError, match="beyond the 4 weights"):
        Mask(space_of([(4,)]), np.array([16], dtype=np.uint8))
    with pytest.raises(FedsieveError, match="needs 1 bytes"):
        Mask(space_of([(4,)]), np.zeros(2, dtype=np.uint8))
    with pytest.raises(FedsieveError, match="bool vector of 4"):
        Mask.from_bool(space_of([(4,)]), torch.ones(4))
    with pytest.raises(FedsieveError, match="no tensor t9"):
        Mask.ones(space_of([(4,)])).tensor("t9")


def test_masks_of_other_spaces_do_not_mix():
    a = Mask.ones(space_of([(2, 3), (6,)]))
    for other, message in [
        ([(3, 2), (6,)], r"t0 \(2, 3\) against t0 \(3, 2\)"),  # same size: would misalign silently
        ([(2, 3), (6,), (1,)], r"2 tensors and 12 weights, the other 3 tensors and 13; only the other has t2"),
        ([(2, 3)], "only its own has t1"),
    ]:
        b = Mask.zeros(space_of(other))
        for operation in (lambda a, b: a & b, lambda a, b: a | b, lambda a, b: a - b, lambda a, b: a <= b):
            with pytest.raises(FedsieveError, match="does not fit"):
                operation(a, b)
        with pytest.raises(FedsieveError, match=message):
            a.check(b.space)
        assert a != b
    renamed = ParamSpace(("t0", "other"), a.space.shapes)
    with pytest.raises(FedsieveError, match=r"t1 \(6,\) against other \(6,\)"):
        a.check(renamed)
    with pytest.raises(TypeError, match="not with int"):
        a & 3


def example() -> Mask:
    torch.manual_seed(0)
    space = ParamSpace(("blocks.0.é.weight", "b"), ((5, 7), (3,)))
    return Mask.from_bool(space, torch.rand(space.size) < 0.5)


@settings(max_examples=25, deadline=None)
@given(drawn=masks())
def test_save_and_load_round_trip(tmp_path_factory, drawn):
    path = tmp_path_factory.getbasetemp() / "mask.safetensors"
    drawn[0].save(path)
    loaded = Mask.load(path, drawn[0].space)
    assert loaded == drawn[0] and loaded.space == drawn[0].space and loaded.id == drawn[0].id


def test_a_damaged_file_is_refused_by_name(tmp_path):
    mask, path = example(), tmp_path / "mask.safetensors"
    mask.save(path)
    content = path.read_bytes()
    refused = 0
    for place in range(len(content)):
        for flip in (0x01, 0x80, 0xFF):
            path.write_bytes(content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :])
            try:
                # Padding may change from one kind of white space to another; the mask may not.
                assert Mask.load(path) == mask
            except FedsieveError as error:
                refused += 1
                assert str(path) in str(error)
    assert refused >= 3 * len(content) - 10
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(FedsieveError, match=r"mask\.safetensors"):
            Mask.load(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(FedsieveError, match=r"mask\.safetensors"):
        Mask.load(path)


def test_foreign_and_forged_files_are_refused(tmp_path):
    path, mask = tmp_path / "mask.safetensors", example()
    with pytest.raises(FedsieveError, match="no such file"):
        Mask.load(path)
    path.write_bytes(safetensors.numpy.save({"bits": mask.bits}))
    with pytest.raises(FedsieveError, match="not a mask file"):
        Mask.load(path)
    mask.save(path)
    with pytest.raises(FedsieveError, match=r"mask\.safetensors.*38 weights, the other 1 tensor and 4"):
        Mask.load(path, space_of([(4,)]))
    good = {"format": "fedsieve mask 1", "names": '["a"]', "shapes": "[[8]]", "id": "0"}
    bits = {"bits": np.zeros(1, dtype=np.uint8)}
    for change in (
        {},
        {"shapes": "[[-8]]"},
        {"shapes": "[[8.0]]"},
        {"shapes": "[8]"},
        {"names": '["a", "a"]', "shapes": "[[4],[4]]"},
        {"names": "[1]"},
        {"names": "nonsense"},
        {"shapes": json.dumps([[10**18]])},
    ):
        path.write_bytes(safetensors.numpy.save(bits, metadata=good | change))
        with pytest.raises(FedsieveError, match=r"mask\.safetensors"):
            Mask.load(path)


def test_a_hundred_masks_of_22_million_weights_fit_in_300_megabytes():
    assert 100 * Mask.zeros(space_of([(22_000_000,)])).bits.nbytes < 300e6

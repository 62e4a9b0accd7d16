import struct

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.wire.codec import (
    OVERHEAD,
    Coding,
    Decoded,
    MessageError,
    decode,
    decode_many,
    dense_bytes,
    encode,
    encode_many,
    limit_bytes,
)
from fedsieve.wire.values import BITS, dequantise, quantise

REASONS = {
    "truncated", "magic", "version", "length", "checksum", "format", "n", "space", "mask", "count", "round", "client",
    "not finite",
}  # fmt: skip
SPACE = ParamSpace(("a", "b", "scalar", "none", "c"), ((12, 5), (7,), (), (0, 3), (2, 3, 4)))
FORMATS = [format for format in BITS if format != "none"]
codings = st.one_of(
    st.builds(Coding, st.sampled_from(list(BITS)), st.integers(8, 70)),
    st.builds(
        Coding,
        st.sampled_from([format for format in FORMATS if format != "coo"]),
        st.integers(8, 70),
        st.floats(0.01, 1),
    ),
)


def mask_of(density: float, seed: int = 0) -> Mask:
    return Mask.from_bool(SPACE, torch.from_numpy(np.random.default_rng(seed).random(SPACE.size) < density))


def reseal(message: bytes) -> bytes:
    """The message with the length and checksum that its bytes should have."""
    header = bytearray(message[: OVERHEAD - 8])
    struct.pack_into("<I", header, 8, len(message))
    body = message[OVERHEAD:]
    return bytes(header) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(header) + body)) + body


@st.composite
def sent(draw):
    """A good message, and what its receiver expects."""
    coding, mask = draw(codings), mask_of(draw(st.sampled_from([0, 0.1, 0.5, 1])), draw(st.integers(0, 9)))
    kind = draw(st.sampled_from(["space", "known", "enclosed", "within"]))
    within = mask | mask_of(0.5, 99) if kind == "within" and coding.format != "coo" else None
    over = SPACE if kind == "space" else mask
    k = SPACE.size if kind == "space" else mask.count
    values = None if coding.format == "none" else torch.randn(k, generator=torch.Generator().manual_seed(k))
    enclosed = kind in ("enclosed", "within")
    message = encode(values, coding, over, round=3, client=8, n=5, key=1, enclose=enclosed, within=within)
    expected = {"coding": coding, "over": SPACE if enclosed else over, "enclosed": enclosed, "within": within}
    return message, expected, values, mask if kind != "space" else None


@given(sent())
def test_every_message_comes_back(drawn):
    message, expected, values, mask = drawn
    coding = expected["coding"]
    got = decode(message, **expected, round=3, client=8)
    assert (got.round, got.client, got.n, got.format) == (3, 8, 5, coding.format)
    assert got.mask_id == (mask.id if mask else None)
    assert got.mask == (mask if expected["enclosed"] else None)
    if values is None:
        assert got.values.shape == (0,)
        return
    kept = coding.kept(len(values))
    chosen = sorted(sorted(range(len(values)), key=lambda place: (-abs(values[place].item()), place))[:kept])
    payload = quantise(values[chosen][None], coding, torch.tensor([1]))
    reference = torch.zeros(len(values), dtype=got.values.dtype)
    reference[chosen] = dequantise(payload, kept, coding)[0]
    assert torch.equal(got.values, reference)
    if coding.format in ("fp32", "fp64", "coo") and coding.top_k is None:
        assert torch.equal(got.values.double(), values.double())


@pytest.mark.parametrize("coding", [Coding("fp16"), Coding("int8", 8), Coding("int4", 16, 0.3), Coding("coo")])
@pytest.mark.parametrize("threaded", [0, 2**23])
def test_a_batch_is_its_messages_and_loses_only_the_bad_ones(coding, threaded, monkeypatch):
    monkeypatch.setattr("fedsieve.wire.codec.THREADED", {"cpu": threaded})
    mask = mask_of(0.5, 0)
    values = torch.randn(3, mask.count)
    batch = encode_many(values, coding, mask, round=1, clients=[4, 5, 6], ns=[7, 8, 9], keys=[1, 2, 2**64 - 1])
    for number, key in enumerate([1, 2, 2**64 - 1]):
        alone = encode(values[number], coding, mask, round=1, client=4 + number, n=7 + number, key=key)
        assert alone == batch[number]
    damaged = [batch[0], bytes(batch[1][:-1]) + bytes([batch[1][-1] ^ 1]), batch[2]]
    first, second, third = decode_many(damaged, coding, mask, round=1, clients=[4, 5, 6])
    assert isinstance(second, MessageError) and second.reason == "checksum"
    for number, got in ((0, first), (2, third)):
        assert isinstance(got, Decoded) and got.n == 7 + number
        assert torch.equal(got.values, decode(batch[number], coding, mask).values)


@given(sent())
def test_a_message_says_the_same_wherever_its_bytes_lie(drawn):
    """Values may be read in place from memory of `encode_many`'s, but never from the bytes of somebody else."""
    message, expected, _, _ = drawn
    own = np.frombuffer(message, dtype=np.uint8).copy().data
    theirs = bytearray(message)
    found = [decode(one, **expected) for one in (message, own, theirs)]
    theirs[:] = bytes(len(theirs))
    assert all(torch.equal(one.values, found[0].values) for one in found)
    assert bytes(own) == message


@pytest.mark.parametrize("format", ["fp32", "fp64", "fp16", "int8"])
def test_values_read_in_place_are_aligned(format):
    for density in (0.2, 0.5, 0.9):  # sections of different lengths
        mask = mask_of(density)
        (message,) = encode_many(
            torch.randn(1, mask.count), Coding(format), mask, round=0, clients=[0], ns=[1], keys=[1], enclose=True
        )
        values = decode(message, Coding(format), SPACE, enclosed=True).values
        assert values.data_ptr() % values.element_size() == 0


def test_keys_change_what_is_rounded_at_random_and_nothing_else():
    values = torch.randn(SPACE.size)
    for format in FORMATS:
        one, two = (encode(values, Coding(format), SPACE, round=0, client=0, key=key) for key in (1, 2))
        assert (one != two) == (format in ("int8", "int4"))


def test_sizes_are_header_mask_and_values():
    mask = mask_of(0.5)
    k, values = mask.count, torch.randn(mask.count)
    assert OVERHEAD == 68
    assert len(encode(values, Coding("bf16"), mask, round=0, client=0)) == 68 + 2 * k
    assert len(encode(values, Coding("int8", 16), mask, round=0, client=0)) == 68 + 4 + 2 * -(-k // 16) + k
    assert (
        len(encode(None, Coding("none"), mask, round=0, client=0, enclose=True)) <= 68 + limit_bytes(mask, 0, True) + 9
    )
    matrix = ParamSpace(("w",), ((30, 40),))
    assert len(encode(torch.randn(1200), Coding("coo"), matrix, round=0, client=0)) == 68 + 2 + 20 * 1200
    assert limit_bytes(mask, 8, False) == k and dense_bytes(SPACE) == 4 * SPACE.size
    half = Mask.from_bool(matrix, torch.arange(1200) % 2 == 0)
    assert limit_bytes(half, 16, True) == 1200 + 1200 / 8


def test_wrong_requests_are_refused():
    mask = mask_of(0.5)
    good = {"round": 0, "client": 0}
    for values, coding, options, message in (
        (torch.ones(3), Coding(), good, "cannot be made of 3"),
        (torch.ones(mask.count), Coding("none"), good, "0 values in none"),
        (
            torch.full((mask.count,), 7e4),
            Coding("fp16"),
            good,
            "fp16 is too narrow for a value of 70000, which bf16 and int8 are not",
        ),
        (torch.full((mask.count,), torch.nan), Coding("int8"), good, "client 0: int8 is too narrow for a value of nan"),
        (torch.ones(mask.count), Coding(), {"round": -1, "client": 0}, "cannot hold round -1"),
        (torch.ones(mask.count), Coding(), {"round": 0, "client": 2**32}, "cannot hold"),
        (torch.ones(mask.count), Coding(), {**good, "n": 2**63}, "cannot hold"),
    ):
        with pytest.raises(FedsieveError, match=message):
            encode(values, coding, mask, **options)
    with pytest.raises(FedsieveError, match="no mask to enclose"):
        encode(torch.ones(SPACE.size), Coding(), SPACE, **good, enclose=True)
    with pytest.raises(FedsieveError, match="one row of values"):
        encode_many(torch.ones(2, mask.count), Coding(), mask, round=0, clients=[1], ns=[1])
    assert decode(encode(torch.ones(mask.count), Coding(), mask, **good, n=2**63 - 1), Coding(), mask).n == 2**63 - 1


@pytest.mark.parametrize("format", FORMATS)
def test_values_that_are_not_finite_can_be_sent_but_not_received(format):
    for bad in (torch.nan, torch.inf, -torch.inf):
        for coding in (Coding(format), Coding(format, top_k=0.2)) if format != "coo" else (Coding(format),):
            values = torch.randn(2, SPACE.size)
            values[1, 3] = bad
            options = {"round": 0, "clients": [0, 1], "ns": [1, 1], "keys": [1, 2]}
            with pytest.raises(FedsieveError, match="client 1"):
                encode_many(values, coding, SPACE, **options)
            good, refused = decode_many(encode_many(values, coding, SPACE, **options, check=False), coding, SPACE)
            assert isinstance(good, Decoded) and isinstance(refused, MessageError) and refused.reason == "not finite"


def test_each_fault_has_its_reason():
    mask, coding = mask_of(0.5), Coding("int8", 16)
    message = encode(torch.randn(mask.count), coding, mask, round=3, client=8, n=5)
    other = ParamSpace(("x",), ((SPACE.size,),))

    def put(place: int, form: str, *numbers: int) -> bytes:
        changed = bytearray(message)
        struct.pack_into(form, changed, place, *numbers)
        return reseal(bytes(changed))

    def reason(message: bytes, coding: Coding = coding, over: Mask | ParamSpace = mask, **options) -> str:
        with pytest.raises(MessageError) as caught:
            decode(message, coding, over, **options)
        return caught.value.reason

    assert reason(b"") == reason(message[:67]) == reason(message[:-1]) == "truncated"
    assert reason(message + b"\0") == "length"
    assert reason(reseal(message + b"\0")) == reason(reseal(message[:-1])) == "length"
    assert reason(b"x" + message[1:]) == "magic"
    assert reason(put(3, "B", 2)) == "version"
    assert reason(message[:70] + bytes([message[70] ^ 4]) + message[71:]) == "checksum"
    assert reason(message, Coding("int4", 16)) == reason(message, Coding("int8", 32)) == "format"
    assert reason(put(28, "<q", -1)) == "n"
    assert reason(message, over=other) == "space"
    assert reason(message, over=mask_of(0.5, 1)) == reason(message, over=SPACE) == "mask"
    assert reason(message, over=SPACE, enclosed=True) == "mask"
    assert reason(put(20, "<I", mask.count + 1)) == reason(put(20, "<I", 2**32 - 1)) == "count"
    assert reason(put(24, "<I", 2**32 - 1)) == "length" and reason(put(24, "<I", 4)) == "mask"
    assert reason(message, round=4) == "round" and reason(message, client=9) == "client"
    assert reason(put(68, "<f", float("nan"))) == reason(put(72, "<H", 0x7C00)) == "not finite"
    enclosed = encode(torch.randn(mask.count), Coding(), mask, round=0, client=0, enclose=True)
    assert reason(enclosed, Coding(), mask) == "mask"
    assert reason(enclosed, Coding(), SPACE, enclosed=True, within=Mask.ones(SPACE) - mask_of(0.1)) in (
        "mask",
        "length",
    )
    changed = bytearray(enclosed)
    changed[68] += 1
    assert reason(reseal(bytes(changed)), Coding(), SPACE, enclosed=True) == "mask"
    fewer = encode(torch.randn(mask.count), Coding("int8", 16, 0.5), mask, round=0, client=0)
    assert reason(fewer, Coding("int8", 16, 0.6)) in ("count", "mask", "length")


def test_indices_of_coo_are_read_and_checked():
    mask = mask_of(0.5)
    message = encode(torch.randn(mask.count), Coding("coo"), mask, round=0, client=0)
    assert decode(message, Coding("coo"), SPACE, enclosed=True).mask == mask
    first = 68 + 4  # four tensors that are not empty have a count of one byte
    for index in (-1, 12, 11, 2**62):
        changed = bytearray(message)
        struct.pack_into("<q", changed, first, index)
        for over, enclosed in ((mask, False), (SPACE, True)):
            with pytest.raises(MessageError) as caught:
                decode(reseal(bytes(changed)), Coding("coo"), over, enclosed=enclosed)
            assert caught.value.reason == "mask"


def survives(message: bytes, expected: dict) -> None:
    (got,) = decode_many([message], **expected)
    if isinstance(got, MessageError):
        assert got.reason in REASONS and str(got)
    else:
        assert torch.isfinite(got.values).all() and got.n >= 0
        if expected["enclosed"]:
            assert got.mask is not None and got.mask.id == got.mask_id


@given(st.binary(max_size=200), sent())
def test_random_bytes_are_refused(noise, drawn):
    _, expected, _, _ = drawn
    survives(noise, expected)
    survives(reseal(b"fsv\x01" + noise + bytes(OVERHEAD)), expected)


@settings(max_examples=600)
@given(sent(), st.data())
def test_forged_messages_are_refused_or_say_something_sound(drawn, data):
    message, expected, _, _ = drawn
    changed = bytearray(message)
    for _ in range(data.draw(st.integers(1, 4))):
        # The length and the checksum are made good again afterwards.
        place = data.draw(st.integers(4, len(changed) - 1))
        changed[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(OVERHEAD, len(changed)))
    place = data.draw(st.integers(OVERHEAD, len(changed)))
    for forged in (changed, changed[:cut], changed[:place] + data.draw(st.binary(max_size=9)) + changed[place:]):
        survives(reseal(bytes(forged)), expected)
        survives(bytes(forged), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("coding", [Coding("fp16"), Coding("int8"), Coding("int4", 16, 0.3), Coding("sign")])
def test_a_gpu_sends_and_receives_what_a_cpu_does(coding):
    space = ParamSpace(("w",), ((100, 101),))
    values = torch.randn(3, space.size)
    values[0, 5:50] = values[0, 4]
    options = {"round": 0, "clients": range(3), "ns": range(3), "keys": range(3)}
    messages = encode_many(values, coding, space, **options)
    assert encode_many(values.cuda(), coding, space, **options) == messages
    for here, there in zip(
        decode_many(messages, coding, space), decode_many(messages, coding, space, device="cuda"), strict=True
    ):
        assert torch.equal(here.values, there.values.cpu())

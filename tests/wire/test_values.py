import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fedsieve.errors import FedsieveError
from fedsieve.wire.values import BITS, Coding, dequantise, finite, fits, largest, quantise

GROUPED = ["int8", "int4", "sign"]
floats = st.floats(-(2.0**126), 2.0**126, width=32)
vectors = st.lists(st.one_of(floats, st.floats(-1, 1, width=32), st.just(0.0)), min_size=1, max_size=70)
codings = st.builds(Coding, st.sampled_from(GROUPED), st.integers(8, 100))


def rows(vector) -> torch.Tensor:
    return torch.tensor([vector], dtype=torch.float32)


def scales_of(payload: torch.Tensor, k: int, coding: Coding) -> np.ndarray:
    """The scale of each value of the first row."""
    data = payload[0].numpy().tobytes()
    groups = math.ceil(k / coding.group)
    unit, half = np.frombuffer(data[:4], "<f4"), np.frombuffer(data[4 : 4 + 2 * groups], "<f2")
    return np.repeat(half.astype(np.float32) * unit, coding.group)[:k]


def draw(key: int, position: int) -> int:
    """One number of SplitMix64's stream, of which each gives four draws."""
    word = (key + (position // 4 + 1) * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    word ^= word >> 31
    return np.frombuffer(word.to_bytes(8, "little"), "<i2")[position % 4].item()


def reference(vector: list[float], levels: int, group: int, key: int) -> tuple[bytes, list[int]]:
    """Unit and scales as bytes, and the steps, value by value."""
    top = max(map(abs, vector))
    unit = 2.0 ** (max(math.frexp(top)[1] - 1 if top else -99, -80) - 14)
    halves, steps = [], []
    for start in range(0, len(vector), group):
        part = vector[start : start + group]
        half = np.float16(max(map(abs, part)) / unit / levels)
        while float(half) * unit * levels < max(map(abs, part)):
            half = np.nextafter(half, np.float16(np.inf))
        halves.append(half)
        for position, value in enumerate(part, start):
            step = np.float32(value) / np.float32(float(half) * unit or 1)
            step = step + np.float32(draw(key, position) / 2**16) + np.float32(0.5 + 2**-17)
            steps.append(math.floor(step))
    return np.float32(unit).tobytes() + np.array(halves).tobytes(), steps


@given(vectors, st.integers(8, 100), st.integers(0, 2**64 - 1))
@example([1.0] * 9 + [1e-30, -1e-45, 0.0], 8, 0)
def test_int8_and_int4_are_the_reference(vector, group, key):
    keys = torch.tensor([key - (key >> 63 << 64)])
    for format, levels in (("int8", 127), ("int4", 7)):
        payload = quantise(rows(vector), Coding(format, group), keys)[0].numpy().tobytes()
        scales, steps = reference(vector, levels, group, key)
        assert payload[: len(scales)] == scales
        if format == "int8":
            assert payload[len(scales) :] == np.array(steps, np.int8).tobytes()
        else:
            codes = [step + 8 for step in steps] + [0] * (len(steps) % 2)
            assert payload[len(scales) :] == bytes(
                low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)
            )


@given(vectors, st.sampled_from(["int8", "int4"]), st.integers(8, 100))
def test_rounding_is_off_by_less_than_a_step_and_never_clips(vector, format, group):
    coding, values = Coding(format, group), rows(vector)
    payload = quantise(values, coding, torch.tensor([7]))
    decoded, scales = dequantise(payload, len(vector), coding), scales_of(payload, len(vector), coding)
    assert decoded.dtype == torch.float32 and decoded.shape == values.shape
    off = np.abs(decoded[0].double().numpy() - values[0].double().numpy())
    assert (off <= scales.astype(np.float64) * (1 + 1e-6)).all()
    assert (decoded[0][values[0] == 0] == 0).all()
    # The scale is no larger than it must be: by a thousandth, where fp16 has all its digits.
    largest = np.abs(values[0].double().numpy())[:group].max()
    if largest == values.abs().max() > 1e-20:
        assert scales[0] * {"int8": 127, "int4": 7}[format] <= largest * (1 + 2**-9)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_rounding_is_right_on_average(format):
    torch.manual_seed(0)
    coding, draws = Coding(format, 8), 20_000
    values = torch.randn(60) * torch.logspace(-6, 3, 60)
    payload = quantise(values.expand(draws, -1), coding, torch.arange(draws))
    mean = dequantise(payload, 60, coding).double().mean(0)
    error = scales_of(payload, 60, coding) / 2 / math.sqrt(draws)
    assert (np.abs((mean - values.double()).numpy()) < 4.5 * error).all()
    assert len({bytes(row) for row in payload[:100].numpy()}) == 100


def test_draws_of_neighbours_and_of_keys_do_not_go_together():
    values = torch.full((64, 4096), 0.5)
    values[:, ::64] = 127
    codes = dequantise(quantise(values, Coding("int8"), torch.arange(64)), 4096, Coding("int8"))[:, 1:63].double()
    for one, two in ((codes[:-1], codes[1:]), (codes[:, :-1], codes[:, 1:]), (codes[:, :-4], codes[:, 4:])):
        pairs = torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))
        assert abs(pairs[0, 1]) < 5 / math.sqrt(one.numel())


@given(vectors, st.integers(8, 100))
def test_sign_sends_the_mean_size_of_each_group(vector, group):
    coding = Coding("sign", group)
    payload = quantise(rows(vector), coding)
    decoded = dequantise(payload, len(vector), coding)[0].double().tolist()
    scales = scales_of(payload, len(vector), coding).tolist()
    assert decoded == [scale if value >= 0 else -scale for scale, value in zip(scales, vector, strict=True)]
    top = max(map(abs, vector))
    for start in range(0, len(vector), group):
        part = [abs(value) for value in vector[start : start + group]]
        assert scales[start] == pytest.approx(sum(part) / len(part), rel=2**-10, abs=max(top, 1e-24) * 1e-8)


@given(vectors)
def test_floats_are_torchs_casts(vector):
    assume(max(map(abs, vector)) < 6e4)
    for format, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        payload = quantise(rows(vector), Coding(format))
        assert torch.equal(dequantise(payload, len(vector), Coding(format)), rows(vector).to(dtype).float())
    double = torch.tensor([vector], dtype=torch.float64) / 3
    assert torch.equal(dequantise(quantise(double, Coding("fp64")), len(vector), Coding("fp64")), double)


@given(st.data(), codings, st.integers(1, 300), st.integers(1, 5))
def test_rows_together_are_the_rows_alone_and_as_long_as_stated(data, coding, k, clients):
    values = torch.randn(clients, k, generator=torch.Generator().manual_seed(k))
    keys = torch.tensor(data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=clients, max_size=clients)))
    payload = quantise(values, coding, keys)
    assert payload.shape == (clients, coding.size(k)) and payload.dtype == torch.uint8
    alone = [quantise(values[i : i + 1], coding, keys[i : i + 1]) for i in range(clients)]
    assert torch.equal(payload, torch.cat(alone))
    # Columns need not lie side by side.
    assert torch.equal(payload, quantise(values.T.contiguous().T, coding, keys))
    decoded = dequantise(payload, k, coding)
    assert torch.equal(decoded, torch.cat([dequantise(row, k, coding) for row in alone]))


@pytest.mark.parametrize("format", GROUPED)
def test_what_goes_through_in_chunks_is_what_goes_at_once(format, monkeypatch):
    values, keys = torch.randn(3, 500_001), torch.arange(3)
    coding = Coding(format, 9)
    chunked = quantise(values, coding, keys)
    monkeypatch.setattr("fedsieve.wire.values._budget", lambda device: 2**30)
    assert torch.equal(chunked, quantise(values, coding, keys))


@pytest.mark.parametrize("format", BITS)
def test_no_values_take_no_bytes(format):
    payload = quantise(torch.zeros(3, 0), Coding(format), torch.arange(3))
    assert payload.shape == (3, 0) and dequantise(payload, 0, Coding(format)).shape == (3, 0)
    assert Coding(format).size(0) == 0 and finite(torch.zeros(3, 0)).tolist() == [True] * 3


def test_sizes_per_format():
    sizes = {format: Coding(format).size(6400) for format in BITS}
    assert sizes == {
        "none": 0, "fp64": 51200, "fp32": 25600, "bf16": 12800, "fp16": 12800, "coo": 25600,
        "int8": 6400 + 204, "int4": 3200 + 204, "sign": 800 + 204,
    }  # fmt: skip


@pytest.mark.parametrize("format", GROUPED)
def test_denormal_huge_and_zero_values_survive(format):
    keys = torch.tensor([1])
    for value in (0.0, 1e-45, 1e-38, 1e-20, 1.0, 3.3e38):
        values = torch.tensor([[value, -value] * 40])
        decoded = dequantise(quantise(values, Coding(format), keys), 80, Coding(format))
        assert fits(values, Coding(format)).all() and finite(decoded).all()
        assert torch.allclose(
            decoded.abs(), values.abs(), rtol={"int8": 0.01, "int4": 0.15, "sign": 1e-3}[format], atol=1e-35
        )


def test_what_does_not_fit_is_seen():
    values = torch.tensor(
        [[1.0, 2.0], [65519.0, 1.0], [1.0, -65520.0], [torch.nan, 1.0], [1.0, -torch.inf], [3.4e38, 0]]
    )
    assert finite(values).tolist() == [True, True, True, False, False, True]
    assert fits(values, Coding("fp16")).tolist() == [True, True, False, False, False, False]
    assert fits(values, Coding("int8")).tolist() == [True, True, True, False, False, False]
    assert fits(values, Coding("bf16")).tolist() == [True, True, True, False, False, False]
    assert fits(values, Coding("fp32")).tolist() == [True, True, True, False, False, True]
    for format in GROUPED:
        decoded = dequantise(quantise(values, Coding(format), torch.arange(6)), 2, Coding(format))
        assert finite(decoded)[[0, 1, 2]].all() and not finite(decoded)[[3, 4]].any()


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30), st.integers(1, 30))
def test_the_largest_are_those_of_a_stable_sort(vector, count):
    count = min(count, len(vector))
    order = sorted(range(len(vector)), key=lambda place: (-abs(vector[place]), place))[:count]
    chosen = largest(torch.tensor([vector, vector], dtype=torch.float32), count)
    assert [row.nonzero().flatten().tolist() for row in chosen] == [sorted(order)] * 2


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_no_number_is_as_large_as_infinity(kind):
    values = torch.tensor(
        [[1.0, math.nan, -math.inf, 2.0, math.inf, -0.0], [0.0, -0.0, 0.0, 0.0, 0.0, 0.0]], dtype=kind
    )
    before = values.clone()
    for count, expected in ((2, [1, 2]), (4, [1, 2, 3, 4])):
        chosen = largest(values, count)
        assert chosen[0].nonzero().flatten().tolist() == expected
        assert chosen[1].nonzero().flatten().tolist() == list(range(count))
    torch.testing.assert_close(values, before, equal_nan=True)


def test_requests_that_make_no_sense_are_refused():
    for options, message in (
        ({"format": "int7"}, "no format of values"),
        ({"group": 0}, "cannot share a scale"),
        ({"group": 70_000}, "cannot share a scale"),
        ({"top_k": 0.0}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"format": "coo", "top_k": 0.5}, "top_k"),
    ):
        with pytest.raises(FedsieveError, match=message):
            Coding(**options)
    with pytest.raises(FedsieveError, match="needs a key"):
        quantise(torch.ones(1, 3), Coding("int8"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("format", BITS)
def test_a_gpu_gives_the_same_bytes_and_values(format):
    coding, k = Coding(format, 64), 100_003 * (format != "none")
    values = torch.randn(3, k) * torch.logspace(-30, 30, k)
    values[:, ::7] = 0
    keys = torch.tensor([1, -5, 2**62])
    payload = quantise(values, coding, keys)
    there = quantise(values.cuda(), coding, keys.cuda())
    assert torch.equal(payload, there.cpu())
    assert torch.equal(dequantise(payload, k, coding), dequantise(there, k, coding).cpu())

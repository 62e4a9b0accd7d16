"""Values as bytes: floats of fewer bits, or whole steps of a scale that a group of values shares.

int8 and int4 round at random, up as often as the value is near the upper step, so that their mean is the value itself
(QSGD, Alistarh et al. 2017). Everything works on rows (clients, k) on any device, and every device gives the same bytes:
no operation depends on the order of a sum, and the draws are a hash of a key and a position.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.mask.selection import kth

Format = Literal["none", "fp64", "fp32", "bf16", "fp16", "int8", "int4", "sign", "coo"]

BITS: dict[str, int] = {
    "none": 0, "fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4, "sign": 1, "coo": 32
}  # fmt: skip
FLOATS = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "coo": torch.float32
}  # fmt: skip
LEVELS = {"int8": 127, "int4": 7, "sign": 1}


@dataclass(frozen=True)
class Coding:
    """How values travel. `none` sends a mask alone, `coo` each value with its indices as the drift report counts them."""

    format: Format = "fp32"
    group: int = 64
    top_k: float | None = None

    def __post_init__(self) -> None:
        if self.format not in BITS:
            raise FedsieveError(f'"{self.format}" is no format of values: use one of {", ".join(BITS)}')
        if not 1 <= self.group < 2**16:
            raise FedsieveError(f"groups of {self.group:,} values cannot share a scale: use 1 to 65,535")
        if self.top_k is not None and (self.format in ("none", "coo") or not 0 < self.top_k <= 1):
            raise FedsieveError(f"top_k is a share above 0, up to 1, of values in a dense format, not {self.top_k}")

    @property
    def grouped(self) -> bool:
        """Whether groups of values share a scale."""
        return self.format in LEVELS

    def kept(self, k: int) -> int:
        """How many of k values are sent."""
        return k if self.top_k is None else min(k, max(1, round(self.top_k * k)))

    def size(self, k: int) -> int:
        """The bytes of k sent values: without header, mask, and positions."""
        scales = 4 + 2 * -(-k // self.group) if self.grouped and k else 0
        return scales + -(-k * BITS[self.format] // 8)


def quantise(values: Tensor, coding: Coding, keys: Tensor | None = None) -> Tensor:
    """Rows of values (clients, k) as rows of bytes (clients, coding.size(k)), all of them: `top_k` is not applied here.

    `keys` (clients,), int64, address the draws of int8 and int4. Of grouped values the bytes are a power of two, one
    fp16 scale per group in units of it, and the whole steps (or signs).
    """
    clients, k = values.shape
    payload = torch.empty(clients, coding.size(k), dtype=torch.uint8, device=values.device)
    if not payload.numel():
        return payload
    if coding.format in FLOATS:
        return values.to(FLOATS[coding.format]).contiguous().view(torch.uint8)
    values, bits, levels, group = values.float(), BITS[coding.format], LEVELS[coding.format], coding.group
    sizes = torch.cat([_sizes(chunk, coding, k - start) for start, chunk in _chunks(values, group)], dim=1)
    # Largest powers of two not above the largest sizes: their bits without the fraction.
    unit = (sizes.amax(1, keepdim=True).view(torch.int32) & 0x7F800000).view(torch.float32)
    unit = unit.clamp_min(2.0**-80) * 2.0**-14
    half = (sizes / unit * (1 / levels)).half()
    if coding.format != "sign":
        # Up to the next fp16 where rounding made the scale too small for the group's largest value.
        half = (half.view(torch.int16) + (half.float() * unit * levels < sizes)).view(torch.float16)
    payload[:, :4] = unit.view(torch.uint8)
    payload[:, 4 : 4 + 2 * half.shape[1]] = half.view(torch.uint8)
    scales, offset = half.float() * unit, 4 + 2 * half.shape[1]
    scales.masked_fill_(scales == 0, 1)
    for start, chunk in _chunks(values, group):
        if coding.format == "sign":
            codes = (chunk >= 0).view(torch.uint8)
        else:
            if keys is None:
                raise FedsieveError(f"{coding.format} rounds at random: it needs a key for each client")
            steps = chunk / scales[:, start // group :][:, : chunk.shape[1], None]
            draws = _draws(keys, start, chunk.shape[1] * group).view(chunk.shape)
            # Draws are uniform in [-1/2, 1/2): a step of 127 stays one, the sum being exact in float32.
            steps.add_(draws, alpha=2.0**-16).add_(0.5 + 2.0**-17).floor_()
            codes = steps.to(torch.int8).view(torch.uint8) if bits == 8 else steps.add_(8).to(torch.uint8)
        packed = _pack(codes.flatten(1)[:, : k - start], bits)
        at = offset + start * bits // 8
        payload[:, at : at + packed.shape[1]] = packed
    return payload


def dequantise(payload: Tensor, k: int, coding: Coding) -> Tensor:
    """The values (clients, k) of bytes that `quantise` made: float32, or float64 where that was sent."""
    if not payload.shape[1]:
        return payload.to(torch.float64 if coding.format == "fp64" else torch.float32)
    if coding.format in FLOATS:
        values = payload.view(FLOATS[coding.format])
        return values if coding.format == "fp64" else values.float()
    groups, whole = -(-k // coding.group), k // coding.group
    unit, half = payload[:, :4], payload[:, 4 : 4 + 2 * groups]
    scales = _dense(half).view(torch.float16).float() * _dense(unit).view(torch.float32)
    codes = _unpack(payload[:, 4 + 2 * groups :], BITS[coding.format])[:, :k]
    if coding.format == "int8":
        values = codes.view(torch.int8).float()
    else:
        values = codes.float().sub_(8) if coding.format == "int4" else codes.float().mul_(2).sub_(1)
    values[:, : whole * coding.group].unflatten(1, (whole, coding.group)).mul_(scales[:, :whole, None])
    values[:, whole * coding.group :].mul_(scales[:, whole:])
    return values


def largest(values: Tensor, count: int) -> Tensor:
    """Where the `count` values of largest size of each row (clients, k) are, of equal ones the first: bool."""
    size = (values if values.dtype == torch.float64 else values.float()).abs()
    size.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    if size.is_cuda:
        thresholds = size.topk(count, sorted=False).values.amin(1)
    else:  # four times as fast there
        thresholds = torch.stack([kth(row, size.shape[1] - count + 1) for row in size])
    chosen = size >= thresholds[:, None]
    for row, sizes, threshold in zip(chosen, size, thresholds, strict=True):
        if excess := int(row.count_nonzero()) - count:
            row[(sizes == threshold).nonzero().flatten()[-excess:]] = False
    return chosen


def finite(values: Tensor) -> Tensor:
    """Which rows (clients, k) are finite throughout: bool (clients,)."""
    # One look at all rows together nearly always suffices.
    if not values.numel() or torch.stack(torch.aminmax(values)).isfinite().all():
        return torch.ones(len(values), dtype=torch.bool, device=values.device)
    return torch.isfinite(values.amax(1)) & torch.isfinite(values.amin(1))


def fits(values: Tensor, coding: Coding) -> Tensor:
    """Which rows (clients, k) are finite and stay so in their format: bool (clients,)."""
    if not values.shape[1]:
        return finite(values)
    ends = torch.stack([values.amax(1), values.amin(1)], dim=1)
    # A scale is rounded up by a thousandth at most, and must not carry a step of it over float32's end.
    return finite(ends.float() * 1.01 if coding.grouped else ends.to(FLOATS[coding.format]))


def _chunks(values: Tensor, group: int) -> Iterator[tuple[int, Tensor]]:
    """Columns in groups (clients, groups, group) from their start on, the last padded with zeros."""
    clients, k = values.shape
    unit = 8 * group  # whole bytes of any format, and whole draws
    step = max(1, _budget(values.device) // (clients * unit)) * unit
    for start in range(0, k, step):
        chunk = values[:, start : start + step]
        if ragged := -chunk.shape[1] % group:
            chunk = F.pad(chunk, (0, ragged))
        yield start, chunk.unflatten(1, (-1, group))


def _budget(device: torch.device) -> int:
    """How many values are worked on at a time: on a CPU, what stays in its cache."""
    return 2**18 if device.type == "cpu" else 2**26


def _sizes(chunk: Tensor, coding: Coding, left: int) -> Tensor:
    """The largest |value| of each group (clients, groups), for `sign` the mean; of `left` values the rest is padding."""
    if coding.format != "sign":
        return chunk.abs().amax(2)
    members = (left - coding.group * torch.arange(chunk.shape[1], device=chunk.device)).clamp(max=coding.group)
    # float64 makes the order of the sum immaterial to the fp16 that is sent.
    return (chunk.abs().sum(2, dtype=torch.float64) / members).float()


def _draws(keys: Tensor, start: int, count: int) -> Tensor:
    """Uniform int16 (clients, count): numbers start.. of each key's stream (SplitMix64, Steele et al. 2014)."""
    mixed = keys[:, None] + torch.arange(start // 4 + 1, -(-(start + count) // 4) + 1, device=keys.device) * _signed(
        0x9E3779B97F4A7C15
    )
    mixed ^= (mixed >> 30) & (2**34 - 1)
    mixed *= _signed(0xBF58476D1CE4E5B9)
    mixed ^= (mixed >> 27) & (2**37 - 1)
    mixed *= _signed(0x94D049BB133111EB)
    mixed ^= (mixed >> 31) & (2**33 - 1)
    return mixed.view(torch.int16)[:, :count]


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (clients, n), uint8, side by side in bytes, the first in the lowest bits."""
    if bits == 8:
        return codes
    codes = _dense(F.pad(codes, (0, -codes.shape[1] % (8 // bits))))
    if bits == 4:
        pairs = codes.view(torch.int16)
        return ((pairs | pairs >> 4) & 0xFF).to(torch.uint8)
    # The product moves the lowest bit of byte i to bit 56 + i.
    return (codes.view(torch.int64) * 0x0102040810204080 >> 56 & 0xFF).to(torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """What `_pack` packed, and the padding after it."""
    if bits == 8:
        return packed
    if bits == 4:
        pairs = packed.to(torch.int16)
        return ((pairs | pairs << 4) & 0x0F0F).view(torch.uint8)
    # Each of eight copies keeps another bit.
    copies = packed.to(torch.int64) * 0x0101010101010101 & _signed(0x8040201008040201)
    return copies.view(torch.uint8).ne(0).view(torch.uint8)


def _dense(codes: Tensor) -> Tensor:
    """A copy in memory of its own, which can be seen as wider numbers; `contiguous` would keep a single row in place."""
    return codes.clone(memory_format=torch.contiguous_format)

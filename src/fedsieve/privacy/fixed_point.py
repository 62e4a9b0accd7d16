"""Real numbers as integers whose sums cannot overflow: what a secure sum adds up.

A client's vector is `[weight * values, weight]`, so that one sum gives a weighted mean. From a bound on |weight * value|
and the number of clients follows the step, so that the sum of all clients stays within the width whatever they send.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedsieve.errors import FedsieveError

CHUNK = 2**15  # values at a time: what stays in a cache


@dataclass(frozen=True, eq=False)
class FixedPoint:
    """Integers of `bits` (16, 32 or 64) for at most `clients` vectors with |weight * value| <= bound, weight <= weight_bound.

    `bound` is a public number, or one for each value (per tensor: `np.repeat(bounds, sizes)`). Each client's rounding is
    unbiased and off by less than one `step`, so a sum over n clients is off by less than n steps and their mean by n steps
    over the total weight; at 64 bits float64's own 53 bits come first.
    """

    bits: int
    clients: int
    bound: float | np.ndarray
    weight_bound: int = 1

    def __post_init__(self) -> None:
        if self.bits not in (16, 32, 64):
            raise FedsieveError(f"fixed point has 16, 32 or 64 bits, not {self.bits}")
        if not 1 <= self.clients < 2 ** (self.bits - 1):
            raise FedsieveError(f"{self.bits} bits cannot hold the sum of {self.clients:,} clients")
        if self.weight_bound < 1 or not (np.isfinite(self.bound) & (np.asarray(self.bound) > 0)).all():
            raise FedsieveError("fixed point needs bounds that are positive and finite")

    @cached_property
    def levels(self) -> float:
        """The largest integer that one client may send for a value: clients * levels < 2^(bits - 1)."""
        most = (2 ** (self.bits - 1) - 1) // self.clients
        return float(most) if int(float(most)) <= most else math.nextafter(most, 0)

    @property
    def step(self) -> float | np.ndarray:
        """What one unit stands for."""
        return self.bound / self.levels

    @property
    def base(self) -> int:
        """A weight is sent as digits of this base, the lowest first, which all clients together cannot overflow."""
        return 2**self.bits // self.clients

    @cached_property
    def digits(self) -> int:
        """How many integers hold a weight."""
        digits = 1
        while self.base**digits <= self.weight_bound:
            digits += 1
        return digits

    def encode(self, values: np.ndarray, weight: int = 1, uniforms: np.ndarray | None = None) -> np.ndarray:
        """Values (k,) times their weight, and the weight: unsigned integers (k + digits,).

        `uniforms` (k,) in [0, 1) decide the rounding; without them the operating system does. Values beyond the bound
        are refused, never cut or wrapped.
        """
        if not 0 <= weight <= self.weight_bound:
            raise FedsieveError(f"a weight of {weight} is not within 0 and {self.weight_bound}, as agreed")
        coded = np.empty(len(values) + self.digits, f"<u{self.bits // 8}")
        coded[len(values) :] = [weight // self.base**place % self.base for place in range(self.digits)]
        bounds, rng = np.broadcast_to(self.bound, len(values)), np.random.default_rng()
        for start in range(0, len(values), CHUNK):
            part = slice(start, min(start + CHUNK, len(values)))
            share = values[part].astype(np.float64) * weight / bounds[part]
            if not (np.abs(share) <= 1).all():
                worst = float(np.abs(share).max())
                raise FedsieveError(
                    f"a value times its weight is {worst:g} times the bound of a secure sum: clip it first"
                )
            share *= self.levels  # cannot round past the largest level
            low = np.floor(share)
            draws = rng.random(len(share)) if uniforms is None else uniforms[part]
            low += draws < share - low
            coded[part] = low.astype(np.int64)
        return coded

    def decode(self, total: np.ndarray) -> tuple[np.ndarray, int]:
        """The sum of weight * values (k,), float64, and the total weight, of the sum of at most `clients` vectors."""
        values, digits = total[: -self.digits], total[-self.digits :]
        whole = values.view(np.dtype(f"<i{self.bits // 8}")).astype(np.float64)
        weight = sum(int(digit) * self.base**place for place, digit in enumerate(digits))
        return whole / self.levels * self.bound, weight

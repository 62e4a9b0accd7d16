"""Intervals: how far a mean or a difference could lie from what was measured. All are two-sided, at 95 %."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm, t

LEVEL = 0.95
Z = float(norm.ppf(0.5 + LEVEL / 2))
Interval = tuple[float, float]


def wilson(p: float, n: int) -> Interval:
    """Of a share p of n examples (Wilson 1927): what other examples could well have given."""
    middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return middle - half, middle + half


def paired(one: Sequence[float], two: Sequence[float]) -> Interval:
    """Of the mean of one - two, measured in pairs (Student's t): what other pairs could well have given."""
    gaps = np.subtract(one, two)
    return _around(float(gaps.mean()), float(gaps.std(ddof=1)) / math.sqrt(len(gaps)), len(gaps) - 1)


def unpaired(one: Sequence[float], two: Sequence[float]) -> Interval:
    """Of the difference of two means, measured apart (Welch's t)."""
    a, b = (float(np.var(part, ddof=1)) / len(part) for part in (one, two))
    # Without any spread the degrees of freedom do not matter.
    degrees = (a + b) ** 2 / (a * a / (len(one) - 1) + b * b / (len(two) - 1)) if a + b > 0 else 1
    return _around(float(np.mean(one) - np.mean(two)), math.sqrt(a + b), degrees)


def _around(middle: float, error: float, degrees: float) -> Interval:
    half = t.ppf(0.5 + LEVEL / 2, degrees) * error
    return float(middle - half), float(middle + half)


def matched(only_one: int, only_two: int, n: int) -> Interval:
    """Of the difference of two shares of the same n examples, of which so many were right by one alone (Tango 1998).

    The interval holds every difference that the score test does not reject; at 0 that is McNemar's test.
    """

    def score(difference: float) -> float:
        """How many standard errors the found difference lies above this one."""
        b = -only_one - only_two + (2 * n - only_one + only_two) * difference
        c = -only_two * difference * (1 - difference)
        # The likeliest share right by two alone, were this the difference.
        share = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        variance = n * (2 * share + difference * (1 - difference))
        return (only_one - only_two - n * difference) / math.sqrt(max(variance, 1e-300))

    found = (only_one - only_two) / n
    low = brentq(lambda difference: score(difference) - Z, -1, found) if found > -1 else -1.0
    high = brentq(lambda difference: score(difference) + Z, found, 1) if found < 1 else 1.0
    return float(low), float(high)

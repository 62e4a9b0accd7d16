"""Client-level differential privacy with a trusted server (McMahan et al. 2018): clipping, Poisson cohorts, noise.

Every client counts once, whatever it holds. The sum of clipped updates gets Gaussian noise and is divided by the
expected size of a cohort, so that one client more or less (add/remove neighbours) changes the sum by the clip norm at
most. Privacy loss distributions (dp-accounting) say what it costs. Cohorts and noise come from a secret key, never from
the experiment's seed: whoever knows them can take the noise away.
"""

import hashlib
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy.special import ndtri
from torch import Tensor

from fedsieve.config import Experiment, Noised
from fedsieve.errors import FedsieveError

INTERVAL = 2e-4  # between privacy losses that are told apart; the account errs upwards only


# --- the secret ------------------------------------------------------------------------------------------------------


def load_or_make_key(path: Path, resumed: bool = False) -> bytes:
    """The 32 secret bytes in the file `path`, which only its owner can read; made there where there is none.

    A run that is `resumed` must find its key: with another one it would give out rounds twice, with different noise.
    """
    if not path.exists():
        if resumed:
            raise FedsieveError(
                f"{path}: the key of this run's noise is gone, so it cannot be continued: start it anew", 1
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(new_key())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    if path.stat().st_mode & 0o077:
        raise FedsieveError(f"{path}: others can read this key. Make it private (chmod 600), or start the run anew", 1)
    key = path.read_bytes()
    if len(key) != 32:
        raise FedsieveError(f"{path}: not a key: {len(key)} bytes instead of 32", 1)
    return key


def new_key() -> bytes:
    """From the operating system."""
    return os.urandom(32)


def bound_key(key: bytes, mark: str) -> bytes:
    """A key for one set of settings: with others, the same noise could be taken off by subtracting two runs' weights."""
    return hashlib.blake2b(mark.encode(), key=key, digest_size=32).digest()


def uniform(key: bytes, count: int, purpose: str, *address: int | str) -> np.ndarray:
    """Numbers between 0 and 1, both excluded, from ChaCha20's stream at an address such as (stage, round)."""
    stream = hashlib.blake2b(repr((purpose, *address)).encode(), key=key, digest_size=32).digest()
    data = Cipher(algorithms.ChaCha20(stream, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
    return ((np.frombuffer(data, "<u8") >> np.uint64(12)) + 0.5) * 2.0**-52


# --- the mechanism ---------------------------------------------------------------------------------------------------


def poisson_cohort(key: bytes, clients: int, rate: float, stage: str, round: int) -> np.ndarray:
    """The clients of a round, ascending: each of those numbered below `clients` by its own draw. There may be none."""
    return np.flatnonzero(uniform(key, clients, "cohort", stage, round) < rate)


def clipped(values: Tensor, clip: float) -> Tensor:
    """One client's values, shortened to the L2 norm `clip`, in float64; zeros in place of what is not finite."""
    values = values.double()
    norm = values.norm().item()
    return values * min(1.0, clip / max(norm, 1e-300)) if math.isfinite(norm) else torch.zeros_like(values)


def noisy(total: Tensor, deviation: float, key: bytes, *address: int | str) -> Tensor:
    """A sum over clients, (k,), with Gaussian noise of this deviation on each value, in float64."""
    noise = torch.from_numpy(ndtri(uniform(key, total.numel(), "noise", *address)))
    return total.double() + deviation * noise.view(total.shape).to(total.device)


def noisy_mean(total: Tensor, deviation: float, expected: float, key: bytes, *address: int | str) -> Tensor:
    """The mean update that a round gives out, from the sum of its clipped updates; also where nobody answered.

    The sum gets noise of this `deviation`, and is divided by the `expected` number of clients.
    """
    return noisy(total, deviation, key, *address) / expected


def expected_ratio(sigma: float, rate: float, clients: int, k: int) -> float:
    """The norm of the noise on a mean update of k values, by the clip norm: sigma sqrt(k) / (rate clients)."""
    return sigma * math.sqrt(k) / (rate * clients)


def outlook(stage: str, sigma: float, rate: float, clients: int, k: int) -> str:
    """What to say before training of the noise of a stage that trains k weights, and of what would help against it."""
    ratio = expected_ratio(sigma, rate, clients, k)
    text = (
        f"{stage}: noise of {sigma:.3g} times the clip norm on each sum; on a round's mean update of {k:,} values it is "
        f"expected to be {ratio:.3g} times as long as the longest update"
    )
    if ratio <= 1:
        return text
    return (
        f"{text}. Warning: that is more noise than signal. To bring it to 1 takes {ratio:.3g} times as many clients a round, "
        f"or a mask of {100 / ratio**2:.2g} % of the density; more clients in all, fewer rounds and a larger epsilon also help"
    )


# --- the account -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """A noisy sum that is given out `times` times: mask scores, ridge statistics, or the rounds of another stage.

    Every client's part is clipped to a norm, and the noise has `sigma` times that as its deviation; None: the sigma of
    the rounds that are asked about. Clients take part with probability `rate`.
    """

    sigma: float | None = None
    rate: float = 1.0
    times: int = 1


def spent(sigma: float, rate: float, rounds: int, delta: float, others: Sequence[Release] = ()) -> float:
    """The epsilon of so many rounds and of all other releases, at this delta."""
    done = [(sigma if item.sigma is None else item.sigma, item.rate, item.times) for item in others if item.times]
    done += [(sigma, rate, rounds)] if rounds else []
    if not done:
        return 0.0
    least = min(noise for noise, _, _ in done)
    if least <= 0:
        return math.inf
    interval = INTERVAL * max(1.0, least**-2)  # large losses need no finer steps, which would take seconds
    composed, *rest = (_loss(noise, share, interval).self_compose(times) for noise, share, times in done)
    for item in rest:
        composed = composed.compose(item)
    return float(composed.get_epsilon_for_delta(delta))


def noise_for(epsilon: float, delta: float, rate: float, rounds: int, others: Sequence[Release] = ()) -> float:
    """The least sigma (to 0.1 %, from 0.05 up) with which so many rounds and all other releases spend no more."""
    fixed = [item for item in others if item.sigma is not None]
    alone = spent(1.0, rate, 0, delta, fixed)
    if alone >= epsilon:
        raise FedsieveError(
            f"privacy.dp: the statistics given out before training spend epsilon {alone:.3g} of {epsilon:g} by "
            "themselves. Give them more noise, make them from public data, or allow a larger epsilon"
        )
    high = 0.1
    while spent(high, rate, rounds, delta, others) > epsilon:
        high *= 2
    low = high / 2
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle, rate, rounds, delta, others) > epsilon else (low, middle)
    return high


def planned(experiment: Experiment) -> tuple[int, list[Release]]:
    """All that an experiment will give out: so many rounds of updates, and sums of scores and statistics."""
    dp, rounds, releases = experiment.privacy.dp, 0, list[Release]()
    assert dp is not None
    for stage in experiment.stages:
        if stage.method == "ridge":
            assert dp.statistics is not None
            releases.append(Release(dp.statistics.noise_multiplier))
            continue
        rounds += stage.length
        sieve = experiment.mask_of(stage)
        if sieve is not None and sieve.rule.scored and sieve.scope == "shared":
            assert dp.scores is not None
            masks = 1 + (stage.length - 1) // sieve.refresh if sieve.refresh else 1
            releases.append(
                Release(dp.scores.noise_multiplier, times=masks * sieve.calibration_rounds * len(sieve.rule.sums))
            )
    return rounds, releases


class Account:
    """What a run has given out so far, and the secret that its noise and its cohorts come from."""

    def __init__(self, experiment: Experiment, rate: float, clients: int, key: bytes, given: Mapping[str, Any]) -> None:
        """`given` is what `numbers` said when the run was left; empty at its beginning."""
        assert experiment.privacy.dp is not None
        self.settings, self.rate, self.clients, self.key = experiment.privacy.dp, rate, clients, key
        self.rounds: int = given.get("rounds", 0)
        self.releases = [Release(sigma) for sigma in given.get("releases", [])]
        self.sigma = sigma_of(experiment, rate)

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"rounds": self.rounds, "releases": [release.sigma for release in self.releases]}

    def spent(self) -> float:
        """The epsilon of all that was given out."""
        return spent(self.sigma, self.rate, self.rounds, self.settings.delta, self.releases)

    def outlook(self, stage: str, k: int) -> str:
        """What to expect of the rounds of a stage that trains k weights, before it begins."""
        return outlook(stage, self.sigma, self.rate, self.clients, k)

    def mean(self, total: Tensor, stage: str, round: int) -> Tensor:
        """Give out the mean update of a round, from the sum of its clipped updates."""
        self.rounds += 1
        deviation, expected = self.sigma * self.settings.clip_norm, self.rate * self.clients
        return noisy_mean(total, deviation, expected, self.key, stage, round)

    def total(self, parts: Iterable[Tensor], k: int, settings: Noised) -> Tensor:
        """Give out a sum over all clients, each of whose parts (k,) is shortened first."""
        total: Tensor | None = None
        for part in parts:
            mine = clipped(part, settings.clip_norm)
            total = mine if total is None else total + mine
        self.releases.append(Release(settings.noise_multiplier))
        deviation = settings.noise_multiplier * settings.clip_norm
        total = torch.zeros(k, dtype=torch.float64) if total is None else total
        return noisy(total, deviation, self.key, "release", len(self.releases))


def sigma_of(experiment: Experiment, rate: float) -> float:
    """The noise of an experiment's rounds, by the clip norm: as given, or as its epsilon allows."""
    dp = experiment.privacy.dp
    assert dp is not None
    if dp.noise_multiplier is not None:
        return dp.noise_multiplier
    assert dp.epsilon is not None
    rounds, releases = planned(experiment)
    return noise_for(dp.epsilon, dp.delta, rate, rounds, releases)


@lru_cache(maxsize=8)
def _loss(sigma: float, rate: float, interval: float) -> Any:
    """The privacy loss distribution of one release."""
    from dp_accounting.pld import privacy_loss_distribution  # seconds to import

    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=interval
    )

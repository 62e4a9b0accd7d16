"""Randomness with an address: every draw is keyed by what it is for, so nothing depends on order or restarts.

Counter-based generators (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") make this cheap: a
key is enough to start a stream, and no state is carried from one draw to the next.
"""

import hashlib

import numpy as np


def generator(seed: int, purpose: str, *address: int | str) -> np.random.Generator:
    """The stream of draws at (seed, purpose, *address), e.g. `generator(0, "order", "backbone", epoch)`.

    The same address gives the same draws on every machine; two different addresses give unrelated ones.
    """
    # repr keeps 1 and "1", and ("a", "b") and ("a, b",), apart.
    key = hashlib.blake2b(repr((int(seed), purpose, *address)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))

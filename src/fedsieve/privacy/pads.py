"""The secrets of a secure sum: keys that two clients agree on (X25519, HKDF), pads (AES-CTR), shares (Shamir 1979).

All of them come from the operating system, never from an experiment's seed.
"""

import os
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedsieve.wire.bits import MessageError

KEY, SEED, NONCE, TAG = 32, 16, 12, 16  # bytes
_ZEROS = memoryview(bytes(2**17))


def new_key() -> bytes:
    """A private key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public(key: bytes) -> bytes:
    """The public key of a private one."""
    return X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()


def agree(key: bytes, peer: bytes) -> bytes:
    """The secret that two clients share, of one's private and the other's public key."""
    try:
        return X25519PrivateKey.from_private_bytes(key).exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError:  # a point of small order, with which every secret is zero
        raise MessageError("key", "no secret can be agreed on with such a public key") from None


def derive(secret: bytes, purpose: bytes, binding: bytes, first: int, second: int) -> bytes:
    """The 16-byte key for one purpose between two clients of the session that `binding` stands for."""
    info = purpose + binding + first.to_bytes(4, "little") + second.to_bytes(4, "little")
    return HKDF(SHA256(), length=16, salt=None, info=info).derive(secret)


def encrypt(key: bytes, text: bytes) -> bytes:
    """Nonce and AES-GCM ciphertext."""
    nonce = os.urandom(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, text, None)


def decrypt(key: bytes, sealed: bytes) -> bytes:
    """What was encrypted under this key."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], None)
    except InvalidTag:
        raise MessageError("share", "a share was not encrypted for this client and this sum") from None


def add_pad(values: np.ndarray, key: bytes, sign: int = 1) -> None:
    """Add the pad of a key to unsigned integers in place, or with sign -1 take it away."""
    stream = Cipher(AES(key), CTR(bytes(16))).encryptor()
    change = np.add if sign > 0 else np.subtract
    pad = np.empty(min(values.nbytes, len(_ZEROS)) // values.itemsize, values.dtype)  # small enough for the cache
    for start in range(0, len(values), max(1, len(pad))):
        chunk = values[start : start + len(pad)]
        stream.update_into(_ZEROS[: chunk.nbytes], pad.data.cast("B"))
        change(chunk, pad[: len(chunk)], out=chunk)


# --- shares ----------------------------------------------------------------------------------------------------------
# Shamir's scheme over GF(2^128) as pycryptodome has it: the shares are the same. That takes half a minute for a hundred
# clients, since every product is done bit by bit and every secret interpolated anew.


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret, of which any `threshold` give it back and fewer say nothing; each is as long as the secret.

    The secret is shared in pieces of 16 bytes, elements of GF(2^128). A share's place in the list, from 1, is its index.
    """
    pieces = []
    for at in range(0, len(secret), 16):
        polynomial = [*(os.urandom(16) for _ in range(threshold - 1)), secret[at : at + 16]]
        coefficients = [int.from_bytes(coefficient) for coefficient in polynomial]
        pieces.append([_value(coefficients, index).to_bytes(16) for index in range(1, count + 1)])
    return [b"".join(shares) for shares in zip(*pieces, strict=True)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret of exactly `threshold` shares, by their indices from 1."""
    weights = _interpolation(tuple(shares))
    pieces = []
    for at in range(0, len(next(iter(shares.values()))), 16):
        piece = 0
        for weight, share in zip(weights, shares.values(), strict=True):
            piece ^= _times(weight, int.from_bytes(share[at : at + 16]))
        pieces.append(piece.to_bytes(16))
    return b"".join(pieces)


def _value(coefficients: list[int], at: int) -> int:
    """A polynomial at one place, the highest coefficient first."""
    value = 0
    for coefficient in coefficients:
        value = _times(value, at) ^ coefficient
    return value


@lru_cache(maxsize=4)
def _interpolation(indices: tuple[int, ...]) -> list[int]:
    """What to multiply the values at these places by, to add up to the value at 0: the same for every secret."""
    weights = []
    for index in indices:
        above = below = 1
        for other in indices:
            if other != index:
                above, below = _times(above, other), _times(below, other ^ index)
        weights.append(_times(above, _inverse(below)))
    return weights


def _times(first: int, second: int) -> int:
    """The product in GF(2^128) modulo x^128 + x^7 + x^2 + x + 1; quickest where `second` has few bits."""
    product = 0
    while second:
        lowest = second & -second
        product ^= first * lowest
        second ^= lowest
    while high := product >> 128:
        product = (product & (2**128 - 1)) ^ high ^ high << 1 ^ high << 2 ^ high << 7
    return product


def _inverse(element: int) -> int:
    """The element to the power of 2^128 - 2."""
    result = 1
    for _ in range(127):
        element = _times(element, element)
        result = _times(result, element)
    return result

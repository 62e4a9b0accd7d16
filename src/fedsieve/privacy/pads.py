"""The secrets of a secure sum: keys that two clients agree on (X25519, HKDF), pads (AES-CTR), shares (Shamir 1979).

All of them come from the operating system, never from an experiment's seed.
"""

import os
from collections.abc import Mapping

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
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
_ZEROS = bytes(2**18)


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
        raise MessageError("share", "a share was not encrypted for this client in this session") from None


def add_pad(values: np.ndarray, key: bytes, sign: int = 1) -> None:
    """Add the pad of a key to unsigned integers in place, or with sign -1 take it away."""
    stream = Cipher(AES(key), CTR(bytes(16))).encryptor()
    change = np.add if sign > 0 else np.subtract
    step = len(_ZEROS) // values.itemsize  # small enough for the cache
    for start in range(0, len(values), step):
        chunk = values[start : start + step]
        change(chunk, np.frombuffer(stream.update(_ZEROS[: chunk.nbytes]), values.dtype), out=chunk)


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret, of which any `threshold` give it back and fewer say nothing; each is as long as the secret.

    The secret is shared in pieces of 16 bytes, elements of GF(2^128). A share's place in the list, from 1, is its index.
    """
    pieces = [Shamir.split(threshold, count, secret[at : at + 16], False) for at in range(0, len(secret), 16)]
    return [b"".join(share for _, share in shares) for shares in zip(*pieces, strict=True)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret of exactly `threshold` shares, by their indices from 1."""
    length = len(next(iter(shares.values())))
    return b"".join(
        Shamir.combine([(index, share[at : at + 16]) for index, share in shares.items()], False)
        for at in range(0, length, 16)
    )

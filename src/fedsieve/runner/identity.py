"""The identity of an experiment, by which a site accepts it. Nothing here parses it."""

import hashlib

import fedsieve


def experiment_digest(text: str) -> str:
    """The digest of an experiment, as `to_yaml` writes it, under the installed version."""
    return hashlib.sha256(f"fedsieve {fedsieve.__version__}\n{text}".encode()).hexdigest()

"""Whether torchrun started this process, and which of its ranks it is. Knows nothing of torch, which takes seconds to import."""

import os


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """This process's number among all that torchrun started; 0 without it."""
    return int(os.environ["RANK"]) if launched() else 0


def ranks() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def speaks() -> bool:
    """Whether this process tells its errors: the first on its machine does, where others have met with the same."""
    return not launched() or os.environ["LOCAL_RANK"] == "0"


def command() -> str:
    """How this process was started, up to the words that are fedsieve's own."""
    return f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} -m fedsieve" if launched() else "fedsieve"

"""The exceptions that reach a user as a sentence instead of a traceback."""

import difflib
from collections.abc import Iterable


class FedsieveError(Exception):
    """Something the user can act on: what was wrong, where, what is allowed, what to do.

    `exit_code` is 2 for a wrong request (config, path, option) and 1 when the world failed
    during the work (a full disk, damaged data).
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    @property
    def is_request(self) -> bool:
        """Whether the request was wrong, so that the same request fails again."""
        return self.exit_code == 2


class Stopped(FedsieveError):
    """The process was asked to stop. What it did is saved, and the same command continues."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message, 128 + signal)
        self.signal = signal


class Diverged(FedsieveError):
    """Training whose numbers are no longer finite. The settings cause it, and every repetition ends the same way."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 1)


def with_extra(extra: str) -> str:
    """How to come by what an optional part needs."""
    return f"`uv run --extra {extra} fedsieve ...` in a checkout, else `pip install 'fedsieve[{extra}]'`"


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """A ready ' Did you mean "x"?' clause, or nothing when no allowed word is near."""
    near = difflib.get_close_matches(str(word), [str(name) for name in allowed], n=1, cutoff=0.6)
    return f' Did you mean "{near[0]}"?' if near else ""

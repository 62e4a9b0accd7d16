"""Calls of users' own functions: a mistake in one ends in a sentence that names it, with the user's traceback below."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from fedsieve.errors import FedsieveError


class ForeignError(FedsieveError):
    """A user's own function failed, or gave something else than what was expected."""


def called(function: Callable[..., Any], where: str, *given: Any) -> Any:
    """What a user's function gives. It may not change the tensors that it is given."""
    tensors = [one for one in given if hasattr(one, "clone")]
    before = [one.detach().clone() for one in tensors]
    try:
        result = function(*given)
    except FedsieveError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without this one
        lines = "".join(traceback.format_list(frames)) + "".join(traceback.format_exception_only(error))
        raise ForeignError(f"{where}: the function raised {type(error).__name__}: {error}\n{lines.rstrip()}") from None
    for one, old in zip(tensors, before, strict=True):
        if one.shape != old.shape or not bool(((one == old) | ((one != one) & (old != old))).all()):
            raise ForeignError(f"{where}: the function changed its input. Work on a copy: `x = x.clone()`")
    return result


def expect(result: Any, shape: Sequence[int], where: str, what: str, finite: bool = True) -> None:
    """Refuse a result that is not a tensor of this shape, or not finite. `what` names it for the user."""
    sizes = tuple(shape)
    if not hasattr(result, "isfinite"):
        raise ForeignError(f"{where}: expected {what}, a tensor of shape {sizes}, got {type(result).__name__}")
    if tuple(result.shape) != sizes:
        raise ForeignError(f"{where}: expected {what}, a tensor of shape {sizes}, got shape {tuple(result.shape)}")
    if finite and not bool(result.isfinite().all()):
        raise ForeignError(f"{where}: {what} has values that are not finite (NaN or infinity)")

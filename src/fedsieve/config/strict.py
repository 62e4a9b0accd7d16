"""The base of all settings classes, and the numbers that many of their fields hold."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedsieve.errors import FedsieveError

Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]  # more, and sizes of arrays overflow
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Rate = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


class Strict(BaseModel):
    """Settings with no unknown keys, no silent conversions, no conflicts, and no change after validation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def __init__(self, /, **data: Any) -> None:
        """Settings from Python. What is wrong is said as for a config."""
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise FedsieveError("\n".join(f"{type(self).__name__}: {told(one)}" for one in error.errors())) from None

    # Pydantic itself makes settings within settings, and collects what is wrong with all of them.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def conflicts(self) -> Iterator[str]:
        """Yields a sentence for each combination of settings that cannot work. Users see the first."""
        yield from ()

    @model_validator(mode="after")
    def _check(self) -> "Strict":
        if sentence := next(self.conflicts(), None):
            raise ValueError(sentence)
        return self


def told(problem: Any) -> str:
    """A sentence on one of pydantic's problems, with the key that has it."""
    where = "".join(f"{key}: " for key in problem["loc"] if not str(key).startswith("#"))
    if problem["type"] == "value_error":
        return f"{where}{problem['ctx']['error']}"
    if problem["type"] == "choice":
        return f"{where}{problem['msg']}"
    if problem["type"] == "extra_forbidden":
        return f"{where}unknown key"
    return f"{where}{problem['msg'].removeprefix('Input ')}, got {problem['input']!r}"


def setting(default: Any, text: str) -> Any:
    """A field with a default, and a text on what it is for."""
    return Field(default, description=text)


def changed_keys(settings: BaseModel, *keys: str) -> list[str]:
    """Those of `keys` that differ from their defaults. A config that is written out in full gives every key."""
    return [key for key in keys if getattr(settings, key) != type(settings).model_fields[key].default]


def only_with(settings: BaseModel, choice: str, **takes: str) -> Iterator[str]:
    """Yields the conflicts of keys that only some words of `choice` take; `takes` lists the keys of each word."""
    chosen = getattr(settings, choice)
    for key in changed_keys(settings, *sorted({key for keys in takes.values() for key in keys.split()})):
        words = [word for word, keys in takes.items() if key in keys.split()]
        if chosen not in words:
            yield f"{key} belongs to {choice}: {' or '.join(words)}, and {choice} is {chosen}"

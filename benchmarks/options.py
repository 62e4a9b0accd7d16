"""Options of benchmarks: a function declares them next to its parameters, as in `cohorts: Annotated[Sequence[int], numbers("...")]`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import typer

from fedsieve.errors import FedsieveError, did_you_mean

Read = Callable[[str, Any], Any]  # takes an option's flag and what follows it; gives what the benchmark gets


class Setting(NamedTuple):
    """An option or the arguments of a benchmark. Where none is given, the default of the parameter holds."""

    kind: Any  # the type in which typer reads it
    info: Any  # how typer shows it
    read: Read


def option(kind: type, text: str, *flags: str, read: Read = lambda _, value: value, **more: Any) -> Setting:
    """An option with one value."""
    return Setting(kind, typer.Option(*flags, help=text, show_default=False, **more), read)


def words(text: str, allowed: Iterable[str]) -> Setting:
    """An option with several words, with commas between them."""
    return option(str, text, metavar="A,B,...", read=lambda flag, given: read_words(flag, given, tuple(allowed)))


def numbers(text: str, *wanted: Any) -> Setting:
    """An option with several numbers, with commas between them. `wanted` is as for `read_numbers`."""
    return option(str, text, metavar="A,B,...", read=lambda flag, given: read_numbers(flag, given, *wanted))


def overrides(text: str, taken: Mapping[str, str]) -> Setting:
    """Arguments that override fields of experiments. Fields in `taken` are refused, naming the option that sets them."""
    info = typer.Argument(metavar="[KEY=VALUE]...", help=text, show_default=False)
    return Setting(list[str], info, lambda _, texts: refuse(texts, taken))


def read_word(flag: str, word: str, allowed: Sequence[str]) -> str:
    """A word that must be one of `allowed`."""
    if word not in allowed:
        near = did_you_mean(word, allowed)
        raise FedsieveError(f'{flag}: "{word}" is not allowed.{near} Allowed: {", ".join(allowed)}')
    return word


def read_words(flag: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The words of a list with commas."""
    return tuple(read_word(flag, word.strip(), allowed) for word in text.split(","))


def read_numbers(
    flag: str,
    text: str,
    allowed: str = "whole numbers from 1, as in 1,10",
    fits: Callable[[float], bool] = lambda number: number >= 1,
    kind: type[int] | type[float] = int,
) -> tuple[Any, ...]:
    """The numbers of a list with commas, each once."""
    try:
        found = dict.fromkeys(kind(word) for word in text.split(","))
        if not all(map(fits, found)):
            raise ValueError
    except ValueError:
        raise FedsieveError(f"{flag}: {text} is not allowed. Allowed: {allowed}") from None
    return tuple(found)


def refuse(texts: Sequence[str], taken: Mapping[str, str]) -> Sequence[str]:
    """Refuse overrides of fields that the benchmark sets itself."""
    for text in texts:
        key = text.partition("=")[0].strip()
        if key in taken:
            raise FedsieveError(f"{text}: the benchmark sets {key} itself. Use {taken[key]}")
    return texts


def fills(pixels: float) -> bool:
    """Whether the networks' patches of 16 pixels fill a size."""
    return pixels > 0 and pixels % 16 == 0


REPEATS = option(int, "Turns that medians are taken of.", min=1)

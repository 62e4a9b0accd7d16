"""Words that settings choose among. Each word is declared once: its fields, a line of text, its checks, where its code is.

A family, such as the aggregators, is a subclass of `Choice`. Its subclasses are its words. `register` adds words from outside.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, Field, ValidationError, create_model, model_serializer, model_validator
from pydantic_core import PydanticCustomError, core_schema

from fedsieve.config.strict import Strict
from fedsieve.errors import FedsieveError, did_you_mean

if TYPE_CHECKING:
    from fedsieve.config.schema import Experiment

FAMILIES: dict[str, type["Choice"]] = {}  # by what one of its words is called
ORIGIN: list[str] = []  # the plugin that is being imported, with its digest


class Choice(Strict):
    """Settings that begin with a word. `Family(kind="word", ...)` makes an instance of the word's class."""

    family: ClassVar[str] = ""  # what one word is called, such as "aggregator"
    place: ClassVar[str] = ""  # the key in a config
    key: ClassVar[str] = "kind"  # the key that holds the word
    default: ClassVar[str] = ""  # the word where that key is left out
    bare: ClassVar[bool] = False  # a word without other settings is written as the word alone
    words: ClassVar[dict[str, type["Choice"]]] = {}
    word: ClassVar[str] = ""  # empty: a family
    home: ClassVar[Any] = None  # the implementation: "module:name", or the object itself; None: part of the engine
    foreign: ClassVar[bool] = False  # whether the implementation comes from outside the package
    origin: ClassVar[str] = ""  # the plugin that brought it, with its digest

    def __new__(cls, **fields: Any) -> Self:
        """An instance of the word's class where a family is called."""
        if "words" not in cls.__dict__ or (not fields.keys() - {"__pydantic_fields_set__"} and not cls.default):
            return super().__new__(cls)
        word = fields.get(cls.key, cls.default)
        try:
            return super().__new__(cls.named(word) if isinstance(word, str) else type(cls.around(word)))
        except PydanticCustomError as error:
            raise FedsieveError(f"{cls.__name__}: {cls.key}: {error}") from None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "family" in cls.__dict__:
            cls.words = {}
            FAMILIES[cls.family] = cls
        elif cls.__dict__.get("word"):
            cls.words[cls.word] = cls

    @property
    def kind(self) -> str:
        """The word."""
        return type(self).word

    @classmethod
    def text(cls) -> str:
        """One line on the word, or on the family."""
        lines = (cls.__doc__ or "").strip().splitlines()
        return lines[0].strip() if lines else ""

    @classmethod
    def named(cls, word: Any) -> type[Self]:
        """The class of a word of this family."""
        if isinstance(word, str) and word in cls.words:
            return cls.words[word]  # type: ignore[return-value]
        sentence = f"{word!r} is not allowed.{did_you_mean(str(word), cls.words)} Allowed: {', '.join(cls.words)}"
        raise PydanticCustomError("choice", "{sentence}", {"sentence": sentence})

    @classmethod
    def of(cls, value: Any) -> Self:
        """Settings from a word, a mapping, or an object that stands in a word's place."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.named(value).model_validate({})
        if isinstance(value, Mapping):
            word = value.get(cls.key, cls.default)
            try:
                made = cls.named(word)
            except PydanticCustomError as error:
                raise _problem(cls, cls.key, error, word) from None
            return made.model_validate(dict(value))
        if callable(value) or not isinstance(value, bool | int | float | list | tuple | None):
            return cls.around(value)
        sentence = f"should be a word or a mapping, got {value!r}. Words: {', '.join(cls.words)}"
        raise PydanticCustomError("choice", "{sentence}", {"sentence": sentence})

    @classmethod
    def around(cls, piece: Any) -> Self:
        """Settings for an object of the user's. They exist in this process only: nothing writes or reads code."""
        name = getattr(piece, "__name__", type(piece).__name__)
        return declare(cls, name, piece, listed=False).model_validate({})  # type: ignore[return-value]

    @property
    def piece(self) -> Any:
        """The implementation, imported when it is first asked for."""
        home = type(self).home
        if isinstance(home, str):
            module, _, name = home.partition(":")
            return getattr(import_module(module), name)
        return home

    @property
    def fields(self) -> dict[str, Any]:
        """The settings that only this word takes."""
        common = self._family().model_fields
        return {name: getattr(self, name) for name in type(self).model_fields if name not in common}

    def made(self) -> Any:
        """The implementation with its settings: a function to call, or an instance of a class."""
        piece = self.piece
        if inspect.isclass(piece):
            return piece(**self.fields)
        return functools.partial(piece, **self.fields) if self.fields else piece

    def clashes(self, experiment: "Experiment") -> Iterator[str]:
        """Yields a sentence for each setting elsewhere that this word cannot work with."""
        yield from ()

    @classmethod
    def _family(cls) -> type["Choice"]:
        return FAMILIES[cls.family]

    # --- validation --------------------------------------------------------------------------------------------------

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        schema = handler(source)
        if "family" not in cls.__dict__:
            return schema
        dumped = core_schema.plain_serializer_function_ser_schema(
            lambda value, info: value.model_dump(mode=info.mode), info_arg=True
        )
        return core_schema.no_info_plain_validator_function(cls.of, serialization=dumped)

    @model_validator(mode="before")
    @classmethod
    def _take_word(cls, value: Any) -> Any:
        """Check the keys by name, so that a refusal says which words take them, and drop the word itself."""
        if not isinstance(value, Mapping):
            return value
        given = {}
        for key, one in value.items():
            if key in cls.model_fields:
                given[key] = one
            elif key != cls.key and not cls._says_nothing(key, one):
                error = PydanticCustomError("choice", "{sentence}", {"sentence": cls._untaken(str(key))})
                raise _problem(cls, str(key), error, one)
        return given

    @classmethod
    def _says_nothing(cls, key: Any, value: Any) -> bool:
        """Whether a key has its default for another word: a config that is written out in full may have several words' keys."""
        others = [other.model_fields[key] for other in cls.words.values() if key in other.model_fields]
        return bool(others) and (value is None or any(field.default == value for field in others))

    @classmethod
    def _untaken(cls, key: str) -> str:
        """A sentence on a key that the word does not take."""
        takers = [word for word, other in cls.words.items() if key in other.model_fields]
        if takers:
            return f"{key} belongs to {cls.key}: {' or '.join(takers)}, and {cls.key} is {cls.word}"
        allowed = [cls.key, *cls.model_fields]
        return f"unknown key.{did_you_mean(key, allowed)} Allowed: {', '.join(allowed)}"

    @model_serializer(mode="wrap")
    def _with_word(self, handler: Any) -> Any:
        content = handler(self)
        return self.kind if self.bare and not self.fields else {self.key: self.kind, **content}

    def __reduce__(self) -> Any:
        if not isinstance(type(self).home, str) and self.words.get(self.kind) is not type(self):
            raise FedsieveError(
                f"{self.family}: {self.kind} is an object of this process and cannot be sent to another"
            )
        return _again, (self.family, self.model_dump())


def _again(family: str, content: Any) -> Choice:
    return FAMILIES[family].of(content)


def _problem(cls: type[Choice], key: str, error: PydanticCustomError, value: Any) -> ValidationError:
    return ValidationError.from_exception_data(cls.__name__, [{"type": error, "loc": (key,), "input": value}])


def declare(
    family: type[Choice], word: str, piece: Any, text: str = "", listed: bool = True, **more: Any
) -> type[Choice]:
    """Make a word of a family from an implementation. Its keyword-only parameters become the word's fields."""
    callee = piece.__init__ if inspect.isclass(piece) else piece
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(callee).parameters.items() if callable(piece) else ():
        if parameter.kind is parameter.KEYWORD_ONLY:
            given = parameter.annotation is not parameter.empty
            default = Field() if parameter.default is parameter.empty else parameter.default
            fields[name] = (parameter.annotation if given else Any, default)
    if taken := [name for name in fields if name in family.model_fields or name == family.key]:
        raise FedsieveError(
            f"{family.family} {word}: {taken[0]} is a setting of every {family.family}. Choose another name"
        )
    made = create_model(word, __base__=family, __doc__=text or (inspect.getdoc(piece) or ""), **fields)
    if listed and word in family.words:
        raise FedsieveError(f'{family.family}: "{word}" exists already. Choose another name')
    made.word, made.home, made.foreign, made.origin = word, piece, True, "".join(ORIGIN[-1:])
    for name, value in more.items():
        setattr(made, name, value)
    if listed:
        family.words[word] = made
    return made


def words_in(settings: Any) -> Iterator[Choice]:
    """All words that are chosen somewhere in some settings."""
    if isinstance(settings, Choice):
        yield settings
    if isinstance(settings, BaseModel):
        for name in type(settings).model_fields:
            yield from words_in(getattr(settings, name))
    elif isinstance(settings, list | tuple):
        for one in settings:
            yield from words_in(one)


def register(family: str, word: str, **more: Any) -> Callable[[Any], Any]:
    """Decorate a function or class with this to add it to the words of a family, such as "aggregator"."""
    if family not in FAMILIES:
        raise FedsieveError(
            f'register: "{family}" is no kind of word.{did_you_mean(family, FAMILIES)} Allowed: {", ".join(FAMILIES)}'
        )

    def decorate(piece: Any) -> Any:
        declare(FAMILIES[family], word, piece, **more)
        return piece

    return decorate

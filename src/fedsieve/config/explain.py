"""Sentences for users from pydantic's errors: the key, the problem, the allowed values, and a guess at the word meant."""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from fedsieve.config.schema import Experiment, LastBlocks
from fedsieve.errors import did_you_mean


def keys_of(problem: Any) -> list[int | str]:
    """The keys that lead to a problem. Pydantic's location also has the tags of unions, which start with #."""
    return [key for key in problem["loc"] if not str(key).startswith("#")]


def explain(problem: Any, tree: Mapping[str, Any]) -> str:
    """The key of a problem in `tree`, as a reader writes it, and a sentence on the problem."""
    keys = keys_of(problem)
    sentence = _sentence(problem, keys)
    return f"{'.'.join(_spoken(keys, tree))}: {sentence}" if keys else sentence


def in_words(value: Any) -> str:
    """The type of a value, as a reader of YAML calls it."""
    words = {str: "the text", int: "the number", float: "the number", bool: "the switch", type(None): "the empty value"}
    return words.get(type(value), "a list" if isinstance(value, list) else "a mapping")


def _spoken(keys: list[int | str], tree: Any) -> list[str]:
    """Keys as a reader writes them: stages by name where they have one."""
    spoken = []
    for key in keys:
        try:
            tree = tree[key]
        except (LookupError, TypeError):
            tree = None
        name = tree.get("name") if isinstance(key, int) and isinstance(tree, Mapping) else None
        spoken.append(name if isinstance(name, str) else str(key))
    return spoken


def _sentence(problem: Any, keys: list[int | str]) -> str:
    kind, given = problem["type"], problem.get("input")
    names = [key for key in keys if isinstance(key, str)]
    model: type[BaseModel] = Experiment
    for key in names[:-1]:
        if key in model.model_fields and (inner := _models_in(model.model_fields[key].annotation)):
            model = inner[0]
    annotation = model.model_fields[names[-1]].annotation if names and names[-1] in model.model_fields else None
    if kind == "extra_forbidden":
        allowed = list(model.model_fields)
        return f"unknown key.{did_you_mean(str(keys[-1]), allowed)} Allowed: {', '.join(allowed)}"
    if kind == "missing":
        return "required, but not given"
    if kind == "value_error":
        return str(problem["ctx"]["error"])
    if kind == "choice":  # the sentence of a word
        return problem["msg"]
    if kind == "literal_error" and (words := _words(annotation, listed=isinstance(keys[-1], int))):
        return f"{given!r} is not allowed.{did_you_mean(str(given), words)} Allowed: {', '.join(words)}"
    if kind == "model_type" and (inner := _models_in(annotation)):
        return f"should be a mapping, got {in_words(given)} {given!r}. Its keys: {', '.join(inner[0].model_fields)}"
    typed = kind.endswith("_type") or kind in ("int_from_float", "bool_parsing")
    return f"{problem['msg'].removeprefix('Input ')}, got {f'{in_words(given)} ' if typed else ''}{given!r}"


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models mentioned anywhere in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _words(annotation: Any, listed: bool = False) -> list[str]:
    """The words a choice allows, or with `listed` those its lists do; empty where the field is no choice."""
    if annotation is LastBlocks:
        return [] if listed else ["{last_blocks: N}"]
    origin = get_origin(annotation)
    if origin is Literal:
        return [] if listed else [str(word) for word in get_args(annotation)]
    within = listed and origin is not list
    return list(dict.fromkeys(word for part in get_args(annotation) for word in _words(part, within)))

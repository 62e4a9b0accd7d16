"""Reading and writing experiments: YAML, `key=value` overrides, and errors that name the file and the key."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fedsieve.config.explain import explain, in_words, keys_of
from fedsieve.config.schema import Experiment
from fedsieve.errors import FedsieveError, did_you_mean

# --- YAML ------------------------------------------------------------------------------------------------------------


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """YAML with the two surprises taken out: 1e-3 is a number, and only true and false are booleans."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":bool", ":float", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false|True|False)$"), list("tfTF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|nan|NaN))$"),
    list("-+0123456789."),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f'"{key}" is given twice', key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
# Deep, like mappings: a list that holds itself is then refused.
_Loader.add_constructor("tag:yaml.org,2002:seq", lambda loader, node: loader.construct_sequence(node, deep=True))


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; a syntax error names `where` and the line."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", error)
        if isinstance(error, RecursionError):
            problem = "lists or mappings are nested too deep"
        if problem == "found unconstructable recursive node":
            problem = "an alias (*) stands for something that it is itself a part of"
        line = f", line {mark.line + 1}" if mark else ""
        raise FedsieveError(f"{where}{line}: not valid YAML: {problem}") from None


class _Dumper(yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper):  # type: ignore[misc]
    """Quotes what the loader would not read as a text."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def to_yaml(experiment: Experiment) -> str:
    """The experiment, every default written out, as YAML that reads back to the same experiment."""
    # Escaped: YAML takes some unprinted characters for line ends.
    return yaml.dump(experiment.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


# --- overrides -------------------------------------------------------------------------------------------------------


def apply_overrides(tree: Any, overrides: Iterable[str]) -> dict[str, Any]:
    """`tree` with each `dotted.path=value` set. Lists go by number, stages also by name (`stages.head.epochs=3`)."""
    tree = dict(tree) if isinstance(tree, Mapping) else {}
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise FedsieveError(f'command line: "{override}" is not of the form key=value, such as data.size=64')
        value = parse_yaml(text, f"command line: {path}")
        tree = _set(tree, keys, value, path)
    return tree


def _set(node: Any, keys: Sequence[str], value: Any, path: str) -> Any:
    """A copy of `node` with the value set at `keys`; a scalar on the way becomes a mapping, as in train.last_blocks=2."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(node, list):
        names, index = _named_items(node, key)
        if not 0 <= index < len(node):
            allowed = ", ".join([*(name for name in names if name), *map(str, range(len(node)))])
            raise FedsieveError(
                f'command line: {path}: "{key}" is not there.{did_you_mean(key, names)} Allowed: {allowed}'
            )
        return [*node[:index], _set(node[index], rest, value, path), *node[index + 1 :]]
    branch = node if isinstance(node, Mapping) else {}
    return {**branch, key: _set(branch.get(key), rest, value, path)}


def _named_items(node: list[Any], key: str) -> tuple[list[str], int]:
    """The names of a list's items, and the place that a name or number means; no place where there is no such item."""
    names = [str(item.get("name")) if isinstance(item, Mapping) else "" for item in node]
    return names, names.index(key) if key in names else int(key) if key.isdigit() else -1


def override_place(tree: Any, override: str) -> tuple[str, ...]:
    """The keys that `dotted.path=value` sets in `tree`, stages by number: the same however they were named."""
    found = []
    for key in override.partition("=")[0].strip().split("."):
        if isinstance(tree, list):
            index = _named_items(tree, key)[1]
            key, tree = str(index), tree[index] if 0 <= index < len(tree) else None
        else:
            tree = tree.get(key) if isinstance(tree, Mapping) else None
        found.append(key)
    return tuple(found)


# --- validation ------------------------------------------------------------------------------------------------------


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment in the YAML file `path`, with `key=value` overrides applied."""
    return parse_config(read_config(Path(path)), overrides, where=str(path))


def read_config(path: Path) -> str:
    """The text of an experiment's YAML file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reasons: dict[type, str] = {
            FileNotFoundError: "no such file. `fedsieve demo --show` prints an experiment to start from",
            IsADirectoryError: "is a folder; an experiment is a YAML file",
            UnicodeDecodeError: "not a text file; an experiment is a YAML file",
        }
        reason = reasons.get(type(error)) or f"cannot be read: {getattr(error, 'strerror', error)}"
        raise FedsieveError(f"{path}: {reason}") from None


def parse_config(text: str, overrides: Sequence[str] = (), where: str = "config") -> Experiment:
    """The experiment in a YAML text; `where` names it in error messages."""
    return make_experiment(parse_yaml(text, where), overrides, where)


def make_experiment(tree: Any, overrides: Sequence[str] = (), where: str = "config") -> Experiment:
    """The experiment in a tree of mappings and lists, as YAML holds it."""
    tree = {} if tree is None else tree
    if not isinstance(tree, Mapping):
        raise FedsieveError(
            f"{where}: an experiment is a mapping of keys such as data, model and stages, not {in_words(tree)}"
        )
    try:
        return Experiment.model_validate(apply_overrides(tree, overrides))
    except ValidationError as error:
        raise FedsieveError("\n".join(_explained(error, tree, where, overrides))) from None


def _explained(error: ValidationError, written: Mapping[str, Any], where: str, overrides: Sequence[str]) -> list[str]:
    """One line per problem: place, key, what is wrong, what is allowed."""
    tree = apply_overrides(written, overrides)
    overridden = [override_place(tree, override) for override in overrides]
    lines = []
    for problem in error.errors():
        keys = tuple(map(str, keys_of(problem)))
        if any(keys[: len(place)] == place for place in overridden):
            place = "command line"
        else:
            culprits = _culprits(problem, written, overrides)
            place = f"command line, {' and '.join(culprits)}" if culprits else where
        lines.append(f"{place}: {explain(problem, tree)}")
    return lines


def _culprits(problem: Any, written: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """The overrides without which a problem of several keys together would not be there; none where it is the file's own."""

    def there(some: Sequence[str]) -> bool:
        try:
            Experiment.model_validate(apply_overrides(written, some))
        except ValidationError as error:
            return any((other["loc"], other["msg"]) == (problem["loc"], problem["msg"]) for other in error.errors())
        except FedsieveError:  # one goes into what another has made
            return True
        return False

    if not overrides or there([]):
        return []
    single = [own for place, own in enumerate(overrides) if not there([*overrides[:place], *overrides[place + 1 :]])]
    return single or list(overrides)

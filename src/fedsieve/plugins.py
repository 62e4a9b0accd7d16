"""Plugins: code that the person at the keyboard asks for, which adds words with `fedsieve.register`.

Nothing else imports code: no config, no run folder and no server can name a plugin.
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from importlib.metadata import entry_points
from pathlib import Path

from fedsieve.config import choice
from fedsieve.errors import FedsieveError

LOADED: dict[str, str] = {}  # the digest of each plugin, by the name it was asked for


def take_plugins(arguments: list[str]) -> list[str]:
    """Load the plugins that `--plugin NAME` asks for, anywhere among the arguments, and give the other arguments."""
    left, words = list[str](), iter(arguments)
    for word in words:
        if word == "--":
            return [*left, word, *words]
        name, equals, value = word.partition("=")
        if name != "--plugin":
            left.append(word)
            continue
        if not equals and (value := next(words, "")) == "":
            raise FedsieveError("--plugin: name a Python file, or an installed package")
        load(value)
    return left


def load(name: str) -> None:
    """Import a Python file, or an installed package with entry points in the group "fedsieve"."""
    path = Path(name)
    found = path.is_file()
    if not found and (name.endswith(".py") or "/" in name):
        raise FedsieveError(f"--plugin: {name}: no such file")
    files = [path] if found else _package_files(name)
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(file.read_bytes())
    try:
        choice.ORIGIN.append(f"{path.name if found else name}@{digest.hexdigest()}")
        _import_file(path) if found else _import_package(name)
    except FedsieveError:
        raise
    except Exception as error:
        lines = "".join(traceback.format_exception(error)).rstrip()
        raise FedsieveError(f"--plugin: {name} failed: {type(error).__name__}: {error}\n{lines}") from None
    finally:
        choice.ORIGIN.pop()
    LOADED[name] = digest.hexdigest()


def _import_file(path: Path) -> None:
    module = f"fedsieve_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None and spec.loader is not None
    sys.modules[module] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)


def _import_package(name: str) -> None:
    points = [point for point in entry_points(group="fedsieve") if name in (point.name, point.module.partition(".")[0])]
    for point in points:
        point.load()
    if not points:
        importlib.import_module(name)


def _package_files(name: str) -> list[Path]:
    """The Python files of an installed package, in order."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise FedsieveError(f"--plugin: {name} is neither a file nor an installed package")
    origin = Path(spec.origin)
    return sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]

"""Which bundles a site accepts. It decides on the bytes of a bundle: nothing in it is unpacked, imported or run.

A site never runs a bundle at all. It answers the questions of an experiment that a person there has accepted, and a bundle
only shows which experiment the questions are about. So a bundle must be exactly what `fedsieve deploy run` would make here.
"""

import hashlib
import io
import json
import re
import tomllib
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsieve.config import Experiment, parse_config, to_yaml
from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomic, write_json
from fedsieve.flower.project import app_content
from fedsieve.flower.site import Policy
from fedsieve.runner.identity import experiment_digest

PROJECT, MANIFEST = "pyproject.toml", ".info/CONTENT"
LARGEST = 2**22  # bytes of a file in a bundle
SETTINGS: dict[str, type] = {"experiment": str, "out": str, "wait": float, "deadline": float}
WAITING = 20  # experiments that a site keeps for review


class Refused(FedsieveError):
    """A bundle that the site does not accept. The server learns the code; the sentence stays at the site."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(f"refused ({code}): {sentence}")
        self.code = code


def experiment_of(bundle: bytes, digest: str, overrides: Mapping[str, Any]) -> str:
    """The experiment that a run is about, with the overrides of its run config, as text that nobody has parsed."""
    if hashlib.sha256(bundle).hexdigest() != digest:
        raise Refused("bundle", "its digest is not the one of the run")
    content = _project(bundle)
    try:
        config = dict(content["tool"]["flwr"]["app"]["config"])
        name = re.fullmatch(r"The fedsieve experiment (.*)", content["project"]["description"])
        text = config.pop("experiment")
    except (KeyError, TypeError, ValueError):
        raise Refused("bundle", "it is not an app of fedsieve") from None
    if (
        name is None
        or not _allowed({"experiment": text, **config})
        or config.keys() | {"experiment"} != SETTINGS.keys()
    ):
        raise Refused("bundle", "its description or its run config is not one of fedsieve's")
    if content != app_content(text, name[1], config):
        raise Refused(
            "bundle", "it differs from what this version of fedsieve writes: components, version or other keys"
        )
    if not _allowed(overrides):
        raise Refused("overrides", f"the run config overrides {', '.join(sorted(map(str, overrides)))[:200]}")
    return str(overrides.get("experiment", text))


def _allowed(config: Mapping[str, Any]) -> bool:
    return all(type(value) is SETTINGS.get(key) for key, value in config.items())


def _project(bundle: bytes) -> dict[str, Any]:
    """The pyproject.toml of a bundle that holds this file alone, and Flower's list of it."""
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            if (names := archive.namelist()) != [PROJECT, MANIFEST]:
                raise Refused("bundle", f"it has other files than {PROJECT}: {', '.join(names)[:200]}")
            project, manifest = (_read(archive, name) for name in names)
        if manifest.decode() != f"{PROJECT},{hashlib.sha256(project).hexdigest()},{8 * len(project)}":
            raise Refused("bundle", "its list of files is wrong")
        return tomllib.loads(project.decode())
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError) as error:
        raise Refused("bundle", f"it cannot be read: {error}") from None


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    """A file of an archive, of which no more is unpacked in memory than it may have."""
    with archive.open(name) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise Refused("bundle", f"{name} is larger than {LARGEST:,} bytes")
    return content


class Accepted:
    """The experiments that a site takes part in: files that it holds, named by their digests. Without one, it takes part in none."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self.accepted, self.waiting, self.spent = folder / "accepted", folder / "waiting", folder / "files" / "spent"
        self.policy = policy

    def add(self, experiment: Experiment) -> Path:
        """Accept an experiment, if the policy allows it."""
        if objection := self.policy.objection(experiment):
            raise FedsieveError(f"{experiment.name} is against this site's policy: {objection}")
        text = to_yaml(experiment)
        file = self.accepted / f"{experiment_digest(text)}.yaml"
        write_atomic(file, text)
        (self.waiting / file.name).unlink(missing_ok=True)
        return file

    def check(self, text: str) -> str:
        """The digest of an experiment that is accepted. Any other is kept for review, and refused."""
        digest = experiment_digest(text)
        if (self.accepted / f"{digest}.yaml").is_file():
            if objection := self.policy.objection(parse_config(text)):  # the policy may be newer than the acceptance
                raise Refused("policy", objection)
            return digest
        file = self.waiting / f"{digest}.yaml"
        if not file.exists() and len(list(self.waiting.glob("*.yaml"))) < WAITING and len(text) <= LARGEST:
            write_atomic(file, text)
        raise Refused(
            "experiment", f"nobody here has accepted it. `fedsieve node review {self.waiting.parent} {file}` shows it"
        )

    def spend(self, digest: str, ask: str, size: int) -> None:
        """Take an answer to the question `ask` off what the policy allows an experiment. Written down before it is sent."""
        file = self.spent / f"{digest}.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        spent = {"bytes": before.get("bytes", 0) + size, "rounds": before.get("rounds", 0) + (ask == "train")}
        for what, amount in spent.items():
            limit = getattr(self.policy, what)
            if limit is not None and amount > limit:
                raise Refused("limit", f"{amount:,} {what} for this experiment, and policy.{what} here is {limit:,}")
        write_json(file, spent)

"""A site's folder: its key, who its server is, what it takes of its own, and which experiments it accepts."""

import shutil
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from fedsieve.config import Experiment, Positive, Strict, parse_yaml, read_config
from fedsieve.config.strict import Count, Rate, setting
from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomic
from fedsieve.flower.deployment import split_address
from fedsieve.flower.keys import fingerprint, new_site_key
from fedsieve.flower.warm import IDLE

SETTINGS_FILE = "site.yaml"
WRITTEN = ("files", "waiting")  # all that `fedsieve node run` writes to


class Policy(Strict):
    """What a site asks of every experiment, beyond that a person there has accepted it. The site itself enforces it."""

    require: Literal["nothing", "secagg"] = setting("nothing", "secagg: the server may learn sums only")
    cohort: Positive = setting(1, "the smallest number of clients in a round")
    rounds: Positive | None = setting(None, "how often the site trains for one experiment, in all its runs together")
    bytes: Positive | None = setting(None, "how much leaves the site for one experiment, in all its runs together")

    def objection(self, experiment: Experiment) -> str | None:
        """Why this site cannot take part in an experiment, in words."""
        federation = experiment.federation
        if federation is None:
            return "it is central, and no site takes part in it"
        if self.require == "secagg" and experiment.privacy.aggregation != "secagg":
            return f"privacy.aggregation is {experiment.privacy.aggregation}, and policy.require here is secagg"
        size = federation.cohort_size(federation.clients) if federation.clients else 0
        if size < self.cohort and self.cohort > 1:
            return f"a round has {size or 'an unknown number of'} clients, and policy.cohort here is {self.cohort}"
        return None


class SiteSettings(Strict):
    """What the operator of a site says. Nothing of it ever comes from a server."""

    server: str = setting(..., "the address of the server's proxy, HOST:PORT")
    client: Count = setting(..., "which client of the federation this site is: 0 to federation.clients - 1")
    data: str | None = setting(None, "its images, with federation.partition: {kind: sites}")
    weights: str | None = setting(None, "where the pretrained weights are here, instead of model.weights")
    device: str | None = setting(None, "cpu, cuda or cuda:N; default: what is there")
    idle: Rate = setting(IDLE, "seconds after which the process that trains gives its memory back")
    policy: Policy = Policy()


def init_site(folder: Path, settings: SiteSettings, authority: Path) -> str:
    """Make a site's folder with a new key. Gives the fingerprint of the server's certificate authority."""
    split_address("--server", settings.server)
    if folder.exists() and any(folder.iterdir()):
        raise FedsieveError(f"{folder} is there already, with files: name another folder")
    if not authority.is_file():
        raise FedsieveError(f"--ca: {authority} is not there. The server's operator gives you ca.crt")
    if settings.data is not None and not Path(settings.data).exists():
        raise FedsieveError(f"--data: {settings.data} is not there")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in WRITTEN:
        (folder / name).mkdir()
    new_site_key(folder)
    shutil.copyfile(authority, folder / "ca.crt")
    write_atomic(
        folder / SETTINGS_FILE,
        yaml.safe_dump(settings.model_dump(exclude_none=True, exclude_defaults=True), sort_keys=False),
    )
    return fingerprint(folder / "ca.crt")


def read_site(folder: Path) -> SiteSettings:
    """The settings of a site."""
    file = folder / SETTINGS_FILE
    if not file.exists():
        raise FedsieveError(f"{file} is not there: `fedsieve node init` makes a site's folder")
    tree: Any = parse_yaml(read_config(file), str(file))
    try:
        return SiteSettings.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key, allowed = ".".join(map(str, first["loc"])), ", ".join(SiteSettings.model_fields)
        raise FedsieveError(f"{file}: {key}: {first['msg']}. Its keys: {allowed}") from None

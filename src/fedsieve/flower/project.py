"""The bundle of an experiment: one pyproject.toml that `flwr run` takes. Code is not in it: every site has fedsieve."""

from pathlib import Path
from typing import Any

import tomli_w

import fedsieve
from fedsieve.config import Experiment, to_yaml
from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomic
from fedsieve.flower import DEADLINE, WAIT


def app_content(text: str, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The content of pyproject.toml. `text` is the experiment `name` as YAML; `config` holds out, wait and deadline."""
    return {
        "project": {
            "name": "fedsieve-experiment",
            "version": fedsieve.__version__,
            "description": f"The fedsieve experiment {name}",
            "license": "Apache-2.0",
            "dependencies": [f"fedsieve[flower]=={fedsieve.__version__}"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedsieve",
                    "components": {
                        "serverapp": "fedsieve.flower.app:server",
                        "clientapp": "fedsieve.flower.app:client",
                    },
                    "config": {"experiment": text, **config},
                }
            }
        },
    }


def write_app(experiment: Experiment, folder: Path, out: str, deadline: float = DEADLINE) -> Path:
    """Write the app of an experiment whose ServerApp runs into the folder `out`, and give its pyproject.toml."""
    from fedsieve.runner.meeting import check_remote  # imports torch, and a site's process needs only the content

    check_remote(experiment)
    file = folder / "pyproject.toml"
    if folder.exists() and any(item != file for item in folder.iterdir()):
        raise FedsieveError(f"{folder} is there already, with other files: delete it")
    config = {"out": out, "wait": WAIT, "deadline": float(deadline)}
    content = app_content(to_yaml(experiment), experiment.name, config)
    write_atomic(file, tomli_w.dumps(content, multiline_strings=True))
    return file

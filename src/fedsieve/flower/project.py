"""The folder that `flwr run` takes: an experiment and where its apps are. Code is not in it: every site has fedsieve."""

from pathlib import Path

import tomli_w

import fedsieve
from fedsieve.config import Experiment, to_yaml
from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomic
from fedsieve.flower.app import DEADLINE, WAIT
from fedsieve.runner.meeting import check_remote


def write_app(experiment: Experiment, folder: Path, out: str, deadline: float = DEADLINE) -> Path:
    """Write the app of an experiment whose ServerApp runs into the folder `out`, and give its pyproject.toml."""
    check_remote(experiment)
    file = folder / "pyproject.toml"
    if folder.exists() and any(item != file for item in folder.iterdir()):
        raise FedsieveError(f"--app: {folder} is there already, with other files: name another folder")
    content = {
        "project": {
            "name": "fedsieve-experiment",
            "version": fedsieve.__version__,
            "description": f"The fedsieve experiment {experiment.name}",
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
                    "config": {"experiment": to_yaml(experiment), "out": out, "wait": WAIT, "deadline": deadline},
                }
            }
        },
    }
    write_atomic(file, tomli_w.dumps(content, multiline_strings=True))
    return file

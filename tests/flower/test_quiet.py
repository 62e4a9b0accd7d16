"""Flower's update check and telemetry are off before Flower is imported, wherever fedsieve starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedsieve[flower]'")

from fedsieve.config import to_yaml

OFF = {"FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_TELEMETRY_ENABLED": "0"}
# Ends the process at the first import of Flower, and tells what Flower would have found in the environment.
WATCH = f"""
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("flwr."):
            print({{key: os.environ.get(key) for key in {list(OFF)}}}, flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""
STARTS = {
    "the apps": "import fedsieve.flower.app",
    "the simulation": "import fedsieve.flower.simulation",
    "the command": "from fedsieve.cli import main; main(['flower', 'config.yaml'])",
    "a site": "import fedsieve.flower.driver",
    "the peer of a benchmark": "from benchmarks.peers import missing; missing('flower')",
    "the secure sum of a benchmark": "from benchmarks.secagg import _flower; _flower({}, {}, 1, {})",
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("given", [{}, {key: "yes" for key in OFF}])
def test_flower_is_imported_with_its_calls_home_switched_off(tmp_path, tiny, start, given):
    (tmp_path / "config.yaml").write_text(
        to_yaml(tiny("federation={clients: 2, cohort: 2}", "stages=[{name: all, rounds: 1}]"))
    )
    environment = {key: value for key, value in os.environ.items() if key not in OFF} | given
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])  # where the benchmarks are
    command = [sys.executable, "-c", WATCH + STARTS[start]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == f"{OFF}\n", done.stderr

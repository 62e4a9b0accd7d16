import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fedsieve


def test_every_public_name_is_there():
    for name in fedsieve.__all__:
        assert getattr(fedsieve, name).__doc__


@pytest.mark.parametrize(
    "example", sorted((Path(__file__).parents[1] / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_every_example_runs(example, capsys):
    runpy.run_path(str(example))
    assert capsys.readouterr().out


def test_importing_the_package_imports_no_torch():
    code = "import sys, fedsieve; from fedsieve import load_config; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_running_from_python_gives_the_summary(tiny, tmp_path):
    assert fedsieve.run(tiny(), tmp_path / "run")["name"] == "tiny"

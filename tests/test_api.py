import subprocess
import sys

import fedsieve


def test_every_public_name_is_there():
    for name in fedsieve.__all__:
        assert getattr(fedsieve, name).__doc__


def test_importing_the_package_imports_no_torch():
    code = "import sys, fedsieve; from fedsieve import load_config; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_running_from_python_gives_the_summary(tiny, tmp_path):
    assert fedsieve.run(tiny(), tmp_path / "run")["name"] == "tiny"

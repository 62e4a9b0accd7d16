"""What users install: the package without the benchmarks, on its declared dependencies alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fedsieve

ROOT = Path(__file__).parents[2]


def uv(*words):
    """A command of uv in the checkout, with the registry and the cache that it is configured with."""
    program = shutil.which("uv")
    if program is None:
        pytest.skip("uv is not installed")
    return subprocess.run([program, *map(str, words)], cwd=ROOT, capture_output=True, text=True)


def environment(folder, *packages):
    """The Python of a new virtual environment with these packages."""
    python = folder / "bin" / "python"
    assert uv("venv", "--python", sys.executable, folder).returncode == 0
    done = uv("pip", "install", "--python", python, *packages)
    if done.returncode:
        pytest.skip(f"packages cannot be had: {done.stderr.strip()[-500:]}")
    return python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The package as it is built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    builder = environment(folder / "builder", "hatchling")
    command = [builder, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [built] = folder.glob("*.whl")
    return built


def test_a_wheel_holds_the_package_and_no_benchmarks(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "fedsieve/cli/root.py" in names and "fedsieve/assets/demo.yaml" in names
    assert {name.split("/")[0] for name in names} == {"fedsieve", f"fedsieve-{fedsieve.__version__}.dist-info"}
    assert not [name for name in names if "bench" in name]


@pytest.mark.slow
def test_the_installed_package_runs_the_demo_in_any_folder(wheel, tmp_path):
    python = environment(tmp_path / "installed", "-r", "pyproject.toml")
    assert uv("pip", "install", "--python", python, "--no-deps", wheel).returncode == 0
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def command(*words):
        caches = kept | {"FEDSIEVE_CACHE": str(tmp_path / "cache")}
        program = python.with_name("fedsieve")
        return subprocess.run([program, *words], cwd=tmp_path, env=caches, capture_output=True, text=True)

    demo = command("demo", "--quiet")
    assert demo.returncode == 0, demo.stderr
    assert "test accuracy" in demo.stdout and (tmp_path / "runs" / "demo" / "report.html").exists()
    bench = command("bench", "wire", "--smoke")
    assert bench.returncode == 2 and "uv run fedsieve bench NAME" in bench.stderr and "Traceback" not in bench.stderr

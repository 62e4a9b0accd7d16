"""`fedsieve bench` finds the benchmarks of the checkout that it is installed from, wherever it is called."""

import os
import subprocess
import sys

import pytest
from tests.end_to_end.test_command_line import fedsieve

import fedsieve as package


def elsewhere(folder, *words):
    """A command in a folder that is no checkout, in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-m", "fedsieve", "bench", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_benchmark_that_starts_processes_runs_in_any_folder(tmp_path):
    done = elsewhere(tmp_path, "start", "--smoke", "--device", "cpu", "--repeats", "1", "data.val_fraction=0.2")
    assert done.returncode == 0, done.stderr
    assert "first round done" in done.stdout


def test_every_word_of_help_and_every_mistake_is_the_benchmarks_own(tmp_path, capsys):
    (tmp_path / "benchmarks").mkdir()  # not these
    (tmp_path / "benchmarks" / "__init__.py").touch()
    done = elsewhere(tmp_path, "wire", "-h")
    assert done.returncode == 0 and "Usage: fedsieve bench wire [OPTIONS]" in done.stdout
    done = elsewhere(tmp_path)
    assert done.returncode == 0 and "wire        Bytes of messages" in done.stdout
    assert fedsieve("bench", "wrie", "--smoke") == 2
    assert 'Did you mean "wire"?' in capsys.readouterr().err
    assert fedsieve("bench", "wire", "--smok") == 2
    assert "fedsieve bench wire" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--help",), ("wire", "--smoke")])
def test_without_a_checkout_the_command_says_how_to_get_one(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(package, "__file__", str(tmp_path / "lib" / "site-packages" / "fedsieve" / "__init__.py"))
    assert fedsieve("bench", *words) == 2
    assert "`uv run fedsieve bench NAME`" in capsys.readouterr().err

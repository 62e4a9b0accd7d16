"""What tests start ends with them, however they end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.processes import alive

BEGIN = """
import time
from pathlib import Path
from tests.flower.loopback import Processes
with Processes(Path("{}")) as processes:
    processes.bash("sleep 600 & (setsid sleep 600 &)")
    print("begun", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_started_ends_when_its_starter_is_stopped_or_killed(tmp_path, number):
    command = [sys.executable, "-c", BEGIN.format(tmp_path)]
    starter = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[1]
    )
    assert starter.stdout.readline() == b"begun\n"
    mark, end = f"FLWR_HOME={tmp_path / 'home'}", time.monotonic() + 60
    assert len(alive(mark, "sleep")) == 2
    starter.send_signal(number)
    starter.wait()
    while alive(mark):
        assert time.monotonic() < end
        time.sleep(0.1)

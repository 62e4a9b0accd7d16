"""A site's process stays from message to message, and no longer than it should."""

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from fedsieve.errors import FedsieveError
from fedsieve.flower import warm  # needs no Flower

fork = multiprocessing.get_context("fork")


def answer(envelope, place):
    if envelope == b"hang":
        time.sleep(60)
    if envelope == b"die":
        os.kill(os.getpid(), signal.SIGKILL)
    return envelope + str(place["client"]).encode() + b" " + str(os.getpid()).encode()


@pytest.fixture
def sockets():
    """A folder with a short name: pytest's own are too long for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def place(tmp_path, sockets, monkeypatch):
    """A site whose process is a fork of this one, which has torch already."""
    monkeypatch.setattr(warm.tempfile, "gettempdir", lambda: str(sockets))
    monkeypatch.setattr(warm, "BEAT", 0.05)
    begun = []

    def start(command, **_):
        begun.append(fork.Process(target=warm.main, args=(command[3], watched, float(command[5]), answer)))
        begun[-1].start()
        begun[-1].poll = lambda: begun[-1].exitcode
        return begun[-1]

    watched = os.getpid()
    monkeypatch.setattr(warm.subprocess, "Popen", start)
    yield {"client": 3, "folder": str(tmp_path)}
    for process in begun:
        process.kill()
        process.join()


def test_one_process_answers_all_messages(place):
    first, second = (warm.answer_warm(b"question ", place, 20.0) for _ in range(2))
    assert first == second and first.startswith(b"question 3 ") and not first.endswith(str(os.getpid()).encode())


def test_a_message_that_takes_too_long_ends_the_process_and_the_next_begins_another(place):
    before = warm.answer_warm(b"", place, 20.0)
    with pytest.raises(FedsieveError, match="did not answer in 0.3 s"):
        warm.answer_warm(b"hang", place, 0.3)
    assert warm.answer_warm(b"", place, 20.0) != before


def test_a_process_that_dies_is_told_and_replaced(place):
    with pytest.raises(FedsieveError, match="ended while it worked"):
        warm.answer_warm(b"die", place, 20.0)
    assert warm.answer_warm(b"again ", place, 20.0).startswith(b"again 3")


def test_it_ends_when_idle_and_with_what_it_watches(place, sockets):
    process = int(warm.answer_warm(b"", place, 20.0, idle=0.2).split()[1])
    end = time.monotonic() + 20
    while not warm._gone(process):
        assert time.monotonic() < end
        time.sleep(0.05)
    sleeper = fork.Process(target=time.sleep, args=(60,))
    sleeper.start()
    watching = fork.Process(target=warm.main, args=(str(sockets / "socket"), sleeper.pid, 60.0, answer))
    watching.start()
    sleeper.kill()
    watching.join(20)
    assert watching.exitcode == 0
    sleeper.join()


def test_a_folder_that_others_may_open_is_refused(place, sockets):
    warm.address_of("x")
    next(sockets.iterdir()).chmod(0o755)
    with pytest.raises(FedsieveError, match="others than you may open it"):
        warm.answer_warm(b"", place, 1.0)


def test_a_folder_whose_sockets_would_have_too_long_a_name_is_refused(place, monkeypatch, tmp_path):
    (deep := tmp_path / ("long" * 25)).mkdir()
    monkeypatch.setattr(warm.tempfile, "gettempdir", lambda: str(deep))
    with pytest.raises(FedsieveError, match="too long for a socket: set TMPDIR"):
        warm.answer_warm(b"", place, 1.0)


@pytest.mark.parametrize("size", [0, 2**22])
def test_a_process_that_hangs_before_it_takes_a_message_is_ended(place, size):
    process = int(warm.answer_warm(b" ", place, 20.0).split()[1])
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(FedsieveError, match="did not answer in 0.3 s"):
        warm.answer_warm(bytes(size), place, 0.3)
    assert warm.answer_warm(b"again ", place, 20.0).startswith(b"again 3")

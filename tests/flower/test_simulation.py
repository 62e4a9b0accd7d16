"""What keeps a simulation from its end is told in one line, and ends its server too."""

import importlib.metadata
import signal
import threading

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedsieve[flower]'")

import flwr.simulation
from flwr.app import Context, RecordDict
from rich.console import Console

from fedsieve.cli import main
from fedsieve.errors import FedsieveError
from fedsieve.flower.simulation import simulate

ROUNDS = "stages=[{name: all, train: all, rounds: 1, batch_size: 16}]"
STOPPED = KeyboardInterrupt, "stopped. `fedsieve flower .*run` goes on", 130
FAILED = RuntimeError("An error was encountered"), "simulation failed: no room for Ray", 1


@pytest.mark.parametrize(("ending", "words", "code"), [STOPPED, FAILED])
def test_what_ends_the_engine_is_told_in_a_line_and_ends_the_server(tiny, tmp_path, monkeypatch, ending, words, code):
    waits, ended = threading.Event(), []

    class Nobody:
        def get_node_ids(self):
            waits.set()
            return []

    def serve(server):
        with pytest.raises(FedsieveError) as error:
            server(Nobody(), Context(1, 0, {}, RecordDict(), {}))
        ended.append(str(error.value))

    def engine(server, *_, **__):
        nonlocal thread
        thread = threading.Thread(target=serve, args=[server])
        thread.start()
        waits.wait(60)
        raise ending from OSError("no room for Ray")

    thread = None
    monkeypatch.setattr(flwr.simulation, "run_simulation", engine)
    with pytest.raises(FedsieveError, match=words) as error:
        simulate(tiny("federation={clients: 2, cohort: 2}", ROUNDS), tmp_path / "run", Console(quiet=True))
    thread.join(60)
    assert error.value.exit_code == code and ended == ["stopped"]


@pytest.mark.parametrize(("version", "age"), [("1.9.0", "old"), ("1.42.0", "new")])
def test_another_flower_is_refused_with_what_to_install(monkeypatch, capsys, version, age):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    with pytest.raises(SystemExit) as end:
        main(["flower", "experiment.yaml"])
    assert end.value.code == 2
    assert f"flwr {version} is too {age}, 1.41 is needed: `uv run --extra flower" in capsys.readouterr().err


def test_ctrl_c_ends_the_server_and_it_the_engine(tiny, tmp_path, monkeypatch):
    def engine(server, *_, **__):
        signal.raise_signal(signal.SIGINT)
        server(None, Context(1, 0, {}, RecordDict(), {}))

    monkeypatch.setattr(flwr.simulation, "run_simulation", engine)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(FedsieveError, match=STOPPED[1]):
            simulate(tiny("federation={clients: 2, cohort: 2}", ROUNDS), tmp_path / "run", Console(quiet=True))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)

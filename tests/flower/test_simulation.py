"""A simulation that fails or is stopped ends with one line, and its server with it."""

import threading

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedsieve[flower]'")

import flwr.simulation
from flwr.app import Context, RecordDict
from rich.console import Console

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

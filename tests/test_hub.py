"""Whether the hub can be reached: out of reach is only what no connection can be made to."""

import os
import socket
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from fedsieve import hub


@pytest.fixture
def ask(monkeypatch):
    """ask(address) -> whether a hub there can be reached, and whether its libraries were told that it cannot."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "PAUSE", 0.0)
    monkeypatch.setattr(hub, "PATIENCE", 0.2)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)

    def asked(address):
        from huggingface_hub.constants import is_offline_mode

        monkeypatch.setenv("HF_ENDPOINT", address)
        return hub.is_reachable.__wrapped__(), is_offline_mode()

    return asked


def test_a_refusal_is_out_of_reach_and_told_to_the_libraries(ask):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # taken, and listened at by nobody
        began = time.perf_counter()
        assert ask(f"http://127.0.0.1:{free.getsockname()[1]}") == (False, True)
    assert time.perf_counter() - began < 5 and os.environ["HF_HUB_OFFLINE"] == "1"


def test_any_answer_and_any_slowness_is_within_reach(ask):
    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(503)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert ask(f"http://127.0.0.1:{server.server_port}") == (True, False)
        server.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ask(f"http://127.0.0.1:{silent.getsockname()[1]}") == (True, False)


def test_who_says_offline_is_not_asked_again(monkeypatch):
    monkeypatch.setattr(hub, "_connects", lambda: pytest.fail("the network was asked"))
    assert not hub.is_reachable.__wrapped__()

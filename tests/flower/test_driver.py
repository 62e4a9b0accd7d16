"""A site's connection goes to its server and nowhere else."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedsieve[flower]'")

from flwr.proto.fleet_pb2 import ActivateNodeRequest

from fedsieve.errors import FedsieveError
from fedsieve.flower.driver import FleetClient, Retries, RunEnded


def serve(status: int, **headers: str) -> HTTPServer:
    """A server that answers every request like this, and counts them."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.asked += 1
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.asked = 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def activate(server: HTTPServer) -> None:
    retries = Retries("server", lambda _: None)
    retries.max_tries = 2
    address = f"127.0.0.1:{server.server_port}"
    with FleetClient.from_server_address(address, True, None, [], retry_invoker=retries) as client:
        client.ActivateNode(ActivateNodeRequest())


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_server_cannot_send_a_sites_requests_elsewhere(status):
    inner = serve(200)
    outer = serve(status, location=f"http://127.0.0.1:{inner.server_port}/v1/fleet/activate-node")
    with pytest.raises(FedsieveError, match=f"answered {status}"):
        activate(outer)
    assert (outer.asked, inner.asked) == (1, 0)


def test_a_refusal_is_final_and_a_server_that_is_away_is_tried_again():
    for status, tries, error in (
        (403, 1, RunEnded),
        (400, 1, FedsieveError),
        (503, 2, FedsieveError),
        (412, 2, FedsieveError),
    ):
        server = serve(status)
        with pytest.raises(error):
            activate(server)
        assert server.asked == tries, status
    assert Retries.is_final(httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED]"))
    assert not Retries.is_final(httpx.ConnectError("Connection refused"))

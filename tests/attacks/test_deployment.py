"""The attack on a public SuperLink, against the arrangement of docs/flower.md: nginx, a SuperLink, and two sites that train.

The attacker has the address and `ca.crt`. The operator of the server has all of the server. Both fail at the sites.
"""

import ipaddress
import json
import shutil
import socket
import ssl
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.flower.loopback import Processes, free_ports

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedsieve[flower]'")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto import control_pb2, fleet_pb2, runtime_pb2
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.superlink.main import create_app
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsieve.config import parse_config, to_yaml
from fedsieve.flower.project import write_app
from fedsieve.runner.prepare import asset

pytestmark = [
    pytest.mark.slow,  # it starts a server and two sites
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed: apt-get install nginx"),
]
SITES = ("north", "south")
ROUNDS = 400  # more than the attacks take
EXPERIMENT = (
    "federation.clients=2",
    "federation.cohort=2",
    "federation.minimum_replies=2",
    "federation.evaluate_every=1000",
    "federation.partition={kind: iid}",
    "stages=[{name: backbone, train: backbone, sparse: true, rounds: %d, local: {steps: 1}, batch_size: 16}]",
    "tracking=[]",
)
SITES_MAY = {
    f"/v1/fleet/{name}"
    for name in (
        *("activate-node", "deactivate-node", "send-node-heartbeat", "get-run", "get-fab", "pull-messages"),
        *("push-messages", "pull-object", "push-object", "confirm-message-received"),
    )
}
# Every Python process that is started writes down which addresses it looks up or connects to.
WITNESS = """
import os, sys
def note(event, given):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
        address = given[0] if event == "socket.getaddrinfo" else given[1]
        with open(os.environ["WITNESS"], "a") as log:
            log.write(f"{os.getpid()}\\t{event}\\t{address!r}\\t{' '.join(sys.orig_argv)[:300]}\\n".replace("\\n", " ") + "\\n")
sys.addaudithook(note)
"""
EVIL = """
import pathlib
pathlib.Path({mark!r}).joinpath("imported-" + str(__import__("os").getpid())).touch()
from flwr.app import Message, RecordDict, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
server = ServerApp()
client = ClientApp()
@client.query()
def ask(message, context):
    return Message(RecordDict({{"loot": ConfigRecord({{"images": str(context.node_config)}})}}), reply_to=message)
@server.main()
def main(grid, context):
    nodes = list(grid.get_node_ids())
    asked = [Message(RecordDict(), dst_node_id=node, message_type="query", ttl=60) for node in nodes]
    replies = list(grid.send_and_receive(asked, timeout=60))
    said = [[reply.error.code, reply.error.reason] if reply.has_error() else "answered" for reply in replies]
    pathlib.Path({mark!r}).joinpath("replies.json").write_text(__import__("json").dumps(said))
"""


def experiment(*overrides: str, rounds: int = ROUNDS):
    return parse_config(
        asset("demo-federated.yaml"), [word.replace("%d", str(rounds)) for word in EXPERIMENT] + [*overrides]
    )


class Arrangement(Processes):
    """What docs/flower.md describes, with two sites."""

    def __init__(self, folder: Path, short: Path) -> None:
        super().__init__(folder)
        self.port = free_ports(2)
        (folder / "witness").mkdir()
        (folder / "witness" / "sitecustomize.py").write_text(WITNESS)
        self.witness = folder / "witness.log"
        own = {"TMPDIR": str(short), "PYTHONPATH": str(folder / "witness"), "WITNESS": str(self.witness)}
        self.environment |= own
        self.environment.pop("FLWR_DISABLE_UPDATE_CHECK", None)  # fedsieve itself must set them
        self.environment.pop("FLWR_TELEMETRY_ENABLED", None)

    def begin(self) -> None:
        """Start the server and the sites, and have them train."""
        (self.folder / "experiment.yaml").write_text(to_yaml(experiment()))
        self.bash(f"""
            fedsieve deploy init server --address 127.0.0.1:{self.port}
            fedsieve deploy superlink server > superlink.log 2>&1 &
            nginx -p server/proxy -c nginx.conf > proxy.log 2>&1 &
            number=0
            for site in {" ".join(SITES)}; do
              fedsieve node init $site --server 127.0.0.1:{self.port} --ca server/ca.crt --client $number
              fedsieve node accept $site experiment.yaml
              number=$((number + 1))
            done
            fedsieve deploy register server north/key.pub south/key.pub
            for site in {" ".join(SITES)}; do fedsieve node run $site > $site/node.log 2>&1 & done
            fedsieve deploy run server experiment.yaml --out run
        """)
        self.until(lambda: len(self.rounds()) > 1)

    def rounds(self) -> list[dict]:
        """The rounds that the sites have trained so far."""
        file = self.folder / "run" / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def said(self, site: str) -> str:
        return (self.folder / site / "node.log").read_text()

    def flwr(self, words: str) -> str:
        """Run Flower's command line, as the server's operator."""
        return self.bash(f". server/environment; flwr {words}")

    def send(self, request: bytes, inside: bool = False) -> tuple[int, bytes]:
        """The status and the whole answer to these bytes, from the proxy or from the SuperLink behind it."""
        context = ssl.create_default_context(cafile=str(self.folder / "server" / "ca.crt"))
        address = ("127.0.0.1", self.port + inside)
        with (
            socket.create_connection(address, 30) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as end,
        ):
            end.sendall(request)
            answer = b""
            while part := end.recv(65536):
                answer += part
        return (int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0), answer

    def post(
        self, path: str, body: bytes = b"", inside: bool = False, method: str = "POST", extra: str = ""
    ) -> tuple[int, bytes]:
        """Send a request for this path, exactly as it is written."""
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: {PROTOBUF_MEDIA_TYPE}\r\n"
        return self.send(f"{head}{extra}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body, inside)

    def refused(self, path: str, **how) -> bool:
        """Whether the proxy itself refuses a path."""
        status, answer = self.post(path, **how)
        return status in (400, 403, 405) and b"<center>nginx</center>" in answer

    def fleet(self, key: ec.EllipticCurvePrivateKey) -> FleetHttpClient:
        """A client of the Fleet API under some key."""
        ca = str(self.folder / "server" / "ca.crt")
        signs = [NodeAuthHttpInterceptor(key, key.public_key())]
        return FleetHttpClient.from_server_address(f"127.0.0.1:{self.port}", False, ca, signs)


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short,
        Arrangement(tmp_path_factory.mktemp("two"), Path(short)) as arrangement,
    ):
        arrangement.begin()
        yield arrangement


@pytest.fixture(autouse=True)
def training(there):
    """During every attack, both sites train, and no round loses an update."""
    before = len(there.rounds())
    yield
    there.until(lambda: len(there.rounds()) > before or (there.folder / "run" / "summary.json").exists())
    assert all(line["replies"] == 2 and not line["refused"] for line in there.rounds())


@cache
def routes() -> list[str]:
    """All paths that the SuperLink serves."""
    return sorted({*create_app().openapi()["paths"], "/docs", "/openapi.json"})


def test_every_route_but_the_ten_of_sites_is_refused(there):
    found = routes()
    assert sum(path.startswith("/v1/control/") for path in found) >= 41
    assert sum(path.startswith("/v1/runtime/") for path in found) >= 21
    assert set(found) > SITES_MAY
    for path in set(found) - SITES_MAY:
        assert there.refused(path), path
        assert there.refused(path, method="GET"), path
    for path in SITES_MAY:
        assert not there.refused(path), path
        assert there.refused(path, method="GET"), path


def test_the_same_requests_succeed_behind_the_proxy(there):
    """So it is the proxy that refuses them, and not a mistake in them."""
    for path in ("/v1/control/list-runs", "/v1/control/list-nodes", "/health"):
        method = "GET" if path == "/health" else "POST"
        assert there.post(path, inside=True, method=method)[0] == 200, path
        assert there.refused(path, method=method), path


SPELLINGS = [
    "/v1/%63ontrol/list-nodes",
    "/v1/control%2flist-nodes",
    "/%76%31/%63%6f%6e%74%72%6f%6c/list-nodes",
    "/v1/%2563ontrol/list-nodes",
    "//v1/control/list-nodes",
    "/v1//control/list-nodes",
    "/v1/./control/list-nodes",
    "/v1/fleet/../control/list-nodes",
    "/v1/fleet/%2e%2e/control/list-nodes",
    "/v1/fleet/..%2fcontrol/list-nodes",
    "/v1/fleet/get-run/../../control/list-nodes",
    "/v1/fleet/get-run?/../../control/list-nodes",
    "/v1/fleet/get-run?",
    "/v1/fleet/get-run/",
    "/v1/fleet/get-run#",
    "/v1/fleet/get-run%00",
    "/v1/fleet/get-run%0a/v1/control/list-nodes",
    "/v1/fleet/get-run;/control/list-nodes",
    "/v1/Fleet/get-run",
    "/V1/CONTROL/LIST-NODES",
    "/v1/control/list-nodes/",
    "/v1\\control\\list-nodes",
    "/v1/%66leet/get-run",
    "/v1/fleet//get-run",
    "/v1/fleet/register-node",
    "/v1/fleet/unregister-node",
    "https://127.0.0.1/v1/control/list-nodes",
    "http://localhost/v1/%63ontrol/list-nodes",
    "v1/control/list-nodes",
    "*",
    "",
]


@pytest.mark.parametrize("path", SPELLINGS)
def test_no_other_spelling_gets_through(there, path):
    assert there.refused(path)


@st.composite
def spellings(draw) -> str:
    """A path of the SuperLink, with some of its characters encoded, and things put between its parts."""
    path = draw(st.sampled_from(routes()))
    put = st.sampled_from(["/", "//", "/./", "/x/../", "/%2e/", "%2f", "/;/", "/%00"])
    between = "".join(draw(put) + part for part in path.split("/")[1:])
    chosen = draw(st.lists(st.booleans(), min_size=len(between), max_size=len(between)))
    return "".join(f"%{ord(one):02x}" if yes else one for one, yes in zip(between, chosen, strict=True))


@given(path=spellings())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_the_exact_ten_paths_reach_the_superlink(there, path):
    assert there.refused(path) or path in SITES_MAY


def test_headers_and_smuggled_requests_do_not_change_the_path(there):
    inner = "POST /v1/control/list-nodes HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n"
    for extra in ("X-Original-URL: /v1/fleet/get-run\r\n", "X-Rewrite-URL: /v1/fleet/get-run\r\n", "Upgrade: h2c\r\n"):
        assert there.refused("/v1/control/list-nodes", extra=extra), extra
    assert there.refused("/v1/control/list-nodes HTTP/1.1\r\nX: /v1/fleet/get-run")
    both = f"POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n{inner}"
    short = f"POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n{inner}"
    for request in (both, short):
        _, answer = there.send(
            request.encode().replace(b"Host: 127.0.0.1\r\n", b"Host: 127.0.0.1\r\nConnection: close\r\n")
        )
        assert b"200 OK" not in answer


def test_the_largest_bundles_and_arrays_fit_and_no_more(there):
    status, answer = there.post("/v1/fleet/push-object", bytes(12_000_000))
    assert status and b"<center>nginx</center>" not in answer  # the SuperLink itself does not know who sends this
    head = "POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 17000000\r\n\r\n"
    assert there.send(head.encode())[0] == 413


def test_an_attacker_with_flowers_own_tools_gets_nothing(there):
    """List, register, remove, run, read logs: as `flwr` does it, with the address and ca.crt."""
    home, app = there.folder / "attacker", there.folder / "attacker-app"
    (home / "marks").mkdir(parents=True)
    (home / "config.toml").write_text(
        f'[superlink.target]\naddress = "127.0.0.1:{there.port}"\nroot-certificates = "{there.folder}/server/ca.crt"\n'
    )
    _evil(app, home / "marks")
    key = there.folder / "server" / "attacker.pub"
    there.bash(
        f"fedsieve node init outsider --server 127.0.0.1:{there.port} --ca server/ca.crt --client 0; cp outsider/key.pub {key}"
    )
    node = json.loads(there.flwr("supernode list server --format json"))["nodes"][0]["node-id"]
    run = json.loads(there.flwr("ls server --format json"))["runs"][0]["run-id"]
    quiet = "export FLWR_DISABLE_UPDATE_CHECK=1 FLWR_TELEMETRY_ENABLED=0"
    words = (
        *(
            "ls target",
            "supernode list target",
            f"supernode register {key} target",
            f"supernode unregister {node} target",
        ),
        *(f"run {app} target", f"log {run} target --show", f"stop {run} target"),
    )
    for step in words:
        said = there.bash(f"{quiet} FLWR_HOME={home}; if timeout 100 flwr {step} 2>&1; then echo it-worked; fi")
        assert "it-worked" not in said, f"{step}: {said}"
    assert len(json.loads(there.flwr("supernode list server --format json"))["nodes"]) == 2
    assert not list((home / "marks").iterdir())


def test_an_attackers_key_cannot_join_nor_speak_for_a_site(there):
    node = json.loads(there.flwr("supernode list server --format json"))["nodes"][0]["node-id"]
    key = ec.generate_private_key(ec.SECP384R1())
    public = public_key_to_bytes(key.public_key())
    with there.fleet(key) as client:
        for call, request, status in (
            (client.ActivateNode, ActivateNodeRequest(public_key=public, heartbeat_interval=30), 412),
            (client.DeactivateNode, DeactivateNodeRequest(node_id=int(node)), 401),
            (client.PullMessages, PullMessagesRequest(node=Node(node_id=int(node))), 401),
            (client.RegisterNode, fleet_pb2.RegisterNodeFleetRequest(public_key=public), 403),
            (client.UnregisterNode, fleet_pb2.UnregisterNodeFleetRequest(node_id=int(node)), 403),
        ):
            with pytest.raises(Exception) as refusal:
                call(request)
            assert refusal.value.response.status_code == status, request


def test_nobody_outside_takes_a_task_or_reads_a_run(there):
    for path, message in (
        ("/v1/runtime/acquire-task", runtime_pb2.PullTaskInputRequest()),
        ("/v1/runtime/pull-task-input", runtime_pb2.PullTaskInputRequest()),
        ("/v1/control/stream-logs", control_pb2.StreamLogsRequest(run_id=1)),
        ("/v1/control/pull-artifacts", control_pb2.PullArtifactsRequest(run_id=1)),
    ):
        assert there.refused(path, body=message.SerializeToString()), path


def _evil(app: Path, marks: Path, **components: str) -> None:
    """An app with code of its own."""
    app.mkdir()
    (app / "evil.py").write_text(EVIL.format(mark=str(marks)))
    named = {"serverapp": "evil:server", "clientapp": "evil:client"} | components
    (app / "pyproject.toml").write_text(f"""
[project]
name = "fedsieve-experiment"
version = "0.2.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "fedsieve"
[tool.flwr.app.components]
serverapp = "{named["serverapp"]}"
clientapp = "{named["clientapp"]}"
""")


def test_an_operator_who_submits_another_app_runs_nothing_at_a_site(there):
    marks = there.folder / "marks"
    marks.mkdir()
    _evil(there.folder / "evil", marks)
    there.flwr("run evil server")
    replies = there.until(
        lambda: (marks / "replies.json").exists() and json.loads((marks / "replies.json").read_text())
    )
    assert replies == [[7, "bundle"], [7, "bundle"]]
    assert len(list(marks.glob("imported-*"))) == 1  # at the server, where the operator may do so
    assert all("refused (bundle): it has other files" in there.said(site) for site in SITES)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("experiment", "experiment"),
        ("accepted", None),
    ],
)
def test_an_operator_who_overrides_the_run_config_is_refused_unless_the_experiment_is_accepted(there, change, code):
    """The bundle is of the accepted experiment, and the override brings another one; or the other way round."""
    accepted, other = experiment(), experiment("privacy.aggregation=plain", "seed=1", rounds=3)
    bundled, override = (accepted, other) if code else (other, accepted)
    app, config = there.folder / f"app-{change}", there.folder / f"{change}.toml"
    write_app(bundled, app, str(there.folder / f"run-{change}"))
    config.write_text(f"experiment = '''{to_yaml(override)}'''\nwait = 30.0\n")
    before = {site: there.said(site).count("refused (experiment)") for site in SITES}
    there.flwr(f"run {app.name} server --run-config {config.name}")
    out = there.folder / f"run-{change}"
    if code:
        for site in SITES:
            there.until(lambda site=site: there.said(site).count("refused (experiment)") > before[site])
            assert len(list((there.folder / site / "waiting").glob("*.yaml"))) == 1
        assert not (out / "metrics.jsonl").exists()
    else:
        there.until(lambda: (out / "metrics.jsonl").exists())


def test_no_process_connects_to_anything_but_this_machine(there):
    there.bash(
        f"{sys.executable} -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect((\"192.0.2.1\", 9))' || true"
    )
    lines = [line.split("\t") for line in there.witness.read_text().splitlines()]
    outside = [line for line in lines if not _is_here(line[2])]
    assert [line[2] for line in outside] == ["('192.0.2.1', 9)"], outside  # the witness sees what leaves
    for program in ("flower-superexec", "serverapp", "fedsieve node run", "flwr run", "fedsieve deploy"):
        assert any(program in line[3] for line in lines), program


def _is_here(address: str) -> bool:
    """Whether an address that a process asked for is on this machine."""
    found = eval(address)
    host = found[0] if isinstance(found, tuple) else found
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if (
        host is None or host == "localhost" or host.startswith(("/", "\0"))
    ):  # a name of this machine, or a socket of Unix
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

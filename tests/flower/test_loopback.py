"""Real processes on this machine: a SuperLink behind nginx, three registered sites, and what may go wrong with them.

They are started once, by the commands of docs/flower.md, and serve all tests of this file in turn.
"""

import json
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.flower.loopback import Processes, free_ports, other_authority
from tests.processes import kill

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedsieve[flower]'")
pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedsieve[flower]'")

from rich.console import Console

from fedsieve.config import parse_config
from fedsieve.flower import DEADLINE, warm
from fedsieve.flower.admission import Accepted
from fedsieve.flower.project import write_app
from fedsieve.flower.simulation import simulate
from fedsieve.flower.site import Policy
from fedsieve.model.weights import FINAL
from fedsieve.runner.checkpoint import list_checkpoints
from fedsieve.runner.prepare import asset
from fedsieve.runner.run import run
from fedsieve.wire.ledger import lines

pytestmark = [
    pytest.mark.slow,  # it waits for deadlines, and for Flower to notice that a node is gone
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed: apt-get install nginx"),
]
DEMO = (
    "federation.clients=3",
    "federation.cohort=3",
    "federation.evaluate_every=1",
    "federation.partition={kind: iid}",
    "stages.backbone.rounds=2",
    "stages.backbone.warmup_rounds=0",
    "executor=sequential",
    "tracking=[]",
)
SITES = ("north", "south", "west")
ONE_STAGE = "stages=[{name: backbone, train: backbone, sparse: true, rounds: 1, local: {steps: 2}, batch_size: 16}]"


def commands() -> list[str]:
    """The commands of the walk-through."""
    text = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    return re.findall(r"```bash\n(.*?)```", text[text.index("## Three sites, step by step") :], re.DOTALL)


class Federation(Processes):
    """The walk-through up to the run."""

    def __init__(self, folder: Path, short: Path) -> None:
        super().__init__(folder)
        self.short = short
        self.environment["TMPDIR"] = str(short)  # where the sockets of sites, and Ray's, are
        self.port, self.left = free_ports(2), commands()

    def go_through(self, until: str) -> None:
        """Run the commands of the walk-through up to those with some words in them."""
        while self.left and until not in self.left[0]:
            self.bash(self.here(self.left.pop(0)))

    def here(self, text: str) -> str:
        return text.replace("9092", str(self.port))

    def flwr(self, words: str) -> str:
        """Run Flower's command line, as the server's operator."""
        return self.bash(f". server/environment; flwr {words}")

    def start_run(self, experiment, name: str, deadline: float = DEADLINE) -> Path:
        """Run an experiment on the SuperLink, with all sites; gives the folder that its files will be in."""
        self.gather()
        for site in SITES:
            Accepted(self.folder / site, Policy()).add(experiment)
        folder = self.folder / name
        write_app(experiment, self.folder / f"app-{name}", str(folder), deadline)
        self.flwr(f"run app-{name} server")
        return folder

    def end(self, folder: Path) -> Path:
        self.until(lambda: (folder / "summary.json").exists())
        return folder

    def node(self, site: str) -> list[int]:
        """The process of a site, without the one that trains."""
        return self.alive(f"node run {site}")

    def gather(self) -> None:
        """Start the sites that are not there. They wait until the SuperLink has noticed that the last one is gone."""
        (command,) = (text for text in commands() if "node run" in text)
        for site in SITES:
            if not self.node(site):
                self.bash(command.replace(" ".join(SITES), site))
        for site in SITES:
            self.until(lambda site=site: "connected" in (self.folder / site / "node.log").read_text())

    def answered(self, site: str, what: str, round: int) -> None:
        """Wait until a site has sent something in the newest run, and the server has it."""
        self.until(lambda: self.sent(site, what, round))
        log = self.folder / site / "node.log"
        self.until(lambda: log.stat().st_mtime >= self.log(site).stat().st_mtime)

    def nodes(self) -> list[dict]:
        """The SuperNodes as the SuperLink knows them."""
        return json.loads(self.flwr("supernode list server --format json"))["nodes"]

    def socket(self, site: str) -> str:
        """Where the own process of a site listens."""
        name = Path(warm.address_of(str(self.folder / site / "files"))).name
        return str(self.short / f"fedsieve-{os.getuid()}" / name)

    def log(self, site: str) -> Path:
        """The log of what has left a site in the newest run."""
        return max((self.folder / site / "files").glob("*/sent.jsonl"), key=lambda file: file.stat().st_mtime)

    def sent(self, site: str, what: str, round: int) -> bool:
        """Whether something has left a site in the newest run."""
        rows = [json.loads(line) for line in self.log(site).read_text().splitlines()]
        return any((row["what"], row["round"]) == (what, round) for row in rows)

    def own_process(self, site: str) -> int:
        (found,) = self.until(lambda: self.alive("fedsieve.flower.warm", self.socket(site)))
        return found


@contextmanager
def impostor(address: str):
    """Something that answers in the place of a site's own process, with bytes that mean nothing."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with Connection(connection.detach()) as client:
                client.recv_bytes()
                client.recv_bytes()
                client.send_bytes(warm.TAKEN)
                client.send_bytes(os.urandom(300))

    listener = socket.socket(socket.AF_UNIX)
    Path(address).unlink(missing_ok=True)
    listener.bind(address)
    listener.listen()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        Path(address).unlink()


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short,
        Federation(tmp_path_factory.mktemp("three"), Path(short)) as federation,
    ):
        federation.go_through("deploy run")
        yield federation


@pytest.fixture(scope="module")
def demo():
    def make(*overrides):
        return parse_config(asset("demo-federated.yaml"), (*DEMO, *overrides))

    return make


@pytest.fixture(scope="module")
def there(three, demo):
    """The demo, over the SuperLink."""
    return three.end(three.start_run(demo(), "demo"))


def assert_same(one: Path, two: Path) -> None:
    ours, theirs = load_file(one / FINAL), load_file(two / FINAL)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def records(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def deadline(folder: Path) -> float:
    """Time enough for sites that live, also for one whose process has to begin again: a test waits so long for those that do not."""
    return 60 + 4 * max(record["seconds"] for record in records(folder))


def messages(folder: Path) -> list:
    """The ledger, but for what sites elsewhere send in addition."""
    return sorted(line for line in lines(folder / "ledger.csv") if line.what not in ("envelope", "effort"))


def test_the_walk_through_ends_in_a_report_that_the_rehearsal_has_foretold(three):
    three.go_through("never")
    server = three.folder / "server" / "run"
    assert (server / "report.html").exists()
    assert_same(three.folder / "rehearsal", server)
    for site in SITES:
        (log,) = (three.folder / site / "files").glob("*/sent.jsonl")
        sent = [json.loads(line) for line in log.read_text().splitlines()]
        assert {"images", "update", "effort", "metrics", "test", "envelope"} == {row["what"] for row in sent}
        assert all(row["mask"] and row["bytes"] for row in sent if row["what"] == "update")


def test_in_process_in_simulation_and_over_a_superlink_the_demo_gives_the_same(there, demo, tmp_path):
    run(demo(), tmp_path / "here", page=False)
    simulate(demo(), tmp_path / "simulated", Console(quiet=True), processes=1)
    for folder in (tmp_path / "simulated", there):
        assert_same(tmp_path / "here", folder)
        assert messages(tmp_path / "here") == messages(folder)
        for mine, theirs in zip(records(tmp_path / "here"), records(folder), strict=True):
            same = ("train_loss", "val_accuracy", "drift", "replies", "refused")
            assert {key: mine.get(key) for key in same if mine["stage"] != "head"} == {
                key: theirs.get(key) for key in same if theirs["stage"] != "head"
            }


def test_processes_that_die_hang_or_send_garbage_cost_their_own_updates_only(three, demo, there):
    """A site killed and one that hangs in one round, garbage in the next, the ServerApp killed in the one after."""
    experiment = demo("federation.minimum_replies=1", ONE_STAGE, "stages.backbone.rounds=4")
    folder = three.start_run(experiment, "faults", deadline(there))

    def after(number: int) -> None:
        three.until(lambda: len(records(folder)) >= number)

    after(1)
    os.kill(three.own_process("north"), signal.SIGSTOP)
    lost = three.own_process("south")
    kill(three.node("south"))
    three.answered("west", "update", 2)  # the server waits for the other two
    with impostor(three.socket("west")):
        kill(three.alive("fedsieve.flower.warm", three.socket("west")))
        after(3)
        assert not Path(f"/proc/{lost}").exists()  # it ended with the site
        # A round is told before it is saved; killed in between, it would be done again, without garbage.
        three.until(lambda: list_checkpoints(folder / "checkpoints")[-1].stem >= f"{3:010d}")
        kill(three.alive("flwr-serverapp"))
    three.gather()
    three.flwr("run app-faults server")
    three.end(folder)
    lost = {(line.client, line.round): line.status for line in lines(folder / "ledger.csv") if line.status != "ok"}
    assert lost.pop((2, 3)) == "magic"
    assert lost.keys() == {(0, 2), (1, 2), (1, 3)}
    assert set(lost.values()) <= {"late", "unavailable", "crash"}  # as Flower found it out
    assert [record["round"] for record in records(folder)] == [1, 2, 3, 4]


def test_a_secure_sum_survives_a_site_that_dies_after_it_sent_its_padded_values(three, demo, there, tmp_path):
    """The others reveal what is needed to take its pads off, and the weights are those of a run in which nobody died."""
    experiment = demo("privacy={aggregation: secagg}", "message.up=fp32", ONE_STAGE)
    folder = three.start_run(experiment, "secure", deadline(there))

    three.answered("west", "update.pad", 1)
    os.kill(three.own_process("west"), signal.SIGSTOP)  # so that it cannot take the next question
    three.until(lambda: three.sent("north", "update.reveal", 1))
    kill(three.node("west"))
    three.end(folder)
    run(experiment, tmp_path / "here", page=False)
    assert_same(tmp_path / "here", folder)
    (record,) = records(folder)
    assert record["replies"] == 3 and record["refused"] == {}
    lost = [line for line in lines(folder / "ledger.csv") if line.status != "ok"]
    assert [(line.client, line.what) for line in lost] == [(2, "update.reveal")]


def test_who_has_no_registered_key_or_another_authority_is_refused(three):
    place = f"--server 127.0.0.1:{three.port} --client 0"
    other_authority(three.folder / "other.crt")
    three.bash(
        f"fedsieve node init stranger {place} --ca server/ca.crt; fedsieve node init wary {place} --ca other.crt"
    )
    three.bash("for site in stranger wary; do fedsieve node run $site > $site/node.log 2>&1 & done")
    for site, reason in {"stranger": "does not take this site", "wary": "certificate verify failed"}.items():
        three.until(lambda site=site, reason=reason: reason in (three.folder / site / "node.log").read_text())
    assert len(three.nodes()) == 3
    kill(three.alive("node run stranger"))
    three.until(lambda: not three.alive("node run wary"))  # trying again would not help


def test_no_process_of_the_walk_through_calls_home(three):
    """Given by fedsieve to Flower's programs, and to all that they start."""
    started = three.alive("python")
    assert len(started) > 4
    for process in started:
        environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        assert {b"FLWR_DISABLE_UPDATE_CHECK=1", b"FLWR_TELEMETRY_ENABLED=0"} <= {*environment}

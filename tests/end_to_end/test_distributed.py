"""Runs on several real processes: equal to one process, and a rank that is lost ends them all with one line and a way on.

The processes are started as torchrun starts them, but for its seconds of start-up; the benchmark `distributed`, in
miniature, starts torchrun itself.
"""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from fedsieve.cli import main
from fedsieve.config import parse_config, to_yaml
from fedsieve.errors import FedsieveError
from fedsieve.federation import team
from fedsieve.federation.executors import Sequential
from fedsieve.runner import run as running
from fedsieve.runner.checkpoint import list_checkpoints
from fedsieve.runner.run import resume, run

CONFIG = """
name: ranks
seed: 2
device: cpu
threads: 1
data: {source: digits, size: 8, normalize: half, val_fraction: 0.2}
model:
  backbone: vit_tiny_patch16_224
  options: {patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}
  weights: none
federation: {clients: 8, cohort: 5, partition: {kind: dirichlet, alpha: 0.5}}
stages:
  - {name: all, train: all, rounds: 5, local: {epochs: 1}, batch_size: 32, optimizer: {lr: 0.1, weight_decay: 1e-3}}
tracking: []
checkpoint: {every_seconds: 0}
"""
TIMES = {"seconds", "images_per_second", "calibration_seconds"}
MASK = "mask={rule: least_sensitive, sparsity: 0.8, calibration_rounds: 2, fisher: {samples: 24}}"

# A server that has imported everything and run nothing: children start in milliseconds and inherit no threads.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["fedsieve.runner.run", "timm", "datasets", "matplotlib", "sklearn.datasets"])


def work(environment, said, arguments, change):
    """What a process of torchrun's does."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    for number in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    running._write_page = no_page
    if change is not None:
        change(int(environment["RANK"]))
    main(arguments)


def no_page(folder):
    """Pages take longer than these runs, and are made as ever."""


class Launch:
    """Processes as torchrun starts them, without its seconds of start-up; none is left when the block ends."""

    def __init__(self, folder, ranks, arguments, change=None):
        self.said = [folder / f"said-{time.monotonic_ns()}-{rank}" for rank in range(ranks)]
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300)
        )
        names = {
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "GLOO_SOCKET_IFNAME": "lo"}
        names |= {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "FEDSIEVE_CACHE": os.environ["FEDSIEVE_CACHE"],
        }
        self.processes = [
            processes.Process(
                target=work,
                args=(names | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, said, arguments, change),
            )
            for rank, said in enumerate(self.said)
        ]

    def __enter__(self):
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()

    def finish(self, seconds=300):
        """The exit codes of all."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def words(self, rank):
        return self.said[rank].read_text() if self.said[rank].exists() else ""

    def kill(self, rank, number):
        os.kill(self.processes[rank].pid, number)


def outcome(folder):
    """Everything that must be the same: weights, metrics and summary without times, and every byte that was sent."""

    def timeless(value):
        if isinstance(value, dict):
            return {key: timeless(item) for key, item in value.items() if key not in TIMES}
        return value

    metrics = [timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = timeless(json.loads((folder / "summary.json").read_text()))
    weights = safetensors.torch.load_file(folder / "checkpoints" / "final.safetensors")
    return (
        metrics,
        summary,
        {name: tensor.tolist() for name, tensor in weights.items()},
        (folder / "ledger.csv").read_text(),
    )


def alone(folder, *overrides):
    run(parse_config(CONFIG, ["executor=sequential", *overrides]), folder, page=False)
    return outcome(folder)


def config_file(folder, *overrides):
    file = folder / "config.yaml"
    file.write_text(to_yaml(parse_config(CONFIG, ["executor=distributed", *overrides])))
    return str(file)


def narrow(rank):
    """Let no answer wait for its turn that need not."""
    team.AHEAD = 1


MASKED = (MASK, "stages.all.sparse=true")
CASES = {
    "a mask that is made anew, a head on features, personal models": (
        2,
        None,
        [MASK, "stages.all.mask={refresh: 2}", "stages.all.train=head", "message={up: int8, down: fp16}",
         "federation.personal={methods: [local, mask, norms]}"],
    ),
    "scaffold, more ranks than clients": (3, None, ["federation.cohort=2", "federation.correction.kind=scaffold"]),
    "client masks, answers that wait": (
        2,
        narrow,
        [MASK, "stages.all.mask={scope: client}", "federation.cohort=8", "message={up: int8, error_feedback: true}"],
    ),
    "blends, uneven devices, crashes": (
        2,
        None,
        [*MASKED, "federation.blend=true", "federation.failures={crash: 0.3}",
         "federation.devices=[{share: 0.5, density: 0.5}, {share: 0.5, work: 0.5}]"],
    ),
    "secure sums, a head in closed form": (
        2,
        None,
        [*MASKED, "privacy={aggregation: secagg}", "federation.failures={crash: 0.1}", "federation.cohort=6",
         "stages=[{name: head, train: head, method: ridge}, {name: all, train: backbone, sparse: true, rounds: 2, "
         "local: {steps: 2}, batch_size: 16, optimizer: {lr: 0.1}}]"],
    ),
    "flipped labels, a robust rule, a teacher": (
        2,
        None,
        ["federation.attack={kind: label_flip, fraction: 0.3}", "federation.aggregator={kind: multi_krum, f: 1}",
         "federation.correction.kind=fedntd"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_several_processes_give_what_one_gives_to_the_bit(tmp_path, case):
    ranks, change, overrides = CASES[case]
    arguments = ["run", config_file(tmp_path, *overrides), "--out", str(tmp_path / "run"), "--quiet"]
    with Launch(tmp_path, ranks, arguments, change) as launch:
        assert launch.finish() == [0] * ranks, launch.words(0)
    assert [launch.words(rank) for rank in range(1, ranks)] == [""] * (ranks - 1)
    assert outcome(tmp_path / "run") == alone(tmp_path / "alone", *overrides)


def test_ranks_that_stack_their_clients_give_nearly_the_same(tmp_path):
    """What is stacked with what decides the last digits. The mask changes, so stacks take over weights outside it."""
    overrides = [MASK, "stages.all.mask={refresh: 2}", "federation.cohort=8"]
    with launched(tmp_path, None, *overrides, "clients_at_once=2") as launch:
        assert launch.finish() == [0, 0], launch.words(0)
    found, expected = outcome(tmp_path / "run")[2], alone(tmp_path / "alone", *overrides)[2]
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return alone(tmp_path_factory.mktemp("reference") / "run")


def launched(tmp_path, change, *overrides):
    arguments = ["run", config_file(tmp_path, *overrides), "--out", str(tmp_path / "run"), "--quiet"]
    return Launch(tmp_path, 2, arguments, change)


def in_the_third_round(act, rank=1):
    """Do something once while clients train: rank 0 trains its own one by one, the others are asked for some at a time."""
    calls, train = iter(range(1000)), Sequential.train

    def acting(*arguments):
        if next(calls) == (6 if rank == 0 else 2):
            act()
        return train(*arguments)

    Sequential.train = acting


def killed(rank):
    if rank == 1:
        in_the_third_round(lambda: os.kill(os.getpid(), signal.SIGKILL))
    end = team.Team.end

    def asked_to_stop(self):  # by torchrun, as soon as it sees that a process ended
        os.kill(os.getpid(), signal.SIGTERM)
        end(self)

    team.Team.end = asked_to_stop


def test_a_killed_rank_ends_the_run_with_one_line_and_it_goes_on(tmp_path, undisturbed):
    with launched(tmp_path, killed) as launch:
        assert launch.finish() == [1, -signal.SIGKILL]
    words, folder = launch.words(0), tmp_path / "run"
    assert words.count("\n") == 1
    assert "rank 1 is gone: its process ended or was killed. The last checkpoint, " in words
    assert f"`torchrun --nproc-per-node 2 -m fedsieve resume {folder}` goes on" in words
    assert list_checkpoints(folder / "checkpoints")[-1].stem == "0000000002"
    with Launch(tmp_path, 3, ["resume", str(folder), "--quiet"]) as launch:  # one more than before
        assert launch.finish() == [0, 0, 0], launch.words(0)
    assert outcome(folder) == undisturbed


def headless(rank):
    if rank == 0:
        in_the_third_round(lambda: os.kill(os.getpid(), signal.SIGKILL), rank)


def test_other_ranks_end_when_rank_0_is_killed(tmp_path, undisturbed):
    with launched(tmp_path, headless) as launch:
        assert launch.finish() == [-signal.SIGKILL, 1]
    assert launch.words(1) == ""
    resume(tmp_path / "run", page=False)  # without torchrun, as one process
    assert outcome(tmp_path / "run") == undisturbed


def failing(rank):
    def fail():
        raise ValueError("something odd\nand more of it")

    if rank == 1:
        in_the_third_round(fail)


def test_a_rank_that_fails_says_why_through_rank_0(tmp_path):
    with launched(tmp_path, failing) as launch:
        assert launch.finish() == [1, 1]
    assert launch.words(0).count("\n") == 1
    assert "rank 1 failed: ValueError: something odd. The last checkpoint, " in launch.words(0)
    assert "Traceback" in launch.words(1)  # a fault of the program's: whoever mends it needs it


def hanging(rank):
    team.SILENCE, team.BEAT = 3.0, 0.5
    if rank == 1:
        in_the_third_round(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def test_a_rank_that_hangs_is_given_up_after_a_while(tmp_path):
    with launched(tmp_path, hanging) as launch:
        launch.processes[0].join(300)
        assert launch.processes[0].exitcode == 1
    assert "rank 1 has not been heard of for 3 s. The last checkpoint, " in launch.words(0)


def interrupted(rank):
    in_the_third_round(lambda: os.kill(os.getpid(), signal.SIGINT), rank)


def terminated(rank):
    in_the_third_round(lambda: os.kill(os.getpid(), signal.SIGTERM), rank)


@pytest.mark.parametrize(("change", "code"), [(interrupted, 130), (terminated, 143)])
def test_a_polite_stop_of_all_ranks_ends_the_round_and_saves(tmp_path, change, code):
    with launched(tmp_path, change, "checkpoint.every_seconds=3600") as launch:
        assert launch.finish() == [code, 0]
    assert 'stopped in stage "all"; nothing is lost' in launch.words(0)
    assert launch.words(1) == ""
    assert list_checkpoints(tmp_path / "run" / "checkpoints")


def other_data(rank):
    if rank == 1:
        import fedsieve.runner.ranks as ranks

        prepare = ranks.prepare

        def changed(*arguments):
            return replace(prepare(*arguments), data_fingerprint="other")

        ranks.prepare = changed


def test_a_rank_with_other_data_cannot_take_part(tmp_path):
    with launched(tmp_path, other_data) as launch:
        assert launch.finish() == [1, 1]
    assert "rank 1 cannot take part: data.source: its content is not that of rank 0" in launch.words(0)
    assert launch.words(1) == ""


def test_a_wrong_request_is_told_once(tmp_path):
    arguments = ["run", config_file(tmp_path), "stages.all.rounds=none"]
    with Launch(tmp_path, 2, arguments) as launch:
        assert launch.finish() == [2, 2]
    assert "stages.all.rounds" in launch.words(0)
    assert launch.words(1) == ""


def test_executor_and_command_must_go_with_how_the_process_was_started(tmp_path, monkeypatch, capsys):
    with pytest.raises(FedsieveError, match="torchrun --nproc-per-node 2 -m fedsieve run CONFIG.yaml"):
        run(parse_config(CONFIG, ["executor=distributed"]), tmp_path / "run")
    names = {"TORCHELASTIC_RUN_ID": "test", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        FedsieveError, match="auto runs in one process, but torchrun started 2. Say executor=distributed"
    ):
        run(parse_config(CONFIG), tmp_path / "run")
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])
    assert "only run, resume and demo share their work" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(FedsieveError, match="2 ranks need a GPU each, and this machine has 1"):
        run(parse_config(CONFIG, ["executor=distributed", "device=cuda"]), tmp_path / "run")
    with pytest.raises(FedsieveError, match="cuda:0 is one GPU"):
        run(parse_config(CONFIG, ["executor=distributed", "device=cuda:0"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()

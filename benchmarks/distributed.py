"""A cohort of many small clients on two processes against one."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import safetensors.torch
import torch

from benchmarks.result import Result
from fedsieve.config import Experiment, parse_config, to_yaml
from fedsieve.errors import FedsieveError
from fedsieve.model.weights import FINAL
from fedsieve.runner.prepare import asset
from fedsieve.runner.run import run


def distributed(device: torch.device, smoke: bool) -> Result:
    """The federated demo with 1,000 clients, all of them in every round: one process of one thread, and two of one each."""
    result = Result(
        ("processes", "clients", "seconds a round", "clients/s", "times one process", "cores had"),
        note="On the CPU. Whole rounds but the first; both end with the same weights. Cores had: seconds of processor time in a "
        "second of the whole run; well below the number of processes, others wanted the cores too.",
        limit="two cores: twice one process, and only where both are free (aim: 1.7 times)",
    )
    clients, rounds, repeats = (12, 2, 1) if smoke else (1000, 3, 2)
    overrides = [
        f"federation.clients={clients}",
        "federation.partition={kind: iid}",  # the demo's 1,437 images are one or two for each
        "federation.cohort=1.0",
        f"stages.backbone.rounds={rounds}",
        "stages.backbone.warmup_rounds=0",
        "tracking=[]",
        "device=cpu",
    ]
    overrides += ["model.weights=none"] if smoke else []
    seconds: dict[int, list[float]] = {1: [], 2: []}
    cores: dict[int, list[float]] = {1: [], 2: []}
    weights = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats):
            for processes in seconds:  # in turns
                executor = "sequential" if processes == 1 else "distributed"
                experiment = parse_config(asset("demo-federated.yaml"), [*overrides, f"executor={executor}"])
                out = Path(folder) / f"{processes}-{repeat}"
                before, clock = sum(os.times()[:4]), time.perf_counter()
                seconds[processes] += _rounds(experiment, processes, out)
                cores[processes].append((sum(os.times()[:4]) - before) / (time.perf_counter() - clock))
                weights.append(safetensors.torch.load_file(out / FINAL))
    if not all(torch.equal(found[name], weights[0][name]) for found in weights for name in found):
        raise FedsieveError("bench: two processes did not end with the weights of one", 1)
    reference = statistics.median(seconds[1])
    for processes, taken in seconds.items():
        median = statistics.median(taken)
        had = statistics.median(cores[processes])
        result.rows.append((processes, clients, median, clients / median, reference / median, had))
    return result


def _rounds(experiment: Experiment, processes: int, folder: Path) -> list[float]:
    """Seconds of every round of the last stage but its first."""
    if processes == 1:
        threads = torch.get_num_threads()
        run(experiment, folder, page=False)
        torch.set_num_threads(threads)
    else:
        file = folder.with_suffix(".yaml")
        file.write_text(to_yaml(experiment))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*torchrun, "-m", "fedsieve", "run", str(file), "--out", str(folder), "--quiet"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise FedsieveError(f"bench: torchrun failed: {done.stderr.strip()[:500]}", 1)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["seconds"] for record in records if record["stage"] == experiment.stages[-1].name][1:]

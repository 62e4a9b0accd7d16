"""How long a run takes from its command to the end of its first round, phase by phase, in processes of its own.

`python -m benchmarks.start CONFIG.yaml SPAWNED` is such a process: it starts the experiment as `fedsieve run` does, and
prints seconds by phase. SPAWNED is the time at which it was asked for.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from benchmarks import python_path
from benchmarks.options import REPEATS, option, overrides

if TYPE_CHECKING:
    import torch

    from benchmarks.result import Result
    from fedsieve.config import Experiment

# Imports are measured: what is heavy is imported inside functions.
PHASES = {
    "import": "interpreter and packages",
    "checks": "config, device and network checked",
    "data": "images read or decoded, moved to the device",
    "model": "network built, weights loaded",
    "clients": "clients dealt, ledger opened",
    "calibration": "mask",
    "step": "training step compiled, recorded, run once",
    "rest": "the rest of the first round",
}
CONFIG = "A federated experiment. Default: on embedded data."
DEFAULT = """
name: start
data: {{source: digits, size: {size}, transform: flip, normalize: half}}
model: {{backbone: {backbone}, weights: none, options: {options}}}
mask: {{rule: high_magnitude, sparsity: 0.9}}
federation: {{clients: 20, cohort: 10, evaluate_every: 1000}}
message: {{up: int8, down: fp16}}
compile: {compile}
stages: [{{name: bench, train: backbone, sparse: true, rounds: 1000, batch_size: 64, local: {{steps: 1}}}}]
"""


def start(
    device: "torch.device",
    smoke: bool,
    config: Annotated[Path | None, option(Path, CONFIG, metavar="CONFIG.yaml")] = None,
    overrides: Annotated[Sequence[str], overrides("Fields of the experiment.", {"device": "--device"})] = (),
    repeats: Annotated[int, REPEATS] = 3,
) -> "Result":
    """Once with empty caches of decoded data and compiled code, then with what that left in them."""
    from benchmarks.result import Result
    from fedsieve.config import load_config, parse_config, to_yaml
    from fedsieve.errors import FedsieveError

    if config is None:
        values: dict[str, Any] = {"size": 224, "backbone": "vit_small_patch16_224", "options": "{}", "compile": "full"}
        if smoke:
            options = "{patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}"
            values = {"size": 16, "backbone": "vit_tiny_patch16_224", "options": options, "compile": "eager"}
        elif device.type == "cpu":  # as runs are there by default
            values |= {"size": 64, "backbone": "vit_tiny_patch16_224", "compile": "auto"}
        experiment = parse_config(DEFAULT.format(**values), overrides)
    else:
        experiment = load_config(config, overrides)
    if experiment.federation is None or all(stage.method == "ridge" for stage in experiment.stages):
        raise FedsieveError(
            f"bench start: {config} has no federated rounds to time: it needs a federation and a stage of rounds"
        )
    experiment = experiment.model_copy(update={"device": str(device)})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(to_yaml(experiment))
        cold = _spawn(folder)
        warm = [_spawn(folder) for _ in range(1 if smoke else repeats)]
    result = Result(
        ("phase", "cold, s", "warm, s", "warm / cold"),
        note=f"{experiment.model.backbone} at {experiment.data.size} px, compile: {experiment.compile}. Cold: nothing decoded or "
        f"compiled yet (files may still be in memory); warm: median of later processes ({len(warm)}). A later round is there to "
        "compare with, and is not part of the sum.",
        limit="aim: 20 s warm, from the command to the end of the first round",
    )
    middle = {key: statistics.median(run[key] for run in warm) for key in cold}
    sums = {"first round done": [sum(run[key] for key in PHASES) for run in (cold, middle)]}
    phases = {text: [cold[key], middle[key]] for key, text in PHASES.items()}
    for text, (before, after) in (phases | sums | {"a later round": [cold["round"], middle["round"]]}).items():
        result.rows.append((text, before, after, after / before if before else None))
    return result


def _spawn(folder: Path) -> dict[str, float]:
    """The phases of one process, which keeps its caches in `folder`."""
    from fedsieve.errors import FedsieveError

    caches = {"FEDSIEVE_CACHE": str(folder / "data"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "code")}
    caches |= {"TRITON_CACHE_DIR": str(folder / "code" / "triton"), "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "benchmarks.start", str(folder / "config.yaml"), repr(time.time())]
    done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
    if done.returncode:
        raise FedsieveError(f"bench start: {(done.stderr.strip() or 'no message').splitlines()[-1]}", 1)
    return json.loads(done.stdout.splitlines()[-1])


def _child(config: str, spawned: float) -> dict[str, float]:
    """Start an experiment up to the end of its second round; seconds by phase."""
    from fedsieve.runner.federated import make_context
    from fedsieve.runner.model_files import read_experiment
    from fedsieve.runner.preflight import preflight
    from fedsieve.runner.prepare import prepare
    from fedsieve.runner.run_cache import RunCache
    from fedsieve.runner.stages import FederatedStage, Venue

    took = {"import": time.time() - spawned}
    from benchmarks.result import synchronize
    from fedsieve.federation.executors import Stacked
    from fedsieve.federation.local import LocalClients
    from fedsieve.runner.progress import Display

    class Timed(RunCache):
        """Notes how long a network takes to build."""

        seconds = 0.0

        def classifier(self, *arguments: Any) -> Any:
            began = time.perf_counter()
            model = super().classifier(*arguments)
            self.seconds = time.perf_counter() - began
            return model

    experiment: Experiment = read_experiment(Path(config).parent)
    clock = time.perf_counter()

    def lap() -> float:
        nonlocal clock
        synchronize(device)
        before, clock = clock, time.perf_counter()
        return clock - before

    device = preflight(experiment)
    took["checks"] = lap()
    cache = Timed(keep=False)
    setup = prepare(experiment, Display.silent(), cache)
    took |= {"model": cache.seconds, "data": lap() - cache.seconds}
    initial = {name: tensor.cpu().clone() for name, tensor in setup.model.state_dict().items()}
    folder = Path(config).parent / f"run-{os.getpid()}"
    context = make_context(setup, initial, folder, "", {})
    stage = FederatedStage(setup, Venue(folder, context), next(s for s in experiment.stages if s.method != "ridge"))
    ticks = stage.ticks()
    took["clients"] = lap()
    next(ticks)
    first = lap()
    next(ticks)
    took["round"] = lap()
    assert isinstance(stage.rounds.clients, LocalClients)
    executor = stage.rounds.clients.training.executor()
    took["calibration"] = stage.state.masks.seconds
    took["step"] = (executor.gradient.seconds or 0.0) if isinstance(executor, Stacked) else 0.0
    took["rest"] = first - took["calibration"] - took["step"]
    return took


if __name__ == "__main__":
    print(json.dumps(_child(sys.argv[1], float(sys.argv[2]))))

"""Compares two versions of fedsieve: are weights, metrics and bytes the same, and are rounds as fast?

uv run python -m benchmarks.versions OTHER_CHECKOUT [--speed]

Runs both demos and every shipped config with each version, on a CPU. Configs for CIFAR-100 run on the embedded digits with a small
network and few rounds. With --speed, runs of both versions take turns, and the seconds of their rounds are compared. The other
checkout needs its environment (`uv sync` there).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parents[1]
SMALL = [
    "data.source=digits",
    "data.size=16",
    "model.backbone=vit_tiny_patch16_224",
    "model.options={patch_size: 4, embed_dim: 32, depth: 2, num_heads: 2}",
    "model.weights=none",
    "device=cpu",
    "threads=1",
]
CLIENTS = ["federation.clients=20", "federation.cohort=4"]
SHORT = {  # by config: what makes it short
    "cifar100-dino-drift": [*SMALL, *CLIENTS, "stages.head.rounds=3", "stages.backbone.rounds=3"],
    "cifar100-dino-head-then-backbone": [*SMALL, "stages.head.epochs=2", "stages.backbone.epochs=2"],
    "cifar100-vit-tiny-one-step": [*SMALL, *CLIENTS, "stages.backbone.rounds=12", "federation.evaluate_every=4"],
    "cifar100-vit-tiny-probe": [*SMALL, "stages.head.epochs=3"],
    "cifar100-vit-tiny-whole": [*SMALL, "stages.all.epochs=2"],
    "digits-robust": ["stages.backbone.rounds=8"],
    "digits-secagg": ["stages.backbone.rounds=8"],
}
SKIPPED = {"digits-dp": "its noise comes from a secret that every run draws for itself"}
CLOCKS = ("seconds", "images_per_second", "calibration_seconds")


TURNS = 9
FEDERATION = "federation={clients: 20, partition: {kind: iid}, cohort: 10, evaluate_every: 100}"
NETWORK = "model={backbone: vit_tiny_patch16_224, weights: none, options: {patch_size: 4, embed_dim: %d, depth: %d, num_heads: 4}}"
ROUNDS = "stages=[{name: all, train: all, rounds: %d, local: {steps: %d}, batch_size: 16, optimizer: {lr: 0.01}}]"
SPEED = {  # whole rounds, and rounds that do little but send and add up 21 million weights
    "rounds, sequential": [NETWORK % (64, 4), ROUNDS % (10, 4), "executor=sequential"],
    "rounds, stacked": [NETWORK % (64, 4), ROUNDS % (10, 4), "executor=stacked"],
    "masked rounds, stacked": [
        NETWORK % (64, 4),
        ROUNDS.replace("train: all,", "train: backbone, sparse: true,") % (10, 4),
        "executor=stacked",
        "mask={rule: high_magnitude, sparsity: 0.9}",
        "message={up: int8, down: fp16}",
    ],
    "beyond the steps": [NETWORK % (384, 12), ROUNDS % (5, 1), "executor=sequential", "stages.all.batch_size=1"],
}


def commands() -> dict[str, list[str]]:
    """By name, the words after `fedsieve` but the folder."""
    found = {"demo": ["demo"], "demo-federated": ["demo", "--federated"]}
    for config in sorted((HERE / "configs").glob("*.yaml")):
        if config.stem not in SKIPPED:
            found[config.stem] = ["run", str(config), *SHORT.get(config.stem, []), "tracking=[]"]
    return found


def outcome(folder: Path) -> dict[str, Any]:
    """The weights, the metrics without clocks, and the ledger of a run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ledger = folder / "ledger.csv"
    return {
        "metrics": [{key: value for key, value in record.items() if key not in CLOCKS} for record in records],
        "bytes": ledger.read_bytes() if ledger.exists() else b"",
        "weights": load_file(folder / "checkpoints" / "final.safetensors"),
    }


def differences(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """The parts that are not the same to the bit."""
    weights = one["weights"].keys() == two["weights"].keys() and all(
        torch.equal(one["weights"][name], two["weights"][name]) for name in one["weights"]
    )
    return [name for name in ("metrics", "bytes") if one[name] != two[name]] + ["weights"] * (not weights)


def run(checkout: Path, words: Sequence[str], out: Path) -> None:
    """Run one experiment with one version."""
    command = [str(checkout / ".venv" / "bin" / "fedsieve"), *words, "--out", str(out)]
    done = subprocess.run(command, cwd=out.parent, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed in {checkout}:\n{done.stderr[-2000:]}")


def compare_speed(versions: Mapping[str, Path], only: str) -> None:
    """Print how long rounds take here, by how long they take in the other version."""
    for name, overrides in SPEED.items():
        if only not in name:
            continue
        seconds: dict[str, list[float]] = {version: [] for version in versions}
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.yaml"
            config.write_text("name: speed\ndata: {source: digits, size: 16, normalize: half}\n")
            words = ["run", str(config), FEDERATION, *overrides, "device=cpu", "tracking=[]", "test=false", "-q"]
            for turn in range(TURNS):
                for version in [*versions][:: 1 if turn % 2 else -1]:
                    out = Path(folder) / f"{version}-{turn}"
                    run(versions[version], words, out)
                    lines = (out / "metrics.jsonl").read_text().splitlines()
                    seconds[version].append(statistics.median(json.loads(line)["seconds"] for line in lines[2:]))
        ratios = sorted(here / other for here, other in zip(seconds["here"], seconds["other"], strict=True))
        low, high = ratios[1], ratios[-2]  # of nine, the median lies between them in 96 % of cases
        each = ", ".join(f"{version} {1e3 * statistics.median(taken):.0f} ms" for version, taken in seconds.items())
        print(f"{name}: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}); {each}", flush=True)


def main() -> None:
    """Compare what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of the other version")
    parser.add_argument("--only", default="", help="run the names that contain this")
    parser.add_argument("--speed", action="store_true", help="compare the seconds of rounds instead")
    given = parser.parse_args()
    versions = {"here": HERE, "other": given.other.resolve()}
    if given.speed:
        compare_speed(versions, given.only)
        return
    same = True
    for name, words in commands().items():
        if given.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcomes = []
            for version, checkout in versions.items():
                out = Path(folder) / version
                run(checkout, words, out)
                outcomes.append(outcome(out))
        one, two = outcomes
        found, records = differences(one, two), len(one["metrics"])
        sent = one["bytes"].count(b"\n")
        same = same and not found
        print(
            f"{name}: {', '.join(found) + ' differ' if found else 'same'} ({records} records, {sent} lines of ledger)",
            flush=True,
        )
    for name, reason in SKIPPED.items():
        print(f"{name}: left out, since {reason}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()

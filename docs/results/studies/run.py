"""Run what studies.md shows, in several processes that share a GPU:

uv run python docs/results/studies/run.py --data CIFAR100 --weights VIT_TINY.safetensors --out runs --workers 12

Stopped, the same command goes on. `--only 'drift*'` takes some of the tables, `--limit 3600` ends after an hour, `--list` prints the commands;
keep.py then writes the tables. Some were run with `--compile blocks`, or on a CPU: studies.md tells.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

# A table of results: the study, how it was changed, and rows that one process takes after another.
WAYS = ("sparse-*", "full", "lora", "adapter", "mlp", "last-blocks", "linear")
RULES = ("random", "high_magnitude", "least_sensitive", "most_sensitive", "low_magnitude", "low_hybrid", "high_hybrid")
PERSONAL = "data.size=128 stages.main.rounds=15 federation.personal.clients=20 federation.personal.batch_size=64"
KINDS = ("tensor", "global")
DRIFT = (
    "data.size=64 mask.fisher.samples=128 stages.backbone.optimizer.lr=0.01 stages.all.optimizer.lr=0.01 "
    "stages.head.rounds=30 stages.backbone.rounds=15 stages.all.rounds=45 federation.evaluate_every=5"
)
EDITING = "data.size=128 mask.scope=shared stages.edit.optimizer.lr=0.01 stages.edit.rounds=20"
TABLES: dict[str, tuple[str, str, list[str]]] = {
    "overlap": ("overlap", "data.size=128 stages.all.epochs=2", ["masks/*", "sparse-rates/*"]),
    "overlap-heads": ("overlap", "data.size=128 data.transform=resize", [f"fedavg/*-j{j}" for j in (4, 8, 16)]),
    "overlap-rules": (
        "overlap",
        "data.size=64 stages.all.epochs=2",
        [*(f"sparse/{rule}-*" for rule in RULES if rule != "low_hybrid"), "central/*"],
    ),
    "editing": (
        "editing",
        EDITING,
        ["rules-rates/iid*", "rules-rates/nc50*", "edit/*c5", "fedavg/*-j4", "strategies/* fisher/nc50-sample"],
    ),
    "editing-headfirst": (
        "editing",
        f"{EDITING} stages.head.optimizer.lr=0.1",
        ["headfirst/iid* fedavg/iid-j4", "headfirst/nc50* fedavg/nc50-j4"],
    ),
    "editing-grids": (
        "editing",
        "data.size=128 data.transform=resize stages.edit.optimizer.lr=0.1 stages.edit.epochs=3",
        [
            *("central/head* central-grid/*", "fedavg/* fedavg-grid/*"),
            *("central/edit-s0.9-* fisher/central-sample", "central/edit-s0.95-*", "central/edit-s0.99-*"),
        ],
    ),
    "editing-rates": (
        "editing",
        "data.size=128 data.transform=resize --rates 0.03,0.1,0.3",
        ["fedavg/*-j4 fedavg/*-r20", "fedavg/*-j8", "fedavg/*-j16"],
    ),
    "drift": (
        "drift",
        DRIFT,
        [
            *(
                "table2/*-j16",
                "table2/*-j8",
                "table2/iid-j4 table2/nc1-j4 table2/nc5-j4",
                "table2/nc10-j4 table2/nc50-j4",
            ),
            *(f"sparsity/*-s0.{s}" for s in (2, 8, 3, 6, 9)),
            *("fig6/iid-*", "fig6/nc5-*", "blend/*", "scenarios/at-once", "scenarios/head-first"),
        ],
    ),
    "drift-calibration": ("drift", DRIFT, ["calibration/iid*", "calibration/nc5*"]),
    "drift-central": (
        "drift",
        "data.size=64 stages.head.optimizer.lr=0.01 stages.head.epochs=10 stages.backbone.epochs=3 stages.all.epochs=4 --rates 0.003,0.01,0.03",
        ["table1/head table1/scenario-* table1/baseline", "table1/least* kinds/*", "fig2/most*", "fig2/random*"],
    ),
    "messages": ("drift", "data.size=64", ["messages/*"]),
    "beyond": (
        "beyond",
        "data.size=128 stages.backbone.rounds=200",
        [
            "rules/dense",
            *(f"rules/{rule}-{kind}-s0.9 rules/{rule}-{kind}-s0.99" for rule in RULES for kind in KINDS),
            *(f"rules/*-{kind}-s0.9 rules/*-{kind}-s0.99" for kind in ("block", "tensor-shrunk", "global-shrunk")),
            *("head/*", "server/*", "format/*", "participation/*", "devices/*", "refresh/least*", "refresh/most*"),
            "scope/shared-* scope/public-*",
        ],
    ),
    "beyond-fourth": (  # of whose seeds the last was taken
        "beyond",
        "data.size=128 stages.backbone.rounds=200 device=cpu compile=eager --seeds 4",
        ["rules/high_hybrid-tensor-s0.99", "rules/random-tensor-s0.99"],
    ),
    "scope": (
        "beyond",
        "data.size=128 stages.backbone.rounds=200",
        ["scope/client-*", "scope/shared-*", "scope/public-*"],
    ),
    "corrections": (
        "beyond",
        "data.size=128 stages.backbone.rounds=25 federation.evaluate_every=5",
        ["correction/*-sparse", "correction/*-dense", "hostile/*", "hostile-skewed/*"],
    ),
    "privacy": ("beyond", "data.size=96 data.transform=resize", ["dp/* head/ridge-iid"]),
    "personalization": ("personalization", PERSONAL, [f"{way}/{where}" for where in ("nc1", "iid") for way in WAYS]),
    "personalization-nc5": ("personalization", PERSONAL, [f"{way}/nc5" for way in WAYS]),
    "personalization-dir0.1": ("personalization", PERSONAL, [f"{way}/dir0.1" for way in WAYS]),
    "personalization-steps": (
        "personalization",
        "data.size=64 stages.main.rounds=15 federation.personal=null",
        [
            *("sparse-high*/nc5", "sparse-least*/nc5", "rescale/high*", "rescale/least*"),
            *("momentum/high*", "momentum/least*", "momentum/refresh-*"),
        ],
    ),
    "secure": ("secure", "data.size=224", ["central/*", "fedavg/*", "most_sensitive/*", "least_sensitive/*", "sums/*"]),
}


def commands(data: str, weights: str, out: Path, compile: str) -> Iterator[tuple[str, list[str]]]:
    """The table and the command of every part."""
    network = [f"data.source={data}", "model.backbone=vit_tiny_patch16_224", f"model.weights={weights}"]
    for name, (study, words, parts) in TABLES.items():
        for part in parts:
            rows = [word for row in part.split() for word in ("--rows", row)]
            changed = [*network, "data.normalize=half", f"compile={compile}", *words.split()]
            yield name, ["study", study, *changed, *rows, "--out", str(out / name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--compile", default="full")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="TABLE")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    end = time.monotonic() + given.limit
    chosen = [
        command
        for name, command in commands(given.data, given.weights, given.out, given.compile)
        if any(fnmatch(name, pattern) for pattern in given.only)
    ]
    if given.list:
        print(*(shlex.join(["fedsieve", *command]) for command in chosen), sep="\n")
        return

    def run(command: list[str]) -> None:
        left = end - time.monotonic()
        if left > 1:
            limit = [] if left == float("inf") else ["--limit", f"{left:.0f}"]
            subprocess.run([sys.executable, "-m", "fedsieve", *command, *limit, "--quiet"], check=False)

    with ThreadPoolExecutor(given.workers) as workers:
        list(workers.map(run, chosen))


if __name__ == "__main__":
    main()

"""Federated CIFAR-100 with a ViT-Ti/16, many runs in one process: partitions, rates, budgets.

python docs/results/federation.py JOBS.yaml --data CIFAR100 --weights VIT_TINY.safetensors --out federation.csv [--smoke]

JOBS.yaml is a list of {name, val_fraction, seeds, overrides: [key=value ...]}. A run is what `fedsieve run` does with the
config printed by --show and these overrides; here data, network and compiled steps are shared between runs, since
compiling takes longer than many of them. Rows that FILE of --out has already are passed over.
"""

import argparse
import csv
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from fedsieve.config import Experiment, Stage, parse_config
from fedsieve.data.partitions import client_accuracies
from fedsieve.errors import FedsieveError
from fedsieve.federation.executors import Executor
from fedsieve.federation.personal import spread
from fedsieve.federation.rounds import Federated
from fedsieve.federation.state import Context
from fedsieve.federation.store import ClientStore
from fedsieve.model.build import OnFeatures
from fedsieve.model.space import ParamSpace
from fedsieve.runner import federated
from fedsieve.runner.federated import fit_ridge, populate
from fedsieve.runner.progress import Display
from fedsieve.runner.setup import Setup, feature_feeds, prepare
from fedsieve.train.loop import measure, predict
from fedsieve.wire.ledger import Ledger

BASE = """
data: {source: digits, size: 224, transform: flip, normalize: half}
model: {backbone: vit_tiny_patch16_224, weights: none}
mask: {rule: high_magnitude, sparsity: 0.9, scope: public}
federation:
  clients: 100
  partition: {kind: iid}
  cohort: 0.1
  evaluate_every: 100
  server: {optimizer: momentum, lr: 0.3, momentum: 0.9}
message: {up: int8, down: fp16}
stages:
  - {name: head, train: head, method: ridge}
  - {name: backbone, train: backbone, sparse: true, rounds: 400, local: {steps: 1}, batch_size: 50, optimizer: {lr: 0.1}}
"""
SMOKE = [
    "data.size=16",
    "model.options={patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}",
    "federation.clients=20",
]
COLUMNS = ["job", "seed", "val_accuracy", "test_accuracy", "test_loss", "stages_test_accuracy", "rounds", "bytes_up"]
COLUMNS += ["bytes_down", "drift", "client_mean", "client_std", "client_worst_decile", "client_worst", "seconds"]
COLUMNS += ["round_ms", "curve", "overrides"]


class Shared(Federated):
    """A federated stage that takes over compiled steps of an earlier one that trains the same weights in the same way."""

    kept: dict[tuple[Any, ...], Executor] = {}  # noqa: RUF012

    def _running_executor(self) -> Executor:
        batch = min(self.stage.batch_size, int(self.population.sizes.max()))
        mask = None if self.mask is None else self.mask.id
        key = (id(self.feed), id(self.theta), mask, batch, self.stage.optimizer.kind, self.settings.correction.kind)
        if self.executor is None and key in self.kept:
            self.executor = self.kept[key]
            object.__setattr__(self.executor.task, "optimizer", self.stage.optimizer)
            object.__setattr__(self.executor.task, "correction", self.settings.correction)
        executor = super()._running_executor()
        self.kept[key] = executor
        return executor


class Arena:
    """Data and network for one validation share and one set of weights: the images are the same for every seed."""

    def __init__(self, experiment: Experiment) -> None:
        self.setup: Setup = prepare(experiment, Display.silent())
        self.initial = {name: tensor.clone() for name, tensor in self.setup.model.state_dict().items()}
        self.bound = dict[str, tuple[ParamSpace, Tensor]]()
        self.test = self.setup.test_feed()
        self.features = feature_feeds(self.setup)

    def bind(self, stage: Stage) -> tuple[ParamSpace, Tensor]:
        """The vector of a stage's weights: the same one each time, since compiled steps know its place in memory."""
        space = self.setup.space(stage)
        if space.id not in self.bound:
            self.bound[space.id] = space, space.bind(self.setup.model)
        space, theta = self.bound[space.id]
        values, gradients = space.unflatten(theta.detach()), space.unflatten(theta.grad)
        with torch.no_grad():
            for name, parameter in self.setup.model.named_parameters():
                parameter.requires_grad_(name in values)
                parameter.grad = gradients.get(name)
                if name in values:
                    values[name].copy_(parameter)
                    parameter.data = values[name]
        return space, theta

    def run(self, experiment: Experiment) -> dict[str, Any]:
        setup = self.setup
        setup.experiment = experiment
        began = time.perf_counter()
        with torch.no_grad():
            for name, tensor in setup.model.state_dict().items():
                tensor.copy_(self.initial[name])
        moved = False
        accuracies = list[float]()
        with tempfile.TemporaryDirectory() as folder:
            context = Context(
                experiment=experiment,
                population=populate(experiment, setup.train.labels.cpu().numpy(), setup.train.rows),
                model=setup.model,
                initial=self.initial,
                train=setup.train,
                validation=setup.validation,
                autocast=setup.autocast,
                speed=setup.speed,
                executor="stacked" if setup.device.type == "cuda" else "sequential",
                ledger=Ledger(Path(folder) / "ledger.csv"),
                store=ClientStore(Path(folder) / "clients"),
            )
            for stage in experiment.stages:
                if stage.method == "ridge":
                    federated.feature_feeds = feature_feeds if moved else lambda _: self.features
                    for _ in fit_ridge(setup, context, stage, dict)[2]:
                        pass
                else:
                    on_features = stage.train == "head" and not moved
                    moved = moved or stage.train != "head"
                    stepped = self.rounds(context, stage, on_features)
                    records = [tick.record for tick in stepped.rounds() if tick.record]
                found = self.measure()
                accuracies.append(found["test_accuracy"])
            total = dict(context.ledger.total)
        logits = predict(setup.model, self.test, setup.autocast)
        correct = (logits.argmax(1) == self.test.labels).cpu().numpy()
        people = context.population
        clients = spread(client_accuracies(correct, self.test.labels.cpu().numpy(), people.counts, len(people)))
        values = [(r["round"], r["val_accuracy"]) for r in records if "val_accuracy" in r]
        plain = [r["seconds"] for r in records[1:] if "val_accuracy" not in r]
        return found | {
            "val_accuracy": stepped.state.chosen.get("val_accuracy", ""),
            "stages_test_accuracy": " ".join(f"{100 * value:.2f}" for value in accuracies),
            "rounds": stepped.state.round,
            "bytes_up": total["up"],
            "bytes_down": total["down"],
            "drift": stepped.state.drift,
            **{f"client_{key}": clients.get(key, math.nan) for key in ("mean", "std", "worst_decile", "worst")},
            "seconds": time.perf_counter() - began,
            "round_ms": 1e3 * float(np.median(plain)) if plain else 0.0,
            "curve": " ".join(f"{number}:{100 * value:.1f}" for number, value in values),
        }

    def rounds(self, context: Context, stage: Stage, on_features: bool) -> Shared:
        setup = self.setup
        space, theta = self.bind(stage)
        train, validation = self.features if on_features else (setup.train, setup.validation)
        forward = OnFeatures(setup.model.head) if on_features else setup.model
        return Shared(context, stage, space, forward, theta, train, lambda: setup.validate(forward, validation))

    def measure(self) -> dict[str, float]:
        logits = predict(self.setup.model, self.test, self.setup.autocast)
        return measure(logits, self.test.labels, "test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path, nargs="?")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--weights", default="none")
    parser.add_argument("--out", type=Path, default=Path("federation.csv"))
    parser.add_argument("--compile", default="full")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after so many")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the base config and stop")
    given = parser.parse_args()
    if given.show or given.jobs is None:
        print(BASE)
        return
    common = [f"data.source={given.data}", f"model.weights={given.weights}", f"compile={given.compile}"]
    common += SMOKE if given.smoke else []
    began, arenas = time.perf_counter(), dict[Any, Arena]()
    there = set[tuple[str, str]]()
    if given.out.exists():
        there = {(row["job"], row["seed"]) for row in csv.DictReader(given.out.read_text().splitlines())}
    with given.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if file.tell() == 0:
            writer.writeheader()
        for job in yaml.safe_load(given.jobs.read_text()):
            for seed in job.get("seeds", [0]):
                if (job["name"], str(seed)) in there:
                    continue
                if time.perf_counter() - began > given.seconds:
                    print("out of time", flush=True)
                    return
                share = float(job.get("val_fraction", 0.0))
                overrides = [*common, f"data.val_fraction={share}", *job.get("overrides", [])]
                try:
                    experiment = parse_config(BASE, [*overrides, f"seed={seed}"])
                    place = (share, experiment.data.size, experiment.model.model_dump_json())
                    if place not in arenas:
                        arenas[place] = Arena(experiment)
                    row = arenas[place].run(experiment)
                except FedsieveError as error:
                    print(f"{job['name']} seed {seed}: {error}", flush=True)
                    continue
                writer.writerow(
                    {"job": job["name"], "seed": seed, "overrides": " ".join(job.get("overrides", []))} | row
                )
                file.flush()
                print(
                    f"{time.perf_counter() - began:5.0f} s  {job['name']:28} seed {seed}: test {100 * row['test_accuracy']:.2f}, "
                    f"val {row['val_accuracy'] and round(100 * row['val_accuracy'], 2)}, stages {row['stages_test_accuracy']}, "
                    f"{row['rounds']} rounds x {row['round_ms']:.0f} ms, {(row['bytes_up'] + row['bytes_down']) / 1e9:.2f} GB, "
                    f"worst decile {100 * row['client_worst_decile']:.1f} | {row['curve']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

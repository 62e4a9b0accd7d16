"""A federation of a few clients on the embedded digits, small enough to run many times."""

from dataclasses import replace

import pytest

from fedsieve.config import parse_config
from fedsieve.runner.federated import make_context
from fedsieve.runner.prepare import prepare
from fedsieve.runner.progress import Display
from fedsieve.runner.stages import FederatedStage, Venue

CONFIG = """
name: federation
seed: 2
device: cpu
data: {source: digits, size: 8, normalize: half, val_fraction: 0.2}
model:
  backbone: vit_tiny_patch16_224
  options: {patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}
  weights: none
federation: {clients: 8, cohort: 3, partition: {kind: classes, nc: 3}}
stages:
  - {name: all, train: all, rounds: 3, local: {steps: 2}, batch_size: 16, optimizer: {lr: 0.1, weight_decay: 1e-3}}
tracking: []
"""
SPARSE = ("mask={rule: least_sensitive, sparsity: 0.8, fisher: {samples: 24}}", "stages.all.sparse=true")


@pytest.fixture
def federated():
    """federated(*overrides) -> Experiment."""
    return lambda *overrides: parse_config(CONFIG, overrides)


class Running:
    """A federated stage under way, and what it leaves behind."""

    def __init__(self, experiment, folder) -> None:
        self.experiment = experiment
        self.said = []
        self.setup = replace(prepare(experiment, Display.silent()), say=self.said.append)
        initial = {name: tensor.clone() for name, tensor in self.setup.model.state_dict().items()}
        self.context = make_context(self.setup, initial, folder, "", {})
        self.setup = replace(self.setup, train=self.context.train)
        stage = FederatedStage(self.setup, Venue(folder, self.context), experiment.stages[0])
        self.space, self.state = stage.space, stage.state
        self.start = self.state.theta.clone()
        self.records = [tick.record for tick in stage.ticks()]


@pytest.fixture
def running(tmp_path_factory):
    """running(experiment) -> a finished stage."""
    return lambda experiment: Running(experiment, tmp_path_factory.mktemp("run"))

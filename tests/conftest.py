"""What tests share: a cache of their own, and an experiment that runs in about a second."""

import os

# Before anything imports the hub's client, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests start many processes: that each compiles all it imports would be most of their time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The networks of the tests are too small to share among threads, which would only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
# Before anything imports Flower, which otherwise asks its vendor for updates and reports how it is used.
os.environ |= {"FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_TELEMETRY_ENABLED": "0"}
# What tests start inherits it, and is known by it.
os.environ[MARK := "FEDSIEVE_TESTS"] = str(os.getpid())

import time

import hypothesis
import pytest
import torch
from tests.processes import alive, command, kill

from fedsieve.config import Experiment, parse_config

TINY = """
name: tiny
seed: 3
device: cpu
data: {source: digits, size: 8, normalize: half, val_fraction: 0.2}
model:
  backbone: vit_tiny_patch16_224
  options: {patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}
  weights: none
stages:
  - {name: head, train: head, epochs: 2, batch_size: 200, optimizer: {lr: 0.1}}
  - {name: backbone, train: backbone, epochs: 2, batch_size: 200, optimizer: {lr: 0.05, weight_decay: 1e-4}}
tracking: []
"""


# A busy machine is no reason to fail.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

torch.set_num_threads(1)

FIRST = ("test_loopback", "test_grid")  # the longest files, so that two workers end together
ENDS_WITH_US = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "wandb-core")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_left_behind():
    def left() -> dict[int, str]:
        found = {process: command(process) for process in alive(f"{MARK}={os.getpid()}")}
        return {process: said for process, said in found.items() if said and not any(w in said for w in ENDS_WITH_US)}

    yield
    end = time.monotonic() + 20
    while (processes := left()) and time.monotonic() < end:
        time.sleep(0.1)
    kill(list(processes))
    assert not processes, "left behind by tests"


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSIEVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def tiny():
    """tiny(*overrides) -> Experiment."""

    def make(*overrides: str) -> Experiment:
        return parse_config(TINY, overrides)

    return make

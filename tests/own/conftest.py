"""A small model and data of a user's own."""

import pytest
import torch
from torch import nn

import fedsieve as fs

SIZE, CLASSES, CLIENTS = 240, 4, 8


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs):
        return self.head(self.body(inputs))


@pytest.fixture(scope="module")
def data():
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(SIZE, 6, generator=rng)
    labels = (inputs @ torch.randn(6, CLASSES, generator=rng)).argmax(1)
    return inputs, labels


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Small()


@pytest.fixture
def start(data, model):
    """Starts a federation with some settings of the test's own."""

    def make(**changes):
        shards = fs.partition(data[1], clients=CLIENTS, kind="dirichlet", alpha=0.5, seed=0)
        settings = {
            "clients": shards, "cohort": 4, "local": fs.Local(steps=2, batch_size=16),
            "optimizer": fs.SGD(lr=0.2, momentum=0.5), "device": "cpu",
        }  # fmt: skip
        return fs.federate(changes.pop("model", model), **{"train": data, **settings, **changes})

    return make


def weights(fed):
    return torch.cat([value.flatten() for value in fed.model.state_dict().values()])

"""A convolutional network with BatchNorm on your own tensors, across clients: statistics travel and are averaged."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import fedsieve as fs

digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
labels = torch.tensor(digits.target)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
)  # fmt: skip

fed = fs.federate(
    model,
    train=(images[:1500], labels[:1500]),
    validation=(images[1500:], labels[1500:]),
    clients=fs.partition(labels[:1500], clients=20, kind="dirichlet", alpha=0.5),
    cohort=5,
    local=fs.Local(steps=4, batch_size=32),
    optimizer=fs.SGD(lr=0.1, momentum=0.9),
    message=fs.Message(up="int8", down="fp16"),
    statistics="federated",
    device="cpu",
)
for record in fed.rounds(30):
    if record.round % 10 == 0:
        print(f"round {record.round}: loss {record.loss:.3f}, accuracy {fed.evaluate().accuracy:.3f}")
print(f"{fed.ledger.total['up']:,} bytes up, {fed.ledger.total['down']:,} down")

"""Regression on a table: a multilayer perceptron, mean squared error, and a metric of your own."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn

import fedsieve as fs

table, target = load_diabetes(return_X_y=True)
inputs = torch.tensor(table * 20, dtype=torch.float32)
targets = torch.tensor((target - target.mean()) / target.std(), dtype=torch.float32)


def absolute_error(outputs, labels):
    return (outputs.squeeze(-1) - labels).abs()


torch.manual_seed(0)
fed = fs.federate(
    nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)),
    train=(inputs[:350], targets[:350]),
    validation=(inputs[350:], targets[350:]),
    clients=[torch.arange(350)[number::10].numpy() for number in range(10)],
    cohort=5,
    local=fs.Local(steps=5, batch_size=16),
    optimizer=fs.AdamW(lr=0.003),
    objective="mean_squared_error",
    metrics={"absolute_error": absolute_error},
    device="cpu",
)
before = fed.evaluate()
fed.train(30)
after = fed.evaluate()
print(f"squared error {before.loss:.3f} -> {after.loss:.3f}, absolute error {after.metrics['absolute_error']:.3f}")

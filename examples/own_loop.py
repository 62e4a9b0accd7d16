"""Sparse fine-tuning in a training loop of your own: score, calibrate, and let SparseSGDM move what the mask allows."""

import tempfile
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from fedsieve import Mask, ParamSpace, SparseSGDM, calibrate, fisher, maskable

# Any model and any data.
digits = load_digits()
images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[:, None].repeat(1, 3, 1, 1)
labels = torch.tensor(digits.target)
torch.manual_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224", img_size=8, patch_size=2, embed_dim=48, depth=3, num_heads=4, num_classes=10
)


def train(optimizer, epochs: int) -> None:
    for epoch in range(epochs):
        losses = []
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"  epoch {epoch + 1}: loss {np.mean(losses):.3f}")


print("pretraining: every weight")
train(torch.optim.AdamW(model.parameters(), lr=1e-3), epochs=4)

# Which weights may train from here on: the tenth of each tensor that the output depends on most.
space = ParamSpace.of(model)
rows = np.random.default_rng(0).permutation(len(images))[:200]
scores = fisher(model, space, [(images[rows], labels[rows])], np.random.default_rng(1))
layers = maskable(space, model)  # all but tokens and position embeddings
mask = calibrate(scores, space, sparsity=0.9, rule="most_sensitive", maskable=layers, allocation="tensor")
print(f"fine-tuning: {mask.count:,} of {space.size:,} weights")

before = space.read(model)
optimizer = SparseSGDM(model.named_parameters(), mask, lr=0.05, momentum=0.9, weight_decay=1e-4, clip_norm=1.0)
train(optimizer, epochs=3)
moved = space.read(model) != before
assert not moved[~mask.to_bool()].any(), "a frozen weight moved"
print(f"optimizer state: {optimizer.state_bytes().state:,} bytes for {mask.count:,} weights")

# A mask is a small file that knows the weights it belongs to.
with tempfile.TemporaryDirectory() as folder:
    mask.save(Path(folder) / "mask.safetensors")
    assert Mask.load(Path(folder) / "mask.safetensors", space) == mask

# Several calibration rounds score again what is still active: give a function instead of scores.
again = calibrate(
    lambda active, number: fisher(model, space, [(images[rows], labels[rows])], np.random.default_rng(number)),
    space,
    sparsity=0.9,
    rule="most_sensitive",
    rounds=3,
    maskable=layers,
    allocation="tensor",
)
print(f"one round and three agree on {(mask & again).count / mask.count:.0%} of the active weights")

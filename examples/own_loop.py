"""Sparse fine-tuning in a training loop of your own: score, calibrate, and let SparseSGDM move what the mask allows."""

import numpy as np
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from fedsieve import Mask, ParamSpace, SparseSGDM, calibrate, fisher

# Any model and any data.
digits = load_digits()
images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[:, None].repeat(1, 3, 1, 1)
labels = torch.tensor(digits.target)
torch.manual_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224", img_size=8, patch_size=2, embed_dim=48, depth=3, num_heads=4, num_classes=10
)

# Which weights may train: here the tenth of each tensor that the output depends on least, in two calibration rounds.
space = ParamSpace.of(model)


def sensitivity(active: Mask, number: int) -> torch.Tensor:
    rows = np.random.default_rng(number).permutation(len(images))[:200]
    draws = np.random.default_rng(100 + number).random(len(rows))  # pick labels from the model's own softmax
    return fisher(model, space, [(images[rows], labels[rows])], draws)


mask = calibrate(sensitivity, space, sparsity=0.9, rounds=2, lowest=True, allocation="tensor")
print(f"{mask.count:,} of {space.size:,} weights train; mask {mask.id[:12]}")

before = space.read(model)
optimizer = SparseSGDM(model.named_parameters(), mask, lr=0.2, momentum=0.9, weight_decay=1e-4, clip_norm=1.0)
for epoch in range(3):
    losses = []
    for rows in torch.randperm(len(images)).split(64):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}")

moved = space.read(model) != before
assert not moved[~mask.to_bool()].any(), "a frozen weight moved"
print(f"optimizer state: {optimizer.state_bytes().state:,} bytes for {mask.count:,} weights")

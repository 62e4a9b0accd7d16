"""Small run folders, as a run leaves them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsieve.config import parse_config, to_yaml

CLASSES = ["<b>cat</b>", 'dog & "co"', "$5$"]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """make_run("first", seed=1, accuracy=0.75, finished=False, lr=0.1) -> the run folder."""

    def make(
        name: str, *, seed: int = 0, accuracy: float = 0.75, finished: bool = True, val: bool = True, **stage: Any
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        lr = stage.get("lr", 0.1)
        config = {
            "name": stage.get("experiment", "fixture"),
            "seed": seed,
            "data": {"source": "digits", "val_fraction": 0.1 if val else 0.0},
            "stages": [{"name": "head", "epochs": 2, "optimizer": {"lr": lr}}, {"name": "backbone", "epochs": 2}],
        }
        (folder / "config.yaml").write_text(to_yaml(parse_config(json.dumps(config))))
        (folder / "environment.json").write_text(
            json.dumps({"torch": "2.11", "command": "fedsieve run a<b.yaml", "git": {"commit": "abc"}})
        )
        lines = [
            {
                "index": i,
                "stage": name,
                "epoch": e,
                "train_loss": 1 / i,
                "train_accuracy": 0.1 * i,
                "lr": lr,
                "seconds": 1.5,
            }
            | ({"val_loss": 1.2 / i, "val_accuracy": 0.15 * i} if val else {})
            for i, (name, e) in enumerate([("head", 1), ("head", 2), ("backbone", 1), ("backbone", 2)], start=1)
        ]
        if not finished:
            lines = lines[:3]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if not finished:
            return folder
        scores = {"test_accuracy": accuracy, "test_loss": 0.5, "seconds": 3.0, "trained": 10, "parameters": 100}
        held_out = {
            "val_accuracy": 0.6 if val else None,
            "val_loss": 0.4 if val else None,
            "best_at": 2 if val else None,
        }
        ended = scores | held_out | {"epochs": 2}
        summary = scores | held_out | {"name": "fixture", "seed": seed, "device": "cpu", "images_per_second": 99.5}
        (folder / "summary.json").write_text(json.dumps(summary | {"stages": {"head": ended, "backbone": ended}}))
        labels = np.arange(20) % 3
        predicted = np.where(np.arange(20) < 5, (labels + 1) % 3, labels)
        np.savez(
            folder / "predictions.npz",
            labels=labels,
            predicted=predicted,
            confidence=np.linspace(0.3, 1, 20),
            class_names=np.array(CLASSES),
            sample_rows=np.array([0, 7, 19]),
            sample_images=np.arange(3 * 3 * 8 * 8, dtype=np.uint64).reshape(3, 3, 8, 8).astype(np.uint8),
        )
        return folder

    return make

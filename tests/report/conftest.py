"""Small run folders, as runs leave them, central and federated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsieve.config import parse_config, to_yaml
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.wire.codec import Coding, encode
from fedsieve.wire.ledger import Ledger, Line

SPACE = ParamSpace(
    ("backbone.blocks.0.a", "backbone.blocks.0.b", "backbone.blocks.1.a", "backbone.norm.weight"),
    ((30, 20), (20,), (30, 20), (10,)),
)
CLASSES = ["<b>cat</b>", 'dog & "co"', "$5$"]


def write_predictions(folder: Path) -> None:
    """15 of 20 right."""
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
        write_predictions(folder)
        return folder

    return make


def drawn_mask(seed: int, density: float = 0.1) -> Mask:
    return Mask.from_bool(SPACE, torch.rand(SPACE.size, generator=torch.Generator().manual_seed(seed)) < density)


@pytest.fixture
def make_federated(tmp_path: Path) -> Callable[..., Path]:
    """make_federated("first", rounds=4, message={"up": "int8"}, ...) -> a folder of a ridge head and sparse rounds.

    8 clients of 6, 7, ... 13 images, 2 of them strangers; 3 in a round, of which one crashes in the second.
    """

    def make(
        name: str = "run",
        *,
        rounds: int = 4,
        finished: bool = True,
        val: bool = True,
        test_curve: bool = False,
        message: dict[str, Any] | None = None,
        mask: dict[str, Any] | None = None,
        federation: dict[str, Any] | None = None,
        masks: dict[int, Mask] | None = None,
    ) -> Path:
        folder = tmp_path / name
        config = {
            "name": "federated",
            "data": {"source": "digits", "val_fraction": 0.1 if val else 0.0},
            "test_curve": test_curve,
            "mask": mask or {"sparsity": 0.9},
            "federation": {"clients": 8, "cohort": 3, "held_out": 0.25} | (federation or {}),
            "message": message or {},
            "stages": [
                {"name": "head", "train": "head", "method": "ridge"},
                {"name": "backbone", "train": "backbone", "sparse": True, "rounds": rounds},
            ],
        }
        folder.mkdir()
        (folder / "config.yaml").write_text(to_yaml(parse_config(json.dumps(config))))
        experiment = parse_config((folder / "config.yaml").read_text())
        up = Coding(experiment.message.up, experiment.message.group, experiment.message.top_k)
        down = Coding(experiment.message.down, experiment.message.group)
        masks = masks if masks is not None else {1: drawn_mask(0)}
        for first, one in masks.items():
            one.save(folder / "masks" / f"backbone{f'.round-{first}' if first > 1 else ''}.safetensors")
        ledger = Ledger(folder / "ledger.csv")
        records = [{"index": 1, "stage": "head", "round": 1, "cohort": 6, "replies": 6, "refused": {}, "seconds": 0.5}]
        for client in range(6):
            ledger.add(Line("head", 1, client, "up", "statistics", 1000))
        moved = None
        for number in range(rounds if finished else 2):
            one = masks[max(first for first in masks if first <= number + 1)] if masks else drawn_mask(0)
            moved = one if moved is None else moved | one
            lost = [2] if number == 1 else []
            for client in range(3):
                size = len(encode(torch.ones(moved.count), down, moved, round=number, client=client))
                ledger.add(Line("backbone", number + 1, client, "down", "model", size))
                if client not in lost:
                    size = len(encode(torch.randn(one.count), up, one, round=number, client=client))
                    ledger.add(Line("backbone", number + 1, client, "up", "update", size))
            records.append(
                {
                    "index": number + 2,
                    "stage": "backbone",
                    "round": number + 1,
                    "train_loss": 1.0,
                    "train_accuracy": 0.5,
                    "drift": 1 / (number + 1),
                    "drift_by_block": {"blocks.0": 0.5, "blocks.1": 0.25, "norm": 0.125},
                    "lr": 0.1,
                    "cohort": 3,
                    "replies": 3 - len(lost),
                    "refused": {"crash": 1} if lost else {},
                    "bytes_up": 111,
                    "bytes_down": 222,
                    "seconds": 2.0,
                }
            )
        ledger.close()
        for place, row in enumerate(records):
            row |= {"val_loss": 1.0, "val_accuracy": 0.35 + 0.1 * place} if val else {}
            row |= {"test_loss": 1.0, "test_accuracy": 0.4} if test_curve else {}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
        if not finished:
            return folder
        scores = {"test_accuracy": 0.75, "test_loss": 0.5, "seconds": 9.0, "val_accuracy": 0.7 if val else None}
        ended = scores | {"best_at": 1, "drift": None, "refused": {}}
        stages = {
            "head": ended | {"trained": 40, "rounds": 1, "epochs": 1},
            "backbone": ended
            | {
                "trained": SPACE.size,
                "rounds": rounds,
                "epochs": rounds,
                "best_at": rounds,
                "drift": 0.25,
                "sparsity": 0.9,
            }
            | ({"mask_id": masks[max(masks)].id} if masks else {}),
        }
        spread = {"clients": 6, "mean": 0.5, "std": 0.1, "worst_decile": 0.3125, "worst": 0.25}
        summary = scores | {
            "rounds": rounds + 1,
            "bytes_up": ledger.total["up"],
            "bytes_down": ledger.total["down"],
            "drift": 0.25,
            "refused": {"crash": 1},
            "client_accuracy": spread | {"strangers": {"clients": 2, "mean": 0.45}},
            "stages": stages,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        write_predictions(folder)
        np.savez(
            folder / "clients.npz",
            accuracy=np.linspace(0.25, 0.8, 8),
            sizes=np.arange(6, 14),
            strangers=np.array([3, 6]),
            client=np.repeat(np.arange(8), 2),
            label=np.arange(16) % 5,
            examples=np.ravel([[2, size - 2] for size in range(6, 14)]),
        )
        return folder

    return make

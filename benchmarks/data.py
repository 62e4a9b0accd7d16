"""How long images take to be decoded the first time, and to be loaded from the cache after that."""

import io
import tempfile
import time
from pathlib import Path

import datasets  # noqa: F401  # by load_images, which is timed
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from PIL import Image

from benchmarks.result import Result
from fedsieve.config import Data
from fedsieve.data.sources import load_images
from fedsieve.randomness import generator


def data(device: torch.device, smoke: bool) -> Result:
    """As many PNG images, 32x32, as CIFAR-100 has, in parquet files."""
    counts = {"train": 500, "test": 100} if smoke else {"train": 50_000, "test": 10_000}
    result = Result(
        ("images", "first decode, s", "from the cache, s", "ratio", "images/s decoded"),
        note="random PNG images of 32x32 in parquet; the cache is read into memory and moved to the device",
    )
    with tempfile.TemporaryDirectory() as name:
        for split, count in counts.items():
            _write(Path(name) / "set" / f"{split}.parquet", count)
        config = Data(source=str(Path(name) / "set"), cache=str(Path(name) / "cache"))
        first, second = (_seconds(config, device) for _ in range(2))
    total = sum(counts.values())
    result.rows.append((total, first, second, first / second, total / first))
    return result


def _seconds(config: Data, device: torch.device) -> float:
    began = time.perf_counter()
    for split in ("train", "test"):
        load_images(config, split).images.to(device, copy=True)
    return time.perf_counter() - began


def _write(file: Path, count: int) -> None:
    rng = generator(0, "bench images")
    rows = []
    for _ in range(count):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(buffer, "PNG", compress_level=1)
        rows.append({"bytes": buffer.getvalue(), "path": None})
    file.parent.mkdir(parents=True, exist_ok=True)
    labels = rng.integers(0, 100, count)
    labels[:100] = np.arange(100)[: len(labels[:100])]
    pyarrow.parquet.write_table(pyarrow.table({"image": rows, "label": labels}), file)

"""The page of a dataset: its classes, their likeness, and the images that stand out."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.config import Experiment
from fedsieve.data import exploration as exploring
from fedsieve.data.exploration import OUTLIER_SHARE, Exploration
from fedsieve.data.image_tables import kind_of
from fedsieve.data.sources import keep_classes, load_images
from fedsieve.errors import FedsieveError
from fedsieve.report import figures
from fedsieve.report.html import TILE, figure, render, save, tile

ALL_BARS = 40
PAIRS = 12
EXTREMES = 12
EVERY_IMAGE = ("labels", "mahalanobis")  # one value an image: not for a summary


def explore(experiment: Experiment, folder: Path, say: Callable[[str], None]) -> Path:
    """Write a page about the training images of an experiment, and the numbers behind it."""
    kind_of(experiment.data.source)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FedsieveError(f"--out: {folder} is there already. Choose another folder")
    images = load_images(experiment.data, "train", say)
    pixels, rows = images.images, np.arange(len(images))
    rows, labels, class_names = keep_classes(images, rows, experiment.data.classes)
    if experiment.data.classes is not None:
        pixels = pixels[torch.from_numpy(rows)]
    found = exploring.explore(pixels, labels, class_names, experiment.seed)
    return write_exploration(found, pixels, f"{experiment.name}: {experiment.data.source}", folder)


def write_exploration(exploration: Exploration, images: Tensor, title: str, folder: Path) -> Path:
    """Writes explore.html, exploration.json and figures/ into `folder`, and returns the page."""
    names = exploration.class_names
    drawings = {
        "classes": _per_class(names, exploration.counts.astype(np.float64), "images"),
        "spread": _per_class(names, exploration.spread, "mean distance to centroid"),
        "centroids": figures.closeness(exploration.centroid_distances, names),
        "outliers": figures.outlier_law(exploration.mahalanobis, exploration.degrees, exploration.threshold),
    }
    for name, svg in drawings.items():
        save(folder / "figures" / f"{name}.svg", svg)
    rows = np.concatenate(exploration.samples)
    columns = max(map(len, exploration.samples))
    sheet = figures.sheet(images[rows].cpu().numpy(), ["white"] * len(rows), columns=columns)
    save(folder / "figures" / "samples.png", sheet)
    save(folder / "exploration.json", json.dumps(_numbers(exploration), indent=1, allow_nan=False) + "\n")

    extremes = exploration.outliers[:EXTREMES]
    page = render(
        "explore.html",
        title=title,
        data=exploration,
        expected=OUTLIER_SHARE,
        size=tuple(images.shape[-2:]),
        crisp=max(images.shape[-2:]) < TILE,
        present=int((exploration.counts > 0).sum()),
        figures={name: figure(svg, name) for name, svg in drawings.items()},
        numbered=len(names) > figures.LABELLED_CLASSES,
        pairs=_closest(exploration),
        strips=[
            (name, [tile(_image(images, row)) for row in some], int(count))
            for name, some, count in zip(names, exploration.samples, exploration.counts, strict=True)
        ],
        reference=_tile(exploration, images, exploration.reference),
        nearest=_tiles(exploration, images, exploration.nearest, exploration.nearest_distances),
        farthest=_tiles(exploration, images, exploration.farthest, exploration.farthest_distances),
        extremes=_tiles(exploration, images, extremes, np.sqrt(exploration.mahalanobis[extremes])),
    )
    return save(folder / "explore.html", page)


def _per_class(names: tuple[str, ...], values: np.ndarray, label: str) -> str:
    """Bars, largest first, with their names where every class can have one."""
    known = np.flatnonzero(np.isfinite(values))
    order = known[np.argsort(-values[known], kind="stable")]
    if len(order) > ALL_BARS:
        return figures.ranked(values[order], label)
    return figures.bars([names[row] for row in order], values[order], label, digits=0)


def _closest(exploration: Exploration) -> list[tuple[str, str, float]]:
    """The pairs of classes whose centroids are nearest to each other."""
    first, second = np.triu_indices(len(exploration.class_names), k=1)
    apart = exploration.centroid_distances[first, second]
    order = [pair for pair in np.argsort(apart, kind="stable")[:PAIRS] if np.isfinite(apart[pair])]
    names = exploration.class_names
    return [(names[first[pair]], names[second[pair]], float(apart[pair])) for pair in order]


def _image(images: Tensor, row: int) -> np.ndarray:
    return images[int(row)].cpu().numpy()


def _tile(exploration: Exploration, images: Tensor, row: int) -> dict[str, Any]:
    name = exploration.class_names[exploration.labels[row]]
    return {"image": tile(_image(images, row)), "label": name, "row": int(row)}


def _tiles(exploration: Exploration, images: Tensor, rows: np.ndarray, distances: np.ndarray) -> list[dict[str, Any]]:
    return [
        {**_tile(exploration, images, row), "distance": float(distance)}
        for row, distance in zip(rows, distances, strict=True)
    ]


def _numbers(exploration: Exploration) -> dict[str, Any]:
    """The exploration as JSON values: lists for arrays, null for NaN."""
    values = {key: value for key, value in asdict(exploration).items() if key not in EVERY_IMAGE}
    extra = {
        "images": len(exploration.labels),
        "outlier_share": exploration.outlier_share,
        "expected_share": OUTLIER_SHARE,
        "outlier_distances": exploration.mahalanobis[exploration.outliers],
    }
    return {key: _plain(value) for key, value in (values | extra).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value

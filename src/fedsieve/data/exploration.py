"""What a set of images looks like, in numbers: class sizes, neighbours, spread about the class centroids, outliers.

Outliers are images whose mean colour lies too far out by its Mahalanobis distance (1936), which for a normal
cloud follows a chi-squared law.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.randomness import generator

OUTLIER_SHARE = 0.025  # what a normal cloud would put beyond the threshold
CHUNK_VALUES = 2**23  # pixels in float64 at once: 64 MiB, whatever the number of images


@dataclass(frozen=True)
class Exploration:
    """The numbers of N images of C classes. Distances are Euclidean, over all pixels, in steps of 0 to 255."""

    seed: int
    class_names: tuple[str, ...]
    labels: np.ndarray  # (N,)
    counts: np.ndarray  # (C,) images of each class
    samples: tuple[np.ndarray, ...]  # rows of a few images of each class
    reference: int  # the row the neighbours are counted from
    nearest: np.ndarray  # rows, nearest first
    nearest_distances: np.ndarray
    farthest: np.ndarray  # rows, farthest first
    farthest_distances: np.ndarray
    spread: np.ndarray  # (C,) mean distance of a class's images to its centroid; NaN for an empty class
    centroid_distances: np.ndarray  # (C, C); NaN for an empty class
    mahalanobis: np.ndarray  # (N,) squared distance of each image's mean colour from the mean of all
    degrees: int  # of freedom: 3, fewer where the colours span less (1 for greyscale)
    threshold: float  # squared; beyond it lies an outlier
    outliers: np.ndarray  # rows, most extreme first

    @property
    def outlier_share(self) -> float:
        return len(self.outliers) / len(self.labels)


def explore(
    images: Tensor, labels: Tensor, class_names: Sequence[str], seed: int, per_class: int = 6, neighbours: int = 6
) -> Exploration:
    """Explore `images` (N, 3, H, W) uint8 with `labels` (N,) int64. Memory grows with the classes, not the images."""
    if images.ndim != 4 or images.shape[1] != 3 or images.dtype != torch.uint8 or labels.shape != images.shape[:1]:
        raise FedsieveError(
            f"exploration: expected uint8 images (N, 3, H, W) and N labels, "
            f"got {images.dtype} {tuple(images.shape)} and {tuple(labels.shape)}"
        )
    if len(images) < 2:
        raise FedsieveError(f"exploration: needs at least two images to compare, got {len(images)}")
    label_rows = labels.cpu().numpy()
    if label_rows.min() < 0 or label_rows.max() >= len(class_names):
        raise FedsieveError(
            f"exploration: labels run from {label_rows.min()} to {label_rows.max()}, "
            f"but there are {len(class_names)} class names"
        )

    reference = int(generator(seed, "explore", "reference").integers(len(images)))
    squared = _squared_distances(images, reference)
    others = np.delete(np.arange(len(images)), reference)
    nearest = others[np.argsort(squared[others], kind="stable")[:neighbours]]
    farthest = others[np.argsort(-squared[others], kind="stable")[:neighbours]]
    spread, centroid_distances = _centroids(images, labels, len(class_names))
    mahalanobis, degrees = _mahalanobis(_mean_colours(images))
    threshold = float(chi2.ppf(1 - OUTLIER_SHARE, degrees)) if degrees else 0.0
    by_distance = np.argsort(-mahalanobis, kind="stable")
    return Exploration(
        seed=seed,
        class_names=tuple(map(str, class_names)),
        labels=label_rows,
        counts=np.bincount(label_rows, minlength=len(class_names)),
        samples=tuple(_sample(np.flatnonzero(label_rows == c), per_class, seed, c) for c in range(len(class_names))),
        reference=reference,
        nearest=nearest,
        nearest_distances=np.sqrt(squared[nearest]),
        farthest=farthest,
        farthest_distances=np.sqrt(squared[farthest]),
        spread=spread,
        centroid_distances=centroid_distances,
        mahalanobis=mahalanobis,
        degrees=degrees,
        threshold=threshold,
        outliers=by_distance[mahalanobis[by_distance] > threshold],
    )


def _sample(rows: np.ndarray, size: int, seed: int, label: int) -> np.ndarray:
    return np.sort(generator(seed, "explore", "samples", label).permutation(rows)[:size])


def _chunks(images: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The images in order, as flat rows (n, 3HW), few enough at a time to widen safely."""
    step = max(1, CHUNK_VALUES // images[0].numel())
    for start in range(0, len(images), step):
        rows = slice(start, min(start + step, len(images)))
        yield rows, images[rows].flatten(1)


def _squared_distances(images: Tensor, reference: int) -> np.ndarray:
    """Squared distance of every image to one of them (N,), exact: whole numbers all the way."""
    target = images[reference].flatten().int()
    squared = [(chunk.int() - target).square().sum(1, dtype=torch.int64) for _, chunk in _chunks(images)]
    return torch.cat(squared).cpu().numpy()


def _centroids(images: Tensor, labels: Tensor, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean distance of each class's images to its centroid (C,), and distances between the centroids (C, C)."""
    sums = torch.zeros(classes, images[0].numel(), dtype=torch.float64, device=images.device)
    labels = labels.to(images.device)
    for rows, chunk in _chunks(images):
        sums.index_add_(0, labels[rows], chunk.double())
    counts = torch.bincount(labels, minlength=classes).double()
    centroids = sums / counts[:, None]  # 0 / 0: an empty class has no centroid, and NaN says so
    totals = torch.zeros(classes, dtype=torch.float64, device=images.device)
    for rows, chunk in _chunks(images):
        totals.index_add_(0, labels[rows], (chunk.double() - centroids[labels[rows]]).norm(dim=1))
    # The matrix-product shortcut would lose small distances to cancellation.
    between = torch.cdist(centroids, centroids, compute_mode="donot_use_mm_for_euclid_dist")
    return (totals / counts).cpu().numpy(), between.cpu().numpy()


def _mean_colours(images: Tensor) -> np.ndarray:
    """Mean red, green and blue of every image (N, 3)."""
    means = [chunk.unflatten(1, (3, -1)).double().mean(2) for _, chunk in _chunks(images)]
    return torch.cat(means).cpu().numpy()


def _mahalanobis(points: np.ndarray) -> tuple[np.ndarray, int]:
    """Squared Mahalanobis distance of each point (N,), and the dimensions the points span.

    Outliers are part of the covariance they are measured by, so many of them hide one another.
    Directions without variance (greyscale images have two) are left out, as the pseudo-inverse of the covariance
    does, and do not count as degrees of freedom.
    """
    centred = points - points.mean(0)
    variances, directions = np.linalg.eigh(np.cov(points.T))
    kept = variances > 1e-10 * max(variances.max(), 1.0)
    whitened = centred @ directions[:, kept] / np.sqrt(variances[kept])
    return np.square(whitened).sum(1), int(kept.sum())

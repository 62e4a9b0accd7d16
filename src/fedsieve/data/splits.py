"""Which rows are held out, for validation or for testing."""

import numpy as np


def hold_out(
    labels: np.ndarray, fraction: float, stratified: bool, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers kept and held out, both ascending; round(fraction * rows) are held out.

    Stratified, every class gives its share to within one row (largest remainder).
    """
    count = round(fraction * len(labels))
    order = rng.permutation(len(labels))
    if stratified:
        # Stable: within a class the order stays the random one.
        by_class = order[np.argsort(labels[order], kind="stable")]
        sizes = np.bincount(labels)
        quota = sizes * (count / max(len(labels), 1))
        take = np.floor(quota).astype(int)
        take[np.argsort(take - quota, kind="stable")[: count - take.sum()]] += 1
        position = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        held = by_class[position < np.repeat(take, sizes)]
    else:
        held = order[:count]
    mask = np.zeros(len(labels), dtype=bool)
    mask[held] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)

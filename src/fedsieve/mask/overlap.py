"""How far masks agree: Jaccard indices of sets of active weights, per tensor and per transformer block."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace

# What timm calls repeated parts, nested in hierarchical networks: `blocks.3`, `layers.0.blocks.1`, `layer2.0`; in
# regnets `s1.b1`, in densenets `features.denseblock1.denselayer1` and `features.transition1`.
_BLOCK = re.compile(
    r"(?:(?:blocks|stages|layers|levels|network|transformer|transformer_encoder|layer\d+|stage\d+)(?:\.\d+)+\.|layer\d+\.)+"
    r"|s\d+\.b\d+\.|features\.(?:denseblock\d+\.denselayer\d+|transition\d+)\."
)


AROUND = ("embed", "norm", "head")  # what `block_of` calls what is no block


def block_of(name: str) -> str:
    """The block a parameter belongs to: `blocks.3`, or `embed`, `norm` or `head` for what lies around the blocks."""
    name = name.removeprefix("backbone.")
    if found := _BLOCK.match(name):
        return found.group().rstrip(".")
    first = name.partition(".")[0]
    if first in ("head", "head_dist", "fc", "classifier"):
        return "head"
    # norm_pre stands before the blocks.
    return "norm" if "norm" in first and first != "norm_pre" else "embed"


def blocks(space: ParamSpace) -> dict[str, list[int]]:
    """The numbers of the tensors of each block, in the space's order."""
    grouped: dict[str, list[int]] = {}
    for index, name in enumerate(space.names):
        grouped.setdefault(block_of(name), []).append(index)
    return grouped


@dataclass(frozen=True)
class Overlap:
    """Jaccard indices of every pair of n masks: matrices (n, n) of the whole, of each block and of each tensor."""

    total: np.ndarray
    blocks: dict[str, np.ndarray]
    tensors: dict[str, np.ndarray]


def jaccard(a: Mask, b: Mask) -> float:
    """|a & b| / |a | b|; nan where both are empty, since there is nothing to compare."""
    union = (a | b).count
    return (a & b).count / union if union else float("nan")


def jaccard_table(masks: Sequence[Mask]) -> Overlap:
    """The Jaccard index of every pair of masks, whole, per block and per tensor; nan where both are empty."""
    if not masks:
        raise FedsieveError("an overlap needs at least one mask")
    space = masks[0].space
    for mask in masks:
        mask.check(space)
    common = [_intersections([mask.tensor_bits(index) for mask in masks]) for index in range(len(space.names))]
    zero = np.zeros((len(masks), len(masks)), dtype=np.int64)
    return Overlap(
        total=_index(sum(common, zero)),
        blocks={block: _index(sum((common[i] for i in indices), zero)) for block, indices in blocks(space).items()},
        tensors=dict(zip(space.names, map(_index, common), strict=True)),
    )


def expected_jaccard(density_a: float, density_b: float) -> float:
    """The index that two independent random masks of these densities have; p / (2 - p) where both are p."""
    both = density_a * density_b
    either = density_a + density_b - both
    return both / either if either else float("nan")


def _intersections(parts: list[np.ndarray]) -> np.ndarray:
    """The sizes of all pairwise intersections of n packed sets, (n, n)."""
    # Padded to whole 64-bit words, which are counted eight bytes at a time.
    packed = np.zeros((len(parts), -(-len(parts[0]) // 8) * 8), dtype=np.uint8)
    packed[:, : len(parts[0])] = parts
    words = packed.view(np.uint64)
    sizes = np.zeros((len(parts), len(parts)), dtype=np.int64)
    for i, row in enumerate(words):
        for j in range(i, len(parts)):
            sizes[i, j] = sizes[j, i] = np.bitwise_count(row & words[j]).sum(dtype=np.int64)
    return sizes


def _index(common: np.ndarray) -> np.ndarray:
    """Jaccard indices from intersections, whose diagonal holds the sizes."""
    sizes = common.diagonal()
    union = sizes[:, None] + sizes[None, :] - common
    return np.divide(common, union, out=np.full(common.shape, np.nan), where=union > 0)

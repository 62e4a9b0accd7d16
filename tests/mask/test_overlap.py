import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.mask.overlap import block_of, blocks, expected_jaccard, jaccard, jaccard_table
from fedsieve.model.space import ParamSpace

SPACE = ParamSpace(
    ("backbone.cls_token", "backbone.blocks.0.w", "backbone.blocks.0.b", "backbone.blocks.1.w", "head.weight"),
    ((3,), (4, 5), (5,), (70,), (0,)),
)


def index(a: set[int], b: set[int]) -> float:
    return len(a & b) / len(a | b) if a | b else math.nan


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0.0, 0.05, 0.5, 1.0])), min_size=1, max_size=4))
def test_tables_equal_those_of_python_sets(draws):
    vectors = [np.random.default_rng(seed).random(SPACE.size) < density for seed, density in draws]
    masks = [Mask.from_bool(SPACE, torch.from_numpy(vector)) for vector in vectors]
    table = jaccard_table(masks)
    assert list(table.tensors) == list(SPACE.names) and list(table.blocks) == ["embed", "blocks.0", "blocks.1", "head"]
    for i, a in enumerate(masks):
        for j, b in enumerate(masks):
            sets = [set(mask.indices().tolist()) for mask in (a, b)]
            np.testing.assert_equal(table.total[i, j], index(*sets))
            np.testing.assert_equal(jaccard(a, b), index(*sets))
            for number, name in enumerate(SPACE.names):
                span = set(range(*SPACE.offsets[number : number + 2]))
                np.testing.assert_equal(table.tensors[name][i, j], index(*(one & span for one in sets)))
            for block, tensors in blocks(SPACE).items():
                span = {place for number in tensors for place in range(*SPACE.offsets[number : number + 2])}
                np.testing.assert_equal(table.blocks[block][i, j], index(*(one & span for one in sets)))


def test_masks_of_other_spaces_have_no_overlap():
    with pytest.raises(FedsieveError, match="does not fit"):
        jaccard_table([Mask.ones(SPACE), Mask.ones(ParamSpace(("a",), ((SPACE.size,),)))])
    with pytest.raises(FedsieveError, match="at least one mask"):
        jaccard_table([])


def test_random_masks_overlap_as_expected_by_chance():
    space = ParamSpace(("a",), ((200_000,),))
    draws = np.random.default_rng(0).random((2, space.size)) < np.array([[0.1], [0.3]])
    a, b = (Mask.from_bool(space, torch.from_numpy(draw)) for draw in draws)
    assert jaccard(a, b) == pytest.approx(expected_jaccard(0.1, 0.3), rel=0.05)
    assert expected_jaccard(0.1, 0.1) == pytest.approx(0.1 / 1.9)
    assert expected_jaccard(1, 1) == 1 and math.isnan(expected_jaccard(0, 0))


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("backbone.blocks.3.attn.qkv.weight", "blocks.3"),
        ("blocks.11.mlp.fc1.bias", "blocks.11"),
        ("backbone.cls_token", "embed"),
        ("backbone.pos_embed", "embed"),
        ("backbone.patch_embed.proj.weight", "embed"),
        ("backbone.norm_pre.weight", "embed"),
        ("backbone.norm.weight", "norm"),
        ("backbone.fc_norm.bias", "norm"),
        ("head.weight", "head"),
        ("head.0.weight", "head"),
        ("backbone.layers.0.blocks.1.attn.proj.bias", "layers.0.blocks.1"),
        ("backbone.layers.1.downsample.norm.weight", "layers.1"),
        ("backbone.layer2.0.conv1.weight", "layer2.0"),
        ("backbone.stages.2.1.transformer.0.attn.qkv.weight", "stages.2.1.transformer.0"),
        ("backbone.stages.2.blocks.3.mlp.0.weight", "stages.2.blocks.3"),
        ("backbone.features.conv0.weight", "embed"),
        ("backbone.features.denseblock1.denselayer12.conv1.weight", "features.denseblock1.denselayer12"),
        ("backbone.features.transition2.conv.weight", "features.transition2"),
        ("backbone.s3.b10.conv1.bn.weight", "s3.b10"),
        ("backbone.stem.conv.weight", "embed"),
        ("backbone.levels.1.transformer_encoder.0.attn.qkv.weight", "levels.1.transformer_encoder.0"),
        ("backbone.stage2.3.mlp.conv1.weight", "stage2.3"),
        ("backbone.network.2.1.mlp.fc1.weight", "network.2.1"),
    ],
)
def test_names_fall_into_blocks(name, block):
    assert block_of(name) == block

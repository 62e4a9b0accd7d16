import itertools
from fractions import Fraction

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedsieve.errors import FedsieveError
from fedsieve.mask import selection
from fedsieve.mask.overlap import blocks
from fedsieve.mask.selection import apportion, attention_heads, can_last, fill, group_ids, select
from fedsieve.model.space import ParamSpace

SPACE = ParamSpace(
    ("backbone.cls_token", "backbone.blocks.0.w", "backbone.blocks.0.b", "backbone.blocks.1.w", "backbone.norm.weight"),
    ((1, 2), (4, 3), (4,), (3, 2, 2), (5,)),
)
SPANS = [range(*SPACE.offsets[index : index + 2]) for index in range(len(SPACE.names))]


@st.composite
def problems(draw):
    """Scores with many ties, some infinite and some -0, and which weights are active."""
    values = st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.0, -3.5, 1e-30, float("inf"), float("-inf")]) | st.floats(
        width=32, allow_nan=False
    )
    scores = draw(st.lists(values, min_size=SPACE.size, max_size=SPACE.size))
    active = draw(st.lists(st.sampled_from([True, True, True, False]), min_size=SPACE.size, max_size=SPACE.size))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return torch.tensor(scores, dtype=dtype), torch.tensor(active)


def best(places, scores: torch.Tensor, lowest: bool) -> list[int]:
    """All places, best first, of equal scores the lower index first."""
    return sorted(places, key=lambda place: ((1 if lowest else -1) * scores[place].item(), place))


def slow_seats(k: int, sizes, least, most) -> list[int]:
    """Fix the bounds that bind one after another, then largest remainder."""
    fixed: dict[int, int] = {}
    while True:
        free = [unit for unit in range(len(sizes)) if unit not in fixed]
        left = k - sum(fixed.values())
        density = (
            Fraction(left, sum(sizes[unit] for unit in free)) if any(sizes[unit] for unit in free) else Fraction(0)
        )
        low = [unit for unit in free if density * sizes[unit] < least[unit]]
        high = [unit for unit in free if density * sizes[unit] > most[unit]]
        short = sum(least[unit] - density * sizes[unit] for unit in low)
        over = sum(density * sizes[unit] - most[unit] for unit in high)
        if not low and not high:
            break
        # The side that moves more decides which way the density goes, and so which bounds are final.
        if short >= over:
            fixed |= {unit: least[unit] for unit in low}
        if over >= short:
            fixed |= {unit: most[unit] for unit in high}
    seats = [fixed.get(unit, int(density * size)) for unit, size in enumerate(sizes)]
    for unit in sorted(free, key=lambda unit: (int(density * sizes[unit]) - density * sizes[unit], unit))[
        : k - sum(seats)
    ]:
        seats[unit] += 1
    return seats


def slow_select(scores, active, k, lowest, units, floor) -> set[int]:
    places = [[place for place in span if active[place]] for span in SPANS]
    floors = [min(floor, len(here)) for here in places]
    seats = slow_seats(
        k,
        [sum(len(places[index]) for index in unit) for unit in units],
        [sum(floors[index] for index in unit) for unit in units],
        [sum(len(places[index]) for index in unit) for unit in units],
    )
    kept: set[int] = set()
    for unit, number in zip(units, seats, strict=True):
        mine = {place for index in unit for place in best(places[index], scores, lowest)[: floors[index]]}
        rest = best([place for index in unit for place in places[index] if place not in mine], scores, lowest)
        kept |= mine | set(rest[: number - len(mine)])
    return kept


UNITS = {
    "global": [list(range(len(SPACE.names)))],
    "tensor": [[index] for index in range(len(SPACE.names))],
    "block": list(blocks(SPACE).values()),
}


@settings(deadline=None, max_examples=150)
@given(problems(), st.data(), st.booleans(), st.sampled_from(sorted(UNITS)), st.integers(0, 3))
def test_selection_equals_the_slow_reference(problem, data, lowest, allocation, floor):
    scores, active = problem
    needed = sum(min(floor, sum(bool(active[place]) for place in span)) for span in SPANS)
    k = data.draw(st.integers(needed, int(active.sum())))
    options = {"lowest": lowest, "allocation": allocation, "min_active_per_tensor": floor}
    kept = select(scores, active, k, SPACE, **options)
    assert int(kept.sum()) == k and not (kept & ~active).any()
    assert torch.equal(kept, select(scores, active, k, SPACE, **options))
    assert set(kept.nonzero().flatten().tolist()) == slow_select(scores, active, k, lowest, UNITS[allocation], floor)
    for span in SPANS:
        inside = slice(span.start, span.stop)
        assert int(kept[inside].sum()) >= min(floor, int(active[inside].sum()))
    if needed:
        with pytest.raises(FedsieveError, match="smallest feasible density"):
            select(scores, active, needed - 1, SPACE, **options)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6), st.data()
)
def test_seats_are_exact_within_bounds_and_equal_the_slow_reference(units, data):
    sizes, most, least = zip(*[sorted(unit, reverse=True) for unit in units], strict=True)
    k = data.draw(st.integers(sum(least), sum(most)))
    seats = apportion(k, sizes, least, most)
    assert sum(seats) == k
    assert all(low <= seat <= high for low, seat, high in zip(least, seats, most, strict=True))
    assert seats == slow_seats(k, sizes, least, most)


def test_equal_scores_keep_the_lower_index():
    space = ParamSpace(("a", "b"), ((10,), (10,)))
    for lowest in (True, False):
        kept = select(torch.zeros(20), torch.ones(20, dtype=torch.bool), 7, space, lowest=lowest)
        # Six of the first, after the floor of one in each tensor.
        assert kept.nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_thresholds_are_exact_on_many_weights(dtype):
    rng = np.random.default_rng(0)
    space = ParamSpace(("a",), ((30_000,),))
    scores = torch.from_numpy(rng.normal(size=space.size) * (rng.random(space.size) < 0.3)).to(dtype)
    everything = torch.ones(space.size, dtype=torch.bool)
    order = scores.double().sort(stable=True).indices
    for k in (1, 2, 5_000, 12_345, 29_999, 30_000):
        expected = torch.zeros_like(everything)
        expected[order[:k]] = True
        assert torch.equal(select(scores, everything, k, space, lowest=True), expected)


def test_scores_that_are_not_numbers_are_refused_only_where_active():
    scores, active = torch.zeros(SPACE.size), torch.ones(SPACE.size, dtype=torch.bool)
    scores[3] = float("nan")
    for granularity in ("weight", "row", "block"):
        with pytest.raises(FedsieveError, match="1 active weights are not numbers"):
            select(scores, active, 20, SPACE, lowest=True, granularity=granularity)
    active[3] = False
    assert not select(scores, active, 20, SPACE, lowest=True)[3]


def test_requests_that_make_no_sense_are_refused():
    scores, active = torch.zeros(SPACE.size), torch.ones(SPACE.size, dtype=torch.bool)
    for change, message in [
        ({"k": SPACE.size + 1}, "cannot stay active"),
        ({"k": 4}, "4 active weights are fewer than the 5 .* in 5 tensors; the smallest feasible density is 0.142858"),
        ({"scores": torch.zeros(3)}, r"scores of shape \(3,\)"),
        ({"active": active.float()}, "bool vector of 35"),
        ({"allocation": "layer"}, "not one of global, tensor, block"),
        ({"granularity": "column"}, "not one of weight, row"),
        ({"granularity": "attention_head"}, "finds no attention"),
        ({"granularity": "block", "allocation": "block"}, "a block is kept or frozen whole"),
        ({"granularity": "attention_head", "allocation": "tensor"}, "must lie inside one tensor"),
        ({"granularity": "block", "k": 1}, "too few for any group: the smallest has 2"),
    ]:
        request = {"scores": scores, "active": active, "k": 10, "space": SPACE, "lowest": True} | change
        with pytest.raises(FedsieveError, match=message):
            select(**request)


def test_whole_numbers_too_large_for_float32_are_told_apart():
    space = ParamSpace(("a",), ((50,),))
    scores = 2**30 + torch.arange(50).flip(0)
    kept = select(scores, torch.ones(50, dtype=torch.bool), 3, space, lowest=True)
    assert kept.nonzero().flatten().tolist() == [47, 48, 49]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(6), Attention(6, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


def slow_groups(space: ParamSpace, granularity: str) -> list[set[int]]:
    """Groups written out weight by weight; in Net a head has 2 of the 6 features."""
    groups: dict[object, set[int]] = {}
    for number, (name, shape) in enumerate(zip(space.names, space.shapes, strict=True)):
        for place, position in enumerate(np.ndindex(*shape), start=space.offsets[number]):
            key: object = None
            if granularity == "row":
                key = (name, position[0])
            elif granularity == "block":
                key = name.split(".")[1] if name.startswith("blocks") else name
            elif name.endswith(("qkv.weight", "qkv.bias")):
                key = (name.split(".")[1], position[0] % 6 // 2)
            elif name.endswith("attn.proj.weight"):
                key = (name.split(".")[1], position[1] // 2)
            if key is not None:
                groups.setdefault(key, set()).add(place)
    return list(groups.values())


NET = Net()
NET_SPACE = ParamSpace.of(NET)


@pytest.mark.parametrize("granularity", ["row", "attention_head", "block"])
def test_groups_are_those_written_out(granularity):
    ids = group_ids(NET_SPACE, granularity, attention_heads(NET))
    expected = slow_groups(NET_SPACE, granularity)
    assert {frozenset(np.flatnonzero(ids == number).tolist()) for number in np.unique(ids[ids >= 0])} == set(
        map(frozenset, expected)
    )
    assert attention_heads(NET) == {"blocks.0.attn": 3, "blocks.1.attn": 3}
    with pytest.raises(FedsieveError, match="does not divide into 4 heads"):
        group_ids(ParamSpace.of(NET, ["blocks.0.attn.qkv.weight"]), "attention_head", {"blocks.0.attn": 4})


def test_attention_whose_rows_lie_elsewhere_is_left_out():
    with torch.device("meta"):
        swin, tiny, former, gcvit = (
            timm.create_model(name)
            for name in ("swin_tiny_patch4_window7_224", "tiny_vit_5m_224", "efficientformer_l1", "gcvit_xxtiny")
        )
    assert len(attention_heads(swin)) == 12
    assert attention_heads(tiny) == attention_heads(former) == {}
    with pytest.raises(FedsieveError, match="finds no attention"):
        group_ids(ParamSpace.of(tiny), "attention_head", attention_heads(tiny))
    # Its global blocks take q from elsewhere: they have a joint layer of k and v only.
    heads = attention_heads(gcvit)
    assert heads and all(gcvit.get_submodule(f"{name}.qkv").out_features % 3 == 0 for name in heads)
    assert (group_ids(ParamSpace.of(gcvit), "attention_head", heads) >= 0).any()


def slow_fill(sizes: list[int], room: int) -> list[int]:
    """All subsets: the largest total that fits, and of its subsets the one with the earliest groups."""
    subsets = itertools.chain.from_iterable(itertools.combinations(range(len(sizes)), n) for n in range(len(sizes) + 1))
    fitting = [subset for subset in subsets if sum(sizes[place] for place in subset) <= room]
    most = max(sum(sizes[place] for place in subset) for subset in fitting)
    return list(min(subset for subset in fitting if sum(sizes[place] for place in subset) == most))


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), max_size=9), st.integers(0, 150), st.sampled_from([1, 6, 1000]))
def test_a_budget_is_filled_as_the_best_of_all_subsets_fills_it(sizes, room, unit):
    assert fill([unit * size for size in sizes], unit * room + unit - 1) == slow_fill(sizes, room)


def test_too_many_groups_are_taken_in_order(monkeypatch):
    assert fill([2, 7, 1, 4], 8) == [1, 2]
    monkeypatch.setattr(selection, "_MOST_BITS", 0)
    assert fill([2, 7, 1, 4], 8) == [0, 2, 3]


def test_blocks_of_a_vision_transformer_use_their_budget():
    """The best-scored small groups must not take the place of the only block that fits."""
    with torch.device("meta"):
        space = ParamSpace.of(timm.create_model("vit_small_patch16_224", num_classes=100))
    scores = torch.from_numpy(np.repeat(["block" in name for name in space.names], np.diff(space.offsets))).float()
    k = round(0.1 * space.size)
    kept = select(scores, torch.ones(space.size, dtype=torch.bool), k, space, lowest=True, granularity="block")
    assert 0.098 * space.size < int(kept.sum()) <= k


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 999),
    st.integers(1, NET_SPACE.size),
    st.booleans(),
    st.sampled_from(
        [
            ("row", "global"),
            ("row", "tensor"),
            ("row", "block"),
            ("attention_head", "global"),
            ("attention_head", "block"),
            ("block", "global"),
        ]
    ),
    st.sampled_from([None, 0.0, 0.5]),
)
def test_group_selection_fills_each_units_budget_with_its_best_groups(seed, k, lowest, how, more):
    """`more` is the share of frozen weights that are maskable and so count for the budgets."""
    granularity, allocation = how
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.integers(0, 6, NET_SPACE.size).astype(np.float32))
    active = torch.from_numpy(rng.random(NET_SPACE.size) < 0.9)
    maskable = None if more is None else active | torch.from_numpy(rng.random(NET_SPACE.size) < more)
    if maskable is not None:  # most of one unit is frozen by now
        active[: NET_SPACE.size // 3] &= torch.from_numpy(rng.random(NET_SPACE.size // 3) < 0.5)
    groups = [sorted(place for place in group if active[place]) for group in slow_groups(NET_SPACE, granularity)]
    groups = [group for group in groups if group]
    tensors = range(len(NET_SPACE.names))
    units = {
        "global": [list(tensors)],
        "tensor": [[index] for index in tensors],
        "block": list(blocks(NET_SPACE).values()),
    }[allocation]
    unit_of = {
        place: number
        for number, unit in enumerate(units)
        for index in unit
        for place in range(*NET_SPACE.offsets[index : index + 2])
    }
    ids = group_ids(NET_SPACE, granularity, attention_heads(NET))
    counted = [place for place in np.flatnonzero(ids >= 0) if (active if maskable is None else maskable)[place]]
    sizes = [sum(unit_of[place] == number for place in counted) for number in range(len(units))]
    totals = [sum(len(group) for group in groups if unit_of[group[0]] == number) for number in range(len(units))]
    room = slow_seats(min(k, sum(totals)), sizes, [0] * len(units), totals)
    sign = 1 if lowest else -1
    groups.sort(key=lambda group: (sign * float(scores[group].double().sum()) / len(group), ids[group[0]]))
    expected: set[int] = set()
    for number, budget in enumerate(room):
        mine = [group for group in groups if unit_of[group[0]] == number]
        for place in fill([len(group) for group in mine], budget):
            expected |= set(mine[place])
    options = {"lowest": lowest, "granularity": granularity, "allocation": allocation, "heads": attention_heads(NET)}
    options["maskable"] = maskable
    if not expected:
        with pytest.raises(FedsieveError, match="too few for any group"):
            select(scores, active, k, NET_SPACE, **options)
        return
    kept = set(select(scores, active, k, NET_SPACE, **options).nonzero().flatten().tolist())
    assert kept == expected and len(kept) <= k
    if allocation == "global":
        assert all(len(kept) + len(group) > k for group in groups if not kept & set(group))


@pytest.mark.parametrize("given", [False, True])
def test_weights_outside_all_groups_do_not_count_for_budgets(given):
    """Block 0 also has a wide layer that belongs to no head. Both blocks still keep equally many heads."""
    net = Net()
    net.blocks[0].mlp = nn.Linear(6, 200)
    space, heads = ParamSpace.of(net), attention_heads(net)
    everything, ids = torch.ones(space.size, dtype=torch.bool), group_ids(space, "attention_head", heads)
    options = {"lowest": True, "granularity": "attention_head", "allocation": "block", "heads": heads}
    for kept in (2, 4):
        found = select(
            torch.zeros(space.size),
            everything,
            kept * int((ids == 0).sum()),
            space,
            maskable=everything if given else None,
            **options,
        )
        assert [len(set(ids[found.numpy()]) & group) for group in ({0, 1, 2}, {3, 4, 5})] == [kept // 2] * 2


def test_groups_too_large_to_last_are_left_out_at_once():
    space = ParamSpace(("blocks.0.w", "blocks.1.w", "norm.weight"), ((10,), (10,), (2,)))
    everything = torch.ones(22, dtype=torch.bool)
    assert can_last(5, everything, space, granularity="block").nonzero().flatten().tolist() == [20, 21]
    with pytest.raises(FedsieveError, match="too few for any group"):
        can_last(1, everything, space, granularity="block")
    with pytest.raises(FedsieveError, match=r"smallest feasible density is 0\.136364"):
        can_last(1, everything, space)


def test_a_block_that_is_most_of_the_model_and_cannot_last_is_refused():
    space = ParamSpace(("odd.0.w", "odd.1.w", "norm.weight"), ((10,), (10,), (2,)))
    everything = torch.ones(22, dtype=torch.bool)
    with pytest.raises(FedsieveError, match='group "embed" holds 91 % of the maskable weights.* Use granularity: row'):
        can_last(5, everything, space, granularity="block")
    assert can_last(20, everything, space, granularity="block").all()
    assert can_last(5, everything, space, granularity="row").all()


def test_quotas_follow_the_maskable_weights_and_not_what_is_left_of_them():
    space = ParamSpace(("a", "b"), ((10,), (10,)))
    active = torch.ones(20, dtype=torch.bool)
    active[:6] = False
    kept = select(
        torch.arange(20.0), active, 8, space, lowest=True, allocation="tensor", maskable=torch.ones_like(active)
    )
    assert [int(kept[:10].sum()), int(kept[10:].sum())] == [4, 4]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_selects_what_a_cpu_selects():
    scores = torch.randint(0, 5, (SPACE.size,)).float()
    active = torch.rand(SPACE.size) < 0.8
    kept = select(scores.cuda(), active.cuda(), 12, SPACE, lowest=True)
    assert kept.is_cuda and torch.equal(kept.cpu(), select(scores, active, 12, SPACE, lowest=True))

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata
from tests.mask.test_selection import slow_seats

from fedsieve.config import Rule
from fedsieve.errors import FedsieveError
from fedsieve.mask.calibration import KINDS, calibrate, densities, hybrid, maskable, random_scores
from fedsieve.mask.mask import Mask
from fedsieve.mask.selection import attention_heads
from fedsieve.model.build import build_classifier
from fedsieve.model.space import ParamSpace


@pytest.fixture(scope="module")
def model():
    from fedsieve.config import Model

    options = {"patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3}
    return build_classifier(Model(backbone="vit_tiny_patch16_224", weights="none", options=options), 10, 8, 0)


@pytest.fixture(scope="module")
def space(model):
    return ParamSpace.of(model, [name for name, _ in model.named_parameters() if name.startswith("backbone.")])


def noise(space):
    """Scores that differ from one calibration round to the next, with ties."""

    def score(mask: Mask, number: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(number).integers(0, 300, space.size).astype(np.float32))

    return score


def test_densities_end_exactly_at_what_is_asked():
    assert densities(0.9, 1) == [1 - 0.9]
    assert densities(0.9, 2) == pytest.approx([0.1**0.5, 0.1])
    assert densities(0.9, 3, "linear") == pytest.approx([0.7, 0.4, 0.1])
    assert densities(0.0, 2) == [1, 1]
    for schedule in ("exponential", "linear"):
        for rounds in range(1, 9):
            given = densities(0.73, rounds, schedule)
            assert len(given) == rounds and given[-1] == 1 - 0.73 and given == sorted(given, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 1), "not in"),
        ((-0.1, 1), "not in"),
        ((0.5, 0), "not 1 or more"),
        ((0.5, 1, "cubic"), "exponential, linear"),
    ],
)
def test_densities_refuse_nonsense(arguments, message):
    with pytest.raises(FedsieveError, match=message):
        densities(*arguments)


@settings(deadline=None, max_examples=25)
@given(
    sparsity=st.floats(0, 0.95),
    rounds=st.integers(1, 5),
    schedule=st.sampled_from(["exponential", "linear"]),
    allocation=st.sampled_from(["global", "tensor", "block"]),
    lowest=st.booleans(),
)
def test_every_round_has_its_exact_count_and_only_freezes(model, space, sparsity, rounds, schedule, allocation, lowest):
    taking = maskable(space, model)
    seen: list[Mask] = []
    mask = calibrate(
        noise(space),
        space,
        sparsity=sparsity,
        rounds=rounds,
        lowest=lowest,
        schedule=schedule,
        maskable=taking,
        allocation=allocation,
        on_round=lambda number, mask: seen.append(mask),
    )
    total = int(taking.sum())
    assert [mask.count for mask in seen] == [
        round(density * total) for density in densities(sparsity, rounds, schedule)
    ]
    for before, after in zip([Mask.from_bool(space, taking), *seen], seen, strict=False):
        assert after <= before
    assert mask == seen[-1]
    # The floor holds in each tensor that takes part; the others stay frozen.
    for name, count in mask.counts().items():
        takes_part = bool(space.view(taking, name).any())
        assert (count >= 1) == takes_part
        if allocation == "tensor" and takes_part:
            size = space.view(taking, name).numel()
            # Floors are paid for by all others together, so a density may fall a little short.
            assert count == 1 or abs(count / size - mask.count / total) <= 1 / size + 0.02


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=4), st.floats(0, 0.9), st.integers(1, 4), st.data())
def test_tensor_quotas_follow_the_maskable_weights_in_every_round(sizes, sparsity, rounds, data):
    """They follow neither all weights of a tensor nor those that earlier rounds left active."""
    space = ParamSpace(tuple("abcd"[: len(sizes)]), tuple((size,) for size in sizes))
    taking = torch.tensor(data.draw(st.lists(st.booleans(), min_size=space.size, max_size=space.size)))
    targets = [round(density * int(taking.sum())) for density in densities(sparsity, rounds)]
    assume(targets[-1] > 0)
    seen: list[Mask] = []
    calibrate(
        noise(space),
        space,
        sparsity=sparsity,
        rounds=rounds,
        lowest=True,
        maskable=taking,
        allocation="tensor",
        min_active_per_tensor=0,
        on_round=lambda number, mask: seen.append(mask),
    )
    maskable = before = [int(part.sum()) for part in space.unflatten(taking).values()]
    for k, mask in zip(targets, seen, strict=True):
        found = list(mask.counts().values())
        assert found == slow_seats(k, maskable, [0] * len(sizes), before)
        before = found


@pytest.mark.parametrize("granularity", ["row", "attention_head", "block"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_groups_stay_whole_within_the_budget_and_only_freeze(model, space, granularity, rounds):
    seen: list[Mask] = []
    heads = attention_heads(model)
    mask = calibrate(
        noise(space),
        space,
        sparsity=0.6,
        rounds=rounds,
        lowest=True,
        granularity=granularity,
        heads=heads,
        on_round=lambda number, mask: seen.append(mask),
    )
    total = sum(4 * 12 * 12 + 36 for _ in range(2)) if granularity == "attention_head" else space.size
    assert 0 < mask.count <= round(0.4 * total)
    assert all(after <= before for before, after in itertools.pairwise(seen))
    if granularity == "row":
        rows = mask.tensor("backbone.blocks.1.mlp.fc1.weight")
        assert (rows.all(1) == rows.any(1)).all() and mask.count > 0.39 * total
    if granularity == "attention_head":
        # 2 of 6 heads: 40 % of the weights of all heads, rounded down to whole heads.
        assert mask.count == 2 * (4 * 12 * 4 + 12)
        assert sum(mask.counts()[f"backbone.blocks.{block}.mlp.fc1.weight"] for block in (0, 1)) == 0


def test_the_score_sees_the_weights_still_active():
    space = ParamSpace(("a",), ((8,),))
    counts = []

    def score(mask: Mask, number: int) -> torch.Tensor:
        counts.append((number, mask.count))
        # Lowest among the active: the callback's answer for the frozen is never read.
        return torch.where(mask.to_bool(), torch.arange(8.0), torch.tensor(float("nan")))

    mask = calibrate(score, space, sparsity=0.75, rounds=2, lowest=False)
    assert counts == [(0, 8), (1, 4)] and mask.indices().tolist() == [6, 7]


def test_what_cannot_work_is_refused_before_scoring(space):
    def score(mask: Mask, number: int) -> torch.Tensor:
        raise AssertionError("scored in vain")

    with pytest.raises(FedsieveError, match="smallest feasible density"):
        calibrate(score, space, sparsity=0.999, lowest=True)
    with pytest.raises(FedsieveError, match="too few for any group"):
        calibrate(score, space, sparsity=0.999, lowest=True, granularity="block")
    with pytest.raises(FedsieveError, match="leaves none to train"):
        calibrate(score, ParamSpace(("a",), ((3,),)), sparsity=0.999, lowest=True, min_active_per_tensor=0)
    with pytest.raises(FedsieveError, match="inside one tensor"):
        calibrate(score, space, sparsity=0.5, lowest=True, granularity="block", allocation="tensor")


def test_the_smallest_feasible_density_is_feasible(space):
    with pytest.raises(FedsieveError) as raised:
        calibrate(noise(space), space, sparsity=0.999, lowest=True)
    density = float(str(raised.value).partition("density is ")[2].split(". ")[0])
    assert calibrate(noise(space), space, sparsity=1 - density, lowest=True).count == len(space.names)


def test_kinds_restrict_what_takes_part(model, space):
    def names(kinds) -> set[str]:
        taking = maskable(space, model, kinds)
        assert all(bool(view.all()) == bool(view.any()) for view in space.unflatten(taking).values())
        return {name.removeprefix("backbone.") for name, view in space.unflatten(taking).items() if view.any()}

    everything = {name.removeprefix("backbone.") for name in space.names}
    assert names("all") == names(KINDS) == everything
    default = {
        name.removeprefix("backbone.") for name, view in space.unflatten(maskable(space, model)).items() if view.any()
    }
    assert default == everything - {"cls_token", "pos_embed"}
    assert names(["other"]) == {"cls_token", "pos_embed"}
    assert names(["conv"]) == {"patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert names(["norm"]) == {name for name in everything if "norm" in name}
    assert names(["attention"]) == {name for name in everything if "attn" in name}
    assert names(["linear"]) == {name for name in everything if "mlp" in name}
    assert names("bias") == {name for name in everything if name.endswith("bias")}
    assert names(["conv", "other"]) == names(["conv"]) | names(["other"])
    with pytest.raises(FedsieveError, match='"atention" is not a kind. Did you mean "attention"'):
        names(["atention"])
    with pytest.raises(FedsieveError, match="the model has no parameter nothing"):
        maskable(ParamSpace(("nothing",), ((2,),)), model)
    with pytest.raises(FedsieveError, match="no trained weight is of kind conv"):
        maskable(ParamSpace.of(model, ["head.weight"]), model, ["conv"])


def test_rules_say_what_trains():
    assert {*Rule.words} >= {
        "least_sensitive", "most_sensitive", "low_magnitude", "high_magnitude", "low_hybrid", "high_hybrid", "random",
    }  # fmt: skip
    for name, rule in Rule.words.items():
        low = name.startswith(("least", "low", "random"))
        assert rule.lowest == low and rule.text().startswith("trains")
    space = ParamSpace(("a",), ((4,),))
    for name, kept in [("low_magnitude", [1, 2]), ("high_magnitude", [0, 3])]:
        weights = torch.tensor([-3.0, 0.5, -1.0, 2.0])
        mask = calibrate(lambda *_: weights.abs(), space, sparsity=0.5, lowest=Rule.words[name].lowest)  # noqa: B023
        assert mask.indices().tolist() == kept


def test_random_masks_follow_the_seed_alone(space):
    def mask(seed: int, rounds: int = 1) -> Mask:
        return calibrate(
            lambda *_: random_scores(space, seed),
            space,
            sparsity=0.5,
            rounds=rounds,
            lowest=True,
            min_active_per_tensor=0,
        )

    assert mask(0) == mask(0) == mask(0, rounds=4) != mask(1)
    assert not torch.equal(random_scores(space, 0, "client", 1), random_scores(space, 0, "client", 2))


scores = st.lists(st.sampled_from([0.0, -0.0, 0.5, 1.0]) | st.floats(0, 2**100, width=32), min_size=1, max_size=20)


@given(scores, st.data())
def test_hybrid_ranks_equal_the_slow_reference(values, data):
    others = data.draw(st.lists(st.floats(0, 10, width=32), min_size=len(values), max_size=len(values)))
    among = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    inside = [place for place, here in enumerate(among) if here]

    def rank(numbers, place):
        lower = sum(numbers[other] < numbers[place] for other in inside)
        equal = sum(numbers[other] == numbers[place] for other in inside)
        return (lower + (equal - 1) / 2) / max(len(inside) - 1, 1)

    result = hybrid(torch.tensor(values), torch.tensor(others), alpha=0.3, among=torch.tensor(among))
    expected = [
        0.3 * rank(values, place) + 0.7 * rank(others, place) if among[place] else 0.0 for place in range(len(values))
    ]
    assert result.dtype == torch.float64
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("step", [0, 1e-3, 0.5])
def test_hybrid_ranks_of_many_scores_equal_scipys_to_the_bit(step):
    """Long vectors are sorted in another way than short ones."""
    drawn = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0))
    fisher, weights = (drawn / step).round() * step if step else drawn
    parts = (part.double().numpy() for part in (fisher, weights))  # some versions of scipy rank floats in floats
    expected = sum(0.5 * ((rankdata(part) - 1) / (len(part) - 1)) for part in parts)
    assert np.array_equal(hybrid(fisher, weights).numpy(), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scale", ["ranks", "max"])
def test_a_gpu_ranks_as_a_cpu_does(scale):
    fisher, weights = (torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0)) * 100).round() / 100
    among = torch.rand(50_000, generator=torch.Generator().manual_seed(1)) < 0.8
    expected = hybrid(fisher, weights, among=among, scale=scale)
    assert torch.equal(hybrid(fisher.cuda(), weights.cuda(), among=among, scale=scale).cpu(), expected)


def test_hybrid_by_the_largest_and_its_errors():
    fisher, magnitude = torch.tensor([0.0, 2.0, 4.0, 100.0]), torch.tensor([3.0, 0.0, 1.0, 100.0])
    among = torch.tensor([True, True, True, False])
    np.testing.assert_allclose(
        hybrid(fisher, magnitude, scale="max", among=among).numpy(), [0.5, 0.25, 2 / 3, 0], rtol=1e-6
    )
    assert torch.equal(hybrid(fisher, magnitude, alpha=1.0).argsort(), torch.arange(4))
    assert hybrid(torch.zeros(3), torch.zeros(3), scale="max").tolist() == [0, 0, 0]
    with pytest.raises(FedsieveError, match=r"alpha: 2"):
        hybrid(fisher, magnitude, alpha=2)
    with pytest.raises(FedsieveError, match="ranks, max"):
        hybrid(fisher, magnitude, scale="sum")
    with pytest.raises(FedsieveError, match="not numbers"):
        hybrid(fisher * float("nan"), magnitude)

import json

import numpy as np
import pytest
import torch
from scipy.stats import rankdata
from tests.train.test_loop import quiet

from fedsieve.config import Rule
from fedsieve.errors import FedsieveError
from fedsieve.mask.calibration import calibrate, maskable
from fedsieve.mask.mask import Mask
from fedsieve.mask.scores import fisher_sum
from fedsieve.randomness import generator
from fedsieve.runner.prepare import prepare
from fedsieve.runner.stages import CentralStage
from fedsieve.train.feed import Feed
from fedsieve.train.sieve import Scoring

SPARSE = "stages=[{name: s, train: backbone, sparse: true, epochs: 2, batch_size: 300, optimizer: {lr: 0.1, weight_decay: 0.01}}]"


def mask_for(tiny, sieve: str, *overrides: str):
    experiment = tiny(SPARSE, f"mask={sieve}", *overrides)
    setup = prepare(experiment, quiet())
    stage = experiment.stages[0]
    settings = experiment.mask_of(stage)
    space = setup.space(stage)
    scoring = Scoring(settings, setup.model, space, setup.train, setup.autocast, experiment.seed)
    return setup, scoring.mask(stage.name)


@pytest.mark.parametrize("rule", [name for name, rule in Rule.words.items() if rule.home is not None])
def test_every_rule_gives_the_density_asked_for(tiny, rule):
    setup, mask = mask_for(tiny, f"{{rule: {rule}, sparsity: 0.8, calibration_rounds: 2, fisher: {{samples: 40}}}}")
    outside = sum(p.numel() for n, p in setup.model.backbone.named_parameters() if n in ("cls_token", "pos_embed"))
    assert mask.count == round(0.2 * (mask.space.size - outside))


def test_low_and_high_ends_of_a_score_are_apart(tiny):
    for score in ("least_sensitive most_sensitive", "low_magnitude high_magnitude"):
        low, high = (
            mask_for(tiny, f"{{rule: {rule}, sparsity: 0.8, min_active_per_tensor: 0, fisher: {{samples: 40}}}}")[1]
            for rule in score.split()
        )
        assert (low & high).count == 0


def test_magnitude_masks_follow_the_weights_not_the_gradients(tiny):
    setup, mask = mask_for(tiny, "{rule: high_magnitude, sparsity: 0.9, min_active_per_tensor: 0, kinds: all}")
    weights = mask.space.read(setup.model).abs()
    assert weights[mask.to_bool()].min() >= weights[~mask.to_bool()].max()


def test_a_mask_is_repeated_by_its_seed_and_changed_by_another(tiny):
    sieve = "{rule: least_sensitive, sparsity: 0.9, fisher: {samples: 40}}"
    one, two = (mask_for(tiny, sieve)[1] for _ in range(2))
    assert one.id == two.id != mask_for(tiny, sieve, "seed=4")[1].id


@pytest.mark.parametrize("granularity", ["weight", "row", "attention_head", "block"])
def test_frozen_weights_keep_their_bits_through_a_stage_with_weight_decay(tiny, granularity):
    setup, mask = mask_for(
        tiny, f"{{rule: random, sparsity: 0.5, granularity: {granularity}, min_active_per_tensor: 0}}"
    )
    space = mask.space
    before = space.read(setup.model)
    head = setup.model.head.weight.clone()
    stage = CentralStage(setup, setup.experiment.stages[0], mask=mask)
    state, ticks = stage.state, stage.ticks()
    losses = [tick.record["train_loss"] for tick in ticks if tick.record]
    after, active = space.read(setup.model), mask.to_bool()
    assert torch.equal(after[~active], before[~active])
    assert (after[active] != before[active]).float().mean() > 0.9
    assert torch.equal(setup.model.head.weight, head)
    assert state.optimizer["momentum_buffer"].shape == (mask.count,)
    assert losses[-1] < losses[0]


def test_shrinking_changes_later_rounds_and_leaves_the_weights_alone(tiny):
    sieve = "rule: least_sensitive, sparsity: 0.9, calibration_rounds: 3, fisher: {samples: 40}"
    setup, plain = mask_for(tiny, f"{{{sieve}}}")
    weights = plain.space.read(setup.model)
    shrunk_setup, shrunk = mask_for(tiny, f"{{{sieve}, shrink: 0.1}}")
    assert plain.id != shrunk.id and plain.count == shrunk.count
    assert torch.equal(shrunk.space.read(shrunk_setup.model), weights)


def sieved(tiny, sieve: str):
    """A setup, the settings of its mask, and the space of its stage."""
    experiment = tiny(SPARSE, f"mask={sieve}")
    setup = prepare(experiment, quiet())
    stage = experiment.stages[0]
    return setup, experiment.mask_of(stage), setup.space(stage)


@pytest.mark.parametrize("schedule", ["exponential", "linear"])
@pytest.mark.parametrize("allocation", ["global", "tensor"])
def test_schedule_allocation_and_floor_reach_the_mask(tiny, schedule, allocation):
    """Every calibration round equals `calibrate` on the magnitudes."""
    setup, sieve, space = sieved(
        tiny,
        "{rule: high_magnitude, sparsity: 0.7, calibration_rounds: 3, min_active_per_tensor: 3, "
        f"schedule: {schedule}, allocation: {allocation}}}",
    )
    found, expected = [], []
    scoring = Scoring(sieve, setup.model, space, setup.train, setup.autocast, 0)
    scoring.mask("s", lambda _, mask: found.append(mask.id))
    calibrate(
        space.read(setup.model).abs(),
        space,
        sparsity=0.7,
        rule="high_magnitude",
        rounds=3,
        schedule=schedule,
        maskable=maskable(space, setup.model),
        allocation=allocation,
        min_active_per_tensor=3,
        on_round=lambda _, mask: expected.append(mask.id),
    )
    assert found == expected and len(set(found)) == 3


@pytest.mark.parametrize("fisher", [{}, {"per": "batch"}, {"target": "logit"}, {"labels": False}])
def test_scores_follow_the_fisher_settings(tiny, fisher):
    settings = {"per": "sample", "batch_size": 8, "target": "log_prob", "labels": True} | fisher
    setup, sieve, space = sieved(tiny, f"{{fisher: {json.dumps(settings | {'samples': 24})}}}")
    everything, rows = Mask.ones(space), np.arange(24)

    def scored(number: int) -> torch.Tensor:
        scoring = Scoring(sieve, setup.model, space, setup.train, setup.autocast, 0)
        return scoring.summed("fisher", everything, number, rows, "s")[0]

    if not settings["labels"]:  # drawn from the model, and anew in each calibration round
        draws = [generator(0, "fisher labels", "s", number).random(24) for number in (0, 1)]
        assert not torch.equal(scored(0), scored(1))
    else:
        draws = [None, None]
    for number in (0, 1):
        batches = [setup.train.batch(part) for part in np.array_split(rows, [8, 16])]
        expected, _ = fisher_sum(
            setup.model, space, batches, draws[number], per=settings["per"], target=settings["target"]
        )
        torch.testing.assert_close(scored(number), expected, rtol=1e-4, atol=1e-12)


def test_only_frozen_maskable_weights_shrink_and_only_after_the_first_round(tiny):
    setup, sieve, space = sieved(tiny, "{shrink: 0.1, fisher: {samples: 20, labels: true}}")
    may, rows = maskable(space, setup.model), np.arange(20)
    active = Mask.from_bool(space, may & (torch.rand(space.size, generator=torch.Generator().manual_seed(0)) < 0.5))
    weights = space.read(setup.model)
    assert not may.all()  # tokens and position embeddings are in no mask

    def scored(active: Mask, number: int) -> torch.Tensor:
        scoring = Scoring(sieve, setup.model, space, setup.train, setup.autocast, 0)
        return scoring.summed("fisher", active, number, rows, "s")[0]

    first = scored(active, 0)
    later = scored(active, 1)
    assert torch.equal(first, scored(Mask.ones(space), 0))
    space.write(setup.model, torch.where(may & ~active.to_bool(), 0.1 * weights, weights))
    torch.testing.assert_close(scored(Mask.ones(space), 0), later)
    assert not torch.allclose(first, later)


def test_scored_images_are_a_random_sample_without_repeats(tiny, monkeypatch):
    """Files are often sorted by class, so the first images would all be of one class."""
    seen, batch = [], Feed.batch

    def noting(self, examples, draws=None):
        seen.append(examples.tolist())
        return batch(self, examples, draws)

    monkeypatch.setattr(Feed, "batch", noting)
    drawn = []
    for seed in (3, 4):
        seen.clear()
        setup, _ = mask_for(tiny, "{fisher: {samples: 100}}", f"seed={seed}")
        drawn.append([example for examples in seen for example in examples])
        assert len(set(drawn[-1])) == len(drawn[-1]) == 100
        assert 0.35 < np.mean(drawn[-1]) / len(setup.train) < 0.65
    assert len(set(drawn[0]) & set(drawn[1])) < 30


@pytest.mark.parametrize("scale", ["ranks", "max"])
def test_hybrid_scores_use_alpha_and_scale_among_active_weights_only(tiny, scale):
    setup, sieve, space = sieved(tiny, f"{{rule: high_hybrid, alpha: 0.3, scale: {scale}}}")
    source = torch.Generator().manual_seed(0)
    sensitivity, active = torch.rand(space.size, generator=source), torch.rand(space.size, generator=source) < 0.5
    score = Scoring(sieve, setup.model, space, setup.train, setup.autocast, 0).scores(lambda *_: sensitivity, "s")
    found = score(Mask.from_bool(space, active), 1)
    parts = [sensitivity[active].numpy(), space.read(setup.model).abs()[active].numpy()]
    if scale == "ranks":
        parts = [(rankdata(part) - 1) / (len(part) - 1) for part in parts]
    else:
        parts = [part / part.max() for part in parts]
    np.testing.assert_allclose(found[active].numpy(), 0.3 * parts[0] + 0.7 * parts[1], rtol=1e-5)


def test_a_mask_of_another_model_is_refused(tiny):
    _, mask = mask_for(tiny, "{rule: random, sparsity: 0.5}")
    other = prepare(tiny(SPARSE, "mask={rule: random}", "model.options.embed_dim=20"), quiet())
    with pytest.raises(FedsieveError):
        CentralStage(other, other.experiment.stages[0], mask=mask)


def test_a_mask_of_ones_trains_like_no_mask(tiny):
    ends = []
    for ones in (True, False):
        setup = prepare(tiny(SPARSE, "mask={rule: random}"), quiet())
        space = setup.space(setup.experiment.stages[0])
        ticks = CentralStage(setup, setup.experiment.stages[0], mask=Mask.ones(space) if ones else None).ticks()
        list(ticks)
        ends.append(space.read(setup.model))
    assert torch.equal(*ends)

import pytest
import torch
from tests.train.test_loop import quiet

from fedsieve.errors import FedsieveError
from fedsieve.mask.calibration import RULES
from fedsieve.mask.mask import Mask
from fedsieve.runner.setup import fit_stage, prepare
from fedsieve.train.sieve import make_mask

SPARSE = "stages=[{name: s, train: backbone, sparse: true, epochs: 2, batch_size: 300, optimizer: {lr: 0.1, weight_decay: 0.01}}]"


def mask_for(tiny, sieve: str, *overrides: str):
    experiment = tiny(SPARSE, f"mask={sieve}", *overrides)
    setup = prepare(experiment, quiet())
    stage = experiment.stages[0]
    settings = experiment.mask_of(stage)
    space = setup.space(stage)
    return setup, make_mask(settings, setup.model, space, setup.train, experiment.seed, stage.name, setup.autocast)


@pytest.mark.parametrize("rule", RULES)
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
    _, state, ticks = fit_stage(setup, setup.experiment.stages[0], mask=mask)
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


def test_a_mask_of_another_model_is_refused(tiny):
    _, mask = mask_for(tiny, "{rule: random, sparsity: 0.5}")
    other = prepare(tiny(SPARSE, "mask={rule: random}", "model.options.embed_dim=20"), quiet())
    with pytest.raises(FedsieveError):
        fit_stage(other, other.experiment.stages[0], mask=mask)


def test_a_mask_of_ones_trains_like_no_mask(tiny):
    ends = []
    for ones in (True, False):
        setup = prepare(tiny(SPARSE, "mask={rule: random}"), quiet())
        space = setup.space(setup.experiment.stages[0])
        _, _, ticks = fit_stage(setup, setup.experiment.stages[0], mask=Mask.ones(space) if ones else None)
        list(ticks)
        ends.append(space.read(setup.model))
    assert torch.equal(*ends)

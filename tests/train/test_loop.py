import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from fedsieve.data.transforms import Transform
from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.randomness import generator
from fedsieve.runner.prepare import prepare
from fedsieve.runner.progress import Display
from fedsieve.runner.stages import CentralStage
from fedsieve.train.loop import measure
from fedsieve.train.schedule import learning_rate

ONE = "stages=[{name: s, train: all, epochs: 3, batch_size: 300, warmup_epochs: 1, optimizer: {lr: 0.1, weight_decay: 1e-3}}]"


def quiet() -> Display:
    return Display(Console(), quiet=True)


def records(experiment, watch=dict):
    setup = prepare(experiment, quiet())
    stage = CentralStage(setup, experiment.stages[0], None, watch)
    space, state, ticks = stage.space, stage.state, stage.ticks()
    return setup, space, state, [tick.record for tick in ticks if tick.record]


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["data.transform=crop_flip"],
        ["stages.s.optimizer.nesterov=true"],
        ["stages.s.optimizer.clip_norm=0.5"],
        ["stages.s.optimizer={kind: adamw, lr: 0.1, weight_decay: 1e-3, momentum: 0.7, beta2: 0.8}"],
    ],
)
def test_the_loop_equals_a_plain_one_written_out(tiny, extra):
    """The reference: torch's own modules, optimizer and scheduler-free loop, one tensor at a time."""
    experiment = tiny(ONE, "data.val_fraction=0", *extra)
    stage = experiment.stages[0]
    setup, space, _, found = records(experiment)

    reference = prepare(experiment, quiet())
    settings = stage.optimizer
    shared = {"lr": 0, "weight_decay": 1e-3, "foreach": False}
    if settings.kind == "adamw":
        optimizer = torch.optim.AdamW(reference.model.parameters(), betas=(0.7, 0.8), **shared)
    else:
        optimizer = torch.optim.SGD(reference.model.parameters(), momentum=0.9, nesterov=settings.nesterov, **shared)
    images, labels = reference.train.store.images, reference.train.labels
    per_epoch = math.ceil(len(labels) / 300)
    for epoch in range(3):
        order = generator(3, "order", "s", epoch).permutation(len(labels))
        draws = torch.from_numpy(reference.transform.draw(generator(3, "augment", "s", epoch), len(labels), 8, 8))
        losses = []
        for step in range(per_epoch):
            rows = torch.from_numpy(order[300 * step : 300 * (step + 1)])
            batch = images[torch.from_numpy(reference.train.rows)[rows]]
            inputs = reference.transform.train(batch, draws[rows])
            done = epoch * per_epoch + step
            rate = 0.1 * (done + 1) / per_epoch
            if epoch:
                rate = 0.05 * (1 + math.cos(math.pi * (done - per_epoch) / (2 * per_epoch)))
            optimizer.param_groups[0]["lr"] = rate
            loss = F.cross_entropy(reference.model(inputs), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            if settings.clip_norm:
                torch.nn.utils.clip_grad_norm_(reference.model.parameters(), settings.clip_norm)
            optimizer.step()
            losses.append(loss.item() * len(rows))
        assert found[epoch]["train_loss"] == pytest.approx(sum(losses) / len(labels), rel=1e-5)
    difference = (space.read(setup.model) - space.read(reference.model)).norm() / space.read(reference.model).norm()
    # Without clipping the arithmetic is the same; with it, the norm is summed in another order.
    assert difference < (1e-5 if settings.clip_norm else 1e-9)


def test_rescaling_gives_a_masked_step_the_length_of_a_dense_one(tiny):
    """One step on all images without momentum moves by the rate times the gradient."""
    one = "stages=[{name: s, train: all, epochs: 1, batch_size: 5000, optimizer: {lr: 0.1, momentum: 0%s}}]"
    steps = {}
    for sparse, rescale in ((False, ""), (True, ", rescale: 1000"), (True, "")):
        experiment = tiny(one % rescale, "data.val_fraction=0")
        setup = prepare(experiment, quiet())
        space = setup.space(experiment.stages[0])
        before = space.read(setup.model)
        mask = Mask.from_bool(space, torch.arange(space.size) % 3 == 0) if sparse else None
        ticks = CentralStage(setup, experiment.stages[0], mask=mask).ticks()
        list(ticks)
        steps[sparse, bool(rescale)] = space.read(setup.model) - before
    dense, masked, rescaled = steps[False, False], steps[True, False], steps[True, True]
    assert masked.norm() < 0.9 * dense.norm()
    torch.testing.assert_close(rescaled, masked * (dense.norm() / masked.norm()), rtol=1e-3, atol=1e-6)


def test_features_computed_once_train_like_images_every_epoch(tiny, monkeypatch):
    experiment = tiny("stages=[{name: s, train: head, epochs: 4, batch_size: 300, optimizer: {lr: 0.1}}]")
    setup, space, _, once = records(experiment)
    # The slow way: pretend the transform is random, with nothing to draw, so that the backbone runs at every step.
    monkeypatch.setattr(Transform, "random", property(lambda self: True))
    monkeypatch.setattr(Transform, "draw", lambda self, rng, count, *_: np.zeros((count, 0), np.float32))
    monkeypatch.setattr(Transform, "train", lambda self, images, _: self.evaluate(images))
    slow, _, _, every = records(experiment)
    for one, two in zip(once, every, strict=True):
        assert one["train_loss"] == pytest.approx(two["train_loss"], rel=1e-4)
        assert one["val_accuracy"] == two["val_accuracy"]
    assert torch.allclose(space.read(setup.model), space.read(slow.model), atol=1e-5)


def test_the_chosen_epoch_is_the_first_best_on_validation(tiny, monkeypatch):
    scores = iter([0.2, 0.5, 0.5, 0.4])
    monkeypatch.setattr("fedsieve.runner.setup.evaluate", lambda *_: {"val_accuracy": next(scores), "val_loss": 1.0})
    setup = prepare(tiny(ONE, "stages.s.epochs=4"), quiet())
    stage = CentralStage(setup, tiny(ONE, "stages.s.epochs=4").stages[0])
    space, state, ticks = stage.space, stage.state, stage.ticks()
    kept = [space.read(setup.model) for tick in ticks if tick.record]
    assert state.best_at == 2
    assert torch.equal(space.read(setup.model), kept[1])


def test_early_stopping_waits_as_long_as_asked(tiny, monkeypatch):
    scores = iter([0.2, 0.5, 0.4, 0.3, 0.9])
    monkeypatch.setattr("fedsieve.runner.setup.evaluate", lambda *_: {"val_accuracy": next(scores), "val_loss": 1.0})
    _, _, state, found = records(tiny(ONE, "stages.s.epochs=9", "stages.s.early_stopping=2"))
    assert (len(found), state.best_at, state.done) == (4, 2, True)


def test_without_validation_the_last_epoch_counts(tiny):
    _, _, state, found = records(tiny(ONE, "data.val_fraction=0"))
    assert state.best is None and state.best_at == 3
    assert "val_accuracy" not in found[0]


def test_what_is_watched_is_never_selected_on(tiny):
    values = iter([0.9, 0.1, 0.1])
    _, _, one, found = records(tiny(ONE), lambda: {"test_accuracy": next(values)})
    _, _, two, _ = records(tiny(ONE))
    assert [record["test_accuracy"] for record in found] == [0.9, 0.1, 0.1]
    assert one.best_at == two.best_at


def test_a_loss_that_is_not_finite_ends_with_advice(tiny):
    with pytest.raises(FedsieveError, match="diverged.*optimizer.lr"):
        records(tiny(ONE, "stages.s.optimizer.lr=1e30", "stages.s.epochs=5"))


def test_bf16_trains_to_nearly_the_same(tiny):
    full, half = (records(tiny(ONE, f"precision={precision}"))[3] for precision in ("fp32", "bf16"))
    assert full[0]["train_loss"] != half[0]["train_loss"]
    assert full[-1]["train_loss"] == pytest.approx(half[-1]["train_loss"], rel=0.02)


def test_a_mapped_store_trains_to_the_same_weights(tiny):
    ends = []
    for placement in ("device", "mapped"):
        setup, space, _, _ = records(tiny(ONE, f"data.placement={placement}"))
        ends.append(space.read(setup.model))
    assert torch.equal(*ends)


def test_the_schedule_climbs_then_falls():
    rates = [learning_rate(step, 100, 2.0, "cosine", 10) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and max(rates) == rates[9] == rates[10] == 2.0
    assert (np.diff(rates[10:]) < 0).all() and 0 < rates[-1] < 0.01
    assert learning_rate(55, 100, 2.0, "cosine", 10) == pytest.approx(1.0)
    assert {learning_rate(step, 100, 2.0, "constant") for step in range(100)} == {2.0}


def test_measure_agrees_with_the_definition():
    logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 0, 0])
    found = measure(logits, labels, "val")
    expected = sum(math.log(1 + math.exp(gap)) for gap in (-2, 1, -3)) / 3
    assert found == {"val_loss": pytest.approx(expected), "val_accuracy": pytest.approx(2 / 3)}

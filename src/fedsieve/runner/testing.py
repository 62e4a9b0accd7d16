"""Measuring models on test images: at the end of a run, once, and later on other data."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config import Stage, parse_config, to_yaml
from fedsieve.data.image_tables import Split
from fedsieve.data.partitions import client_accuracies
from fedsieve.data.sources import load_images
from fedsieve.data.store import to_rows
from fedsieve.data.transforms import make_transform
from fedsieve.errors import FedsieveError
from fedsieve.federation.personal import PersonalModels, chosen_clients
from fedsieve.federation.state import ServerContext
from fedsieve.files import write_atomic
from fedsieve.mask.mask import Mask
from fedsieve.randomness import generator
from fedsieve.report.summary import StageSummary
from fedsieve.runner.environment import choose_device, make_autocast
from fedsieve.runner.federated import CLIENTS, client_summary, personal_summary
from fedsieve.runner.journal import RunState
from fedsieve.runner.meeting import Tested, test_at_nodes
from fedsieve.runner.model_files import load_model
from fedsieve.runner.setup import Setup, featured, open_split
from fedsieve.runner.stages import Venue, Watch
from fedsieve.train.feed import Examples, Feed
from fedsieve.train.loop import measure, predict

SAMPLES = 48  # test images kept for the page
# What a model can be measured on; anything else in a config made the model, and changing it would change nothing.
MEASURABLE = {
    "source",
    "subset",
    "revision",
    "image_column",
    "label_column",
    "train_split",
    "test_split",
    "placement",
    "cache",
}


def predictor(setup: Setup, stage: Stage, test: Examples) -> Callable[[], Tensor]:
    """Gives the logits of the model as it is then; where only a head trains, of features that are computed once."""
    forward: nn.Module = setup.model
    if stage.train == "head" and isinstance(test, Feed):
        forward, [test] = setup.classifier.head, featured(setup, "test", test)
    return lambda: predict(forward, test, setup.autocast)


def watcher(setup: Setup, stage: Stage, test: Examples | None) -> Watch:
    """Measures the model on `test`, where the experiment asks for test curves."""
    if test is None:
        return dict
    labels, predicted = test.labels, predictor(setup, stage, test)
    return lambda: measure(predicted(), labels, "test", setup.recipe)


def test_stages(setup: Setup, state: RunState, test: Examples | None) -> tuple[dict[str, StageSummary], Tensor]:
    """The stages' summaries with what their chosen weights make of `test`, and the final model's logits.

    The model has its first weights; the stages' chosen weights are laid on it one after the other.
    """
    stages, logits = {}, torch.empty(0)
    for stage, theta in zip(setup.experiment.stages, state.chosen, strict=True):
        setup.space(stage).write(setup.model, theta)
        found: dict[str, float] = {"test_loss": math.nan, "test_accuracy": math.nan}
        if test is not None:
            logits = predictor(setup, stage, test)()
            found |= measure(logits, test.labels, "test", setup.recipe)
        # A model that diverged in its very last step has a loss no JSON reader takes.
        sound = {key: found[key] if math.isfinite(found[key]) else None for key in ("test_loss", "test_accuracy")}
        stages[stage.name] = StageSummary(**sound, **state.finished[stage.name].content())
    return stages, logits


def test_clients(
    setup: Setup, venue: Venue, final: Tensor, correct: np.ndarray | None, test: Examples | None
) -> tuple[dict[str, Any], Tested]:
    """Test the final model and personal ones on clients; nodes test on their own images.

    `final` has the bits of the last stage's mask, and `correct` (T,) what the model got right of `test`.
    """
    context = venue.context
    assert context is not None
    people, own, stage = context.population, context.experiment.own_images, context.experiment.stages[-1]
    personal, sieve = people.settings.personal, context.experiment.mask_of(stage)
    shared = sieve is not None and sieve.scope != "client"
    mask = Mask(setup.space(stage), final.numpy()) if personal and shared else None
    chosen = chosen_clients(people, personal.clients) if personal else np.arange(0)
    tested, models = Tested(), dict[str, np.ndarray]()
    if venue.registry and (own or personal):
        tested = test_at_nodes(context, venue.registry, stage, mask, chosen)
        accuracy, models = tested.accuracy, tested.personal
    if not own:
        assert correct is not None and test is not None
        accuracy = client_accuracies(correct, test.labels.cpu().numpy(), people.counts, len(people))
    if personal and not models:
        assert test is not None
        models = personal_accuracies(context, chosen, mask, test)
    described: dict[str, Any] = {"client_accuracy": client_summary(people, accuracy, venue.folder / CLIENTS)}
    if personal:
        models = {"global": accuracy[chosen], **models}
        described["personal"] = personal_summary(people, chosen, models, venue.folder)
    return described, tested


def personal_accuracies(
    context: ServerContext, chosen: np.ndarray, mask: Mask | None, test: Examples
) -> dict[str, np.ndarray]:
    """Accuracies (clients,) of personal models in this process, by method."""
    personal = context.population.settings.personal
    assert personal is not None
    made = PersonalModels(context, chosen, mask, test)
    return {method: made.accuracies(method) for method in personal.methods}


def write_predictions(setup: Setup, logits: Tensor, test: Feed, file: Path) -> None:
    """Answers to the whole test set, and some of its pictures, for the page."""
    confidence, predicted = logits.softmax(1).max(1)
    sample = generator(setup.experiment.seed, "samples").permutation(len(test))[:SAMPLES]
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        labels=test.labels.cpu().numpy(),
        predicted=predicted.cpu().numpy(),
        confidence=confidence.cpu().numpy().astype(np.float16),
        class_names=np.array(setup.class_names),
        sample_rows=sample,
        sample_images=test.store.batch(to_rows(test.rows[sample])).cpu().numpy(),
    )
    write_atomic(file, buffer.getvalue())


def evaluate(folder: Path, overrides: list[str], split: Split | None) -> dict[str, Any]:
    """Accuracy and loss of a finished run's model; `overrides` may change where the data is, and the device.

    Without a `split`: the test split; where other data than the run's has none, all of it.
    """
    experiment, model, metadata = load_model(folder)
    changed = parse_config(to_yaml(experiment), overrides, where=str(folder / "config.yaml"))
    for override in overrides:
        head, _, key = override.partition("=")[0].strip().partition(".")
        if (head, key) not in {("device", ""), ("precision", "")} and not (head == "data" and key in MEASURABLE):
            allowed = ", ".join(["device", "precision", *(f"data.{name}" for name in sorted(MEASURABLE))])
            raise FedsieveError(
                f"evaluate: {override} cannot be changed: the model was made with it. Allowed: {allowed}"
            )
    device = choose_device(changed.device)
    transform = make_transform(changed.data, metadata["mean"], metadata["std"])
    parts: list[Split] = [split or "test"]
    elsewhere = changed.data.source != experiment.data.source
    if split is None and elsewhere and load_images(changed.data, "test").whole:
        parts = ["train", "test"]
    feeds = [open_split(changed.data, part, metadata["class_names"], transform, device) for part in parts]
    model, autocast = model.to(device), make_autocast(changed, device)
    logits = torch.cat([predict(model, feed, autocast) for feed in feeds])
    found = measure(logits, torch.cat([feed.labels for feed in feeds]), "x")
    return {
        "source": changed.data.source,
        "split": "all of it" if len(parts) == 2 else parts[0],
        "accuracy": found["x_accuracy"],
        "loss": found["x_loss"],
        "images": len(logits),
    }

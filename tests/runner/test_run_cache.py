"""Runs that share what they load must give what runs alone give."""

import functools
import json

import pytest
import safetensors.torch
import torch

from fedsieve.errors import FedsieveError
from fedsieve.model.weights import load_classifier
from fedsieve.runner import run_cache as module
from fedsieve.runner import setup
from fedsieve.runner.preflight import preflight
from fedsieve.runner.run import run
from fedsieve.runner.run_cache import RunCache
from fedsieve.runner.testing import evaluate
from fedsieve.train.feed import with_features

FEDERATED = (
    "federation={clients: 6, cohort: 0.5}",
    "mask={rule: high_magnitude, sparsity: 0.5, scope: client}",
    "stages=[{name: head, train: head, rounds: 1}, {name: backbone, train: backbone, sparse: true, rounds: 2}]",
)
CENTRAL = ("mask={rule: random, sparsity: 0.5}", "stages.backbone.sparse=true")


def results(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timeless = [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in records]
    return timeless, json.loads((folder / "summary.json").read_text())["test_loss"]


def test_sharing_changes_no_result(tiny, tmp_path):
    cache = RunCache()
    for number, overrides in enumerate([CENTRAL, FEDERATED, (*CENTRAL, "seed=4")]):
        run(tiny(*overrides), tmp_path / f"shared-{number}", cache=cache, page=False)
        run(tiny(*overrides), tmp_path / f"alone-{number}", page=False)
        assert results(tmp_path / f"shared-{number}") == results(tmp_path / f"alone-{number}")


def test_images_are_read_and_networks_are_built_once(tiny, tmp_path, monkeypatch):
    counts = {"load_images": 0, "load_classifier": 0}
    for name in counts:
        real = getattr(module, name)

        def counting(*arguments, real=real, name=name):
            counts[name] += 1
            return real(*arguments)

        monkeypatch.setattr(module, name, counting)
    cache = RunCache()
    for number, overrides in enumerate([CENTRAL, FEDERATED, FEDERATED]):
        run(tiny(*overrides), tmp_path / str(number), cache=cache, page=False)
    assert counts == {"load_images": 2, "load_classifier": 1}  # two splits, one network
    assert not (tmp_path / "0" / "report.html").exists()


def test_of_keys_that_begin_alike_only_the_latest_last():
    cache, made = RunCache(), []

    def ask(*key):
        return cache.once(key, lambda: made.append(key), most=2 if key[0] == "few" else None)

    for key in [("few", 1), ("few", 2), ("many", 1), ("few", 1), ("few", 3), ("few", 1), ("many", 1), ("few", 2)]:
        ask(*key)
    assert made == [("few", 1), ("few", 2), ("many", 1), ("few", 3), ("few", 2)]


HEAD = ("stages=[{name: head, train: head, epochs: 3}]", "data.transform=resize", "test_curve=true")


def test_a_frozen_backbone_sees_every_image_once_whatever_is_held_out(tiny, tmp_path, monkeypatch):
    seen = []

    def counting(feed, *arguments):
        seen.append(len(feed))
        return with_features(feed, *arguments)

    tensors = load_classifier(tiny().model, 10, 8, 0).backbone.state_dict()
    safetensors.torch.save_file(tensors, tmp_path / "weights.safetensors")
    pretrained = f"model.weights={tmp_path / 'weights.safetensors'}"
    changes = [(), ("stages.head.optimizer.lr=0.01",), ("seed=4",), ("seed=4", "data.val_fraction=0")]
    with monkeypatch.context() as patch:
        patch.setattr(setup, "with_features", counting)
        cache = RunCache()
        for number, change in enumerate(changes):
            run(tiny(*HEAD, pretrained, *change), tmp_path / f"shared-{number}", cache=cache, page=False)
    assert seen == [359, 1438]  # test, and train with validation, for four runs of three epochs
    for number, change in enumerate(changes):
        run(tiny(*HEAD, pretrained, *change), tmp_path / f"alone-{number}", page=False)
        assert results(tmp_path / f"shared-{number}") == results(tmp_path / f"alone-{number}")


def test_a_head_is_tested_as_the_whole_model_is(tiny, tmp_path):
    run(tiny(*HEAD), tmp_path / "run", page=False)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    whole = evaluate(tmp_path / "run", [], "test")
    assert (whole["accuracy"], whole["loss"]) == (
        summary["test_accuracy"],
        pytest.approx(summary["test_loss"], rel=1e-6),
    )


def test_a_mask_that_cannot_be_made_is_refused_whatever_was_checked_before(tiny):
    """What is checked once for many rows must tell apart all that decides it."""
    cache = RunCache()
    preflight(tiny(*CENTRAL), cache)
    for impossible in ("mask.sparsity=0.999999", "mask.min_active_per_tensor=100000"):
        for _ in range(2):
            with pytest.raises(FedsieveError):
                preflight(tiny(*CENTRAL, impossible), cache)


def test_a_network_that_one_run_changed_is_new_for_the_next(tiny):
    config, cache = tiny().model, RunCache()
    first = cache.classifier(config, 10, 8, 0)
    with torch.no_grad():
        first.head.bias += 1
    assert torch.equal(cache.classifier(config, 10, 8, 0).head.bias, first.head.bias - 1)


@pytest.mark.parametrize("change", ["data.size=16", "model.options.depth=1", "model.options.num_heads=4"])
def test_what_differs_is_not_taken_for_the_same(tiny, tmp_path, change):
    cache = RunCache()
    run(tiny(), tmp_path / "before", cache=cache, page=False)
    run(tiny(change), tmp_path / "shared", cache=cache, page=False)
    run(tiny(change), tmp_path / "alone", page=False)
    assert results(tmp_path / "shared") == results(tmp_path / "alone")


@pytest.mark.parametrize("speed", ["full", "blocks"])
def test_a_network_is_compiled_once_whatever_seed_mask_and_rate(tiny, tmp_path, monkeypatch, speed):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    cache = RunCache()
    stacked = ("executor=stacked", f"compile={speed}", "mask.scope=shared", "mask.kinds=all", "model.options.depth=4")
    changes = [(), ("seed=4",), ("mask.rule=random", "stages.backbone.optimizer.lr=0.01"), ("mask.scope=client",)]
    for number, change in enumerate(changes):
        run(tiny(*FEDERATED, *stacked, *change), tmp_path / str(number), cache=cache, page=False)
    # The other graphs are heads on features, and what is around blocks.
    attention = [sum("attention" in str(node.target) for node in graph.graph.nodes) for graph in graphs]
    assert sorted(filter(None, attention)) == [4 if speed == "full" else 1]
    assert len(graphs) <= (2 if speed == "full" else 6)
    run(tiny(*FEDERATED, *stacked, "compile=eager"), tmp_path / "eager", page=False)
    losses = [[row["train_loss"] for row in results(tmp_path / name)[0]] for name in ("0", "eager")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)

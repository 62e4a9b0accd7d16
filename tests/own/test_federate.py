"""The Python API: a user's own model and data, trained round by round."""

import copy
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.own.conftest import CLIENTS, SIZE, Small, weights

import fedsieve as fs
from fedsieve.config import make_experiment
from fedsieve.errors import FedsieveError
from fedsieve.model.weights import FINAL


def test_training_learns_and_leaves_the_users_module_as_it_was(start, model, data):
    before = copy.deepcopy(model.state_dict())
    fed = start(validation=data)
    first = fed.evaluate()
    records = list(fed.rounds(20))
    assert fed.evaluate().loss < 0.7 * first.loss and fed.evaluate().accuracy > first.accuracy
    assert [record.round for record in records] == list(range(1, 21)) and fed.history == records
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert sum(record.bytes_up for record in records) == fed.ledger.total["up"] > 0
    assert "round 20" in repr(fed) and "<table>" in fed._repr_html_()


def test_nothing_trains_before_it_is_iterated(start):
    fed = start()
    before = weights(fed)
    fed.rounds(3)
    assert torch.equal(weights(fed), before) and fed.round == 0


def test_steps_one_by_one_are_those_of_one_call(start):
    once, single = start(), start()
    once.train(6)
    for _ in range(6):
        single.train(1)
    assert torch.equal(weights(once), weights(single))


MASKED = {"mask": fs.Sieve(rule="high_hybrid", sparsity=0.5), "message": fs.Message(up="int8", down="fp16")}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        MASKED,
        {"server": fs.Server(optimizer="adam", lr=0.05)},
        {"correction": "scaffold"},
        {"mask": fs.Sieve(rule="random", sparsity=0.5), "message": fs.Message(up="int8", error_feedback=True)},
    ],
    ids=["plain", "masked", "adam", "scaffold", "feedback"],
)
def test_a_saved_federation_continues_to_the_same_bits(start, model, data, tmp_path, changes):
    whole, part = start(**changes), start(**changes)
    whole.train(7)
    part.train(3)
    part.save(tmp_path / "saved")
    part.train(2)  # does not touch what was saved
    loaded = fs.Federated.load(tmp_path / "saved", model, train=data)
    assert loaded.round == 3 and len(loaded.history) == 3
    loaded.train(4)
    assert torch.equal(weights(loaded), weights(whole))
    assert loaded.ledger.total == whole.ledger.total


def test_a_saved_federation_refuses_other_data_and_other_weights(start, model, data, tmp_path):
    fed = start()
    fed.train(1)
    fed.save(tmp_path / "saved")
    with pytest.raises(FedsieveError, match="train is not what this run began with"):
        fs.Federated.load(tmp_path / "saved", model, train=(data[0] + 1, data[1]))
    with pytest.raises(FedsieveError, match="model is not what this run began with"):
        fs.Federated.load(tmp_path / "saved", Small(), train=data)
    with pytest.raises(FedsieveError, match="exists already"):
        fed.save(tmp_path / "saved")


YAML = {
    "name": "same", "seed": 3, "device": "cpu", "tracking": [], "test": False,
    "data": {"source": "digits", "size": 8, "normalize": "half", "val_fraction": 0.0},
    "model": {
        "backbone": "vit_tiny_patch16_224", "weights": "none",
        "options": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
    },
    "federation": {
        "clients": CLIENTS, "cohort": 3, "partition": {"kind": "dirichlet", "alpha": 0.5},
        "server": {"optimizer": "momentum", "lr": 0.5},
    },
    "message": {"up": "int8", "down": "fp16"},
    "mask": {"rule": "high_hybrid", "sparsity": 0.8},
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_yaml_and_python_are_two_spellings_of_one_thing(tmp_path, schedule):
    """The bits are the same, of weights and of the ledger."""
    from fedsieve.runner.prepare import prepare
    from fedsieve.runner.progress import Display

    stage = {"name": "train", "train": "all", "rounds": 4, "local": {"steps": 2, "batch_size": 8}, "sparse": True}
    stage |= {"optimizer": {"lr": 0.1, "momentum": 0.9}, "schedule": schedule}
    experiment = make_experiment(YAML | {"stages": [stage]})
    fs.run(experiment, tmp_path / "run", page=False)
    setup = prepare(experiment, Display.silent())
    images, labels = setup.train.batch(np.arange(len(setup.train)))
    shards = fs.partition(labels, clients=CLIENTS, kind="dirichlet", alpha=0.5, seed=3)
    fed = fs.federate(
        setup.model, train=(images, labels), clients=shards, cohort=3, mode="eval", rounds=4, schedule=schedule, seed=3,
        mask=fs.Sieve(rule="high_hybrid", sparsity=0.8), local=fs.Local(steps=2, batch_size=8),
        optimizer=fs.SGD(lr=0.1, momentum=0.9), server=fs.Server(optimizer="momentum", lr=0.5),
        message=fs.Message(up="int8", down="fp16"), device="cpu",
    )  # fmt: skip
    fed.train()
    written = load_file(tmp_path / "run" / FINAL)
    assert all(torch.equal(value, written[name]) for name, value in fed.model.state_dict().items())
    fed.ledger.sync()
    assert fed.ledger.path.read_text() == (tmp_path / "run" / "ledger.csv").read_text()


def test_settings_change_between_rounds(start):
    fed, same = start(), start()
    fed.train(3)
    same.train(3)
    fed.lr = 0.02
    fed.cohort = 2
    assert torch.equal(weights(fed), weights(same)) and (fed.lr, fed.cohort) == (0.02, 2)
    [record] = fed.rounds(1)
    assert record.lr == 0.02 and record.cohort == 2 and record.round == 4
    fed.mask = fs.Sieve(rule="high_magnitude", sparsity=0.9)
    before = weights(fed)
    fed.train(2)
    assert (weights(fed) != before).sum() <= fed.mask.count < 0.2 * len(before)


def test_a_finished_mask_decides_what_trains(start, model):
    space = fs.ParamSpace.of(model)
    mask = fs.Mask.from_bool(space, torch.arange(space.size) % 3 == 0)
    fed = start(mask=mask)
    before = weights(fed)
    fed.train(3)
    moved = weights(fed) != before
    assert fed.mask == mask and moved.any() and not moved[~mask.to_bool()].any()


def test_only_chosen_parameters_train(start):
    for trains in ("head.", ["head.weight", "head.bias"], lambda name: name.startswith("head")):
        fed = start(trains=trains)
        before = {name: value.clone() for name, value in fed.model.state_dict().items()}
        fed.train(2)
        moved = {name for name, value in fed.model.state_dict().items() if not torch.equal(value, before[name])}
        assert moved == {"head.weight", "head.bias"}
    with pytest.raises(FedsieveError, match="no parameter's name begins with 'haed.'"):
        start(trains="haed.")
    with pytest.raises(FedsieveError, match=r"no parameter 'head.wieght'.*head.weight"):
        start(trains=["head.wieght"])


def test_clients_are_refused_that_do_not_hold_every_example_once(start, data):
    with pytest.raises(FedsieveError, match="example 5 is given to 2 clients"):
        start(cohort=1, clients=[np.arange(SIZE), np.array([5])])
    with pytest.raises(FedsieveError, match="belong to nobody"):
        start(cohort=1, clients=[np.arange(10), np.arange(10, 20)])
    with pytest.raises(FedsieveError, match="they hold"):
        start(clients=fs.partition(data[1][:50], clients=4))


def test_a_wrong_word_is_answered_with_those_that_work(start):
    with pytest.raises(FedsieveError, match=r"'medain' is not allowed. Did you mean \"median\"\?"):
        start(aggregator="medain")
    with pytest.raises(FedsieveError, match=r"rounds: say how many"):
        next(start().rounds())


def test_importing_fedsieve_does_not_import_torch():
    code = "import sys, fedsieve as fs; fs.SGD(lr=0.1); fs.Sieve(); fs.register; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.stdout == "False\n", done.stderr


def test_statistics_that_nothing_protects_are_refused(start):
    with pytest.raises(FedsieveError, match="secagg does not hide"):
        start(statistics="federated", privacy=fs.Privacy(aggregation="secagg"))
    with pytest.raises(FedsieveError, match=r"'fedrated' is not allowed. Did you mean \"federated\"\?"):
        start(statistics="fedrated")


@pytest.mark.parametrize("statistics", ["federated", "local"])
def test_running_statistics_and_dropout_continue_to_the_same_bits(start, data, tmp_path, statistics):
    torch.manual_seed(2)
    layers = torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4)
    model = torch.nn.Sequential(*layers)
    whole, part = start(model=model, statistics=statistics), start(model=model, statistics=statistics)
    whole.train(5)
    part.train(2).save(tmp_path / "saved")
    loaded = fs.Federated.load(tmp_path / "saved", model, train=data).train(3)
    assert torch.equal(weights(loaded), weights(whole))
    moved = not torch.equal(loaded.model[1].running_mean, model[1].running_mean)
    assert moved == (statistics == "federated")


def test_a_mask_that_waits_for_its_round_survives_other_changes(start, model):
    mask = fs.Mask.from_bool(fs.ParamSpace.of(model), torch.arange(180) % 3 == 0)
    fed = start(mask=mask)
    fed.lr = 0.03
    fed.cohort = 2
    assert fed.mask == mask
    before = weights(fed)
    fed.train(1)
    assert not (weights(fed) != before)[~mask.to_bool()].any()


def test_frozen_parameters_stay_frozen(start, model):
    model.body.requires_grad_(False)
    fed = start().train(2)
    assert torch.equal(fed.model.body[0].weight, model.body[0].weight)
    assert not torch.equal(fed.model.head.weight, model.head.weight)
    with pytest.raises(FedsieveError, match="nothing can train"):
        start(model=model.requires_grad_(False))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fs.Sieve(rule="magnitude"), "Sieve: rule: 'magnitude' is not allowed. Did you mean"),
        (lambda: fs.Local(steps=1, epochs=1), "Local: local work is counted in epochs or in steps"),
        (lambda: fs.SGD(lr=-1), "SGD: lr: should be greater than 0, got -1"),
        (lambda: fs.SGD(rate=1), "SGD: rate: unknown key. Allowed: kind, lr"),
        (lambda: fs.Server(optimizer="adm"), "Server: optimizer: 'adm' is not allowed. Did you mean \"adam\""),
    ],
)
def test_wrong_settings_are_refused_in_the_words_of_a_config(make, words):
    with pytest.raises(FedsieveError) as caught:
        make()
    assert words in str(caught.value)


def test_what_cannot_be_accounted_or_hidden_is_refused_before_training(start):
    private = fs.Privacy(dp={"epsilon": 8.0, "delta": 1e-3, "clip_norm": 0.5})
    with pytest.raises(FedsieveError, match="give rounds="):
        start(privacy=private, federation={"weighting": "uniform"})
    fed = start(privacy=fs.Privacy(aggregation="secagg", bound=0.25))
    with pytest.raises(FedsieveError, match="at least 3 clients"):
        fed.cohort = 1
    with pytest.raises(FedsieveError, match="lr: should be greater than 0"):
        fed.lr = 0
    with pytest.raises(FedsieveError, match="whole number"):
        next(fed.rounds(-1))


def test_labels_that_are_no_classes_are_not_dealt_by_class():
    with pytest.raises(FedsieveError, match="labels must be whole numbers"):
        fs.partition(torch.rand(20), clients=4, kind="dirichlet", alpha=1.0)
    assert len(fs.partition(torch.rand(20), clients=4)) == 4


@pytest.mark.parametrize("name", ["config.yaml", "clients.npz", "federate.json"])
def test_a_damaged_saved_folder_is_refused_by_name(start, model, data, tmp_path, name):
    start().train(1, callbacks=lambda fed, record: None).save(tmp_path / "saved")
    file = tmp_path / "saved" / name
    file.write_bytes(file.read_bytes()[:30])
    with pytest.raises(FedsieveError, match="saved"):
        fs.Federated.load(tmp_path / "saved", model, train=data)


def test_what_is_no_model_and_no_clients_is_refused(start):
    with pytest.raises(FedsieveError, match="clients: give what"):
        start(clients=5)
    with pytest.raises(FedsieveError, match="model: give an instance"):
        start(model=Small)

"""A user's own pieces in the place of a word: each does what it says, resumes, and is blamed by name when it fails."""

import numpy as np
import pytest
import torch
from tests.own.conftest import CLASSES, weights

import fedsieve as fs
from fedsieve.config import FAMILIES, parse_config
from fedsieve.errors import FedsieveError


def trimmed_by_norm(updates, weights, *, share: float = 0.8):
    """drops the updates with the largest norms"""
    keep = updates.norm(dim=1).argsort()[: max(1, int(share * len(updates)))]
    return (updates[keep] * weights[keep, None]).sum(0) / weights[keep].sum()


class Streaming(fs.Aggregator):
    def init(self, k):
        return {"sum": torch.zeros(k, dtype=torch.float64), "weight": 0.0}

    def add(self, state, update):
        state["sum"] += update.weight * update.values.double()
        state["weight"] += update.weight

    def finish(self, state, server):
        return state["sum"] / state["weight"]


class Warm(fs.ServerOptimizer):
    def init(self, theta):
        return {"v": torch.zeros_like(theta)}

    def step(self, theta, mean, state, lr):
        return lr * state["v"].mul_(0.9).add_(mean)


def largest_gradient(evidence):
    return evidence.gradient.abs()


def focal(outputs, labels):
    p = torch.log_softmax(outputs, -1).gather(-1, labels[..., None])[..., 0]
    return -((1 - p.exp()) ** 2) * p


class Distance(fs.Objective):
    def __call__(self, model, inputs, labels):
        return torch.nn.functional.cross_entropy(model(inputs), labels) + 0.01 * model(inputs).square().mean()


def backwards(update):
    return -update


def by_parity(labels, clients, rng):
    order = rng.permutation(len(labels))
    return [order[number::clients] for number in range(clients)]


def test_a_streaming_mean_is_the_built_in_one(start):
    plain, own = start(), start(aggregator=Streaming())
    plain.train(3)
    own.train(3)
    assert torch.equal(weights(plain), weights(own))


def test_a_function_of_all_updates_replaces_the_mean(start):
    def mean(updates, weights):
        return (updates.double() * weights[:, None]).sum(0) / weights.sum()

    plain, own, trimmed = start(), start(aggregator=mean), start(aggregator=trimmed_by_norm)
    for fed in (plain, own, trimmed):
        fed.train(3)
    assert torch.allclose(weights(plain), weights(own), atol=1e-6)
    assert not torch.allclose(weights(plain), weights(trimmed), atol=1e-4)


def test_a_server_optimizer_of_ones_own_is_momentum(start):
    built_in = start(server=fs.Server(optimizer="momentum", momentum=0.9, lr=0.5))
    own, faster = start(server=fs.Server(optimizer=Warm(), lr=0.5)), start(server=Warm())
    for fed in (built_in, own, faster):
        fed.train(4)
    assert torch.equal(weights(built_in), weights(own)) and not torch.equal(weights(own), weights(faster))


def test_a_mask_rule_sees_evidence_across_clients(start):
    own = start(mask=fs.Sieve(rule=largest_gradient, sparsity=0.7))
    built_in = start(mask=fs.Sieve(rule="gradient", sparsity=0.7))
    own.train(2)
    built_in.train(2)
    assert own.mask == built_in.mask and torch.equal(weights(own), weights(built_in))


@pytest.mark.parametrize("executor", ["sequential", "stacked"])
def test_an_objective_on_outputs_trains_in_every_executor(start, executor):
    fed, plain = start(objective=focal, executor=executor), start(executor=executor)
    fed.train(3)
    plain.train(3)
    assert not torch.equal(weights(fed), weights(plain))
    other = start(objective=focal, executor="sequential")
    other.train(3)
    assert torch.allclose(weights(fed), weights(other), atol=1e-5)


def test_an_objective_with_the_model_trains(start):
    fed = start(objective=Distance())
    before = fed.evaluate().loss
    fed.train(10)
    assert fed.evaluate().loss < before


def test_an_attack_of_ones_own_is_sent_by_hostile_clients(start):
    fed, plain = start(attack=backwards), start()
    fed.train(3)
    plain.train(3)
    assert not torch.equal(weights(fed), weights(plain))


def test_a_partition_of_ones_own_deals_the_examples(data, start):
    shards = fs.partition(data[1], clients=5, kind=by_parity, seed=1)
    assert sorted(np.concatenate([shards.client(k) for k in range(5)]).tolist()) == list(range(len(data[1])))
    assert start(clients=shards).train(1).round == 1


PIECES = {
    "aggregator": trimmed_by_norm, "server": Warm(), "objective": focal, "attack": backwards,
    "mask": fs.Sieve(rule=largest_gradient, sparsity=0.7),
}  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
def test_pieces_are_passed_again_to_a_saved_federation_and_it_continues_to_the_same_bits(
    name,
    start,
    model,
    data,
    tmp_path,
):
    whole, part = start(**{name: PIECES[name]}), start(**{name: PIECES[name]})
    whole.train(5)
    part.train(2).save(tmp_path / "saved")
    with pytest.raises(FedsieveError, match=f"pass {name}= again"):
        fs.Federated.load(tmp_path / "saved", model, train=data)
    loaded = fs.Federated.load(tmp_path / "saved", model, train=data, **{name: PIECES[name]})
    loaded.train(3)
    assert torch.equal(weights(loaded), weights(whole))


def wrong_shape(updates, weights):
    return updates[0][:2]


def raising(updates, weights):
    return updates[0] @ updates[0][:1]


def changing(updates, weights):
    updates[0] = 0
    return updates[1]


def no_number(updates, weights):
    return updates[0] * float("nan")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (wrong_shape, ["wrong_shape", "one update (k,)", "shape"]),
        (raising, ["raising", "RuntimeError", "updates[0] @ updates[0][:1]", "test_pieces.py"]),
        (changing, ["changing", "changed its input"]),
        (no_number, ["no_number", "not finite"]),
    ],
)
def test_a_function_that_fails_is_named_with_what_was_expected(start, function, words):
    with pytest.raises(FedsieveError) as caught:
        start(aggregator=function).train(1)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_cannot_work_with_a_piece_is_refused_before_training(start):
    with pytest.raises(FedsieveError, match="compares single updates"):
        start(aggregator=trimmed_by_norm, privacy=fs.Privacy(aggregation="secagg"))


@pytest.fixture
def registered():
    """The function as a word, for as long as a test takes."""
    fs.register("aggregator", "trimmed_by_norm")(trimmed_by_norm)
    yield
    del FAMILIES["aggregator"].words["trimmed_by_norm"]


def test_a_registered_word_has_fields_and_checks_like_a_built_in_one(registered):
    base = "federation: {clients: 9}\nstages: [{name: a, rounds: 2}]"
    chosen = parse_config(base, ["federation.aggregator={kind: trimmed_by_norm, share: 0.7}"]).federation.aggregator
    assert chosen.share == 0.7 and chosen.text() == "drops the updates with the largest norms"
    assert torch.equal(chosen.made()(torch.ones(3, 2), torch.ones(3)), torch.ones(2))
    with pytest.raises(FedsieveError, match="share: should be a valid number"):
        parse_config(base, ["federation.aggregator={kind: trimmed_by_norm, share: x}"])
    with pytest.raises(FedsieveError, match='Did you mean "trimmed_by_norm"'):
        parse_config(base, ["federation.aggregator=trimed_by_norm"])
    with pytest.raises(FedsieveError, match="exists already"):
        fs.register("aggregator", "median")(trimmed_by_norm)
    with pytest.raises(FedsieveError, match='Did you mean "aggregator"'):
        fs.register("agregator", "x")


def test_number_of_classes_is_that_of_the_data(data):
    assert int(data[1].max()) == CLASSES - 1


def in_place(theta, mean, state, lr):
    return theta.add_(mean)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ({"optimizer": lambda weights, gradient, state, group: weights - gradient}, "in place, and return nothing"),
        ({"optimizer": torch.optim.SGD}, "give fs.SGD, fs.AdamW, or a function"),
        ({"correction": lambda gradient, weights, received: None}, "expected a gradient"),
        ({"correction": lambda gradient, weights, received: gradient.add_(1)}, "changed its input"),
        ({"server": lambda mean: mean}, "give a subclass of fs.ServerOptimizer"),
        ({"server": type("Own", (Warm,), {"step": lambda self, *given: in_place(*given)})()}, "changed its input"),
        ({"metrics": {"loss": lambda outputs, labels: 0}}, "the names loss and accuracy are taken"),
    ],
)
def test_a_piece_that_breaks_its_contract_is_named(start, pieces, words):
    with pytest.raises(FedsieveError) as caught:
        start(**pieces).train(1)
    assert words in str(caught.value), str(caught.value)

"""The ledger holds every byte that would move, and clients work with what was sent, not with what the server has."""

import numpy as np
import pytest
import torch
from tests.federation.conftest import SPARSE

from fedsieve import run
from fedsieve.federation.channel import Channel
from fedsieve.federation.executors import Sequential
from fedsieve.federation.local import Training
from fedsieve.mask.mask import Mask
from fedsieve.wire.codec import OVERHEAD, Coding, encode
from fedsieve.wire.ledger import lines

HELD = "federation.client_validation=0.2"
TWO = (
    "stages=[{name: all, train: backbone, rounds: 2, local: {steps: 2}, batch_size: 16, optimizer: {lr: 0.1}}, "
    "{name: head, train: head, method: ridge}]"
)


def told(found):
    found.context.ledger.sync()
    return list(lines(found.context.ledger.path))


def test_a_head_that_is_refitted_is_fitted_on_the_backbone_that_was_sent(federated, tmp_path):
    """Features of a backbone that moved take that backbone, which every client must have."""
    run(federated(TWO), tmp_path / "run")
    rows = [line for line in lines(tmp_path / "run" / "ledger.csv") if line.stage == "head"]
    sent = [line for line in rows if line.what == "context"]
    assert [line.client for line in sent] == list(range(8)) and {line.direction for line in sent} == {"down"}
    backbone = 7642 - 170  # all but the head, which statistics do not need
    assert {line.size for line in sent} == {sent[0].size} and 4 * backbone < sent[0].size < 4.2 * backbone + OVERHEAD
    assert rows.index(sent[-1]) < next(place for place, line in enumerate(rows) if line.what == "statistics")


def test_a_first_head_needs_nothing(federated, tmp_path):
    run(federated("stages=[{name: head, train: head, method: ridge}]"), tmp_path / "run")
    assert {line.what for line in lines(tmp_path / "run" / "ledger.csv")} == {"statistics"}


def test_clients_that_score_for_a_blend_are_sent_the_mask_first_and_once(federated, running):
    found = running(federated(*SPARSE, "federation.blend=true"))
    rows = told(found)
    masks = [line.client for line in rows if line.what == "mask" and line.direction == "down"]
    assert sorted(masks) == list(range(8))  # also those that no round has chosen yet
    k = Mask(found.space, found.state.masks.mask.numpy()).count
    down = [line for line in rows if line.what == "scores" and line.direction == "down"]
    assert [line.client for line in down] == list(range(8)) and {line.size for line in down} == {OVERHEAD + 4 * k}
    shares = [line for line in rows if line.what == "scores" and line.size == OVERHEAD + 4 * k and line not in down]
    assert max(rows.index(line) for line in rows if line.what == "mask") < rows.index(shares[0])


def test_clients_that_only_measure_are_sent_all_that_they_lack(federated, running):
    """One client in a round, others measure: the mask goes to each of them once, with the model."""
    found = running(federated(*SPARSE, HELD, "federation.cohort=1", "stages.all.rounds=2"))
    rows, people = told(found), found.context.population
    judges = [int(people.cohort("all", number)[0]) for number in (1, 2)]
    assert len({int(people.cohort("all", 0)[0]), *judges}) == 3  # three different clients
    for number, judge in zip((1, 2), judges, strict=True):
        sent = [(line.what, line.round) for line in rows if line.client == judge and line.direction == "down"]
        assert sent.count(("mask", number)) == 1 and sent.count(("model", number)) == 1
        assert [what for what, _ in sent].count("model") == 1  # not again when its own round comes


def test_a_new_mask_makes_clients_that_measured_receive_the_model_again(federated, running):
    shared = [*SPARSE, HELD, "mask.rule=high_magnitude", "mask.scope=public", "federation.cohort=8"]
    counts = {}
    for refresh in (1, 2):
        rows = told(running(federated(*shared, f"mask.refresh={refresh}")))
        counts[refresh] = sum(line.what == "model" for line in rows)
    assert counts == {1: 8 * 6, 2: 8 * 5}


@pytest.mark.parametrize("down", ["fp16", "int8"])
def test_control_variates_are_used_as_they_were_sent(federated, running, monkeypatch, down):
    sent, used = [], []
    send, train = Channel.down, Sequential.train

    def noting(self, parcel, clients, values=None):
        message = send(self, parcel, clients, values)
        if parcel.what == "control":
            sent.append((values.clone(), message.values))
        return message

    def watching(self, cohort, lr):
        used.append(cohort.control(range(len(cohort.works))))
        yield from train(self, cohort, lr)

    monkeypatch.setattr(Channel, "down", noting)
    monkeypatch.setattr(Sequential, "train", watching)
    options = ["federation.correction.kind=scaffold", f"message.down={down}", "federation.cohort=3"]
    found = running(federated(*options))
    people = found.context.population
    for number in (1, 2):
        exact, heard = sent[number]
        assert not torch.equal(exact, heard)
        before = {client for earlier in range(number) for client in people.cohort("all", earlier).tolist()}
        new = [place for place, client in enumerate(people.cohort("all", number).tolist()) if client not in before]
        for place in new:  # c_k = 0
            assert torch.equal(used[number][place], heard)
    size = len(encode(exact, Coding(down), found.space, round=0, client=0))
    assert {line.size for line in told(found) if line.what == "control" and line.direction == "down"} == {size}


FATES = {
    "damaged": "federation.failures={corrupt: 0.999999}",
    "late": "federation.failures={deadline: 1e-9}",
}


@pytest.mark.parametrize("fate", FATES)
def test_a_client_keeps_an_update_that_was_refused_whatever_the_reason(federated, running, monkeypatch, fate):
    moved, run = {}, Training.run

    def noting(self, *arguments):
        for batch in run(self, *arguments):
            moved.update(zip(batch.clients, batch.moved.clone(), strict=True))
            yield batch

    monkeypatch.setattr(Training, "run", noting)
    found = running(
        federated(
            FATES[fate],
            "federation.devices=[{delay: 1}]",
            "message={up: int8, error_feedback: true}",
            "stages.all.rounds=1",
        )
    )
    assert found.records[0]["replies"] == 0 and len(moved) == 3
    for client, update in moved.items():
        assert torch.equal(found.context.memory.get(client)["all.residual"], update)


def test_a_client_that_went_astray_once_sends_good_updates_again(federated, running, monkeypatch):
    train, rounds = Sequential.train, []

    def astray(self, cohort, lr):
        rounds.append(lr)
        for trained in train(self, cohort, lr):
            if len(rounds) == 1 and trained.clients.start == 1:
                trained.moved[:], trained.sums[:] = float("nan"), float("nan")
            yield trained

    monkeypatch.setattr(Sequential, "train", astray)
    found = running(federated("message={up: int8, error_feedback: true}", "federation.cohort=8"))
    assert [record["refused"] for record in found.records] == [{"not finite": 1}, {}, {}]


@pytest.mark.parametrize("overrides", [[], [HELD], ["federation.blend=true"], ["federation.correction.kind=scaffold"]])
def test_all_bytes_of_a_round_are_in_its_record(federated, running, overrides):
    found = running(federated(*SPARSE, *overrides, "federation.failures={crash: 0.2, corrupt: 0.2}"))
    for way in ("up", "down"):
        sums = np.zeros(3, dtype=int)
        for line in told(found):
            sums[line.round - 1] += line.size * (line.direction == way)
        assert sums.tolist() == [record[f"bytes_{way}"] for record in found.records]

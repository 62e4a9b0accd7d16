import json
import math
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.federation.conftest import SPARSE

from fedsieve import resume, run
from fedsieve.errors import FedsieveError
from fedsieve.federation.calibrate import nested_tiers
from fedsieve.federation.clients import Update
from fedsieve.federation.executors import Sequential
from fedsieve.federation.means import weighted_mean
from fedsieve.federation.server import Rounds
from fedsieve.federation.work import Draws, local_work
from fedsieve.mask.mask import Mask
from fedsieve.mask.selection import attention_heads, group_ids
from fedsieve.model.weights import digest
from fedsieve.runner.model_files import load_model
from fedsieve.runner.prepare import prepare
from fedsieve.runner.progress import Display
from fedsieve.train.feed import Feed
from fedsieve.train.sieve import Scoring
from fedsieve.wire.ledger import lines, totals


def test_fedavg_equals_a_plain_one_written_out(federated, running):
    """The reference: every client's own copy, torch's own SGD, state dicts averaged by images."""
    experiment = federated("data.val_fraction=0", "data.transform=crop_flip", "stages.all.schedule=constant")
    found = running(experiment)
    setup = prepare(experiment, Display.silent())
    model, feed = setup.model, setup.train
    population = found.context.population
    for number in range(3):
        before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        total = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
        cohort = population.cohort("all", number)
        for client in cohort:
            with torch.no_grad():
                for name, tensor in model.named_parameters():
                    tensor.copy_(before[name])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
            examples = population.shards.client(int(client))
            work = local_work(int(client), examples, experiment.stages[0].local, 16, Draws(feed, 2, ("all", number)))
            for rows, draws in zip(work.examples, work.draws, strict=True):
                images = feed.store.images[torch.from_numpy(feed.rows[rows])]
                inputs = feed.transform.train(images, torch.from_numpy(draws))
                loss = F.cross_entropy(model(inputs), feed.labels[torch.from_numpy(rows)])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for name, tensor in model.named_parameters():
                total[name] += len(examples) * tensor.detach()
        n = sum(len(population.shards.client(int(client))) for client in cohort)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                tensor.copy_(total[name] / n)
    expected = found.space.read(model)
    assert (found.state.theta - expected).norm() < 1e-5 * (expected - found.start).norm()


ALGORITHMS = {
    "plain": [],
    "fedprox": ["federation.correction.kind=fedprox"],
    "scaffold": ["federation.correction.kind=scaffold"],
    "fedntd": ["federation.correction.kind=fedntd"],
    "momentum": ["federation.server={optimizer: momentum, lr: 0.5}"],
    "adam": ["federation.server={optimizer: adam, lr: 0.01}"],
    "uniform": ["federation.weighting=uniform"],
    "blend": ["federation.blend=true"],
    "int8": ["message={up: int8, down: fp16, error_feedback: true}"],
    "top_k": ["message={up: fp32, top_k: 0.3, error_feedback: true}"],
    "coo": ["message={up: coo}"],
    "failures": ["federation.failures={unavailable: 0.2, crash: 0.2, corrupt: 0.2}"],
}
SCOPES = {
    "dense": [],
    "shared": SPARSE,
    "client": [*SPARSE, "mask.scope=client"],
    "public": [*SPARSE, "mask.scope=public", "mask.rule=high_magnitude"],
    "refreshed": [*SPARSE, "mask.refresh=1", "mask.start_sparsity=0.5"],
    "tiers": [*SPARSE, "federation.devices=[{share: 0.5}, {share: 0.5, density: 0.3, work: 0.5}]"],
}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_executors_agree_over_rounds(federated, running, algorithm, scope):
    overrides = [*SCOPES[scope], *ALGORITHMS[algorithm], "federation.cohort=4"]
    try:
        sequential = running(federated(*overrides, "executor=sequential"))
    except FedsieveError as error:
        assert " need" in str(error)  # refused when it was read
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "executor")  # as one by one after all
        stacked = running(federated(*overrides, "executor=stacked", "clients_at_once=3"))
    moved = sequential.state.theta - sequential.start
    assert moved.norm() > 0 or algorithm == "failures"
    # What int8 rounds to can hinge on the last digit.
    tolerance = 2e-2 if algorithm == "int8" else 1e-3
    assert (stacked.state.theta - sequential.state.theta).norm() <= tolerance * moved.norm()
    for one, other in zip(sequential.records, stacked.records, strict=True):
        assert one["bytes_up"] == other["bytes_up"] and one["bytes_down"] == other["bytes_down"]
        assert one["refused"] == other["refused"]
        assert one.get("drift", 0) == pytest.approx(other.get("drift", 0), rel=1e-2)


@pytest.mark.parametrize("scope", ["shared", "tiers", "client", "public"])
def test_frozen_weights_keep_their_bits(federated, running, scope):
    found = running(federated(*SCOPES[scope], "message={up: int8, down: int8}"))
    moved = Mask(found.space, found.state.masks.moved.numpy()).to_bool()
    assert torch.equal(found.state.theta[~moved], found.start[~moved])
    assert not torch.equal(found.state.theta[moved], found.start[moved])


def test_the_ledger_is_the_sum_of_its_rounds(federated, running):
    found = running(federated(*SPARSE, "federation.failures={crash: 0.3}"))
    up, down = totals(found.context.ledger.path)["all"] if found.context.ledger.sync() is None else ()
    assert up.tolist() == [record["bytes_up"] for record in found.records]
    assert down.tolist() == [record["bytes_down"] for record in found.records]
    mask = Mask(found.space, found.state.masks.mask.numpy())
    everyone = found.space.size
    assert up[0] > 4 * 3 * 0.9 * everyone  # three clients' scores, fp32, go before the first round
    reached = found.records[-1]["replies"]
    assert found.records[-1]["bytes_up"] == reached * (4 * mask.count + 68)


def test_a_known_mask_costs_an_update_nothing_and_int8_an_eighth_of_what_is_dense(federated, running):
    dense = running(federated("stages.all.rounds=2", "federation.cohort=8"))
    sparse = running(federated(*SPARSE, "stages.all.rounds=2", "message.up=int8", "federation.cohort=8"))
    mask = Mask(sparse.space, sparse.state.masks.mask.numpy())
    assert dense.records[1]["bytes_up"] == 8 * (4 * dense.space.size + 68)
    groups = -(-mask.count // 64)
    assert sparse.records[1]["bytes_up"] == 8 * (mask.count + 2 * groups + 4 + 68)


def test_what_goes_wrong_is_recorded_and_the_round_goes_on(federated, running):
    failures = "federation.failures={unavailable: 0.2, crash: 0.2, corrupt: 0.3, deadline: 1}"
    found = running(federated(failures, "stages.all.rounds=12", "federation.devices=[{delay: 1}]"))
    assert {"unavailable", "crash", "late", "checksum"} <= set(found.state.refused) | {"magic", "length", "version"}
    found.context.ledger.sync()
    told = [line for line in lines(found.context.ledger.path) if line.status != "ok"]
    for record in found.records:
        assert record["replies"] + sum(record["refused"].values()) == record["cohort"]
        # The ledger names each client whose reply did not count, in the round that metrics speak of.
        reasons = {line.client: line.status for line in told if line.round == record["round"]}
        assert Counter(reasons.values()) == record["refused"]
        cohort = found.context.population.cohort("all", record["round"] - 1)
        assert set(reasons) <= set(cohort.tolist())
    assert {(line.direction, line.what) for line in told if not line.size} == {("down", "model"), ("up", "update")}
    unreached = found.records[0]["refused"].get("unavailable", 0)
    assert found.records[0]["bytes_down"] > 0 or unreached == 3


def test_too_few_replies_change_nothing(federated, running):
    found = running(
        federated("federation.minimum_replies=3", "federation.failures={crash: 0.6}", "stages.all.rounds=2")
    )
    short = [record for record in found.records if record["replies"] < 3]
    assert short and all("too few replies" in record["refused"] or record["replies"] == 0 for record in short)
    if len(short) == 2:
        assert torch.equal(found.state.theta, found.start)


def test_a_cohort_that_never_answers_leaves_the_model_alone(federated, running):
    found = running(federated("federation.failures={unavailable: 0.999999}"))
    assert torch.equal(found.state.theta, found.start)
    assert all(record["replies"] == 0 and record["bytes_down"] == 0 for record in found.records)


def test_holders_and_all():
    """Slow and obvious: coordinate by coordinate."""
    rng = np.random.default_rng(0)
    k, weights = 11, [3.0, 1.0, 2.0]
    held = [None, torch.tensor([0, 4, 5]), torch.tensor([1, 4, 10])]
    for first in (0, 1):  # whoever holds everything may come first or later
        updates, order = [], [first, 1 - first, 2]
        dense, weight = np.zeros((3, k)), np.zeros((3, k))
        for client in order:
            places = np.arange(k) if held[client] is None else held[client].numpy()
            values = rng.normal(size=len(places))
            updates.append(Update(client, torch.from_numpy(values), weights[client], held[client]))
            dense[client, places], weight[client, places] = values * weights[client], weights[client]
        (by_all, count), (by_holders, _) = (weighted_mean(updates, k, "cpu", by) for by in ("all", "holders"))
        np.testing.assert_allclose(by_all.numpy(), dense.sum(0) / sum(weights))
        np.testing.assert_allclose(by_holders.numpy(), dense.sum(0) / weight.sum(0))
        assert count == 3


def test_coordinates_that_nobody_holds_stay():
    mean, _ = weighted_mean([Update(0, torch.tensor([1.0]), 2.0, torch.tensor([1]))], 4, "cpu")
    assert mean.tolist() == [0, 1, 0, 0]


def test_a_shared_mask_is_that_of_the_union(federated, running):
    """Summed over clients, squared gradients with the same draws are those of all their images together."""
    found = running(federated(*SPARSE, "stages.all.rounds=1"))
    sieve, setup = found.experiment.mask, found.setup
    everything = Mask.ones(found.space)
    parts = [found.context.population.shards.client(client)[:5] for client in range(3)]
    seen, total = 0, 0.0
    import fedsieve.train.sieve as module

    draws = [np.random.default_rng(client).random(5) for client in range(3)]

    class Fixed:
        def __init__(self, values):
            self.values = values

        def random(self, count):
            assert count == len(self.values)
            return self.values

    def squares(rows, values):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "generator", lambda *_: Fixed(values))
            scoring = Scoring(sieve, setup.model, found.space, setup.train, setup.autocast, 0)
            return scoring.summed("fisher", everything, 0, rows)

    for rows, values in zip(parts, draws, strict=True):
        part, count = squares(rows, values)
        total, seen = total + part, seen + count
    union, count = squares(np.concatenate(parts), np.concatenate(draws))
    assert count == seen
    torch.testing.assert_close(total, union, rtol=1e-5, atol=1e-12)


def test_refreshed_masks_move_towards_the_asked_sparsity(federated, running):
    found = running(federated(*SCOPES["refreshed"], "stages.all.rounds=4"))
    assert found.state.masks.generation == 4
    last = Mask(found.space, found.state.masks.mask.numpy())
    shares = last.count / found.space.size
    assert 0.15 < shares < 0.21
    assert len(found.state.server.get("momentum", torch.zeros(last.count))) == last.count


@pytest.mark.parametrize("granularity", ["row", "attention_head", "block"])
def test_smaller_devices_train_nested_tiers_of_whole_groups(federated, running, granularity):
    devices = "federation.devices=[{share: 0.4}, {share: 0.3, density: 0.6}, {share: 0.3, density: 0.55}]"
    found = running(federated(*SPARSE, "mask.sparsity=0.1", f"mask.granularity={granularity}", devices))
    mask = Mask(found.space, found.state.masks.mask.numpy())
    tiers = nested_tiers(found.context, found.experiment.mask, mask, found.state.masks.ranks)
    groups = group_ids(found.space, granularity, attention_heads(found.setup.model))
    small, middle = (tier.to_bool().numpy() for _, tier in sorted(tiers.items()))
    assert (small <= middle).all() and (middle <= mask.to_bool().numpy()).all() and small.any()
    for tier, density in ((small, 0.55), (middle, 0.6)):
        assert tier.sum() <= round(density * mask.count)
        for group in np.unique(groups[tier]):
            assert tier[(groups == group) & mask.to_bool().numpy()].all()


@pytest.mark.parametrize("rule", ["high_magnitude", "low_magnitude"])
def test_smaller_devices_train_the_best_weights_by_the_rule(federated, running, rule):
    devices = "federation.devices=[{share: 0.5}, {share: 0.5, density: 0.3}]"
    found = running(federated(*SPARSE, f"mask.rule={rule}", devices, "stages.all.rounds=1"))
    mask = Mask(found.space, found.state.masks.mask.numpy())
    (tier,) = nested_tiers(found.context, found.experiment.mask, mask, found.state.masks.ranks).values()
    inside, rest = (found.start.abs()[part.to_bool()] for part in (tier, mask - tier))
    assert inside.min() >= rest.max() if rule == "high_magnitude" else inside.max() <= rest.min()


def test_a_public_mask_is_scored_on_images_that_no_client_has(federated, running, monkeypatch):
    """No client can be reached, so only scoring and validation read images."""
    read, fetch = set(), Feed.fetch

    def noting(self, examples, draws=None):
        read.update(self.rows[examples].tolist())
        return fetch(self, examples, draws)

    monkeypatch.setattr(Feed, "fetch", noting)
    public = [*SPARSE, "mask.scope=public", "federation.failures.unavailable=0.999999", "stages.all.rounds=1"]
    found = running(federated(*public, "federation.evaluate_every=1"))
    assert (
        read and read <= set(found.setup.validation.rows.tolist()) and not read & set(found.setup.train.rows.tolist())
    )


def test_delays_are_simulated_time(federated, running):
    devices = "federation.devices=[{share: 0.5, delay: 5}, {share: 0.5}]"
    found = running(federated(devices))
    people = found.context.population
    for record in found.records:
        number = record["round"] - 1
        slowest = max(people.delay("all", number, client) for client in people.cohort("all", number).tolist())
        assert record["simulated_seconds"] == slowest
    total = sum(record["simulated_seconds"] for record in found.records)
    assert found.state.simulated_seconds == pytest.approx(total) and total > 0
    late = running(federated(devices, "federation.failures.deadline=0.01"))
    assert all(record["simulated_seconds"] in (0.0, 0.01) for record in late.records) and late.state.refused["late"]
    assert "simulated_seconds" not in running(federated()).records[0]


def test_budgets_fix_local_work_times_rounds(federated, running):
    text = "stages=[{name: all, train: all, budget: 12, local: {steps: 4}, batch_size: 16, optimizer: {lr: 0.1}}]"
    found = running(federated(text))
    assert len(found.records) == 3
    assert found.said[0] == "all: a budget of 12 local steps at 4 a round is 3 rounds, 12 steps"


def test_strangers_never_train(federated, running):
    found = running(federated("federation.held_out=0.5", "federation.cohort=1.0", "stages.all.rounds=2"))
    strangers = set(found.context.population.strangers.tolist())
    assert len(strangers) == 4
    found.context.ledger.sync()
    rows = found.context.ledger.path.read_text().splitlines()[1:]
    assert {int(row.split(",")[2]) for row in rows}.isdisjoint(strangers)


RESUMED = {
    "scaffold": [*SPARSE, "federation.correction.kind=scaffold"],
    "blend": [*SPARSE, "federation.blend=true", "message={up: int8, down: fp16, error_feedback: true}"],
    "client": [*SPARSE, "mask.scope=client", "federation.server.optimizer=adam", "federation.server.lr=0.01"],
    "refreshed": [*SCOPES["refreshed"], "federation.server.optimizer=momentum"],
    "tiers": SCOPES["tiers"],
    "measured": [*SPARSE, "federation.client_validation=0.2", "federation.evaluate_every=2"],
    "secagg": [*SPARSE, "privacy.aggregation=secagg", "federation.cohort=5", "federation.failures={crash: 0.3}"],
    "replayed": ["federation.attack=stale_replay", "federation.aggregator=median", "federation.cohort=5"],
    "private": [
        "privacy.dp={noise_multiplier: 2, clip_norm: 0.1, scores: {clip_norm: 1.0, noise_multiplier: 2.0}, "
        "statistics: {clip_norm: 1.0, noise_multiplier: 2.0}}",
        "stages=[{name: head, train: head, method: ridge}, {name: all, rounds: 5, local: {steps: 1}, batch_size: 16}]",
        *SPARSE,
        "federation.weighting=uniform",
    ],
}


class Stop(Exception):
    pass


class Stopping(Display):
    """A display that kills the run after so many rounds."""

    def __init__(self, after: int) -> None:
        super().__init__(Display.silent().console, quiet=True)
        self.left = after

    def step(self, stage, tick):
        self.left -= 1
        if self.left < 0:
            raise Stop


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_killed_after_any_round_ends_the_same(federated, tmp_path, monkeypatch, case):
    """Checkpoints after every second round, kills between them: rounds are repeated, with the same outcome."""
    if case == "private":  # where two runs would otherwise have nothing in common
        monkeypatch.setattr("fedsieve.privacy.dp.new_key", lambda: bytes(range(32)))
    experiment = federated(*RESUMED[case], "stages.all.rounds=5", "checkpoint.every_seconds=0")
    whole = run(experiment, tmp_path / "whole")
    with pytest.raises(Stop):
        run(experiment, tmp_path / "cut", Stopping(2))
    with pytest.raises(Stop):
        resume(tmp_path / "cut", Stopping(1))
    cut = resume(tmp_path / "cut")
    timings = ("seconds", "calibration_seconds", "images_per_second")

    def bare(tree):
        if isinstance(tree, dict):
            return {key: bare(value) for key, value in tree.items() if key not in timings}
        return tree

    assert bare(cut) == bare(whole)
    assert digest(load_model(tmp_path / "cut")[1]) == digest(load_model(tmp_path / "whole")[1])
    ledgers = [(tmp_path / name / "ledger.csv").read_text() for name in ("whole", "cut")]
    assert ledgers[0] == ledgers[1]
    metrics = [
        [bare(json.loads(line)) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    ]
    assert metrics[0] == metrics[1]


def test_the_summary_says_what_a_federation_did(federated, tmp_path):
    summary = run(federated(*SPARSE, "federation.held_out=0.25"), tmp_path / "run")
    assert summary["rounds"] == 3 and summary["sparsity"] == 0.8 and len(summary["mask_id"]) == 32
    assert summary["bytes_up"] > 0 and summary["bytes_down"] > 0 and summary["drift"] > 0 and summary["refused"] == {}
    spread = summary["client_accuracy"]
    assert spread["clients"] == 6 and spread["strangers"]["clients"] == 2
    assert spread["worst"] <= spread["worst_decile"] <= spread["mean"]


HARM = "[{name: head, train: head, method: ridge}, {name: all, rounds: 2, optimizer: {lr: 3.0, clip_norm: 1.0}}]"


@pytest.mark.parametrize(
    ("overrides", "remark"),
    [
        ([f"stages={HARM}"], "the model became worse"),
        (["federation.failures.crash=0.999999"], "the weights never moved"),
        ([], None),
    ],
)
def test_a_stage_that_did_harm_or_nothing_is_remarked(federated, tmp_path, monkeypatch, overrides, remark):
    said = []
    monkeypatch.setattr(Display, "say", lambda self, text: said.append(text))
    run(federated(*overrides), tmp_path / "run", page=False)
    found = [text for text in said if "became worse" in text or "never moved" in text]
    assert found == [] if remark is None else len(found) == 1 and remark in found[0]


@pytest.mark.parametrize("chosen", [1, 3])
def test_the_summary_tells_of_the_chosen_rounds_mask(federated, tmp_path, monkeypatch, chosen):
    """Every round has a new mask of another sparsity, and one of them is made to look the best."""
    validate = Rounds.choose

    def choose(self, record, last):
        record.note(val_accuracy=1.0 if self.state.round == chosen else 0.5)
        validate(self, record, last)

    monkeypatch.setattr(Rounds, "choose", choose)

    summary = run(federated(*SCOPES["refreshed"], "stages.all.rounds=4"), tmp_path / "run")
    files = {1: "all", 3: "all.round-3"}
    mask = Mask.load(tmp_path / "run" / "masks" / f"{files[chosen]}.safetensors")
    assert summary["mask_id"] == mask.id == summary["stages"]["all"]["mask_id"]
    assert summary["sparsity"] == pytest.approx({1: 0.5, 3: 0.7}[chosen])
    assert summary["stages"]["all"]["active"] == mask.count
    assert summary["stages"]["all"]["reached_sparsity"] == pytest.approx(summary["sparsity"], abs=0.01)


def test_a_head_in_closed_form_at_the_end_leaves_no_gaps_in_the_summary(federated, tmp_path):
    ridge = "stages=[{name: all, train: backbone, sparse: true, rounds: 2}, {name: head, train: head, method: ridge}]"
    summary = run(federated("mask={rule: high_magnitude, sparsity: 0.8}", ridge), tmp_path / "run")
    assert [key for key, value in summary.items() if value is None] == ["peak_memory"]  # which is a GPU's
    for key in ("sparsity", "mask_id", "drift"):
        assert summary[key] == summary["stages"]["all"][key]


def test_masks_of_clients_own_take_time_too(federated, tmp_path):
    summary = run(federated(*SCOPES["client"], "stages.all.rounds=1"), tmp_path / "run")
    assert summary["stages"]["all"]["calibration_seconds"] > 0


def test_a_client_that_goes_astray_is_refused_and_the_round_goes_on(federated, running, monkeypatch):
    train = Sequential.train

    def astray(self, cohort, lr):
        for trained in train(self, cohort, lr):
            if trained.clients.start == 1:
                trained.moved[:] = float("nan")
                trained.sums[:] = float("nan")
            yield trained

    monkeypatch.setattr(Sequential, "train", astray)
    found = running(federated())
    assert [record["refused"] for record in found.records] == [{"not finite": 1}] * 3
    assert all(record["replies"] == 2 and record["drift"] > 0 for record in found.records)


def test_all_clients_astray_is_divergence_and_nothing_is_deleted(federated, tmp_path):
    with pytest.raises(FedsieveError, match="diverged") as caught:
        run(federated("stages.all.optimizer.lr=1e30", "stages.all.rounds=9"), tmp_path / "run")
    assert caught.value.exit_code == 1 and (tmp_path / "run" / "config.yaml").exists()


def test_weights_too_large_to_send_are_divergence(federated, tmp_path):
    with pytest.raises(FedsieveError, match="diverged") as caught:
        run(federated("message.down=fp16", "federation.server.lr=1e9"), tmp_path / "run")
    assert caught.value.exit_code == 1 and (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_stage_that_reached_nobody_still_ends(federated, tmp_path):
    summary = run(federated("federation.failures.unavailable=0.99999"), tmp_path / "run")
    assert summary["bytes_up"] == summary["bytes_down"] == 0 and summary["refused"] == {"unavailable": 9}


@pytest.mark.parametrize("message", ["{up: fp32}", "{up: sign}", "{up: fp32, top_k: 0.1}"])
@pytest.mark.parametrize("loss", ["failures={crash: 0.2, corrupt: 0.3}", "attack={kind: nan, fraction: 0.4}"])
def test_scaffolds_control_stays_the_mean_of_the_clients(federated, running, message, loss):
    """Whatever is lost on the way, and however coarse the messages are; also where an update alone is refused."""
    overrides = ["federation.correction.kind=scaffold", f"federation.{loss}", "stages.all.rounds=6"]
    found = running(federated(*overrides, "federation.minimum_replies=2", f"message={message}"))
    own = [found.context.memory.get(client).get("all.control") for client in range(8)]
    mean = sum(control for control in own if control is not None) / 8
    torch.testing.assert_close(found.state.control, mean, rtol=1e-4, atol=1e-6)
    assert mean.norm() > 0 and found.state.refused


@pytest.mark.parametrize(
    "measured", [[], ["data.val_fraction=0", "federation.client_validation=0.2", "federation.cohort=8"]]
)
def test_the_first_of_equally_good_rounds_is_chosen(federated, running, measured):
    found = running(federated("stages.all.optimizer.lr=1e-30", "stages.all.rounds=4", *measured))
    accuracies = {record.get("val_accuracy", record.get("client_val_accuracy")) for record in found.records}
    assert len(accuracies) == 1 and found.state.best_at == 1


@pytest.mark.parametrize("overrides", [[], SPARSE])
def test_a_stage_ends_with_the_weights_of_its_chosen_round(federated, running, monkeypatch, overrides):
    """Validation favours round 2 of 4: the result equals that of a run which ends after round 2."""

    def ended(*accuracies: float):
        left = iter(accuracies)
        with monkeypatch.context() as patch:
            patch.setattr("fedsieve.runner.setup.evaluate", lambda *_: {"val_accuracy": next(left), "val_loss": 1.0})
            found = running(
                federated(*overrides, "stages.all.schedule=constant", f"stages.all.rounds={len(accuracies)}")
            )
        return found.space.read(found.setup.model)

    whole, short = ended(0.1, 0.9, 0.5, 0.2), ended(0.1, 0.9)
    assert torch.equal(whole, short) and not torch.equal(whole, ended(0.9, 0.1))


def test_patience_counts_only_evaluated_rounds(federated, running):
    found = running(federated("stages.all.rounds=20", "stages.all.early_stopping=2", "federation.evaluate_every=5"))
    assert found.state.round % 5 == 0


def test_a_blended_start_counts_as_movement(federated, running):
    """What clients send is how far they are from the weights that they received."""
    found = running(federated("federation.blend=true", "stages.all.optimizer.lr=1e-30", "federation.cohort=8"))
    assert found.records[0]["drift"] == pytest.approx(0, abs=1e-6)


# --- the server's side of a round, against written-out references ------------------------------------------------------


class Noted:
    """Records what clients trained in each round, by client."""

    def __init__(self, monkeypatch) -> None:
        self.rates, self.moved, self.gradients, self.controls = [], [], [], []
        self.received, self.supports = [], []  # the received values of the weights that train, and their places
        train = Sequential.train

        def noting(executor, cohort, lr):
            rounds = (self.moved, self.gradients, self.controls)
            for by_client in rounds:
                by_client.append({})
            self.rates.append(lr)
            self.received.append(cohort.rows(range(1))[0].clone())
            self.supports.append(executor.support)
            for trained in train(executor, cohort, lr):
                control = cohort.rows(trained.clients)[2]
                for by_client, rows in zip(rounds, (trained.moved, trained.gradients, control), strict=True):
                    for place, row in zip(trained.clients, () if rows is None else rows, strict=rows is not None):
                        by_client[-1][cohort.works[place].client] = row.clone()
                yield trained

        monkeypatch.setattr(Sequential, "train", noting)


def mean_of(found, updates) -> torch.Tensor:
    """The mean of one round's updates, weighted by numbers of images."""
    sizes = found.context.population.sizes
    total = sum((int(sizes[client]) * update.double() for client, update in updates.items()), torch.zeros(1))
    return total / max(1, sum(int(sizes[client]) for client in updates))


def assert_moved(found, expected) -> None:
    """The server's weights moved by `expected` since the start."""
    moved = found.state.theta.double() - found.start.double()
    assert moved.norm() > 0 and (moved - expected).norm() < 1e-4 * moved.norm()


def cosine(step: int, steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def test_client_rates_follow_the_warmup_and_the_cosine(federated, running, monkeypatch):
    noted = Noted(monkeypatch)
    found = running(federated("stages.all.rounds=6", "stages.all.warmup_rounds=2"))
    expected = [0.05, 0.1, *(0.1 * cosine(step, 4) for step in range(4))]
    assert noted.rates == pytest.approx(expected) == [record["lr"] for record in found.records]


def test_the_server_follows_its_own_optimizer_and_schedule(federated, running, monkeypatch):
    noted = Noted(monkeypatch)
    server = "federation.server={optimizer: momentum, lr: 0.5, momentum: 0.8, schedule: cosine}"
    found = running(federated(server, "stages.all.rounds=4"))
    momentum = expected = torch.zeros(1)
    for number, moved in enumerate(noted.moved):
        momentum = 0.8 * momentum + mean_of(found, moved)
        expected = expected + 0.5 * cosine(number, 4) * momentum
    assert_moved(found, expected)


@pytest.mark.parametrize("correction", ["keep", "scale", "reset"])
def test_momentum_stays_with_its_weight_when_the_mask_changes(federated, running, monkeypatch, correction):
    """Reference: momentum as a vector over the whole space, zero wherever a weight is frozen."""
    noted = Noted(monkeypatch)
    server = f"federation.server={{optimizer: momentum, momentum: 0.8, momentum_correction: {correction}}}"
    found = running(federated(*SPARSE, "mask.rule=random", "mask.refresh=1", server, "federation.cohort=4"))
    momentum = expected = torch.zeros(found.space.size, dtype=torch.float64)
    before = torch.zeros(found.space.size, dtype=torch.bool)
    for support, moved in zip(noted.supports, noted.moved, strict=True):
        active = torch.zeros_like(before).index_fill(0, support, True)
        assert not torch.equal(active, before)
        kept = {"keep": 1.0, "scale": ((active & before).sum() / active.sum()).item(), "reset": 0.0}[correction]
        momentum = torch.where(active, 0.8 * kept * momentum, 0).index_add(0, support, mean_of(found, moved))
        expected, before = expected + momentum, active
    assert_moved(found, expected)


@pytest.mark.parametrize("divide_by", ["holders", "all"])
def test_divide_by_decides_whose_examples_count_for_a_weight_that_few_train(federated, running, monkeypatch, divide_by):
    """Reference: one weight at a time."""
    noted = Noted(monkeypatch)
    devices = "federation.devices=[{share: 0.5}, {share: 0.5, density: 0.3}]"
    found = running(
        federated(*SPARSE, devices, f"federation.divide_by={divide_by}", "federation.cohort=6", "stages.all.rounds=1")
    )
    people, (support,), (moved,) = found.context.population, noted.supports, noted.moved
    mask = Mask(found.space, found.state.masks.mask.numpy())
    (tier,) = nested_tiers(found.context, found.experiment.mask, mask, found.state.masks.ranks).values()
    small = [client for client in moved if people.device(client).density < 1]
    assert 0 < len(small) < len(moved)
    expected = torch.zeros(found.space.size, dtype=torch.float64)
    for place, weight in enumerate(support.tolist()):
        holders = moved if tier.to_bool()[weight] else moved.keys() - set(small)
        counted = holders if divide_by == "holders" else moved
        total = sum(int(people.sizes[client]) * moved[client][place].item() for client in holders)
        expected[weight] = total / sum(int(people.sizes[client]) for client in counted)
    assert_moved(found, expected)


def test_rounding_errors_are_uncorrelated_between_clients_and_rounds(federated, running, monkeypatch):
    """Correlated errors would not average out. A client's error is its residual; the server's is what arrives off."""
    coarse = ["message={up: int4, error_feedback: true}", "federation.cohort=8"]
    errors = []
    for rounds in (1, 2):
        found = running(federated(*coarse, f"stages.all.rounds={rounds}"))
        errors += [found.context.memory.get(client)["all.residual"] for client in range(3)]
    noted = Noted(monkeypatch)
    found = running(federated("message.down=int4", "stages.all.rounds=4"))
    theta = found.start.double()
    for received, moved in zip(noted.received[1:], noted.moved, strict=False):
        theta = theta + mean_of(found, moved)
        errors.append(received - theta)
    # Groups of 64 values share a scale. Divide by it, or the few largest steps dominate the correlation.
    whole = torch.stack([error.double() for error in errors])[:, : found.space.size // 64 * 64].unflatten(1, (-1, 64))
    even = (whole / whole.square().mean(2, keepdim=True).sqrt()).nan_to_num(0).flatten(1).numpy()
    assert len(even) == 9 and (even != 0).mean() > 0.5
    assert np.abs(np.corrcoef(even) - np.eye(9)).max() < 0.1


def test_uniform_weighting_counts_every_client_once(federated, running, monkeypatch):
    noted = Noted(monkeypatch)
    found = running(federated("federation.weighting=uniform", "federation.partition={kind: quantity, alpha: 0.5}"))
    expected = [torch.stack(list(moved.values())).double().mean(0) for moved in noted.moved]
    assert_moved(found, sum(expected))


def test_scaffold_adds_the_servers_control_minus_the_clients_own(federated, running, monkeypatch):
    """Karimireddy et al. 2020, algorithm 1, option I: c_k is the client's mean gradient, c the mean of all c_k."""
    noted = Noted(monkeypatch)
    running(federated("federation.correction.kind=scaffold", "stages.all.rounds=5"))
    own: dict[int, torch.Tensor] = {}
    for gradients, controls in zip(noted.gradients, noted.controls, strict=True):
        for client, control in controls.items():
            zero = torch.zeros_like(control)
            expected = sum(own.values(), zero) / 8 - own.get(client, zero)
            torch.testing.assert_close(control, expected, rtol=1e-4, atol=1e-6)
        own |= gradients
    assert len(own) < sum(map(len, noted.gradients))  # some clients took part again


@pytest.mark.parametrize("failures", ["{}", "{corrupt: 0.4}"])
def test_error_feedback_resends_exactly_what_has_not_arrived(federated, running, monkeypatch, failures):
    """Reference: each client adds what has not arrived to its update, and sends the largest 30 % of the sum."""
    noted = Noted(monkeypatch)
    message = "message={up: fp32, top_k: 0.3, error_feedback: true}"
    found = running(federated(message, f"federation.failures={failures}", "federation.cohort=6", "stages.all.rounds=5"))
    found.context.ledger.sync()
    told = [line for line in lines(found.context.ledger.path) if line.what == "update"]
    lost = {(line.round, line.client) for line in told if line.status != "ok"}
    assert bool(lost) == (failures != "{}")
    left: dict[int, torch.Tensor] = {}
    expected = torch.zeros(1)
    for number, moved in enumerate(noted.moved, start=1):
        arrived = {}
        for client, update in moved.items():
            left[client] = left.get(client, 0) + update
            if (number, client) not in lost:
                largest = left[client].abs().argsort(descending=True, stable=True)[: round(0.3 * len(update))]
                arrived[client] = torch.zeros_like(update).index_copy(0, largest, left[client][largest])
                left[client] = left[client] - arrived[client]
        expected = expected + mean_of(found, arrived)
    assert_moved(found, expected)

"""Secure sums, differential privacy, robust aggregators and attacks, as runs use them."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federation.alone import Given, federated_ridge, summed, weighted_sum
from tests.federation.conftest import CONFIG, SPARSE
from tests.words import Robust, aggregate

from fedsieve import run
from fedsieve.config import Privacy, parse_config
from fedsieve.errors import Diverged, FedsieveError
from fedsieve.federation import secure
from fedsieve.federation.channel import EXACT
from fedsieve.federation.clients import Update
from fedsieve.federation.means import robust_mean
from fedsieve.federation.parts import Hostile
from fedsieve.model.space import ParamSpace
from fedsieve.privacy import dp, secagg
from fedsieve.privacy.fixed_point import FixedPoint
from fedsieve.runner.plan import plan
from fedsieve.wire.codec import Coding
from fedsieve.wire.ledger import Ledger, lines

SECAGG = ("privacy.aggregation=secagg", "federation.cohort=5")
PRIVATE = ("privacy.dp={noise_multiplier: 1.0, clip_norm: 0.1}", "federation.weighting=uniform")
HIDDEN = Privacy(aggregation="secagg")


def told(found):
    found.context.ledger.sync()
    return list(lines(found.context.ledger.path))


# --- secure sums of updates ------------------------------------------------------------------------------------------

SCOPES = {
    "dense": [],
    "shared": [*SPARSE, "mask.calibration_rounds=2"],
    "refreshed": [*SPARSE, "mask.refresh=1", "mask.start_sparsity=0.5"],
    "tiers": [
        *SPARSE,
        "seed=3",  # of eight clients six hold all of the mask
        "federation.devices=[{share: 0.7}, {share: 0.3, density: 0.3}]",
        "privacy.threshold=0.51",
        "federation.cohort=8",
    ],
    "tiers by all": [
        *SPARSE,
        "seed=3",
        "federation.devices=[{share: 0.7}, {share: 0.3, density: 0.3}]",
        "privacy.threshold=0.51",
        "federation.cohort=8",
        "federation.divide_by=all",
    ],
    "blend": [*SPARSE, "federation.blend=true"],
    "measured": ["federation.client_validation=0.2", "data.val_fraction=0"],
}


@pytest.mark.parametrize("scope", SCOPES)
def test_secure_sums_give_what_plain_ones_do(federated, running, scope):
    overrides = [*SECAGG, *SCOPES[scope]]
    hidden = running(federated(*overrides))
    open_ = [text for text in overrides if not text.startswith("privacy")]
    plain = running(federated(*open_))
    if plain.state.masks.mask is not None:
        assert torch.equal(hidden.state.masks.mask, plain.state.masks.mask)
    moved = (plain.state.theta - plain.start).norm()
    assert moved > 0 and (hidden.state.theta - plain.state.theta).norm() < 1e-4 * moved
    assert [record["replies"] for record in hidden.records] == [record["replies"] for record in plain.records]
    if scope == "measured":
        for one, other in zip(hidden.records, plain.records, strict=True):
            assert one["client_val_loss"] == pytest.approx(other["client_val_loss"], rel=1e-3)


def test_rounding_errors_average_out_in_a_secure_sum():
    """Ten clients send equal values. Independent errors of deviation 1/sqrt(6) add up to sqrt(10/6), equal ones to more."""
    row = np.random.default_rng(0).uniform(-1, 1, 4000).astype(np.float32)
    rows, weights = dict.fromkeys(range(10), row), dict.fromkeys(range(10), 1)
    total, _, _ = weighted_sum(rows, weights, 1, {}, 3, Privacy(aggregation="secagg", bits=16, bound=1.0))
    errors = (total.numpy() - 10 * row.astype(np.float64)) / FixedPoint(16, 10, 1.0).step
    assert errors.std() == pytest.approx(np.sqrt(10 / 6), rel=0.1)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_the_width_decides_how_near_one_round_comes(federated, running, bits, weighting):
    overrides = ["federation.cohort=5", "stages.all.rounds=1", f"federation.weighting={weighting}"]
    plain = running(federated(*overrides))
    hidden = running(federated(*overrides, *SECAGG, f"privacy={{aggregation: secagg, bits: {bits}, bound: 0.25}}"))
    population = plain.context.population
    cohort = population.cohort("all", 0)
    weights = population.sizes if weighting == "examples" else np.ones_like(population.sizes)
    step = 0.25 * weights.max() / ((2 ** (bits - 1) - 1) // 5)
    error = (hidden.state.theta - plain.state.theta).abs().max()
    assert error <= 5 * step / weights[cohort].sum() + 1e-6
    assert bits > 16 or error > 1e-6


def test_values_beyond_the_bound_are_cut(federated, running):
    plain = running(federated("federation.cohort=5", "stages.all.rounds=1", "federation.weighting=uniform"))
    tight = running(federated(*SECAGG, "stages.all.rounds=1", "federation.weighting=uniform", "privacy.bound=1e-3"))
    moved = (tight.state.theta - tight.start).abs().max()
    assert moved <= 1.001e-3 < (plain.state.theta - plain.start).abs().max()


def test_zero_sum_gives_what_plain_averaging_does(federated, running):
    for overrides in ([*SPARSE], ["federation.weighting=uniform"]):
        plain = running(federated(*overrides))
        padded = running(federated(*overrides, "privacy={aggregation: zero_sum, pad_scale: 3.0, pad_offset: 7}"))
        moved = (plain.state.theta - plain.start).norm()
        assert (padded.state.theta - plain.state.theta).norm() < 1e-4 * moved
        sizes = [{line.size for line in told(found) if line.what == "update"} for found in (plain, padded)]
        assert sizes[0] == sizes[1]


def test_a_client_astray_costs_zero_sum_the_round_and_secagg_a_client(federated, running, monkeypatch):
    """One client of each cohort sends what is not finite."""
    attack = ["federation.attack={kind: nan, fraction: 0.15}", "federation.cohort=8"]
    padded = running(federated(*attack, "privacy.aggregation=zero_sum"))
    assert padded.state.theta.equal(padded.start)
    assert all(record["refused"] == {"not finite": 1, "pads remain": 7} for record in padded.records)
    hidden = running(federated(*attack, "privacy.aggregation=secagg"))
    assert not hidden.state.theta.equal(hidden.start) and hidden.state.theta.isfinite().all()
    assert all(record["refused"] == {"not finite": 1} and record["replies"] == 7 for record in hidden.records)


class Watched:
    """Every secure mean of a run with what went into it."""

    def __init__(self, monkeypatch) -> None:
        self.calls = []
        original = secure.SecureSums.mean

        def watching(sums, *arguments):
            mean, outcome = original(sums, *arguments)
            people, asked = sums.clients.people, sums.clients.kept()
            rows = {client: kept.row for client, kept in sums.clients.rows.items()}
            weights = {client: int(people.weights[client]) for client in asked}
            self.calls.append((rows, weights, dict(sums.clients.leaves), mean, outcome))
            return mean, outcome

        monkeypatch.setattr(secure.SecureSums, "mean", watching)


FAILURES = "federation.failures={unavailable: 0.1, crash: 0.15, corrupt: 0.1, deadline: 2}"


def test_under_dropouts_at_every_phase_the_mean_is_the_survivors_or_there_is_none(federated, running, monkeypatch):
    watched = Watched(monkeypatch)
    found = running(
        federated(
            *SECAGG,
            FAILURES,
            "federation.devices=[{delay: 1}]",
            "federation.cohort=8",
            "privacy.threshold=0.51",
            "stages.all={name: all, train: head, rounds: 40, local: {steps: 1}, batch_size: 8}",
            "federation.evaluate_every=40",
        )
    )
    phases = Counter()
    for (rows, weights, lost, mean, taken), record in zip(watched.calls, found.records, strict=True):
        phases.update(lost.values())
        assert record["replies"] + sum(record["refused"].values()) == record["cohort"]
        assert record["replies"] == len(taken.survivors)
        if mean is None:
            assert "aborted" in record["refused"] and not taken.survivors
            continue
        assert set(taken.survivors) == {c for c in weights if lost.get(c, (9, ""))[0] > secure.PAD}
        total = sum(weights[client] for client in taken.survivors)
        plain = sum(weights[client] * rows[client].astype(np.float64) for client in taken.survivors) / total
        np.testing.assert_allclose(mean, plain, atol=1e-6)
    assert {phase for phase, _ in phases} == {0, 1, 2, 3} and {why for _, why in phases} == {"crash", "late", "corrupt"}
    reasons = [line for line in told(found) if line.status not in ("ok", "aborted")]
    assert {line.status for line in reasons} >= {"unavailable", "crash", "late", "checksum"}
    assert {line.what for line in told(found) if line.direction == "up" and line.size} == {
        f"update.{phase}" for phase in secagg.PHASES
    }


def test_with_three_of_ten_lost_at_any_phase_in_each_of_fifty_rounds_every_sum_is_exact():
    rng, inputs, point = np.random.default_rng(0), secure.Inputs(HIDDEN, 0, "stage"), FixedPoint(32, 10, 60.0, 60)
    phases = set()
    for number in range(50):
        rows = {client: rng.normal(size=6).astype(np.float32) / 10 for client in range(10)}
        weights = {client: int(rng.integers(1, 61)) for client in range(10)}
        gone = rng.choice(10, 3, replace=False).tolist()
        fates = dict(zip(gone, rng.choice(["crash", "late", "corrupt"], 3).tolist(), strict=True))
        lost = secure.departures(0, "stage", number, fates)
        phases |= set(lost.values())
        total, weight, found = weighted_sum(rows, weights, 60, lost, number, HIDDEN)
        assert found.survivors == [client for client in range(10) if lost.get(client, (9, ""))[0] > secure.PAD]
        sent = [
            point.encode(
                rows[client].astype(float), weights[client], inputs.uniforms(number, "update", client, count=6)
            )
            for client in found.survivors
        ]
        expected, sum_of_weights = point.decode(np.sum(sent, axis=0, dtype="<u4"))
        assert total.numpy().tolist() == expected.tolist()
        assert weight == sum_of_weights == sum(weights[client] for client in found.survivors)
    assert len(phases) == 4 + 1 + 4  # crashes and damage in every phase, lateness in that of the values


def test_below_the_threshold_a_round_is_given_up_nothing_is_revealed_and_the_run_goes_on(
    federated, running, monkeypatch
):
    servers = []
    made = secagg.SumServer.__init__

    def making(self, *arguments, **options):
        made(self, *arguments, **options)
        servers.append(self)

    monkeypatch.setattr(secagg.SumServer, "__init__", making)
    found = running(
        federated(*SECAGG, "federation.failures={crash: 0.4}", "stages.all.rounds=8", "privacy.threshold=0.8")
    )
    given_up = [record["round"] for record in found.records if not record["replies"]]
    assert 0 < len(given_up) < 8
    assert [server.total is None for server in servers] == [record["round"] in given_up for record in found.records]
    rows = told(found)
    for record in found.records:
        protocol = {line.status for line in rows if line.round == record["round"] and line.what.startswith("update.")}
        assert protocol == ({"aborted"} if record["round"] in given_up else {"ok"})
        assert ("aborted" in record["refused"]) == (record["round"] in given_up)
    assert found.state.refused["aborted"] == sum(record["refused"].get("aborted", 0) for record in found.records)


def test_where_nobody_can_be_reached_secure_rounds_change_nothing(federated, running):
    found = running(federated(*SECAGG, "federation.failures={unavailable: 0.99}", "stages.all.rounds=2"))
    assert found.state.theta.equal(found.start)


def test_the_same_seed_gives_other_pads_and_the_same_sums(federated, running, monkeypatch):
    sent, reply = [], secagg.SumClient.reply

    def noting(self, message):
        answer = reply(self, message)
        if self.phase == 3:
            sent[-1].append(answer)
        return answer

    monkeypatch.setattr(secagg.SumClient, "reply", noting)
    found = []
    for _ in range(2):
        sent.append([])
        found.append(running(federated(*SECAGG, *SPARSE)))
    assert found[0].state.theta.equal(found[1].state.theta)
    assert len(sent[0]) == len(sent[1]) > 15 and not set(sent[0]) & set(sent[1])


def test_a_tier_that_too_few_hold_stays_as_it_is(federated, running):
    """Of a cohort of five, four are needed for a sum; some rounds have fewer that hold all of the mask."""
    devices = "federation.devices=[{share: 0.8}, {share: 0.2, density: 0.3}]"
    found = running(federated(*SECAGG, *SPARSE, devices, "privacy.threshold=0.8", "stages.all.rounds=6", "seed=5"))
    refused = {line.round for line in told(found) if line.status == secure.FEW_HOLDERS}
    assert 0 < len(refused) < 6
    assert all(record["replies"] == 5 for record in found.records)


# --- other secure sums -----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 6), st.integers(0, 2**32), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans())
def test_secure_sums_keep_scores_that_span_many_orders(clients, seed, sizes, half):
    rng = np.random.default_rng(seed)
    space = ParamSpace(tuple("abcd"[: len(sizes)]), tuple((size,) for size in sizes))
    scale = np.repeat(10.0 ** rng.integers(-30, 30, len(sizes)), sizes)
    values = torch.from_numpy(rng.normal(size=(clients, space.size)) * scale * (rng.random(space.size) < 0.8))
    ns = rng.integers(0, 10**6, clients).tolist()
    coding = EXACT if half else Coding("fp64")
    parts = list(zip(range(clients), values, ns, strict=True))
    plain, n = summed(Given("scores", 1, space, parts, coding))
    hidden, same = summed(Given("scores", 1, space, parts, coding), privacy=HIDDEN)
    assert n == same == sum(ns)
    largest = values.abs().amax(0, keepdim=True) if space.size else values
    assert ((hidden - plain).abs() <= 1e-12 * torch.from_numpy(scale) * 10 + 1e-12 * largest).all()


def test_many_clients_are_summed_in_groups(monkeypatch, tmp_path):
    monkeypatch.setattr(secure, "MOST", 4)
    space = ParamSpace(("a",), ((3,),))
    parts = [(client, torch.arange(3.0) + client, 2) for client in range(10)]
    ledger = Ledger(tmp_path / "ledger.csv")
    total, n = summed(Given("statistics", 0, space, parts), privacy=HIDDEN, ledger=ledger)
    assert n == 20 and torch.allclose(total, 10 * torch.arange(3.0).double() + 45)
    ledger.sync()
    sent = Counter(line.client for line in lines(ledger.path) if line.what == "statistics.share")
    assert sent == dict.fromkeys(range(10), 2)  # up and down, in one group each


def test_a_ridge_head_through_a_secure_sum_is_the_same_head():
    rng = np.random.default_rng(0)
    features, labels = torch.from_numpy(rng.normal(size=(300, 12))).float(), torch.from_numpy(rng.integers(0, 4, 300))
    clients = [(client, part) for client, part in enumerate(np.array_split(rng.permutation(300), 7))]
    experiment = parse_config(CONFIG, ["stages=[{name: head, train: head, method: ridge}]"])
    heads = [
        federated_ridge(experiment.stages[0].ridge, features, labels, 4, clients, None, privacy=how)
        for how in (Privacy(), HIDDEN)
    ]
    torch.testing.assert_close(heads[0][0], heads[1][0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(heads[0][1], heads[1][1], rtol=1e-9, atol=1e-12)
    assert heads[0][2] == heads[1][2]


# --- differential privacy --------------------------------------------------------------------------------------------


def test_epsilon_is_told_every_round_and_in_the_summary(federated, tmp_path):
    stages = (
        "stages=[{name: head, train: head, method: ridge}, {name: all, train: all, sparse: true, rounds: 3, "
        "local: {steps: 1}, batch_size: 8}]"
    )
    budget = (
        "privacy.dp={noise_multiplier: 0.8, clip_norm: 0.1, scores: {clip_norm: 1, noise_multiplier: 1}, "
        "statistics: {clip_norm: 10, noise_multiplier: 1}}"
    )
    experiment = federated(stages, budget, SPARSE[0], "federation.weighting=uniform", "federation.cohort=0.5")
    summary = run(experiment, tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    spent = [record["epsilon"] for record in records]
    assert all(one < other for one, other in pairwise(spent))
    assert spent[0] == pytest.approx(dp.spent(1, 1, 0, 1e-5, [dp.Release(1.0)]), rel=1e-6)
    told = summary["privacy"]
    assert told["epsilon"] == spent[-1] and told["rounds"] == 3 and told["releases"] == 2
    assert spent[-1] == pytest.approx(dp.spent(0.8, 0.5, 3, 1e-5, [dp.Release(1.0)] * 2), rel=1e-6)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Client-level differential privacy" in page and "epsilon spent by round" in page
    key = tmp_path / "run" / "checkpoints" / "dp.key"
    assert (
        key.stat().st_mode & 0o777 == 0o600
        and key.read_bytes().hex() not in (tmp_path / "run" / "config.yaml").read_text()
    )


@pytest.mark.parametrize(("rounds_", "refresh"), [(5, 2), (3, None)])
def test_a_run_releases_exactly_what_was_planned(federated, running, rounds_, refresh):
    """The noise for an epsilon is computed from the plan, so a release outside the plan would not be paid for."""
    scores = "scores: {clip_norm: 1, noise_multiplier: 2}"
    experiment = federated(
        *SPARSE,
        f"privacy.dp={{noise_multiplier: 1, clip_norm: 0.1, {scores}}}",
        PRIVATE[1],
        f"stages.all.rounds={rounds_}",
        f"mask.refresh={refresh or 'null'}",
        "mask.calibration_rounds=2",
    )
    planned, releases = dp.planned(experiment)
    given = running(experiment).context.account.numbers()
    assert given == {"rounds": planned, "releases": [2.0] * sum(release.times for release in releases)}


def test_two_runs_of_one_seed_have_other_cohorts_and_other_noise(federated, running):
    first, second = (running(federated(*PRIVATE, "federation.cohort=0.5", "stages.all.rounds=6")) for _ in range(2))
    cohorts = [[record["cohort"] for record in found.records] for found in (first, second)]
    drawn = [
        [found.context.population.cohort("all", number).tolist() for number in range(6)] for found in (first, second)
    ]
    assert drawn[0] != drawn[1] and [len(cohort) for cohort in drawn[0]] == cohorts[0]
    assert not first.state.theta.equal(second.state.theta)


@pytest.mark.parametrize(("what", "deviation"), [("scores", 2 * 3.0), ("statistics", 0.5 * 4.0)])
def test_scores_and_statistics_get_their_own_noise(what, deviation):
    text = "scores: {clip_norm: 3, noise_multiplier: 2}, statistics: {clip_norm: 4, noise_multiplier: 0.5}"
    stages = "{name: head, train: head, method: ridge}, {name: all, train: all, sparse: true, rounds: 2}"
    experiment = parse_config(
        CONFIG,
        [f"privacy.dp={{noise_multiplier: 1, clip_norm: 1, {text}}}", f"stages=[{stages}]", SPARSE[0], PRIVATE[1]],
    )
    account, space = dp.Account(experiment, 0.5, 8, bytes(32), {}), ParamSpace(("a",), ((20_000,),))
    total, count = summed(Given(what, 0, space, [(3, torch.zeros(space.size), 1)]), account=account)
    assert total.std() == pytest.approx(deviation, rel=0.03) and count == 1
    assert account.numbers()["releases"] == [{"scores": 2.0, "statistics": 0.5}[what]]


def test_a_round_that_nobody_is_drawn_for_gives_out_noise_all_the_same(federated, running, monkeypatch):
    monkeypatch.setattr("fedsieve.federation.population.poisson_cohort", lambda *_: np.arange(0))
    found = running(federated(*PRIVATE, "federation.cohort=0.001", "stages.all.rounds=3"))
    assert [record["cohort"] for record in found.records] == [0, 0, 0]
    # 8 clients at a rate of 0.001: noise of 0.1, divided by 0.008, three times.
    moved = (found.state.theta - found.start).double()
    assert moved.std() == pytest.approx(3**0.5 * 0.1 / 0.008, rel=0.05)
    assert found.records[-1]["epsilon"] > 0


def test_without_noise_the_private_mean_is_that_of_clipped_updates(federated, running, monkeypatch):
    monkeypatch.setattr("fedsieve.federation.population.poisson_cohort", lambda *_: np.arange(8))
    monkeypatch.setattr(dp, "noisy", lambda total, *_: total)
    everyone = ("federation.weighting=uniform", "federation.cohort=8")
    plain = running(federated(*everyone))
    loose, tight = (
        running(federated(f"privacy.dp={{noise_multiplier: 1.0, clip_norm: {norm}}}", *everyone))
        for norm in (1e3, 0.01)
    )
    assert (loose.state.theta - plain.state.theta).norm() < 1e-4 * (plain.state.theta - plain.start).norm()
    assert 0 < (tight.state.theta - tight.start).norm() <= 3 * 0.01 * 1.01


def test_the_outlook_is_said_before_training(federated, running):
    found = running(federated(*PRIVATE, "federation.cohort=0.5"))
    assert sum("times the clip norm" in text and "Warning" in text for text in found.said) == 1


# --- hostile clients -------------------------------------------------------------------------------------------------

HEADS = (
    "stages=[{name: all, train: head, rounds: 20, local: {steps: 4}, batch_size: 16, optimizer: {lr: 1.0}}]",
    "federation={clients: 20, cohort: 10, partition: {kind: iid}, evaluate_every: 20}",
    "model.options={patch_size: 8, embed_dim: 96, depth: 1, num_heads: 2}",
)


def test_the_mean_collapses_where_robust_aggregators_hold(federated, running):
    def accuracy(*overrides: str) -> float:
        return running(federated(*HEADS, *overrides)).records[-1]["val_accuracy"]

    clean, attack = accuracy(), "federation.attack={kind: sign_flip, fraction: 0.2, factor: 10}"
    assert clean > 0.6 and accuracy(attack) < clean / 2
    for rule in ("{kind: multi_krum, f: 3}", "geometric_median", "{kind: trimmed_mean, mix: 4}"):
        assert accuracy(attack, f"federation.aggregator={rule}") > clean - 0.05


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        ([PRIVATE[1], "privacy.dp={noise_multiplier: 1.0, clip_norm: 1e30}"], "noise of privacy.dp"),
        (["federation.attack={kind: gaussian_noise, factor: 1e37}", "federation.cohort=8"], "Hostile clients"),
    ],
)
def test_a_run_that_noise_or_attacks_carry_away_says_so(federated, running, overrides, cause):
    with pytest.raises(Diverged, match=cause):
        running(federated(*overrides))


def test_each_attack_does_what_it_says(federated, running, monkeypatch):
    sent = {}
    original = Hostile.sent

    def watching(self, clients, moved, number):
        said = original(self, clients, moved.clone(), number)
        pairs = zip(clients, moved, said, strict=True)
        sent.setdefault(number, {}).update({client: [row.clone(), other.clone()] for client, row, other in pairs})
        return said

    monkeypatch.setattr(Hostile, "sent", watching)
    for kind in ("sign_flip", "gaussian_noise", "nan", "stale_replay", "label_flip"):
        sent.clear()
        found = running(federated(f"federation.attack={{kind: {kind}, fraction: 0.4}}", "federation.cohort=8"))
        hostile = found.context.population.hostile
        assert len(hostile) == 3
        for number, clients in sent.items():
            for client, (trained, said) in clients.items():
                if client not in hostile or kind == "label_flip" or (kind == "stale_replay" and not number):
                    assert said.equal(trained)
                elif kind == "sign_flip":
                    assert said.equal(-10 * trained)
                elif kind == "gaussian_noise":
                    assert said.norm() == pytest.approx(10 * trained.norm().item(), rel=0.1)
                elif kind == "nan":
                    assert said.isnan().all()
                else:
                    assert said.equal(sent[0][client][0]) and not said.equal(trained)
        refused = {"not finite": 3} if kind == "nan" else {}
        assert all(record["refused"] == refused for record in found.records)


def test_flipped_labels_are_those_of_hostile_clients_alone(federated, running):
    plain = running(federated("federation.cohort=8"))
    found = running(federated("federation.attack={kind: label_flip, fraction: 0.4}", "federation.cohort=8"))
    people = found.context.population
    truth, taught = plain.setup.train.labels, found.setup.train.labels
    for client in range(8):
        mine = people.examples(client)
        assert (taught[mine] == (9 - truth[mine] if client in people.hostile else truth[mine])).all()
    assert not found.state.theta.equal(plain.state.theta)


def test_a_rule_that_too_few_answered_for_leaves_the_model_alone(federated, running):
    crash = "federation.failures={crash: 0.4}"
    found = running(
        federated("federation.aggregator={kind: krum, f: 1}", crash, "federation.cohort=6", "stages.all.rounds=6")
    )
    few = [record for record in found.records if record["replies"] < 5]
    assert 0 < len(few) < 6 and all(record["refused"]["too few replies"] == record["replies"] for record in few)


RULES = {
    "{kind: median}": Robust(),
    "{kind: median, mix: 2}": Robust(mix=2),
    "{kind: trimmed_mean, share: 0.3}": Robust(share=0.3),
    "{kind: krum, f: 3}": Robust(f=3),
    "{kind: multi_krum, f: 2}": Robust(f=2),
    "{kind: multi_krum, f: 1, m: 2}": Robust(m=2),
    "geometric_median": Robust(),
    "norm_bound": Robust(),
    "{kind: norm_bound, limit: 0.25}": Robust(limit=0.25),
}


@pytest.mark.parametrize("text", RULES)
def test_every_aggregator_setting_reaches_its_rule(tmp_path, text):
    """Each setting also changes the result, so a lost one would show."""
    rows = torch.from_numpy(np.random.default_rng(2).normal(size=(9, 40)))
    rule = parse_config(CONFIG, [f"federation.aggregator={text}"]).federation.aggregator
    found, count = robust_mean((Update(client, row, 1.0) for client, row in enumerate(rows)), rule, 9, tmp_path)
    chosen = RULES[text]
    assert found.equal(aggregate(rule.kind, rows, torch.ones(9), chosen)) and count == 9
    assert chosen == Robust() or not found.equal(aggregate(rule.kind, rows, torch.ones(9), Robust()))
    if chosen.limit == 0.25:
        assert torch.allclose(found, (rows * (0.25 / rows.norm(dim=1, keepdim=True))).mean(0))


def test_updates_that_fill_the_memory_lie_in_a_file(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.normal(size=(7, 50)).astype(np.float32))
    rule = parse_config(CONFIG, ["federation.aggregator={kind: multi_krum, f: 2}"]).federation.aggregator

    def updates():
        return (Update(client, row, 1.0) for client, row in enumerate(rows))

    there = robust_mean(updates(), rule, 9, tmp_path)[0]
    monkeypatch.setattr("fedsieve.federation.means.IN_MEMORY", 100)
    mapped, count = robust_mean(updates(), rule, 9, tmp_path)
    assert mapped.equal(there) and count == 7 and not list(tmp_path.iterdir())


# --- all together ----------------------------------------------------------------------------------------------------

TOGETHER = {
    "secagg": [*SECAGG, *SPARSE, "federation.failures={crash: 0.2}"],
    "zero_sum": ["privacy.aggregation=zero_sum"],
    "robust": [
        "federation.aggregator={kind: geometric_median, mix: 2}",
        "federation.attack=sign_flip",
        "federation.cohort=6",
    ],
    "dp": [*PRIVATE, "federation.cohort=0.6", "stages.all.rounds=4"],
}


@pytest.mark.parametrize("case", TOGETHER)
def test_executors_agree(federated, running, monkeypatch, case):
    monkeypatch.setattr("fedsieve.runner.federated.load_or_make_key", lambda *_, **__: bytes(range(32)))
    sequential = running(federated(*TOGETHER[case], "executor=sequential"))
    stacked = running(federated(*TOGETHER[case], "executor=stacked", "clients_at_once=3"))
    moved = (sequential.state.theta - sequential.start).norm()
    assert moved > 0 and (stacked.state.theta - sequential.state.theta).norm() <= 1e-3 * moved
    for one, other in zip(sequential.records, stacked.records, strict=True):
        assert one["bytes_up"] == other["bytes_up"] and one["bytes_down"] == other["bytes_down"]
        assert one["refused"] == other["refused"] and one.get("epsilon") == other.get("epsilon")


STALE = "federation.attack=stale_replay"
REFUSED = {
    "robust, secure": ([*SECAGG, "federation.aggregator=krum"], "compares single updates"),
    "robust, zero_sum": (["privacy.aggregation=zero_sum", "federation.aggregator=median"], "compares single updates"),
    "client masks, secagg": ([*SECAGG, *SPARSE, "mask.scope=client"], "one client alone trains"),
    "zero_sum, dropouts": (["privacy.aggregation=zero_sum", "federation.failures.crash=0.1"], "survives dropouts"),
    "zero_sum, tiers": (
        ["privacy.aggregation=zero_sum", *SPARSE, "federation.devices=[{share: 0.5}, {share: 0.5, density: 0.5}]"],
        "density below 1",
    ),
    "few hold a tier": (
        [*SECAGG, *SPARSE, "federation.devices=[{share: 0.3}, {share: 0.7, density: 0.5}]"],
        "30 % of the clients",
    ),
    "top_k": ([*SECAGG, "message.top_k=0.5"], "message.top_k"),
    "error feedback": ([*SECAGG, "message.error_feedback=true"], "message.error_feedback"),
    "int8": ([*SECAGG, "message.up=int8"], "fixed point"),
    "scaffold, secure": ([*SECAGG, "federation.correction.kind=scaffold"], "second vector"),
    "scaffold, robust": (["federation.aggregator=median", "federation.correction.kind=scaffold"], "second vector"),
    "scaffold, dp": ([*PRIVATE, "federation.correction.kind=scaffold"], "second vector"),
    "dp, robust": ([*PRIVATE, "federation.aggregator=median"], "what one client can do"),
    "dp, secagg": ([*PRIVATE, *SECAGG], "below its threshold"),
    "dp, weights": ([PRIVATE[0]], "weighting: uniform"),
    "dp, client masks": ([*PRIVATE, *SPARSE, "mask.scope=client"], "masks themselves"),
    "dp, scores": ([*PRIVATE, *SPARSE], "privacy.dp.scores"),
    "dp, public training images": ([*PRIVATE, *SPARSE, "mask.scope=public", "data.val_fraction=0"], "Hold some out"),
    "dp, ridge": ([*PRIVATE, "stages=[{name: head, train: head, method: ridge}]"], "privacy.dp.statistics"),
    "dp, blend": ([*PRIVATE, "federation.blend=true"], "federation.blend"),
    "dp, client validation": ([*PRIVATE, "federation.client_validation=0.1"], "client_validation"),
    "dp, minimum": ([*PRIVATE, "federation.minimum_replies=2"], "minimum_replies"),
    "dp, nothing": (["privacy.dp={clip_norm: 1.0}"], "either epsilon"),
    "dp, idle scores": (
        ["privacy.dp={epsilon: 1, clip_norm: 1.0, scores: {clip_norm: 1.0, noise_multiplier: 1.0}}", PRIVATE[1]],
        "drop it",
    ),
    "robust, client masks": ([*SPARSE, "mask.scope=client", "federation.aggregator=median"], "different weights"),
    "stale, refreshed": ([STALE, *SPARSE, "mask.refresh=1"], "one mask for the whole stage"),
    "unused setting": (["federation.aggregator={kind: median, f: 2}"], "belongs to kind: krum or multi_krum"),
    "unused width": (["privacy.bits=16"], "belongs to aggregation: secagg"),
    "no such kind": (["federation.aggregator=krumm"], 'Did you mean "krum"'),
    "mixed mean": (["federation.aggregator={kind: mean, mix: 2}"], "mix belongs to kind: median"),
    "no mapping": (["federation.aggregator=7"], "should be a word or a mapping, got 7. Words: mean, median"),
    "unaccountable": (["privacy.dp={epsilon: 8, delta: 1e-30, clip_norm: 1.0}", PRIVATE[1]], "privacy.dp.delta"),
    "central": (
        ["federation=null", "privacy.aggregation=secagg", "stages=[{name: a, epochs: 1}]"],
        "needs a federation",
    ),
}
NUMBERS = {
    "two clients": (["privacy.aggregation=secagg", "federation.cohort=2"], "at least 3 clients"),
    "two that score": ([*SECAGG, *SPARSE, "mask.clients=2"], "mask.clients"),
    "krum": (["federation.aggregator={kind: krum, f: 2}", "federation.cohort=6"], "f up to 1 works"),
    "mix": (["federation.aggregator={kind: median, mix: 2}", "federation.cohort=4"], "mix up to 1 works"),
    "delta": (["privacy.dp={epsilon: 8, delta: 0.2, clip_norm: 1.0}", PRIVATE[1]], "given away outright"),
    "trimmed": (["federation.aggregator={kind: trimmed_mean, share: 0.4}"], "none is left"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused_when_it_is_read(federated, case):
    overrides, words = REFUSED[case]
    with pytest.raises(FedsieveError) as caught:
        federated(*overrides)
    assert words in str(caught.value) and caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize("case", NUMBERS)
def test_what_cannot_work_with_so_few_is_refused_before_it_begins(federated, case):
    overrides, words = NUMBERS[case]
    with pytest.raises(FedsieveError, match=words) as caught:
        plan(federated(*overrides))
    assert caught.value.exit_code == 2


def test_the_page_of_a_secure_run_shows_its_phases_and_what_was_given_up(federated, tmp_path):
    summary = run(
        federated(*SECAGG, "federation.failures={crash: 0.4}", "stages.all.rounds=6", "privacy.threshold=0.8"),
        tmp_path / "run",
    )
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Secure sums" in page and "given up" in page and "<td>reveal</td>" in page
    assert summary["privacy"]["aggregation"] == "secagg" and summary["refused"]["aborted"] > 0

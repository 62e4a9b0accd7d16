import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.config import Device, Failures, Federation, Partition, parse_config
from fedsieve.errors import FedsieveError
from fedsieve.federation.population import make_population
from fedsieve.runner.federated import populate

LABELS = np.arange(600) % 10


def population(**settings):
    return make_population(Federation(**({"clients": 30} | settings)), LABELS, seed=1)


@given(st.floats(0, 0.9), st.floats(0.01, 1.0), st.integers(0, 20))
def test_cohorts_are_distinct_clients_that_may_train(held_out, cohort, round):
    people = population(held_out=held_out, cohort=cohort)
    chosen = people.cohort("stage", round)
    assert len(set(chosen.tolist())) == len(chosen) == max(1, round_half(cohort * people.trainers))
    assert set(chosen.tolist()).isdisjoint(people.strangers.tolist())
    assert (chosen == people.cohort("stage", round)).all()
    everyone = people.trainer(np.arange(people.trainers))
    assert sorted([*everyone.tolist(), *people.strangers.tolist()]) == list(range(30))


def round_half(value):
    return round(value)


def test_every_client_is_chosen_at_some_time_and_none_more_often_than_chance_allows():
    people = population(cohort=3)
    counts = np.bincount(np.concatenate([people.cohort("s", number) for number in range(2000)]), minlength=30)
    assert counts.sum() == 6000 and abs(counts - 200).max() < 5 * np.sqrt(200)


@given(st.integers(1, 15), st.floats(0, 0.5), st.integers(0, 5))
def test_shuffled_sampling_calls_every_client_once_before_any_twice(cohort, held_out, number):
    people = population(cohort=cohort, sampling="shuffled", held_out=held_out)
    rounds = people.trainers // people.cohort_size
    called = np.concatenate([people.cohort("s", number * rounds + r) for r in range(rounds)])
    assert len(set(called.tolist())) == len(called) > people.trainers - people.cohort_size
    assert set(called.tolist()).isdisjoint(people.strangers.tolist())


def test_whom_a_pass_leaves_over_changes():
    people = population(cohort=20, sampling="shuffled")
    assert set(np.concatenate([people.cohort("s", number) for number in range(9)]).tolist()) == set(range(30))


def test_cohorts_differ_by_round_stage_and_seed():
    people, other = population(cohort=5), make_population(Federation(clients=30, cohort=5), LABELS, seed=2)
    drawn = {tuple(who.cohort(stage, number)) for who in (people, other) for stage in "ab" for number in range(5)}
    assert len(drawn) > 15


def test_devices_are_dealt_by_their_shares():
    people = make_population(
        Federation(clients=600, devices=[Device(share=0.25, density=0.5), Device(share=0.75)]), LABELS, seed=0
    )
    weak = sum(people.device(client).density == 0.5 for client in range(600))
    assert abs(weak - 150) < 45
    assert people.device(7) == people.device(7)


def test_fates_come_as_often_as_asked():
    people = population(
        failures=Failures(unavailable=0.2, crash=0.25, corrupt=0.5, deadline=1.0), devices=[Device(delay=1.0)]
    )
    fates = [people.fate("s", number, client) for number in range(100) for client in range(30)]
    share = {fate: fates.count(fate) / len(fates) for fate in set(fates)}
    late = 0.8 * 0.75 * np.exp(-1)
    assert share["unavailable"] == pytest.approx(0.2, abs=0.03)
    assert share["crash"] == pytest.approx(0.2, abs=0.03)
    assert share["late"] == pytest.approx(late, abs=0.03)
    assert share["corrupt"] == pytest.approx(0.5 * (0.6 - late), abs=0.03)


def test_more_clients_than_the_data_brings_are_refused(monkeypatch):
    """What the config cannot know: a natural partition has as many as its column names."""
    monkeypatch.setattr("fedsieve.runner.federated.load_column", lambda *_: np.arange(600) % 6)
    natural = "federation: {partition: {kind: natural, column: user}, cohort: COHORT}\nstages: [{name: a, rounds: 1}]"
    assert len(populate(parse_config(natural.replace("COHORT", "6")), LABELS, np.arange(600)).cohort("a", 0)) == 6
    with pytest.raises(FedsieveError, match="federation.cohort: 7 clients are asked for, but there are 6"):
        populate(parse_config(natural.replace("COHORT", "7")), LABELS, np.arange(600))


def test_a_million_clients_take_memory_like_the_data():
    import tracemalloc

    labels = np.arange(1_000_000) % 10
    tracemalloc.start()
    people = make_population(Federation(clients=1_000_000, cohort=10, partition=Partition()), labels, seed=0)
    assert len(people.cohort("s", 0)) == 10
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6


def test_sizes_are_counted_once_so_that_rounds_do_not_cost_what_all_clients_do():
    people = population(client_validation=0.2)
    assert people.sizes is people.sizes
    assert people.sizes.tolist() == [len(people.examples(client)) for client in range(len(people))]

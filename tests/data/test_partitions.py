import io
import itertools
import re
import tracemalloc
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedsieve.config import Data, Partition
from fedsieve.data.partitions import (
    Shards,
    _draw_owners,
    _fill_up,
    _fill_up_slots,
    class_counts,
    client_accuracies,
    label_weights,
    make_partition,
)
from fedsieve.data.sources import load_column, load_images
from fedsieve.errors import FedsieveError
from fedsieve.randomness import generator

SEEDS = st.integers(0, 5)
# Sizes of classes in a file sorted by class; a size of 0 is a class number that does not occur.
CLASSES = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any)


def labels_of(sizes) -> np.ndarray:
    return np.repeat(np.arange(len(sizes)), sizes)


def make(labels, clients, seed=0, groups=None, **fields) -> Shards:
    return make_partition(Partition(**fields), labels, clients, generator(seed, "partition"), groups)


def table(shards, labels) -> np.ndarray:
    """The dense class-by-client table, counted one client at a time."""
    return np.stack([np.bincount(labels[shards.client(k)], minlength=labels.max() + 1) for k in range(len(shards))])


def check_dealt_once(shards, labels, clients):
    assert len(shards) == clients
    dealt = [row for k in range(clients) for row in shards.client(k).tolist()]
    assert sorted(dealt) == list(range(len(labels)))
    assert shards.sizes.tolist() == [len(shards.client(k)) for k in range(clients)]
    assert shards.sizes.min() >= 1


# --- iid -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.data(), SEEDS)
def test_iid_sizes_differ_by_at_most_one(count, data, seed):
    clients = data.draw(st.integers(1, count))
    shards = make(np.zeros(count, dtype=int), clients, seed, kind="iid")
    check_dealt_once(shards, np.zeros(count), clients)
    assert np.ptp(shards.sizes) <= 1


@pytest.mark.parametrize("fields", [{"kind": "iid"}, {"kind": "quantity", "alpha": 1.0, "min_size": 300}])
@pytest.mark.parametrize("labels", [labels_of([1000] * 10), np.arange(10_000) % 10], ids=["sorted", "in turn"])
def test_no_order_of_the_file_keeps_a_class_from_a_client(fields, labels):
    shards = make(labels, 10, **fields)
    for k in range(10):
        shares = np.bincount(labels[shards.client(k)], minlength=10) / shards.sizes[k]
        assert np.abs(shares - 0.1).max() < 0.08
        assert 3500 < shards.client(k).mean() < 6500


# --- classes ---------------------------------------------------------------------------------------------------------


def owners_fit(sizes, clients, nc) -> bool:
    """Whether balanced owners can each have a row: the largest class gets the most owners, and so on."""
    sizes = sorted((size for size in sizes if size), reverse=True)
    base, more = divmod(clients * nc, len(sizes))
    wanted = [base + 1] * more + [base] * (len(sizes) - more)
    return nc <= len(sizes) <= clients * nc and all(size >= want for size, want in zip(sizes, wanted, strict=True))


@settings(max_examples=300)
@given(CLASSES, st.integers(1, 20), st.integers(1, 8), SEEDS)
def test_classes_hold_their_promises_or_say_what_would(sizes, clients, nc, seed):
    labels = labels_of(sizes)
    if clients > len(labels) or not owners_fit(sizes, clients, nc):
        with pytest.raises(FedsieveError) as refusal:
            make(labels, clients, seed, kind="classes", nc=nc)
        assert refusal.value.exit_code == 2
        proposed = proposals(str(refusal.value), clients, nc)
        if "every owner needs one" in str(refusal.value):
            assert proposed and all(owners_fit(sizes, *numbers) for numbers in proposed)
        if "to nobody" in str(refusal.value) and 1 not in sizes:
            assert len(proposed) == 2 and all(owners_fit(sizes, *numbers) for numbers in proposed)
        return
    shards = make(labels, clients, seed, kind="classes", nc=nc)
    check_dealt_once(shards, labels, clients)
    counts = table(shards, labels)[:, np.unique(labels)]
    assert ((counts > 0).sum(1) == nc).all()
    owners = (counts > 0).sum(0)
    assert owners.min() >= 1 and np.ptp(owners) <= 1
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1


def proposals(message, clients, nc):
    """The (clients, nc) a refusal proposes."""
    new_nc, new_clients = (re.findall(rf"{name} to (\d+)", message) for name in ("nc", "clients"))
    if "nc to 1 and federation.clients" in message:
        return [(int(new_clients[0]), 1)]
    return [(clients, int(number)) for number in new_nc] + [(int(number), nc) for number in new_clients]


def test_at_one_class_per_client_no_class_is_left_to_nobody():
    """Independent draws would leave about 37 of the 100 classes, and their accuracy, out."""
    labels = labels_of([20] * 100)
    counts = table(make(labels, 100, kind="classes", nc=1), labels)
    assert sorted(counts.argmax(1)) == list(range(100)) and (counts.max(1) == 20).all()


def test_a_class_is_split_by_its_owners_and_not_by_all_clients():
    """CIFAR-100 among 100 clients: split by clients, five classes would be 25 images."""
    labels = labels_of([500] * 100)
    shards = make(labels, 100, kind="classes", nc=5)
    assert (shards.sizes == 500).all()
    rows = np.sort(shards.client(0)[labels[shards.client(0)] == labels[shards.client(0)[0]]])
    assert len(rows) == 100 and np.ptp(rows) > 400 and len(set(np.diff(rows))) > 3


def test_every_ownership_is_equally_likely():
    """Of four clients with two of four classes each there are 90, listed here one by one."""
    pairs = list(itertools.combinations(range(4), 2))
    every = [way for way in itertools.product(pairs, repeat=4) if (np.bincount(np.ravel(way)) == 2).all()]
    assert len(every) == 90
    rng = generator(0, "ownership")
    draws = (_draw_owners(np.full(4, 2), 4, 2, rng) for _ in range(2700))
    seen = Counter(tuple(tuple(sorted(row)) for row in owned.tolist()) for owned in draws)
    assert set(seen) == set(every)
    chi_squared = sum((seen[way] - 30) ** 2 / 30 for way in every)
    assert 45 < chi_squared < 150  # 89 degrees of freedom, standard deviation 13


def test_owners_are_neither_neighbours_nor_in_groups():
    """Dealt round and round, clients would come in groups with the same classes, or never hold two of a group."""
    owned = np.sort(_draw_owners(np.full(100, 50), 1000, 5, generator(0, "ownership")), axis=1)
    holds = np.zeros((1000, 100), dtype=int)
    np.put_along_axis(holds, owned, 1, axis=1)
    overlap = (holds @ holds.T)[np.triu_indices(1000, 1)]
    assert abs(overlap.mean() - 5 * 5 / 100) < 0.01 and (overlap == 5).sum() <= 2
    assert abs((holds[1:] * holds[:-1]).sum(1).mean() - 0.25) < 0.08
    together = (holds.T @ holds)[np.triu_indices(100, 1)]
    # Poisson with this mean: pairs that never meet are a seventh, not the fifth in groups on top of it.
    assert abs(together.mean() - 1000 * 10 / 4950) < 1e-9
    assert abs((together == 0).mean() - np.exp(-together.mean())) < 0.03


def test_no_client_number_is_favoured_by_remainders():
    labels = labels_of([7] * 10)
    total = sum(make(labels, 10, seed, kind="classes", nc=5).sizes for seed in range(200))
    assert np.abs(total / 200 - 7).max() < 0.4


# --- dirichlet and quantity ------------------------------------------------------------------------------------------

ALPHAS = st.sampled_from([5e-324, 1e-3, 0.1, 1.0, 100.0, 1e308])


@settings(max_examples=200)
@given(CLASSES, ALPHAS, st.sampled_from(["dirichlet", "quantity"]), st.data(), SEEDS)
def test_every_client_has_its_minimum_whatever_alpha(sizes, alpha, kind, data, seed):
    labels = labels_of(sizes)
    clients = data.draw(st.integers(1, len(labels)))
    least = data.draw(st.integers(1, len(labels) // clients))
    shards = make(labels, clients, seed, kind=kind, alpha=alpha, min_size=least)
    check_dealt_once(shards, labels, clients)
    assert shards.sizes.min() >= least


@settings(max_examples=300)
@given(CLASSES, ALPHAS, st.integers(1, 12), st.integers(1, 8), st.integers(1, 4), SEEDS)
def test_dirichlet_keeps_its_limit_of_classes_and_its_minimum(sizes, alpha, clients, nc, least, seed):
    labels = labels_of(sizes)
    present = sum(size > 0 for size in sizes)
    try:
        shards = make(labels, clients, seed, kind="dirichlet", alpha=alpha, nc=nc, min_size=least)
    except FedsieveError as refusal:
        # Where every class has rows enough for all its owners' minima, nothing may be refused.
        owners = -(-clients * nc // present)
        room = min(size for size in sizes if size) >= owners * -(-least // nc)
        assert refusal.exit_code == 2 and (nc < present > clients * nc or clients * least > len(labels) or not room)
        return
    check_dealt_once(shards, labels, clients)
    counts = table(shards, labels)
    assert (counts > 0).sum(1).max() <= nc and counts.sum(1).min() >= least


@settings(max_examples=200)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=8), st.integers(1, 4), SEEDS)
def test_the_largest_clients_give_and_only_what_is_needed(sizes, least, seed):
    if sum(sizes) < least * len(sizes):
        return
    holder = labels_of(sizes)
    _fill_up(holder, len(sizes), least, generator(seed, "fill"))
    expected = list(sizes)
    while min(expected) < least:
        expected[expected.index(max(expected))] -= 1
        expected[expected.index(min(expected))] += 1
    after = np.bincount(holder, minlength=len(sizes))
    assert sorted(after) == sorted(expected)
    assert all(new == old for new, old in zip(after, sizes, strict=True) if least <= old < max(expected))


def test_clients_below_the_minimum_are_filled_up_from_all_givers():
    """Clients 0 and 1 hold one class each, clients 2 and 3 nothing. Both empty clients get both classes."""
    labels = labels_of([300, 300])
    for seed in range(5):
        holder = labels.copy()
        _fill_up(holder, 4, 100, generator(seed, "fill"))
        for client in (2, 3):
            assert 25 < np.count_nonzero(labels[holder == client]) < 75


@settings(max_examples=300)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 6), st.data())
def test_slots_are_filled_exactly_when_halls_condition_allows(clients, classes, least, data):
    """However many clients one takes, the classes they own must hold their minima."""
    owners = st.lists(st.integers(0, classes - 1), min_size=1, max_size=classes, unique=True)
    owned = [data.draw(owners) for _ in range(clients)]
    client = np.repeat(np.arange(clients), [len(mine) for mine in owned])
    label = np.concatenate(owned)
    counts = np.array(data.draw(st.lists(st.integers(0, 8), min_size=len(label), max_size=len(label))))
    rows = np.bincount(label, weights=counts, minlength=classes)
    groups = itertools.chain.from_iterable(itertools.combinations(range(clients), n + 1) for n in range(clients))
    possible = all(rows[list({c for k in group for c in owned[k]})].sum() >= least * len(group) for group in groups)
    if clients * least > counts.sum():
        return  # refused before
    if not possible:
        with pytest.raises(FedsieveError, match="examples are missing"):
            _fill_up_slots(counts, label, client, clients, least)
        return
    after = _fill_up_slots(counts, label, client, clients, least)
    assert after.min() >= 0 and np.bincount(client, weights=after).min() >= least
    np.testing.assert_array_equal(np.bincount(label, weights=after, minlength=classes), rows)
    if np.bincount(client, weights=counts).min() >= least:
        np.testing.assert_array_equal(after, counts)


def test_a_client_passes_on_what_it_has_and_is_filled_up_from_another_class():
    """Client 0 owns class 0 only, of which all is with client 1, who has no more than the minimum."""
    after = _fill_up_slots(np.array([0, 2, 0, 5]), np.array([0, 0, 1, 1]), np.array([0, 1, 1, 2]), 3, 2)
    assert after.tolist() == [2, 0, 2, 3]


def test_no_client_is_cut_to_its_minimum_while_larger_ones_remain():
    """A flow left to itself would empty the first giver it meets."""
    counts = np.array([0, 0, 50, 52, 51])
    after = _fill_up_slots(counts, np.zeros(5, dtype=int), np.arange(5), 5, 10)
    assert after[:2].tolist() == [10, 10] and np.ptp(after[2:]) <= 1


@pytest.mark.parametrize("nc", [None, 4])
def test_alpha_goes_from_one_class_each_to_nearly_iid(nc):
    labels = labels_of([400] * 8)

    def top_share(alpha):
        counts = table(make(labels, 20, kind="dirichlet", alpha=alpha, nc=nc), labels)
        return (counts.max(1) / counts.sum(1)).mean()

    even = 1 / (nc or 8)
    assert top_share(0.01) > 0.8 > top_share(0.5) > 1.5 * even and top_share(1000.0) < 1.2 * even


def test_quantity_sizes_spread_as_alpha_falls():
    labels = np.zeros(10_000, dtype=int)
    small, large = (make(labels, 50, kind="quantity", alpha=alpha).sizes for alpha in (0.1, 1000.0))
    assert np.array_equal(make(labels, 50, kind="quantity", alpha=1e308).sizes, [200] * 50)
    assert small.max() > 1000 and small.min() < 20 and 150 < large.min() <= large.max() < 250


def test_dirichlet_shares_are_those_of_the_distribution():
    """The first client's share of a class over many draws: mean 1/K, variance (K-1)/(K^2 (K alpha + 1))."""
    labels = labels_of([1000] * 50)
    shares = np.concatenate(
        [table(make(labels, 5, seed, kind="dirichlet", alpha=0.5), labels)[0] / 1000 for seed in range(20)]
    )
    assert abs(shares.mean() - 0.2) < 0.03 and abs(shares.var() - 4 / 25 / 3.5) < 0.008


@pytest.mark.parametrize("nc", [None, 39])
def test_rounding_favours_no_client(nc):
    """Cut at floor(2.5 k), the first client would get 2 rows of each of 40 classes, the second 3."""
    sizes = make(labels_of([25] * 40), 10, kind="dirichlet", alpha=1e9, nc=nc).sizes
    assert 80 < sizes.min() <= sizes.max() < 120


@pytest.mark.parametrize("alpha", [1e-9, 5e-324])
def test_one_client_among_many_gets_all_at_a_vanishing_alpha_and_any_may_be_the_one(alpha):
    winners = [make(np.zeros(50, dtype=int), 5, seed, kind="quantity", alpha=alpha).sizes for seed in range(100)]
    assert all(sorted(sizes) == [1, 1, 1, 1, 46] for sizes in winners)
    assert min(Counter(int(sizes.argmax()) for sizes in winners).values()) > 8


# --- natural ---------------------------------------------------------------------------------------------------------


def test_natural_clients_are_the_groups_in_sorted_order():
    groups = np.array(["mia", "bo", "mia", "al", "bo", "mia"], dtype=object)
    shards = make(np.zeros(6, dtype=int), 99, kind="natural", column="user", groups=groups)
    assert [set(shards.client(k)) for k in range(3)] == [{3}, {1, 4}, {0, 2, 5}] and len(shards) == 3
    with pytest.raises(ValueError, match="group of every example"):
        make(np.zeros(6, dtype=int), 3, kind="natural", column="user", groups=groups[:5])


def write_users(file, numbers, users):
    """A picture of each number, its label, and a user."""

    def picture(number):
        buffer = io.BytesIO()
        Image.new("RGB", (4, 4), (number, 0, 0)).save(buffer, "PNG")
        return {"bytes": buffer.getvalue(), "path": None}

    columns = {"image": [picture(n) for n in numbers], "label": [n % 2 for n in numbers], "user": users}
    file.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({**columns, "weight": [0.5] * len(numbers)}), file)


@pytest.mark.parametrize("name", [lambda n: f"user-{n}", lambda n: 7 * n])
@pytest.mark.parametrize("held_out", [False, True])
def test_a_column_comes_row_for_row_with_the_images(tmp_path, name, held_out):
    folder = tmp_path / "set"
    for part, numbers in enumerate((range(20), range(20, 40))):
        write_users(folder / f"train-0000{part}-of-00002.parquet", numbers, [name(n) for n in numbers])
    if not held_out:
        write_users(folder / "test-00000-of-00001.parquet", range(50, 60), [name(n) for n in range(50, 60)])
    data = Data(source=str(folder), cache=str(tmp_path / "cache"))
    for split in ("train", "test"):
        shown = load_images(data, split).images[:, 0, 0, 0].tolist()
        assert load_column(data, split, "user").tolist() == [name(n) for n in shown]


def test_columns_that_name_no_clients_are_refused(tmp_path):
    users = ["a", None, "b", None]
    write_users(tmp_path / "set" / "train.parquet", range(4), users)
    write_users(tmp_path / "set" / "test.parquet", range(4), users)
    data = Data(source=str(tmp_path / "set"), cache=str(tmp_path / "cache"))
    with pytest.raises(FedsieveError, match='no column "usr". Did you mean "user".*It has: image, label, user, weight'):
        load_column(data, "train", "usr")
    with pytest.raises(FedsieveError, match=r"row 1 has no user \(2 such rows\)"):
        load_column(data, "train", "user")
    for column in ("weight", "image"):
        with pytest.raises(FedsieveError, match=f"{column} holds .*whole numbers or words"):
            load_column(data, "train", column)
    for label in "ab":
        (tmp_path / "folders" / label).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "folders" / label / "1.png")
    for source in ("digits", str(tmp_path / "folders")):
        with pytest.raises(FedsieveError, match="has no columns"):
            load_column(Data(source=source), "train", "user")


# --- all kinds -------------------------------------------------------------------------------------------------------

KINDS = [
    {"kind": "iid"},
    {"kind": "classes", "nc": 2},
    {"kind": "dirichlet", "alpha": 0.3, "min_size": 5},
    {"kind": "dirichlet", "alpha": 0.3, "min_size": 5, "nc": 2},
    {"kind": "quantity", "alpha": 0.3, "min_size": 5},
    {"kind": "natural", "column": "user"},
]


@pytest.mark.parametrize("fields", KINDS)
def test_the_seed_decides_and_rows_within_a_client_are_shuffled(fields):
    labels, groups = labels_of([100] * 6), np.arange(600) % 12
    one, same, other = (make(labels, 12, seed, groups, **fields) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.order, same.order)
    np.testing.assert_array_equal(one.offsets, same.offsets)
    assert (one.order != other.order).mean() > 0.9
    largest = one.client(int(one.sizes.argmax()))
    assert 0.2 < (np.diff(largest) > 0).mean() < 0.8


@pytest.mark.parametrize(
    ("order", "offsets"),
    [([0, 1, 1], [0, 3]), ([0, 2], [0, 2]), ([0, 1, 2], [0, 2]), ([0, 1, 2], [1, 3]), ([0, 1, 2], [0, 2, 1, 3])],
)
def test_shards_that_lose_or_repeat_examples_cannot_be_built(order, offsets):
    with pytest.raises(ValueError, match="shards do not|offsets do not"):
        Shards(np.array(order), np.array(offsets))


@pytest.mark.parametrize(
    ("fields", "clients", "message"),
    [
        ({"kind": "iid"}, 11, "11 clients cannot share 10 examples. Set 10 at most"),
        (
            {"kind": "quantity", "alpha": 1.0, "min_size": 4},
            3,
            "need 12, and there are 10.*min_size to 3.*clients to 2",
        ),
        ({"kind": "dirichlet", "alpha": 1.0, "min_size": 4}, 3, "need 12, and there are 10"),
        ({"kind": "classes", "nc": 6}, 3, "nc: 6 is more than the 5 classes"),
        ({"kind": "classes", "nc": 1}, 4, "some of the 5 classes to nobody. Set nc to 2.*clients to 5"),
        ({"kind": "dirichlet", "alpha": 1.0, "nc": 1}, 4, "some of the 5 classes to nobody"),
        (
            {"kind": "classes", "nc": 2},
            9,
            "3.6 owners per class, but class 0 has only 2.*nc to 1 at most.*clients to 5",
        ),
    ],
)
def test_impossible_requests_are_refused_with_what_would_work(fields, clients, message):
    with pytest.raises(FedsieveError, match=message) as refusal:
        make(labels_of([2] * 5), clients, **fields)
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize(
    ("fields", "classes", "per_class"),
    [
        ({"kind": "classes", "nc": 5}, 2000, 500),
        ({"kind": "dirichlet", "alpha": 0.5, "nc": 2, "min_size": 2}, 2000, 250),
        ({"kind": "dirichlet", "alpha": 0.5}, 200, 2500),
    ],
)
def test_many_clients_need_memory_for_rows_and_slots_only(fields, classes, per_class):
    """A table of all clients by all classes would be 400 MB of bytes, or 320 MB of counts for the 200 classes."""
    labels = labels_of([per_class] * classes)
    tracemalloc.start()
    shards = make(labels, 200_000, **fields)
    counts = class_counts(shards, labels)
    client_accuracies(np.ones(classes), np.arange(classes), counts, 200_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 250e6
    assert len(shards) == 200_000 and shards.sizes.min() >= fields.get("min_size", 1)


# --- counts and accuracies -------------------------------------------------------------------------------------------


@given(CLASSES, st.data(), SEEDS)
def test_counts_are_the_nonzero_cells_of_the_table(sizes, data, seed):
    labels = labels_of(sizes)
    shards = make(labels, data.draw(st.integers(1, len(labels))), seed, kind="iid")
    dense = table(shards, labels)
    client, label, examples = class_counts(shards, labels)
    np.testing.assert_array_equal(np.stack([client, label]), np.nonzero(dense))
    np.testing.assert_array_equal(examples, dense[dense > 0])


@given(CLASSES, st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=40), st.data(), SEEDS)
def test_a_clients_accuracy_is_its_class_shares_times_class_accuracies(sizes, tests, data, seed):
    labels = labels_of(sizes)
    test_labels, correct = (np.array(part) for part in zip(*tests, strict=True))
    shards = make(labels, data.draw(st.integers(1, len(labels))), seed, kind="iid")
    counts = class_counts(shards, labels)
    accuracies = client_accuracies(correct, test_labels, counts, len(shards))
    assert accuracies.shape == (len(shards),)
    for k, accuracy in enumerate(accuracies):
        tested = [c for c in labels[shards.client(k)] if c in test_labels]
        expected = np.mean([correct[test_labels == c].mean() for c in tested]) if tested else np.nan
        np.testing.assert_allclose(accuracy, expected)
        weights = label_weights(counts, k, test_labels)
        np.testing.assert_allclose(weights @ correct, expected)
        np.testing.assert_allclose(weights.sum(), 1 if tested else np.nan)


def test_classes_without_a_test_image_are_left_out_and_a_client_with_no_other_has_no_accuracy():
    labels = np.array([0, 0, 0, 1, 2, 2])
    shards = make(labels, 2, kind="natural", column="user", groups=np.array([0, 0, 0, 0, 1, 1]))
    counts = class_counts(shards, labels)
    # Classes 0 and 1 are tested, class 1 by two images, one of them right.
    accuracies = client_accuracies(np.array([True, True, False]), np.array([0, 1, 1]), counts, 2)
    assert accuracies[0] == 0.75 * 1 + 0.25 * 0.5 and np.isnan(accuracies[1])
    assert client_accuracies(np.array([False, True]), np.array([0, 2]), counts, 2).tolist() == [0, 1]

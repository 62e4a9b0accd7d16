"""A user's tensors as a feed: structure, order, and what is refused."""

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from fedsieve.errors import FedsieveError
from fedsieve.train.feed import tensor_feed

LABELS = torch.tensor([2, 0, 1, 1])
WHOLE = torch.arange(12).view(4, 3)


class Items(Dataset):
    def __init__(self, items) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number):
        return self.items[number]


STRUCTURES = {
    "tensor": WHOLE,
    "tuple": (WHOLE, WHOLE.float() / 2),
    "dict": {"input_ids": WHOLE, "mask": WHOLE > 3},
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_inputs_keep_their_structure_types_and_order(kind):
    given_inputs = STRUCTURES[kind]
    feed = tensor_feed((given_inputs, LABELS)).take(np.array([3, 1]))
    inputs, labels = feed.batch(np.array([1, 0]))
    assert labels.tolist() == [0, 1] and type(inputs) is type(given_inputs)
    pairs = {
        "tensor": lambda: [(inputs, given_inputs)],
        "tuple": lambda: zip(inputs, given_inputs, strict=True),
        "dict": lambda: [(inputs[name], given_inputs[name]) for name in given_inputs],
    }[kind]()
    for found, whole in pairs:
        assert torch.equal(found, whole[[1, 3]]) and found.dtype == whole.dtype


@given(st.permutations(range(4)), st.integers(1, 5))
def test_passes_in_order_see_every_example_once(order, batch):
    feed = tensor_feed((WHOLE, LABELS)).take(np.array(order))
    seen = torch.cat([inputs for inputs, _ in feed.in_order(batch)])
    assert torch.equal(seen, WHOLE[list(order)])


def test_datasets_arrays_and_tensors_of_the_same_content_are_the_same_data():
    table = datasets.Dataset.from_dict({"x": WHOLE.tolist(), "label": LABELS.tolist()})
    same = [
        tensor_feed((WHOLE, LABELS)),
        tensor_feed((WHOLE.numpy(), LABELS.numpy())),
        tensor_feed(TensorDataset(WHOLE, LABELS)),
        tensor_feed(Items(list(zip(WHOLE, LABELS.tolist(), strict=True)))),
        tensor_feed(table, columns=("x", "label")),
    ]
    assert len({feed.fingerprint for feed in same}) == 1
    named = [
        tensor_feed(({"x": WHOLE}, LABELS)),
        tensor_feed(table),
        tensor_feed(Items([{"x": row, "labels": label} for row, label in zip(WHOLE, LABELS, strict=True)])),
    ]
    assert len({feed.fingerprint for feed in named}) == 1
    others = [(WHOLE.int(), LABELS), (WHOLE.view(4, 3, 1), LABELS), (WHOLE, LABELS.flip(0)), (WHOLE + 1, LABELS)]
    every = [*same[:1], *named[:1], *map(tensor_feed, others)]
    assert len({feed.fingerprint for feed in every}) == len(every)


def test_missing_values_and_labels_of_any_shape_are_data():
    holes = torch.tensor([[1.0, float("nan")]] * 4)
    feed = tensor_feed((holes, WHOLE))
    assert feed.batch(np.arange(2))[0].isnan().any() and feed.labels.shape == (4, 3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ((WHOLE, LABELS[:3]), "inputs hold 4 examples and labels 3"),
        (({"a": WHOLE, "b": WHOLE[:2]}, LABELS), r'inputs\["b"\] hold 2 examples and labels 4'),
        ((WHOLE[:0], LABELS[:0]), "inputs is empty"),
        ((WHOLE, torch.tensor(3)), "labels is a single number"),
        (("text", LABELS), "inputs cannot be a str"),
        ((["a", "b", "c", "d"], LABELS), "an array of <U1"),
        (((), LABELS), "inputs are an empty tuple"),
        (([[1], [1, 2], [3], [4]], LABELS), "Pad them to one length"),
        (WHOLE, "data cannot be a Tensor"),
        (3, "data cannot be an int"),
        (Items([]), "dataset is empty"),
        (Items([(torch.zeros(2), 0), (torch.zeros(3), 1)]), "cannot be stacked"),
        (Items([{"x": 1}]), "no labels or label"),
        (Items([7]), "an item of the dataset is an int"),
    ],
)
def test_unusable_data_is_refused_in_a_sentence(data, said):
    with pytest.raises(FedsieveError, match=said):
        tensor_feed(data)


def test_a_column_that_is_not_there_is_named_with_its_neighbour():
    table = datasets.Dataset.from_dict({"tokens": [[1]], "label": [0]})
    with pytest.raises(FedsieveError, match='no column token.*Did you mean "tokens"'):
        tensor_feed(table, columns=("token", "label"))
    with pytest.raises(FedsieveError, match="which is the label"):
        tensor_feed(table.remove_columns("label"))

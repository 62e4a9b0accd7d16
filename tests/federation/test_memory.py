import pytest
import torch

from fedsieve.errors import FedsieveError
from fedsieve.federation.memory import ClientMemory


def test_what_is_put_is_remembered_in_memory_and_on_disk(tmp_path):
    store = ClientMemory(tmp_path)
    assert store.get(3) == {}
    store.put(3, 1, a=torch.ones(2))
    store.put(3, 2, b=torch.zeros(1))
    assert set(store.get(3)) == {"a", "b"} and not list(tmp_path.iterdir())
    table = store.write(2)
    again = ClientMemory(tmp_path, table)
    assert torch.equal(again.get(3)["a"], torch.ones(2)) and set(again.get(3)) == {"a", "b"}


def test_going_back_to_a_checkpoint_goes_back_in_memory(tmp_path):
    store = ClientMemory(tmp_path)
    store.put(0, 1, a=torch.tensor([1.0]))
    first = store.write(1)
    store.put(0, 2, a=torch.tensor([2.0]))
    second = store.write(2)
    store.put(0, 3, a=torch.tensor([3.0]))
    store.write(3)
    store.prune([first, second])
    assert ClientMemory(tmp_path, first).get(0)["a"].item() == 1
    assert ClientMemory(tmp_path, second).get(0)["a"].item() == 2
    assert len(list(tmp_path.glob("0/*"))) == 2


def test_versions_are_never_written_over(tmp_path):
    """Also not when memory is full and a round is written twice."""
    store = ClientMemory(tmp_path, memory=8)
    store.put(0, 5, a=torch.tensor([1.0, 1.0, 1.0]))
    first = store.write(5)
    store.put(0, 5, a=torch.tensor([2.0, 2.0, 2.0]))
    assert ClientMemory(tmp_path, first).get(0)["a"][0].item() == 1
    assert store.get(0)["a"][0].item() == 2


def test_what_was_dropped_does_not_fill_the_memory(tmp_path):
    store = ClientMemory(tmp_path, memory=16)
    for number in range(5):
        store.put(number, number, a=torch.ones(3))
        store.drop(number, ["a"])
    assert not list(tmp_path.glob("*/*"))
    table = store.write(5)
    again = ClientMemory(tmp_path, table, memory=16)
    again.put(0, 6, a=torch.ones(3), b=torch.ones(1))
    assert again.write(6)["0"] == 6
    again.drop(0, ["a"])
    again.put(0, 7, c=torch.ones(3))  # one float is left of what came from the disk
    assert not (tmp_path / "0" / "00000007.state").exists()
    again.put(0, 7, d=torch.ones(1))
    assert (tmp_path / "0" / "00000007.state").exists()


def test_a_damaged_memory_is_named(tmp_path):
    store = ClientMemory(tmp_path)
    store.put(4, 0, a=torch.ones(1))
    table = store.write(0)
    file = next(tmp_path.glob("4/*"))
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1  # one bit of a value
    for content in (b"rubbish", whole, whole[:-1]):
        file.write_bytes(content)
        with pytest.raises(FedsieveError, match=r"client 4 remembers.*damaged.*fedsieve run") as caught:
            ClientMemory(tmp_path, table).get(4)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_memories_are_told_at_once(tmp_path):
    store = ClientMemory(tmp_path)
    for client in (4, 7):
        store.put(client, 0, a=torch.ones(1))
    table = store.write(0)
    next(tmp_path.glob("4/*")).unlink()
    with pytest.raises(FedsieveError, match="client 4 remembers.*is missing, and"):
        ClientMemory(tmp_path, table)
    next(tmp_path.glob("7/*")).unlink()
    with pytest.raises(FedsieveError, match="missing, with those of 1 others"):
        ClientMemory(tmp_path, table)


@pytest.mark.parametrize("taken", [True, False])
def test_what_was_proposed_is_committed_or_rolled_back_also_from_the_disk(tmp_path, taken):
    memory = ClientMemory(tmp_path)
    memory.put(0, 1, rest=torch.tensor([1.0]), other=torch.tensor([7.0]))
    memory.propose(0, 1, {True: {"rest": torch.tensor([2.0]), "new": torch.tensor([3.0])}, False: {}})
    assert memory.get(0)["rest"].item() == 1
    again = ClientMemory(tmp_path, memory.write(1))
    again.settle(0, 2, taken)
    kept = {name: value.item() for name, value in again.get(0).items()}
    assert kept == ({"rest": 2.0, "new": 3.0, "other": 7.0} if taken else {"rest": 1.0, "other": 7.0})
    again.settle(0, 3, not taken)  # nothing is left to settle
    assert {name: value.item() for name, value in again.get(0).items()} == kept


def test_nothing_is_written_for_a_client_that_has_nothing_to_remember(tmp_path):
    memory = ClientMemory(tmp_path)
    memory.propose(0, 1, {True: {}, False: {}})
    memory.settle(0, 1, True)
    assert memory.write(1) == {} and not list(tmp_path.iterdir())

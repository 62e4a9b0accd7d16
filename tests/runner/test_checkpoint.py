import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.runner.checkpoint import list_checkpoints, load_newest, read_checkpoint, save_checkpoint

NUMBERS = {"epoch": 3, "loss": 0.1, "best_at": None, "finished": [{"name": "head"}]}


def tensors(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return {"theta": torch.randn(17, generator=generator), "sums": torch.randn(2, generator=generator).double()}


def test_what_was_saved_comes_back_to_the_bit(tmp_path):
    save_checkpoint(tmp_path, 5, NUMBERS, tensors(), keep=2)
    numbers, found = load_newest(tmp_path, print)
    assert numbers == NUMBERS
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items()) and len(found) == 2


def test_only_the_newest_are_kept(tmp_path):
    for index in range(5):
        save_checkpoint(tmp_path, index, {"index": index}, tensors(), keep=2)
    assert [path.stem for path in list_checkpoints(tmp_path)] == ["0000000003", "0000000004"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_is_noticed_and_the_one_before_is_used(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("checkpoints")
    save_checkpoint(folder, 1, {"index": 1}, tensors(1), keep=2)
    newest = save_checkpoint(folder, 2, {"index": 2}, tensors(2), keep=2)
    content = bytearray(newest.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    newest.write_bytes(content)
    said = []
    numbers, found = load_newest(folder, said.append)
    assert numbers == {"index": 1} and torch.equal(found["theta"], tensors(1)["theta"])
    assert str(newest) in said[0] and "damaged" in said[0]
    # Set aside, so that it is not counted among those to keep.
    save_checkpoint(folder, 2, {"index": 2}, tensors(2), keep=2)
    assert len(list_checkpoints(folder)) == 2


@pytest.mark.parametrize("intact", [0, 1])
def test_damaged_checkpoints_do_not_crowd_out_those_that_are_saved_next(tmp_path, intact):
    for index in (4, 9):
        save_checkpoint(tmp_path, index, {}, tensors(), keep=2)
    for path in list_checkpoints(tmp_path)[intact:]:
        path.write_bytes(b"rubbish")
    load_newest(tmp_path, print)
    saved = [save_checkpoint(tmp_path, index, {}, tensors(), keep=2) for index in (6, 7)]
    assert list_checkpoints(tmp_path) == saved


def test_a_valid_checksum_over_rubbish_is_refused(tmp_path):
    import hashlib

    body = json.dumps({"no": "tensors"}).encode()
    (tmp_path / "1.ckpt").write_bytes(hashlib.sha256(body).digest() + body)
    with pytest.raises(ValueError, match="cannot be read"):
        read_checkpoint(tmp_path / "1.ckpt")


def test_nothing_saved_gives_nothing(tmp_path):
    assert load_newest(tmp_path / "none", print) is None


def test_a_write_that_fails_leaves_the_old_ones_and_no_litter(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, {"index": 1}, tensors(), keep=2)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, 2, {"index": 2}, tensors(), keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["0000000001.ckpt"]

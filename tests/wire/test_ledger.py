import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.errors import FedsieveError
from fedsieve.wire.ledger import COLUMNS, Ledger, Line, totals


def fill(ledger: Ledger, rounds: range) -> None:
    for round in rounds:
        for client in range(3):
            ledger.add(Line("backbone", round, client, "down", "model", 100))
            ledger.add(Line("backbone", round, client, "up", "update", 10 + round, "ok" if client else "checksum"))


def test_a_ledger_reopened_at_an_offset_is_the_one_written_in_one_go(tmp_path):
    whole = Ledger(tmp_path / "run" / "whole.csv")
    fill(whole, range(1, 5))
    broken = Ledger(tmp_path / "broken.csv")
    fill(broken, range(1, 3))
    offset = broken.offset
    fill(broken, range(3, 4))
    broken.close()
    with open(broken.path, "ab") as file:
        file.write(b"backbone,3,0,do")
    again = Ledger(broken.path, offset)
    assert again.total == {"up": 3 * (11 + 12), "down": 600} and again.offset == offset
    fill(again, range(3, 5))
    assert again.total == whole.total
    whole.sync()
    again.sync()
    assert again.path.read_bytes() == whole.path.read_bytes()
    assert whole.path.read_text().splitlines()[:2] == [COLUMNS, "backbone,1,0,down,model,100,ok"]


def test_totals_are_by_stage_and_round_and_leave_out_a_cut_line(tmp_path):
    ledger = Ledger(tmp_path / "ledger.csv")
    ledger.add(Line("head", 1, 0, "up", "head", 7))
    fill(ledger, range(2, 4))
    ledger.add(Line("backbone", 3, 0, "up", "update", 10**12))
    ledger.close()
    ledger.path.write_bytes(ledger.path.read_bytes()[:-1])
    sums = totals(ledger.path)
    assert list(sums) == ["head", "backbone"]
    for (up, down), expected in zip(sums.values(), (([7], [0]), ([0, 36, 39], [0, 300, 300])), strict=True):
        assert up.dtype == down.dtype == np.int64 and (up.tolist(), down.tolist()) == expected


def test_opening_without_an_offset_starts_anew_and_beyond_the_end_is_refused(tmp_path):
    path = tmp_path / "ledger.csv"
    fill(Ledger(path), range(2))
    ledger = Ledger(path)
    assert ledger.total == {"up": 0, "down": 0} and ledger.offset == len(COLUMNS) + 1 and totals(path) == {}
    with pytest.raises(FedsieveError, match="1,000 bytes were written and"):
        Ledger(path, 1000)


@given(st.data())
def test_a_ledger_in_which_anything_was_changed_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("ledger") / "ledger.csv"
    ledger = Ledger(path)
    fill(ledger, range(1, 3))
    offset, digest = ledger.offset, ledger.digest
    ledger.close()
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(FedsieveError, match="not as this run left it") as caught:
        Ledger(path, offset, digest)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    assert path.read_bytes() == content  # nothing is lost by trying


def test_a_line_that_is_no_message_is_named(tmp_path):
    ledger = Ledger(tmp_path / "ledger.csv")
    fill(ledger, range(1, 2))
    offset = ledger.offset
    ledger.close()
    text = ledger.path.read_text().replace("down,model,100", "down,model,1x0", 1)
    ledger.path.write_text(text)
    with pytest.raises(FedsieveError, match=r"line 2 is no message: 'backbone,1,0,down,model,1x0,ok'"):
        Ledger(ledger.path, offset, ledger.digest)
    ledger.path.unlink()
    with pytest.raises(FedsieveError, match="cannot be read: No such file"):
        Ledger(ledger.path, offset, ledger.digest)

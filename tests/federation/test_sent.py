"""The log of what left a site shows whether anything in it was changed."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsieve.errors import FedsieveError
from fedsieve.federation.sent import LOG, START, note, verify

HEAD = {"run": "ab" * 8, "ask": "train", "stage": "all"}


def write(folder, answers: int) -> None:
    for number in range(answers):
        note(
            folder,
            {**HEAD, "round": number},
            [{"what": "update", "bytes": 10 * number, "what else": '", "chain": "'}],
            99,
        )


def test_a_log_that_nobody_touched_is_whole_and_a_new_answer_goes_on_from_it(tmp_path):
    write(tmp_path, 3)
    lines, tip = verify(tmp_path / LOG)
    write(tmp_path, 1)
    more, newer = verify(tmp_path / LOG)
    assert (lines, more) == (6, 8) and newer != tip != START
    rows = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [row["bytes"] for row in rows[:4]] == [0, 99, 10, 99] and rows[-1]["chain"] == newer


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_change_of_a_line_is_noticed(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("log")
    write(folder, 3)
    file = folder / LOG
    lines = file.read_text().splitlines(keepends=True)
    number = data.draw(st.integers(0, len(lines) - 1))
    match data.draw(st.sampled_from(["change", "take out", "repeat", "cut"])):
        case "change":
            place = data.draw(st.integers(0, len(lines[number]) - 2))
            lines[number] = (
                lines[number][:place] + ("x" if lines[number][place] != "x" else "y") + lines[number][place + 1 :]
            )
        case "take out":
            del lines[number]
        case "repeat":
            lines.insert(number, lines[number])
        case "cut":
            del lines[number:]
    file.write_text("".join(lines))
    with pytest.raises(FedsieveError, match="changed, added or taken out|last lines are missing"):
        verify(file)


def test_a_process_killed_between_the_log_and_its_newest_digest_leaves_a_whole_log(tmp_path):
    write(tmp_path, 1)
    tip = (tmp_path / "sent.tip").read_text()
    write(tmp_path, 1)
    (tmp_path / "sent.tip").write_text(tip)
    assert verify(tmp_path / LOG)[0] == 4


def test_lines_after_a_damaged_one_do_not_hide_it(tmp_path):
    write(tmp_path, 1)
    with (tmp_path / LOG).open("a") as log:
        log.write("{}\n")
    write(tmp_path, 1)
    with pytest.raises(FedsieveError, match="line 3"):
        verify(tmp_path / LOG)

import io
import re

import pytest
from rich.console import Console

from fedsieve.runner.progress import Display, brief, describe
from fedsieve.train.loop import Tick

ROUND = {
    "stage": "backbone",
    "round": 1399,
    "train_loss": 0.5,
    "train_accuracy": 0.25,
    "val_accuracy": 0.8712,
    "drift": 0.123456,
    "bytes_up": 123_456_789,
    "bytes_down": 234_567_890,
    "refused": {},
    "seconds": 1.0,
}


def shown(records, width=80):
    """The last thing that a terminal of some width shows of a stage's rounds."""
    file = io.StringIO()
    with Display(Console(file=file, width=width, force_terminal=True, color_system=None)) as display:
        for number, record in enumerate(records, start=1398):
            display.step("backbone", Tick(number, 1400, record))
    text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", file.getvalue())
    return [line.strip() for line in re.split(r"[\r\n]", text) if "backbone" in line][-1]


def test_a_bar_fits_eighty_columns_with_all_that_is_worth_watching():
    line = shown([ROUND, ROUND])
    assert len(line) <= 80 and "1399/1400" in line and "…" not in line
    assert line.endswith("val 87.1 %, drift 0.12, 123/235 MB")


def test_a_round_that_was_not_evaluated_keeps_the_last_accuracy_and_shows_its_own_drift():
    plain = {key: value for key, value in ROUND.items() if key != "val_accuracy"} | {"drift": 0.5}
    assert shown([ROUND, plain]).endswith("val 87.1 %, drift 0.5, 123/235 MB")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"train_loss": 0.25}, "loss 0.250"),
        ({"client_val_accuracy": 0.5, "drift": 1.0}, "val 50.0 %, drift 1"),
        ({"val_accuracy": 0.5, "test_accuracy": 0.75}, "val 50.0 %"),
    ],
)
def test_brief_notes(record, said):
    assert brief(record) == said


def test_a_line_of_a_log_has_everything():
    assert describe(ROUND) == "loss 0.500, train 25.0 %, val 87.1 %, drift 0.123, 123.46 MB up, 234.57 down"

import pytest

from fedsieve.report.html import duration, flatten, number, percent


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "–"),
        (8.26, "8.3 s"),
        (59.97, "1 min 00 s"),
        (252, "4 min 12 s"),
        (3600, "1 h 00 min"),
        (90061, "25 h 01 min"),
    ],
)
def test_durations_have_two_units_at_most(seconds, said):
    assert duration(seconds) == said


def test_what_is_absent_is_a_dash_and_what_went_wrong_is_said():
    assert percent(None) == number(None) == "–"
    assert percent(0.8342) == "83.42\u00a0%"
    assert number(float("nan")) == "NaN" and number(float("inf")) == "∞"
    assert number(1234567, 0) == "1,234,567"


def test_flatten_names_stages_and_keeps_their_order():
    tree = {
        "data": {"size": 4},
        "stages": [{"name": "a", "lr": 1}, {"name": "b", "train": {"last_blocks": 2}}],
        "options": {},
    }
    assert flatten(tree) == {
        "data.size": 4,
        "stages": "a → b",
        "stages.a.lr": 1,
        "stages.b.train.last_blocks": 2,
        "options": {},
    }

"""docs/extend.md, and the Python of the README, run as they are printed."""

import re
from pathlib import Path

import pytest

from fedsieve.config import FAMILIES

README = Path(__file__).parents[2] / "README.md"
PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_example_of_the_page_runs_in_order_and_is_short(capsys):
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    names: dict = {}
    try:
        for number, example in enumerate(examples):
            exec(compile(example, str(PAGE), "exec"), names)
            assert number == 0 or example.count("\n") < 25
    finally:
        FAMILIES["aggregator"].words.pop("norm_trimmed", None)
    assert len(examples) > 8 and "Evaluation(" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_example_of_the_readme_runs(capsys):
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    exec(compile(example, str(README), "exec"), {})
    assert capsys.readouterr().out.count("\n") == 30

"""docs/extend.md runs as it is printed."""

import re
from pathlib import Path

import pytest

from fedsieve.config import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_example_of_the_page_runs_in_order_and_is_short(capsys):
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    names: dict = {}
    try:
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), names)
            assert example.count("\n") < 25
    finally:
        FAMILIES["aggregator"].words.pop("norm_trimmed", None)
    assert len(examples) > 8 and "Evaluation(" in capsys.readouterr().out

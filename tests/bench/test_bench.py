import pytest
import torch

from fedsieve.bench.registry import BENCHMARKS
from fedsieve.bench.result import alternate


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_runs_in_miniature_and_fills_its_table(name):
    """Only that it works: times are never asserted."""
    result = BENCHMARKS[name][1](torch.device("cpu"), True)
    assert result.rows
    assert all(len(row) == len(result.columns) for row in result.rows)


def test_calls_take_turns():
    seen = []
    alternate({name: (lambda name=name: seen.append(name)) for name in "ab"}, torch.device("cpu"), repeats=2)
    assert seen == ["a", "b"] * 3

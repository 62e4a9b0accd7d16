"""Benchmarks: each prints one table of ratios measured side by side in one run, and can write it as JSON.

They run from a checkout, as `fedsieve bench NAME`, and are not part of the installed package.
"""

import os
from pathlib import Path

CHECKOUT = str(Path(__file__).parents[1])


def python_path() -> str:
    """PYTHONPATH for processes that import the benchmarks, wherever they start."""
    others = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place not in ("", CHECKOUT)]
    return os.pathsep.join([CHECKOUT, *others])

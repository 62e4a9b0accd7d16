"""From values to one HTML file that needs nothing else: the templates, the words for numbers, the writing."""

import base64
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from fedsieve.errors import FedsieveError
from fedsieve.report import figures

TILE = 128  # pixels of a picture on a page; larger ones are reduced, smaller ones left to the browser to enlarge


def percent(fraction: float | None, digits: int = 2) -> str:
    return "–" if fraction is None else f"{number(100 * fraction, digits)}\u00a0%"


def number(value: float | None, digits: int = 4) -> str:
    """A dash for what is not there, NaN for what went wrong."""
    if value is None:
        return "–"
    return f"{value:,.{digits}f}" if math.isfinite(value) else "NaN" if math.isnan(value) else "∞"


def whole(value: float | None) -> str:
    return number(value, 0)


def duration(seconds: float | None) -> str:
    """Two units at most: 1 h 03 min, 4 min 12 s, 8.3 s."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: float | None) -> str:
    """Bytes for people."""
    if count is None or not math.isfinite(count):
        return "–"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def tick(count: float) -> str:
    """Bytes beside an axis."""
    return size(count).replace(".0 ", " ")


def text(value: Any) -> str:
    """A config or environment value on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def figure(svg: str, label: str) -> Markup:
    # matplotlib escapes every label it writes, so its SVG is markup already.
    return Markup(figures.inline(svg, label))


def tile(image: np.ndarray) -> str:
    """An image (3, h, w) uint8 as a data address, at most TILE pixels a side."""
    opened = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
    opened.thumbnail((TILE, TILE), Image.Resampling.BOX)
    buffer = io.BytesIO()
    opened.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted paths; a list of named things (stages) goes by name, with the order kept beside it."""
    if isinstance(tree, list) and tree and all(isinstance(item, Mapping) and "name" in item for item in tree):
        names = [str(item["name"]) for item in tree]
        order = {prefix: " → ".join(names)}
        inner = {name: {k: v for k, v in item.items() if k != "name"} for name, item in zip(names, tree, strict=True)}
        return order | flatten(inner, prefix)
    if not isinstance(tree, Mapping) or not tree:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("fedsieve.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, number=number, whole=whole, duration=duration, size=size, text=text)
    return environment.get_template(template).render(**values)


def save(path: Path, content: str | Image.Image) -> Path:
    """Writes a page or a figure, making its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            content.save(path)
    except OSError as error:
        raise FedsieveError(f"{path}: cannot be written: {error.strerror}", exit_code=1) from None
    return path

"""Images of a size that a network does not take are refused before anything is loaded."""

import re

import pytest

from fedsieve.errors import FedsieveError
from fedsieve.runner.preflight import blank_model, preflight

CROSSVIT = "model={backbone: crossvit_tiny_240, weights: none, options: {depth: [[1, 1, 0], [1, 1, 0], [1, 1, 0]]}}"
EFFICIENTFORMER = "model={backbone: efficientformer_l1, weights: none, options: {depths: [1, 1, 1, 2], num_vit: 1}}"
LEVIT = "model={backbone: levit_128s, weights: none, options: {depth: [1, 1, 1]}}"


@pytest.mark.parametrize(
    ("model", "size", "sizes"),
    [(CROSSVIT, 64, [240]), (CROSSVIT, 224, [240]), (EFFICIENTFORMER, 64, [224]), (LEVIT, 100, [96, 128, 224])],
)
def test_a_size_that_a_network_does_not_take_is_refused_with_those_that_work(tiny, monkeypatch, model, size, sizes):
    def load(*arguments):
        raise AssertionError("something was loaded")

    for name in ("load_images", "load_classifier"):
        monkeypatch.setattr(f"fedsieve.runner.run_cache.{name}", load)
    with pytest.raises(FedsieveError, match=f"data.size: .* does not take images of {size} px") as caught:
        preflight(tiny(model, f"data.size={size}"))
    assert caught.value.exit_code == 2
    (named,) = re.findall(r"Sizes that work include ([\d, ]+)\.", str(caught.value))
    assert [int(word) for word in named.split(", ")] == sizes
    for works in sizes:
        blank_model(tiny(model, f"data.size={works}"), classes=2)


def test_a_size_is_not_blamed_for_another_mistake(tiny):
    with pytest.raises(FedsieveError, match="model.lora.targets: no linear layer"):
        blank_model(tiny("model.lora={rank: 2, targets: [absent]}", "stages=[{name: a, train: lora, epochs: 1}]"), 2)

import json

import torch

from fedsieve.data.exploration import explore
from fedsieve.report.explore import write_exploration


def test_the_exploration_page_stands_alone_with_its_numbers_beside_it(tmp_path):
    images = torch.randint(0, 256, (40, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 3  # the fourth class is empty
    exploration = explore(images, labels, ["<i>a</i>", "b", "c", "empty"], seed=1)
    page = write_exploration(exploration, images, "my <data>", tmp_path)
    assert page == tmp_path / "explore.html"
    text = page.read_text(encoding="utf-8")
    assert "my &lt;data&gt;" in text and "<i>a</i>" not in text
    assert "<script" not in text and 'src="http' not in text
    numbers = json.loads((tmp_path / "exploration.json").read_text())
    assert numbers["counts"] == [14, 13, 13, 0]
    assert numbers["spread"][3] is None and numbers["centroid_distances"][0][3] is None
    assert numbers["nearest"] == exploration.nearest.tolist()
    assert numbers["images"] == 40 and "mahalanobis" not in numbers
    assert {path.name for path in (tmp_path / "figures").iterdir()} >= {"classes.svg", "samples.png", "outliers.svg"}


def test_images_of_one_colour_and_many_classes_make_a_page(tmp_path):
    images = torch.full((50, 3, 4, 4), 7, dtype=torch.uint8)
    exploration = explore(images, torch.arange(50), [f"class {i}" for i in range(50)], seed=0)
    text = write_exploration(exploration, images, "flat", tmp_path).read_text(encoding="utf-8")
    assert "nothing to stand out from" in text

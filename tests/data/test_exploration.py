import numpy as np
import pytest
import torch

from fedsieve.data import exploration
from fedsieve.data.exploration import explore
from fedsieve.errors import FedsieveError

NAMES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def data():
    draw = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (60, 3, 5, 4), dtype=torch.uint8, generator=draw)
    return images, torch.randint(0, 3, (60,), generator=draw)


@pytest.fixture(scope="module", params=[1, 7 * 60, 2**23], ids=["one image a chunk", "seven", "all"])
def found(request, data):
    """The exploration, whatever the size of its chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exploration, "CHUNK_VALUES", request.param)
        return explore(*data, NAMES, seed=5)


def _rows(data):
    return [image.numpy().astype(float).ravel() for image in data[0]]


def test_counts_and_samples_are_of_their_class(data, found):
    labels = data[1].tolist()
    assert found.counts.tolist() == [labels.count(c) for c in range(3)]
    for label, rows in enumerate(found.samples):
        assert len(set(rows.tolist())) == len(rows) == 6
        assert all(labels[row] == label for row in rows)


def test_neighbours_are_those_of_a_plain_loop_without_the_image_itself(data, found):
    rows = _rows(data)
    distances = {
        i: np.sqrt(sum((a - b) ** 2 for a, b in zip(row, rows[found.reference], strict=True)))
        for i, row in enumerate(rows)
    }
    del distances[found.reference]
    ordered = sorted(distances, key=lambda i: (distances[i], i))
    assert found.nearest.tolist() == ordered[:6]
    assert found.farthest.tolist() == sorted(distances, key=lambda i: (-distances[i], i))[:6]
    np.testing.assert_allclose(found.nearest_distances, [distances[i] for i in found.nearest], rtol=1e-14)
    np.testing.assert_allclose(found.farthest_distances, [distances[i] for i in found.farthest], rtol=1e-14)


def test_spread_and_centroid_distances_are_those_of_a_plain_loop(data, found):
    rows, labels = _rows(data), data[1].tolist()
    centroids = []
    for label in range(3):
        members = [row for row, own in zip(rows, labels, strict=True) if own == label]
        centroids.append(sum(members) / len(members))
        spread = np.mean([np.linalg.norm(row - centroids[-1]) for row in members])
        assert found.spread[label] == pytest.approx(spread, rel=1e-12)
    for i in range(3):
        for j in range(3):
            assert found.centroid_distances[i, j] == pytest.approx(
                np.linalg.norm(centroids[i] - centroids[j]), rel=1e-12
            )


def test_outliers_are_those_of_the_inverse_covariance(data, found):
    colours = np.array([[channel.astype(float).mean() for channel in image.numpy()] for image in data[0]])
    inverse = np.linalg.inv(np.cov(colours.T))
    squared = [(colour - colours.mean(0)) @ inverse @ (colour - colours.mean(0)) for colour in colours]
    np.testing.assert_allclose(found.mahalanobis, squared, rtol=1e-9)
    assert found.degrees == 3
    assert found.threshold == pytest.approx(9.3484, abs=1e-4)  # chi-squared tables: 97.5 % at 3 degrees
    assert found.outliers.tolist() == sorted((i for i in range(60) if squared[i] > 9.3484), key=lambda i: -squared[i])


def _normal_cloud(count):
    colours = np.random.default_rng(0).normal([90, 120, 150], [8, 10, 12], (count, 3)).round().astype(np.uint8)
    return torch.from_numpy(colours)[:, :, None, None].repeat(1, 1, 2, 2), torch.zeros(count, dtype=torch.int64)


def test_a_normal_cloud_has_the_expected_share_of_outliers():
    count = 20_000
    found = explore(*_normal_cloud(count), ["all"], seed=0)
    assert found.outlier_share == pytest.approx(0.025, abs=3 * np.sqrt(0.025 * 0.975 / count))


def test_an_odd_image_leads_the_outliers():
    images, labels = _normal_cloud(200)
    images[17] = torch.tensor([255, 0, 255])[:, None, None]
    assert explore(images, labels, ["all"], seed=0).outliers[0] == 17


def test_greyscale_has_one_degree_of_freedom_and_agrees_with_the_pseudo_inverse():
    grey = torch.randint(0, 256, (500, 1, 3, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    found = explore(grey.expand(-1, 3, -1, -1), torch.zeros(500, dtype=torch.int64), ["grey"], seed=0)
    colours = grey.double().mean((2, 3)).expand(-1, 3).numpy()
    inverse = np.linalg.pinv(np.cov(colours.T), hermitian=True)
    centred = colours - colours.mean(0)
    np.testing.assert_allclose(found.mahalanobis, [row @ inverse @ row for row in centred], rtol=1e-8, atol=1e-12)
    assert found.degrees == 1
    assert found.threshold == pytest.approx(5.0239, abs=1e-4)
    assert found.outlier_share == pytest.approx(0.025, abs=0.025)


def test_equal_images_have_no_outliers_and_an_empty_class_has_no_spread():
    found = explore(torch.full((4, 3, 2, 2), 9, dtype=torch.uint8), torch.tensor([0, 0, 2, 2]), NAMES, seed=0)
    assert found.degrees == 0 and len(found.outliers) == 0
    assert found.spread[0] == 0 and np.isnan(found.spread[1])
    assert found.centroid_distances[0, 2] == 0 and np.isnan(found.centroid_distances[0, 1])
    assert len(found.nearest) == 3 and len(found.samples[1]) == 0


def test_the_seed_alone_decides_the_draws(data):
    first, again, other = (explore(*data, NAMES, seed=seed) for seed in (5, 5, 6))
    assert first.reference == again.reference
    assert all((a == b).all() for a, b in zip(first.samples, again.samples, strict=True))
    assert first.reference != other.reference or any(
        (a != b).any() for a, b in zip(first.samples, other.samples, strict=True)
    )


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (torch.zeros(4, 3, 2, 2), torch.zeros(4, dtype=torch.int64), "uint8"),
        (torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), r"\(N, 3, H, W\)"),
        (torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), "at least two"),
        (torch.zeros(2, 3, 2, 2, dtype=torch.uint8), torch.tensor([0, 3]), "3 class names"),
    ],
)
def test_what_cannot_be_explored_is_refused(images, labels, said):
    with pytest.raises(FedsieveError, match=said):
        explore(images, labels, NAMES, seed=0)

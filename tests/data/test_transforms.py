import math

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as tv
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms import InterpolationMode, RandomResizedCrop

from fedsieve.config import Data
from fedsieve.data.transforms import IMAGENET, Transform, channel_statistics, make_transform
from fedsieve.randomness import generator

KINDS = ["resize", "flip", "crop_flip", "flip_rotate"]
MODES = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}
UNIT = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
# In 0..1, so eight roundings of float32. The worst of 1500 random boxes was 9e-7.
TOLERANCE = 1e-6


def make(kind: str, size: int, interpolation: str = "bicubic", constants=UNIT, **options) -> Transform:
    return make_transform(Data(size=size, transform=kind, interpolation=interpolation, **options), *constants)


def some_images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(generator(seed, "images").integers(0, 256, shape, dtype=np.uint8))


def some_draws(transform: Transform, images: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(transform.draw(generator(seed, "draws"), len(images), *images.shape[-2:]))


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("interpolation", MODES)
@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(32, 32, 224), (8, 8, 16), (16, 16, 16), (64, 48, 33), (288, 300, 224), (20, 200, 32), (300, 33, 64)],
)
def test_resize_is_torchvisions(interpolation: str, height: int, width: int, size: int) -> None:
    images = some_images(2, 3, height, width)
    expected = tv.resize(images / 255, [size, size], MODES[interpolation], antialias=True)
    close(make("resize", size, interpolation).evaluate(images), expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_crop_is_torchvisions_for_any_box(data: st.DataObject) -> None:
    height, width, size = (data.draw(st.integers(4, 70), label=name) for name in ("height", "width", "size"))
    crop_height, crop_width = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    top = data.draw(st.integers(0, height - crop_height))
    left = data.draw(st.integers(0, width - crop_width))
    flip = data.draw(st.booleans())
    interpolation = data.draw(st.sampled_from(list(MODES)))
    images = some_images(1, 3, height, width, seed=data.draw(st.integers(0, 9)))
    draws = torch.tensor([[flip, top, left, crop_height, crop_width]], dtype=torch.float32)
    expected = tv.resized_crop(
        images / 255, top, left, crop_height, crop_width, [size, size], MODES[interpolation], antialias=True
    )
    close(make("crop_flip", size, interpolation).train(images, draws), tv.hflip(expected) if flip else expected)


@pytest.mark.parametrize(("height", "width", "size"), [(40, 40, 32), (50, 67, 32), (91, 45, 37), (10, 13, 32)])
def test_crop_flip_evaluates_on_torchvisions_centre_crop(height: int, width: int, size: int) -> None:
    images = some_images(2, 3, height, width)
    resized = tv.resize(images / 255, [round(size * 256 / 224)], MODES["bicubic"], antialias=True)
    close(make("crop_flip", size).evaluate(images), tv.center_crop(resized, [size, size]))


@pytest.mark.parametrize("size", [16, 31])
def test_flip_and_rotation_are_torchvisions(size: int) -> None:
    images = some_images(6, 3, 20, 24)
    resized = tv.resize(images / 255, [size, size], MODES["bicubic"], antialias=True)
    transform = make("flip_rotate", size, rotation=180.0)
    draws = some_draws(transform, images)
    expected = [
        tv.rotate(tv.hflip(image) if flip else image, angle, MODES["bilinear"])
        for image, (flip, angle) in zip(resized, draws.tolist(), strict=True)
    ]
    close(transform.train(images, draws), torch.stack(expected))
    flipped = make("flip", size)
    expected = [tv.hflip(image) if flip else image for image, flip in zip(resized, draws[:, 0], strict=True)]
    close(flipped.train(images, draws[:, :1]), torch.stack(expected))
    assert 0 < draws[:, 0].sum() < 6, "the draws should hold both cases"


@pytest.mark.parametrize("kind", KINDS)
def test_normalisation_comes_last_so_that_rotation_brings_in_black(kind: str) -> None:
    images = some_images(4, 3, 20, 24)
    plain, normalised = make(kind, 16), make(kind, 16, constants=IMAGENET)
    draws = some_draws(plain, images)
    mean, std = torch.tensor(IMAGENET)[:, :, None, None]
    close(normalised.train(images, draws), (plain.train(images, draws) - mean) / std, 5e-6)
    close(normalised.evaluate(images), (plain.evaluate(images) - mean) / std, 5e-6)


def test_a_channel_that_never_varies_becomes_zero() -> None:
    images = some_images(4, 3, 16, 16)
    images[:, 2] = 77
    out = make("resize", 16, constants=channel_statistics(images)).evaluate(images)
    assert torch.isfinite(out).all() and out[:, 2].abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_its_images_one_by_one(kind: str) -> None:
    transform, images = make(kind, 16), some_images(8, 3, 20, 24)
    draws = some_draws(transform, images)
    alone = [transform.train(images[i : i + 1], draws[i : i + 1]) for i in range(8)]
    close(transform.train(images, draws), torch.cat(alone))
    assert transform.train(images, draws).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_over_clients_equals_the_loop(kind: str) -> None:
    transform, images = make(kind, 16), some_images(3, 4, 3, 20, 24)
    draws = some_draws(transform, images.flatten(0, 1)).unflatten(0, (3, 4))
    expected = [transform.train(batch, draw) for batch, draw in zip(images, draws, strict=True)]
    close(torch.func.vmap(transform.train)(images, draws), torch.stack(expected))
    close(torch.func.vmap(transform.evaluate)(images), transform.evaluate(images.flatten(0, 1)).unflatten(0, (3, 4)))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_coarsen_images(kind: str) -> None:
    transform, images = make(kind, 16), some_images(2, 3, 20, 24)
    draws = some_draws(transform, images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = transform.train(images, draws)
    assert torch.equal(inside, transform.train(images, draws))


@pytest.mark.parametrize(("kind", "parameters"), zip(KINDS, [0, 1, 5, 2], strict=True))
def test_draws_are_a_function_of_their_address(kind: str, parameters: int) -> None:
    transform = make(kind, 16)
    first, again, other = (transform.draw(generator(0, "draws", step), 50, 20, 24) for step in (1, 1, 2))
    assert first.shape == (50, parameters) and first.dtype == np.float32
    assert np.array_equal(first, again)
    assert transform.random == (parameters > 0) == (not np.array_equal(first, other))
    assert transform.draw(generator(0, "draws"), 0, 20, 24).shape == (0, parameters)


def test_flips_are_fair_and_angles_uniform() -> None:
    flip, angle = make("flip_rotate", 16, rotation=10.0).draw(generator(0, "draws"), 20_000, 20, 24).T
    assert set(flip) == {0, 1} and abs(flip.mean() - 0.5) < 0.02
    assert np.abs(angle).max() <= 10 and abs(angle.mean()) < 0.2 and abs(angle.std() - 10 / math.sqrt(3)) < 0.1


@given(height=st.integers(1, 80), width=st.integers(1, 80), low=st.floats(0.01, 1), seed=st.integers(0, 99))
def test_boxes_lie_inside_the_image(height: int, width: int, low: float, seed: int) -> None:
    boxes = make("crop_flip", 16, crop_scale=(low, 1.0)).draw(generator(seed, "draws"), 30, height, width)
    _, top, left, crop_height, crop_width = boxes.T
    assert np.array_equal(boxes, np.rint(boxes))
    assert (crop_height >= 1).all() and (crop_width >= 1).all() and (top >= 0).all() and (left >= 0).all()
    assert (top + crop_height <= height).all() and (left + crop_width <= width).all()


@pytest.mark.parametrize(("height", "width"), [(200, 200), (150, 220), (30, 200), (200, 30)])
def test_boxes_follow_the_law_of_random_resized_crop(height: int, width: int) -> None:
    boxes = make("crop_flip", 16, crop_scale=(0.3, 0.9)).draw(generator(0, "draws"), 4000, height, width)[:, 1:]
    *_, crop_height, crop_width = boxes.T
    fallback = (crop_height == height) | (crop_width == width)
    area = (crop_height * crop_width / (height * width))[~fallback]
    ratio = (crop_width / crop_height)[~fallback]
    assert ((area > 0.29) & (area < 0.91)).all() and ((ratio > 0.72) & (ratio < 1.38)).all()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        image = torch.empty(3, height, width)
        theirs = np.array([RandomResizedCrop.get_params(image, [0.3, 0.9], [3 / 4, 4 / 3]) for _ in range(2000)])
    # Five standard errors of the difference of two means, and a little for a column that never varies.
    error = 5 * np.sqrt(theirs.var(0) / 2000 + boxes.var(0) / 4000) + 1e-6
    assert (np.abs(boxes.mean(0) - theirs.mean(0)) < error).all()
    assert np.allclose(boxes.std(0), theirs.std(0), rtol=0.08, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(8, 8), (6, 11)])
def test_crops_reach_every_position_including_the_edges(height: int, width: int) -> None:
    boxes = make("crop_flip", 16, crop_scale=(0.2, 1.0)).draw(generator(0, "draws"), 20_000, height, width)[:, 1:]
    top, left, crop_height, crop_width = boxes.astype(int).T
    for start, crop, length in ((top, crop_height, height), (left, crop_width, width)):
        for size in range(3, min(height, width)):
            often = np.bincount(start[crop == size], minlength=length - size + 1)
            assert len(often) == length - size + 1 and stats.chisquare(often).pvalue > 1e-6


def test_a_crop_that_never_fits_is_the_torchvision_centre() -> None:
    boxes = make("crop_flip", 16, crop_scale=(1.0, 1.0)).draw(generator(0, "draws"), 5, 20, 100)[:, 1:]
    expected = RandomResizedCrop.get_params(torch.empty(3, 20, 100), [1.0, 1.0], [3 / 4, 4 / 3])
    assert (boxes == np.array(expected)).all()


def test_channel_statistics_of_mapped_images_are_exact(tmp_path) -> None:
    images = some_images(700, 3, 100, 90)  # more than one chunk
    images[:, 1] //= 3
    mapped = np.memmap(tmp_path / "images", np.uint8, "w+", shape=tuple(images.shape))
    mapped[:] = images.numpy()
    mean, std = channel_statistics(torch.from_numpy(mapped))
    direct = images.numpy() / 255
    assert mean == pytest.approx(direct.mean((0, 2, 3)), abs=1e-12)
    assert std == pytest.approx(direct.std((0, 2, 3)), abs=1e-12)
    mean, std = channel_statistics(images, np.array([7, 3]))
    assert mean == pytest.approx(direct[[3, 7]].mean((0, 2, 3)), abs=1e-12)
    assert std == pytest.approx(direct[[3, 7]].std((0, 2, 3)), abs=1e-12)

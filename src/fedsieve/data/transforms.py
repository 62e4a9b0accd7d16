"""Image transforms on whole batches, on the device, with every random number drawn on the host.

A resize or a crop is two matrix products, `rows @ image @ columns.T`, with torchvision's antialiased weights. They
are built in float32 with torch's own roundings of positions, so results agree with torchvision to its last digits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from fedsieve.config import Data, Interpolation
from fedsieve.config import Transform as Kind

Colour = tuple[float, float, float]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
RATIOS = (3 / 4, 4 / 3)
TRIES = 10


@dataclass(frozen=True)
class Transform:
    """From uint8 images (B, 3, H, W) to normalised float32 images (B, 3, size, size).

    `train` and `evaluate` hold no randomness, no host sync and no control flow on data, so they may run inside
    torch.func.vmap and CUDA graphs.
    """

    size: int
    kind: Kind
    interpolation: Interpolation
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_scale: tuple[float, float]
    rotation: float

    @property
    def random(self) -> bool:
        """Whether training images differ from evaluation images."""
        return self.kind != "resize"

    def draw(self, rng: np.random.Generator, count: int, height: int, width: int) -> np.ndarray:
        """The random parameters of `count` images of height x width: float32 (count, P), P fixed by the kind.

        The columns: none for resize; flip for flip; flip, angle in degrees for flip_rotate; flip, top, left,
        crop height, crop width for crop_flip.
        """
        columns: list[np.ndarray] = [np.empty((count, 0))]
        if self.random:
            columns.append(rng.integers(0, 2, count))
        if self.kind == "flip_rotate":
            columns.append(rng.uniform(-self.rotation, self.rotation, count))
        if self.kind == "crop_flip":
            columns.extend(_draw_boxes(rng, count, height, width, self.crop_scale))
        return np.column_stack(columns).astype(np.float32)

    def train(self, images: Tensor, draws: Tensor) -> Tensor:
        """Training images for `draws`, the rows of `draw` (B, P) on the device of the images."""
        if not self.random:
            return self.evaluate(images)
        height, width = images.shape[-2:]
        flip = draws[:, 0, None, None] > 0.5
        if self.kind == "crop_flip":
            top, left, crop_height, crop_width = draws[:, 1:, None, None].unbind(1)
            rows = _weights(top, crop_height, height, self.size, self.interpolation)
            columns = _weights(left, crop_width, width, self.size, self.interpolation)
        else:
            rows, columns = self._fixed(height, images), self._fixed(width, images)
        columns = torch.where(flip, columns.flip(-2), columns)
        scale, shift = _affine(self.mean, self.std, images.device)
        if self.kind != "flip_rotate":
            return _resample(images * scale + shift, rows, columns)
        # What a rotation brings in from outside is black, so the mean is subtracted after it.
        return _rotate(_resample(images * scale, rows, columns), draws[:, 1]).add_(shift)

    def evaluate(self, images: Tensor) -> Tensor:
        """Evaluation images: resized, or for crop_flip the centre of the resized image."""
        height, width = images.shape[-2:]
        if self.kind == "crop_flip":
            short = round(self.size * 256 / 224)
            rows, columns = (
                _centre(length, int(short * length / min(height, width)), self.size, self.interpolation, images.device)
                for length in (height, width)
            )
        else:
            rows, columns = self._fixed(height, images), self._fixed(width, images)
        scale, shift = _affine(self.mean, self.std, images.device)
        return _resample(images * scale + shift, rows, columns)

    def _fixed(self, length: int, images: Tensor) -> Tensor:
        return _centre(length, self.size, self.size, self.interpolation, images.device)


def make_transform(config: Data, mean: Sequence[float], std: Sequence[float]) -> Transform:
    """The transform an experiment asks for, with the channel means and deviations of images in 0..1."""
    return Transform(
        config.size,
        config.transform,
        config.interpolation,
        tuple(mean),
        tuple(std),
        config.crop_scale,
        config.rotation,
    )


def channel_statistics(images: Tensor, rows: np.ndarray | None = None) -> tuple[Colour, Colour]:
    """Mean and standard deviation of each channel of uint8 images (N, 3, H, W), or of some rows of them, in 0..1.

    Counts of the 256 grey levels are exact and small, and the images are read once, in chunks of some 16 MB: they
    may be mapped from a file larger than memory.
    """
    index = torch.arange(len(images)) if rows is None else torch.from_numpy(rows)
    counts = torch.zeros(3, 256, dtype=torch.int64)
    for chunk in index.split(max(1, 2**24 // images[0].numel())):
        for channel, levels in enumerate(images[chunk].transpose(0, 1)):
            counts[channel] += torch.bincount(levels.flatten(), minlength=256).cpu()
    shares = counts.double() / counts.sum(1, keepdim=True)
    grey = torch.arange(256, dtype=torch.float64) / 255
    mean = shares @ grey
    std = (shares * (grey - mean[:, None]) ** 2).sum(1).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


def _draw_boxes(
    rng: np.random.Generator, count: int, height: int, width: int, crop_scale: tuple[float, float]
) -> tuple[np.ndarray, ...]:
    """Top, left, height and width of `count` crops by the law of torchvision's RandomResizedCrop."""
    area = height * width * rng.uniform(*crop_scale, (count, TRIES))
    ratio = np.exp(rng.uniform(math.log(RATIOS[0]), math.log(RATIOS[1]), (count, TRIES)))
    widths, heights = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first = np.arange(count), fits.argmax(1)
    # Where no try fits, the largest central box of an allowed ratio.
    found = fits.any(1)
    crop_height = np.where(found, heights[first], min(height, round(width / RATIOS[0]))).astype(int)
    crop_width = np.where(found, widths[first], min(width, round(height * RATIOS[1]))).astype(int)
    top = np.where(found, rng.integers(0, height - crop_height + 1), (height - crop_height) // 2)
    left = np.where(found, rng.integers(0, width - crop_width + 1), (width - crop_width) // 2)
    return top, left, crop_height, crop_width


def _weights(start: Tensor, length: Tensor, source: int, size: int, interpolation: Interpolation) -> Tensor:
    """Antialiased weights (..., size, source) that resize the pixels [start, start + length) to `size`."""
    scale = length / size
    stretch = scale.clamp(min=1)
    support = (1 if interpolation == "bilinear" else 2) * stretch
    centre = scale * (torch.arange(size, device=start.device)[:, None] + 0.5)
    # The window cuts off pixels that only rounding puts inside the support, as torch's does.
    first = (centre - support + 0.5).trunc().clamp(min=0)
    end = torch.minimum((centre + support + 0.5).trunc(), length)
    pixel = torch.arange(source, device=start.device) - start
    x = ((pixel - centre + 0.5) * (1 / stretch)).abs()
    if interpolation == "bilinear":
        weights = (1 - x).clamp(min=0)
    else:  # Keys' cubic with a = -0.5; the outer piece factored, which loses no digits near its zeros
        weights = torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, -0.5 * (x - 1) * (x - 2) ** 2)
    weights = torch.where((pixel >= first) & (pixel < end), weights, 0.0)
    return weights / weights.sum(-1, keepdim=True)


# The cached tensors are made once per device: a copy from the host would stall the stream and cannot be captured.


@lru_cache(maxsize=64)
def _centre(source: int, full: int, size: int, interpolation: Interpolation, device: torch.device) -> Tensor:
    """The middle `size` rows of the matrix (full, source) that resizes `source` pixels to `full`."""
    start, length = torch.zeros(1, 1, device=device), torch.full((1, 1), source, dtype=torch.float32, device=device)
    return _weights(start, length, source, full, interpolation).narrow(0, round((full - size) / 2), size).contiguous()


@lru_cache(maxsize=64)
def _affine(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and shift, (3, 1, 1), that normalise grey levels 0..255."""
    means, stds = torch.tensor([mean, std], dtype=torch.float64)[:, :, None, None]
    stds = stds.clamp(min=1 / 255)  # a channel that never varies has none
    return (1 / (255 * stds)).float().to(device), (-means / stds).float().to(device)


def _resample(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows @ image @ columns.T for images (B, 3, H, W); rows and columns are shared, or (B, size, ...) per image."""
    # Under autocast the products would round to bfloat16, coarser than the grey levels.
    with torch.autocast(images.device.type, enabled=False):
        wide = images.flatten(1, 2) @ columns.mT  # (B, 3 H, size): channels share a product, nothing is repeated
        return rows.unsqueeze(-3) @ wide.unflatten(1, (3, -1))


def _rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Images (B, 3, S, S) turned counter-clockwise about their centre, as torchvision's rotate of a tensor does."""
    size = images.shape[-1]
    angle = torch.deg2rad(degrees.double())
    cos, sin = (part.float()[:, None, None] / (0.5 * size) for part in (angle.cos(), angle.sin()))
    x = torch.arange(size, device=images.device) - 0.5 * (size - 1)
    y = x[:, None]
    grid = torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-1)
    return grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

"""Decoded images where training wants them: on the device once, or mapped from disk and fed in batches."""

from typing import Literal

import numpy as np
import torch

# Of the free memory: the rest is for weights and activations.
SHARE_FOR_IMAGES = 0.5


class ImageStore:
    """Rows of a uint8 image array, handed out as batches on the device."""

    def __init__(
        self, images: torch.Tensor, device: torch.device, placement: Literal["auto", "device", "mapped"] = "auto"
    ) -> None:
        self.device = device
        if placement == "auto":
            placement = "device" if images.nbytes <= SHARE_FOR_IMAGES * free_memory(device) else "mapped"
        self.placement = placement
        # clone: on a CPU, .to would keep the file mapping, and page faults would land in the training loop.
        self.images = images.to(device, copy=True) if placement == "device" else images

    @property
    def height_width(self) -> tuple[int, int]:
        return self.images.shape[2], self.images.shape[3]

    def batch(self, rows: torch.Tensor) -> torch.Tensor:
        """The images of `rows` (a host tensor of row numbers), uint8 (B, 3, H, W), on the device."""
        if self.placement == "device":
            return self.images[rows.to(self.device, non_blocking=True)]
        batch = self.images[rows]
        if self.device.type == "cuda":
            batch = batch.pin_memory()
        return batch.to(self.device, non_blocking=True)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device now; on a CPU, what the system can give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 4 * 2**30


def to_rows(rows: np.ndarray) -> torch.Tensor:
    """Row numbers as the tensor `ImageStore.batch` takes."""
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))

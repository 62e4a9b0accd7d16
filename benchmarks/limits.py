"""What the hardware allows: arithmetic and memory traffic, measured in the run, beside what its maker promises."""

from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.result import timed
from fedsieve.config import Model, Part
from fedsieve.model.build import build_classifier, trainable_names


class Promise(NamedTuple):
    """bf16 matrix products without sparsity, FLOP/s, and memory traffic, bytes/s."""

    product: float
    traffic: float


# NVIDIA's data sheets (GeForce: the Ada architecture's whitepaper), by a part of the name that CUDA gives. Sheets that state
# products with sparsity are halved.
PROMISES = {
    "NVIDIA H200": Promise(989e12, 4.8e12),
    "H100 PCIe": Promise(756e12, 2.0e12),
    "H100 NVL": Promise(835e12, 3.9e12),
    "H100 80GB HBM3": Promise(989e12, 3.35e12),
    "A100-SXM4-80GB": Promise(312e12, 2.039e12),
    "A100 80GB PCIe": Promise(312e12, 1.935e12),
    "A100-SXM4-40GB": Promise(312e12, 1.555e12),
    "A100-PCIE-40GB": Promise(312e12, 1.555e12),
    "L40S": Promise(362e12, 0.864e12),
    "RTX 4090": Promise(165e12, 1.008e12),
}


def promise(name: str) -> Promise | None:
    """What the data sheet of a GPU says; None for one that is not in the table."""
    return next((found for part, found in PROMISES.items() if part in name), None)


class Limits(NamedTuple):
    """What a device did in this run, and what its data sheet says."""

    product: float  # FLOP/s of one large matrix product
    copy: float  # bytes/s read and written
    promise: Promise | None
    dtype: str

    @property
    def peak(self) -> float | None:
        """FLOP/s of the data sheet: what utilisation is counted against."""
        return self.promise.product if self.promise else None

    def sentence(self) -> str:
        sheet = "no data sheet is known here"
        if self.promise:
            sheet = f"data sheet: {self.promise.product / 1e9:,.0f} GFLOP/s, {self.promise.traffic / 1e9:,.0f} GB/s"
        return (
            f"a large {self.dtype} matrix product {self.product / 1e9:,.0f} GFLOP/s, a copy {self.copy / 1e9:,.1f} GB/s "
            f"read and written, both in this run; {sheet}"
        )


def measure_limits(device: torch.device, smoke: bool = False) -> Limits:
    """The best of several large products and copies: bf16 on a GPU, fp32 on a CPU."""
    gpu = device.type == "cuda"
    dtype, side, count = (torch.bfloat16, 8192, 2**28) if gpu else (torch.float32, 1536, 2**24)
    if smoke:
        side, count = 64, 2**12
    one, two = torch.randn(2, side, side, device=device).to(dtype)
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    product, copy = (
        min(timed(call, device) for _ in range(2 if smoke else 10))
        for call in (lambda: one @ two, lambda: target.copy_(source))
    )
    name = torch.cuda.get_device_name(device) if gpu else ""
    return Limits(2 * side**3 / product, 2 * source.nbytes / copy, promise(name), "bf16" if gpu else "fp32")


def training_flops(config: Model, pixels: int, train: Part, classes: int = 100) -> int:
    """FLOPs of one image, forward and backward, counted on a network without memory for its weights.

    Matrix products, convolutions and attention; every weight of `train` gets a gradient, also where a mask then drops it.
    """
    with torch.device("meta"):
        model = build_classifier(config.model_copy(update={"weights": "none"}), classes, pixels, 0)
        inside = set(trainable_names(model, train))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in inside)
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 3, pixels, pixels)).sum().backward()
    return counter.get_total_flops()

"""Messages: their bytes against dense, against the entropy limit and against other ways to write them, and their speed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow
import torch
from torch import Tensor

from benchmarks.result import Result, alternate
from fedsieve.config import Model
from fedsieve.errors import FedsieveError
from fedsieve.mask.calibration import calibrate
from fedsieve.mask.mask import Mask
from fedsieve.model.build import build_classifier
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.wire.bits import entropy
from fedsieve.wire.codec import Coding, decode, dense_bytes, encode, forget, limit_bytes
from fedsieve.wire.values import BITS, Format, largest

SMALL = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
SPARSITY = 0.9
ZSTD_LEVEL = 3  # zstd's own default


@dataclass(frozen=True)
class Way:
    """One way to write an update: `read(write())` gives the values (k,) back, or (D,) where zeros are written too."""

    write: Callable[[], bytes]
    read: Callable[[bytes], Tensor]
    values: Tensor  # what is to come back
    error: float  # how far off it may be, as a share of the largest value
    limit: float | None  # bytes that no code can do without


def wire(device: torch.device, smoke: bool) -> Result:
    """One client's update of ViT-S/16 at sparsity 0.9; values are encoded on the device and written to host memory."""
    options = SMALL if smoke else {}
    config = Model(backbone="vit_small_patch16_224", weights="none", options=options)
    space = ParamSpace.of(build_classifier(config, classes=100, size=224, seed=0))
    result = Result(
        ("message", "bytes", "of dense fp32, %", "times its limit", "encode, MB/s", "decode, MB/s"),
        note=f"One update of {space.size:,} weights, {100 * SPARSITY:g} % frozen by a mask whose density differs from tensor to tensor; "
        "normal values. The limit is the mask's entropy, tensor by tensor, where the receiver does not know it, and the bits "
        "of the values, each taken as needed. MB/s count the fp32 values that arrive (4 bytes "
        "each), so rows of the same values compare. zstd at its default level, in one thread.",
    )
    for name, way in make_ways(space, device).items():
        message = way.write()
        back = way.read(message).to(way.values)
        if float((back - way.values).abs().max()) > way.error * float(way.values.abs().max()):
            raise FedsieveError(f"bench wire: {name} did not come back as it was sent", 1)
        taken = alternate({"write": way.write, "read": partial(way.read, message)}, device, 1 if smoke else 5)
        carried = 4e-6 * int(way.values.count_nonzero())
        result.rows.append(
            (
                name,
                len(message),
                100 * len(message) / dense_bytes(space),
                len(message) / way.limit if way.limit else None,
                carried / taken["write"],
                carried / taken["read"],
            )
        )
    return result


def make_ways(space: ParamSpace, device: torch.device) -> dict[str, Way]:
    """Every way to write one random update."""
    rng = generator(0, "bench wire")
    update = torch.from_numpy(rng.standard_normal(space.size, dtype=np.float32)).mul_(1e-3)
    mask = _mask(space, rng)
    places = mask.indices()
    k, dense, sparse = mask.count, update.to(device), update[places].to(device)
    whole = torch.zeros(space.size)
    whole[places] = update[places]
    zeros, host = whole.numpy(), sparse.cpu()

    def ours(coding: Coding, over: Mask | ParamSpace, values: Tensor, enclose: bool = False) -> Way:
        expected = over.space if enclose and isinstance(over, Mask) else over
        count = over.count if isinstance(over, Mask) else over.size
        limit = coding.kept(count) * BITS[coding.format] / 8
        if isinstance(over, Mask):
            limit = limit_bytes(over, BITS[coding.format], enclose or coding.format == "coo")
        back = values
        if coding.top_k is not None:
            back = torch.where(largest(values[None], coding.kept(count))[0], values, 0)
            limit += entropy([coding.kept(count)], [count]) / 8

        def write() -> bytes:
            forget()
            return encode(values, coding, over, round=0, client=0, key=1, enclose=enclose)

        def read(message: bytes) -> Tensor:
            forget()
            return decode(message, coding, expected, enclosed=enclose, device=device).values

        return Way(
            write,
            read,
            back,
            {"fp32": 0.0, "coo": 0.0, "fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2, "int4": 0.2}.get(coding.format, 2.0),
            limit,
        )

    formats: tuple[Format, ...] = ("fp32", "fp16", "int8", "int4", "sign")
    ways = {f"dense, {name}": ours(Coding(name), space, dense) for name in formats[:3]}
    ways |= {f"known mask, {name}": ours(Coding(name), mask, sparse) for name in formats}
    ways |= {f"mask enclosed, {name}": ours(Coding(name), mask, sparse, enclose=True) for name in ("fp32", "int8")}
    limit = limit_bytes(mask, 32, True)
    ways["values and an int64 index a dimension (COO)"] = ours(Coding("coo"), mask, sparse)
    for kind in ("int64", "int32"):
        ways[f"values and flat {kind} indices"] = Way(
            partial(_indexed, zeros, kind), partial(_unindexed, space.size, kind), host, 0.0, limit
        )
    ways["bitmask, fp32"] = Way(
        lambda: np.packbits(zeros != 0).tobytes() + zeros[zeros != 0].tobytes(),
        partial(_unpacked, space.size),
        host,
        0.0,
        limit,
    )
    ways["zstd of the update with its zeros, fp32"] = Way(
        lambda: _zstd(zeros.tobytes()), lambda data: _unzstd(data, np.float32, space.size), whole, 0.0, limit
    )
    scale = float(whole.abs().max()) / 127
    ways["zstd of the update with its zeros, int8"] = Way(
        lambda: _zstd((zeros / scale).round().astype(np.int8).tobytes()),
        lambda data: _unzstd(data, np.int8, space.size).float() * scale,
        whole,
        1e-2,
        limit_bytes(mask, 8, True),
    )
    share = k / space.size
    ways[f"top {100 * share:.0f} % of a dense update, int8"] = ours(Coding("int8", top_k=share), space, dense)
    ways["top 1 % of a dense update, int8"] = ours(Coding("int8", top_k=0.01), space, dense)
    return ways


def _mask(space: ParamSpace, rng: np.random.Generator) -> Mask:
    """A mask whose density varies between tensors, as those of sensitivity rules do."""
    levels = np.repeat(rng.normal(size=len(space.names)), np.diff(space.offsets))
    scores = torch.from_numpy((rng.normal(size=space.size) + levels).astype(np.float32))
    return calibrate(lambda *_: scores, space, sparsity=SPARSITY, rule="least_sensitive", rounds=1)


def _indexed(whole: np.ndarray, kind: str) -> bytes:
    """Where a vector is not zero, each place one number, and its values there."""
    places = np.flatnonzero(whole)
    return places.astype(kind).tobytes() + whole[places].tobytes()


def _unindexed(size: int, kind: str, data: bytes) -> Tensor:
    """The values behind their places."""
    count = len(data) // (np.dtype(kind).itemsize + 4)
    places = np.frombuffer(data, kind, count)
    whole = np.zeros(size, np.float32)
    whole[places] = np.frombuffer(data, np.float32, offset=places.nbytes)
    return torch.from_numpy(whole[places])


def _unpacked(size: int, data: bytes) -> Tensor:
    """The values behind a bitmask."""
    bits = -(-size // 8)
    values = np.frombuffer(data, np.float32, offset=bits)
    active = np.unpackbits(np.frombuffer(data, np.uint8, bits), count=size).view(bool)
    whole = np.zeros(size, np.float32)
    whole[active] = values
    return torch.from_numpy(whole[active])


def _zstd(data: bytes) -> bytes:
    return pyarrow.Codec("zstd", ZSTD_LEVEL).compress(data, asbytes=True)


def _unzstd(data: bytes, kind: type[np.generic], size: int) -> Tensor:
    raw = pyarrow.Codec("zstd", ZSTD_LEVEL).decompress(
        data, decompressed_size=size * np.dtype(kind).itemsize, asbytes=True
    )
    return torch.from_numpy(np.frombuffer(raw, kind).copy())

"""Where images come from: a hub dataset, a folder of parquet files or of images by class, or the embedded digits.

Images are decoded once into one uint8 array per split and cached on disk under a fingerprint of the content they
came from, so a second start reads an array instead of decoding pictures.
"""

import hashlib
import io
import itertools
import json
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image

from fedsieve.config import Data
from fedsieve.data.splits import hold_out
from fedsieve.errors import FedsieveError, did_you_mean
from fedsieve.files import folder_atomic, write_atomic
from fedsieve.randomness import generator

if TYPE_CHECKING:
    import datasets

# Raised when what is cached, or how it is made, changes.
CACHE_VERSION = 1
IMAGE_ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}
EMBEDDED = {"digits": "1,797 handwritten digits (scikit-learn), 8x8, coloured; 10 classes; nothing to download"}

Split = Literal["train", "test"]


@dataclass(frozen=True)
class ImageSet:
    """Decoded images of one split. `images` is uint8 (N, 3, H, W) and may be memory-mapped."""

    images: torch.Tensor
    labels: torch.Tensor
    class_names: list[str]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)


def cache_folder(config: Data) -> Path:
    """The folder for decoded images and other things made once."""
    default = os.environ.get("FEDSIEVE_CACHE") or Path.home() / ".cache" / "fedsieve"
    return Path(config.cache or default).expanduser()


def load_images(config: Data, split: Split, say: Callable[[str], None] = lambda _: None) -> ImageSet:
    """One split of the configured source, decoded or from the cache; every class of it (see `keep_classes`).

    Where the source has no test split, `test_fraction` of its rows are held out, by a draw that does not depend on
    the experiment's seed: the test set must not change from run to run.
    """
    kind = kind_of(config.source)
    if kind == "embedded":
        images = _digits()
        rows = torch.from_numpy(_held_out(images.labels.numpy(), config, split))
        images = ImageSet(images.images[rows], images.labels[rows], images.class_names, images.fingerprint)
    else:
        folder = _find_cached(config, split) if kind == "folder" else None
        images = _read_cache(folder or _decode(config, split, say))
    return images


def kind_of(source: str) -> Literal["embedded", "folder", "hub"]:
    """What a `data.source` names; a path that is not there is refused before anything is loaded."""
    if source in EMBEDDED:
        return "embedded"
    path = Path(source).expanduser()
    if path.is_dir():
        return "folder"
    if path.exists():
        raise FedsieveError(f"data.source: {source} is a file; a folder of parquet files or of class folders is needed")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", source):
        return "hub"
    raise FedsieveError(
        f"data.source: {source}: no such folder, and not a hub id of the form owner/name."
        f"{did_you_mean(source, EMBEDDED)} Embedded sets: {', '.join(EMBEDDED)}"
    )


# --- the embedded set ------------------------------------------------------------------------------------------------


def _digits() -> ImageSet:
    """scikit-learn's digits, each in a dark and a light colour of its own that say nothing about the class."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    ink = np.asarray(bunch.images, dtype=np.float64)[:, None] / 16  # (N, 1, 8, 8)
    rng = generator(0, "digits")
    count = len(ink)
    pen, paper = rng.uniform(0, 110, (count, 3, 1, 1)), rng.uniform(150, 255, (count, 3, 1, 1))
    images = np.rint(paper + ink * (pen - paper)).astype(np.uint8)
    return ImageSet(
        torch.from_numpy(images), torch.from_numpy(bunch.target.astype(np.int64)), list("0123456789"), "digits-1"
    )


# --- the cache -------------------------------------------------------------------------------------------------------


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _content_of(files: list[Path], cache: Path) -> str:
    """A digest of the files' bytes, remembered under their names, sizes and times so that it is computed once."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    memo = cache / "digests" / _digest(stats)
    if memo.exists():
        return memo.read_text()
    content = hashlib.blake2b(digest_size=16)
    for file in files:
        with file.open("rb") as handle:
            content.update(hashlib.file_digest(handle, "blake2b").digest())
    write_atomic(memo, content.hexdigest())
    return content.hexdigest()


def _cache_path(config: Data, split: Split, content: str, side: int | None, whole: bool) -> Path:
    """Where a split's decoded images lie.

    `side` is set when they were brought to one size to be stored, `whole` when the split was held out of one table.
    """
    name = (split, config.test_fraction) if whole else getattr(config, f"{split}_split")
    columns = (config.subset, config.train_split, config.image_column, config.label_column)
    key = _digest(CACHE_VERSION, content, name, columns, side)
    return cache_folder(config) / "images" / key


def _stored_side(config: Data) -> int:
    """Images of many sizes are stored as squares of this side: what evaluation by crop needs (256 for 224)."""
    return round(config.size * 256 / 224)


def _find_cached(config: Data, split: Split) -> Path | None:
    content = _content_of(_data_files(Path(config.source).expanduser()), cache_folder(config))
    for side, whole in itertools.product((None, _stored_side(config)), (False, True)):
        path = _cache_path(config, split, content, side, whole)
        if path.is_dir():
            return path
    return None


def _read_cache(folder: Path) -> ImageSet:
    meta = json.loads((folder / "meta.json").read_text())
    try:
        # Copy-on-write: torch wants writable memory, and nothing here writes.
        images = np.load(folder / "images.npy", mmap_mode="c")
        labels = np.load(folder / "labels.npy")
        if images.shape != tuple(meta["shape"]) or len(labels) != len(images):
            raise ValueError("the arrays do not have the recorded shape")
    except (OSError, ValueError) as error:
        raise FedsieveError(
            f"{folder}: the cached images are damaged ({error}). Delete the folder and run again", 1
        ) from None
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), meta["class_names"], folder.name)


def _data_files(folder: Path) -> list[Path]:
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_ENDINGS | {".parquet"} and not path.name.startswith(".")
    )
    if not files:
        raise FedsieveError(f"data.source: {folder} holds no parquet file and no image")
    return files


# --- decoding --------------------------------------------------------------------------------------------------------


def _decode(config: Data, split: Split, say: Callable[[str], None]) -> Path:
    """Decode one split into the cache and return its folder there."""
    table, reference, whole = _open_table(config, split)
    image_column, label_column = _columns(config, table)
    class_names = _class_names(reference, label_column)
    labels = _labels(table, label_column, class_names, config.source)
    if kind_of(config.source) == "folder":
        files = _data_files(Path(config.source).expanduser())
    else:
        files = [Path(entry["filename"]) for entry in table.cache_files]
    content = _content_of(files, cache_folder(config))
    if whole:
        rows = _held_out(labels, config, split)
        table, labels = table.select(rows), labels[rows]

    say(f"decoding {len(table):,} images of {config.source} ({split}), once")
    width, height = _open(next(_items(table, image_column))[0], config.source).size
    sides: list[int | None] = [_stored_side(config)]
    if max(width, height) <= max(_stored_side(config), 256):
        sides.insert(0, None)  # small images are kept as they are, if they are all of one size
    for side in sides:
        path = _cache_path(config, split, content, side, whole)
        shape = (len(table), 3, side or height, side or width)
        try:
            with folder_atomic(path) as folder:
                _fill(folder / "images.npy", shape, table, image_column, side, config.source)
                np.save(folder / "labels.npy", labels)
                (folder / "meta.json").write_text(json.dumps({"class_names": class_names, "shape": shape}))
            break
        except _ManySizes:
            say("the images are of several sizes: storing them as squares")
    return path


class _ManySizes(Exception):
    """The images of a table are not all of the size of the first."""


def _fill(
    file: Path, shape: tuple[int, ...], table: "datasets.Dataset", column: str, side: int | None, source: str
) -> None:
    """Decode every image into a memory-mapped array, a bounded number at a time."""
    array = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)

    def decode(items: list[tuple[int, Any]]) -> None:
        for row, value in items:
            pixels = _pixels((row, value), side, source)
            if pixels.shape != shape[1:]:
                raise _ManySizes
            array[row] = pixels

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        pending: deque[Future[None]] = deque()
        for items in _items(table, column):
            pending.append(threads.submit(decode, items))
            if len(pending) > 2 * (os.cpu_count() or 1):
                pending.popleft().result()
        for future in pending:
            future.result()
    array.flush()


def _open_table(config: Data, split: Split) -> tuple["datasets.Dataset", "datasets.Dataset", bool]:
    """The rows of a split, the training rows (they define the classes), and whether the split must still be held out."""
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # a local folder has no card
    source, kind = config.source, kind_of(config.source)
    path = str(Path(source).expanduser()) if kind == "folder" else source
    if kind == "folder":
        _check_parquet(_data_files(Path(path)))
    try:
        tables = datasets.load_dataset(
            path, config.subset, revision=config.revision, cache_dir=str(cache_folder(config) / "datasets")
        )
    except Exception as error:  # datasets wraps causes of every kind
        if kind == "hub":
            raise FedsieveError(
                f"data.source: {source} could not be loaded from the hub and no folder has that name: {_first_line(error)}\n"
                "Offline, point data.source at a local folder, or use the embedded set: data.source=digits",
                1,
            ) from None
        _check_parquet(_data_files(Path(path)), deep=True)
        raise FedsieveError(f"data.source: {source} could not be read: {_first_line(error)}", 1) from None
    if config.train_split not in tables:
        raise FedsieveError(
            f'data.train_split: {source} has no split "{config.train_split}". It has: {", ".join(tables)}'
        )
    whole = config.test_split not in tables
    name = config.train_split if split == "train" or whole else config.test_split
    return tables[name], tables[config.train_split], whole


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0][:300]


def _check_parquet(files: list[Path], deep: bool = False) -> None:
    """Refuse a damaged or foreign parquet file by name; the reader's own message would not tell which.

    The quick check reads what stands at the file's end; the deep one reads everything.
    """
    import pyarrow
    import pyarrow.parquet

    for file in files:
        if file.suffix.lower() == ".parquet":
            try:
                (pyarrow.parquet.read_table if deep else pyarrow.parquet.read_metadata)(file)
            except (pyarrow.ArrowException, OSError) as error:
                raise FedsieveError(f"{file}: damaged, or not a parquet file: {_first_line(error)}", 1) from None


def _columns(config: Data, table: "datasets.Dataset") -> tuple[str, str]:
    """The image column and the label column: as named, or the only ones that can be."""
    import datasets

    features = table.features
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image) or _is_bytes(feature)]
    labels = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if not labels:
        labels = [name for name in features if name in ("label", "labels", "class", "target", "y", "fine_label")]
    if config.label_column is None and "fine_label" in labels:
        labels = ["fine_label"]  # CIFAR-100, whose coarse labels are the other column
    found = []
    for key, named, candidates in (("image", config.image_column, images), ("label", config.label_column, labels)):
        if named is not None:
            if named not in features:
                raise FedsieveError(
                    f'data.{key}_column: {config.source} has no column "{named}".'
                    f"{did_you_mean(named, features)} It has: {', '.join(features)}"
                )
            found.append(named)
        elif len(candidates) == 1:
            found.append(candidates[0])
        else:
            raise FedsieveError(
                f"data.{key}_column: say which column of {config.source} holds the {key}s. "
                f"Candidates: {', '.join(candidates or features)}"
            )
    return found[0], found[1]


def _is_bytes(feature: Any) -> bool:
    """Whether a column holds encoded images without saying so: bytes, or a struct with bytes."""
    if isinstance(feature, dict):
        return "bytes" in feature
    return getattr(feature, "dtype", None) in ("binary", "large_binary")


def _class_names(table: "datasets.Dataset", column: str) -> list[str]:
    import datasets

    feature = table.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return list(feature.names)
    values = table.unique(column)
    if all(isinstance(value, int) for value in values):
        return [str(number) for number in range(max(values) + 1)]
    return sorted(map(str, values))


def _labels(table: "datasets.Dataset", column: str, class_names: list[str], source: str) -> np.ndarray:
    """Labels as numbers of `class_names`; a row without a known label is refused by number."""
    values = np.asarray(table.with_format("numpy")[column][:])
    if not np.issubdtype(values.dtype, np.integer):
        numbers = {name: number for number, name in enumerate(class_names)}
        values = np.array([numbers.get(str(value), -1) for value in values])
    labels = values.astype(np.int64)
    wrong = np.flatnonzero((labels < 0) | (labels >= len(class_names)))
    if len(wrong):
        raise FedsieveError(
            f"{source}: row {wrong[0]} has the label {table[int(wrong[0])][column]!r}, which is not one of the "
            f"{len(class_names)} classes ({len(wrong)} such rows)",
            1,
        )
    return labels


def _items(table: "datasets.Dataset", column: str) -> Iterator[list[tuple[int, Any]]]:
    """The rows of the image column in order, undecoded, in small lists of (row number, value)."""
    import datasets

    table = table.select_columns([column])
    if isinstance(table.features[column], datasets.Image):
        table = table.cast_column(column, datasets.Image(decode=False))
    row = 0
    for batch in table.iter(batch_size=256):
        values = batch[column]
        yield list(enumerate(values, row))
        row += len(values)


def _open(item: tuple[int, Any], source: str) -> Image.Image:
    row, value = item
    name, content = None, value
    if isinstance(value, dict):
        name, content = value.get("path"), value.get("bytes")
    where = f"{name or source} (row {row})"
    if content is None and not (name and os.path.exists(name)):
        raise FedsieveError(f"{where}: there is no image in this row", 1)
    try:
        return Image.open(io.BytesIO(content) if content is not None else str(name))
    except Exception as error:
        raise FedsieveError(f"{where}: not an image that can be read: {_first_line(error)}", 1) from None


def _pixels(item: tuple[int, Any], side: int | None, source: str) -> np.ndarray:
    """The RGB pixels (3, H, W) of one row, shrunk and centre-cropped to a square where `side` is given."""
    image = _open(item, source)
    try:
        image = image.convert("RGB")
    except Exception as error:
        row, value = item
        name = value.get("path") if isinstance(value, dict) else None
        raise FedsieveError(f"{name or source} (row {row}): the image is damaged: {_first_line(error)}", 1) from None
    if side is not None:
        scale = side / min(image.size)
        image = image.resize([max(side, round(length * scale)) for length in image.size], Image.Resampling.BICUBIC)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    return np.asarray(image).transpose(2, 0, 1)


# --- rows ------------------------------------------------------------------------------------------------------------


def _held_out(labels: np.ndarray, config: Data, split: Split) -> np.ndarray:
    """The rows of the training or the test part of a set that came whole."""
    train, test = hold_out(labels, config.test_fraction, True, generator(0, "test split"))
    return train if split == "train" else test


def keep_classes(
    images: ImageSet, rows: np.ndarray, classes: list[int] | None
) -> tuple[np.ndarray, torch.Tensor, list[str]]:
    """Of `rows`, those of the named classes, with their labels (renumbered in that order) and the classes' names."""
    labels = images.labels[torch.from_numpy(rows)]
    if classes is None:
        return rows, labels, images.class_names
    if max(classes) >= len(images.class_names):
        raise FedsieveError(
            f"data.classes: there is no class {max(classes)}; classes are 0 to {len(images.class_names) - 1}"
        )
    number = torch.full((len(images.class_names),), -1)
    number[torch.tensor(classes)] = torch.arange(len(classes))
    labels = number[labels]
    kept = labels >= 0
    return rows[kept.numpy()], labels[kept], [images.class_names[label] for label in classes]


def count_images(config: Data) -> tuple[int, int, int, int]:
    """Training images, test images, classes, and bytes of one stored image, without decoding what is not yet decoded."""
    counts = []
    for split in ("train", "test"):
        cached = None
        if kind_of(config.source) == "embedded":
            images = load_images(config, split)
            labels, class_names, pixels = images.labels.numpy(), images.class_names, images.images[0].numel()
        elif kind_of(config.source) == "folder" and (cached := _find_cached(config, split)):
            meta = json.loads((cached / "meta.json").read_text())
            labels, class_names = np.load(cached / "labels.npy"), meta["class_names"]
            pixels = int(np.prod(meta["shape"][1:]))
        else:
            table, reference, whole = _open_table(config, split)
            image_column, label_column = _columns(config, table)
            class_names = _class_names(reference, label_column)
            labels = _labels(table, label_column, class_names, config.source)
            labels = labels[_held_out(labels, config, split)] if whole else labels
            width, height = _open(next(_items(table, image_column))[0], config.source).size
            pixels = 3 * min(width * height, max(_stored_side(config), 256) ** 2)
        counts.append(len(labels) if config.classes is None else int(np.isin(labels, config.classes).sum()))
    return counts[0], counts[1], len(config.classes or class_names), pixels

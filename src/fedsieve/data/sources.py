"""Where images come from: a hub dataset, a folder of parquet files or of images by class, or the embedded digits.

Images are decoded once into one uint8 array per split and cached on disk under a fingerprint of the content they
came from, so a second start reads an array instead of decoding pictures.
"""

import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedsieve.config import Data
from fedsieve.data.image_tables import (
    SIMPLE,
    Items,
    Split,
    cache_folder,
    check_class_folders,
    data_files,
    find_columns,
    has_parquet,
    is_class_folders,
    kind_of,
    open_image,
    open_table,
    read_class_names,
    read_items,
    read_labels,
    read_pixels,
)
from fedsieve.data.splits import hold_out
from fedsieve.errors import FedsieveError, did_you_mean
from fedsieve.files import folder_atomic, write_atomic
from fedsieve.randomness import generator

if TYPE_CHECKING:
    pass

SMALL = 256  # the longest side of square images that are kept as they are, if all have one size
# Raised when what is cached, or how it is made, changes.
CACHE_VERSION = 2


@dataclass(frozen=True)
class ImageSet:
    """Decoded images of one split. `images` is uint8 (N, 3, H, W) and may be memory-mapped."""

    images: torch.Tensor
    labels: torch.Tensor
    class_names: list[str]
    fingerprint: str
    whole: bool = False  # the source has no test split: this part was held out of one table

    def __len__(self) -> int:
        return len(self.labels)


def load_images(config: Data, split: Split, say: Callable[[str], None] = lambda _: None) -> ImageSet:
    """One split of the configured source, decoded or from the cache; every class of it (see `keep_classes`).

    Where the source has no test split, `test_fraction` of its rows are held out, by a draw that does not depend on
    the experiment's seed: the test set must not change from run to run.
    """
    kind = kind_of(config.source)
    if kind == "nothing":
        images = ImageSet(torch.zeros(0, 3, 1, 1, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), [], "none")
    elif kind == "embedded":
        images = _digits()
        rows = torch.from_numpy(_held_out(images.labels.numpy(), config, split))
        images = ImageSet(images.images[rows], images.labels[rows], images.class_names, images.fingerprint, True)
    else:
        folder = _find_cached(config, split) if kind == "folder" else None
        images = _read_cache(folder or _decode(config, split, say))
    return images if config.class_names is None else _relabelled(images, config.class_names, config.source)


def _relabelled(images: ImageSet, names: list[str], source: str) -> ImageSet:
    """The same images with labels that number `names`."""
    numbers = torch.from_numpy(_numbers(images.class_names, names, source))
    return replace(images, labels=numbers[images.labels], class_names=names)


def _numbers(mine: list[str], names: list[str], source: str) -> np.ndarray:
    """The place of each of a source's own classes among `names`; one that is not there is refused."""
    if unknown := [name for name in mine if name not in names]:
        raise FedsieveError(
            f'data.class_names: {source} has a class "{unknown[0]}", which is not in the label map.'
            f"{did_you_mean(unknown[0], names)}"
        )
    return np.array([names.index(name) for name in mine], dtype=np.int64)


def load_column(config: Data, split: Split, column: str) -> np.ndarray:
    """The values (N,) of another column of the source, such as a user id, row for row as `load_images` has them.

    Numbers or words; a row without one is refused. Only this column is read, and the labels where a test split is
    held out.
    """
    key = "federation.partition.column"
    if kind_of(config.source) == "embedded" or is_class_folders(config):
        raise FedsieveError(f"{key}: {config.source} has no columns. They come with parquet files and hub datasets")
    table, reference, whole = open_table(config, split)
    if column not in table.features:
        raise FedsieveError(
            f'{key}: {config.source} has no column "{column}".'
            f"{did_you_mean(column, table.features)} It has: {', '.join(table.features)}"
        )
    kind = getattr(table.features[column], "dtype", "a list")
    if not SIMPLE.fullmatch(kind):
        raise FedsieveError(f"{key}: {column} holds {kind}; clients are named by whole numbers or words")
    values = table.with_format("arrow")[column][:]
    if values.null_count:
        row = values.is_null().to_pylist().index(True)
        raise FedsieveError(f"{config.source}: row {row} has no {column} ({values.null_count} such rows)", 1)
    values = values.to_numpy(zero_copy_only=False)
    if whole:
        label_column = find_columns(config, table)[1]
        labels = read_labels(table, label_column, read_class_names(reference, label_column), config.source)
        values = values[_held_out(labels, config, split)]
    return values


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


def _content_of(files: list[Path], root: Path, cache: Path) -> str:
    """A digest of the files' names below `root` (folders may be labels) and bytes.

    It is remembered under full names, sizes and times, so that it is computed once.
    """
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    memo = cache / "digests" / _digest(stats)
    if memo.exists():
        return memo.read_text()
    content = hashlib.blake2b(digest_size=16)
    for file in files:
        content.update(str(file.relative_to(root)).encode())
        with file.open("rb") as handle:
            content.update(hashlib.file_digest(handle, "blake2b").digest())
    write_atomic(memo, content.hexdigest())
    return content.hexdigest()


def _cache_path(config: Data, split: Split, content: str, side: int | None, whole: bool) -> Path:
    """Where a split's decoded images lie.

    `side` is set when they were brought to one size to be stored, `whole` when the split was held out of one table.
    """
    # All names are in every key: whether a split is held out follows from them and the content.
    names = (config.subset, config.train_split, config.test_split, config.image_column, config.label_column)
    key = _digest(CACHE_VERSION, content, split, names, side, config.test_fraction if whole else None)
    return cache_folder(config) / "images" / key


def stored_side(config: Data) -> int:
    """Images of many sizes are stored as squares of this side: what evaluation by crop needs (256 for 224)."""
    return round(config.size * 256 / 224)


def _find_cached(config: Data, split: Split) -> Path | None:
    root = Path(config.source).expanduser()
    files = data_files(root)
    if not has_parquet(files):
        check_class_folders(root, config, files)  # also of what is cached: it is known by its files, not by its folders
    content = _content_of(files, root, cache_folder(config))
    for side, whole in itertools.product((None, stored_side(config)), (False, True)):
        path = _cache_path(config, split, content, side, whole)
        if path.is_dir():
            return path
    return None


def _read_cache(folder: Path) -> ImageSet:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        # Copy-on-write: torch wants writable memory, and nothing here writes.
        images = np.load(folder / "images.npy", mmap_mode="c")
        labels = np.load(folder / "labels.npy")
        if images.shape != tuple(meta["shape"]) or len(labels) != len(images):
            raise ValueError("the arrays do not have the recorded shape")
        class_names, whole = meta["class_names"], meta["whole"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedsieveError(
            f"{folder}: the cached images are damaged ({error}). Delete the folder and run again", 1
        ) from None
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), class_names, folder.name, whole)


# --- decoding --------------------------------------------------------------------------------------------------------


def _decode(config: Data, split: Split, say: Callable[[str], None]) -> Path:
    """Decode one split into the cache and return its folder there."""
    table, reference, whole = open_table(config, split)
    image_column, label_column = find_columns(config, table)
    class_names = read_class_names(reference, label_column)
    labels = read_labels(table, label_column, class_names, config.source)
    if kind_of(config.source) == "folder":
        root = Path(config.source).expanduser()
        files = data_files(root)
    else:
        files = [Path(entry["filename"]) for entry in table.cache_files]
        root = Path(files[0].anchor)
    content = _content_of(files, root, cache_folder(config))
    rows = _held_out(labels, config, split) if whole else np.arange(len(labels))
    table, labels = table.select(rows), labels[rows]
    if not len(table):
        raise FedsieveError(f"data.source: {config.source} leaves no image in its {split} split", 1)

    say(f"decoding {len(table):,} images of {config.source} ({split}), once")
    width, height = open_image(next(read_items(table, image_column, rows))[0], config.source).size
    sides: list[int | None] = [stored_side(config)]
    if width == height <= max(stored_side(config), SMALL):
        sides.insert(0, None)  # small squares are kept as they are, if they are all of one size
    for side in sides:
        path = _cache_path(config, split, content, side, whole)
        shape = (len(table), 3, side or height, side or width)
        try:
            with folder_atomic(path) as folder:
                _fill(folder / "images.npy", shape, read_items(table, image_column, rows), side, config.source)
                np.save(folder / "labels.npy", labels)
                meta = {"class_names": class_names, "shape": shape, "whole": whole}
                (folder / "meta.json").write_text(json.dumps(meta))
            break
        except _ManySizes:
            say("the images are of several sizes: storing the middle of each as a square")
    return path


class _ManySizes(Exception):
    """The images of a table are not all of the size of the first."""


def _fill(file: Path, shape: tuple[int, ...], batches: Items, side: int | None, source: str) -> None:
    """Decode every image into a memory-mapped array, a bounded number at a time."""
    array = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)

    def decode(items: list[tuple[int, int, Any]]) -> None:
        for item in items:
            pixels = read_pixels(item, side, source)
            if pixels.shape != shape[1:]:
                raise _ManySizes
            array[item[0]] = pixels

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        pending: deque[Future[None]] = deque()
        for items in batches:
            pending.append(threads.submit(decode, items))
            if len(pending) > 2 * (os.cpu_count() or 1):
                pending.popleft().result()
        for future in pending:
            future.result()
    array.flush()


# --- rows ------------------------------------------------------------------------------------------------------------


def _held_out(labels: np.ndarray, config: Data, split: Split) -> np.ndarray:
    """The rows of the training or the test part of a set that came whole."""
    train, test = hold_out(labels, config.test_fraction, True, generator(0, "test split"))
    for rows, use in ((train, "train"), (test, "test")):
        if len(labels) and not len(rows):
            raise FedsieveError(
                f"data.test_fraction: {config.test_fraction:g} of {len(labels):,} images leaves none to {use} on"
            )
    return train if split == "train" else test


def keep_classes(
    images: ImageSet, rows: np.ndarray, classes: list[int] | None
) -> tuple[np.ndarray, torch.Tensor, list[str]]:
    """Of `rows`, those of the named classes, with their labels (renumbered in that order) and the classes' names."""
    _check_classes(classes, images.class_names)
    names = images.class_names
    rows, labels = choose_classes(images.labels.numpy(), rows, classes, len(names))
    return rows, torch.from_numpy(labels), names if classes is None else [names[label] for label in classes]


def choose_classes(
    labels: np.ndarray, rows: np.ndarray, classes: list[int] | None, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of `rows`, those of the named classes (of `count`), and their labels, renumbered in that order."""
    if classes is None:
        return rows, labels[rows]
    number = np.full(count, -1)
    number[classes] = np.arange(len(classes))
    chosen = number[labels[rows]]
    return rows[chosen >= 0], chosen[chosen >= 0]


def count_images(config: Data) -> tuple[int, int, int, int]:
    """Training images, test images, classes, and bytes of one stored image, without decoding what is not yet decoded."""
    splits: tuple[Split, ...] = ("train", "test")
    counts = []
    for split in splits:
        labels, class_names, pixels = survey(config, split)
        counts.append(len(labels) if config.classes is None else int(np.isin(labels, config.classes).sum()))
    return counts[0], counts[1], len(config.classes or class_names), pixels


def survey(config: Data, split: Split) -> tuple[np.ndarray, list[str], int]:
    """The labels of a split, row for row as `load_images` has them, the names of its classes, and the bytes of one stored
    image, without decoding what is not yet decoded."""
    kind = kind_of(config.source)
    cached = _find_cached(config, split) if kind == "folder" else None
    if kind == "embedded" or cached:
        images = _read_cache(cached) if cached else load_images(config, split)
        labels, class_names, pixels = images.labels.numpy(), images.class_names, images.images[0].numel()
    else:
        table, reference, whole = open_table(config, split)
        image_column, label_column = find_columns(config, table)
        class_names = read_class_names(reference, label_column)
        labels = read_labels(table, label_column, class_names, config.source)
        rows = _held_out(labels, config, split) if whole else np.arange(len(labels))
        if not len(rows):
            raise FedsieveError(f"data.source: {config.source} leaves no image in its {split} split", 1)
        width, height = open_image(next(read_items(table.select(rows[:1]), image_column, rows))[0], config.source).size
        pixels = 3 * (width * height if width == height <= SMALL else stored_side(config) ** 2)
        labels = labels[rows]
    if config.class_names is not None:
        labels, class_names = _numbers(class_names, config.class_names, config.source)[labels], config.class_names
    _check_classes(config.classes, class_names)
    return labels, class_names, pixels


def _check_classes(classes: list[int] | None, class_names: list[str]) -> None:
    if classes is not None and max(classes) >= len(class_names):
        raise FedsieveError(f"data.classes: there is no class {max(classes)}; classes are 0 to {len(class_names) - 1}")

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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps

from fedsieve import hub
from fedsieve.config import Data
from fedsieve.data.splits import hold_out
from fedsieve.errors import FedsieveError, did_you_mean
from fedsieve.files import folder_atomic, write_atomic
from fedsieve.randomness import generator

if TYPE_CHECKING:
    import datasets

# Raised when what is cached, or how it is made, changes.
CACHE_VERSION = 2
IMAGE_ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}
EMBEDDED = {"digits": "1,797 handwritten digits (scikit-learn), 8x8, coloured; 10 classes; nothing to download"}
SIMPLE = re.compile(r"u?int\d+|bool|(large_)?string")  # columns of whole numbers or words

Split = Literal["train", "test"]


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
    if kind_of(config.source) == "embedded" or _is_class_folders(config):
        raise FedsieveError(f"{key}: {config.source} has no columns. They come with parquet files and hub datasets")
    table, reference, whole = _open_table(config, split)
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
        label_column = _columns(config, table)[1]
        labels = _labels(table, label_column, _class_names(reference, label_column), config.source)
        values = values[_held_out(labels, config, split)]
    return values


def kind_of(source: str) -> Literal["embedded", "folder", "hub", "nothing"]:
    """What a `data.source` names; a path that is not there is refused before anything is loaded."""
    if source == "none":
        return "nothing"
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


def _stored_side(config: Data) -> int:
    """Images of many sizes are stored as squares of this side: what evaluation by crop needs (256 for 224)."""
    return round(config.size * 256 / 224)


def _find_cached(config: Data, split: Split) -> Path | None:
    root = Path(config.source).expanduser()
    files = _data_files(root)
    if not _has_parquet(files):
        _check_class_folders(
            root, config, files
        )  # also of what is cached: it is known by its files, not by its folders
    content = _content_of(files, root, cache_folder(config))
    for side, whole in itertools.product((None, _stored_side(config)), (False, True)):
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
        root = Path(config.source).expanduser()
        files = _data_files(root)
    else:
        files = [Path(entry["filename"]) for entry in table.cache_files]
        root = Path(files[0].anchor)
    content = _content_of(files, root, cache_folder(config))
    rows = _held_out(labels, config, split) if whole else np.arange(len(labels))
    table, labels = table.select(rows), labels[rows]
    if not len(table):
        raise FedsieveError(f"data.source: {config.source} leaves no image in its {split} split", 1)

    say(f"decoding {len(table):,} images of {config.source} ({split}), once")
    width, height = _open(next(_items(table, image_column, rows))[0], config.source).size
    sides: list[int | None] = [_stored_side(config)]
    if width == height <= max(_stored_side(config), 256):
        sides.insert(0, None)  # small squares are kept as they are, if they are all of one size
    for side in sides:
        path = _cache_path(config, split, content, side, whole)
        shape = (len(table), 3, side or height, side or width)
        try:
            with folder_atomic(path) as folder:
                _fill(folder / "images.npy", shape, _items(table, image_column, rows), side, config.source)
                np.save(folder / "labels.npy", labels)
                meta = {"class_names": class_names, "shape": shape, "whole": whole}
                (folder / "meta.json").write_text(json.dumps(meta))
            break
        except _ManySizes:
            say("the images are of several sizes: storing the middle of each as a square")
    return path


class _ManySizes(Exception):
    """The images of a table are not all of the size of the first."""


Items = Iterator[list[tuple[int, int, Any]]]  # small lists of (place, row number in the source, value)


def _fill(file: Path, shape: tuple[int, ...], batches: Items, side: int | None, source: str) -> None:
    """Decode every image into a memory-mapped array, a bounded number at a time."""
    array = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)

    def decode(items: list[tuple[int, int, Any]]) -> None:
        for item in items:
            pixels = _pixels(item, side, source)
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


def _open_table(config: Data, split: Split) -> tuple["datasets.Dataset", "datasets.Dataset", bool]:
    """The rows of a split, the training rows (they define the classes), and whether a test split is to be held out."""
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # a local folder has no card
    source, root = config.source, Path(config.source).expanduser()
    tables: Mapping[str, datasets.Dataset]
    tables = _class_folders(root, config) if _is_class_folders(config) else _load_dataset(config)
    if config.train_split not in tables:
        raise FedsieveError(
            f'data.train_split: {source} has no split "{config.train_split}". It has: {", ".join(tables)}'
        )
    if config.test_split is not None and config.test_split not in tables:
        near = did_you_mean(config.test_split, tables)
        raise FedsieveError(
            f'data.test_split: {source} has no split "{config.test_split}".{near} It has: {", ".join(tables)}'
        )
    test = config.test_split or "test"
    whole = test not in tables
    return tables[config.train_split if split == "train" or whole else test], tables[config.train_split], whole


def _load_dataset(config: Data) -> "datasets.DatasetDict":
    """Parquet files of a folder, or a dataset of the hub."""
    import datasets

    source, local = config.source, kind_of(config.source) == "folder"
    path = str(Path(source).expanduser()) if local else source
    if local:
        _check_parquet(_data_files(Path(path)))
    else:
        hub.is_reachable()  # without it, at once from what was fetched before
    try:
        return datasets.load_dataset(
            path, config.subset, revision=config.revision, cache_dir=str(cache_folder(config) / "datasets")
        )
    except Exception as error:  # datasets wraps causes of every kind
        if local:
            _check_parquet(_data_files(Path(path)), deep=True)
            raise FedsieveError(f"data.source: {source} could not be read: {_first_line(error)}", 1) from None
        raise FedsieveError(
            f"data.source: {source} could not be loaded from the hub and no folder has that name: {_first_line(error)}\n"
            "Offline, point data.source at a local folder, or use the embedded set: data.source=digits",
            1,
        ) from None


def _is_class_folders(config: Data) -> bool:
    return kind_of(config.source) == "folder" and not _has_parquet(_data_files(Path(config.source).expanduser()))


def _has_parquet(files: list[Path]) -> bool:
    return any(file.suffix.lower() == ".parquet" for file in files)


def _subfolders(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]


def _training_folder(root: Path, config: Data) -> Path:
    """What holds the folders of the training classes: ROOT/SPLIT where it has folders, or ROOT."""
    inner = root / config.train_split
    return inner if inner.is_dir() and any(path.is_dir() for path in inner.iterdir()) else root


def _check_class_folders(root: Path, config: Data, files: list[Path]) -> None:
    """Refuse a training class without an image: left out, it would silently shift the numbers of the classes after it.

    Kept, it would be a class that nobody can learn. Whoever means it names all classes in `class_names`.
    """
    folder = _training_folder(root, config)
    filled = {file.relative_to(folder).parts[0] for file in files if file.is_relative_to(folder)}
    empty = [path for path in _subfolders(folder) if path.name not in filled]
    if empty and config.class_names is None:
        more = f" (and {len(empty) - 1} more like it)" if len(empty) > 1 else ""
        raise FedsieveError(
            f"data.source: {empty[0]}{more} is a class folder without images. Put some in, delete it, or name the classes in "
            "data.class_names"
        )


def _class_folders(root: Path, config: Data) -> "dict[str, datasets.Dataset]":
    """Images by class: ROOT/SPLIT/CLASS/*, or ROOT/CLASS/* where there is no folder of the training split's name.

    Listed here, since datasets' own reader drops files whose names look like splits.
    """
    import datasets

    splits = {config.train_split: root}
    if _training_folder(root, config) != root:
        splits = {path.name: path for path in _subfolders(root)}
    names = [path.name for path in _subfolders(splits[config.train_split]) if _images(path)]
    if len(names) < (2 if config.class_names is None else 1):
        raise FedsieveError(
            f"data.source: {root} needs a folder of images for each of two classes at least, as ROOT/CLASS/* or "
            f"ROOT/{config.train_split}/CLASS/*. Found: {', '.join(names) or 'none'}"
        )
    tables = {}
    for split, folder in splits.items():
        found = [path.name for path in _subfolders(folder) if _images(path)]
        if unknown := set(found) - set(names):
            raise FedsieveError(
                f"data.source: {folder} has classes that are not trained: {', '.join(sorted(unknown)[:3])}"
            )
        files = [(str(file), names.index(name)) for name in found for file in _images(folder / name)]
        columns = {"image": [file for file, _ in files], "label": [label for _, label in files]}
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
        tables[split] = datasets.Dataset.from_dict(columns, features=features)
    return tables


def _images(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_ENDINGS and not path.name.startswith(".")
    )


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
    """The classes: as the dataset names them, or the different labels of its training rows."""
    import datasets

    feature = table.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return list(feature.names)
    kind = getattr(feature, "dtype", "a list")
    if not SIMPLE.fullmatch(kind):
        raise FedsieveError(f"data.label_column: {column} holds {kind}; labels are whole numbers or words")
    values = [value for value in table.unique(column) if value is not None]
    return [str(value) for value in sorted(values)]


def _labels(table: "datasets.Dataset", column: str, class_names: list[str], source: str) -> np.ndarray:
    """Labels as numbers of `class_names`; a row without a known label is refused by number."""
    import datasets

    values = table.with_format("arrow")[column][:].to_pylist()
    if isinstance(table.features[column], datasets.ClassLabel):
        labels = np.array([-1 if value is None else value for value in values], dtype=np.int64)
    else:
        numbers = {name: number for number, name in enumerate(class_names)}
        labels = np.array([-1 if value is None else numbers.get(str(value), -1) for value in values], dtype=np.int64)
    wrong = np.flatnonzero((labels < 0) | (labels >= len(class_names)))
    if len(wrong):
        value = values[wrong[0]]
        what = (
            "no label" if value is None else f"the label {value!r}, which is not one of the {len(class_names)} classes"
        )
        raise FedsieveError(f"{source}: row {wrong[0]} has {what} ({len(wrong)} such rows)", 1)
    return labels


def _items(table: "datasets.Dataset", column: str, rows: np.ndarray) -> Items:
    """The values of the image column in order, undecoded; `rows` says which row of the source each was."""
    import datasets

    table = table.select_columns([column])
    if isinstance(table.features[column], datasets.Image):
        table = table.cast_column(column, datasets.Image(decode=False))
    place = 0
    for batch in table.iter(batch_size=256):
        values = batch[column]
        yield [(place + i, int(rows[place + i]), value) for i, value in enumerate(values)]
        place += len(values)


def _open(item: tuple[int, int, Any], source: str) -> Image.Image:
    """The image of one row, upright, not yet decoded where its format allows that."""
    value = item[2]
    name, content = (value.get("path"), value.get("bytes")) if isinstance(value, dict) else (None, value)
    if content is None and not (name and os.path.exists(name)):
        raise FedsieveError(f"{_where(item, source)}: there is no image in this row", 1)
    try:
        return ImageOps.exif_transpose(Image.open(io.BytesIO(content) if content is not None else str(name)))
    except Exception as error:  # decoders fail in many ways
        raise FedsieveError(f"{_where(item, source)}: not an image that can be read: {_first_line(error)}", 1) from None


def _where(item: tuple[int, int, Any], source: str) -> str:
    name = item[2].get("path") if isinstance(item[2], dict) else None
    return f"{name or source} (row {item[1]})"


def _pixels(item: tuple[int, int, Any], side: int | None, source: str) -> np.ndarray:
    """The RGB pixels (3, H, W) of one row; where `side` is given, its middle as a square of that side."""
    image = _open(item, source)
    try:
        image = _rgb(image)
    except Exception as error:  # decoders fail in many ways
        raise FedsieveError(f"{_where(item, source)}: the image is damaged: {_first_line(error)}", 1) from None
    if side is not None:
        scale = side / min(image.size)
        image = image.resize([max(side, round(length * scale)) for length in image.size], Image.Resampling.BICUBIC)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    return np.asarray(image).transpose(2, 0, 1)


def _rgb(image: Image.Image) -> Image.Image:
    """Any image as 8-bit RGB: 16-bit grey is scaled, transparency laid on white."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image, dtype=np.float64) / 257).round().clip(0, 255).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range; save it with 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


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
        table, reference, whole = _open_table(config, split)
        image_column, label_column = _columns(config, table)
        class_names = _class_names(reference, label_column)
        labels = _labels(table, label_column, class_names, config.source)
        rows = _held_out(labels, config, split) if whole else np.arange(len(labels))
        if not len(rows):
            raise FedsieveError(f"data.source: {config.source} leaves no image in its {split} split", 1)
        width, height = _open(next(_items(table.select(rows[:1]), image_column, rows))[0], config.source).size
        pixels = 3 * (width * height if width == height <= 256 else _stored_side(config) ** 2)
        labels = labels[rows]
    if config.class_names is not None:
        labels, class_names = _numbers(class_names, config.class_names, config.source)[labels], config.class_names
    _check_classes(config.classes, class_names)
    return labels, class_names, pixels


def _check_classes(classes: list[int] | None, class_names: list[str]) -> None:
    if classes is not None and max(classes) >= len(class_names):
        raise FedsieveError(f"data.classes: there is no class {max(classes)}; classes are 0 to {len(class_names) - 1}")

"""Images as rows of tables: hub datasets, parquet files, and folders of images by class."""

import io
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image, ImageOps

from fedsieve import hub
from fedsieve.config import Data
from fedsieve.errors import FedsieveError, did_you_mean

if TYPE_CHECKING:
    import datasets

IMAGE_ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}
EMBEDDED = {"digits": "1,797 handwritten digits (scikit-learn), 8x8, coloured; 10 classes; nothing to download"}

SIMPLE = re.compile(r"u?int\d+|bool|(large_)?string")  # columns of whole numbers or words

Split = Literal["train", "test"]
Items = Iterator[list[tuple[int, int, Any]]]  # small lists of (place, row number in the source, value)


def cache_folder(config: Data) -> Path:
    """The folder for decoded images and other things made once."""
    default = os.environ.get("FEDSIEVE_CACHE") or Path.home() / ".cache" / "fedsieve"
    return Path(config.cache or default).expanduser()


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


def data_files(folder: Path) -> list[Path]:
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_ENDINGS | {".parquet"} and not path.name.startswith(".")
    )
    if not files:
        raise FedsieveError(f"data.source: {folder} holds no parquet file and no image")
    return files


def open_table(config: Data, split: Split) -> tuple["datasets.Dataset", "datasets.Dataset", bool]:
    """The rows of a split, the training rows (they define the classes), and whether a test split is to be held out."""
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # a local folder has no card
    source, root = config.source, Path(config.source).expanduser()
    tables: Mapping[str, datasets.Dataset]
    tables = _class_folders(root, config) if is_class_folders(config) else _load_dataset(config)
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
        _check_parquet(data_files(Path(path)))
    else:
        hub.is_reachable()  # without it, at once from what was fetched before
    try:
        return datasets.load_dataset(
            path, config.subset, revision=config.revision, cache_dir=str(cache_folder(config) / "datasets")
        )
    except Exception as error:  # datasets wraps causes of every kind
        if local:
            _check_parquet(data_files(Path(path)), deep=True)
            raise FedsieveError(f"data.source: {source} could not be read: {_first_line(error)}", 1) from None
        raise FedsieveError(
            f"data.source: {source} could not be loaded from the hub and no folder has that name: {_first_line(error)}\n"
            "Offline, point data.source at a local folder, or use the embedded set: data.source=digits",
            1,
        ) from None


def is_class_folders(config: Data) -> bool:
    return kind_of(config.source) == "folder" and not has_parquet(data_files(Path(config.source).expanduser()))


def has_parquet(files: list[Path]) -> bool:
    return any(file.suffix.lower() == ".parquet" for file in files)


def _subfolders(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]


def _training_folder(root: Path, config: Data) -> Path:
    """What holds the folders of the training classes: ROOT/SPLIT where it has folders, or ROOT."""
    inner = root / config.train_split
    return inner if inner.is_dir() and any(path.is_dir() for path in inner.iterdir()) else root


def check_class_folders(root: Path, config: Data, files: list[Path]) -> None:
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


def find_columns(config: Data, table: "datasets.Dataset") -> tuple[str, str]:
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


def read_class_names(table: "datasets.Dataset", column: str) -> list[str]:
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


def read_labels(table: "datasets.Dataset", column: str, class_names: list[str], source: str) -> np.ndarray:
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


def read_items(table: "datasets.Dataset", column: str, rows: np.ndarray) -> Items:
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


def open_image(item: tuple[int, int, Any], source: str) -> Image.Image:
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


def read_pixels(item: tuple[int, int, Any], side: int | None, source: str) -> np.ndarray:
    """The RGB pixels (3, H, W) of one row; where `side` is given, its middle as a square of that side."""
    image = open_image(item, source)
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

"""A user's own examples as tensors on the device: inputs of any structure and labels, whatever they were given as."""

import sys
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from fedsieve.errors import FedsieveError, did_you_mean
from fedsieve.model.calling import Inputs

Form = Literal["tensor", "tuple"] | tuple[str, ...]  # a dict has the names of its entries
LABELS = ("labels", "label")  # entries of a dict that hold an example's label
ALLOWED = (
    "Give (inputs, labels), where inputs are a tensor, a tuple or a dict of tensors; or a torch Dataset with a length; "
    "or a datasets.Dataset"
)


@dataclass(frozen=True, eq=False)
class TensorStore:
    """Tensors whose first axis is examples, and the structure in which a model takes them."""

    tensors: tuple[Tensor, ...]
    form: Form = "tensor"

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def batch(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The given rows of every tensor."""
        return tuple(tensor[rows] for tensor in self.tensors)

    def shaped(self, tensors: tuple[Tensor, ...]) -> Inputs:
        """Tensors in the structure that the model takes."""
        match self.form:
            case "tensor":
                return tensors[0]
            case "tuple":
                return tensors
            case names:
                return dict(zip(names, tensors, strict=True))


def read_tensors(
    data: Any, device: torch.device, columns: tuple[Sequence[str] | str, str] | None = None
) -> tuple[TensorStore, Tensor]:
    """A user's data as a store and labels on `device`; `columns` names the inputs and the label of a `datasets.Dataset`."""
    datasets = sys.modules.get("datasets")  # whoever has a dataset of theirs has imported it
    if datasets is not None and isinstance(data, datasets.Dataset):
        inputs, labels = _columns(data, columns)
    elif columns is not None:
        raise FedsieveError(f"columns are of a datasets.Dataset, not of {_kind(data)}")
    elif isinstance(data, tuple) and len(data) == 2:
        inputs, labels = data
    elif (
        hasattr(data, "__getitem__") and isinstance(data, Sized) and not isinstance(data, (Tensor, np.ndarray, Mapping))
    ):
        inputs, labels = _stacked(data)
    else:
        raise FedsieveError(f"data cannot be {_kind(data)}. {ALLOWED}")
    form, parts = _parts(inputs)
    tensors = {name: _tensor(name, value, device) for name, value in parts.items()}
    made = _tensor("labels", labels, device)
    for name, tensor in tensors.items():
        if len(tensor) != len(made):
            raise FedsieveError(
                f"{name} hold {len(tensor):,} examples and labels {len(made):,}: give one label for each"
            )
    return TensorStore(tuple(tensors.values()), form), made


def fingerprint(store: TensorStore, rows: np.ndarray, labels: Tensor) -> str:
    """A digest of examples: of structure, types, shapes and bytes."""
    digest = xxhash.xxh3_128(repr(store.form).encode())
    index = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64)).to(store.device)
    for tensor in (*store.batch(index), labels):
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _parts(inputs: Any) -> tuple[Form, dict[str, Any]]:
    """The structure of inputs, and their tensors by the names that errors call them."""
    if isinstance(inputs, Mapping):
        if not inputs or not all(isinstance(name, str) for name in inputs):
            raise FedsieveError("inputs given as a dict need names: at least one, and all of them strings")
        return tuple(inputs), {f'inputs["{name}"]': value for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        if not inputs:
            raise FedsieveError("inputs are an empty tuple: give at least one tensor")
        return "tuple", {f"inputs[{place}]": value for place, value in enumerate(inputs)}
    return "tensor", {"inputs": inputs}


def _tensor(name: str, value: Any, device: torch.device) -> Tensor:
    """A user's tensor or array, on the device and detached."""
    if not isinstance(value, Tensor):
        array = value if isinstance(value, np.ndarray) else None
        if isinstance(value, (list, range)):
            try:
                array = np.asarray(value)
            except ValueError:  # rows of different lengths
                raise FedsieveError(f"{name}: examples differ in shape. Pad them to one length first") from None
        if array is None or array.dtype.kind not in "biufc":
            what = _kind(value) if array is None else f"an array of {array.dtype}"
            raise FedsieveError(f"{name} cannot be {what}. Give a tensor or an array of numbers")
        value = torch.from_numpy(np.ascontiguousarray(array))
    if value.dim() == 0:
        raise FedsieveError(f"{name} is a single number: the first axis must be examples")
    if not len(value):
        raise FedsieveError(f"{name} is empty: there is nothing to train on")
    return value.detach().to(device)


def _columns(data: Any, columns: tuple[Sequence[str] | str, str] | None) -> tuple[Any, Any]:
    """Inputs and labels of a `datasets.Dataset`."""
    if columns is None:
        names = [name for name in data.column_names if name not in LABELS]
        label = next((name for name in LABELS if name in data.column_names), None)
        if label is None or not names:
            raise FedsieveError(
                f"columns: say which of {', '.join(data.column_names)} are inputs and which is the label, as in "
                'columns=(["input_ids", "attention_mask"], "label")'
            )
        columns = names, label
    inputs, label = columns
    wanted = [inputs] if isinstance(inputs, str) else list(inputs)
    for name in (*wanted, label):
        if name not in data.column_names:
            raise FedsieveError(
                f"columns: the dataset has no column {name}. Allowed: {', '.join(data.column_names)}."
                f"{did_you_mean(name, data.column_names)}"
            )
    if not len(data):
        raise FedsieveError("the dataset is empty: there is nothing to train on")
    rows = data.with_format("numpy")[:]
    return (rows[inputs] if isinstance(inputs, str) else {name: rows[name] for name in wanted}), rows[label]


def _stacked(data: Any) -> tuple[Any, Any]:
    """The items of a map-style Dataset, stacked."""
    if not len(data):
        raise FedsieveError("the dataset is empty: there is nothing to train on")
    items = [data[number] for number in range(len(data))]
    first = items[0]
    if isinstance(first, Mapping):
        label = next((name for name in LABELS if name in first), None)
        if label is None:
            raise FedsieveError(
                f"an item of the dataset has no {' or '.join(LABELS)}, only {', '.join(map(str, first))}"
            )
        inputs: Any = {name: _stack(name, [item[name] for item in items]) for name in first if name != label}
        return inputs, _stack(label, [item[label] for item in items])
    if not isinstance(first, (tuple, list)) or len(first) < 2:
        raise FedsieveError(
            f"an item of the dataset is {_kind(first)}. It must be (inputs, label) or a dict with a label"
        )
    *columns, labels = (_column(place, [item[place] for item in items]) for place in range(len(first)))
    return (columns[0] if len(columns) == 1 else tuple(columns)), labels


def _column(place: int, values: list[Any]) -> Any:
    """One part of all items: a tensor, or a tuple or dict of tensors."""
    first = values[0]
    if isinstance(first, Mapping):
        return {name: _stack(name, [value[name] for value in values]) for name in first}
    if isinstance(first, tuple):
        return tuple(_stack(f"part {number}", [value[number] for value in values]) for number in range(len(first)))
    return _stack(f"part {place}", values)


def _stack(name: str, values: list[Any]) -> Tensor:
    """One entry of all items."""
    try:
        return torch.stack([torch.as_tensor(value) for value in values])
    except (RuntimeError, TypeError, ValueError) as error:
        raise FedsieveError(
            f"{name} of the dataset's items cannot be stacked: {str(error).splitlines()[0]}. Every item needs numbers of one shape"
        ) from None


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"

"""Any data set of Hugging Face's `datasets`: two of its columns become inputs and targets.

The library is imported when a name or a folder is given, not before; a `Dataset`, a `DatasetDict`, or any object with
`column_names`, `__len__`, `select(indices)` and `[column]` works as it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from dynamix.errors import ConfigError
from dynamix_lab.installed import how_to_install
from dynamix_lab.tasks.base import Arrays, Data, Workload, accuracy

Encode = Callable[[Sequence[Any]], Tensor]


@runtime_checkable
class DatasetTable(Protocol):
    """What is used of `datasets.Dataset`."""

    column_names: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, column: str) -> Iterable[Any]: ...

    def select(self, indices: Any) -> DatasetTable: ...


def workload(
    dataset: Any,
    *,
    make_model: Callable[[int], nn.Module],
    inputs: str = "image",
    targets: str = "label",
    train_split: str = "train",
    test_split: str | None = "test",
    encode_inputs: Encode | None = None,
    encode_targets: Encode | None = None,
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    metric: Callable[[Tensor, Tensor], float] = accuracy,
    count: Callable[[Tensor], int] | None = None,
    min_batch: int = 8,
    max_batch: int = 512,
    base_batch: int = 512,
    name: str = "huggingface",
) -> Workload:
    """A workload on `dataset`: an object of the library, a folder of `save_to_disk`, or a name on its hub.

    make_model        seed -> model of the encoded inputs
    inputs, targets   the columns to use
    train_split, test_split   of a dict of splits; where the test split is None or not there, test samples come from
                              train
    encode_inputs, encode_targets   list of a column's values -> tensor (n, ...): a tokenizer, an image transform; None:
                      `stack`, numbers and arrays and images of one size as they are
    make_optimizer    None: SGD, lr 0.05, momentum 0.9
    others            as `Workload`'s
    """
    opened = _open(dataset)

    def make_data(seed: int, *, train: int | None = None, test: int | None = None) -> Data:
        """Samples chosen by `seed`; None: all (of one split, four in five to train on). They are held in memory."""
        parts = _split(opened, train_split, test_split, seed, train, test)
        for part in parts:
            _check_columns(part, (inputs, targets))
        made = [
            Arrays(_encoded(part, inputs, encode_inputs), _encoded(part, targets, encode_targets)) for part in parts
        ]
        for arrays in made:
            if len(arrays.inputs) != len(arrays.targets):
                found = f"{len(arrays.inputs)} inputs and {len(arrays.targets)} targets"
                raise ConfigError("encode_inputs", found, "as many rows as samples", "return one row per sample")
        return Data(*made)

    return Workload(
        name=name,
        make_data=make_data,
        make_model=make_model,
        make_optimizer=make_optimizer or _sgd,
        loss=loss,
        metric=metric,
        min_batch=min_batch,
        max_batch=max_batch,
        count=count,
        base_batch=base_batch,
        description=f"columns {inputs} and {targets} of {dataset if isinstance(dataset, str) else 'a data set'}",
    )


def stack(values: Sequence[Any]) -> Tensor:
    """One tensor of numbers, lists, arrays or images of one shape; floats become float32, pixels stay uint8.

    >>> stack([[1, 2], [3, 4]])
    tensor([[1, 2],
            [3, 4]])

    Raises `ConfigError` for text and for values of unlike shapes, which need an encoder.
    """
    try:
        array = np.stack([np.asarray(value) for value in values])
    except ValueError as error:
        fix = "pass encode_inputs= or encode_targets=, which makes one tensor of a list of values"
        raise ConfigError("column", "values of unlike shapes", "numbers or arrays of one shape", fix) from error
    if array.dtype.kind not in "biuf":
        fix = "pass encode_inputs= or encode_targets=, for example a tokenizer"
        raise ConfigError("column", f"values of {type(values[0]).__name__}", "numbers or arrays of one shape", fix)
    if array.dtype.kind == "f":
        return torch.from_numpy(array.astype(np.float32))
    return torch.from_numpy(array if array.dtype == np.uint8 else array.astype(np.int64))


def _sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


def _open(dataset: Any) -> Any:
    if not isinstance(dataset, (str, Path)):
        return dataset
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        fix = how_to_install("huggingface")
        raise ConfigError("dataset", str(dataset), "a data set whose library is installed", fix) from error
    try:
        return datasets.load_from_disk(str(dataset)) if Path(dataset).is_dir() else datasets.load_dataset(str(dataset))
    except Exception as error:  # the library raises a dozen kinds, and whatever the network does
        allowed = "a folder written by save_to_disk, or a name on the hub"
        fix = f"check the name, or load it yourself and pass the object ({type(error).__name__}: {error})"
        raise ConfigError("dataset", str(dataset), allowed, fix) from error


def _split(
    opened: Any, train_split: str, test_split: str | None, seed: int, train: int | None, test: int | None
) -> tuple[DatasetTable, DatasetTable]:
    if isinstance(opened, dict):
        if train_split not in opened:
            raise ConfigError("train_split", train_split, ", ".join(map(str, opened)), "name a split that is there")
        whole, held_out = opened[train_split], opened.get(test_split)
    else:
        whole, held_out = opened, None
    for table in (whole, held_out):
        if table is not None and not isinstance(table, DatasetTable):
            allowed = "a data set with column_names, len(), select(indices) and [column]"
            raise ConfigError(
                "dataset", type(table).__name__, allowed, "iterable data sets: take(n) into a Dataset first"
            )
    order = np.random.default_rng(seed).permutation(len(whole))
    if held_out is not None:
        chosen = np.random.default_rng(seed + 1).permutation(len(held_out))
        return _take(whole, order, train, "train"), _take(held_out, chosen, test, "test")
    tested = max(1, len(whole) // 5) if test is None else test
    if not 0 < tested < len(whole):
        raise ConfigError("test", tested, f"1 to {len(whole) - 1:,}: there is one split", "ask for fewer")
    return _take(whole, order[tested:], train, "train"), _take(whole, order[:tested], tested, "test")


def _take(table: DatasetTable, order: Any, wanted: int | None, name: str) -> DatasetTable:
    if wanted is not None and not 0 < wanted <= len(order):
        raise ConfigError(name, wanted, f"1 to {len(order):,}", "ask for fewer samples")
    return table.select(order[:wanted].tolist())


def _check_columns(table: DatasetTable, wanted: Iterable[str]) -> None:
    for column in wanted:
        if column not in table.column_names:
            fix = "name them: workload(dataset, inputs=..., targets=...)"
            raise ConfigError("column", column, ", ".join(table.column_names), fix)


def _encoded(table: DatasetTable, column: str, encode: Encode | None) -> Tensor:
    return (encode or stack)(list(table[column]))

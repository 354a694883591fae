"""Sizes of batches of any structure: tensors with samples first, inside the usual containers."""

import copy
import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dynamix.errors import UsageError


def length(batch: Any) -> int:
    """Samples of a batch: the first dimension of its first tensor. Raises `UsageError` if it has none.

    Tensors are found in tuples, lists, mappings, data classes, classes of attrs, and attributes of other objects.

    >>> length({"x": torch.zeros(3, 2), "name": "y"})
    3
    """
    if not (found := _first(batch)):
        why = f"the batch, of type {type(batch).__name__}, has no tensor with samples as its first dimension"
        where = "a tuple, a list, a mapping, a data class or attributes of an object"
        raise UsageError(f"{why}, so it cannot be sized: pass an example with its tensors in {where}")
    return found


def resized(batch: Any, size: int) -> Any:
    """A batch of `size` samples: those of `batch`, repeated as needed.

    >>> resized(torch.tensor([[1], [2]]), 5).flatten().tolist()
    [1, 2, 1, 2, 1]
    """
    return _repeated(batch, length(batch), size)


def _first(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 0
    if isinstance(batch, (list, tuple)):
        parts: Any = batch
    else:
        parts = (batch if isinstance(batch, Mapping) else _attributes(batch)).values()
    return next((found for part in parts if (found := _first(part))), 0)


def _repeated(batch: Any, samples: int, size: int) -> Any:
    if isinstance(batch, Tensor):
        whole = batch.dim() and batch.shape[0] == samples
        return batch.index_select(0, torch.arange(size, device=batch.device) % samples) if whole else batch
    if isinstance(batch, Mapping):
        parts = {key: _repeated(value, samples, size) for key, value in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)):
        if len(batch) == samples and not any(isinstance(part, (Tensor, Mapping, list, tuple)) for part in batch):
            return type(batch)(batch[i % samples] for i in range(size))
        mapped = [_repeated(part, samples, size) for part in batch]
        return type(batch)(*mapped) if hasattr(batch, "_fields") else type(batch)(mapped)
    if attributes := _attributes(batch):
        made = copy.copy(batch)
        for name, value in attributes.items():
            object.__setattr__(made, name, _repeated(value, samples, size))  # it may be frozen
        return made
    return batch


def _attributes(batch: Any) -> dict[str, Any]:
    """The values in an object, by name: all fields of a class with declared fields, else only tensors."""
    if isinstance(batch, type):
        return {}
    if dataclasses.is_dataclass(batch):
        names = [field.name for field in dataclasses.fields(batch)]
    else:
        names = [field.name for field in getattr(batch, "__attrs_attrs__", ())]
    held = {name: getattr(batch, name) for name in names if hasattr(batch, name)} or getattr(batch, "__dict__", {})
    whole = names or isinstance(batch, SimpleNamespace)
    return {name: value for name, value in held.items() if whole or isinstance(value, Tensor)}

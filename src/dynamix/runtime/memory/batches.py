"""Batches of any make as far as they are sized: tensors with samples first, in tuples, lists and mappings."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dynamix.errors import UsageError


def length(batch: Any) -> int:
    """Samples of a batch: the first dimension of its first tensor. Raises `UsageError` when it has none.

    >>> length({"x": torch.zeros(3, 2), "name": "y"})
    3
    """
    if not (found := _first(batch)):
        raise UsageError("the batch has no tensor with samples as its first dimension, so it cannot be sized")
    return found


def resized(batch: Any, size: int) -> Any:
    """A batch of `size` samples made of this one's, over and over.

    >>> resized(torch.tensor([[1], [2]]), 5).flatten().tolist()
    [1, 2, 1, 2, 1]
    """
    samples = length(batch)

    def repeat(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.index_select(0, torch.arange(size, device=x.device) % samples)
        return type(x)(x[i % samples] for i in range(size))

    return _map(batch, samples, repeat)


def _first(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((found for part in parts if (found := _first(part))), 0)


def _map(batch: Any, samples: int, change: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch) if batch.dim() and batch.shape[0] == samples else batch
    if isinstance(batch, Mapping):
        parts = {key: _map(value, samples, change) for key, value in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)):
        if len(batch) == samples and not any(isinstance(part, (Tensor, Mapping, list, tuple)) for part in batch):
            return change(batch)
        mapped = [_map(part, samples, change) for part in batch]
        return type(batch)(*mapped) if hasattr(batch, "_fields") else type(batch)(mapped)
    return batch

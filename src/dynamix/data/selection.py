"""Selects an epoch's samples, if not each sample of the data set once: a subset, or draws by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamix.errors import ConfigError
from dynamix.window import Floats, Ints

Indices = Sequence[int] | Ints | Tensor
Weights = Sequence[float] | Floats | Tensor
SELECTED = ("indices", "weights")  # parts of a selection whose checksums a state holds


class Selection:
    """The samples at an epoch's positions. Without `weights`, positions are a permutation of the subset.

    samples       number of samples in the data set
    indices       of the subset, each once; None: all of the data set
    weights       of the subset's samples, 0 or more: each draw of an epoch takes a sample with a probability in
                  proportion to its weight, with replacement
    num_samples   draws of an epoch; None: the number of weights

    Raises `ConfigError` naming the first number that is not possible.

    >>> chosen = Selection(9, indices=[2, 4, 8], weights=[0.0, 1.0, 3.0], num_samples=4)
    >>> chosen.size, sorted(set(chosen.order(torch.Generator(), shuffle=True).tolist()))
    (4, [4, 8])
    """

    def __init__(
        self,
        samples: int,
        *,
        indices: Indices | None = None,
        weights: Weights | None = None,
        num_samples: int | None = None,
    ) -> None:
        self._indices = None if indices is None else _indices(indices, samples)
        within = samples if self._indices is None else self._indices.size
        # A fixed order of summation gives the same sums on all machines.
        self._upto = None if weights is None else np.cumsum(_weights(weights, within))
        self.size = within if num_samples is None else _draws(num_samples, weighted=weights is not None)
        self.digests = {"indices": _digest(self._indices), "weights": _digest(self._upto)}

    def order(self, generator: torch.Generator, *, shuffle: bool) -> Ints:
        """The indices (size,) of an epoch, in its order."""
        if self._upto is not None:
            drawn = torch.rand(self.size, dtype=torch.float64, generator=generator).numpy()
            at: Ints = np.searchsorted(self._upto, drawn * self._upto[-1], side="right")
        else:
            at = torch.randperm(self.size, generator=generator).numpy() if shuffle else np.arange(self.size)
        return at if self._indices is None else self._indices[at]


def _indices(given: Any, samples: int) -> Ints:
    fix = "give the index of each sample to train on, once"
    indices = _array("indices", given, "a list of whole numbers", fix)
    if indices.size == 0:
        raise ConfigError("indices", [], "one index or more", fix)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise ConfigError("indices", f"{indices.dtype} {indices.shape}", "a list of whole numbers", fix)
    indices = indices.astype(np.int64)
    beyond = (indices < 0) | (indices >= samples)
    if beyond.any():
        at = int(np.argmax(beyond))
        allowed = f"0 to {samples - 1}, the last sample of the data set"
        raise ConfigError(f"indices[{at}]", int(indices[at]), allowed, fix)
    found, counts = np.unique(indices, return_counts=True)
    if found.size < indices.size:
        twice = int(found[np.argmax(counts > 1)])
        fix = "to train on a sample more often, give weights="
        raise ConfigError("indices", f"[..., {twice}, {twice}, ...]", "each index once", fix)
    return indices


def _weights(given: Any, samples: int) -> Floats:
    fix = "give one weight for each sample"
    weights = _array("weights", given, f"{samples} numbers, 0 or more", fix)
    if weights.dtype.kind not in "iuf":
        raise ConfigError("weights", str(weights.dtype), f"{samples} numbers, 0 or more", fix)
    weights = weights.astype(np.float64)
    if weights.shape != (samples,):
        raise ConfigError("shape of weights", weights.shape, f"({samples},)", fix)
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ConfigError(f"weights[{at}]", float(weights[at]), "a finite number, 0 or more", fix)
    total = float(weights.sum())
    if not 0 < total < np.inf:
        raise ConfigError("sum of weights", total, "a finite number above 0", "give some sample a weight")
    return weights


def _draws(given: Any, *, weighted: bool) -> int:
    if not weighted:
        raise ConfigError("num_samples", given, "None without weights", "leave it out: an epoch has each sample once")
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)) or given < 1:
        raise ConfigError("num_samples", given, "a whole number, 1 or more", "give the number of draws of an epoch")
    return int(given)


def _array(name: str, given: Any, allowed: str, fix: str) -> np.ndarray[Any, Any]:
    try:
        return given.detach().cpu().numpy() if isinstance(given, Tensor) else np.array(given)
    except (TypeError, ValueError) as error:
        raise ConfigError(name, type(given).__name__, allowed, fix) from error


def _digest(values: np.ndarray[Any, Any] | None) -> str:
    return "" if values is None else hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()

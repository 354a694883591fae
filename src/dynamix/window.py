"""The window that policies observe, and the bounds that their decisions must satisfy.

A `Window` is a struct of arrays over workers. A live job fills shape `(W,)`; a simulator fills `(C, W)` for C
clusters at once. Policies, `features` and `project` are the same code for both, so a policy behaves the same in
training and in service. Of dynamix this module imports only the errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamix.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PER_WORKER = (
    "compute", "compute_std", "wait", "communication", "data",
    "loss", "loss_std", "loss_change", "accuracy", "accuracy_std", "accuracy_change", "gradient_norm_sq",
    "bytes_per_s", "retransmits_per_s", "rtt_s", "cpu", "memory", "device", "work",
)  # fmt: skip
PER_CLUSTER = ("steps", "age", "step", "micro_batches", "base_batch", "global_norm_sq", "noise", "signal")
_WINDOW_ARRAYS = ("batch_size", *PER_WORKER, *PER_CLUSTER)
_UNKNOWN = np.asarray(np.nan)
_BOUNDS_ARRAYS = ("low", "high", "total_low", "total_high")


def _protect(holder: object, names: tuple[str, ...]) -> None:
    """Replace writable arrays by read-only views, so that a policy cannot change its input by accident.

    Nothing is copied, and the maker of the arrays can still write to them.
    """
    for name in names:
        array = getattr(holder, name)
        if isinstance(array, np.ndarray) and array.flags.writeable:
            view = array.view()
            view.flags.writeable = False
            object.__setattr__(holder, name, view)


@dataclass(frozen=True, slots=True)
class Window:
    """Means over k optimizer steps under one allocation. NaN means "not measured", never zero. Arrays are read-only.

    Per worker, shape (..., W):
      batch_size          samples per round in force (int64); a round ends with an optimizer step of all workers
      compute             s per optimizer step from the start of forward to the last local gradient, plus the
                          optimizer's own update; free of waiting
      compute_std         s, standard deviation of `compute` over the window's steps
      wait                s per step spent waiting for slower workers (comm_i - min_j comm_j, step by step)
      communication       s per step of pure transfer (min_j comm_j; the same for all workers of a cluster)
      data                s per step waiting for the loader
      loss, loss_std      of this worker's batches over the window
      loss_change         (loss - previous window's loss) / pooled standard deviation
      accuracy, accuracy_std, accuracy_change   the same for accuracy, in [0, 1]
      gradient_norm_sq    mean |g_i|^2 of this worker's mean gradient, without the loss scale
      bytes_per_s, retransmits_per_s, rtt_s     of the process group's own sockets
      cpu, memory, device fractions in [0, 1] of what this worker may use
      work                cost of this worker's samples of a round, in samples of mean cost, if the job knows costs
                          (`batch_sampler(dataset, lengths=...)`): `compute` is for that much

    Per cluster, shape (...):
      steps               optimizer steps measured
      age                 optimizer steps since this allocation took effect
      step                index of the optimizer step that closed the window
      micro_batches       pieces of equal size that a worker's round is cut into: accumulated micro-batches
      base_batch          global samples per round that the user set at the start (B0)
      global_norm_sq      mean |g|^2 of the reduced gradient
      noise, signal       smoothed tr(Sigma) and |G|^2 (arXiv 1812.06162); noise / signal is the noise scale, in samples
    """

    batch_size: Ints
    compute: Floats
    compute_std: Floats
    wait: Floats
    communication: Floats
    data: Floats
    loss: Floats
    loss_std: Floats
    loss_change: Floats
    accuracy: Floats
    accuracy_std: Floats
    accuracy_change: Floats
    gradient_norm_sq: Floats
    bytes_per_s: Floats
    retransmits_per_s: Floats
    rtt_s: Floats
    cpu: Floats
    memory: Floats
    device: Floats
    work: Floats
    steps: Floats
    age: Floats
    step: Floats
    micro_batches: Floats
    base_batch: Floats
    global_norm_sq: Floats
    noise: Floats
    signal: Floats

    def __post_init__(self) -> None:
        _protect(self, _WINDOW_ARRAYS)

    @classmethod
    def of(cls, batch_size: ArrayLike, **known: ArrayLike) -> Window:
        """A window from the given fields; all others are NaN, `micro_batches` 1, `base_batch` the current sum.

        >>> Window.of([32, 96], compute=[0.1, 0.2]).workers
        2
        """
        sizes = np.asarray(batch_size, dtype=np.int64)
        unknown = set(known) - set(PER_WORKER) - set(PER_CLUSTER)
        if unknown:
            raise ConfigError("field", sorted(unknown)[0], ", ".join(PER_WORKER + PER_CLUSTER), "name a Window field")
        filled: dict[str, Any] = {"batch_size": sizes}
        nothing = np.broadcast_to(_UNKNOWN, sizes.shape)
        for name in PER_WORKER:
            filled[name] = _in_shape(known[name], sizes.shape) if name in known else nothing
        defaults: dict[str, Any] = {"micro_batches": 1.0, "base_batch": sizes.sum(-1)}
        for name in PER_CLUSTER:
            filled[name] = _in_shape(known.get(name, defaults.get(name, np.nan)), sizes.shape[:-1])
        return cls(**filled)

    @property
    def workers(self) -> int:
        """W, the size of the last axis."""
        return int(self.batch_size.shape[-1])

    @property
    def worked(self) -> Floats:
        """The work in `compute`, (..., W): `work` in samples of mean cost, or `batch_size` if that is unknown."""
        known = np.isfinite(self.work) & (self.work > 0)
        return np.where(known, self.work, self.batch_size) if known.any() else self.batch_size.astype(np.float64)

    @property
    def global_batch(self) -> Floats:
        """Samples per round over all workers, shape (...)."""
        return np.asarray(self.batch_size.sum(-1), dtype=np.float64)

    @property
    def noise_scale(self) -> Floats:
        """tr(Sigma) / |G|^2 in samples, shape (...); NaN if unknown, infinite if noise hides the signal."""
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.where(self.signal > 0, self.noise / self.signal, np.inf)
        return np.where(np.isnan(self.noise) | np.isnan(self.signal), np.nan, np.maximum(scale, 0.0))

    @property
    def step_time(self) -> Floats:
        """Seconds per optimizer step as each worker measured them, shape (..., W); unmeasured parts count as zero."""
        parts = np.stack([self.compute, self.wait, self.communication, self.data])
        total = np.where(np.isnan(parts), 0.0, parts).sum(0)
        return np.where(np.isnan(self.compute), np.nan, total)

    @property
    def seconds_per_sample(self) -> Floats:
        """Busy seconds (compute and data) per sample, shape (..., W); NaN for idle or unmeasured workers.

        If the job knows costs, a sample of mean cost.
        """
        samples = self.worked
        busy = self.compute + np.where(np.isnan(self.data), 0.0, self.data)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.batch_size > 0, busy / samples, np.nan)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists for JSON; values that are not finite become None."""
        plain: dict[str, Any] = {"batch_size": self.batch_size.tolist()}
        for names in (PER_WORKER, PER_CLUSTER):
            plain |= zip(names, plain_floats(np.stack([getattr(self, name) for name in names])), strict=True)
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Window:
        """The inverse of `to_dict`."""
        known = {k: np.asarray(v, dtype=np.float64) for k, v in plain.items() if k != "batch_size"}
        return cls.of(plain["batch_size"], **known)


def _in_shape(given: ArrayLike, shape: tuple[int, ...]) -> Floats:
    """`given` broadcast to `shape`; NumPy's function is avoided if possible, because it is slow for a few workers."""
    values = np.asarray(given, dtype=np.float64)
    return values if values.shape == shape else np.broadcast_to(values, shape)


def plain_floats(values: Floats) -> Any:
    """`values.tolist()` with None for values that are not finite, because JSON has neither NaN nor infinity.

    >>> plain_floats(np.array([[0.5, np.nan], [np.inf, 2.0]]))
    [[0.5, None], [None, 2.0]]
    """
    known = np.isfinite(values)
    if known.all():
        return values.tolist()
    plain = values.astype(object)
    plain[~known] = None
    return plain.tolist()


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds that an allocation must satisfy. Sizes are samples per worker and round. Arrays are read-only.

    low, high     (..., W) int64, inclusive; `low` 0 lets a policy idle a worker
    total_low, total_high   (...) int64, of the sum over workers
    quantum       every size is a multiple of this
    max_change    a size may change by at most this factor per decision (infinite: no limit)
    """

    low: Ints
    high: Ints
    total_low: Ints
    total_high: Ints
    quantum: int = 1
    max_change: float = np.inf

    def __post_init__(self) -> None:
        _protect(self, _BOUNDS_ARRAYS)

    @classmethod
    def of(
        cls,
        workers: int,
        low: ArrayLike = 1,
        high: ArrayLike = 1024,
        *,
        total_low: ArrayLike | None = None,
        total_high: ArrayLike | None = None,
        quantum: int = 1,
        max_change: float = np.inf,
    ) -> Bounds:
        """Bounds for W workers; numbers are broadcast. Raises `ConfigError` if nothing can satisfy them.

        >>> Bounds.of(2, 8, 64).high.tolist()
        [64, 64]
        """
        if quantum < 1:
            raise ConfigError("quantum", quantum, "1 or more", "use 1 for no grid, or 8 or 32 under torch.compile")
        if not max_change > 1:
            raise ConfigError("max_change", max_change, "more than 1", "use 2.0 to at most double or halve")
        lows = np.broadcast_to(np.asarray(low, dtype=np.int64), np.broadcast_shapes(np.shape(low), (workers,)))
        highs = np.broadcast_to(np.asarray(high, dtype=np.int64), np.broadcast_shapes(np.shape(high), (workers,)))
        if (lows < 0).any():
            raise ConfigError("min_batch_size", int(lows.min()), "0 or more", "use 1, or 0 to let a worker idle")
        lows = -(-lows // quantum) * quantum
        highs = highs // quantum * quantum
        shape = np.broadcast_shapes(lows.shape, highs.shape)
        lows, highs = np.broadcast_to(lows, shape), np.broadcast_to(highs, shape)
        if (lows > highs).any() or (highs < 1).any():
            at = tuple(np.argwhere((lows > highs) | (highs < 1))[0])
            allowed = f"at least min_batch_size={max(1, int(lows[at]))} on the grid of {quantum}"
            fix = "lower min_batch_size or quantum, or raise max_batch_size"
            raise ConfigError("max_batch_size", int(highs[at]), allowed, fix)
        smallest, largest = lows.sum(-1), highs.sum(-1)
        floor = smallest if total_low is None else np.maximum(np.asarray(total_low, dtype=np.int64), smallest)
        ceiling = largest if total_high is None else np.minimum(np.asarray(total_high, dtype=np.int64), largest)
        floor = np.maximum(-(-floor // quantum) * quantum, quantum)
        ceiling = ceiling // quantum * quantum
        if (floor > ceiling).any():
            raise ConfigError(
                "total_high",
                int(np.min(ceiling)),
                f"at least {int(np.max(floor))}",
                "widen the range of the global batch",
            )
        return cls(lows, highs, np.asarray(floor), np.asarray(ceiling), quantum, max_change)

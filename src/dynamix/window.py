"""What is observed, how a policy sees it, and what its answer must satisfy.

A `Window` is a struct of arrays over workers. A live job fills shape `(W,)`; a simulator fills `(C, W)` for C
clusters at once. `features` and `project` are the same code for both, so that a policy cannot behave
differently in training and in service. This module imports nothing of dynamix but its errors.
"""

from __future__ import annotations

import dataclasses
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
    "bytes_per_s", "retransmits_per_s", "rtt_s", "cpu", "memory", "device",
)  # fmt: skip
PER_CLUSTER = ("steps", "age", "step", "micro_batches", "base_batch", "global_norm_sq", "noise", "signal")


@dataclass(frozen=True, slots=True)
class Window:
    """Means over k optimizer steps under one allocation. NaN means "not measured", never zero.

    Per worker, shape (..., W):
      batch_size          samples per micro-batch in force (int64)
      compute             s per optimizer step from the start of forward to the last local gradient, plus the
                          optimizer's own update; free of waiting
      compute_std         s, standard deviation of `compute` over the window's steps
      wait                s per step spent waiting for slower workers (comm_i - min_j comm_j, step by step)
      communication       s per step of pure transfer (min_j comm_j; the same for all workers of a cluster)
      data                s per step waiting for the loader
      loss, loss_std      of this worker's batches over the window
      loss_change         (loss - previous window's loss) / pooled standard deviation
      accuracy, accuracy_std, accuracy_change   the same for accuracy, in [0, 1]
      gradient_norm_sq    mean |g_i|^2 of this worker's mean gradient, loss scale removed
      bytes_per_s, retransmits_per_s, rtt_s     of the process group's own sockets
      cpu, memory, device fractions in [0, 1] of what this worker may use

    Per cluster, shape (...):
      steps               optimizer steps measured
      age                 optimizer steps since this allocation came into force
      step                index of the optimizer step that closed the window
      micro_batches       accumulated micro-batches per optimizer step
      base_batch          global samples per optimizer step that the user chose at the start (B0)
      global_norm_sq      mean |g|^2 of the reduced gradient
      noise, signal       smoothed tr(Sigma) and |G|^2 (PAPERS section 5); noise / signal is the noise scale, in samples
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
    steps: Floats
    age: Floats
    step: Floats
    micro_batches: Floats
    base_batch: Floats
    global_norm_sq: Floats
    noise: Floats
    signal: Floats

    @classmethod
    def of(cls, batch_size: ArrayLike, **known: ArrayLike) -> Window:
        """A window from what is known; everything else is NaN, `micro_batches` 1, `base_batch` the current sum.

        >>> Window.of([32, 96], compute=[0.1, 0.2]).workers
        2
        """
        sizes = np.asarray(batch_size, dtype=np.int64)
        unknown = set(known) - set(PER_WORKER) - set(PER_CLUSTER)
        if unknown:
            raise ConfigError("field", sorted(unknown)[0], ", ".join(PER_WORKER + PER_CLUSTER), "name a Window field")
        filled: dict[str, Any] = {"batch_size": sizes}
        for name in PER_WORKER:
            value = np.asarray(known.get(name, np.nan), dtype=np.float64)
            filled[name] = np.broadcast_to(value, sizes.shape)
        defaults: dict[str, Any] = {"micro_batches": 1.0, "base_batch": sizes.sum(-1)}
        for name in PER_CLUSTER:
            value = np.asarray(known.get(name, defaults.get(name, np.nan)), dtype=np.float64)
            filled[name] = np.broadcast_to(value, sizes.shape[:-1])
        return cls(**filled)

    @property
    def workers(self) -> int:
        """W, the size of the last axis."""
        return int(self.batch_size.shape[-1])

    @property
    def global_batch(self) -> Floats:
        """Samples per optimizer step over all workers, shape (...)."""
        return np.asarray(self.batch_size.sum(-1) * self.micro_batches, dtype=np.float64)

    @property
    def noise_scale(self) -> Floats:
        """tr(Sigma) / |G|^2 in samples, shape (...); NaN where unknown, infinite where the signal is lost in noise."""
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.where(self.signal > 0, self.noise / self.signal, np.inf)
        return np.where(np.isnan(self.noise) | np.isnan(self.signal), np.nan, np.maximum(scale, 0.0))

    @property
    def step_time(self) -> Floats:
        """Seconds per optimizer step as each worker saw it, shape (..., W); parts not measured count as zero."""
        parts = np.stack([self.compute, self.wait, self.communication, self.data])
        total = np.where(np.isnan(parts), 0.0, parts).sum(0)
        return np.where(np.isnan(self.compute), np.nan, total)

    @property
    def seconds_per_sample(self) -> Floats:
        """Busy seconds (compute and data) per sample, shape (..., W); NaN for idle or unmeasured workers."""
        samples = self.batch_size * self.micro_batches[..., None]
        busy = self.compute + np.where(np.isnan(self.data), 0.0, self.data)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(samples > 0, busy / samples, np.nan)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists for JSON; NaN becomes None."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Window:
        """The inverse of `to_dict`."""
        known = {k: np.asarray(v, dtype=np.float64) for k, v in plain.items() if k != "batch_size"}
        return cls.of(plain["batch_size"], **known)


def _plain(values: NDArray[Any]) -> Any:
    if values.dtype.kind == "i":
        return values.tolist()
    return [_plain(v) for v in values] if values.ndim else (float(values) if np.isfinite(values) else None)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an allocation must satisfy. Sizes are samples per worker and micro-batch.

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
        """Bounds for W workers; numbers are broadcast. Raises `ConfigError` when nothing could satisfy them.

        >>> Bounds.of(2, 8, 64).high.tolist()
        [64, 64]
        """
        if quantum < 1:
            raise ConfigError("quantum", quantum, "1 or more", "use 1 for no grid, or 8 or 32 under torch.compile")
        if not max_change > 1:
            raise ConfigError(
                "max_change", max_change, "more than 1", "use 2.0 to at most double or halve per decision"
            )
        lows = np.broadcast_to(np.asarray(low, dtype=np.int64), np.broadcast_shapes(np.shape(low), (workers,)))
        highs = np.broadcast_to(np.asarray(high, dtype=np.int64), np.broadcast_shapes(np.shape(high), (workers,)))
        if (lows < 0).any():
            raise ConfigError("min_batch_size", int(lows.min()), "0 or more", "use 1, or 0 to let a worker idle")
        lows = -(-lows // quantum) * quantum
        highs = highs // quantum * quantum
        lows, highs = np.broadcast_arrays(lows, highs)
        if (lows > highs).any() or (highs < 1).any():
            at = tuple(np.argwhere((lows > highs) | (highs < 1))[0])
            raise ConfigError(
                "max_batch_size", int(highs[at]), f"at least min_batch_size={max(1, int(lows[at]))} on the grid of {quantum}",
                "lower min_batch_size or quantum, or raise max_batch_size",
            )  # fmt: skip
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


def project(
    target: ArrayLike,
    bounds: Bounds,
    *,
    total: ArrayLike | None = None,
    current: ArrayLike | None = None,
) -> Ints:
    """The allocation nearest in proportion to `target` that satisfies `bounds`: the one projection all policies use.

    target   (..., W) desired sizes, finite and not negative; only their proportions matter when `total` is given
    total    (...) desired global size (default: the sum of `target`), clamped to what the bounds allow
    current  (..., W) sizes in force, needed for `bounds.max_change`

    Water-filling at the caps keeps the proportions of all workers that are inside their bounds; largest remainder
    (ties to the lower rank) makes integers whose sum is exactly `total` on the grid. Returns int64 (..., W).

    >>> project([13.7, 16.5, 19.6, 14.2], Bounds.of(4), total=64).tolist()   # DBS, appendix A
    [14, 16, 20, 14]
    >>> project([1.0, 9.0], Bounds.of(2, 1, 60), total=100).tolist()         # what a cap refuses goes to the rest
    [40, 60]
    """
    wish = np.asarray(target, dtype=np.float64)
    if not ((wish >= 0) & (wish < np.inf)).all():
        bad = wish[~np.isfinite(wish) | (wish < 0)].flat[0]
        raise ConfigError(
            "batch size from the policy", float(bad), "finite and not negative", "check the policy's outputs"
        )
    q = bounds.quantum
    low, high = (bounds.low, bounds.high) if q == 1 else (bounds.low // q, bounds.high // q)
    if current is not None and np.isfinite(bounds.max_change):
        now = np.asarray(current, dtype=np.float64) / q
        # At least one grid step either way, or a small size could never move again.
        low = np.maximum(low, np.minimum(np.ceil(now / bounds.max_change), now - 1).astype(np.int64))
        high = np.minimum(high, np.maximum(np.floor(now * bounds.max_change), now + 1).astype(np.int64))
        low, high = np.minimum(low, bounds.high // q), np.maximum(high, bounds.low // q)
    shape = np.broadcast_shapes(wish.shape, low.shape, high.shape)
    wish, low, high = (_spread(x, shape).reshape(-1, shape[-1]) for x in (wish / q, low, high))
    lead, lowest, highest = shape[:-1], low.sum(-1), high.sum(-1)
    asked = wish.sum(-1) if total is None else _spread(np.asarray(total, np.float64) / q, lead).reshape(-1)
    least = np.maximum(lowest, _spread(bounds.total_low // q, lead).reshape(-1))
    most = np.minimum(highest, _spread(bounds.total_high // q, lead).reshape(-1))
    # A rate limit can leave the global range out of reach this time; then come as near to it as it allows.
    units = np.minimum(np.maximum(np.rint(asked), np.minimum(least, highest)), np.maximum(most, lowest))
    units = units.astype(np.int64)
    sizes: Ints = _largest_remainder(_water_fill(wish, low, high, units), low, high, units).reshape(shape) * q
    return sizes


def _spread(x: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """`np.broadcast_to`, which costs more than all arithmetic on a few workers, where it is needed."""
    return x if x.shape == shape else np.broadcast_to(x, shape)


def _water_fill(wish: Floats, low: Ints, high: Ints, units: Ints) -> Floats:
    """Real sizes (n, W) proportional to `wish`, inside [low, high], with sum `units`."""
    peak = wish.max(-1, keepdims=True)
    # A worker wished nothing still takes what everybody else's caps refuse, hence never exactly zero.
    weight: Floats = np.maximum(np.divide(wish, peak, out=np.ones_like(wish), where=peak > 0), 1e-9)
    sizes: Floats = weight * (units / weight.sum(-1))[:, None]
    if ((sizes <= high) & (sizes >= low)).all():
        return sizes
    fixed = np.zeros(wish.shape, dtype=bool)
    for _ in range(wish.shape[-1] + 1):
        left = units - np.where(fixed, sizes, 0.0).sum(-1)
        share = np.where(fixed, 0.0, weight)
        total = share.sum(-1)
        scale = np.divide(left, total, out=np.zeros_like(total), where=total > 0)
        sizes = np.where(fixed, sizes, share * scale[:, None])
        over, under = np.maximum(sizes - high, 0.0), np.maximum(low - sizes, 0.0)
        excess, deficit = over.sum(-1, keepdims=True), under.sum(-1, keepdims=True)
        if not ((excess > 1e-9) | (deficit > 1e-9)).any():
            break
        pin_high = (over > 0) & (excess >= deficit)
        pin_low = (under > 0) & (deficit >= excess)
        sizes = np.where(pin_high, high, np.where(pin_low, low, sizes))
        fixed |= pin_high | pin_low
    return np.asarray(np.clip(sizes, low, high))


def _largest_remainder(sizes: Floats, low: Ints, high: Ints, units: Ints) -> Ints:
    """Integers (n, W) in [low, high] with sum `units`, each within one of `sizes`; ties to the lower rank."""
    whole = np.minimum(np.maximum(np.floor(sizes + 1e-9).astype(np.int64), low), high)
    for _ in range(4):
        missing = units - whole.sum(-1)
        if not missing.any():
            break
        sign = np.sign(missing)[:, None]
        room = np.where(sign > 0, whole < high, whole > low)
        rank = np.argsort(np.where(room, -(sizes - whole) * sign, np.inf), axis=-1, kind="stable")
        place = np.empty_like(rank)
        np.put_along_axis(place, rank, np.broadcast_to(np.arange(rank.shape[-1]), rank.shape), axis=-1)
        whole = whole + np.where(room & (place < np.abs(missing)[:, None]), sign, 0)
    return whole


# ---------------------------------------------------------------- features

LOCAL_FEATURES = (
    "log_share",            # log(b_i / mean b)
    "log_compute",          # log(compute_i / mean compute)
    "slack",                # log(compute_i / max compute), 0 for the slowest
    "log_seconds_per_sample",
    "compute_cv",           # compute_std / compute
    "wait_fraction",        # of the step
    "communication_fraction",
    "data_fraction",
    "loss_change",
    "accuracy_change",
    "log_norm_ratio",       # log(|g_i|^2 / |g|^2)
    "log_bytes",
    "retransmits",
    "log_rtt",
    "cpu",
    "memory",
    "device",
    "log_noise_ratio",      # log(noise scale / global batch), global
    "log_growth",           # log(global batch / base batch), global
    "log_workers",          # global
    "missing_timing",
    "missing_training",
    "missing_noise",
    "missing_network",
    "missing_host",
    "missing_device",
)  # fmt: skip
FEATURES = tuple(f"{pool}{name}" for pool in ("", "mean_", "max_") for name in LOCAL_FEATURES)
FEATURE_SCHEMA = 1


def features(window: Window) -> NDArray[np.float32]:
    """What policies see, shape (..., W, F) with names `FEATURES`; float32, finite, each roughly in [-5, 5].

    Scale-free (ratios, logs, changes over their own deviation), so one policy serves any W, model and cluster;
    permutation-equivariant over workers, with mean and max over workers appended to each worker's own. What was not
    measured is 0 with its group's `missing_` flag at 1.
    """
    local = local_features(window)
    mean = np.broadcast_to(local.mean(-2, keepdims=True), local.shape)
    peak = np.broadcast_to(local.max(-2, keepdims=True), local.shape)
    return np.concatenate([local, mean, peak], axis=-1)


def local_features(window: Window) -> NDArray[np.float32]:
    """Each worker's own part of `features`, (..., W, F) with names `LOCAL_FEATURES`, for networks that pool by themselves."""
    with np.errstate(divide="ignore", invalid="ignore"):
        local = _local_features(window)
    np.copyto(local, 0.0, where=~np.isfinite(local))
    np.minimum(np.maximum(local, -5.0, out=local), 5.0, out=local)
    return np.ascontiguousarray(np.moveaxis(local, 0, -1), dtype=np.float32)


def _local_features(w: Window) -> Floats:
    """(F, ..., W): a feature at a time, which is faster than a worker at a time."""
    step_time, noise_scale, global_batch = w.step_time, w.noise_scale, w.global_batch
    positive = np.stack([w.batch_size, w.compute, w.seconds_per_sample, w.bytes_per_s, w.rtt_s])
    share, compute, seconds_per_sample, bytes_per_s, rtt = np.log(positive / _masked_mean(positive))

    def spread(x: Floats) -> Floats:
        return x[..., None]  # the same for all workers

    def absent(field: Floats, *others: Floats) -> NDArray[np.bool_]:
        missing = np.isnan(field)
        for other in others:
            missing = missing & np.isnan(other)
        return missing

    slowest = np.where(np.isnan(w.compute), -np.inf, w.compute).max(-1, keepdims=True)
    columns = {
        "log_share": np.where(w.batch_size > 0, share, -5.0),
        "log_compute": compute,
        "slack": np.log(w.compute / slowest),
        "log_seconds_per_sample": seconds_per_sample,
        "compute_cv": w.compute_std / w.compute,
        "wait_fraction": w.wait / step_time,
        "communication_fraction": w.communication / step_time,
        "data_fraction": w.data / step_time,
        "loss_change": w.loss_change,
        "accuracy_change": w.accuracy_change,
        "log_norm_ratio": 0.5 * np.log(w.gradient_norm_sq / w.global_norm_sq[..., None]),
        "log_bytes": bytes_per_s,
        "retransmits": np.log1p(w.retransmits_per_s),
        "log_rtt": rtt,
        "cpu": w.cpu,
        "memory": w.memory,
        "device": w.device,
        "log_noise_ratio": spread(np.minimum(np.maximum(np.log(noise_scale / global_batch), -5.0), 5.0)),
        "log_growth": spread(np.log(global_batch / w.base_batch)),
        "log_workers": np.log(w.workers) / 2,
        "missing_timing": absent(w.compute),
        "missing_training": absent(w.loss_change, w.accuracy_change),
        "missing_noise": spread(np.isnan(noise_scale)),
        "missing_network": absent(w.bytes_per_s, w.rtt_s),
        "missing_host": absent(w.cpu, w.memory),
        "missing_device": absent(w.device),
    }
    stacked = np.empty((len(LOCAL_FEATURES), *w.batch_size.shape))
    for row, name in zip(stacked, LOCAL_FEATURES, strict=True):
        row[...] = columns[name]
    return stacked


def _masked_mean(x: Floats) -> Floats:
    known = np.isfinite(x) & (x > 0)
    total = np.where(known, x, 0.0).sum(-1, keepdims=True)
    count = known.sum(-1, keepdims=True)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))

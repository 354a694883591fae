"""Features of a window for policies: scale-free numbers per worker, the same for any W, model and cluster."""

import sys
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from dynamix.window import Floats, Window

LOCAL_FEATURES = (
    "log_share",  # log(b_i / mean b)
    "log_compute",  # log(compute_i / mean compute)
    "slack",  # log(compute_i / max compute), 0 for the slowest
    "log_seconds_per_sample",
    "compute_cv",  # compute_std / compute
    "wait_fraction",  # of the step
    "communication_fraction",
    "data_fraction",
    "loss_change",
    "accuracy_change",
    "log_norm_ratio",  # log(|g_i|^2 / |g|^2)
    "log_bytes",
    "retransmits",
    "log_rtt",
    "cpu",
    "memory",
    "device",
    "log_noise_ratio",  # log(noise scale / global batch), global
    "log_growth",  # log(global batch / base batch), global
    "log_workers",  # global
    "missing_timing",
    "missing_training",
    "missing_noise",
    "missing_network",
    "missing_host",
    "missing_device",
)
FEATURES = tuple(f"{pool}{name}" for pool in ("", "mean_", "max_") for name in LOCAL_FEATURES)
FEATURE_SCHEMA = 1


def features(window: Window) -> NDArray[np.float32]:
    """The features for policies, shape (..., W, F) with names `FEATURES`; float32, finite, each roughly in [-5,
    5].

    Scale-free (ratios, logs, changes over their own deviation), so one policy serves any W, model and cluster.
    Permutation-equivariant over workers: the mean and the maximum over workers are appended to each worker's own
    features. A value that was not measured is 0, with its group's `missing_` flag at 1.
    """
    local = local_features(window)
    mean = np.broadcast_to(local.mean(-2, keepdims=True), local.shape)
    peak = np.broadcast_to(local.max(-2, keepdims=True), local.shape)
    return np.concatenate([local, mean, peak], axis=-1)


def local_features(window: Window) -> NDArray[np.float32]:
    """Each worker's own part of `features`, (..., W, F) with names `LOCAL_FEATURES`, for networks that pool."""
    with np.errstate(divide="ignore", invalid="ignore"):
        local = _local_features(window)
    np.copyto(local, 0.0, where=~np.isfinite(local))
    np.minimum(np.maximum(local, -5.0, out=local), 5.0, out=local)
    return np.ascontiguousarray(np.moveaxis(local, 0, -1), dtype=np.float32)


def _local_features(w: Window) -> Floats:
    """(F, ..., W): one feature at a time is faster than one worker at a time."""
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


class _CallableModule(ModuleType):
    """`dynamix.features` is the name of this module and of its function: calling the module calls the function."""

    def __call__(self, window: Window) -> NDArray[np.float32]:
        return features(window)


sys.modules[__name__].__class__ = _CallableModule

"""Goodput: samples per second, times what a sample teaches (Pollux, arXiv 2008.12260, section 3)."""

import numpy as np

from dynamix.model.measured import step_seconds
from dynamix.window import Floats, Window


def log_goodput(total: Floats, log_step: Floats, log_waste: Floats) -> Floats:
    """log(samples/s * progress per sample), any one shape, whatever its parts were estimated by.

    total      global batch, in samples
    log_step   log seconds of an optimizer step
    log_waste  log of how much less a sample teaches than one of the reference batch

    >>> float(np.exp(log_goodput(np.array(128.0), np.log(0.5), np.log(2.0))).round(6))   # 256 samples/s, worth half
    128.0
    """
    return np.asarray(np.log(np.maximum(total, 1e-9)) - log_step - log_waste)


def measured_log_goodput(window: Window) -> Floats:
    """`log_goodput` (...) of what `window` measured, by its own noise scale, in samples per optimizer step.

    Efficiency is Pollux's, (phi + B0)/(phi + B); where the signal is lost in noise, phi is infinite and it is 1. NaN
    where a part is unknown.

    >>> window = Window.of([64, 64], compute=0.5, communication=0.5, base_batch=128, noise=1e3, signal=1.0)
    >>> round(float(np.exp(measured_log_goodput(window))), 6)             # 128 samples in a second, at the base batch
    128.0
    """
    phi, total = window.noise_scale, window.global_batch
    with np.errstate(divide="ignore", invalid="ignore"):
        efficiency = np.where(np.isposinf(phi), 0.0, np.log((phi + window.base_batch) / (phi + total)))
        return log_goodput(total, np.log(step_seconds(window)), -efficiency)

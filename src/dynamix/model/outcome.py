"""Goodput: samples per second, times what a sample teaches (Pollux, arXiv 2008.12260, section 3)."""

import numpy as np

from dynamix.window import Floats


def log_goodput(total: Floats, log_step: Floats, log_waste: Floats) -> Floats:
    """log(samples/s * progress per sample), all of one shape, however its parts were estimated.

    total      global batch, in samples
    log_step   log seconds of an optimizer step
    log_waste  log of how much less a sample teaches than one of the reference batch

    >>> float(np.exp(log_goodput(np.array(128.0), np.log(0.5), np.log(2.0))).round(6))   # 256 samples/s, worth half
    128.0
    """
    return np.asarray(np.log(np.maximum(total, 1e-9)) - log_step - log_waste)

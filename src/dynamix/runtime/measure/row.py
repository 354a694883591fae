"""A rank's report of a window: the row that it sends, and how W ranks' rows become a `Window`."""

from typing import Any

import numpy as np

from dynamix.probes.timing import attribute_wait
from dynamix.runtime.measure.noise import NoiseScale
from dynamix.window import PER_WORKER, Floats, Window

ELEMENTS = 24  # elements of the parameters in every row
_MEASURED = (
    *("issued", "count", "weight", "epoch", "crossed", "measured_in", "global_norm_sq", "pair_noise", "pair_signal"),
    *(name for name in PER_WORKER if name not in ("wait", "communication")),  # these two follow from all rows
)
_BESIDE = ("beside_at", "beside", "beside_first", "beside_last")
HELD = ("digest", "late_digest", "sampled_at", "drawn", *_BESIDE, *(f"element_{n}" for n in range(ELEMENTS)))
ROW = (*_MEASURED, *HELD)


def assemble(
    rows: Floats, *, noise_scale: NoiseScale, sizes: Any, tells_noise: bool = True, **cluster: float
) -> Window:
    """The `Window` of W rows, shape (W, len(ROW) + steps). Updates `noise_scale` with the window's estimate."""
    columns = {name: rows[:, i] for i, name in enumerate(_MEASURED)}
    wait, transfer = attribute_wait(rows[:, len(ROW) :].T)
    global_seen = columns["global_norm_sq"][np.isfinite(columns["global_norm_sq"])]
    global_sq = float(global_seen.mean()) if global_seen.size else float("nan")
    alone = np.isfinite(columns["pair_noise"]) & np.isfinite(columns["pair_signal"])
    if alone.any():  # estimated by each worker from its own gradients
        noise, signal = (float(columns[name][alone].mean()) for name in ("pair_noise", "pair_signal"))
    else:
        # The weight is this rank's part of the mean gradient, n_i/N, whether the hook or the loss applied it. On CUDA
        # ranks may report statistics of different windows; these must not be combined.
        together = columns["measured_in"] == columns["measured_in"][0]
        usable = (columns["count"] > 0) & together.all()
        local = np.where(usable, columns["gradient_norm_sq"], np.nan)
        noise, signal = NoiseScale.estimate(local, global_sq, columns["count"], columns["weight"])
    if tells_noise:
        noise_scale.update(noise, signal)
    known = {name: columns[name] for name in _MEASURED if name in PER_WORKER and name != "batch_size"}
    known |= {"wait": wait, "communication": transfer}
    cluster |= {"steps": rows.shape[1] - len(ROW), "global_norm_sq": global_sq}
    return Window.of(sizes, **known, **cluster, noise=noise_scale.noise, signal=noise_scale.signal)

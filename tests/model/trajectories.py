"""Windows of clusters that do what clusters do: slow down, stall, recover, jitter, lose measurements, change sizes."""

from __future__ import annotations

import numpy as np

from dynamix.window import Floats, Window

# name -> leading shape and W, windows
CASES: dict[str, tuple[tuple[int, ...], int]] = {
    "four": ((4,), 36),
    "clusters": ((2, 3), 24),
    "one": ((1,), 12),
    "twenty": ((20,), 12),
}


def windows(case: str, *, steps_known: bool = True) -> list[Window]:
    """The windows of a case, with `step` counted on unless told otherwise."""
    shape, count = CASES[case]
    rng = np.random.Generator(np.random.PCG64([29, len(case), *shape]))
    alpha, beta = 0.08 * rng.random(shape), 1e-3 * 4.0 ** rng.random(shape)
    slow, sizes, made = np.ones(shape), np.full(shape, 64), []
    for t in range(count):
        stalled = np.where((t % 7 == 3) & (rng.random(shape) < 0.3), 2.5, 1.0)
        change = rng.random(shape)
        slower = np.where(change < 0.08, 1.0 + 2.0 * rng.random(shape), np.where(change > 0.9, 1.0, slow))
        part = np.where(slower != slow, rng.random(shape), 1.0)  # of the window, that the new speed took
        seconds = (alpha + beta * sizes * (1.0 + np.maximum(sizes / 110 - 1.0, 0.0))) * stalled
        busy = seconds * (slow + part * (slower - slow)) * (1.3 if t in (11, 12) else 1.0)
        busy = busy * np.exp(0.02 * (rng.random(shape) - 0.5))
        torn = seconds * np.sqrt(part * (1 - part)) * np.abs(slower - slow)
        slow = slower
        made.append(_window(t, sizes, busy, torn, rng, steps_known))
        sizes = np.clip(np.rint(sizes * np.exp(0.5 * (rng.random(shape) - 0.5))), 8, 200).astype(np.int64)
        if t % 9 == 5 and shape[-1] > 1:
            sizes[..., 1] = 0
        elif t % 9 == 6:
            sizes = np.maximum(sizes, 40)
    return made


def _window(
    t: int, sizes: np.ndarray, busy: Floats, torn: Floats, rng: np.random.Generator, steps_known: bool
) -> Window:
    shape, lead = sizes.shape, sizes.shape[:-1]
    busy = np.where((rng.random(shape) < 0.04) | (sizes == 0), np.nan, busy)
    finite = np.where(np.isnan(busy), 0.0, busy)
    slowest = 1.03 * finite.max(-1)
    # An exchange of 60 ms, of 90 ms later on, of which some hides behind computing.
    exchange = 0.06 if t < 15 else 0.09
    exposed = ((slowest**2 + exchange**2) ** 0.5 - slowest) * np.exp(0.1 * (rng.random(lead) - 0.5))
    total = sizes.sum(-1)
    noise = 300.0 * shape[-1] * 1.02**t * (total / (64 * shape[-1])) ** 0.3 * np.exp(0.2 * (rng.random(lead) - 0.5))
    return Window.of(
        sizes,
        compute=0.97 * busy,
        data=np.where(rng.random(shape) < 0.2, np.nan, 0.03 * busy),
        compute_std=np.where(rng.random(shape) < 0.1, np.nan, np.sqrt((0.03 * finite) ** 2 + torn**2)),
        wait=np.where(rng.random(shape) < 0.1, np.nan, slowest[..., None] - finite),
        communication=np.where(rng.random(shape) < 0.1, np.nan, exposed[..., None]),
        steps=np.nan if t == 8 else float(1 + t % 6),
        step=5.0 * t if steps_known else np.nan,
        base_batch=np.nan if t == 10 else 64.0 * shape[-1],
        noise=np.where((t < 2) | (t % 10 == 9), np.nan, noise),
        signal=0.0 if t == 13 else 1.0,
    )

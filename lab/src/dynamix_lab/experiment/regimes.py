"""Clusters for "who wins where": device hosts by number, spread of speeds, and exchange time over computing time.

A regime's name contains all three. `regime-w4-s4-r0.3` has four workers, the fastest is four times as fast as the
slowest, and exchanging gradients takes 0.3 of the time in which the fastest worker computes `AT` samples.
"""

from __future__ import annotations

import re

import numpy as np

from dynamix.errors import ConfigError
from dynamix_lab.emulator import Scenario, load_scenario
from dynamix_lab.opponents.course import ring_mbit
from dynamix_lab.opponents.world import LiveExtras
from dynamix_lab.tasks import make_workload

FIXED_MS, PER_SAMPLE_MS = 20.0, 1.25
AT = 64  # samples per worker
EXTRAS = LiveExtras(step_s=0.0, stage_s=0.0, jitter_sd=0.005)  # no other effects than the regime's
RATIOS, SPREADS = (0.03, 0.3, 1.0, 3.0), (1, 4)
_NAME = re.compile(r"regime-w(\d+)-s(\d+)-r([0-9.]+)")


def is_regime(name: str) -> bool:
    """Whether a scenario's name is a regime's."""
    return name.startswith("regime-")


def regime(name: str, workload: str) -> Scenario:
    """The scenario of a regime for a workload. The size of its gradients determines the links' rate.

    Speeds fall evenly from 1 to 1/spread. Raises `ConfigError` for other names, and for rates that no link can have.

    >>> [host.cpu for host in regime("regime-w4-s4-r1", "teacher").hosts]
    [1.0, 0.75, 0.5, 0.25]
    """
    found = _NAME.fullmatch(name)
    if found is None:
        fix = "name workers, spread of speed and ratio of times"
        raise ConfigError("regime", name, "regime-wWORKERS-sSPREAD-rRATIO, as in regime-w4-s4-r0.3", fix)
    workers, spread, ratio = int(found[1]), int(found[2]), float(found[3])
    if workers < 2 or spread < 1 or not ratio > 0:
        raise ConfigError("regime", name, "2 or more workers, spread 1 or more, ratio above 0", "choose others")
    model = make_workload(workload).make_model(0)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    seconds = ratio * (FIXED_MS + PER_SAMPLE_MS * AT) / 1000
    rate = ring_mbit(workers, size) / seconds
    speeds = np.linspace(1.0, 1.0 / spread, workers).round(6).tolist()
    return load_scenario(
        {
            "name": re.sub(r"[^a-z0-9-]", "-", name),
            "description": "Made for a regime of speeds and links.",
            "device": {"fixed_ms": FIXED_MS, "per_sample_ms": PER_SAMPLE_MS},
            "hosts": [{"cpu": speed, "rate_mbit_s": float(f"{rate:.4g}")} for speed in speeds],
        }
    )


def regime_places() -> tuple[str, ...]:
    """The 24 cells of the map, as `Place.of` reads them."""
    jobs = ((4, "teacher"), (16, "teacher"), (4, "mnist1d-noisy-mlp"))
    return tuple(f"regime-w{w}-s{s}-r{r:g}/{job}" for w, job in jobs for s in SPREADS for r in RATIOS)

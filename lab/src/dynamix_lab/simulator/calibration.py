"""Figures fitted to public measurements of computing, noise scales and slowdowns of real clusters.

`calibration.json` in this folder has the fitted coefficients with their source and error, but no measurements.
`dynamix bench calibration` makes it from the public files.
"""

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.window import Floats

# Batch grid of the curves: log2(batch) from 0, in quarters of an octave.
OCTAVE_PARTS, OCTAVES = 4, 15
GRID: Floats = np.arange(OCTAVES * OCTAVE_PARTS + 1) / OCTAVE_PARTS
MIN_R2 = 0.9


@dataclass(frozen=True, slots=True)
class Affine:
    """Seconds for b samples on one GPU: alpha + beta * b, as fitted. `batch_max` is the largest batch measured."""

    model: str
    gpu: str
    alpha_s: float
    beta_s: float
    r2: float
    batch_min: int
    batch_max: int


@dataclass(frozen=True, slots=True)
class NoiseCurve:
    """log phi (gradient noise scale, samples) = knots at the fraction of training done + rho * log(B / base_batch)."""

    model: str
    base_batch: int
    knots: tuple[float, ...]  # log phi at 0, 1/(n-1), ... 1, interpolated
    rho: float
    residual: float  # standard deviation of log phi about the fit
    samples: float  # of the whole training with the base batch


@dataclass(frozen=True, slots=True)
class Calibration:
    """All fits. `curves` (K, len(GRID)): measured seconds over the affine fit's, for models that it does not suit."""

    affine: dict[tuple[str, str], Affine]
    noise: dict[str, NoiseCurve]
    curves: Floats
    curve_names: tuple[tuple[str, str], ...]
    colocation: dict[str, Floats]  # gpu -> quantiles (0, 1/(n-1), ... 1) of the slowdown by one co-located job
    processes: dict[str, dict[str, float]]  # the PAI jobs
    step_count_ratio: float
    held_out: dict[str, Any]
    sources: dict[str, str]

    def of(self, model: str, gpu: str) -> Affine:
        """The fit of one pair. Raises `ConfigError` that names the available ones.

        >>> calibration().of("cifar10", "T4").r2 > 0.99
        True
        >>> calibration().of("alexnet", "T4")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        dynamix.errors.ConfigError: model='alexnet' is not possible: allowed is bert, cifar10, ...
        """
        models = sorted({m for m, _ in self.affine})
        if model not in models:
            raise ConfigError("model", model, ", ".join(models), "choose a calibrated model")
        gpus = sorted({g for m, g in self.affine if m == model})
        if gpu not in gpus:
            raise ConfigError("gpu", gpu, ", ".join(gpus), "choose a calibrated GPU")
        return self.affine[model, gpu]

    def affine_models(self) -> dict[str, list[Affine]]:
        """Model -> its GPUs with a good affine fit (R2 of 0.9 or more), for models with at least three."""
        found: dict[str, list[Affine]] = {}
        for fit in self.affine.values():
            if fit.r2 >= MIN_R2:
                found.setdefault(fit.model, []).append(fit)
        return {model: fits for model, fits in found.items() if len(fits) >= 3}

    def curve(self, model: str, gpu: str) -> int:
        """The row of `curves` for a pair, -1 if its affine fit is good."""
        return self.curve_names.index((model, gpu)) if (model, gpu) in self.curve_names else -1


@functools.cache
def calibration() -> Calibration:
    """The shipped figures."""
    raw = json.loads((resources.files("dynamix_lab.simulator") / "calibration.json").read_text(encoding="utf-8"))
    return Calibration(
        affine={(entry["model"], entry["gpu"]): Affine(**entry) for entry in raw["affine"]},
        noise={entry["model"]: NoiseCurve(**{**entry, "knots": tuple(entry["knots"])}) for entry in raw["noise"]},
        curves=np.array([entry["factors"] for entry in raw["curves"]]),
        curve_names=tuple((entry["model"], entry["gpu"]) for entry in raw["curves"]),
        colocation={gpu: np.array(quantiles) for gpu, quantiles in raw["colocation"].items()},
        processes=raw["processes"],
        step_count_ratio=raw["step_count_ratio"]["value"],
        held_out=raw["held_out"],
        sources=raw["sources"],
    )

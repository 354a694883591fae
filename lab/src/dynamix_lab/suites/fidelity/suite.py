"""`dynamix bench fidelity`: how far the simulator's models are from what they were fitted to."""

from __future__ import annotations

from typing import Any

from dynamix.events.records import SCHEMA
from dynamix.events.run_folder import commit
from dynamix_lab.simulator import calibration

GOAL = 0.10


def run_fidelity() -> dict[str, Any]:
    """Errors of step times on points that their fit has not seen, and residuals of the noise-scale fits."""
    known = calibration()
    affine = [fit.r2 for fits in known.affine_models().values() for fit in fits]
    return {
        "schema": SCHEMA,
        "command": "bench fidelity",
        "commit": commit(),
        "cluster": "simulator",
        "held_out_step_time": known.held_out,
        "goal": {"mean_absolute": GOAL},
        "affine": {"pairs": len(affine), "least_r2": min(affine), "not_affine": len(known.curve_names)},
        "noise_scale": {
            name: {"rho": curve.rho, "residual_of_log": curve.residual} for name, curve in known.noise.items()
        },
        "sources": known.sources,
    }


def lines(result: dict[str, Any]) -> list[str]:
    """For people."""
    said = [
        f"step time held out, {name} ({e['jobs']} jobs): {100 * e[where]['mean_absolute']:.1f} % mean absolute {what}, "
        f"median {100 * e[where]['median']:.1f} %, p90 {100 * e[where]['p90']:.1f} %, {e[where]['points']} points"
        + goal
        for name, e in result["held_out_step_time"].items()
        for where, what, goal in (
            ("inside", "between measured sizes", f" (goal {100 * GOAL:.0f} %)"),
            ("ends", "beyond them", ""),
        )
    ]
    affine = result["affine"]
    said.append(
        f"affine: {affine['pairs']} (model, GPU) pairs, R2 from {affine['least_r2']:.3f}; "
        f"{affine['not_affine']} are not"
    )
    return said + [
        f"noise scale of {name}: phi ~ B^{part['rho']:.2f}, residual of log phi {part['residual_of_log']:.2f}"
        for name, part in result["noise_scale"].items()
    ]

"""`dynamix bench fidelity`: how far the simulator's models are from what they were fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamix.errors import ConfigError
from dynamix.events.records import SCHEMA
from dynamix.events.run_folder import commit
from dynamix_lab.simulator import calibration
from dynamix_lab.suites.fidelity.against import Tell, compare, forecast, silent

GOAL = 0.10
COMPARED = ("step_s", "time_to_target_s", "steps")


def run_fidelity(
    against: Path | None = None,
    *,
    calibrate_on: str = "all",
    predict: Sequence[str] = (),
    seeds: int = 6,
    trained: bool = False,
    tell: Tell = silent,
) -> dict[str, Any]:
    """Errors of step times on points that their fit has not seen, and residuals of the noise-scale fits.

    against   folder of a finished `bench tta`, to compare the simulator with; costs from its scenarios `calibrate_on`
              (names, comma-separated, or "all")
    predict   policies to predict with those costs, over `seeds` disturbances that the run did not have, instead of its
              runs
    trained   by the training itself, with only its seconds simulated: some 50 s of a core for every run
    """
    if predict and against is None:
        raise ConfigError("predict", ",".join(predict), "nothing without against", "name the folder of a `bench tta`")
    if trained and against is None:
        raise ConfigError("trained", True, "nothing without against", "name the folder of a `bench tta`")
    known = calibration()
    how: dict[str, Any] = {"calibrate_on": calibrate_on, "trained": trained, "tell": tell}
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
        "against_emulator": compare(against, **how) if against and not predict else None,
        "forecast": forecast(against, predict, seeds=seeds, **how) if against and predict else None,
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
    said += [
        f"noise scale of {name}: phi ~ B^{part['rho']:.2f}, residual of log phi {part['residual_of_log']:.2f}"
        for name, part in result["noise_scale"].items()
    ]
    said += _against(result["against_emulator"]) if result["against_emulator"] else []
    return said + (_forecast(result["forecast"]) if result["forecast"] else [])


def _against(found: dict[str, Any]) -> list[str]:
    by = "the training itself" if found["trained"] else "a model of the training"
    said = [f"simulator ({by}) against emulator, costs from runs of a fixed global batch, {found['calibrated_on']};"]
    said.append("error of a step's seconds, of seconds to the target, and of steps:")
    for name, part in found["scenarios"].items():
        cells = [
            f"{policy} " + " ".join(f"{100 * (p['predicted_' + key] / p[key] - 1):+.0f} %" for key in COMPARED)
            for policy, p in part["policies"].items()
        ]
        said.append(f"  {name}: {', '.join(cells)}; ranking {'same' if part['same_ranking'] else 'differs'}")
    worst, same = 100 * found["worst_step_error"], found["same_ranking"]
    said.append(f"  worst {worst:.0f} % (goal 15 %), same ranking in {same} of {len(found['scenarios'])} (goal 5 of 6)")
    return said


def _forecast(found: dict[str, Any]) -> list[str]:
    first, last = found["seeds"]
    policies = list(found["ratio"])
    said = [f"predicted with those costs, disturbances {first}-{last}: seconds to the target, and over {policies[0]}:"]
    for name, part in found["scenarios"].items():
        late = {policy: f", {p['late']} never arrived" if p["late"] else "" for policy, p in part.items()}
        cells = [f"{policy} {p['time_to_target_s']:.1f} ({p['ratio']:.3f}{late[policy]})" for policy, p in part.items()]
        said.append(f"  {name}: {', '.join(cells)}")
    return [*said, "  all: " + ", ".join(f"{policy} {ratio:.3f}" for policy, ratio in found["ratio"].items())]

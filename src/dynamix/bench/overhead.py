"""What the controller costs: its share of a step on the demo's job, and one decision for many workers."""

from __future__ import annotations

from typing import Any

from dynamix.bench.demo import Settings, run_demo
from dynamix.bench.simspeed import decision_ms
from dynamix.telemetry.run_folder import RunFolder

GOAL_FRACTION, GOAL_MS = 0.01, 5.0


def overhead_settings(steps: int) -> Settings:
    """The demo's job that is timed, for `Settings.check` before a folder is made."""
    return Settings(steps=steps, policies=("dynamix",), command="bench overhead")


def run_overhead(folder: RunFolder, *, steps: int = 200) -> dict[str, Any]:
    """Run the demo's job under the learned policy for `steps` steps; time a decision for W = 1024 beside it.

    `step_fraction` is rank 0's time inside `Controller.step` over its time in the run; rank 0 also decides.
    """
    settings = overhead_settings(steps)
    demo, _ = run_demo(settings, folder)
    mine = demo["policies"]["dynamix"]
    result = {
        **{
            key: demo[key]
            for key in ("schema", "command", "commit", "cluster", "mechanisms", "scenario_sha256", "seeds", "machine")
        },
        "step_fraction": mine["overhead_s"][0] / mine["time_s"][0],
        "overhead_ms_per_step": 1e3 * mine["overhead_s"][0] / mine["steps"][0],
        "step_ms": 1e3 * mine["time_s"][0] / mine["steps"][0],
        "decision_ms_1024_workers": decision_ms(),
        "goal": {"step_fraction": GOAL_FRACTION, "decision_ms_1024_workers": GOAL_MS},
    }
    folder.write_result(result)
    return result

"""What the controller costs: its share of a step on the demo's job, and one decision for many workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamix.events.run_folder import RunFolder
from dynamix_lab.demo.run import run_demo
from dynamix_lab.harness.launch import LaunchSettings
from dynamix_lab.suites.decision_time import GOAL_MS, WORKERS, decision_times

GOAL_FRACTION = 0.01


def overhead_settings(steps: int = 200, *, command: str = "dynamix bench overhead") -> LaunchSettings:
    """The demo's job that is timed, `steps` steps of it."""
    return LaunchSettings(steps=steps, policies=("dynamix",), command=command)


def run_overhead(
    settings: LaunchSettings, folder: RunFolder, *, policies: Sequence[str] = ("dynamix",), workers: int = WORKERS
) -> dict[str, Any]:
    """Run the demo's job under the learned policy as `settings` say; time decisions of `policies` beside it.

    `step_fraction` is rank 0's time inside `Controller.step` over its time in the run; rank 0 also decides.
    """
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
        **decisions(policies, workers=workers),
    }
    result["goal"]["step_fraction"] = GOAL_FRACTION
    folder.write_result(result)
    return result


def decisions(policies: Sequence[str], *, workers: int = WORKERS) -> dict[str, Any]:
    """`decision_ms` by policy, with the number of workers and the goal for the processor time."""
    found = {name: decision_times(name, workers=workers) for name in policies}
    return {"workers": workers, "decision_ms": found, "goal": {"decision_cpu_ms": GOAL_MS}}


def lines(result: dict[str, Any]) -> list[str]:
    """For people."""
    said = []
    if "step_fraction" in result:
        said.append(f"step(): {100 * result['step_fraction']:.2f} % of a step at W=4 (goal: {100 * GOAL_FRACTION:g} %)")
    return said + [
        f"decision of {name} for W={result['workers']}: {ms['cpu']:.2f} ms of processor time (median; goal: "
        f"{GOAL_MS:g}), 99th percentile {ms['cpu_p99']:.2f}; by the clock {ms['median']:.2f}"
        for name, ms in result["decision_ms"].items()
    ]

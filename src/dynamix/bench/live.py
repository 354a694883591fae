"""`dynamix bench tta`: time to accuracy on emulated clusters, scenario by scenario, resumable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynamix.bench.demo import Settings, run_demo
from dynamix.bench.display import Display
from dynamix.bench.runs import AGAIN, CENSOR_FACTOR
from dynamix.bench.statistics import censored, geometric_mean, paired_ratio
from dynamix.bench.suite_report import write_live_report
from dynamix.emulator import load_scenario
from dynamix.errors import ConfigError
from dynamix.telemetry.events import SCHEMA
from dynamix.telemetry.run_folder import RunFolder, commit, machine

SCENARIOS = ("even", "steady-uneven", "moving-neighbour", "slow-link", "pai-replay", "paper-like")
QUICK_SCENARIOS = ("steady-uneven", "moving-neighbour")


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call runs; `quick` is only the label of the command."""

    scenarios: tuple[str, ...]
    seeds: int
    seed: int
    policies: tuple[str, ...]
    quick: bool = False

    def settings(self) -> dict[str, Settings]:
        """One demo per scenario. Raises `ConfigError` before anything is started."""
        if "static" not in self.policies:
            raise ConfigError("policies", list(self.policies), "static among them", "add static: all ratios are to it")
        each = {
            name: Settings(
                scenario=name, seeds=self.seeds, seed=self.seed, policies=self.policies, again=not self.quick
            )
            for name in self.scenarios
        }
        for settings in each.values():
            settings.check()
        return each


def run_tta(plan: Plan, folder: RunFolder, *, display: Display | None = None) -> tuple[dict[str, Any], bool]:
    """Run every scenario in a folder of its own under `folder`; returns result.json and whether every run arrived.

    Every scenario gets its first seed before any gets its second, so a call that is interrupted leaves all of them with
    equally many pairs, and summarises those before `KeyboardInterrupt` goes on. What a scenario's folder has finished
    already is not run again.
    """
    each = plan.settings()
    command = "bench tta" + (" --quick" if plan.quick else f" --seeds {plan.seeds}") + f" --seed {plan.seed}"
    facts = {
        "schema": SCHEMA, "command": command, "cluster": "emulator",
        "seeds": list(range(plan.seed, plan.seed + plan.seeds)), "policies_run": list(plan.policies),
        "scenario_sha256": {name: load_scenario(name).sha256 for name in plan.scenarios},
    }  # fmt: skip
    folder.write_run(**facts)
    results: dict[str, dict[str, Any]] = {}
    arrived = True
    try:
        for seeds in range(1, plan.seeds + 1):
            found = {}
            for name, settings in each.items():
                found[name], reached = _run_scenario(replace(settings, seeds=seeds), folder.path / name, display)
                arrived = arrived and reached
            results = found
    except KeyboardInterrupt:
        if results:
            _conclude(facts | {"interrupted": True}, results, folder)
        raise
    return _conclude(facts, results, folder), arrived


def _run_scenario(settings: Settings, path: Path, display: Display | None) -> tuple[dict[str, Any], bool]:
    return run_demo(settings, RunFolder("demo", path, resume=(path / "run.json").is_file()), display=display)


def _conclude(facts: dict[str, Any], results: dict[str, dict[str, Any]], folder: RunFolder) -> dict[str, Any]:
    """Write result.json, table.md and report.html."""
    result = {**facts, "commit": commit(), "machine": machine(), **combine(results), "scenarios": results}
    result["mechanisms"] = next(iter(results.values()))["mechanisms"]
    result["seeds"] = next(iter(results.values()))["seeds"]
    folder.write_result(result)
    (folder.path / "table.md").write_text(markdown(result), encoding="utf-8")
    write_live_report(folder.path / "report.html", result)
    return result


def combine(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ratios to static over all scenarios (each weighs the same), and each scenario's attainable cut with the shares of it.

    The attainable cut is 1 - t_ref/t_static with t_ref the best of the reference and the rules there; a share above 1 is
    reported as it is.
    """
    times = {scenario: _times(result) for scenario, result in results.items()}
    names = [name for name in next(iter(times.values())) if name != "static"]
    static = {scenario: mine["static"] for scenario, mine in times.items()}
    ratios = {}
    for name in names:
        mine = {scenario: times[scenario][name] for scenario in times}
        ratios[f"{name}/static"] = paired_ratio(mine, static).to_dict()
    cuts = {}
    for scenario, mine in times.items():
        over = {name: geometric_mean([a / b for a, b in zip(mine[name], mine["static"], strict=True)]) for name in mine}
        rules = [name for name in over if name not in ("static", AGAIN, "dynamix")] or ["static"]
        best = min(rules, key=lambda name: over[name])
        cut = 1 - over[best]
        shares = {name: round((1 - value) / cut, 3) for name, value in over.items() if cut > 0.02 and name != "static"}
        cuts[scenario] = {"attainable_cut": round(cut, 4), "attained_by": best, "fraction_of_cut": shares}
    return {"ratios": ratios, "cuts": cuts}


def _times(result: dict[str, Any]) -> dict[str, list[float]]:
    """Policy -> seconds by seed, censored at twice static's; seeds in which static did not arrive are left out of all."""
    runs = {name: part["time_to_target_s"] for name, part in result["policies"].items()}
    kept = [i for i, t in enumerate(runs["static"]) if t is not None]
    if not kept:
        raise ConfigError(
            "static", "never reached the target", "one seed at least", "allow more time, or another target"
        )
    bound = [CENSOR_FACTOR * runs["static"][i] for i in kept]
    return {name: censored([t[i] for i in kept], bound).tolist() for name, t in runs.items()}


def markdown(result: dict[str, Any]) -> str:
    """Rows are scenarios; a cell is time over static's, geometric mean of the pairs."""
    names = [name.removesuffix("/static") for name in result["ratios"]]
    lines = ["| scenario | attainable cut (by) | A/A | " + " | ".join(n for n in names if n != AGAIN) + " |"]
    lines.append("|---" * (3 + len([n for n in names if n != AGAIN])) + "|")
    for scenario, part in result["scenarios"].items():
        cut, a_a = result["cuts"][scenario], part["a_a"]
        cells = [f"{part['ratios'][f'{n}/static']['median']:.3f}" for n in names if n != AGAIN]
        own = "–" if a_a is None else f"{a_a['median']:.3f}"
        lines.append(
            f"| {scenario} | {100 * cut['attainable_cut']:.0f} % ({cut['attained_by']}) | {own} | "
            + " | ".join(cells)
            + " |"
        )
    return "\n".join(lines) + "\n"

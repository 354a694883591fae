"""`dynamix bench tta`: time to accuracy on emulated clusters, scenario by scenario, resumable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynamix.emulator import load_scenario
from dynamix.errors import ConfigError
from dynamix.events.records import SCHEMA
from dynamix.events.run_folder import RunFolder, commit, machine
from dynamix_lab.demo.run import run_demo
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.launch import LaunchSettings
from dynamix_lab.harness.runs import A_A_LIMIT, AGAIN, CENSOR_FACTOR, is_learned, is_static
from dynamix_lab.report.suite_page import write_live_report
from dynamix_lab.statistics import censored, geometric_mean, paired_ratio

SCENARIOS = ("even", "steady-uneven", "moving-neighbour", "slow-link", "pai-replay", "paper-like")
QUICK_SCENARIOS = ("steady-uneven", "moving-neighbour")


@dataclass(frozen=True, slots=True)
class TtaPlan:
    """What one call runs; `quick` is only the label of the command."""

    scenarios: tuple[str, ...]
    seeds: int
    seed: int
    policies: tuple[str, ...]
    quick: bool = False

    def settings(self) -> dict[str, LaunchSettings]:
        """One demo per scenario. Raises `ConfigError` before anything is started."""
        if "static" not in self.policies:
            raise ConfigError("policies", list(self.policies), "static among them", "add static: all ratios are to it")
        each = {
            name: LaunchSettings(
                scenario=name, seeds=self.seeds, seed=self.seed, policies=self.policies, again=not self.quick
            )
            for name in self.scenarios
        }
        for settings in each.values():
            settings.check()
        return each


def run_tta(plan: TtaPlan, folder: RunFolder, *, display: Display | None = None) -> tuple[dict[str, Any], bool]:
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


def _run_scenario(settings: LaunchSettings, path: Path, display: Display | None) -> tuple[dict[str, Any], bool]:
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
    """All scenarios together: the lists of `policies` run over `pairs`, ratios weigh every scenario alike.

    `best_static` of a scenario is the fastest of the static sizes that ran there, chosen in hindsight, in its favour. The
    attainable cut is 1 - t_ref/t_best_static with t_ref the best of the reference and the rules; a policy's share of it
    above 1 is reported as it is.
    """
    times = {scenario: _times(result) for scenario, result in results.items()}
    cuts = {scenario: _cut(mine) for scenario, mine in times.items()}

    def ratio(name: str, base: Callable[[str], str]) -> dict[str, float | None]:
        above = {scenario: mine[name] for scenario, mine in times.items()}
        return paired_ratio(above, {scenario: mine[base(scenario)] for scenario, mine in times.items()}).to_dict()

    names = [name for name in next(iter(times.values())) if name != "static"]
    ratios = {f"{name}/static": ratio(name, lambda _: "static") for name in names}
    for name in names:
        if not is_static(name):
            ratios[f"{name}/best_static"] = ratio(name, lambda scenario: str(cuts[scenario]["best_static"]))
    targets = {result["target"] for result in results.values()}
    return {
        "pairs": [[scenario, seed] for scenario, result in results.items() for seed in result["seeds"]],
        "target": targets.pop() if len(targets) == 1 else None,
        "policies": _joined(results), "ratios": ratios, "a_a": _a_a(times), "cuts": cuts,
    }  # fmt: skip


def _cut(times: dict[str, list[float]]) -> dict[str, Any]:
    """The attainable cut of one scenario, and every policy's part of it."""
    best_static = min((n for n in times if is_static(n) and n != AGAIN), key=lambda n: geometric_mean(times[n]))
    base = times[best_static]
    over = {name: geometric_mean([a / b for a, b in zip(mine, base, strict=True)]) for name, mine in times.items()}
    rules = [name for name in over if not is_static(name) and not is_learned(name)] or [best_static]
    by = min(rules, key=lambda name: over[name])
    cut = 1 - over[by]
    shares = {n: round((1 - value) / cut, 3) for n, value in over.items() if cut > 0.02 and not is_static(n)}
    return {
        "best_static": best_static, "attainable_cut": round(cut, 4), "attained_by": by, "fraction_of_cut": shares,
        "over_best_static": {name: round(value, 4) for name, value in over.items()},
    }  # fmt: skip


def _a_a(times: dict[str, dict[str, list[float]]]) -> dict[str, Any] | None:
    """Static against itself over all scenarios: the machine's own part in every other ratio."""
    if not all(AGAIN in mine for mine in times.values()):
        return None
    again, static = ({scenario: mine[name] for scenario, mine in times.items()} for name in (AGAIN, "static"))
    ratio = paired_ratio(again, static)
    each = [a / b for scenario in times for a, b in zip(again[scenario], static[scenario], strict=True)]
    within = bool(abs(ratio.median - 1) <= A_A_LIMIT)
    return {**ratio.to_dict(), "each": [round(v, 4) for v in each], "limit": A_A_LIMIT, "within": within}


def _joined(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """What every scenario has per seed, one after another; other details stay with their scenario."""
    keys = ("time_to_target_s", "final_accuracy", "samples_per_s", "wait_fraction")
    names = next(iter(results.values()))["policies"]
    return {
        name: {key: [v for part in results.values() for v in part["policies"][name].get(key, [])] for key in keys}
        for name in names
    }


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
    """Rows are scenarios; a cell is time over the best static's there, geometric mean of the pairs."""
    names = [name for name in next(iter(result["cuts"].values()))["over_best_static"] if name != AGAIN]
    lines = ["| scenario | best static | attainable cut (by) | A/A | " + " | ".join(names) + " |"]
    lines.append("|---" * (4 + len(names)) + "|")
    for scenario, part in result["scenarios"].items():
        cut, a_a = result["cuts"][scenario], part["a_a"]
        own = "–" if a_a is None else f"{a_a['median']:.3f}"
        head = f"{scenario} | {cut['best_static']} | {100 * cut['attainable_cut']:.0f} % ({cut['attained_by']}) | {own}"
        lines.append(f"| {head} | " + " | ".join(f"{cut['over_best_static'][n]:.3f}" for n in names) + " |")
    return "\n".join(lines) + "\n"

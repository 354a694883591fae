"""One real training job on an emulated uneven cluster, under one policy after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dynamix.events.run_folder import RunFolder, commit, machine
from dynamix_lab.emulator import Emulation, Scenario, load_scenario
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.finished import FinishedSeeds, facts_of
from dynamix_lab.harness.host import host
from dynamix_lab.harness.launch import POLICIES, Launch, LaunchSettings, disturbance_seed
from dynamix_lab.harness.runs import AGAIN, PolicyRun, policy_facts, summarise
from dynamix_lab.suites.comparison.plots import moves
from dynamix_lab.suites.comparison.report import write_report
from dynamix_lab.suites.comparison.table import a_a_lines, caveats, legend, ratio_lines, result_table
from dynamix_lab.tasks import make_workload

# A run during which the hypervisor took more than this part of the machine's processor time from us is no measurement;
# where policies are compared it is made again, so often at most.
MOST_STOLEN, REPEATS = 0.03, 2


def run_comparison(
    settings: LaunchSettings, folder: RunFolder, *, display: Display | None = None
) -> tuple[dict[str, Any], bool]:
    """Run all policies for all seeds; returns result.json and whether every run reached its end.

    Writes run.json, events.jsonl, result.json and report.html to `folder`. Seeds that `folder` has finished already
    are not run again. When interrupted, what is finished is summarised before `KeyboardInterrupt` goes on. Raises
    `DynamixError`s of bad settings, of the emulator, or of a lost worker; nothing is left running.
    """
    settings.check()
    scenario, workload = load_scenario(settings.scenario), make_workload(settings.workload)
    target = settings.target(workload)
    display = display or Display(target=target)
    torch.set_num_threads(1)
    seeds = range(settings.seed, settings.seed + settings.seeds)
    facts = _facts(settings, scenario, target)
    started_on = host()
    kept = FinishedSeeds(folder, facts)
    finished = kept.load(seeds, display.say)
    runs = [run for of_seed in finished.values() for run in of_seed]
    facts["mechanisms"] = folder.read_run().get("mechanisms", {})

    def launch(seed: int, names: Sequence[str], attempt: int, runs: list[PolicyRun]) -> None:
        ranks = folder.path / "ranks" / (f"{seed}-{attempt}" if attempt else str(seed))
        of_seed = disturbance_seed(settings, seed)
        with Emulation(scenario, seed=of_seed, run_dir=ranks, mechanism=settings.mechanism, keep_awake=True) as hosts:
            facts["mechanisms"] = hosts.mechanisms
            folder.write_run(**facts, host=started_on)
            Launch(settings, seed, workload, hosts, folder, display, runs, names=names, attempt=attempt).run()

    try:
        with display.live():
            for seed in seeds:
                if seed not in finished:
                    launch(seed, settings.order(seed), 0, runs)
                    kept.save(seed, runs)
                while settings.compares and (disturbed := _disturbed(runs, seed)):
                    for run in disturbed:
                        display.say(
                            f"seed {seed}, {run.policy}: {100 * run.stolen:.0f} % of the processor stolen, again"
                        )
                    names = [run.policy for run in disturbed]
                    again = [run for run in runs if run.seed != seed or run.policy not in names]
                    launch(seed, names, disturbed[0].attempt + 1, again)
                    runs = again  # not before: an interrupted attempt replaces nothing
                    kept.save(seed, runs)
    except KeyboardInterrupt:
        if whole := kept.whole(runs):
            _conclude(settings, scenario, whole, {**facts, "interrupted": True}, folder, display)
            display.say(f"interrupted: go on with --resume --out {folder.path}")
        raise
    result = _conclude(settings, scenario, runs, facts, folder, display)
    return result, all(run.finished and (settings.quick or run.time_to_target_s is not None) for run in runs)


def _conclude(
    settings: LaunchSettings,
    scenario: Scenario,
    runs: list[PolicyRun],
    facts: dict[str, Any],
    folder: RunFolder,
    display: Display,
) -> dict[str, Any]:
    """Write result.json and report.html of `runs`, and say what they hold."""
    shown = (*POLICIES, AGAIN)
    runs.sort(key=lambda run: (run.seed, shown.index(run.policy) if run.policy in shown else len(shown)))
    result = {**facts, "commit": commit(), "machine": machine(), **summarise(runs)}
    if "dynamix" in result["policies"]:
        result["policies"]["dynamix"]["policy"] = policy_facts(None)
    folder.write_result(result)
    write_report(
        folder.path / "report.html",
        runs,
        result,
        moves=lambda run: moves(scenario, run.time_s, disturbance_seed(settings, run.seed)),
    )
    _say_end(display, runs, result, folder)
    return result


def _disturbed(runs: Sequence[PolicyRun], seed: int) -> list[PolicyRun]:
    """Those that are worth another attempt; all of them had equally many."""
    mine = [run for run in runs if run.seed == seed and run.stolen > MOST_STOLEN and run.attempt < REPEATS]
    return [run for run in mine if run.attempt == min(other.attempt for other in mine)]


def _facts(settings: LaunchSettings, scenario: Scenario, target: float) -> dict[str, Any]:
    return facts_of(
        scenario,
        {seed: settings.order(seed) for seed in range(settings.seed, settings.seed + settings.seeds)},
        command=settings.command,
        workload=settings.workload,
        target=target,
        quick=settings.quick,
        settings={
            "batch_size": settings.batch_size,
            "interval": settings.interval,
            "lr_rule": settings.lr_rule,
            "policies": sorted(settings.order(settings.seed)),
            "mechanism": settings.mechanism,
            "policy": policy_facts(None) if "dynamix" in settings.policies else None,
        },
    )


def _say_end(display: Display, runs: Sequence[PolicyRun], result: dict[str, Any], folder: RunFolder) -> None:
    display.show(result_table(runs), legend(runs, result["target"]))
    for line in [*caveats(result), *ratio_lines(result["ratios"]), *a_a_lines(result["a_a"])]:
        display.say(line)
    display.say(f"report: {folder.path / 'report.html'}")

"""`dynamix bench peers`: live peers and dynamix in turn, on the same emulated hosts, to the same target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dynamix.emulator import Emulation, load_scenario
from dynamix.emulator.cluster import Mechanism
from dynamix.errors import ConfigError, WorkerLostError
from dynamix.events.records import SCHEMA
from dynamix.events.run_folder import RunFolder, commit, machine
from dynamix_lab.harness.display import Display, end_table
from dynamix_lab.harness.launch import LaunchSettings, disturbance_seed
from dynamix_lab.harness.runs import AGAIN, PolicyRun, load_runs, save_runs, summarise
from dynamix_lab.peers import environments
from dynamix_lab.peers.environments import Environment
from dynamix_lab.peers.kinds import BASE_BATCH, PEERS, SHARE_BOUNDS, Peer, split_name
from dynamix_lab.peers.launch import OwnLaunch, PeerLaunch
from dynamix_lab.peers.report import best_of, markdown, ratios_between, write_peers_report
from dynamix_lab.statistics import balanced_order
from dynamix_lab.tasks import make_workload

POLICIES = ("static", "dynamix", "dynamix-256", "dynamix-128")


@dataclass(frozen=True, slots=True)
class PeersPlan:
    """What one call runs.

    policies   dynamix's own, static among them: its time bounds everybody's; with a number, from that global batch
    peers      names as `Peer.of` reads and `Peer.name` writes them
    venvs      folder of the peers' environments; None: in the user's cache
    again      static once more at the end of each seed (the A/A pair)
    """

    scenario: str = "steady-uneven"
    seeds: int = 1
    seed: int = 0
    policies: tuple[str, ...] = POLICIES
    peers: tuple[str, ...] = PEERS
    venvs: Path | None = None
    quick: bool = False
    again: bool = True
    mechanism: Mechanism = "auto"

    def settings(self) -> LaunchSettings:
        """What the demo would run: its own policies, all seeds."""
        policies = tuple(dict.fromkeys(split_name(name)[0] for name in self.policies))
        return LaunchSettings(
            scenario=self.scenario, seeds=self.seeds, seed=self.seed, quick=self.quick, policies=policies,
            mechanism=self.mechanism, command="bench peers",
        )  # fmt: skip

    def launch(self, name: str, seed: int) -> LaunchSettings:
        """One run by itself."""
        return replace(self.settings(), policies=(name,), seeds=1, seed=seed)

    def check(self) -> None:
        """Raises `ConfigError` for what cannot be run, before anything is started."""
        if "static" not in self.policies:
            raise ConfigError("policies", list(self.policies), "static among them", "add static: all ratios are to it")
        self.settings().check()
        least, most = (load_scenario(self.scenario).workers * bound for bound in SHARE_BOUNDS)
        for name in self.policies:
            if not least <= split_name(name)[1] <= most or name.endswith(f"-{BASE_BATCH}"):
                allowed = f"a global batch of {least} to {most}, and none for {BASE_BATCH}"
                raise ConfigError("policies", name, allowed, "correct the number")
        for name in self.peers:
            if Peer.of(name).name != name:
                raise ConfigError("peer", name, Peer.of(name).name, "leave the usual global batch away")

    def order(self, seed: int, present: Sequence[str]) -> list[str]:
        """Static first, since its time bounds the others; then everybody else, in turn; static once more at the end."""
        others = [*(name for name in self.policies if name != "static"), *present]
        return ["static", *balanced_order(others, seed), *([AGAIN] if self.again and not self.quick else [])]


@dataclass
class _Call:
    """One call under way: what the runs share."""

    plan: PeersPlan
    folder: RunFolder
    display: Display
    found: dict[str, Environment | str]
    facts: dict[str, Any]
    runs: list[PolicyRun] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)


def run_peers(
    plan: PeersPlan,
    folder: RunFolder,
    *,
    display: Display | None = None,
    found: Mapping[str, Environment | str] | None = None,
) -> tuple[dict[str, Any], bool]:
    """Run every peer that is there and dynamix beside them; returns result.json and whether every run reached its end.

    found   environments by name, or why there is none; None: prepare them

    A peer without an environment is reported as absent, one that fails in a run as failed and censored there; the rest
    goes on. What `folder` has finished already is not run again. When interrupted, whole seeds are summarised before
    `KeyboardInterrupt` goes on.
    """
    plan.check()
    workload = make_workload(plan.settings().workload)
    target = plan.settings().target(workload)
    display = display or Display(target=target)
    torch.set_num_threads(1)
    wanted = dict.fromkeys(Peer.of(name).environment for name in plan.peers)
    if found is None:
        place = plan.venvs or environments.default_folder()
        found = {name: environments.prepare(name, place, tell=display.say) for name in wanted}
    for name in wanted:
        if isinstance(found[name], str):
            display.say(f"{name} is absent: {found[name]}")
    call = _Call(plan, folder, display, dict(found), {})
    call.facts = _facts(call, target)
    folder.write_run(**call.facts)
    finished = {path.stem for path in _saved(folder, "*").parent.glob("*.json")}
    events = folder.keep_events(lambda event: f"{event['seed']}-{event['policy']}" in finished)
    try:
        with display.live():
            for seed in call.facts["seeds"]:
                for name in call.facts["order"][str(seed)]:
                    path = _saved(folder, f"{seed}-{name}")
                    if path.exists():
                        call.runs += load_runs(path, _must_agree(call, name))
                        call.runs[-1].events = [event for event in events if call.runs[-1].owns(event)]
                    else:
                        call.runs.append(_run_one(call, name, seed))
                        if call.runs[-1].finished:
                            save_runs(path, call.runs[-1:], _must_agree(call, name))
    except KeyboardInterrupt:
        whole = [run for run in call.runs if _is_whole(call, run.seed)]
        if whole:
            _conclude(call, whole, interrupted=True)
            display.say(f"interrupted: go on with --resume --out {folder.path}")
        raise
    result = _conclude(call, call.runs)
    own = [run for run in call.runs if run.policy in (*plan.policies, AGAIN)]
    arrived = all(run.finished and (plan.quick or run.time_to_target_s is not None) for run in own)
    return result, arrived and not call.failures


def _run_one(call: _Call, name: str, seed: int) -> PolicyRun:
    """One run in an emulation of its own, so that nothing of one is left when the next begins."""
    plan, settings = call.plan, call.plan.launch(name, seed)
    workload, runs = make_workload(settings.workload), list(call.runs)
    ranks, of_seed = call.folder.path / "ranks" / str(seed) / name, disturbance_seed(settings, seed)
    with Emulation(plan.scenario, seed=of_seed, run_dir=ranks, mechanism=plan.mechanism, keep_awake=True) as hosts:
        call.facts["mechanisms"] = hosts.mechanisms
        call.folder.write_run(**call.facts)
        if name not in plan.peers:
            OwnLaunch(settings, seed, workload, hosts, call.folder, call.display, runs).run()
            return runs[len(call.runs)]
        peer = Peer.of(name)
        python = _present(call.found, peer).python
        try:
            PeerLaunch(peer, python, settings, seed, workload, hosts, call.folder, call.display, runs).run()
        except WorkerLostError as error:
            call.display.say(f"seed {seed}, {name} failed: {error}")
            call.failures.append({"peer": name, "seed": seed, "reason": str(error)})
    return runs[len(call.runs)] if len(runs) > len(call.runs) else PolicyRun(name, seed, settings.target(workload))


def _facts(call: _Call, target: float) -> dict[str, Any]:
    plan, scenario = call.plan, load_scenario(call.plan.scenario)
    seeds = range(plan.seed, plan.seed + plan.seeds)
    absent = {n: e for n in plan.peers if isinstance(e := call.found[Peer.of(n).environment], str)}
    present = [n for n in plan.peers if n not in absent]
    command = f"bench peers --scenario {plan.scenario} --seeds {plan.seeds} --seed {plan.seed}"
    return {
        "schema": SCHEMA,
        "command": command + (" --quick" if plan.quick else ""),
        "cluster": "emulator",
        "scenario": scenario.name,
        "scenario_sha256": scenario.sha256,
        "workload": plan.settings().workload,
        "target": target,
        "seeds": list(seeds),
        "order": {str(seed): plan.order(seed, present) for seed in seeds},
        "settings": {"quick": plan.quick, "mechanism": plan.mechanism},
        "peers": {n: _about(Peer.of(n), call.found, scenario.workers) for n in present},
        "absent": absent,
    }


def _about(peer: Peer, found: Mapping[str, Environment | str], workers: int) -> dict[str, Any]:
    environment = _present(found, peer)
    return {"global_batch": peer.total, "settings": peer.settings(workers), "versions": environment.versions}


def _present(found: Mapping[str, Environment | str], peer: Peer) -> Environment:
    environment = found[peer.environment]
    assert isinstance(environment, Environment), "only who is present is ordered"
    return environment


def _saved(folder: RunFolder, name: str) -> Path:
    return folder.path / "finished" / f"{name}.json"


def _is_whole(call: _Call, seed: int) -> bool:
    order: list[str] = call.facts["order"][str(seed)]
    return [run.policy for run in call.runs if run.seed == seed] == order


def _must_agree(call: _Call, name: str) -> dict[str, Any]:
    """What a run that is taken over from an earlier call must have in common with this one."""
    names = ("schema", "scenario_sha256", "workload", "target", "settings")
    about = {"peer": call.facts["peers"].get(name)}
    return {"commit": commit(), "machine": machine(), **about, **{key: call.facts[key] for key in names}}


def _conclude(call: _Call, runs: Sequence[PolicyRun], *, interrupted: bool = False) -> dict[str, Any]:
    """Write result.json, table.md and report.html of `runs`, and say what they hold."""
    summary = summarise(runs)
    summary["ratios"] |= ratios_between(summary["policies"], [n for n in call.plan.policies if n != "static"])
    result = {**call.facts, "commit": commit(), "machine": machine(), "failures": call.failures, **summary}
    result["best"] = best_of(summary["ratios"], [n for n in summary["policies"] if n != AGAIN])
    if interrupted:
        result["interrupted"] = True
    call.folder.write_result(result)
    (call.folder.path / "table.md").write_text(markdown(result), encoding="utf-8")
    write_peers_report(call.folder.path / "report.html", runs, result)
    call.display.console.print(end_table(runs, target=result["target"]))
    call.display.say(f"report: {call.folder.path / 'report.html'}")
    return result

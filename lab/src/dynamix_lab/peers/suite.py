"""`dynamix bench peers`: peers and dynamix in turn, on the same emulated hosts, to the same target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from dynamix.errors import ConfigError, WorkerLostError
from dynamix.events.records import read_events
from dynamix.events.run_folder import RunFolder, commit, machine
from dynamix_lab.emulator import Emulation, load_scenario
from dynamix_lab.emulator.cluster import Mechanism
from dynamix_lab.emulator.scenario import Scenario
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.folder import keep_events
from dynamix_lab.harness.runs import AGAIN, PolicyRun, file_name, summarise
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.peers import environments
from dynamix_lab.peers.environments import Environment
from dynamix_lab.peers.kinds import BASE_BATCH, PEERS, SHARE_BOUNDS, Peer, own_name, split_name
from dynamix_lab.peers.launch import Contender, Launch
from dynamix_lab.peers.portable import check_portable
from dynamix_lab.peers.report import best_of, best_score, page, ratios_between, table
from dynamix_lab.peers.settings import LaunchSettings, disturbance_seed
from dynamix_lab.statistics import balanced_order
from dynamix_lab.tasks import make_workload

POLICIES = ("static", "dynamix", "dynamix-256", "dynamix-128")


@dataclass(frozen=True, slots=True)
class PeersPlan:
    """The runs of one call.

    policies   dynamix's own, including static, whose time bounds all others'. A name may include an initial global
               batch and a learning rate, as in dynamix-256-lr0.2
    peers      names as `Peer.of` reads and `Peer.name` writes them
    venvs      folder of the peers' environments; None: in the user's cache
    workload   what is trained
    clock_s    ends every run after this time instead of at the target
    again      static once more at the end of each seed (the A/A pair)
    """

    scenario: str = "steady-uneven"
    seeds: int = 1
    seed: int = 0
    policies: tuple[str, ...] = POLICIES
    peers: tuple[str, ...] = PEERS
    venvs: Path | None = None
    workload: str = "mnist1d"
    clock_s: float | None = None
    quick: bool = False
    again: bool = True
    mechanism: Mechanism = "auto"

    def settings(self) -> LaunchSettings:
        """The settings of all our own policies with all seeds."""
        policies = tuple(dict.fromkeys(split_name(name)[0] for name in self.policies))
        return LaunchSettings(
            scenario=self.scenario,
            seeds=self.seeds,
            seed=self.seed,
            quick=self.quick,
            policies=policies,
            mechanism=self.mechanism,
            workload=self.workload,
            clock_s=self.clock_s,
        )

    def launch(self, name: str, seed: int) -> LaunchSettings:
        """The settings of one run."""
        return replace(self.settings(), policies=(name,), seeds=1, seed=seed)

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be run, before anything is started."""
        if "static" not in self.policies:
            raise ConfigError("policies", list(self.policies), "static among them", "add static: all ratios are to it")
        self.settings().check()
        check_portable(make_workload(self.workload))
        least, most = (load_scenario(self.scenario).workers * bound for bound in SHARE_BOUNDS)
        for name in self.policies:
            policy, total = split_name(name)
            if not least <= total <= most or name != own_name(name):
                allowed = (
                    f"a global batch of {least} to {most}, none for {BASE_BATCH}, and a rate, as in {policy}-256-lr0.1"
                )
                raise ConfigError("policies", name, allowed, "correct the number, and leave other settings to peers")
        for name in self.peers:
            if Peer.of(name).name != name:
                raise ConfigError("peer", name, Peer.of(name).name, "leave the usual values away")

    def order(self, seed: int, present: Sequence[str]) -> list[str]:
        """Static first, because its time bounds the others; then all others in turn; static once more at the end."""
        others = [*(name for name in self.policies if name != "static"), *present]
        return ["static", *balanced_order(others, seed), *([AGAIN] if self.again and not self.quick else [])]


@dataclass(frozen=True)
class PeersSuite(Suite):
    """`dynamix bench peers`: a cell is one run, of a peer or of a policy of dynamix, with one seed.

    display        shows the user the progress
    environments   by name, or the reason why there is none; `prepared` makes them

    A peer without an environment is reported as absent. A peer that fails in a run is reported as failed and censored
    there. The rest continues.
    """

    plan: PeersPlan
    folder: RunFolder
    display: Display
    environments: Mapping[str, Environment | str]
    name: str = "peers"
    grows: ClassVar[frozenset[str]] = frozenset({"seeds", "policies", "peers", "venvs", "again"})

    @property
    def present(self) -> list[str]:
        """Peers that can run."""
        return [name for name in self.plan.peers if name not in self.absent]

    @property
    def absent(self) -> dict[str, str]:
        """Peers that cannot run, and why."""
        found = {name: self.environments[Peer.of(name).environment] for name in self.plan.peers}
        return {name: why for name, why in found.items() if isinstance(why, str)}

    def facts(self) -> dict[str, Any]:
        plan, scenario = self.plan, load_scenario(self.plan.scenario)
        settings = plan.settings()
        seeds = list(range(plan.seed, plan.seed + plan.seeds))
        return {
            "cluster": "emulator",
            "scenario": scenario.name,
            "scenario_sha256": scenario.sha256,
            "workload": settings.workload,
            "target": settings.target(make_workload(settings.workload)),
            "seeds": seeds,
            "order": {str(seed): plan.order(seed, self.present) for seed in seeds},
            "settings": {"quick": plan.quick, "mechanism": plan.mechanism, "clock_s": plan.clock_s},
            "peers": {name: self._about(Peer.of(name), scenario) for name in self.present},
            "absent": self.absent,
        }

    def bound_to(self) -> dict[str, Any]:
        facts = self.facts()
        same = {key: facts[key] for key in ("scenario_sha256", "workload", "target")}
        same |= {"clock_s": self.plan.clock_s}
        peers = {f"peer {name}": about for name, about in facts["peers"].items()}
        return {"commit": commit(), "machine": machine(), **same, **peers}

    def cells(self) -> list[Cell]:
        plan = self.plan
        seeds = range(plan.seed, plan.seed + plan.seeds)
        return [Cell(_key(seed, n), (seed, n)) for seed in seeds for n in plan.order(seed, self.present)]

    def begin(self, found: Mapping[str, Any]) -> None:
        """Drop events of unfinished runs."""
        for name in dict.fromkeys(Peer.of(name).environment for name in self.absent):
            self.display.say(f"{name} is absent: {self.environments[name]}")
        keep_events(self.folder, lambda event: _key(event["seed"], event["policy"]) in found)

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        """Make one run in its own emulation, so that nothing remains of it when the next begins."""
        seed, name = cell.what
        torch.set_num_threads(1)
        plan, settings = self.plan, self.plan.launch(name, seed)
        workload, failure = make_workload(settings.workload), None
        runs = [PolicyRun.from_dict(cell["run"]) for cell in context.found.values()]
        before = len(runs)
        ranks, of_seed = self.folder.path / "ranks" / str(seed) / name, disturbance_seed(settings, seed)
        with (
            self.display.live(),
            Emulation(plan.scenario, seed=of_seed, run_dir=ranks, mechanism=plan.mechanism, keep_awake=True) as hosts,
        ):
            shared = (settings, seed, workload, hosts, self.folder, self.display, runs)
            if name not in plan.peers:
                Launch(Contender.own(name, settings, seed, workload), *shared).run()
            else:
                python = self._environment(Peer.of(name)).python
                try:
                    Launch(Contender.peer(name, python, hosts.scenario), *shared).run()
                except WorkerLostError as error:
                    self.display.say(f"seed {seed}, {name} failed: {error}")
                    failure = {"peer": name, "seed": seed, "reason": str(error)}
            mechanisms = hosts.mechanisms
            overran = max((rank.overruns / rank.steps for rank in hosts.overruns() if rank.steps), default=None)
        ran = runs[before] if len(runs) > before else PolicyRun(name, seed, settings.target(workload))
        return {"run": ran.to_dict(), "failure": failure, "mechanisms": mechanisms, "overran": overran}

    def keeps(self, found: Mapping[str, Any]) -> bool:
        return bool(found["run"]["finished"])

    def whole(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        plan = self.plan
        kept: dict[str, Any] = {}
        for seed in range(plan.seed, plan.seed + plan.seeds):
            keys = [_key(seed, name) for name in plan.order(seed, self.present)]
            kept |= {key: found[key] for key in keys} if all(key in found for key in keys) else {}
        return kept

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        plan, runs = self.plan, self.runs(cells)
        summary = summarise(runs)
        summary["ratios"] |= ratios_between(summary["policies"], [n for n in plan.policies if n != "static"])
        for cell in cells.values():
            summary["policies"][cell["run"]["policy"]].setdefault("overran", []).append(cell["overran"])
        names = [name for name in summary["policies"] if name != AGAIN]
        best = best_of(summary["ratios"], names) if plan.clock_s is None else best_score(summary["policies"], names)
        failures = [cell["failure"] for cell in cells.values() if cell["failure"]]
        own = [run for run in runs if run.policy in (*plan.policies, AGAIN)]
        ends_anyway = plan.quick or plan.clock_s is not None
        arrived = all(run.finished and (ends_anyway or run.time_to_target_s is not None) for run in own)
        return {
            "mechanisms": next(iter(cells.values()))["mechanisms"],
            "failures": failures,
            **summary,
            "best": best,
            "arrived": arrived and not failures,
        }

    def runs(self, cells: Mapping[str, Any]) -> list[PolicyRun]:
        """The runs of these cells, with their events."""
        runs = [PolicyRun.from_dict(cell["run"]) for cell in cells.values()]
        path = self.folder.path / "events.jsonl"
        events = read_events(path) if path.exists() else []
        for run in runs:
            run.events = [event for event in events if run.owns(event)]
        return runs

    def table(self, result: Mapping[str, Any]) -> str:
        return table(result).markdown()

    def page(self, result: Mapping[str, Any]) -> str:
        return page(result)

    def _about(self, peer: Peer, scenario: Scenario) -> dict[str, Any]:
        versions = self._environment(peer).versions
        about = {"global_batch": peer.total, "learning_rate": peer.learning_rate or "the workload's"}
        return {**about, "settings": peer.settings(scenario), "versions": versions}

    def _environment(self, peer: Peer) -> Environment:
        environment = self.environments[peer.environment]
        assert isinstance(environment, Environment), "only who is present runs"
        return environment


def prepared(plan: PeersPlan, tell: Callable[[str], None]) -> dict[str, Environment | str]:
    """The environments of the plan's peers by name, made if missing, or the reason why there is none."""
    place = plan.venvs or environments.default_folder()
    wanted = dict.fromkeys(Peer.of(name).environment for name in plan.peers)
    return {name: environments.prepare(name, place, tell=tell) for name in wanted}


def _key(seed: int, name: str) -> str:
    return f"{seed}-{file_name(name)}"

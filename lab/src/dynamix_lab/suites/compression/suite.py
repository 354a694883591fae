"""`dynamix bench compression`: gradient exchanges compared on emulated hosts with shaped links, resumable by cell.

A cell is a job, a link rate and a number of hosts. All ways take turns within one launch, in random balanced order,
dense twice (the A/A pair), so that ratios compare runs under the same load. Hosts have no CPU quota: they share the
machine's cores.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dynamix.errors import ConfigError, EmulationError, WorkerLostError
from dynamix.events.run_folder import commit
from dynamix_lab.emulator import Emulation, Scenario, load_scenario
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import sections_markdown
from dynamix_lab.suites.compression.certificates import have_openssl, make_certificates
from dynamix_lab.suites.compression.exchanges import AGAIN, AGGREGATED, ON_HOST, SPARSE_TENSORS, WAYS
from dynamix_lab.suites.compression.jobs import EMBEDDINGS, JOBS, LARGE, SPARSEST
from dynamix_lab.suites.compression.report import sections
from dynamix_lab.suites.compression.summary import join, judge, summarise

RATES_MBIT_S = (100, 1000)
LEAST_RATE_MBIT_S = 1000  # for large jobs
WORKERS = (4, 8)
QUICK_JOBS = ("ratings", "moe")
CORES_USED = 0.9  # of the machine's, declared for the hosts; no quota is ever put in force
LEAST_CORES = 0.02  # declared for the aggregator's host
TIMEOUT_S = 120  # of the process group
GRACE_S = 20.0
START_S = 60.0  # time for the aggregator to begin listening
LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """The settings of one call.

    jobs, rates_mbit_s, workers   every combination is a cell, except large jobs on links below `LEAST_RATE_MBIT_S`
    rounds, steps     turns per way, and the least number of timed steps per turn
    turn_s            least seconds of a turn's timed steps; 0: exactly `steps`
    ways              from `exchanges.WAYS`, including dense twice
    options           of the job `ratings`, for tests
    warm_up           untimed steps before each turn; tests do without
    """

    jobs: tuple[str, ...] = JOBS
    rates_mbit_s: tuple[int, ...] = RATES_MBIT_S
    workers: tuple[int, ...] = WORKERS
    rounds: int = 3
    steps: int = 3
    turn_s: float = 0.5
    seed: int = 0
    ways: tuple[str, ...] = WAYS
    options: dict[str, Any] = field(default_factory=dict)
    warm_up: bool = True

    @classmethod
    def of(cls, *, quick: bool = False, **chosen: Any) -> CompressionPlan:
        """The full matrix; `quick`: two jobs, four hosts, the slower link. A value of `chosen` that is None changes
        nothing.
        """
        usual: dict[str, Any] = (
            {"jobs": QUICK_JOBS, "rates_mbit_s": (100,), "workers": (4,), "steps": 4} if quick else {}
        )
        return cls(**{**usual, **{name: value for name, value in chosen.items() if value is not None}})

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be run, before anything is started."""
        for name, given, known in (("workloads", self.jobs, JOBS), ("ways", self.ways, WAYS)):
            for one in given:
                if one not in known:
                    raise ConfigError(name, one, ", ".join(known), "check the spelling")
        if not {"dense", AGAIN} <= set(self.ways):
            raise ConfigError("ways", list(self.ways), f"dense and {AGAIN} among them", "all ratios are to dense")
        for name, values, low, high in (
            ("workers", self.workers, 2, 16),
            ("rates", self.rates_mbit_s, 1, 10_000),
            ("rounds", (self.rounds,), 1, 1000),
            ("steps", (self.steps,), 1, 10_000),
            ("seed", (self.seed,), 0, 2**31 - 1),
        ):
            for value in values:
                if not low <= value <= high:
                    raise ConfigError(name, value, f"{low} to {high}", "check the argument")
        if not 0 <= self.turn_s <= 60:
            raise ConfigError("turn_s", self.turn_s, "0 to 60", "check the argument")

    def cells(self) -> list[CompressionCell]:
        """The sparsest job on the slowest link first, so that an interrupted call has it."""
        jobs = sorted(self.jobs, key=lambda job: (job != SPARSEST, JOBS.index(job)))
        return [
            CompressionCell(job, rate, w)
            for rate in sorted(self.rates_mbit_s)
            for job in jobs
            for w in sorted(self.workers)
            if job not in LARGE or rate >= LEAST_RATE_MBIT_S
        ]


@dataclass(frozen=True, slots=True)
class CompressionCell:
    """One launch.

    >>> CompressionCell("ratings", 100, 4).name
    'ratings-4x100'
    """

    job: str
    rate_mbit_s: int
    workers: int

    @property
    def name(self) -> str:
        return f"{self.job}-{self.workers}x{self.rate_mbit_s}"

    def scenario(self) -> Scenario:
        """Equal hosts and one without a rank, for an aggregator. Each has its own link to one switch."""
        cores = len(os.sched_getaffinity(0))
        host = {"cpu": round(CORES_USED * cores / self.workers, 3), "rate_mbit_s": float(self.rate_mbit_s)}
        return load_scenario({"name": self.name, "hosts": [*[host] * self.workers, {**host, "cpu": LEAST_CORES}]})

    def ways(self, plan: CompressionPlan) -> tuple[str, ...]:
        """The plan's ways that make sense for this job."""
        unfit = set() if self.job in EMBEDDINGS else set(SPARSE_TENSORS)
        return tuple(way for way in plan.ways if way not in unfit)

    def config(self, plan: CompressionPlan, folder: Path) -> dict[str, Any]:
        """The settings for its ranks."""
        return {
            "job": self.job,
            "options": plan.options,
            "seed": plan.seed,
            "out": str(folder),
            "timeout_s": TIMEOUT_S,
            "ways": self.ways(plan),
            "rounds": plan.rounds,
            "steps": plan.steps,
            "turn_s": plan.turn_s,
            "warm_up": plan.warm_up,
        }


@dataclass(frozen=True)
class CompressionSuite(Suite):
    """`dynamix bench compression`. More jobs, rates and hosts can be added to a folder."""

    plan: CompressionPlan
    name: str = "compression"
    grows: ClassVar[frozenset[str]] = frozenset({"jobs", "rates_mbit_s", "workers"})

    def facts(self) -> dict[str, Any]:
        hashes = {cell.name: cell.scenario().sha256 for cell in self.plan.cells()}
        return {"cluster": "emulator", "seeds": [self.plan.seed], "scenario_sha256": hashes}

    def cells(self) -> list[Cell]:
        return [Cell(cell.name, (cell,)) for cell in self.plan.cells()]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        (one,) = cell.what
        ranks = context.folder.path / "ranks" / one.name
        found = _run_cell(one, self.plan, ranks, lambda done: context.tell(one.name, done))
        return {**found, "commit": commit()}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        mechanisms = next(iter(cells.values()))["mechanisms"]
        return {"mechanisms": mechanisms, "target": judge(cells), **join(cells), "cells": dict(cells)}

    def table(self, result: Mapping[str, Any]) -> str:
        return sections_markdown(sections(result))


def _run_cell(
    cell: CompressionCell, plan: CompressionPlan, folder: Path, tell: Callable[[float], None]
) -> dict[str, Any]:
    """Launch the cell's ranks and follow them to their end. Returns the result of `summarise`."""
    config = cell.config(plan, folder)
    turns = config["rounds"] * len(config["ways"])
    load = os.getloadavg()[0]
    began = time.monotonic()
    with Emulation(cell.scenario(), seed=plan.seed, run_dir=folder, keep_awake=True) as hosts:
        aggregated = [way for way in config["ways"] if way in AGGREGATED]
        config["aggregators"] = {way: _start_aggregator(hosts, folder, way) for way in aggregated}
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "dynamix_lab.suites.compression.worker", str(path)]
        hosts.launch(command, env={"WORLD_SIZE": str(cell.workers)})
        _follow(hosts, folder, lambda done: tell(done / turns), began)
        mechanisms = hosts.mechanisms
    ranks = [json.loads((folder / f"measured{rank}.json").read_text()) for rank in range(cell.workers)]
    return {
        "job": cell.job,
        "rate_mbit_s": cell.rate_mbit_s,
        "workers": cell.workers,
        "mechanisms": mechanisms,
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
        "wall_s": round(time.monotonic() - began, 1),
        **summarise(ranks),
    }


def _start_aggregator(hosts: Emulation, folder: Path, way: str) -> dict[str, str]:
    """Start an aggregator for one way, in the switch or on the host without a rank. Address, token, certificates."""
    host = hosts.scenario.workers - 1 if way == ON_HOST else None
    at = hosts.switch_address if host is None else hosts.address(host)
    if not have_openssl():
        raise EmulationError("an aggregator beyond loopback needs certificates: install openssl, or leave its ways out")
    private = (folder / way).resolve()
    servers, workers = make_certificates(private, at)
    token = private / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    command = [sys.executable, "-m", "dynamix.cli.app", "aggregator"]
    options = ["--host", at, "--port", "0", "--token-file", str(token)]
    options += ["--tls-cert", servers.cert, "--tls-key", servers.key, "--tls-ca", servers.ca]
    process = hosts.launch_beside([*command, *options], name=way, host=host)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        said = (folder / f"{way}.out").read_text(errors="replace")
        if said.startswith("listening on ") and "\n" in said:
            files = {"tls_cert": workers.cert, "tls_key": workers.key, "tls_ca": workers.ca}
            return {"address": said.split()[2], "token": token.read_text(), **files}
        time.sleep(0.1)
    errors = (folder / f"{way}.err").read_text(errors="replace").splitlines()
    raise EmulationError(f"the aggregator did not start: {errors[-1] if errors else 'it wrote nothing'}; see {folder}")


def _follow(hosts: Emulation, folder: Path, tell: Callable[[float], None], began: float) -> None:
    """Raise `WorkerLostError` with the end of a rank's output if it fails, or if all take too long."""
    while None in (codes := hosts.poll()) and not any(codes):
        if time.monotonic() - began > LONGEST_S:
            hosts.terminate()
            raise WorkerLostError(f"the ranks of {folder.name} took longer than {LONGEST_S:.0f} s; see {folder}")
        tell((folder / "rank0.out").read_text(errors="replace").count("\n"))
        time.sleep(0.3)
    first = next((rank for rank, code in enumerate(codes) if code), None)  # the others end because of it
    hosts.wait(GRACE_S, grace_s=GRACE_S)
    if first is not None:
        errors = folder / f"rank{first}.err"
        lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
        said = lines[-1] if lines else "it wrote nothing"
        raise WorkerLostError(f"rank {first} ended with {codes[first]}: {said} (all of it in {errors})")

"""`dynamix bench agent`: does an agent that sets batch and rate beat the best rule with a cosine, on kinds of jobs that
it has not met? Its jobs, its trainings, the choice among them, and the test, each a resumable cell.

The gate, fixed beforehand: at least 5 % less time than the best rule on the held-back kinds together, the interval
above 0, and no kind that takes more than 2 % longer.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix.window import Floats
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import Section, Table, sections_markdown
from dynamix_lab.statistics import paired_ratio
from dynamix_lab.training.agent import LEARNERS, RULES, Agent, Rule, costs, packed, prepared, unpacked
from dynamix_lab.training.real_jobs import HELD_BACK, LEARNED, RealJob, drawn

PART = 8  # jobs that a cell prepares
SEEDS = {"learn": 11, "choose": 930_011, "test": 940_011}
GAIN, HARM = 0.95, 1.02  # of the gate


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """The settings of one call.

    learn, choose, test   jobs to learn on, to choose by, and of each held-back kind
    blocks, block        how often each learner is kept, and after how many generations or updates
    repeats              trainings of each job when agents are compared
    """

    learn: int = 64
    choose: int = 256
    test: int = 32
    blocks: int = 6
    block: int = 20
    repeats: int = 2

    @classmethod
    def of(cls, *, quick: bool) -> AgentPlan:
        """All of it (about eight hours of a core), or a look."""
        return cls(8, 4, 1, 1, 1, 1) if quick else cls()

    def check(self) -> None:
        """Raises `ConfigError` for a plan that learns or tests nothing."""
        for name in ("learn", "choose", "test", "blocks", "block", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "1 or more", "ask for some")


@dataclass(frozen=True)
class AgentSuite(Suite):
    """`dynamix bench agent`."""

    plan: Any
    name: str = "agent"

    def facts(self) -> dict[str, Any]:
        return {"cluster": "real trainings, computed time", "seeds": list(SEEDS.values()), "scenario_sha256": None}

    def means(self, folder: RunFolder) -> AbstractContextManager[Executor]:
        return ProcessPoolExecutor(len(os.sched_getaffinity(0)))

    def cells(self) -> list[Cell]:
        p = self.plan
        jobs = [Cell(f"jobs-{what}-{i}", ("jobs", what, i)) for what in SEEDS for i in range(self._parts(what))]
        learning = [Cell(f"{name}-{i}", ("learn", name, i)) for name in LEARNERS for i in range(p.blocks)]
        check = [Cell(f"check-{name}-{i}", ("check", name, i)) for name in LEARNERS for i in self._kept()]
        return [*jobs, *learning, Cell("check-rules", ("check", "rules", 0)), *check, Cell("test", ("test",))]

    def _parts(self, what: str) -> int:
        jobs = self.plan.test * len(HELD_BACK) if what == "test" else getattr(self.plan, what)
        return -(-jobs // PART)

    def _kept(self) -> list[int]:
        """The blocks after which a learner is looked at: half way, three quarters, the end."""
        return sorted({max(round(self.plan.blocks * part) - 1, 0) for part in (0.5, 0.75, 1.0)})

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        kind, *rest = cell.what
        return {"jobs": self._prepare, "learn": self._learn, "check": self._check, "test": self._test}[kind](
            context, *rest
        )

    def _prepare(self, context: Context, what: str, i: int) -> dict[str, Any]:
        kinds = HELD_BACK if what == "test" else LEARNED
        some = drawn(kinds, PART * self._parts(what), SEEDS[what])[PART * i : PART * (i + 1)]
        return {"jobs": [None if job is None else dataclasses.asdict(job) for job in context.means.map(prepared, some)]}

    def _jobs(self, found: Mapping[str, Any], what: str) -> list[RealJob]:
        kept = [job for i in range(self._parts(what)) for job in found[f"jobs-{what}-{i}"]["jobs"]]
        return [RealJob.from_dict(job) for job in kept if job is not None]

    def _learn(self, context: Context, name: str, i: int) -> dict[str, Any]:
        learner = unpacked(context.found[f"{name}-{i - 1}"]["learner"]) if i else LEARNERS[name](7)
        jobs, told = self._jobs(context.found, "learn"), list[float]()
        for n in range(self.plan.block):
            told.append(round(learner.go_on(jobs, context.means), 4))
            context.tell(f"{name} {learner.generation}: {told[-1]:.3f} of adapt's time", n / self.plan.block)
        return {"learner": packed(learner), "told": told}

    def _check(self, context: Context, name: str, i: int) -> dict[str, Any]:
        agents: list[Agent] = [Rule(rule) for rule in RULES]
        if name != "rules":
            agents = [unpacked(context.found[f"{name}-{i}"]["learner"]).agent]
        found = costs(context.means, agents, self._jobs(context.found, "choose"), range(self.plan.repeats)).mean((1, 2))
        return {"costs": [float(c) for c in found]}

    def chosen(self, found: Mapping[str, Any]) -> tuple[str, str]:
        """The rule and the checkpoint that are best on the jobs to choose by."""
        rules = dict(zip(RULES, found["check-rules"]["costs"], strict=True))
        names = [f"{name}-{i}" for name in LEARNERS for i in self._kept()]
        return min(rules, key=rules.__getitem__), min(names, key=lambda name: found[f"check-{name}"]["costs"][0])

    def _test(self, context: Context) -> dict[str, Any]:
        rule, best = self.chosen(context.found)
        jobs = self._jobs(context.found, "test")
        agents: list[Agent] = [Rule(rule), unpacked(context.found[best]["learner"]).agent]
        found = costs(context.means, agents, jobs, range(self.plan.repeats)).mean(2)
        return {"rule": rule, "agent": best, "kinds": [job.kind for job in jobs], "costs": found.tolist()}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        test = cells["test"]
        rule, mine = (np.exp(np.array(each)) for each in test["costs"])
        kinds = np.array(test["kinds"])
        ratios = {kind: _ratio(mine[kinds == kind], rule[kinds == kind]) for kind in dict.fromkeys(test["kinds"])}
        whole = _ratio(mine, rule)
        passed = whole["median"] <= GAIN and whole["high"] < 1 and all(r["median"] <= HARM for r in ratios.values())
        checked = {key.removeprefix("check-"): cell["costs"] for key, cell in cells.items() if key.startswith("check-")}
        told = {name: [x for i in range(self.plan.blocks) for x in cells[f"{name}-{i}"]["told"]] for name in LEARNERS}
        return {
            **{"target": None, "rule": test["rule"], "agent": test["agent"], "whole": whole, "kinds": ratios},
            **{"passed": bool(passed), "checked": checked, "told": told, "jobs": len(kinds)},
        }

    def table(self, result: Mapping[str, Any]) -> str:
        rows = [[kind, _text(ratio)] for kind, ratio in {**result["kinds"], "all": result["whole"]}.items()]
        over = f"time over that of {result['rule']}"
        checks = [
            [name, *(f"{float(np.exp(c)):.3f}" for c in costs_of)] for name, costs_of in result["checked"].items()
        ]
        return sections_markdown(
            [
                Section("Held-back kinds", [f"Gate passed: {result['passed']}."], Table(["kind", over], rows)),
                Section(
                    "Jobs to choose by",
                    table=Table(["who", "time over a fixed batch's", ""], [[*row, ""][:3] for row in checks]),
                ),
            ]
        )


def _ratio(mine: Floats, theirs: Floats) -> dict[str, Any]:
    return paired_ratio(mine.tolist(), theirs.tolist()).to_dict()


def _text(ratio: Mapping[str, Any]) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"

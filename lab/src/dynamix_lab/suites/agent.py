"""`dynamix bench agent`: does an agent that sets batch and rate beat the best rule with a cosine, on kinds of jobs that
it has not met? Its jobs, its trainings, the choice among them, and the test, each a resumable cell.

The gate, fixed beforehand: on the held-back kinds together at most 0.95 of the time of the best rule, the interval
below 1, and no kind above 1.02. An agent whose gain is the rate's alone is a schedule, which needs no agent: so it must
also take less time than the best rule under the learned schedule, the interval below 1.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import Section, Table, sections_markdown
from dynamix_lab.statistics import paired_ratio
from dynamix_lab.training.agent import LEARNERS, RULES, UPDATES, Agent, Linear, costs, packed, prepared, unpacked
from dynamix_lab.training.real_jobs import HELD_BACK, LEARNED, RealJob, drawn

PART = 8  # jobs that a cell prepares
SEEDS = {"learn": 11, "choose": 930_011, "test": 940_011}
GAIN, HARM = 0.95, 1.02  # of the gate


SCHEDULE = "schedule"
BLOCK = 10  # updates between two that are stored


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """The settings of one call.

    learn, choose, test   jobs to learn on, to choose by, and of each held-back kind
    updates               the part of each learner's updates that is made
    repeats               trainings of each job in the test; a job to choose by is trained once
    """

    learn: int = 64
    choose: int = 128
    test: int = 32
    updates: float = 1.0
    repeats: int = 1

    @classmethod
    def of(cls, *, quick: bool) -> AgentPlan:
        """All of it (about four hours of a core), or a look."""
        return cls(8, 4, 1, 0.02, 1) if quick else cls()

    def check(self) -> None:
        """Raises `ConfigError` for a plan that learns or tests nothing."""
        for name in ("learn", "choose", "test", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "1 or more", "ask for some")

    def of_learner(self, name: str) -> list[int]:
        """Its updates, in blocks."""
        count = max(round(UPDATES[name] * self.updates), 1)
        return [min(BLOCK, count - done) for done in range(0, count, BLOCK)]


@dataclass(frozen=True)
class AgentSuite(Suite):
    """`dynamix bench agent`."""

    plan: Any
    name: str = "agent"

    def facts(self) -> dict[str, Any]:
        return {"cluster": "real trainings, computed time", "seeds": list(SEEDS.values()), "scenario_sha256": None}

    def means(self, folder: RunFolder) -> AbstractContextManager[Executor]:
        return ProcessPoolExecutor(len(os.sched_getaffinity(0)), initializer=torch.set_num_threads, initargs=(1,))

    def cells(self) -> list[Cell]:
        sets = ("learn", "test", "choose")
        jobs = [Cell(f"jobs-{what}-{i}", ("jobs", what, i)) for what in sets for i in range(self._parts(what))]
        blocks = [(name, i) for name in LEARNERS for i in range(len(self.plan.of_learner(name)))]
        learning = [Cell(f"{name}-{i}", ("learn", name, i)) for name, i in blocks]
        first = self._parts("learn")
        return [
            *jobs[:first],
            *learning,
            *jobs[first:],
            Cell("choose", ("ask", "choose")),
            Cell("test", ("ask", "test")),
        ]

    def _parts(self, what: str) -> int:
        jobs: int = {"learn": self.plan.learn, "choose": self.plan.choose, "test": self.plan.test * len(HELD_BACK)}[
            what
        ]
        return -(-jobs // PART)

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        kind, *rest = cell.what
        ways: dict[str, Callable[..., dict[str, Any]]]
        ways = {"jobs": self._prepare, "learn": self._learn, "ask": self._ask}
        return ways[kind](context, *rest)

    def _prepare(self, context: Context, what: str, i: int) -> dict[str, Any]:
        kinds = HELD_BACK if what == "test" else LEARNED
        some = drawn(kinds, PART * self._parts(what), SEEDS[what])[PART * i : PART * (i + 1)]
        return {"jobs": [None if job is None else dataclasses.asdict(job) for job in context.means.map(prepared, some)]}

    def _jobs(self, found: Mapping[str, Any], what: str) -> list[RealJob]:
        kept = [job for i in range(self._parts(what)) for job in found[f"jobs-{what}-{i}"]["jobs"]]
        return [RealJob.from_dict(job) for job in kept if job is not None]

    def _learn(self, context: Context, name: str, i: int) -> dict[str, Any]:
        learner = unpacked(context.found[f"{name}-{i - 1}"]["learner"]) if i else LEARNERS[name](7)
        jobs, told, updates = self._jobs(context.found, "learn"), list[float](), self.plan.of_learner(name)[i]
        for n in range(updates):
            told.append(round(learner.go_on(jobs, context.means), 4))
            context.tell(f"{name} {learner.generation}: {told[-1]:.3f} of adapt's time", n / updates)
        weights = learner.agent.weights if isinstance(learner.agent, Linear) else ()
        return {"learner": packed(learner), "told": told, "weights": [float(w) for w in weights]}

    def rows(self, found: Mapping[str, Any]) -> dict[str, Agent]:
        """Who is compared: rules, rules under the learned schedule, agents, and two halves of an agent."""
        rows: dict[str, Agent] = {name: Linear((), name) for name in RULES}
        for name in LEARNERS:
            rows[name] = unpacked(found[f"{name}-{len(self.plan.of_learner(name)) - 1}"]["learner"]).agent
        schedule, four = rows.pop(SCHEDULE), rows["four"]
        assert isinstance(schedule, Linear)
        assert isinstance(four, Linear)
        rows |= {f"{name}, {SCHEDULE}": schedule.beside(name) for name in RULES}
        return rows | {f"four, {only} only": four.beside("adapt", only=only) for only in ("batch", "rate")}

    def _ask(self, context: Context, what: str) -> dict[str, Any]:
        jobs, rows = self._jobs(context.found, what), self.rows(context.found)
        if what == "choose":  # the halves of an agent explain the test
            rows = {name: row for name, row in rows.items() if not name.endswith("only")}
        repeats = range(self.plan.repeats if what == "test" else 1)
        found = costs(context.means, list(rows.values()), jobs, repeats).mean(2)
        return {"kinds": [job.kind for job in jobs], "costs": dict(zip(rows, found.tolist(), strict=True))}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        choose, test = cells["choose"]["costs"], cells["test"]["costs"]
        means = {name: float(np.mean(each)) for name, each in choose.items()}
        scheduled = [f"{name}, {SCHEDULE}" for name in RULES]
        rule, best = min(RULES, key=means.__getitem__), min(set(LEARNERS) - {SCHEDULE}, key=means.__getitem__)
        sceptic, kinds = min(scheduled, key=means.__getitem__), np.array(cells["test"]["kinds"])

        def ratio(name: str, over: str, kind: str = "") -> dict[str, Any]:
            mine, theirs = (np.exp(np.array(test[who])) for who in (name, over))
            some = kinds == kind if kind else np.ones(len(kinds), bool)
            return paired_ratio(mine[some].tolist(), theirs[some].tolist()).to_dict()

        of_kinds = {name: {kind: ratio(name, rule, kind) for kind in dict.fromkeys(kinds.tolist())} for name in test}
        whole = {name: ratio(name, rule) for name in test}
        beside = ratio(best, sceptic)
        passed = whole[best]["median"] <= GAIN and whole[best]["high"] < 1 and beside["high"] < 1
        passed = passed and all(r["median"] <= HARM for r in of_kinds[best].values())
        over = {name: float(np.exp(mean - means[rule])) for name, mean in means.items()}
        learners = {name: [f"{name}-{i}" for i in range(len(self.plan.of_learner(name)))] for name in LEARNERS}
        return {
            **{"target": None, "rule": rule, "agent": best, "sceptic": sceptic, "passed": bool(passed)},
            **{"whole": whole, "kinds": of_kinds, "agent_over_sceptic": beside, "choose_over_rule": over},
            **{"told": {name: [x for key in keys for x in cells[key]["told"]] for name, keys in learners.items()}},
            **{"weights": {name: cells[keys[-1]]["weights"] for name, keys in learners.items()}},
            **{"jobs": {what: len(cells[what]["kinds"]) for what in ("choose", "test")}},
        }

    def table(self, result: Mapping[str, Any]) -> str:
        kinds = list(next(iter(result["kinds"].values())))
        rows = [
            [name, f"{result['choose_over_rule'].get(name, math.nan):.2f}", _text(result["whole"][name])]
            + [_text(result["kinds"][name][kind]) for kind in kinds]
            for name in result["whole"]
        ]
        lead = [
            f"Time to equal score over that of `{result['rule']}` with its plain cosine, median and 95 % interval.",
            f"Chosen by the jobs to choose by: `{result['agent']}`; over `{result['sceptic']}` it takes "
            f"{_text(result['agent_over_sceptic'])}. Gate passed: {result['passed']}.",
        ]
        head = ["row", f"{result['jobs']['choose']} jobs to choose by", f"{result['jobs']['test']} held-back", *kinds]
        return sections_markdown([Section("Agents of batch and rate", lead, Table(head, rows))])


def _text(ratio: Mapping[str, Any]) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"

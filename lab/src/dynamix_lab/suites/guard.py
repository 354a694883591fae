"""Ten policies that do harm, each under a guard, against the goodput rule alone, on the simulator (`bench guard`).

Speed is the rule's time over the guarded policy's for the same progress: 1 is the rule's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamix.policies import make_policy
from dynamix.policies.guard import Guard
from dynamix.policies.proportional import fill_unknown, speeds
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Window
from dynamix_lab.report import Table, with_interval
from dynamix_lab.training.evaluation import log_speeds, speeds_with_intervals

SHIPPED = "dynamix"
FAMILIES = ("affine-slowdowns", "poor-probes")  # as the rule assumes clusters, and where little that it sees is true


BOUND = 0.96  # speed that each of the ten kept while the guard also gave the rule windows in turn (0.2)


class Adversary:
    """Answers by `answer(window, bounds, asked)`; `asked` counts its answers."""

    def __init__(self, answer: Callable[[Window, Bounds, int], Any]) -> None:
        self.answer, self.asked = answer, 0

    def decide(self, window: Window, bounds: Bounds) -> Any:
        self.asked += 1
        return self.answer(window, bounds, self.asked)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


def skewed(window: Window, bounds: Bounds, by: float) -> Floats:
    """Shares by speed, every other worker's too large by e^`by` and the others' too small."""
    wish = fill_unknown(speeds(window)) * np.exp(by * (-1.0) ** np.arange(window.workers))
    return np.asarray(project(wish, bounds, total=window.base_batch), dtype=np.float64)


def _slow(window: Window, bounds: Bounds, asked: int) -> Any:
    return project(1.0 / fill_unknown(speeds(window)), bounds, total=window.batch_size.sum(-1))


def _starving(window: Window, bounds: Bounds, asked: int) -> Any:
    wish = np.where(np.arange(window.workers) == 0, 1.0, window.batch_size.sum(-1, keepdims=True))
    return project(wish, bounds, total=window.batch_size.sum(-1))


def _raising(window: Window, bounds: Bounds, asked: int) -> Any:
    raise ZeroDivisionError("on purpose")


def _random(window: Window, bounds: Bounds, asked: int) -> Any:
    return np.random.default_rng(asked).uniform(bounds.low, bounds.high, window.batch_size.shape)


ADVERSARIES: dict[str, Callable[[Window, Bounds, int], Any]] = {
    "lying: stays just within the veto": lambda window, bounds, asked: skewed(window, bounds, 0.3),
    "slow: the slowest gets most": _slow,
    "greedy: the largest sizes": lambda window, bounds, asked: np.broadcast_to(bounds.high, window.batch_size.shape),
    "oscillating: good and bad in turn": lambda w, b, asked: skewed(w, b, (0.0, 0.5, 0.0, -0.5)[asked % 4]),
    "constant: equal shares": lambda window, bounds, asked: np.full(window.batch_size.shape, 64),
    "not a number": lambda window, bounds, asked: np.full(window.batch_size.shape, np.nan),
    "wrong sum: all sizes times 20": lambda window, bounds, asked: 20 * window.batch_size,
    "starving: one worker gets the least": _starving,
    "raising": _raising,
    "random": _random,
}


@dataclass(frozen=True, slots=True)
class GuardPlan:
    """What to run on: `rows` clusters times workers of each family and seed, `windows` decisions each."""

    families: tuple[str, ...] = FAMILIES
    workers: tuple[int, ...] = (4, 16)
    rows: int = 64
    windows: int = 100
    seeds: tuple[int, ...] = (970_001, 970_002, 970_003, 970_004)  # the guard's numbers were not chosen on these


def adversaries_guarded(
    plan: GuardPlan,
    *,
    names: Sequence[str] = tuple(ADVERSARIES),
    tell: Callable[[str, float], None] = lambda what, done: None,
) -> dict[str, Any]:
    """Of each adversary the speed over the rule's, geometric mean and 95 % interval, and of the worst cluster.

    `watched` is that of the shipped policy under a guard over its own without one.
    """
    how: dict[str, Any] = {"families": plan.families, "workers": plan.workers, "rows": plan.rows}
    how |= {"windows": plan.windows}
    found = {}
    for i, name in enumerate(names):
        tell(name, i / (len(names) + 1))
        made = {name: lambda _, name=name: Guard(Adversary(ADVERSARIES[name]))}
        found[name] = _told(log_speeds(made, plan.seeds, **how)[name])
    tell(SHIPPED, len(names) / (len(names) + 1))
    shipped = {name: lambda _, name=name: make_policy(name) for name in (SHIPPED, f"guarded:{SHIPPED}")}
    alone, watched = log_speeds(shipped, plan.seeds, **how).values()
    cost = _told({w: watched[w] - alone[w] for w in alone})
    return {"adversaries": found, "watched": cost, "windows": plan.windows, "seeds": list(plan.seeds)}


def _told(logs: Mapping[int, Floats]) -> dict[str, Any]:
    every = np.concatenate(list(logs.values()))
    return {"speed": speeds_with_intervals(logs)["all"], "worst": round(float(np.exp(every.min())), 4)}


def table(result: Mapping[str, Any]) -> Table:
    """A row an adversary, and one of what the guard costs the shipped policy."""
    told = {**result["adversaries"], f"`{SHIPPED}`, over itself without a guard": result["watched"]}
    rows = [
        [name, with_interval(dict(zip(("median", "low", "high"), one["speed"], strict=True)), 4), f"{one['worst']:.3f}"]
        for name, one in told.items()
    ]
    return Table(["policy, guarded", "its speed over goodput's", "worst cluster"], rows)

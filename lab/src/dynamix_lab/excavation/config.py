"""The methods compared on the excavation task, and all settings of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamix.errors import ConfigError
from dynamix_lab.excavation.fading import Decay
from dynamix_lab.excavation.gate_search import GateSearch
from dynamix_lab.excavation.ground import GROUNDS, Shape, held_out
from dynamix_lab.excavation.learner import DQNConfig
from dynamix_lab.excavation.lessons import CURRICULUM, DRAWN, Stage
from dynamix_lab.excavation.mappo import MAPPOConfig
from dynamix_lab.excavation.world import ExcavationConfig

# s-madrl        typed traces; DQN learns motion while some agents rest; then a threshold gate is learned for it
# s-madrl-team   the same, but MAPPO learns motion, with the team's reward and critic, which only training needs
# visits, madqn, sight-2   DQN with the paper's one trace; without traces; without traces, but with sight 2
# mappo, mappo-typed       MAPPO without traces; with typed traces
# hand           hand-written motion with a learned gate
# counting       hand-written motion; a planner's rule lets `Counting.most` agents in at a time
METHODS = (
    "s-madrl-team", "s-madrl", "visits", "madqn", "sight-2", "mappo", "mappo-typed", "hand", "counting", "random"
)  # fmt: skip
# The field with a method's settings; hand, counting and random have none.
_SETTINGS = {
    **dict.fromkeys(("s-madrl", "visits", "madqn", "sight-2"), "dqn"),
    **dict.fromkeys(("s-madrl-team", "mappo", "mappo-typed"), "mappo"),
}
LEARNED_GATE = ("s-madrl-team", "s-madrl", "hand")
HAND = ("hand", "counting")
# NAME:CHANGE is a method with changed typed traces: they never fade, are gone after a step, are read with noise as
# large as half a fresh trace, or are read five steps late.
CHANGES: dict[str, dict[str, Any]] = {
    "no-decay": {"fast": Decay(alpha=0.0, beta=1.0, start=0.0), "entries": Decay(alpha=0.0, beta=0.4, start=0.0)},
    "fast-decay": {"fast": Decay(alpha=1.0, beta=1.0, start=0.0), "entries": Decay(alpha=0.2, beta=4.0, start=0.0)},
    "noise": {"noise": 0.5},
    "late": {"late": 5},
}


def base(method: str) -> str:
    """The method without its change of traces.

    >>> base("s-madrl:late")
    's-madrl'
    """
    return method.partition(":")[0]


@dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """The settings of a comparison. Every place, method and seed gets `evaluation_worlds` episodes of one horizon.

    agents  numbers of agents on the task's ground; each is a place. Unless `drawn`, methods with a learned gate are
            also measured as NAME-open, in which no agent rests
    large   numbers of agents on larger grounds with one tunnel for every max(`agents`); nothing is learned there
    drawn   every training episode has its own ground, and the places are those of `held_out`. No gate is learned;
            hand-written motion is measured with the default `ThresholdConfig`, and as NAME-open
    """

    methods: tuple[str, ...] = METHODS
    agents: tuple[int, ...] = (1, 2, 4, 6, 8)
    seeds: tuple[int, ...] = tuple(range(10))
    task: ExcavationConfig = field(default_factory=ExcavationConfig)
    dqn: DQNConfig = field(default_factory=DQNConfig)
    mappo: MAPPOConfig = field(default_factory=MAPPOConfig)
    gate: GateSearch = field(default_factory=GateSearch)
    stages: tuple[Stage, ...] = CURRICULUM
    worlds: int = 16
    evaluation_worlds: int = 16
    large: tuple[int, ...] = (16, 32, 64)
    drawn: bool = False

    def __post_init__(self) -> None:
        for name in self.methods:
            if base(name) not in METHODS:
                allowed = f"{', '.join(METHODS)}, some with :{', :'.join(CHANGES)}"
                raise ConfigError("methods", name, allowed, "check the spelling")
            task_of(self.task, name)
        if not (self.methods and self.agents and self.seeds):
            raise ConfigError("methods, agents, seeds", "none", "one or more of each", "check the configuration")

    def places(self) -> dict[str, tuple[Shape, int]]:
        """The places by name: a ground, and the number of agents that work there."""
        if not self.drawn:
            return {str(n): (self.task.shape, n) for n in self.agents}
        return {
            f"{n} agents, tunnel {s.tunnel_length}, chamber {s.chamber_rows}x{s.chamber_columns}": (s, n)
            for s, n in held_out()
        }

    @classmethod
    def of(
        cls,
        *,
        methods: Sequence[str] | None = None,
        seeds: int = 10,
        ground: str = "two-lane",
        slow: float = 1.0,
        horizon: int = 1000,
        scale: float = 1.0,
    ) -> ExperimentConfig:
        """A comparison from options. `scale` multiplies every stage's steps; `slow` is every second agent's speed."""
        if not 0 < scale < float("inf"):
            raise ConfigError("scale", scale, "above 0, finite", "1 is the whole curriculum")
        drawn = ground == "drawn"
        if not drawn and ground not in GROUNDS:
            raise ConfigError("ground", ground, f"{', '.join(GROUNDS)}, drawn", "check the spelling")
        whole, lessons = MAPPOConfig().rollout, DRAWN if drawn else CURRICULUM
        stages = (dataclasses.replace(s, steps=max(1, round(s.steps * scale / whole)) * whole) for s in lessons)
        task = ExcavationConfig(GROUNDS["single-file" if drawn else ground], horizon=horizon, speeds=(1.0, slow))
        return cls(
            methods=METHODS if methods is None else tuple(methods),
            seeds=tuple(range(seeds)),
            stages=tuple(stages),
            task=task,
            drawn=drawn,
        )

    def fingerprint(self, method: str) -> str:
        """A hash of all settings on which a run of `method` depends. Methods and seeds may be added later."""
        others = {"dqn", "mappo"} - {_SETTINGS.get(base(method))}
        others |= {"methods", "seeds", *(() if base(method) in LEARNED_GATE else ("gate",))}
        facts = {k: v for k, v in dataclasses.asdict(self).items() if k not in others}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def task_of(task: ExcavationConfig, method: str) -> ExcavationConfig:
    """The task as agents of `method` see it."""
    name, _, change = method.partition(":")
    typed = name in ("mappo-typed", "counting", *LEARNED_GATE)
    if change and not (typed and change in CHANGES):
        allowed = f"s-madrl, s-madrl-team, mappo-typed, hand or counting, with {', '.join(CHANGES)}"
        raise ConfigError("methods", method, allowed, "only typed traces can be changed")
    sight = 2 if name == "sight-2" else task.sight
    changed = dataclasses.replace(task, signs="typed" if typed else "visits", sight=sight)
    return dataclasses.replace(changed, **CHANGES.get(change, {}))

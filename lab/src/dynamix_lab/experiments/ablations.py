"""What groups of features are worth: policies learned without them, under one short budget (`dynamix bench ablations`).

`dynamix-paper` does without the families of the paper's state, `dynamix` also without what it remembers by itself (the
rule under it still sees everything). Scores are on the calibrated families, with seeds that no training met.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.policies.learned.networks import STATE_FAMILIES
from dynamix.policies.learned.policy import FEATURE_GROUPS
from dynamix.window import Floats
from dynamix_lab.experiments.short import FORMS, QUICK, Budget, Form, forms_of, learn
from dynamix_lab.simulator import BREAKING, CONFORMING, LaggedReference, sample_family
from dynamix_lab.training.evaluation import Factory, Tell, follow, paired, summary, times_to_common_progress

TEST_SEED = 996_001
WORKERS = (2, 8, 32)
FAMILIES = (*CONFORMING, *BREAKING)
GROUPS: dict[Form, tuple[str, ...]] = {"dynamix": tuple(FEATURE_GROUPS), "dynamix-paper": tuple(STATE_FAMILIES)}


def variants(form: Form) -> dict[str, tuple[str, ...]]:
    """Name -> groups left out; "all" leaves out none.

    >>> list(variants("dynamix-paper"))
    ['all', 'no network', 'no system', 'no statistics']
    """
    return {"all": (), **{f"no {group}": (group,) for group in GROUPS[form]}}


@dataclass(frozen=True, slots=True)
class AblationPlan:
    """What to train and where to score it. Raises `ConfigError`.

    seeds    of trainings; every variant is trained with each, and pairs are clusters of policies of one seed
    """

    forms: tuple[Form, ...] = FORMS
    budget: Budget = field(default_factory=Budget)
    seeds: tuple[int, ...] = (0,)
    clusters: int = 16
    windows: int = 40
    families: tuple[str, ...] = FAMILIES
    workers: tuple[int, ...] = WORKERS

    def __post_init__(self) -> None:
        if not self.seeds or min(self.seeds) < 0:
            raise ConfigError("seeds", self.seeds, "one or more numbers of 0 or more", "check the argument")

    @classmethod
    def of(
        cls, *, forms: Sequence[str] | None = None, seeds: Sequence[int] | None = None, quick: bool = False
    ) -> AblationPlan:
        """From options; `quick` trains and plays next to nothing."""
        plan = cls(forms=forms_of(forms), seeds=tuple(seeds or (0,)))
        small: dict[str, Any] = {
            "budget": QUICK,
            "clusters": 2,
            "windows": 4,
            "families": FAMILIES[:1],
            "workers": (2,),
        }
        return dataclasses.replace(plan, **small) if quick else plan


def run_ablations(plan: AblationPlan, folder: Path, *, tell: Tell = lambda what, done: None) -> dict[str, Any]:
    """All forms of a plan, as `markdown` shows them."""
    found = {}
    for i, form in enumerate(plan.forms):
        found[form] = ablate(
            form,
            folder,
            plan,
            tell=lambda what, done, i=i: tell(what, (i + done) / len(plan.forms)),  # type: ignore[misc]
        )
    known = {"budget": dataclasses.asdict(plan.budget), "seeds": list(plan.seeds), "test_seed": TEST_SEED}
    return {**known, "forms": found}


def ablate(form: Form, folder: Path, plan: AblationPlan, *, tell: Tell = lambda what, done: None) -> dict[str, Any]:
    """By variant: time of `lagged` / its time (mean, worst decile), and its time over that with everything.

    `folder` is of trained policies; what is there is not trained again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = variants(form)
    logs: dict[str, list[Floats]] = {name: [] for name in names}
    for i, seed in enumerate(plan.seeds):
        made: dict[str, Factory] = {"lagged": LaggedReference}
        for j, (name, without) in enumerate(names.items()):
            tell(f"{form}, {name}, seed {seed}", (i + j / len(names)) / len(plan.seeds))
            path = folder / f"{form}-{name.replace(' ', '-')}-seed{seed}.safetensors"
            made[name] = learn(form, path, without=without, budget=plan.budget, seed=seed)
        for family in plan.families:
            for w in plan.workers:
                world = sample_family(family, plan.clusters, w, TEST_SEED)
                paths = {name: follow(make, world, seed=TEST_SEED, windows=plan.windows) for name, make in made.items()}
                times = times_to_common_progress(paths)
                for name in names:
                    logs[name].append(np.log(times[name] / times["lagged"]))
    joined = {name: np.concatenate(parts) for name, parts in logs.items()}
    return {name: {**summary(np.exp(-log)), "over_all": paired(log - joined["all"])} for name, log in joined.items()}


def markdown(result: Mapping[str, Any]) -> str:
    """A row per form and variant."""
    lines = ["| form | sees | lagged's time / its own | its time / that with everything |", "|---" * 4 + "|"]
    for form, found in result["forms"].items():
        for name, part in found.items():
            score = f"{part['geometric_mean']:.3f} / {part['worst_decile']:.3f}"
            lines.append(f"| {form} | {name} | {score} | {'{:.4f} ({:.4f}-{:.4f})'.format(*part['over_all'])} |")
    return "\n".join([*lines, "", f"Budget of a training: {Budget(**result['budget']).said}; seeds {result['seeds']}."])

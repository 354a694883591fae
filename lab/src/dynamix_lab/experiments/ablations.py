"""What groups of features are worth: policies learned without them, under one short budget: `python -m dynamix_lab.experiments.ablations`.

`dynamix-paper` does without the families of the paper's state, `dynamix` also without what it remembers by itself (the rule
under it still sees everything). Scores are on the calibrated families, with seeds that no training met.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.policies.learned.additive import STATE_FAMILIES
from dynamix.policies.learned.policy import FEATURE_GROUPS
from dynamix.simulator import BREAKING, CONFORMING, LaggedReference, sample_family
from dynamix.training.evaluation import Factory, Tell, follow, paired, summary, times_to_common_progress
from dynamix.window import Floats
from dynamix_lab.experiments.short import FORMS, QUICK, Budget, Form, learn

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


def ablate(
    form: Form, folder: Path, *, budget: Budget | None = None, seeds: Sequence[int] = (0,), clusters: int = 16,
    windows: int = 40, families: Sequence[str] = FAMILIES, workers: Sequence[int] = WORKERS, tell: Tell = lambda what, done: None,
) -> dict[str, Any]:  # fmt: skip
    """By variant: time of `lagged` / its time (mean, worst decile), and its time over that of the policy with everything.

    folder   of trained policies; what is there is not trained again
    seeds    of trainings; every variant is trained with each, and pairs are clusters of policies of one seed
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = variants(form)
    logs: dict[str, list[Floats]] = {name: [] for name in names}
    for i, seed in enumerate(seeds):
        made: dict[str, Factory] = {"lagged": LaggedReference}
        for j, (name, without) in enumerate(names.items()):
            tell(f"{form}, {name}, seed {seed}", (i + j / len(names)) / len(seeds))
            path = folder / f"{form}-{name.replace(' ', '-')}-seed{seed}.safetensors"
            made[name] = learn(form, path, without=without, budget=budget, seed=seed)
        for family in families:
            for w in workers:
                world = sample_family(family, clusters, w, TEST_SEED)
                paths = {name: follow(make, world, seed=TEST_SEED, windows=windows) for name, make in made.items()}
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing in a folder, compare, print the table or JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", type=Path, help="folder of trained policies; goes on with what it holds")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: trainings that learn nothing")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if min(given.seeds) < 0:
        raise ConfigError("seeds", given.seeds, "0 or more", "check the argument")
    budget = QUICK if given.quick else Budget()
    how: dict[str, Any] = (
        {"clusters": 2, "windows": 4, "families": FAMILIES[:1], "workers": (2,)} if given.quick else {}
    )

    def tell(what: str, done: float) -> None:
        if not given.json:
            print(f"{done:4.0%} {what}", flush=True)

    found = {form: ablate(form, given.out, budget=budget, seeds=given.seeds, tell=tell, **how) for form in given.forms}
    result = {
        "schema": 1, "command": "learning.ablations", "cluster": "simulator", "budget": dataclasses.asdict(budget),
        "seeds": given.seeds, "test_seed": TEST_SEED, "forms": found,
    }  # fmt: skip
    print(json.dumps(result, indent=1) if given.json else markdown(result))


if __name__ == "__main__":
    main()

"""Policies learned on one job and used on another, against policies learned on the target (`dynamix bench transfer`).

Every policy has the same short budget and seed, so that what differs is where it learned. Scores are on test clusters
of the target that no training met; all policies meet the same ones. The shipped policy and the goodput rule stand
beside them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.policies.goodput import Goodput
from dynamix.policies.registry import make_policy
from dynamix.window import Floats
from dynamix_lab.experiments.short import FORMS, Form, TrainingBudget, learn
from dynamix_lab.experiments.worlds import WORLDS, place_of
from dynamix_lab.report import Table
from dynamix_lab.simulator import LaggedReference
from dynamix_lab.training.evaluation import Factory, Tell, follow, paired, summary, times_to_common_progress

TEST_SEED = 995_001
USUAL, LARGE = (2, 8, 32), (1024,)


@dataclass(frozen=True, slots=True)
class Pair:
    """Learn on `source` at `learned_at` workers, use on `target` at `used_at`; another learned there at `target_at`."""

    source: str
    target: str
    learned_at: tuple[int, ...] = USUAL
    target_at: tuple[int, ...] = USUAL
    used_at: tuple[int, ...] = (8, 32)


PAIRS: dict[str, Pair] = {
    "depth: VGG-16 to 19": Pair("vgg16", "vgg19"),
    "depth: ResNet-34 to 50": Pair("resnet34", "resnet50"),
    "GPUs: old to new": Pair("vgg16-old", "vgg16-new"),
    "GPUs: new to old": Pair("vgg16-new", "vgg16-old"),
    "optimizer: SGD to Adam": Pair("vgg16", "vgg16-adam"),
    "optimizer: Adam to SGD": Pair("vgg16-adam", "vgg16"),
    "workers: to 256, used at 1,024": Pair("vgg16", "vgg16", (8, 32, 256), LARGE, LARGE),
}


def transfer(
    pair: Pair,
    form: Form,
    folder: Path,
    *,
    budget: TrainingBudget | None = None,
    seed: int = 0,
    clusters: int = 32,
    windows: int = 40,
) -> dict[str, Any]:
    """Scores of one pair: by policy, time of `lagged` / its time; and `regret`, the source policy's time over the
    target's.

    folder   of trained policies; what is there is not trained again
    """
    made: dict[str, Factory] = {
        "source": _learned(pair.source, pair.learned_at, form, folder, budget, seed),
        "target": _learned(pair.target, pair.target_at, form, folder, budget, seed),
        "shipped": lambda _: make_policy(form),
        "goodput": lambda _: Goodput(),
        "lagged": LaggedReference,
    }
    logs: dict[str, list[Floats]] = {name: [] for name in made}
    for workers in pair.used_at:
        target = WORLDS[pair.target]
        world = target.sample(min(clusters, max(8192 // workers, 4)), workers, TEST_SEED)
        paths = {
            name: follow(make, world, seed=TEST_SEED, windows=windows, lr_rule=target.lr_rule)
            for name, make in made.items()
        }
        for name, taken in times_to_common_progress(paths).items():
            logs[name].append(np.log(taken))
    joined = {name: np.concatenate(parts) for name, parts in logs.items()}
    return {
        **dataclasses.asdict(pair),
        "form": form,
        "scores": {name: summary(np.exp(joined["lagged"] - log)) for name, log in joined.items() if name != "lagged"},
        "regret": paired(joined["source"] - joined["target"]),
        "shipped_over_target": paired(joined["shipped"] - joined["target"]),
    }


def _learned(
    world: str, workers: tuple[int, ...], form: Form, folder: Path, budget: TrainingBudget | None, seed: int
) -> Factory:
    name = f"{form}-{world}-{'-'.join(map(str, workers))}-seed{seed}.safetensors"
    return learn(form, folder / name, world=place_of(world), workers=workers, budget=budget, seed=seed)


def run_transfer(
    folder: Path,
    *,
    pairs: Mapping[str, Pair] = PAIRS,
    forms: Sequence[Form] = FORMS,
    budget: TrainingBudget | None = None,
    seed: int = 0,
    tell: Tell = lambda what, done: None,
    **how: Any,
) -> dict[str, Any]:
    """All pairs for all forms; a pair that `folder` has a result of is not run again."""
    folder.mkdir(parents=True, exist_ok=True)
    work = [(form, name) for form in forms for name in pairs]
    found: dict[str, Any] = {}
    about = {"budget": dataclasses.asdict(budget or TrainingBudget()), "seed": seed, **how}
    for i, (form, name) in enumerate(work):
        path = folder / f"{form}-{''.join(c if c.isalnum() else '-' for c in name)}.json"
        if not path.exists():
            tell(f"{form}, {name}", i / len(work))
            one = transfer(pairs[name], form, folder, budget=budget, seed=seed, **how)
            path.write_text(json.dumps({"about": about, **one}, indent=1), encoding="utf-8")
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved.pop("about") != json.loads(json.dumps(about)):
            raise ConfigError("folder", str(folder), "one of the same budget, seed and clusters", "name another folder")
        found.setdefault(form, {})[name] = saved
    return {**about, "test_seed": TEST_SEED, "forms": found}


def pairs_named(parts: Sequence[str] | None) -> dict[str, Pair]:
    """The pairs whose names hold one of the parts; None: all. Raises `ConfigError` if there is none."""
    wanted = {name: pair for name, pair in PAIRS.items() if parts is None or any(part in name for part in parts)}
    if not wanted:
        raise ConfigError("pairs", parts, ", ".join(PAIRS), "give a part of a name")
    return wanted


def table(result: Mapping[str, Any]) -> Table:
    """A row per pair and form: mean / worst decile against `lagged`, and the source policy's time over the target's."""
    names = ("source", "target", "shipped", "goodput")
    head = ["form", "learned where", *[f"{name} policy" if name != "goodput" else name for name in names]]
    head += ["source's time / target's", "shipped's / target's"]
    rows = []
    for form, pairs in result["forms"].items():
        for name, part in pairs.items():
            scores = [
                f"{part['scores'][n]['geometric_mean']:.3f} / {part['scores'][n]['worst_decile']:.3f}" for n in names
            ]
            ratios = ["{:.3f} ({:.3f}-{:.3f})".format(*part[key]) for key in ("regret", "shipped_over_target")]
            rows.append([form, name, *scores, *ratios])
    return Table(head, rows)


def markdown(result: Mapping[str, Any]) -> str:
    """`table`, and the budget of the trainings."""
    budget = f"Budget of a training: {TrainingBudget(**result['budget']).said}; seed {result['seed']}."
    return f"{table(result).markdown()}\n\n{budget}"

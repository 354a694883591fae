"""Short trainings of both forms under one budget, to be compared with each other; not what the shipped policies had."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dynamix.errors import ConfigError
from dynamix.policies.learned.policy import LearnedPolicy
from dynamix_lab.papers.additive import AdditivePolicy
from dynamix_lab.simulator import TRAINING
from dynamix_lab.training.dynamix_paper import PaperTrainingConfig
from dynamix_lab.training.dynamix_paper import train as train_paper
from dynamix_lab.training.dynamix_policy import TrainingConfig
from dynamix_lab.training.dynamix_policy import train as train_residual
from dynamix_lab.training.evaluation import Factory
from dynamix_lab.training.worlds import MIXED

Form = Literal["dynamix", "dynamix-paper"]
FORMS: tuple[Form, ...] = ("dynamix", "dynamix-paper")


def forms_of(names: Sequence[str] | None) -> tuple[Form, ...]:
    """Forms by name; None: all. Raises `ConfigError`."""
    for name in names or ():
        if name not in FORMS:
            raise ConfigError("forms", name, ", ".join(FORMS), "choose one of them")
    return FORMS if names is None else tuple(form for form in FORMS if form in names)


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """What one training may use, whichever policy it makes.

    rounds     of `dynamix`: a rollout at every W and passes over it
    updates    of `dynamix-paper`, after `clone_rounds` of imitation
    rows       clusters * W of a rollout (at least six clusters, or four)
    windows    of a rollout
    families   that `dynamix-paper` learns on where no world is named
    """

    rounds: int = 16
    updates: int = 20
    clone_rounds: int = 10
    rows: int = 256
    windows: int = 24
    validation_rows: int = 128
    validation_windows: int = 30
    families: tuple[str, ...] = TRAINING

    @property
    def said(self) -> str:
        """For tables."""
        return (
            f"dynamix: {self.rounds} rounds; dynamix-paper: {self.clone_rounds} of imitation, {self.updates} updates; "
            f"{self.rows} clusters times W and {self.windows} windows a rollout"
        )


QUICK = TrainingBudget(
    rounds=2,
    updates=1,
    clone_rounds=1,
    rows=16,
    windows=4,
    validation_rows=16,
    validation_windows=4,
    families=("pai-steady",),
)


def learn(
    form: Form,
    path: Path,
    *,
    world: str = MIXED,
    workers: tuple[int, ...] = (2, 8, 32),
    budget: TrainingBudget | None = None,
    seed: int = 0,
) -> Factory:
    """Train, or read the file that an earlier call left; makes fresh policies of what was learned.

    Raises `ConfigError` if the file there was made with another recipe.
    """
    forms_of([form])
    config: Any = _config(form, budget or TrainingBudget(), world, workers)
    if not path.exists():
        policy = train_paper(config, seed) if form == "dynamix-paper" else train_residual(config, seed)
        policy.save(path)
    kind: Any = AdditivePolicy if form == "dynamix-paper" else LearnedPolicy
    loaded = kind.load(path)
    if _plain(loaded.about["training"]) != _plain(dataclasses.asdict(config)) or loaded.about["seed"] != seed:
        raise ConfigError("policy", str(path), "one that was made with this recipe", "name another folder")
    make: Callable[[], Any] = (
        (lambda: AdditivePolicy(loaded.net))
        if form == "dynamix-paper"
        else (lambda: LearnedPolicy(loaded.net, about=loaded.about))
    )
    return lambda _: make()


def _config(
    form: Form, b: TrainingBudget, world: str, workers: tuple[int, ...]
) -> PaperTrainingConfig | TrainingConfig:
    """A recipe that fits the budget."""
    if form == "dynamix-paper":
        validation = tuple(w for w in (4, 16) if w <= max(workers)) or workers[:1]
        return PaperTrainingConfig(
            families=b.families if world == MIXED else (world,) * len(validation),
            workers=workers,
            rows=b.rows,
            windows=b.windows,
            updates=b.updates,
            clone_rounds=b.clone_rounds,
            clone_windows=b.windows,
            validate_every=5,
            validation_workers=validation,
            validation_windows=b.validation_windows,
            validation_clusters=max(b.validation_rows // 16, 2) if world != MIXED else 4,
        )
    return TrainingConfig(
        workers=workers,
        easy_workers=max(32, min(workers)),
        world=world,
        rows=b.rows,
        clone_rounds=0,
        regret_rounds=b.rounds,
        windows=b.windows,
        ppo_updates=0,
        validate_every=max(b.rounds // 4, 1),
        validation_rows=b.validation_rows,
        validation_workers=tuple(w for w in (2, 8, 32) if w in workers) or workers,
        validation_windows=b.validation_windows,
    )


def _plain(recipe: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    return dict(json.loads(json.dumps(recipe)))

"""Trains the policies that dynamix ships, by name, for `dynamix policy train`."""

import dataclasses
import inspect
import json
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamix.errors import ConfigError
from dynamix.policies.files import describe_policy
from dynamix_lab.training import dynamix_paper, dynamix_policy, stigmergic
from dynamix_lab.training.evaluation import Tell

Recipe = dynamix_policy.TrainingConfig | dynamix_paper.PaperTrainingConfig | stigmergic.SearchConfig
RECIPES: dict[str, type[Recipe]] = {
    "dynamix": dynamix_policy.TrainingConfig,
    "dynamix-paper": dynamix_paper.PaperTrainingConfig,
    "stigmergic": stigmergic.SearchConfig,
}
MAY_BE_ZERO = {"clone_rounds", "regret_rounds", "ppo_updates", "updates", "delays"}
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    tuple[int, ...]: "whole numbers, comma-separated",
    tuple[float, ...]: "numbers, comma-separated",
    tuple[tuple[int, ...], ...]: "lists of whole numbers, as in [[1, 2], [4, 8]]",
}


def train_shipped(
    name: str,
    out: str | Path,
    *,
    seed: int = 0,
    settings: Sequence[str] = (),
    progress: Tell | None = None,
    checkpoint: str | Path | None = None,
) -> dict[str, Any]:
    """Train the policy `name` (`RECIPES`), write it to `out` with a .json next to it, and return its description.

    The same seed and settings give the same weights. `settings` are the recipe's, as "NAME=VALUE". `progress` is called
    as `progress(what, fraction done)`. Only `dynamix` takes `checkpoint` (a file, from which a stopped training is
    resumed). Raises `ConfigError`.
    """
    recipe: Any = recipe_of(name, settings)
    if name != "dynamix" and checkpoint is not None:
        allowed = "None for every policy but dynamix"
        raise ConfigError("checkpoint", str(checkpoint), allowed, f"leave it out; {name} is trained within minutes")
    policy: Any
    if name == "dynamix":
        policy = dynamix_policy.train(recipe, seed, progress=progress, processes=2, tested=True, checkpoint=checkpoint)
    elif name == "dynamix-paper":
        policy = dynamix_paper.train(recipe, seed, progress=progress)
        policy.about["evaluation"] = dynamix_paper.evaluation(policy, recipe)
    else:
        policy = stigmergic.train(recipe, seed, progress=progress)
    policy.save(out)
    return describe_policy(out)


def recipe_of(name: str, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a shipped policy, changed by "NAME=VALUE"; lists are comma-separated. Raises `ConfigError`.

    >>> recipe_of("dynamix-paper", ["learner=simplified", "workers=2,4"]).workers
    (2, 4)
    """
    if name not in RECIPES:
        raise ConfigError("policy", name, ", ".join(RECIPES), "rules such as goodput have nothing to learn")
    hints = typing.get_type_hints(RECIPES[name])
    changed = {}
    for setting in settings:
        field, given, text = setting.partition("=")
        if not given or field not in hints:
            raise ConfigError("set", setting, f"NAME=VALUE with one of {', '.join(hints)}", "check the spelling")
        changed[field] = _parsed(setting, text, hints[field], least=0 if field in MAY_BE_ZERO else 1)
    recipe: Recipe = dataclasses.replace(RECIPES[name](), **changed)
    return recipe


def settings_of(recipe: Recipe) -> dict[str, str]:
    """Each setting of a recipe, as --set takes its value.

    >>> settings_of(recipe_of("stigmergic", ["windows=9"]))["windows"]
    '9'
    """
    return {field.name: _shown(getattr(recipe, field.name)) for field in dataclasses.fields(recipe)}


def meanings_of(recipe: Recipe) -> dict[str, str]:
    """The meaning of each setting, from its recipe's docstring: "name   meaning", with indented continuation lines.

    >>> meanings_of(recipe_of("dynamix"))["delays"]
    'steps until a decision counts, of which each environment draws one'
    """
    meanings, name = dict[str, str](), ""
    fields = {field.name for field in dataclasses.fields(recipe)}
    for line in (inspect.getdoc(type(recipe)) or "").splitlines():
        first, _, said = line.partition(" ")
        if first:
            name = first if first in fields else ""
        if name:
            meanings[name] = f"{meanings.get(name, '')} {said.strip()}".strip()
    return meanings


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and any(isinstance(part, tuple) for part in value):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parsed(setting: str, text: str, kind: Any, *, least: int) -> Any:
    """The value of a setting as its type, with whole numbers of `least` or more, or `ConfigError`."""
    from pydantic import Field, TypeAdapter, ValidationError

    several = typing.get_origin(kind) is tuple
    count: Any = typing.Annotated[int, Field(ge=least)]
    counted = {
        int: count,
        tuple[int, ...]: tuple[count, ...],
        tuple[tuple[int, ...], ...]: tuple[tuple[count, ...], ...],
    }
    try:
        value = json.loads(text) if several and text.startswith("[") else text
        if several and isinstance(value, str):
            value = value.split(",") if value else []
        return TypeAdapter(counted.get(kind, kind)).validate_python(value)
    except (ValidationError, json.JSONDecodeError) as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        allowed = _WORDS.get(kind) or ", ".join(map(str, typing.get_args(kind))) or "left as it is: an object"
        allowed += f", {least} or more" if kind in counted else ""
        raise ConfigError("set", setting, allowed, said) from error

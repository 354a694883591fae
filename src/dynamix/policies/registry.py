"""Names of policies: parses a name and makes its policy. No other module knows their forms.

NAME                      one of `policy_names()`: ours, and those of other distributions (`dynamix.plugins`)
static:SIZE               SIZE samples for every worker, whatever sizes the job starts with
guarded:NAME              that policy under a `Guard`
compare:NAME,NAME         these policies in turns, in one job (`dynamix compare`); only for `make_policy`
FILE.safetensors          a policy file of any kind
MODULE:CLASS, FILE.py:CLASS   your own: the object that CLASS returns when called without arguments

A caller adds names that need its own data: `make_policy("reference:256", others={"reference": ...})`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from dynamix.errors import ConfigError, PolicyFileError, nearest
from dynamix.plugins import LABORATORY, POLICIES, named, plug_ins, why
from dynamix.policies.protocol import Policy
from dynamix.removed import message

# Makes the policy of a name that the caller added, from the number after its colon, or None.
OtherFactory = Callable[[int | None], Policy]

# name -> "module:factory"; imported on first use, so that `import dynamix` is fast.
BUILT_IN = {
    "static": "dynamix.policies.static:Static",
    "dbs": "dynamix.policies.proportional:DBS",
    "lb_bsp": "dynamix.policies.proportional:LBBSP",
    "goodput": "dynamix.policies.goodput:Goodput",
    "dynamix": "dynamix.policies.learned.policy:pretrained",
    "stigmergic": "dynamix.policies.stigmergic.policy:pretrained",
}
_OF_LABORATORY = ("cannikin", "dynamix-paper", "noise_scale", "pollux")
_CLASS = re.compile(r"(?P<place>[A-Za-z_][\w.]*|.*\.py):(?P<attribute>[A-Za-z_]\w*)")

Kind = Literal["plain", "file", "class", "other"]


@dataclass(frozen=True, slots=True)
class PolicyName:
    """A policy's name, parsed."""

    kind: Kind
    base: str  # one of `policy_names()`, a file's path, a class's module or .py file, or a name that the caller added
    guarded: bool = False
    number: int | None = None  # after the colon of `static:SIZE` or of a name that the caller added
    attribute: str | None = None  # of a module or .py file

    def __str__(self) -> str:
        behind = self.attribute if self.number is None else self.number
        return ":".join([*["guarded"] * self.guarded, self.base, *([] if behind is None else [str(behind)])])

    def absolute(self) -> PolicyName:
        """The same policy, under a name that also works in another working directory."""
        of_file = self.kind == "file" or (self.kind == "class" and self.base.endswith(".py"))
        return replace(self, base=str(Path(self.base).resolve())) if of_file else self


def policy_names() -> list[str]:
    """The plain names that `make_policy` and `Controller(policy=...)` accept; `allowed_names` has all forms."""
    return sorted([*BUILT_IN, *plug_ins(POLICIES, BUILT_IN)])


def names_by_state(state: Mapping[str, Any]) -> list[str]:
    """The plain names whose policies save states with the same keys as `state`.

    >>> names_by_state({"log_speed": []}), names_by_state({"mine": 1})
    (['lb_bsp'], [])
    """
    found = []
    for name in policy_names():
        with contextlib.suppress(Exception):  # a plug-in is third-party code: any error means that it cannot be made
            if make_policy(name).state_dict().keys() == state.keys():
                found.append(name)
    return found


def shipped_file(name: str) -> Path | None:
    """The policy file that a plain name stands for; None for a rule."""
    factory = _factory(name)
    file = getattr(sys.modules[factory.__module__], "PRETRAINED", None)
    return Path(file) if file is not None and factory.__name__ == "pretrained" else None


def allowed_names(others: Mapping[str, OtherFactory] | None = None) -> str:
    """The allowed forms of a policy's name, for messages and help texts."""
    added = [form for name in others or () for form in (name, f"{name}:NUMBER")]
    forms = "guarded:NAME, FILE.safetensors, MODULE:CLASS, FILE.py:CLASS"
    return ", ".join([*policy_names(), "static:SIZE", *added, forms])


def parse_name(name: str, *, others: Mapping[str, OtherFactory] | None = None) -> PolicyName:
    """Parse `name`. Raises `ConfigError` if it is no name of a policy; imports nothing.

    >>> parse_name("guarded:dynamix").guarded, parse_name("static:256").number
    (True, 256)
    """
    guarded, rest = _unguarded(name)
    head, colon, behind = rest.partition(":")
    plain = head in BUILT_IN or (head not in (others or {}) and head in plug_ins(POLICIES, BUILT_IN))
    kind: Kind = "plain" if plain else "other"
    known = plain or head in (others or {})
    if rest.endswith(".safetensors"):
        return PolicyName("file", rest, guarded)
    if not known and (own := _CLASS.fullmatch(rest)):
        return PolicyName("class", own["place"], guarded, attribute=own["attribute"])
    if known and not colon:
        return PolicyName(kind, head, guarded)
    if (head == "static" or kind == "other") and known and behind.isdecimal() and int(behind) > 0:
        return PolicyName(kind, head, guarded, number=int(behind))
    missing = not known and head in _OF_LABORATORY
    fix = f"{head} is part of the laboratory: {LABORATORY}" if missing else _meant(name, others)
    raise ConfigError("policy", name, allowed_names(others), fix)


def _meant(name: str, others: Mapping[str, OtherFactory] | None = None) -> str:
    """The advice for an unknown `name`, word by word."""
    if name.endswith(".safetensor"):
        return f"did you mean {name + 's'!r}?"
    known = [*policy_names(), "guarded", *(others or ())]
    words = [word if word in known else nearest(word, known) or word for word in name.split(":")]
    meant = ":".join(words)
    behind = words[-1] in known or (words[-1].isdecimal() and words[0] == "static" and int(words[-1]) > 0)
    if words[-1].isdecimal() and not behind:
        return "only static takes a number, 1 or more, as in static:128"
    return f"did you mean {meant!r}?" if behind and meant != name else "check the spelling"


def _beside(path: Path) -> str:
    """The advice for a path without a file: a similar file in its folder, or a policy's name."""
    if path.stem in policy_names():
        return f"did you mean {path.stem!r}?"
    there = [file.name for file in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
    meant = nearest(path.name, there)
    return "check the path" if meant is None else f"did you mean {str(path.with_name(meant))!r}?"


def make_policy(name: str, *, others: Mapping[str, OtherFactory] | None = None, **options: Any) -> Policy:
    """A fresh policy by name; this module's docstring lists the allowed names.

    others   factories of names that the caller added; they get the number after the colon, or None
    options  constructor arguments, for plain names and for files

    Raises `ConfigError` for an unknown name and `PolicyFileError` for a file that cannot be trusted.

    >>> type(make_policy("static:256")).__name__, type(make_policy("guarded:goodput")).__name__
    ('Static', 'Guard')
    >>> make_policy("nonsense")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    dynamix.errors.ConfigError: policy='nonsense' is not possible: allowed is ..., static:SIZE, ...
    """
    if name.startswith("compare:") and "," in name:
        return _named("dynamix.policies.alternating:by_names")(name.removeprefix("compare:"))
    parsed = parse_name(name, others=others)
    policy = _base_policy(parsed, others or {}, options)
    return _named("dynamix.policies.guard:Guard")(policy) if parsed.guarded else policy


def _unguarded(name: str) -> tuple[bool, str]:
    """Whether `name` asks for a guard, and the name behind that."""
    inner = name.removeprefix("guarded:")
    if inner.startswith("learning:"):
        fix = name.replace("learning:", "", 1)
        raise ConfigError("policy", name, "a policy as its file has it", message(f"policy={fix!r}"))
    if inner.startswith("guarded:"):
        raise ConfigError("policy", name, f"guarded:{inner.rpartition('guarded:')[2]}", "one guard is enough")
    return inner != name, inner


def _base_policy(name: PolicyName, others: Mapping[str, OtherFactory], options: dict[str, Any]) -> Policy:
    if name.kind == "file":
        from dynamix.policies.files import load_policy  # imports torch

        if not (path := Path(name.base)).is_file():
            fix = f"a policy is two files, NAME.safetensors and NAME.json; {_beside(path)}"
            raise PolicyFileError("policy", name.base, "an existing file", fix)
        return load_policy(name.base, **options)
    if name.kind == "other":
        return others[name.base](name.number)
    if name.kind == "class":
        return _own_policy(name)
    if name.number is not None:
        options = {"batch_size": name.number, **options}
    return _factory(name.base)(**options)


def _factory(name: str) -> Callable[..., Policy]:
    """The factory of the policy of a plain name."""
    if name in BUILT_IN:
        return _named(BUILT_IN[name])
    entry = plug_ins(POLICIES, BUILT_IN)[name]
    try:
        factory: Callable[..., Policy] = entry.load()
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        fix = f"mend or remove {named(entry)}"
        raise ConfigError("policy", name, "a plug-in that can be imported", f"{why(error)}; {fix}") from error
    if not callable(factory):
        raise ConfigError("policy", name, "a plug-in that makes a policy", f"mend or remove {named(entry)}")
    return factory


def _named(place: str) -> Callable[..., Policy]:
    module, _, attribute = place.partition(":")
    factory: Callable[..., Policy] = getattr(importlib.import_module(module), attribute)
    return factory


def _own_policy(name: PolicyName) -> Policy:
    """The policy that a user's class returns when called. Errors of the user's own code are passed on unchanged."""
    module = _module_of_file(name) if name.base.endswith(".py") else _module(name)
    factory = getattr(module, str(name.attribute), None)
    if not callable(factory):
        found = [n for n, value in vars(module).items() if isinstance(value, type) and hasattr(value, "decide")]
        allowed = f"a class of {name.base}: {', '.join(found) or 'none there has a method decide'}"
        raise ConfigError("policy", str(name), allowed, "check the name behind the colon")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        fix = "give arguments defaults, name a function that makes the policy, or pass the object instead of a name"
        raise ConfigError("policy", str(name), "what is called without arguments", f"{error}: {fix}") from error
    except ValueError:  # some code in C has no signature
        pass
    made = factory()
    if not isinstance(made, Policy):
        needed = "a class whose objects have decide, state_dict and load_state_dict"
        raise ConfigError("policy", str(name), needed, "see dynamix.Policy")
    return made


def _module(name: PolicyName) -> ModuleType:
    before = list(sys.path)
    # Unlike `python -m`, an installed command does not look here. Last, so that it hides nothing installed.
    sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name.base)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name.base}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports another that does not
        allowed = f"a module that can be imported here, or {allowed_names()}"
        fix = f"modules are looked for where Python does and in the working directory; {_meant(str(name))}"
        raise ConfigError("policy", str(name), allowed, fix) from error
    finally:
        sys.path[:] = before


def _module_of_file(name: PolicyName) -> ModuleType:
    path = Path(name.base).resolve()
    if not path.is_file():
        raise ConfigError("policy", str(name), "an existing .py file", _beside(path))
    known_as = f"_dynamix_policy_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if known_as in sys.modules:
        return sys.modules[known_as]
    spec = importlib.util.spec_from_file_location(known_as, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[known_as] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[known_as]
        raise
    return module

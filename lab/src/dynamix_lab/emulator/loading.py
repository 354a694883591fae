"""Scenarios from files: shipped ones, the user's YAML, and their traces, with readable errors."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError

from dynamix.errors import ScenarioError, UsageError, spelling
from dynamix_lab.emulator.scenario import Change, Device, Host, Load, Neighbour, Scenario, Trace
from dynamix_lab.emulator.traces import read_trace
from dynamix_lab.installed import how_to_install

MOST_TEXT = 2**22  # characters of a scenario
DEEPEST = 16  # nesting levels of a scenario; the shipped ones have 4
MOST_ALIASES = 8  # each can double a scenario: up to 256 times its text
_FIXED = "change it in the scenario"
_SHIPPED = Path(str(resources.files("dynamix_lab.emulator") / "scenarios"))


def shipped_scenarios() -> tuple[str, ...]:
    """Names that `load_scenario` accepts without a file.

    >>> "demo" in shipped_scenarios()
    True
    """
    return tuple(sorted(file.stem for file in _SHIPPED.glob("*.yaml")))


def scenario_schema() -> dict[str, Any]:
    """The JSON schema of a scenario's file; also shipped as scenario.schema.json in this folder.

    >>> scenario_schema()["required"]
    ['hosts']
    """
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Scenario.model_json_schema()}


def load_scenario(source: Scenario | Mapping[str, Any] | str | Path) -> Scenario:
    """A scenario from a shipped name, a YAML file, or a mapping. Raises `ScenarioError` naming value, range and fix.

    The path of a trace's file is relative to the scenario's file, or for a mapping to the working directory.

    >>> load_scenario("demo").workers
    4
    >>> load_scenario({"hosts": [{"cpu": 0}]})
    Traceback (most recent call last):
    dynamix.errors.ScenarioError: hosts[0].cpu=0 is not possible: allowed is 0.02 or more; change it in the scenario
    """
    if isinstance(source, Scenario):
        return source
    content: Any = source if isinstance(source, Mapping) else _read(source)
    if not isinstance(content, Mapping):
        fix = f"see a shipped one: {', '.join(shipped_scenarios())}"
        raise ScenarioError("scenario", _short(content), "a mapping with the key hosts", fix)
    content = dict(content)
    if not isinstance(source, Mapping):
        content.setdefault("name", _name_of(source))
    if isinstance(trace := content.get("trace"), Mapping):
        content["trace"] = _with_rows(trace, Path() if isinstance(source, Mapping) else _path_of(source).parent)
    try:
        return Scenario.model_validate(content)
    except ValidationError as error:
        _explain(error)


def _path_of(source: str | Path) -> Path:
    shipped = isinstance(source, str) and source in shipped_scenarios()
    return _SHIPPED / f"{source}.yaml" if shipped else Path(source)


def _with_rows(trace: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    if "file" not in trace:
        return dict(trace)
    if "times_s" in trace or "factors" in trace:
        raise ScenarioError("trace", sorted(trace), "either file, or times_s and factors", "remove one of them")
    if not isinstance(trace["file"], str):
        raise ScenarioError("trace.file", trace["file"], "the name of a CSV file", _FIXED)
    times_s, factors = read_trace(folder / trace["file"])
    return {**trace, "times_s": times_s, "factors": factors}


def _read(source: str | Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise UsageError(f"scenario {source}: this needs PyYAML: {how_to_install()}") from error
    try:
        text = _path_of(source).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        allowed = f"{', '.join(shipped_scenarios())}, or a readable YAML file"
        raise ScenarioError("scenario", str(source), allowed, f"check the name ({reason})") from None
    try:
        return _loaded(yaml, text)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        # PyYAML lets these through: dates that do not exist, numbers with too many digits, too many brackets.
        raise ScenarioError("scenario", str(source), "valid YAML", f"correct it ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else str(error)
        raise ScenarioError("scenario", str(source), "valid YAML", f"correct {where}") from None


def _loaded(yaml: Any, text: str) -> Any:
    """`yaml.safe_load` for a text of limited size, without aliases of aliases."""
    if len(text) > MOST_TEXT:
        raise ValueError(f"{len(text)} characters, at most {MOST_TEXT} are read")
    loader, depth, aliases = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0, 0
    for event in yaml.parse(text, Loader=loader):
        aliases += isinstance(event, yaml.AliasEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST or aliases > MOST_ALIASES:
            raise ValueError(f"more than {DEEPEST} levels or {MOST_ALIASES} aliases")
    return yaml.load(text, Loader=loader)


def _name_of(source: str | Path) -> str:
    stem = "".join(c if c.isalnum() and c.isascii() else "-" for c in Path(source).stem.lower()).strip("-")
    return stem[:64] or "unnamed"


def _short(value: Any) -> Any:
    return value if len(repr(value)) <= 80 else repr(value)[:77] + "..."


_KINDS: dict[str, type[BaseModel]] = {"neighbour": Neighbour, "load": Load}
_PARTS: dict[str, type[BaseModel]] = {"hosts": Host, "schedule": Change, "trace": Trace, "device": Device}
_BOUNDS = {
    **{"ge": "{} or more", "le": "{} or less", "gt": "more than {}", "lt": "less than {}"},
    **{"min_length": "{} or more entries", "max_length": "{} or fewer entries"},
    **{"expected": "{}", "pattern": "what matches {}", "expected_tags": "{}"},
}


def _explain(error: ValidationError) -> NoReturn:
    """Raise one of pydantic's complaints in the wording of the other errors: an unknown key, or the first."""
    errors = error.errors(include_url=False)
    first = next((found for found in errors if found["type"] == "extra_forbidden"), errors[0])
    limits, value, kind = first.get("ctx", {}), first["input"], first["type"]
    if isinstance(limits.get("error"), ScenarioError):  # one of ours, from a model's own check
        raise limits["error"] from None
    parts = [part for part in first["loc"] if part not in _KINDS]  # a union's tag is no place in the file
    if kind.startswith("union_tag"):
        parts.append("kind")
        value = value.get("kind") if isinstance(value, Mapping) else value
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts).lstrip(".")
    if kind == "extra_forbidden":
        tag = next((part for part in first["loc"] if part in _KINDS), None)
        model = _KINDS[str(tag)] if tag else _PARTS.get(str(parts[0]), Scenario) if len(parts) > 1 else Scenario
        allowed = "the keys " + ", ".join(model.model_fields)
        lacking = [e["loc"][-1] for e in errors if (e["type"], e["loc"][:-1]) == ("missing", first["loc"][:-1])]
        fix = f"did you mean {lacking[0]!r}?" if lacking else "correct or remove the key"
        fix = spelling(parts[-1], model.model_fields, fix)
        raise ScenarioError(f"unknown key {place}", _short(value), allowed, fix) from None
    if kind in ("missing", "union_tag_not_found"):
        raise ScenarioError(place, None, "a value", "the key is missing: add it to the scenario") from None
    allowed = " and ".join(text.format(limits[k]) for k, text in _BOUNDS.items() if k in limits)
    message = first["msg"][0].lower() + first["msg"][1:]
    raise ScenarioError(place, _short(value), allowed or message, _FIXED) from None

"""Reads and writes policy files: weights as safetensors, and a description as JSON next to them; never pickle.

Every description has `kind`, `schema` and the `sha256` of the weights' file. With a network it also has
`feature_schema`, the names of its `features`, and its `architecture` (`inputs`, `hidden`). The rest says how the policy
was made (`training`, `seed`, `validation`, `evaluation`), and holds what its kind needs.
"""

import hashlib
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynamix.errors import PolicyFileError
from dynamix.features import FEATURE_SCHEMA
from dynamix.plugins import LABORATORY, POLICY_FILES, named, plug_ins, why
from dynamix.policies.protocol import Policy

FILE_SCHEMA = 3
LARGEST_HIDDEN = 4096  # no larger network was ever trained; a damaged number could ask for all memory
# kind -> "module:class" with a class method `load`, and the name that `dynamix policy train` has for it. A class from
# another distribution may set that name as `trained_as`.
_KINDS = {
    "residual": ("dynamix.policies.learned.policy:LearnedPolicy", "dynamix"),
    "stigmergic": ("dynamix.policies.stigmergic.policy:StigmergicPolicy", "stigmergic"),
}
_OF_LABORATORY = ("additive",)  # kinds whose class is in dynamix-lab
_AGAIN = "copy both files again"


def load_policy(path: str | Path, **options: Any) -> Policy:
    """The policy in a file of any kind; `options` go to its class. Raises `PolicyFileError` if it cannot be trusted."""
    loaded: Policy = _class(_description(path)["kind"]).load(path, **options)
    return loaded


def describe_policy(path: str | Path) -> dict[str, Any]:
    """The description of a policy file that can be loaded. Raises `PolicyFileError` if it cannot."""
    return dict(getattr(load_policy(path), "about", {}))


def trained_as(kind: str) -> str:
    """The name under which `dynamix policy train --policy` makes files of this kind.

    >>> trained_as("residual")
    'dynamix'
    """
    return _KINDS[kind][1] if kind in _KINDS else str(getattr(_class(kind), "trained_as", kind))


def _class(kind: str) -> Any:
    """The class that loads files of this kind."""
    if kind in _KINDS:
        module, _, name = _KINDS[kind][0].partition(":")
        return getattr(importlib.import_module(module), name)
    entry = plug_ins(POLICY_FILES, _KINDS)[kind]
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        fix = f"mend or remove {named(entry)}"
        raise PolicyFileError("kind", kind, "a plug-in that can be imported", f"{why(error)}; {fix}") from error


def retrain(kind: str) -> str:
    """The advice for a file of this kind that this version cannot use."""
    return f"{_AGAIN}, or train one for this version with `dynamix policy train --policy {trained_as(kind)}`"


def write_policy(
    path: str | Path,
    kind: str,
    weights: nn.Module | dict[str, Tensor],
    about: dict[str, Any],
    *,
    features: Sequence[str] | None = None,
) -> None:
    """Write `path` (safetensors) and `path` with suffix .json.

    weights    a network with attributes `inputs` and `hidden`, or tensors by name
    features   names of the network's inputs, in order
    """
    from safetensors.torch import save

    if isinstance(weights, nn.Module):
        about = {**about, "architecture": {"inputs": weights.inputs, "hidden": weights.hidden}}
        weights = weights.state_dict()
    if features is not None:
        about = {**about, "feature_schema": FEATURE_SCHEMA, "features": list(features)}
    data = save({name: value.contiguous() for name, value in weights.items()})
    described = {**about, "kind": kind, "schema": FILE_SCHEMA, "sha256": hashlib.sha256(data).hexdigest()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(data)
    Path(path).with_suffix(".json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def read_policy(
    path: str | Path, kind: str, *, features: Sequence[str] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Description and weights of a file of this kind. Raises `PolicyFileError` if it cannot be trusted.

    features   the inputs that the network must have: then they and its architecture are checked in the description
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    file, sidecar = Path(path), Path(path).with_suffix(".json")
    about, data = _description(path), _read(file)
    if about["kind"] != kind:
        raise PolicyFileError("kind", about["kind"], f"{kind} in {sidecar}", "name a policy of that kind")
    if features is not None:
        _check_network(about, features, sidecar)
    if hashlib.sha256(data).hexdigest() != about.get("sha256"):
        raise PolicyFileError("policy", str(file), "a file whose sha256 is the one in its .json", retrain(kind))
    try:
        weights = load(data)
        finite = all(bool(torch.isfinite(value).all()) for value in weights.values())
    except (SafetensorError, ValueError, RuntimeError, LookupError, TypeError, ArithmeticError) as error:
        raise PolicyFileError("policy", str(file), "safetensors that torch can read", retrain(kind)) from error
    if not finite:
        raise PolicyFileError("policy", str(file), "finite weights", retrain(kind))
    return about, weights


def fill_network(net: nn.Module, weights: dict[str, Tensor], path: str | Path, kind: str) -> None:
    """Load the weights of a file into `net`. Raises `PolicyFileError` if they are of another network."""
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        allowed = "weights of the architecture in its .json"
        raise PolicyFileError("policy", str(path), allowed, retrain(kind)) from error


def _description(path: str | Path) -> dict[str, Any]:
    """The JSON next to a policy file. Raises `PolicyFileError` for another version or an unknown kind."""
    sidecar = Path(path).with_suffix(".json")
    if not Path(path).is_file():
        _read(Path(path))  # raises, with the reason
    text = _read(sidecar)
    try:
        about = json.loads(text.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # ValueError: JSON's and Unicode's errors, and ours
        raise PolicyFileError("policy", str(sidecar), "JSON", _AGAIN) from error
    if not isinstance(about, dict):
        raise PolicyFileError("policy", str(sidecar), "a JSON object", _AGAIN)
    if about.get("schema") != FILE_SCHEMA:
        fix = "train one for this version with `dynamix policy train`"
        raise PolicyFileError("schema", about.get("schema"), f"{FILE_SCHEMA} in {sidecar}", fix)
    kind = about.get("kind")
    known = [*_KINDS, *plug_ins(POLICY_FILES, _KINDS)]
    if not isinstance(kind, str) or kind not in known:
        missing = isinstance(kind, str) and kind in _OF_LABORATORY
        fix = f"it is part of the laboratory: {LABORATORY}" if missing else _AGAIN
        raise PolicyFileError("kind", kind, f"{', '.join(known)} in {sidecar}", fix)
    return about


def _check_network(about: dict[str, Any], features: Sequence[str], sidecar: Path) -> None:
    """Reject features other than this version's, and a network of a size that was never trained."""
    fix = retrain(about["kind"])
    if about.get("feature_schema") != FEATURE_SCHEMA:
        raise PolicyFileError("feature_schema", about.get("feature_schema"), f"{FEATURE_SCHEMA} in {sidecar}", fix)
    if about.get("features") != list(features):
        raise PolicyFileError("features", "another list", f"the features of this version in {sidecar}", fix)
    given = about.get("architecture")
    for name, low, high in (("inputs", len(features), len(features)), ("hidden", 1, LARGEST_HIDDEN)):
        value = given.get(name) if isinstance(given, dict) else None
        if type(value) is not int or not low <= value <= high:
            allowed = f"{low} to {high} in {sidecar}" if low < high else f"{low} in {sidecar}"
            raise PolicyFileError(f"architecture.{name}", value, allowed, _AGAIN)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        fix = "check the path; a policy is two files, NAME.safetensors and NAME.json"
        raise PolicyFileError("policy", str(file), "an existing file", fix) from error
    except OSError as error:
        raise PolicyFileError("policy", str(file), "a file that can be read", str(error.strerror)) from error


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not JSON")

"""Policy files of more than one kind: weights as safetensors, a description as JSON beside them; never pickle."""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynamix.errors import PolicyFileError
from dynamix.policies.protocol import Policy

FILE_SCHEMA = 1
_AGAIN = "copy both files again"


def write_policy(path: str | Path, kind: str, weights: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write `path` (safetensors) and `path` with suffix .json, which names the kind, the schema and the weights' hash."""
    from safetensors.torch import save

    data = save({name: value.contiguous() for name, value in weights.items()})
    described = {**about, "kind": kind, "schema": FILE_SCHEMA, "sha256": hashlib.sha256(data).hexdigest()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(data)
    Path(path).with_suffix(".json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def read_policy(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Description and weights of a file of this kind. Raises `PolicyFileError` if it cannot be trusted."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    file, sidecar = Path(path), Path(path).with_suffix(".json")
    data, text = _read(file), _read(sidecar)
    try:
        about = json.loads(text.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise PolicyFileError("policy", str(sidecar), "JSON", _AGAIN) from error
    if not isinstance(about, dict) or about.get("kind") != kind:
        raise PolicyFileError("policy", str(sidecar), f"the description of a policy of kind {kind!r}", _AGAIN)
    if about.get("schema") != FILE_SCHEMA:
        fix = "train one for this version"
        raise PolicyFileError("schema", about.get("schema"), f"{FILE_SCHEMA} in {sidecar}", fix)
    if hashlib.sha256(data).hexdigest() != about.get("sha256"):
        raise PolicyFileError("policy", str(file), "a file whose sha256 is the one in its .json", _AGAIN)
    try:
        weights = load(data)
    except (SafetensorError, ValueError) as error:
        raise PolicyFileError("policy", str(file), "safetensors", _AGAIN) from error
    if not all(bool(torch.isfinite(value).all()) for value in weights.values()):
        raise PolicyFileError("policy", str(file), "finite weights", _AGAIN)
    return about, weights


# kind -> "module:class" with a class method `load`
_KINDS = {
    "residual": "dynamix.policies.learned.policy:LearnedPolicy",
    "additive": "dynamix.policies.learned.additive:AdditivePolicy",
    "stigmergic": "dynamix.policies.stigmergic.policy:StigmergicPolicy",
}


def load_policy(path: str | Path, **options: Any) -> Policy:
    """The policy in a file of any kind. Raises `PolicyFileError` if it cannot be trusted."""
    module, _, name = _KINDS[kind_of(path) or "residual"].partition(":")
    loaded: Policy = getattr(importlib.import_module(module), name).load(path, **options)
    return loaded


def kind_of(path: str | Path) -> str | None:
    """What the description beside `path` calls its kind; None where there is none to read."""
    try:
        about = json.loads(Path(path).with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    kind = about.get("kind") if isinstance(about, dict) else None
    return kind if isinstance(kind, str) else None


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

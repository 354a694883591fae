"""`dynamix doctor`: what works on this machine, and how to enable what is missing."""

import sys
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

from dynamix.events.records import SCHEMA
from dynamix.events.run_folder import machine, versions
from dynamix.plugins import DOCTOR, LABORATORY, POLICIES, how_to_install, load_all, why
from dynamix.policies.registry import BUILT_IN
from dynamix.probes import probe_report

# extra of dynamix-train -> its packages; without the extra `cli` this command does not run
_EXTRAS = {
    "compression": ("numba",),
    "gpu": ("pynvml",),
    "dashboard": ("starlette", "uvicorn"),
}


def examine() -> dict[str, Any]:
    """Areas, each a list of {name, available, detail}: ours, and those of other distributions.

    Changes nothing.
    """
    own = {
        "probes": _entries(probe_report()),
        "communication backends": _entries(_backends()),
        "extras": _entries(_extras()),
        "policies of plug-ins": _entries(_policies()),
    }
    return {
        "schema": SCHEMA,
        "command": "doctor",
        "versions": versions(),
        "machine": machine(),
        "areas": {area: rows for area, rows in {**own, **_brought(own)}.items() if rows},
    }


def in_a_line(areas: Mapping[str, list[dict[str, Any]]]) -> str:
    """The available entries of each area, in one line."""
    works = {area: [entry["name"] for entry in entries if entry["available"]] for area, entries in areas.items()}
    return "Works here: " + "; ".join(f"{area}: {', '.join(names)}" for area, names in works.items() if names) + "."


def _entries(found: list[tuple[str, bool, str]]) -> list[dict[str, Any]]:
    return [{"name": name, "available": bool(there), "detail": detail} for name, there, detail in found]


def _backends() -> list[tuple[str, bool, str]]:
    import torch
    import torch.distributed as dist

    gloo = dist.is_available() and dist.is_gloo_available()
    nccl = dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()
    return [
        ("gloo", gloo, "CPU tensors over TCP" if gloo else "install a torch built with gloo"),
        ("nccl", nccl, "CUDA tensors" if nccl else "needs a CUDA device and a torch built for it"),
    ]


def _extras() -> list[tuple[str, bool, str]]:
    rows = []
    for extra, modules in _EXTRAS.items():
        missing = [name for name in modules if find_spec(name) is None]
        fix = f"{', '.join(missing)} missing: {how_to_install(extra)}"
        rows.append((extra, not missing, fix if missing else ", ".join(modules)))
    return rows


def _policies() -> list[tuple[str, bool, str]]:
    wrong: list[str] = []
    there = [(name, True, "can be imported") for name in load_all(POLICIES, BUILT_IN, wrong.append)]
    return there + [(text.partition(" ")[0], False, f"{text}; mend or remove it") for text in wrong]


def _brought(own: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """Areas of other distributions. An area that fails gives its reason; a missing laboratory is an area too."""
    areas = {}
    for name, ask in load_all(DOCTOR, own, lambda text: print(f"dynamix: plug-in {text}", file=sys.stderr)).items():
        try:
            areas[name] = _entries(ask())
        except Exception as error:  # third-party code may raise anything
            areas[name] = _entries([(name, False, why(error))])
    if find_spec("dynamix_lab") is None:
        missing = f"emulate, demo, bench, policy train and policy evaluate are missing: {LABORATORY}"
        areas["laboratory"] = _entries([("dynamix-lab", False, missing)])
    return areas

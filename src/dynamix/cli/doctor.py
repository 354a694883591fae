"""`dynamix doctor`: what this machine offers, and how to enable what is missing."""

from importlib.util import find_spec
from typing import Any

from dynamix.emulator import probe_mechanisms
from dynamix.events.records import SCHEMA
from dynamix.events.run_folder import machine, versions
from dynamix.probes import probe_report

# extra of dynamix-train -> what it brings; without typer and rich this command does not run
_EXTRAS = {
    "emulator": ("pyroute2", "yaml"),
    "compression": ("numba",),
    "learn": ("gymnasium", "pettingzoo"),
    "gpu": ("pynvml",),
    "dashboard": ("starlette", "uvicorn"),
}


def examine() -> dict[str, Any]:
    """Areas (probes, emulation, backends, extras), each a list of {name, available, detail}. Changes nothing."""
    return {
        "schema": SCHEMA,
        "command": "doctor",
        "versions": versions(),
        "machine": machine(),
        "areas": {
            "probes": _entries(probe_report()),
            "emulation": _entries([(name, *found) for name, found in probe_mechanisms().items()]),
            "communication backends": _entries(_backends()),
            "extras": _entries(_extras()),
        },
    }


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
        fix = f'{", ".join(missing)} missing: pip install "dynamix-train[{extra}]"'
        rows.append((extra, not missing, fix if missing else ", ".join(modules)))
    lab = find_spec("dynamix_lab") is not None
    return [*rows, ("laboratory", lab, "demo, bench" if lab else "demo and bench missing: pip install dynamix-lab")]

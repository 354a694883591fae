"""`dynamix doctor`: what this machine offers, and how to enable what is missing."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from dynamix.emulator import probe_mechanisms
from dynamix.events.records import SCHEMA
from dynamix.events.run_folder import machine, versions
from dynamix.probes.doctor import probe_report

EXTRAS = {  # of dynamix-train, and what each brings
    "cli": ("typer", "rich", "pydantic"),
    "emulator": ("pyroute2", "yaml"),
    "compression": ("numba",),
    "learn": ("gymnasium", "pettingzoo"),
    "gpu": ("pynvml",),
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


def show(found: dict[str, Any]) -> None:
    """Print what `examine` found as a table on stdout, word by word: brackets in it are text, not markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "what", "detail", show_edge=False)
    for area, entries in found["areas"].items():
        table.add_section()
        table.add_row("", Text(area, "bold"), "")
        for entry in entries:
            mark = Text("✓", "green") if entry["available"] else Text("–", "yellow")
            table.add_row(mark, Text(entry["name"]), Text(entry["detail"]))
    Console().print(table)


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
    rows = [_packages(extra, modules, f'"dynamix-train[{extra}]"') for extra, modules in EXTRAS.items()]
    return [*rows, _packages("laboratory", ("dynamix_lab",), "dynamix-lab")]


def _packages(name: str, modules: tuple[str, ...], distribution: str) -> tuple[str, bool, str]:
    missing = [module for module in modules if find_spec(module) is None]
    found = f"{', '.join(missing)} missing: pip install {distribution}" if missing else ", ".join(modules)
    return name, not missing, found

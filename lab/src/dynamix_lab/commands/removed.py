"""Removed commands of earlier versions. Calling one prints its replacement."""

from __future__ import annotations

import typer

from dynamix.removed import message
from dynamix_lab.commands.group import bench

_KEPT = "results/{}/table.md keeps what was measured"
_TABLE = "nothing: " + _KEPT
REMOVED = {
    "ablations": "nothing: no result of it was recorded",
    "aggregator": "dynamix bench fuzz for damaged frames; " + _KEPT.format("aggregator-2026-11-24"),
    "changecost": "nothing: what a new size costs is a constant of the simulated hosts",
    "cost": "dynamix bench overhead --decision-only, under either commit",
    "decisions": "scripts/same COMMIT",
    "codec-speed": "dynamix bench compression, which times exchanges on emulated hosts",
    "compression-cases": "pytest tests/homomorphic, which draws the same cases",
    "compression-map": _TABLE.format("compression-map-2026-11-24"),
    "emulator-accuracy": "pytest tests/lab/emulator, which checks limits and devices",
    "fidelity": "dynamix bench calibration",
    "gossip": _TABLE.format("gossip-2026-11-24"),
    "guard": _TABLE.format("guard-2026-11-25"),
    "import": "scripts/import-cost",
    "lengths": _TABLE.format("lengths-2026-11-24"),
    "live-learning": "nothing: no policy learns on the job",
    "netcosts": "nothing: no suite simulates these nets",
    "network-speed": "dynamix bench compression, which times exchanges on emulated hosts",
    "quality": "dynamix bench first-run-told --settings match, for scores at equal samples",
    "reaction": _TABLE.format("reaction-2026-11-26"),
    "rounds": _TABLE.format("how-often-2026-11-24"),
    "scaling": "dynamix policy evaluate, or dynamix bench opponents --places device-paper-like-x4/teacher-classes",
    "simspeed": "a loop over dynamix_lab.simulator.ClusterEnv.step, and a clock",
    "stepcount": _TABLE.format("stepcount-2026-11-24"),
    "transfer": _TABLE.format("transfer-2026-11-24"),
    "tta": "dynamix policy evaluate for simulated clusters, dynamix demo for emulated ones",
    "workloads": "nothing: no result of it was recorded",
}
"""Removed commands of `dynamix bench`, and what to use instead."""


def _refuse(context: typer.Context) -> None:
    name = context.info_name or ""
    typer.echo(f"error: dynamix bench {name}: {message(REMOVED[name])}", err=True)
    raise typer.Exit(2)


for _name in REMOVED:
    bench.command(
        _name,
        hidden=True,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_refuse)

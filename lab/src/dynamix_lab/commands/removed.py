"""Commands of earlier versions that are gone: whoever still calls one is told what to write now."""

from __future__ import annotations

import typer

from dynamix.removed import message
from dynamix_lab.commands.group import bench

REMOVED = {
    "changecost": "nothing: what a new size costs is a constant of the simulated hosts",
    "cost": "dynamix bench overhead --decision-only, under either commit",
    "decisions": "scripts/same COMMIT",
    "gossip": "nothing: results/gossip-2026-11-24/table.md keeps what was measured",
    "import": "scripts/import-cost",
    "live-learning": "dynamix bench transfer, for policies trained elsewhere: none learns on the job",
    "netcosts": "nothing: tasks/net_costs.py keeps what was measured",
    "simspeed": "a loop over dynamix_lab.simulator.ClusterEnv.step, and a clock",
    "workloads": "dynamix bench stepcount WORKLOAD, for how many steps a batch saves",
    "tta": "dynamix bench scaling for simulated clusters, dynamix demo for emulated ones",
}
"""A command under `dynamix bench`, and what to write in its place."""


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

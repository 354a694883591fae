"""What `scripts/rebalance` measures: text of unlike length, with Transformers' sampler and with `lengths=`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamix_lab.report import Table, number, percent, with_interval
from dynamix_lab.statistics import paired_ratio

OTHER = "transformers"  # the row that the others are compared with


def conclude(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By devices and by way: samples a second and the part of the time spent waiting, by seed, and the ratio to OTHER.

    rows   of each run: seed, devices, way, samples_per_s, waiting
    """
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        of = found.setdefault(row["devices"], {}).setdefault(row["way"], {"samples_per_s": [], "waiting": []})
        of["samples_per_s"].append(row["samples_per_s"])
        of["waiting"].append(row["waiting"])
    for ways in found.values():
        for of in ways.values():
            of["over"] = paired_ratio(of["samples_per_s"], ways[OTHER]["samples_per_s"]).to_dict()
    return {"devices": found}


def table(result: Mapping[str, Any]) -> Table:
    """A row for each way on each kind of devices; means over seeds."""
    rows = [
        [
            devices,
            way,
            number(_mean(of["samples_per_s"]), 0),
            "1" if way == OTHER else with_interval(of["over"], 2),
            percent(_mean(of["waiting"])),
        ]
        for devices, ways in result["devices"].items()
        for way, of in ways.items()
    ]
    return Table(["devices", "how samples are dealt", "samples/s", f"over {OTHER}", "waiting"], rows)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

"""The results of `bench peers`: ratios between policies and peers, the table, the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynamix_lab.harness.runs import CENSOR_FACTOR
from dynamix_lab.peers.kinds import split_name
from dynamix_lab.report import (
    Page,
    Section,
    Table,
    legend_below,
    look,
    measured,
    new_figure,
    number,
    provenance,
    with_interval,
)
from dynamix_lab.statistics import censored, paired_ratio


def ratios_between(policies: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Time of each of `names` over that of all others, except static, whose ratios exist already. Pairs share a seed.

    policies   `policies` of result.json; seeds in which static did not arrive have no bound and are omitted
    """
    static = policies["static"]["time_to_target_s"]
    kept = [i for i, time_s in enumerate(static) if time_s is not None]
    bounds = [CENSOR_FACTOR * static[i] for i in kept]
    times = {n: censored([part["time_to_target_s"][i] for i in kept], bounds) for n, part in policies.items()}
    return {
        f"{name}/{other}": {**paired_ratio(list(times[name]), list(times[other])).to_dict(), "pairs": len(kept)}
        for name in names
        for other in policies
        if kept and name in times and other not in (name, "static")
    }


def best_of(ratios: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Kind -> its fastest variant; of equal times (both censored) the first named.

    >>> best_of({"ddp/static": {"median": 1.0}, "ddp-256/static": {"median": 0.9}}, ["ddp", "ddp-256"])
    {'ddp': 'ddp-256'}
    """
    known = [name for name in names if f"{name}/static" in ratios]
    return _least({name: ratios[f"{name}/static"]["median"] for name in known})


def best_score(policies: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, str]:
    """Kind -> its variant with the highest final score, mean over seeds, for runs of equal length.

    >>> best_score({"ddp": {"final_accuracy": [0.8]}, "ddp-256": {"final_accuracy": [0.9]}}, ["ddp", "ddp-256"])
    {'ddp': 'ddp-256'}
    """
    known = {name: [a for a in policies[name]["final_accuracy"] if a is not None] for name in names}
    return _least({name: -float(np.mean(scores)) for name, scores in known.items() if scores})


def _least(values: Mapping[str, float]) -> dict[str, str]:
    """Kind -> its variant with the smallest value; of equal ones the first named."""
    found: dict[str, str] = {}
    for name, value in values.items():
        best = found.setdefault(split_name(name)[0], name)
        if value < values[best]:
            found[split_name(name)[0]] = name
    return found


def table(result: Mapping[str, Any]) -> Table:
    """One row per policy or peer. A time that was not reached counts as twice static's.

    On device hosts it includes the fraction of the worst rank's steps whose real work took longer than the device's.
    """
    rows = []
    paced = any(share is not None for part in result["policies"].values() for share in part["overran"])
    for name, part in result["policies"].items():
        ratio = result["ratios"].get(f"{name}/static", {})
        accuracies = [a for a in part["final_accuracy"] if a is not None]
        rows.append(
            [
                name + (" (best)" if name in result["best"].values() else ""),
                "1" if name == "static" else with_interval(ratio, 2),
                ", ".join("not reached" if t is None else f"{t:.0f}" for t in part["time_to_target_s"]),
                number(sum(accuracies) / len(accuracies) if accuracies else None, 3),
                ", ".join(str(steps) for steps in part["steps"]),
                "; ".join(" ".join(map(str, sizes)) for sizes in part["batch_sizes"]),
                *([", ".join("?" if share is None else f"{share:.1%}" for share in part["overran"])] if paced else []),
            ]
        )
    head = ["", "time / static's", "time to target (s)", "final score", "steps", "batch sizes at the end"]
    head += ["steps that overran"] if paced else []
    short = [[name, "absent", why] for name, why in result["absent"].items()]
    short += [[f["peer"], f"failed, seed {f['seed']}", f["reason"]] for f in result["failures"]]
    return Table(head, rows + [row + [""] * (len(head) - len(row)) for row in short])


def page(result: Mapping[str, Any]) -> str:
    """The text of report.html: the table, accuracy against time, versions and settings of each peer."""
    figure, (axes,) = new_figure()
    for i, (name, part) in enumerate(result["policies"].items()):
        for place, curve in enumerate(part["curve"]):
            times, scores = [point[0] for point in curve], [point[2] for point in curve]
            axes.plot(times, scores, label=None if place else name, **look(i))
    axes.axhline(result["target"], color="#222", lw=0.8, ls=":")
    axes.set(xlabel="seconds", ylabel="score on held-out data")
    legend_below(axes)
    said = (
        f"Emulated hosts on one machine, target {result['target']:.3f}. A run that does not arrive counts as twice "
        "static's time."
    )
    sections = [
        Section(table=table(result)),
        Section("Accuracy against time", figure=figure, caption="A line a run; dotted: the target."),
    ]
    details = {**measured(result), "peers": str(result["peers"])}
    title = f"Live peers on {result['scenario']}"
    return Page(title, sections, lead=[said, provenance(result)], details=details).html()

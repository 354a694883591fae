"""What `bench peers` says at the end: ratios between policies and peers, the table, the page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamix_lab.demo.report import COLOURS, STYLE, new_figure, svg
from dynamix_lab.harness.display import number
from dynamix_lab.harness.runs import CENSOR_FACTOR, PolicyRun
from dynamix_lab.peers.kinds import split_name
from dynamix_lab.statistics import censored, paired_ratio


def ratios_between(policies: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Time of each of `names` over that of everybody else but static, whose ratios exist; pairs as in the demo.

    policies   `policies` of result.json; seeds in which static did not arrive have no bound and are left out
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
    """Library -> which of its variants took least; those of equal time (both censored) in the order they were named.

    >>> best_of({"ddp/static": {"median": 1.0}, "ddp-256/static": {"median": 0.9}}, ["ddp", "ddp-256"])
    {'ddp': 'ddp-256'}
    """
    found: dict[str, str] = {}
    for name in names:
        if f"{name}/static" not in ratios:
            continue
        of = split_name(name)[0].partition("-")[0]
        if of not in found or ratios[f"{name}/static"]["median"] < ratios[f"{found[of]}/static"]["median"]:
            found[of] = name
    return found


def _rows(result: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, part in result["policies"].items():
        ratio = result["ratios"].get(f"{name}/static", {})
        spread = "" if ratio.get("low") is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        reached = ", ".join("not reached" if t is None else f"{t:.0f}" for t in part["time_to_target_s"])
        accuracies = [a for a in part["final_accuracy"] if a is not None]
        rows.append([
            name + (" (best)" if name in result["best"].values() else ""),
            "1" if name == "static" else number(ratio.get("median"), 2) + spread,
            reached,
            number(sum(accuracies) / len(accuracies) if accuracies else None, 3),
            ", ".join(str(steps) for steps in part["steps"]),
            "; ".join(" ".join(map(str, sizes)) for sizes in part["batch_sizes"]),
        ])  # fmt: skip
    for name, why in result["absent"].items():
        rows.append([name, "absent", why, "", "", ""])
    for failure in result["failures"]:
        rows.append([failure["peer"], f"failed, seed {failure['seed']}", failure["reason"], "", "", ""])
    return rows


_HEAD = ["", "time / static's", "time to target (s)", "final accuracy", "steps", "batch sizes at the end"]


def markdown(result: Mapping[str, Any]) -> str:
    """One line each; a time that was not reached counts as twice static's."""
    lines = [_HEAD, ["---"] * len(_HEAD), *_rows(result)]
    return "".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |\n" for line in lines)


def write_peers_report(path: Path, runs: Sequence[PolicyRun], result: Mapping[str, Any]) -> None:
    """report.html: the table, accuracy against time, versions and settings of each peer."""
    drawing, (axes,) = new_figure(1)
    names = list(result["policies"])
    for run in runs:
        place, first = names.index(run.policy), next(r for r in runs if r.policy == run.policy)
        axes.plot(
            [s.time_s for s in run.snapshots], [s.score for s in run.snapshots], color=COLOURS[place % len(COLOURS)],
            ls="-" if place < len(COLOURS) else "--", lw=1.4, label=run.policy if run is first else None,
        )  # fmt: skip
    axes.axhline(result["target"], color="#222", lw=0.8, ls=":")
    axes.set(xlabel="seconds", ylabel="test accuracy", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8)
    cells = [[html.escape(cell) for cell in row] for row in _rows(result)]
    table = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells)
    head = "<tr>" + "".join(f"<th>{cell}</th>" for cell in _HEAD) + "</tr>"
    keys = (
        "command",
        "commit",
        "cluster",
        "mechanisms",
        "scenario",
        "scenario_sha256",
        "seeds",
        "order",
        "machine",
        "peers",
    )
    details = html.escape("\n".join(f"{key}: {result.get(key)}" for key in keys))
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>dynamix bench peers</title><style>{STYLE}</style>'
        f"<h1>Live peers on {html.escape(result['scenario'])}</h1><p>Emulated hosts on one machine, target "
        f"{result['target']:.3f}. A run that does not arrive counts as twice static's time.</p>"
        f"<table>{head}{table}</table>{svg(drawing)}<h2>How this was measured</h2><pre>{details}</pre></html>\n"
    )
    path.write_text(page, encoding="utf-8")

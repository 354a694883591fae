"""What runs say in words and numbers: columns that tables of runs share, what they mean, and the ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamix_lab.harness.runs import PolicyRun
from dynamix_lab.report import number

SHARED = ("seed", "to target", "accuracy", "samples/s")  # columns of every table of runs, after their name


def shared_cells(run: PolicyRun) -> list[str]:
    """A run's name and what it has in the columns `SHARED`."""
    reached = run.time_to_target_s
    return [
        run.policy,
        str(run.seed),
        "not reached" if reached is None else f"{reached:.1f} s",
        number(run.accuracy, 3),
        number(run.samples_per_s, 0),
    ]


def shared_legend(target: str, of: str) -> list[str]:
    """What the columns `SHARED` mean; `of` names what trains together, such as "workers"."""
    return [
        f"to target: seconds of training until the accuracy on held-out data was {target}",
        "accuracy: on held-out data, when the run ended",
        f"samples/s: of all {of} together, over the whole run",
    ]


def ratio_lines(ratios: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences about the ratios of times to the target; what is attainable comes first."""
    lines = []
    reference = ratios.get("reference/static")
    if reference:
        cut = 100 * (1 - reference["median"])
        lines.append(f"attainable here (exact shares, batch 512): {cut:.0f} % less time than static")
    for name, ratio in ratios.items():
        if name == "reference/static":
            continue
        above, _, below = name.partition("/")
        spread = "" if ratio["low"] is None else f"  [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        lines.append(f"{above}: {ratio['median']:.2f} x the time of {below}{spread}")
    if lines:
        lines.append("below 1 x is faster; brackets hold a 95 % interval, which one pair of runs cannot give")
    return lines


def a_a_lines(found: Mapping[str, Any] | None) -> list[str]:
    """What static against itself says, where it says that the call may not be believed.

    >>> a_a_lines({"median": 1.08, "limit": 0.05, "within": False})
    ['A/A: static against itself is off by +8.0 %, more than 5 %: repeat the call whole, on a machine left alone']
    """
    if found is None or found["within"]:
        return []
    off = f"{100 * (found['median'] - 1):+.1f} %, more than {100 * found['limit']:.0f} %"
    return [f"A/A: static against itself is off by {off}: repeat the call whole, on a machine left alone"]


def caveats(result: Mapping[str, Any]) -> list[str]:
    """What a reader must know before the numbers: another policy than the shipped one, or a run that measures nothing.

    >>> caveats({"settings": {"policy": {"name": "mine.safetensors", "sha256": "0123456789abcdef"}}})
    ['"dynamix" was mine.safetensors in this call (sha256 0123456789ab)']
    >>> caveats({"quick": True})
    ['this was a smoke run of a few steps: its times and ratios mean nothing']
    """
    lines = []
    if result.get("quick"):
        lines.append("this was a smoke run of a few steps: its times and ratios mean nothing")
    ran = result.get("settings", {}).get("policy")
    if ran and ran["name"] != "shipped":
        which = f" (sha256 {ran['sha256'][:12]})" if "sha256" in ran else ""
        lines.append(f'"dynamix" was {ran["name"]} in this call{which}')
    return lines

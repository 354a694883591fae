"""What the demo says: the table, the sentences under it, and report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamix_lab.demo.plots import moves, plot_accuracy, plot_sizes
from dynamix_lab.demo.rows import ABOUT
from dynamix_lab.demo.table import SHARED, a_a_lines, caveats, ratio_lines, shared_cells, shared_legend
from dynamix_lab.emulator import Scenario
from dynamix_lab.experiment.places import DISTURBANCE
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.runs import PolicyRun
from dynamix_lab.report import Page, Section, Table, measured, provenance

HEAD = ("row", *SHARED, "samples", "late", "batch sizes")


def result_table(runs: Sequence[PolicyRun]) -> Table:
    """A row for each run."""
    return Table(HEAD, [_row(run) for run in runs])


def _row(run: PolicyRun) -> list[str]:
    return [
        *shared_cells(run),
        str(run.samples),
        str(sum(device.overruns for device in run.devices)),
        " ".join(map(str, run.batch_sizes)),
    ]


def legend(runs: Sequence[PolicyRun], target: float) -> list[str]:
    """What the columns of `result_table` mean, and what its rows are."""
    columns = [
        *shared_legend(f"{target:.2f}", "devices"),
        "samples: trained on until the run ended",
        "late: steps that this machine could not compute in the device's time, of all devices",
        "batch sizes: samples a step of each device, when the run ended",
    ]
    return columns + [f"{name}: {ABOUT[name]}" for name in dict.fromkeys(run.policy for run in runs)]


def sentences(runs: Sequence[PolicyRun], result: Mapping[str, Any]) -> list[str]:
    """What a reader must know first, and what the times say."""
    late = [f"{run.policy} (seed {run.seed})" for run in runs if run.overrun]
    lines, verdict, ratios = caveats(result), result["verdict"], result["ratios"]
    if late and not result["quick"]:
        lines.append(
            f"this machine was too slow for the devices in more than 1 % of the steps of {', '.join(late)}: "
            "these times are no measurement and have no verdict; run it again on a machine left alone"
        )
        rows = {run.policy for run in runs if run.overrun}
        verdict, ratios = None, {name: of for name, of in ratios.items() if not rows & set(name.split("/"))}
    if verdict is not None:
        lines.append(verdict["sentence"])
    return [*lines, *a_a_lines(result["a_a"]), *ratio_lines(ratios)]


def about_hosts(mechanisms: Mapping[str, str]) -> str:
    """What hosts are made of here.

    >>> about_hosts({"network": "loopback", "cpu": "device"})
    'hosts: paced devices, meeting over loopback: no root is needed'
    """
    network = mechanisms["network"]
    where = "loopback: no root is needed" if network.startswith("loopback") else f"network namespaces ({network})"
    return f"hosts: paced devices, meeting over {where}"


def say_end(display: Display, runs: Sequence[PolicyRun], result: Mapping[str, Any]) -> None:
    """The table and the sentences, on the terminal."""
    display.show(result_table(runs), legend(runs, result["target"]))
    for line in sentences(runs, result):
        display.say(line)


def write_report(path: Path, runs: Sequence[PolicyRun], result: Mapping[str, Any], scenario: Scenario) -> None:
    """Write the page."""
    target, seed = result["target"], runs[0].seed
    followed = [run for run in runs if run.seed == seed and run.policy == "dynamix" and run.events]
    sections = [
        Section("Every run", table=result_table(runs), notes=legend(runs, target)),
        Section(
            "Accuracy against time",
            figure=plot_accuracy(runs, target),
            caption=f"Accuracy on held-out data. A colour is a row, a line a seed; the dotted line is the target, "
            f"{target:.2f}.",
        ),
    ]
    if followed:
        figure = plot_sizes(followed, lambda run: moves(scenario, run.time_s, DISTURBANCE + run.seed))
        sections.append(
            Section(
                "Batch sizes that dynamix chose",
                figure=figure,
                caption=f"Samples a step of each device, seed {seed}. Dashed lines: the noisy neighbour moves; the "
                "number is the device that is slow from then on.",
            )
        )
    page = Page(
        "dynamix demo",
        sections,
        lead=[
            f"{_about(scenario, result)} {about_hosts(result['mechanisms']).capitalize()}.",
            *sentences(runs, result),
            provenance(result),
        ],
        details=measured(result),
    )
    path.write_text(page.html(), encoding="utf-8")


def _about(scenario: Scenario, result: Mapping[str, Any]) -> str:
    speeds = ", ".join(f"{host.cpu:g}" for host in scenario.hosts)
    said = f"The job {result['workload']} on {scenario.workers} emulated devices of relative speeds {speeds}."
    if (device := scenario.device) is None:
        return said
    return f"{said} At speed 1 a step takes {device.fixed_ms:g} ms and {device.per_sample_ms:g} ms for each sample."

"""The tables of every kind of result, made from result.json alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dynamix_lab.report import Section, Table, percent, sections_markdown


def kind(result: Mapping[str, Any]) -> str:
    """The command that made a result: demo, or the name after `bench`; or a script.

    >>> kind({"command": "dynamix bench peers --quick"}), kind({"command": "dynamix demo"})
    ('peers', 'demo')
    >>> kind({"command": "scripts/mutants --seed 1"})
    'mutants'
    """
    words = str(result["command"]).split()
    if words[0].startswith("scripts/"):
        return words[0].removeprefix("scripts/")
    return words[2] if words[1:2] == ["bench"] and len(words) > 2 else words[1]


def markdown_of(result: Mapping[str, Any]) -> str:
    """The tables of a result as Markdown; "" if its suite was removed."""
    from dynamix_lab.experiment import table as experiment

    if "beside" in result.get("plan", {}):  # an experiment's, whatever its name
        return sections_markdown(experiment.sections(result))
    make = _makers().get(kind(result))
    made = [] if make is None else make(result)
    return made.markdown() if isinstance(made, Table) else sections_markdown(made)


def _makers() -> dict[str, Callable[[Mapping[str, Any]], Table | list[Section]]]:
    from dynamix_lab.excavation import pages as excavation
    from dynamix_lab.peers import report as peers
    from dynamix_lab.suites import disturbance
    from dynamix_lab.suites.compression import report as compression
    from dynamix_lab.suites.faults import suite as faults
    from dynamix_lab.suites.fuzz import suite as fuzz
    from dynamix_lab.suites.observe import suite as observe
    from dynamix_lab.suites.overhead import suite as overhead
    from dynamix_lab.suites.stigmergy import report as stigmergy

    return {
        "excavation": excavation.sections,
        "faults": faults.table,
        "fuzz": fuzz.table,
        "disturbance": disturbance.table,
        "stigmergy": stigmergy.sections,
        "compression": compression.sections,
        "peers": peers.table,
        "overhead": overhead.sections,
        "observe": observe.sections,
        "mutants": mutants_table,
    }


def mutants_table(result: Mapping[str, Any]) -> Table:
    """One row: how many small errors, inserted into a package, its tests detect."""
    part = percent(result["killed"] / result["mutants"])
    row = [result["package"], str(result["mutants"]), str(result["killed"]), part, f"{result['limit_s']:.0f}"]
    return Table(["package", "mutants", "noticed", "part", "seconds allowed each"], [row])

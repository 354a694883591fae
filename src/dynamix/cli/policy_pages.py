"""Prints `dynamix policy show` for people: readable in a terminal of 80 columns."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from dynamix.policies.files import describe_policy, trained_as
from dynamix.policies.registry import PolicyName, make_policy, parse_name, shipped_file

_KINDS = {
    "residual": "A learned policy: a small network corrects the sizes that the goodput rule answers.",
    "stigmergic": "A rule with learned parameters: every worker sets its own size from its own metrics and the traces "
    "that all leave in one field. Nobody decides for the others.",
}
_GUARDED = "Guarded: where it does worse than the goodput rule, or fails, that rule takes over for a while."


def about_policy(name: str) -> dict[str, Any]:
    """All facts about a policy: a file's whole description, or its class and docstring.

    Raises `ConfigError` for an unknown name and `PolicyFileError` for a file that cannot be trusted.
    """
    parsed = parse_name(name)
    file = _file_of(parsed)
    if file is not None:
        return {**describe_policy(file), "file": str(file)}
    bare = str(dataclasses.replace(parsed, guarded=False))
    made = type(make_policy(bare))
    place = bare if parsed.kind == "class" else f"{made.__module__}.{made.__qualname__}"
    return {"kind": "rule", "class": place, "description": inspect.getdoc(made) or ""}


def print_about(name: str, about: Mapping[str, Any]) -> None:
    """The page of `dynamix policy show`."""
    console = Console(highlight=False)
    learned = about["kind"] != "rule"
    described = about["description"] if not learned else inspect.getdoc(type(make_policy(about["file"]))) or ""
    said = _KINDS.get(about["kind"]) or " ".join(described.split("\n\n", maxsplit=1)[0].split())
    console.print(Text(name, "bold"))
    console.print(Text(said or "A class of your own; its docstring says nothing."))
    if parse_name(name).guarded:
        console.print(Text(_GUARDED))
    console.print()
    console.print(facts(_of_file(about) if learned else [("class", about["class"]), ("learned", "nothing; a rule")]))
    console.print()
    if learned:
        if "stages" in about:
            _print_stages(console, about["stages"], about.get("evaluation"))
        else:
            _print_scores(console, name, about.get("evaluation"))
        console.print(Text(f"Everything in its file: dynamix policy show {name} --json"))
    console.print(Text(f"Score it now: dynamix policy evaluate {name}"))


def _print_stages(console: Console, stages: Mapping[str, Any], tested: Mapping[str, Any] | None) -> None:
    """Print the gain of each training stage, on the clusters used to choose between stages and on test clusters."""
    judged = {"validation": stages} | ({"test": tested} if tested else {})
    found = {title: part["speed_over_goodput"] for title, part in judged.items()}
    names = list(dict.fromkeys(name for part in found.values() for name in part))
    counts = [w for w in next(iter(stages["speed_over_goodput"].values())) if w != "all"]
    table = columns_table("", *found, *[f"at {w}" for w in counts if tested])
    last = found.get("test", {})
    for name in names:
        cells = [_interval(part.get(name, {}).get("all")) for part in found.values()]
        cells += [f"{last[name][w][0]:.3f}" if name in last else "-" for w in counts if tested]
        table.add_row(Text(name), *cells)
    console.print(Text("What the stages of its training gave: speed over the goodput rule's", "bold"))
    console.print(table)
    legend = (
        f"Above 1 is faster on the same simulated clusters ({stages['families']} families, {' and '.join(counts)} "
        "workers), in brackets the 95 % interval over clusters. Without PPO it learned what the next window shows in "
        "hindsight; PPO adds what whole trainings gain. Validation chose, test was read once after that."
    )
    console.print(Text(f"Chosen: {stages['chosen']}. {legend}"))
    console.print()


def _interval(figures: Sequence[float] | None) -> str:
    return "-" if figures is None else "{:.3f} ({:.3f}-{:.3f})".format(*figures)


def _print_scores(console: Console, name: str, evaluation: Mapping[str, Any] | None) -> None:
    """Print the scores on test clusters that the file holds."""
    if evaluation is None:
        console.print(Text("Its file holds no scores on test clusters.\n"))
        return
    seeds = evaluation.get("seeds") or [evaluation.get("seed")]
    console.print(Text(f"Scores on test clusters (seed {', '.join(map(str, seeds))}, never used in training)", "bold"))
    table = columns_table("workers", "goodput over the lagged reference's")
    for workers, score in evaluation.get("goodput_over_lagged_reference_by_workers", {}).items():
        table.add_row(str(workers), f"{score:.3f}")
    console.print(table)
    console.print(Text("1 is what a reference reaches that knows the true costs at the close of each window.\n"))


def _of_file(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts about how a file was made."""
    shape, training = about.get("architecture"), about.get("training", {})
    facts = [("file", about["file"]), ("sha256", str(about["sha256"])[:16] + "..."), ("made by", _command(about))]
    facts += [("commit", str(about.get("commit") or f"unknown, version {about.get('version', '0.1')}"))]
    if "workers" in training:
        facts += [("learned at", f"{', '.join(map(str, training['workers']))} simulated workers")]
    if shape:
        facts += [("network", f"{shape['inputs']} features of each worker, {shape['hidden']} units a layer")]
    if "parameters" in about:
        facts += [("parameters", ", ".join(f"{name} {value:.3g}" for name, value in about["parameters"].items()))]
    return facts


def _command(about: Mapping[str, Any]) -> str:
    """The command that made the file; if it is not recorded, an approximation from known settings."""
    if "command" in about:
        return str(about["command"])
    seed = about.get("seed", "not recorded")
    return f"dynamix policy train --policy {trained_as(about['kind'])} --seed {seed}; its settings are in its file"


def _file_of(name: PolicyName) -> Path | None:
    """The file of a policy's name, shipped or given; None for rules and classes."""
    if name.kind == "file":
        return Path(name.base)
    return shipped_file(name.base) if name.kind == "plain" else None


def columns_table(first: str, *others: str) -> Table:
    """A table of names and figures. What is too wide for the terminal goes on below: a cut name names nothing."""
    columns = [Column(Text(title), justify="right", overflow="fold") for title in others]
    return Table(Column(first, overflow="fold"), *columns, box=SIMPLE_HEAD, pad_edge=False)


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    """A table of names and values."""
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, "dim"), Text(value, overflow="fold"))
    return grid

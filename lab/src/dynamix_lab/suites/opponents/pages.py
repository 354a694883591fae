"""The table and the page of `dynamix bench opponents`: a part for each place, opponents first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynamix_lab.opponents.trial import Trial
from dynamix_lab.report import (
    Page,
    Section,
    Table,
    legend_beside,
    look,
    measured,
    new_figure,
    number,
    provenance,
    sections_markdown,
    with_interval,
)
from dynamix_lab.statistics import geometric_mean, paired_ratio
from dynamix_lab.suites.opponents import best
from dynamix_lab.suites.opponents.regimes import is_regime
from dynamix_lab.suites.opponents.verdict import over
from dynamix_lab.tasks.claim_jobs import CLAIM_JOBS

LEAD = (
    "Seconds to the job's target. Every row was tuned alike on other seeds: 15 trials of learning rates and of "
    "what the row has besides. A ratio is a time over another row's, below 1 is faster, with its 95 % interval over "
    "pairs. A run that did not arrive counts with the time at which it was ended."
)

# What all rows are compared with over all places.
OVER = ("single", "static", "lb_bsp", "goodput", "local", "lb_bsp-steps")
RULE = ("lb_bsp-parameters", "lb_bsp-steps")  # steps between meetings by what is measured, and tuned
CHOICE = ("lb_bsp-auto", "lb_bsp", "lb_bsp-parameters")  # workers meet as is faster; always over gradients; never


def sections(result: Mapping[str, Any]) -> list[Section]:
    """One for each place, in the order of the plan; before them what is over all regimes, and over all other places."""
    regimes = {text: part for text, part in result["places"].items() if is_regime(text)}
    places = {text: part for text, part in result["places"].items() if not is_regime(text)}
    whole = [_map(regimes)] if regimes else []
    whole += [_together(places, "All places")] if len(places) > 1 else []
    whole += [_together(regimes, "All regimes")] if len(regimes) > 1 else []
    product = best.section(result["places"])
    whole += [product] if product is not None and len(result["places"]) > 1 else []
    link = best.link_section(result["places"])
    whole += [link] if link is not None else []
    whole += without_arbiter(result["places"], "times_s", 1)
    return whole + [_section(text, part) for text, part in result["places"].items()]


def _together(places: Mapping[str, Any], heading: str) -> Section:
    """Ratios over all places, each weighing the same."""
    times: dict[str, dict[str, Any]] = {}
    for text, part in places.items():
        for row, seconds in part["times_s"].items():
            times.setdefault(row, {})[text] = seconds
    rows = [row for row, by_place in times.items() if len(by_place) == len(places)]
    others = over(rows, OVER)
    found = {f"{a}/{b}": paired_ratio(times[a], times[b]).to_dict() for a in rows for b in others if a != b}
    head = ["row", *(f"over {other}" for other in others)]
    table = Table(head, [[row, *ratio_cells(row, others, found, 2)] for row in rows])
    said = ["Every place weighs the same, and intervals are over places."]
    said += [_over_sentence(places, *names) for names in (RULE, CHOICE) if set(names) <= set(rows)]
    taken = sum(part.get("recorded", 0) for part in places.values())
    said += [f"{taken} runs are those of the earlier result that is held."] if taken else []
    return Section(heading, text=said, table=table)


def without_arbiter(places: Mapping[str, Any], times: str, digits: int) -> list[Section]:
    """Where both ran: the rule that every worker follows by itself beside the one that decides for all, by place.

    times    name of a place's seconds by row
    digits   of them
    """
    pairs = {text: part[times] for text, part in places.items() if {"dynamix", "stigmergic"} <= set(part[times])}
    if not pairs:
        return []

    def cells(name: str, central: Sequence[float], own: Sequence[float]) -> list[str]:
        each = [number(geometric_mean(seconds), digits) for seconds in (central, own)]
        return [name, *each, with_interval(paired_ratio(own, central).to_dict())]

    rows = [cells(text, of["dynamix"], of["stigmergic"]) for text, of in pairs.items()]
    central, own = ({text: of[row] for text, of in pairs.items()} for row in ("dynamix", "stigmergic"))
    rows.append(["all places", "–", "–", with_interval(paired_ratio(own, central).to_dict())])
    said = "Seconds with one rule that decides for all workers, and with one that each follows by itself."
    return [Section("Nobody decides for others", [said], Table(["place", "dynamix", "stigmergic", "ratio"], rows))]


def _over_sentence(places: Mapping[str, Any], ours: str, *others: str) -> str:
    """A row over another, or over the better of several in each place."""
    times = {
        text: {row: geometric_mean(part["times_s"][row]) for row in (ours, *others)} for text, part in places.items()
    }
    each = {text: of[ours] / min(of[other] for other in others) for text, of in times.items()}
    beside = others[0] if len(others) == 1 else f"the better of {' and '.join(others)}"
    worst = max(each, key=each.__getitem__)
    mean = geometric_mean(list(each.values()))
    return f"{ours} takes {mean:.2f} of the time of {beside} in the mean, {each[worst]:.2f} at worst ({worst})."


def _map(places: Mapping[str, Any]) -> Section:
    """Who wins where: speeds over one worker alone, and who is first, a line for each regime."""
    names = list(dict.fromkeys(row for part in places.values() for row in part["times_s"] if row != "single"))
    rows = []
    for text, part in places.items():
        scenario, _, job = text.partition("/")
        workers, spread, ratio = (field[1:] for field in scenario.removeprefix("regime-").split("-"))
        alone = geometric_mean(part["times_s"]["single"])
        speeds = {row: alone / geometric_mean(times) for row, times in part["times_s"].items()}
        first = part["first"]
        level = f" ({', '.join(first['level'])})" if first["level"] else ""
        per_worker = number(CLAIM_JOBS[job].critical_batch / int(workers), 0) if job in CLAIM_JOBS else "–"
        shown = [number(speeds.get(row), 2) for row in names]
        rows.append([ratio, per_worker, f"{spread}:1", workers, job, *shown, f"{first['best']}{level}"])
    head = ["exchange/compute", "critical batch/W", "speeds", "W", "job", *names, "first (not told from it)"]
    said = (
        "Speed over the fastest worker alone, each row at what it was tuned to. Exchange over compute is the time of "
        "one exchange of gradients over the fastest worker's on 64 samples."
    )
    ends = Counter(row for part in places.values() for row, cell in part["rows"].items() if cell["at_edge"])
    counted = ", ".join(f"{row} in {ends[row]}" for row in names if ends[row])
    edges = [f"Tuned to an end of what was tried, of {len(places)} cells: {counted}."] if counted else []
    return Section("Who wins where", text=[said, *edges], table=Table(head, rows))


def markdown(result: Mapping[str, Any]) -> str:
    """table.md."""
    return sections_markdown(sections(result), level=3)


def page(result: Mapping[str, Any]) -> str:
    """report.html."""
    shown = sections(result)
    if result["places"]:
        shown = [Section(figure=_figure(result["places"]), caption="Speed over the fastest worker alone."), *shown]
    title = f"{result['command']}: {len(result['places'])} places"
    return Page(title, shown, lead=[LEAD, provenance(result)], details=measured(result)).html()


def _section(text: str, part: Mapping[str, Any]) -> Section:
    found = part["verdict"]
    synchronous, rarely = found["best_synchronous"], found["best_rarely"]
    others = over(tuple(part["times_s"]), ("single", "static", synchronous, rarely))
    rows = []
    for row, times in part["times_s"].items():
        trial = Trial.from_dict(part["rows"][row]["trial"])
        arrived = part["arrived"][row]
        came = "" if all(arrived) else f" ({sum(arrived)} of {len(arrived)} arrived)"
        cells = [row, described(trial), f"{number(geometric_mean(times), 1)}{came}"]
        rows.append([*cells, *ratio_cells(row, others, part["ratios"], 2)])
    head = ["row", "tuned to", "seconds", *(f"over {other}" for other in others)]
    said = [found["sentence"], first_sentence(part["first"]), *_edges(part["rows"])]
    return Section(text, text=said, table=Table(head, rows))


def first_sentence(first: Mapping[str, Any]) -> str:
    """Who is first, and who is not told from it.

    >>> first_sentence({"best": "local", "level": ["static", "dynamix"]})
    'First: local, not told from it: static, dynamix.'
    """
    level = f", not told from it: {', '.join(first['level'])}" if first["level"] else ""
    return f"First: {first['best']}{level}."


def ratio_cells(row: str, others: Iterable[str], ratios: Mapping[str, Any], digits: int) -> list[str]:
    """A row's ratios to other rows: 1 to itself, a dash where there is none."""
    found = {other: ratios.get(f"{row}/{other}") for other in others}
    return ["1" if row == other else with_interval(ratio, digits) if ratio else "–" for other, ratio in found.items()]


def _edges(rows: Mapping[str, Any]) -> list[str]:
    """Which rows were tuned to an end of what was tried: a better trial may lie beyond."""
    ends = {row: " and ".join(cell["at_edge"]).replace("_", " ") for row, cell in rows.items() if cell["at_edge"]}
    said = ", ".join(f"{row} ({what})" for row, what in ends.items())
    return [f"Tuned to an end of what was tried: {said}."] if ends else []


def described(trial: Trial) -> str:
    """A trial's numbers, short.

    >>> described(Trial("static", "static", 32, 0.1))
    'rate 0.1, 32 a worker'
    """
    parts = [f"rate {trial.learning_rate:g}", f"{trial.batch_size} a worker"]
    if trial.lr_rule != "none":
        parts.append(trial.lr_rule)
    if trial.local is not None:
        often = "steps by the ratio" if trial.local.period == "ratio" else f"{trial.local.steps} steps a round"
        parts += [often, f"momentum {trial.local.momentum}"]
    return ", ".join(parts)


def _figure(places: Mapping[str, Any]) -> Any:
    """Every row's speed over `single` at each place."""
    figure, (axes,) = new_figure(height=1.5 + 0.35 * len(places))
    names = list(dict.fromkeys(row for part in places.values() for row in part["times_s"]))
    for i, row in enumerate(names):
        at = [place for place, part in enumerate(places.values()) if row in part["times_s"]]
        parts = [part["times_s"] for part in places.values() if row in part["times_s"]]
        speeds = [geometric_mean(times["single"]) / geometric_mean(times[row]) for times in parts]
        filled = None if i < 8 else "none"
        axes.plot(speeds, at, "o", ms=5, label=row, color=look(i)["color"], mfc=filled)
    axes.axvline(1.5, color="#222", lw=0.8, ls=":")
    axes.set(yticks=range(len(places)), xlabel="speed over the fastest worker alone (dotted: where distributing pays)")
    axes.set_yticklabels(list(places))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    legend_beside(axes, columns=2)
    return figure

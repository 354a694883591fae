"""The tables and the page of an experiment, made from result.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from dynamix_lab.experiment.measures import MATCHES
from dynamix_lab.experiment.verdict import OPPONENTS, PAYS, SINGLE, verdict
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
    percent,
    provenance,
    sections_markdown,
    with_interval,
)
from dynamix_lab.statistics import geometric_mean, mean_interval, paired_ratio, who_wins

LEADS = {
    "finish": "Every run trains the same budget of samples, with a cosine of the rate over it. Seconds are those to "
    "its end; the score is held out, the mean of the last five evaluations.",
    "reach": "Seconds until the score stays at the job's target: the mean of five evaluations is there, and no later "
    "one falls below it by more than half a point. A run that did not arrive counts with the time at which it was "
    "ended, so its ratio is at least that.",
    "crossing": "Seconds until two scores in a row are at the job's target. A run that did not arrive counts with the "
    "time at which it was ended.",
}
RATIO = "A ratio is a time over another row's, below 1 is faster, with its 95 % interval"
TUNED = "Every row was tuned alike, on seeds of their own: rates and what the row has besides."

Case = Mapping[str, Any]
Readings = Mapping[str, Any]  # of a row: columns by seed


def sections(result: Mapping[str, Any]) -> list[Section]:
    """By setting and batch: all places together, ours beside the best of the others, then each place."""
    plan, groups = result["plan"], dict[str, list[Case]]()
    for case in result["cases"]:
        batch = "" if case["batch"] is None else f", b0 = {case['batch']}"
        groups.setdefault(f"{case['setting']}{batch}", []).append(case)
    made: list[Section] = []
    for heading, cases in groups.items():
        made += [_together(heading, cases, plan)] if len(cases) > 1 else []
        made += _beside_the_best(heading, cases, plan) if plan["ours"] else []
        made += [_section(heading, case, plan) for case in cases]
    return made


def markdown(result: Mapping[str, Any]) -> str:
    """table.md."""
    return sections_markdown(sections(result), level=3)


def page(result: Mapping[str, Any]) -> str:
    """report.html."""
    plan = result["plan"]
    shown = [*_figures(result), *sections(result)]
    lead = [*plan["about"], *([TUNED] if plan["tuning"] else []), provenance(result)]
    return Page(plan["title"], shown, lead=lead, details=measured(result)).html()


def points(case: Case, row: str, beside: Sequence[str]) -> list[float] | None:
    """By seed, how many points a row's score is above that of the best of `beside`; None if none of them ran."""
    known = [name for name in beside if name in case["rows"]]
    if not known:
        return None
    best = max(known, key=lambda name: fmean(case["rows"][name]["score"]))
    pairs = zip(case["rows"][row]["score"], case["rows"][best]["score"], strict=True)
    return [100 * (mine - other) for mine, other in pairs]


def counts(case: Case, row: str, beside: Sequence[str]) -> bool:
    """Whether a row's time counts: it arrived, and ended with a score not more than 0.3 points below."""
    above = points(case, row, beside)
    return all(case["rows"][row]["arrived"]) and (above is None or fmean(above) >= -100 * MATCHES)


def ratio(case: Case, row: str, other: str, digits: int = 2) -> str:
    """A row's time over another's as a cell, with >= or <= if some runs of one did not arrive."""
    if other not in case["rows"]:
        return "–"
    if row == other:
        return "1"
    mine, theirs = (case["rows"][name] for name in (row, other))
    sign = _sign(all(mine["arrived"]), all(theirs["arrived"]))
    return (
        "–"
        if sign is None
        else sign + with_interval(paired_ratio(mine["seconds"], theirs["seconds"]).to_dict(), digits)
    )


def _sign(mine: bool, theirs: bool) -> str | None:
    return ("" if theirs else "≤ ") if mine else ("≥ " if theirs else None)


def _over_places(cases: Sequence[Case], row: str, other: str) -> str:
    """Time over another row's with its interval over places."""
    if row == other:
        return "1"
    both = [case for case in cases if {row, other} <= set(case["rows"])]
    if both and both[0]["setting"] == "finish":  # a run that diverged ended before its time
        both = [case for case in both if all(case["rows"][row]["arrived"]) and all(case["rows"][other]["arrived"])]
    if not both:
        return "–"
    signs = [_sign(*(all(case["rows"][name]["arrived"]) for name in (row, other))) for case in both]
    if None in signs or {"≥ ", "≤ "} <= set(signs):
        return "–"
    mine, theirs = ({case["place"]: case["rows"][name]["seconds"] for case in both} for name in (row, other))
    return max(filter(None, signs), default="") + with_interval(paired_ratio(mine, theirs).to_dict(), 2)


def _together(heading: str, cases: Sequence[Case], plan: Mapping[str, Any]) -> Section:
    """Every row over all places, each of which weighs the same."""
    names = list(dict.fromkeys(row for case in cases for row in case["rows"]))
    against = [name for name in plan["against"] if name in names]
    beside = plan["beside"]
    finish = cases[0]["setting"] == "finish"
    head = ["row", *(f"over {other}" for other in against)]
    head += ["score, points", "time counts at", "of physics"] if finish else ["arrived"]
    rows = []
    for name in names:
        there = [case for case in cases if name in case["rows"]]
        cells = [name, *(_over_places(cases, name, other) for other in against)]
        if finish:
            means = [fmean(above) for case in there if (above := points(case, name, beside)) is not None]
            cells.append(signed(mean_interval(means).to_dict()) if means else "–")
            cells.append(f"{sum(counts(case, name, beside) for case in there)} of {len(there)}")
            parts = [part for case in there if (part := of_physics(case, name)) is not None]
            cells.append(percent(geometric_mean(parts)) if parts else "–")
        else:
            came = [one for case in there for one in case["rows"][name]["arrived"]]
            cells.append(f"{sum(came)} of {len(came)}")
        rows.append(cells)
    said = [LEADS[cases[0]["setting"]], f"{RATIO} over places; every place weighs the same."]
    if finish and beside:
        said.append(
            f"Points say how far the score is above the best of {', '.join(beside)} at a place. A time counts if they "
            "are not below -0.3. Of physics: the least time in which a place's devices could compute these samples, "
            "with W b0 a step, exact shares and free exchange, as a part of the row's time."
        )
    return Section(f"{heading}: {len(cases)} places", text=said, table=Table(head, rows))


def _beside_the_best(heading: str, cases: Sequence[Case], plan: Mapping[str, Any]) -> list[Section]:
    """Our rows beside the best of the others at each place, which is known only afterwards."""
    rows, ratios = [], dict[str, list[float]]()
    for case in cases:
        others = [name for name in case["rows"] if name not in plan["ours"] and counts(case, name, plan["beside"])]
        if not others:
            continue
        best = min(others, key=lambda name: geometric_mean(case["rows"][name]["seconds"]))
        mine = [name for name in plan["ours"] if name in case["rows"]]
        for name in mine:
            pair = (case["rows"][one]["seconds"] for one in (name, best))
            ratios.setdefault(name, []).append(paired_ratio(*pair).median)
        rows.append([case["place"], best, *(ratio(case, name, best) for name in mine)])
    if not rows:
        return []
    over = "; ".join(f"{name} {geometric_mean(each):.2f}, at worst {max(each):.2f}" for name, each in ratios.items())
    said = "Seconds over those of the best other row of a place" + (" whose time counts" if plan["beside"] else "")
    table = Table(["place", "best of the others", *ratios], rows)
    return [Section(f"{heading}: ours beside the best of the others", [f"{said}. In the mean: {over}."], table)]


def _section(heading: str, case: Case, plan: Mapping[str, Any]) -> Section:
    """One place."""
    against = [name for name in plan["against"] if name in case["rows"]]
    finish, tuned = case["setting"] == "finish", plan["tuning"] is not None
    head = ["row", *(["tuned to"] if tuned else []), "seconds"]
    head += ["score", "points"] if finish else ["arrived"]
    rows = []
    for name, row in case["rows"].items():
        cells = [name, *([described(Trial.from_dict(row["trial"]))] if tuned else [])]
        cells.append(number(geometric_mean(row["seconds"]), 1))
        if finish:
            above = points(case, name, plan["beside"])
            cells += [number(100 * fmean(row["score"]), 2), "–" if above is None else f"{fmean(above):+.2f}"]
        else:
            cells.append(f"{sum(row['arrived'])} of {len(row['arrived'])}")
        rows.append([*cells, *(ratio(case, name, other) for other in against)])
    table = Table([*head, *(f"over {other}" for other in against)], rows)
    return Section(f"{heading}: {case['place']}", text=_said(case), table=table)


def _said(case: Case) -> list[str]:
    """What is to be said of a place beside its table."""
    rows: Mapping[str, Readings] = case["rows"]
    seconds = {name: row["seconds"] for name, row in rows.items()}
    kinds = {name: Trial.from_dict(row["trial"]) for name, row in rows.items()}
    meets = [name for name, trial in kinds.items() if trial.policy in OPPONENTS and trial.kind == "policy"]
    said = []
    if SINGLE in rows and meets:
        said.append(verdict(seconds, meets, [name for name, trial in kinds.items() if trial.kind == "local"]).sentence)
    if case["setting"] == "finish" and case["least_s"] is not None:
        said.append(f"Physics allows {geometric_mean(case['least_s']):.1f} s.")
    if case["setting"] != "finish" and len(seconds) > 1:
        first = who_wins(seconds)
        level = f", not told from it: {', '.join(first.level)}" if first.level else ""
        said.append(f"First: {first.best}{level}.")
    ends = {name: " and ".join(row["at_edge"]).replace("_", " ") for name, row in rows.items() if row["at_edge"]}
    if ends:
        each = ", ".join(f"{name} ({what})" for name, what in ends.items())
        said.append(f"Tuned to an end of what was tried: {each}.")
    if late := [name for name, row in rows.items() if any(row["overrun"])]:
        said.append(f"No measurement, as devices overran after every repeat: {', '.join(late)}.")
    return said


def of_physics(case: Case, row: str) -> float | None:
    """The least time that physics allows as a part of a row's."""
    found = case["rows"][row]
    if case["least_s"] is None or not all(found["arrived"]):
        return None
    return paired_ratio(case["least_s"], found["seconds"]).median


def signed(interval: Mapping[str, float | None]) -> str:
    """A mean of points with its interval.

    >>> signed({"mean": -0.52, "low": -1.0, "high": 0.04})
    '-0.5 (-1.0..+0.0)'
    """
    mean, low, high = (interval[name] for name in ("mean", "low", "high"))
    assert mean is not None
    return f"{mean:+.1f}" if low is None or high is None else f"{mean:+.1f} ({low:+.1f}..{high:+.1f})"


def described(trial: Trial) -> str:
    """A trial's numbers, short.

    >>> described(Trial("static", "static", 32, 0.1))
    'rate 0.1, 32 a worker'
    """
    parts = [f"rate {trial.learning_rate:.3g}", f"{trial.batch_size} a worker"]
    if trial.schedule != "constant":
        parts.append(f"{trial.schedule} over {trial.budget}")
    if trial.lr_rule != "none":
        parts.append(trial.lr_rule)
    if trial.local is not None:
        often = "steps by the ratio" if trial.local.period == "ratio" else f"{trial.local.steps} steps a round"
        parts += [often, f"momentum {trial.local.momentum}"]
    return ", ".join(parts)


def _figures(result: Mapping[str, Any]) -> list[Section]:
    """Time against score, a dot for each row: mean over places."""
    plan, made = result["plan"], []
    if not plan["beside"] or not plan["against"]:
        return _speeds(result)
    first = plan["against"][0]
    groups: dict[str, list[Case]] = {}
    for case in result["cases"]:
        if case["setting"] == "finish" and first in case["rows"]:
            groups.setdefault(str(case["batch"]), []).append(case)
    for batch, cases in groups.items():
        figure, (axes,) = new_figure(height=3.6)
        for i, name in enumerate(dict.fromkeys(row for case in cases for row in case["rows"])):
            there = [case for case in cases if name in case["rows"] and all(case["rows"][name]["arrived"])]
            if there:
                over = [
                    paired_ratio(case["rows"][name]["seconds"], case["rows"][first]["seconds"]).median for case in there
                ]
                above = [fmean(points(case, name, plan["beside"]) or [0.0]) for case in there]
                filled = None if i < 8 else "none"
                axes.plot(geometric_mean(over), fmean(above), "o", label=name, color=look(i)["color"], mfc=filled)
        axes.axhline(-100 * MATCHES, color="#222", lw=0.8, ls=":")
        axes.set(xscale="log", xlabel=f"time over that of {first}", ylabel="score, points")
        legend_beside(axes)
        caption = "Mean over places. Below the dotted line speed is paid with score."
        made.append(Section(f"finish, b0 = {batch}", figure=figure, caption=caption))
    return made


def _speeds(result: Mapping[str, Any]) -> list[Section]:
    """Every row's speed over one worker alone at each place."""
    cases = [case for case in result["cases"] if SINGLE in case["rows"]]
    if not cases:
        return []
    figure, (axes,) = new_figure(height=1.5 + 0.35 * len(cases))
    for i, row in enumerate(dict.fromkeys(row for case in cases for row in case["rows"])):
        at = [place for place, case in enumerate(cases) if row in case["rows"]]
        speeds = [
            geometric_mean(case["rows"][SINGLE]["seconds"]) / geometric_mean(case["rows"][row]["seconds"])
            for case in cases
            if row in case["rows"]
        ]
        filled = None if i < 8 else "none"
        axes.plot(speeds, at, "o", ms=5, label=row, color=look(i)["color"], mfc=filled)
    axes.axvline(PAYS, color="#222", lw=0.8, ls=":")
    axes.set(yticks=range(len(cases)), xlabel="speed over the fastest worker alone (dotted: distributing pays)")
    axes.set_yticklabels([case["place"] for case in cases])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    legend_beside(axes, columns=2)
    return [Section(figure=figure, caption="Speed over the fastest worker alone.")]

"""The tables and the page of an experiment, made from result.json alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from dynamix_lab.experiment.measures import MATCHES, OF_BUDGET
from dynamix_lab.experiment.verdict import OPPONENTS, PAYS, SINGLE, verdict
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.report import (
    Page,
    Section,
    Table,
    dot,
    legend_below,
    measured,
    new_figure,
    number,
    percent,
    provenance,
    sections_markdown,
    with_interval,
)
from dynamix_lab.statistics import Interval, geometric_mean, mean_interval, paired_ratio, who_wins

LEADS = {
    "finish": "Every run trains the same budget of samples, with a cosine of the rate over it. Seconds are those to "
    "its end; the score is held out, the mean of the evaluations in the last eighth: five, if a row meets often.",
    "match": "Every run spends the same budget under a cosine over it. A row whose batch moves counts progress, so "
    "it may train on more samples. Seconds are those to the end; the score is held out, as in finish.",
    "reach": "Seconds until the score stays at the job's target: the mean of five evaluations is there, and no later "
    "one falls below it by more than half a point. A run that did not arrive counts with the time at which it was "
    "ended, so its ratio is a bound. One that diverged has none.",
    "crossing": "Seconds until two scores in a row are at the job's target. A run that did not arrive counts with the "
    "time at which it was ended.",
}
BEYOND = 0.02  # of the budget: a row that trains more than this is named
RATIO = "A ratio is a time over another row's, below 1 is faster, with its 95 % interval"
TUNED = "Every row was tuned alike, on seeds of their own: rates and what the row has besides."

Case = Mapping[str, Any]
Readings = Mapping[str, Any]  # a row: columns by seed


def sections(result: Mapping[str, Any]) -> list[Section]:
    """The sections by setting and batch: all places together, the jobs of each cluster that has several but not all,
    our rows compared with the best of the others, scores of rows by place, then each place."""
    plan, groups = result["plan"], dict[str, list[Case]]()
    for case in result["cases"]:
        batch = "" if case["batch"] is None else f", b0 = {case['batch']}"
        groups.setdefault(f"{case['setting']}{batch}", []).append(case)
    made: list[Section] = []
    for heading, cases in groups.items():
        made += [_together(heading, cases, plan)] if len(cases) > 1 else []
        by_cluster: dict[str, list[Case]] = {}
        for case in cases:
            by_cluster.setdefault(case["place"].partition("/")[0], []).append(case)
        some = {name: jobs for name, jobs in by_cluster.items() if 1 < len(jobs) < len(cases)}
        made += [_together(f"{heading}, {name}", jobs, plan) for name, jobs in some.items()]
        made += _beside_the_best(heading, cases, plan) if plan["ours"] else []
        made += [_scores(heading, cases)] if len(cases) > 1 and cases[0]["setting"] in OF_BUDGET else []
        made += [_section(heading, case, plan) for case in cases]
    return made


def markdown(result: Mapping[str, Any]) -> str:
    """The text of table.md."""
    return sections_markdown(sections(result))


def page(result: Mapping[str, Any]) -> str:
    """The text of report.html."""
    plan = result["plan"]
    shown = [*_figures(result), *sections(result)]
    lead = [*plan["about"], *([TUNED] if plan["tuning"] else []), provenance(result)]
    return Page(plan["title"], shown, lead=lead, details=measured(result)).html()


def points(case: Case, row: str, beside: Sequence[str]) -> list[float] | None:
    """By how many points a row's score exceeds that of the best of `beside`, by seed. None if none of them ran."""
    known = [name for name in beside if name in case["rows"]]
    if not known:
        return None
    best = max(known, key=lambda name: fmean(case["rows"][name]["score"]))
    pairs = zip(case["rows"][row]["score"], case["rows"][best]["score"], strict=True)
    return [100 * (mine - other) for mine, other in pairs]


def arrived(case: Case, row: str) -> bool:
    """Whether all runs of a row ended as planned, on devices that kept their time."""
    return all(case["rows"][row]["arrived"]) and not any(case["rows"][row]["overrun"])


def counts(case: Case, row: str, beside: Sequence[str]) -> bool:
    """Whether a row's time counts: it arrived, and in `finish` with a score not more than 0.3 points below."""
    above = points(case, row, beside) if case["setting"] in OF_BUDGET else None
    return arrived(case, row) and (above is None or fmean(above) >= -100 * MATCHES)


def over(case: Case, row: str, other: str) -> tuple[str, Interval] | None:
    """A row's time over another's, with "≥ " or "≤ " if it is only a bound. None if there is no ratio.

    A run that did not reach its target bounds the ratio. A run that diverged, ended before its budget or had late
    devices gives none.
    """
    rows = case["rows"]
    if row not in rows or other not in rows:
        return None
    both = rows[row], rows[other]
    if any(any(one["diverged"]) or any(one["overrun"]) for one in both):
        return None
    mine, theirs = (all(one["arrived"]) for one in both)
    if not mine and not theirs:
        return None
    sign = "" if mine and theirs else "≤ " if mine else "≥ "
    return sign, paired_ratio(both[0]["seconds"], both[1]["seconds"])


def cell(found: tuple[str, Interval] | None) -> str:
    """The ratio as text."""
    return "–" if found is None else found[0] + with_interval(found[1].to_dict(), 2)


def _over_places(cases: Sequence[Case], row: str, other: str) -> str:
    """Time over another row's, its interval over places, and the number of places if not all."""
    if row == other:
        return "1"
    there = [case for case in cases if {row, other} <= set(case["rows"])]
    found = {case["place"]: one for case in there if (one := over(case, row, other)) is not None}
    signs = {sign for sign, _ in found.values()} - {""}
    if not found or len(signs) > 1:
        return "–"
    known = [case for case in there if case["place"] in found]
    mine, theirs = ({case["place"]: case["rows"][name]["seconds"] for case in known} for name in (row, other))
    ratio = paired_ratio(mine, theirs).to_dict()
    if len(found) == 1:  # no interval over a single place
        ratio |= {"low": None, "high": None}
    places = "" if len(found) == len(cases) else f", {len(found)} of {len(cases)} places"
    return max(signs, default="") + with_interval(ratio, 2) + places


def _points_over_places(cases: Sequence[Case], row: str, beside: Sequence[str]) -> str:
    """By how much a row's score exceeds that of the best of `beside`, with its interval over places."""
    means = [fmean(above) for case in cases if (above := points(case, row, beside)) is not None]
    return signed(mean_interval(means).to_dict()) if means else "–"


def _together(heading: str, cases: Sequence[Case], plan: Mapping[str, Any]) -> Section:
    """Every row over all places, with equal weights."""
    names = list(dict.fromkeys(row for case in cases for row in case["rows"]))
    against = [name for name in plan["against"] if name in names]
    beside = plan["beside"]
    finish = cases[0]["setting"] in OF_BUDGET
    head = ["row", *(f"over {other}" for other in against)]
    head += ["points", "beside single", "time counts", "least/time"] if finish else ["arrived"]
    rows = []
    for name in names:
        there = [case for case in cases if name in case["rows"]]
        cells = [name, *(_over_places(cases, name, other) for other in against)]
        if finish:
            cells += [_points_over_places(there, name, others) for others in (beside, (SINGLE,))]
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
            f"Points say how far the score is above the best of {'; '.join(beside)} at a place, or above that of one "
            "worker, for whom the recipe is. A time counts if the first are not below -0.3. The least time is what a "
            "place's devices would need for these samples with W b0 a step, exact shares at every moment, and an "
            "exchange that takes none."
        )
    return Section(f"{heading}: {len(cases)} places", text=said, table=Table(head, rows))


def _beside_the_best(heading: str, cases: Sequence[Case], plan: Mapping[str, Any]) -> list[Section]:
    """Our rows compared with the best of the others at each place, which is chosen afterwards."""
    there = {name for case in cases for name in case["rows"]}
    ours = [name for name in plan["ours"] if name in there]
    rows, ratios = [], {name: list[float]() for name in ours}
    for case in cases:
        able = [name for name in case["rows"] if counts(case, name, plan["beside"])]
        others = [name for name in able if name not in ours]
        if not others:
            continue
        best = min(others, key=lambda name: geometric_mean(case["rows"][name]["seconds"]))
        found = {name: over(case, name, best) if name in able else None for name in ours}
        for name, one in found.items():
            ratios[name] += [] if one is None else [one[1].median]
        rows.append([case["place"], best, *(cell(one) for one in found.values())])
    if not rows:
        return []
    means = [
        f"{name} {geometric_mean(each):.2f} at {len(each)} of {len(cases)} places, at worst {max(each):.2f}"
        for name, each in ratios.items()
        if each
    ]
    what = "whose time counts" if cases[0]["setting"] in OF_BUDGET else "that arrived"
    said = f"Seconds over those of the best other row {what}; a dash: ours does not."
    said += f" In the mean: {'; '.join(means)}." if means else ""
    table = Table(["place", "best of the others", *ours], rows)
    return [Section(f"{heading}: ours beside the best of the others", [said], table)]


def _scores(heading: str, cases: Sequence[Case]) -> Section:
    """Every row's score at every place."""
    names = dict.fromkeys(row for case in cases for row in case["rows"])
    each = [{name: number(100 * fmean(row["score"]), 1) for name, row in case["rows"].items()} for case in cases]
    rows = [[name, *(scores.get(name, "–") for scores in each)] for name in names]
    return Section(f"{heading}: scores", table=Table(["row", *(case["place"] for case in cases)], rows))


def _section(heading: str, case: Case, plan: Mapping[str, Any]) -> Section:
    """The section of one place."""
    against = [] if once(case) else [name for name in plan["against"] if name in case["rows"]]
    finish, tuned, live = case["setting"] in OF_BUDGET, plan["tuning"] is not None, is_live(case)
    head = ["row", *(["tuned to"] if tuned else []), "seconds"]
    head += ["score", *(["points"] if plan["beside"] else [])] if finish else ["arrived"]
    head += ["samples/s", "waiting"] if live else []
    rows = []
    for name, row in case["rows"].items():
        cells = [name, *([described(Trial.from_dict(row["trial"]))] if tuned else [])]
        cells.append("–" if any(row["diverged"]) else number(geometric_mean(row["seconds"]), 1))
        if finish:
            above = points(case, name, plan["beside"])
            cells.append(number(100 * fmean(row["score"]), 2))
            cells += ["–" if above is None else f"{fmean(above):+.2f}"] if plan["beside"] else []
        else:
            cells.append(f"{sum(row['arrived'])} of {len(row['arrived'])}")
        cells += how_fast(row) if live else []
        rows.append([*cells, *("1" if name == other else cell(over(case, name, other)) for other in against)])
    table = Table([*head, *(f"over {other}" for other in against)], rows)
    return Section(f"{heading}: {case['place']}", text=_said(case, plan), table=table)


def is_live(case: Case) -> bool:
    """Whether its rows ran as real processes."""
    return any("waiting" in row for row in case["rows"].values())


def once(case: Case) -> bool:
    """Whether its rows ran live with one seed, so that the difference between runs is unknown."""
    return is_live(case) and max(len(row["seed"]) for row in case["rows"].values()) == 1


def how_fast(row: Readings) -> list[str]:
    """Samples a second, and the fraction of time in which workers waited, means over seeds. For live runs."""
    rates = [samples / seconds for samples, seconds in zip(row["samples"], row["seconds"], strict=True)]
    waiting = [part for part in row["waiting"] if part is not None]
    return [number(fmean(rates), 0), percent(fmean(waiting) if waiting else None)]


def _said(case: Case, plan: Mapping[str, Any]) -> list[str]:
    """The notes on a place, next to its table."""
    rows: Mapping[str, Readings] = case["rows"]
    able = {name: row["seconds"] for name, row in rows.items() if counts(case, name, plan["beside"])}
    kinds = {name: Trial.from_dict(row["trial"]) for name, row in rows.items()}
    meets = [name for name in able if kinds[name].policy in OPPONENTS and kinds[name].kind == "policy"]
    said = []
    if once(case):
        said.append("One run of each row. `--seeds 5` says how far runs differ, and gives ratios with intervals.")
    elif SINGLE in rows and arrived(case, SINGLE) and meets:
        rarely = [name for name in able if kinds[name].kind == "local"]
        said.append(verdict({SINGLE: rows[SINGLE]["seconds"], **able}, meets, rarely).sentence)
    if case["least_s"] is not None:
        said.append(f"The devices need at least {geometric_mean(list(case['least_s'].values())):.1f} s.")
    if case["setting"] in OF_BUDGET:
        said += _scatter(rows, kinds)
        if worse := [name for name in rows if name not in able and arrived(case, name)]:
            said.append(f"Times that do not count, because the points are below -0.3: {'; '.join(worse)}.")
        more = {name: max(row["samples"]) / case["budget"] - 1 for name, row in rows.items()}
        if beyond := [f"{name} {percent(part)}" for name, part in more.items() if part > BEYOND]:
            said.append(f"Trained beyond the budget, at most by: {', '.join(beyond)}.")
    elif len(able) > 1:
        first = who_wins(able)
        level = f", not told from it: {', '.join(first.level)}" if first.level else ""
        said.append(f"First: {first.best}{level}.")
    ends = {name: " and ".join(row["at_edge"]).replace("_", " ") for name, row in rows.items() if row["at_edge"]}
    if ends:
        each = ", ".join(f"{name} ({what})" for name, what in ends.items())
        said.append(f"Tuned to an end of what was tried: {each}.")
    if late := [name for name, row in rows.items() if any(row["overrun"])]:
        said.append(f"No measurement, as this machine was too slow for the devices: {', '.join(late)}.")
    return said


def _scatter(rows: Mapping[str, Readings], kinds: Mapping[str, Trial]) -> list[str]:
    """How far scores differ between synchronous rows with the same batches, which differ only in rounding."""
    fixed = [name for name, trial in kinds.items() if trial.policy in OPPONENTS and trial.kind == "policy"]
    said = []
    for at, mine in enumerate(fixed):
        for other in fixed[at + 1 :]:
            if replace(kinds[mine], row="", policy="static") == replace(kinds[other], row="", policy="static"):
                pairs = zip(rows[mine]["score"], rows[other]["score"], strict=True)
                sd = 100 * math.sqrt(fmean((a - b) ** 2 for a, b in pairs) / 2)
                said.append(f"{mine} and {other} train the same batches; their scores scatter by {sd:.2f} points.")
    return said


def of_physics(case: Case, row: str) -> float | None:
    """The devices' least time as a fraction of a row's time."""
    found = case["rows"][row]
    if case["least_s"] is None or not arrived(case, row):
        return None
    least = {int(seed): seconds for seed, seconds in case["least_s"].items()}  # JSON turned these keys into text
    return paired_ratio([least[seed] for seed in found["seed"]], found["seconds"]).median


def signed(interval: Mapping[str, float | None]) -> str:
    """A mean of points with its interval.

    >>> signed({"mean": -0.52, "low": -1.0, "high": 0.04})
    '-0.5 (-1.0..+0.0)'
    """
    mean, low, high = (interval[name] for name in ("mean", "low", "high"))
    assert mean is not None
    return f"{mean:+.1f}" if low is None or high is None else f"{mean:+.1f} ({low:+.1f}..{high:+.1f})"


def described(trial: Trial) -> str:
    """A short description of a trial's numbers.

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
    """Plots, a dot for each row. Budgets: time against score difference, mean over places. Others: speed by place."""
    plan, made = result["plan"], _speeds([case for case in result["cases"] if case["setting"] not in OF_BUDGET])
    if not plan["against"] or not plan["beside"]:
        return made
    first = plan["against"][0]
    groups: dict[str, list[Case]] = {}
    for case in result["cases"]:
        if case["setting"] in OF_BUDGET and first in case["rows"]:
            groups.setdefault(str(case["batch"]), []).append(case)
    for batch, cases in groups.items():
        figure, (axes,) = new_figure(height=3.6)
        for i, name in enumerate(dict.fromkeys(row for case in cases for row in case["rows"])):
            there = {case["place"]: case for case in cases if over(case, name, first) is not None}
            ratios = [found[1].median for case in there.values() if (found := over(case, name, first)) is not None]
            if ratios:
                above = fmean(fmean(points(case, name, plan["beside"]) or [0.0]) for case in there.values())
                axes.plot(geometric_mean(ratios), above, label=name, **dot(i))
        axes.axhline(-100 * MATCHES, color="#222", lw=0.8, ls=":")
        axes.axvline(1, color="#222", lw=0.8, ls=":")
        axes.set(xlabel=f"time over that of {first}", ylabel="score, points")
        legend_below(axes)
        caption = f"Mean over places. Left of 1 a row is faster than {first}. Below the dotted line it pays with score."
        made.append(Section(f"finish, b0 = {batch}", figure=figure, caption=caption))
    return made


def _speeds(some: Sequence[Case]) -> list[Section]:
    """Every row's speed over one worker alone at each place, for rows that arrived."""
    cases = [case for case in some if SINGLE in case["rows"] and arrived(case, SINGLE)]
    if not cases:
        return []
    names = list(dict.fromkeys(row for case in cases for row in case["rows"]))
    figure, (axes,) = new_figure(height=1.5 + (0.15 + 0.06 * len(names)) * len(cases))
    for i, row in enumerate(names):
        below = 0.7 * ((i + 0.5) / len(names) - 0.5)  # so that rows of equal speed do not overlap
        there = [
            (at + below, case["rows"]) for at, case in enumerate(cases) if row in case["rows"] and arrived(case, row)
        ]
        at = [place for place, _ in there]
        speeds = [geometric_mean(rows[SINGLE]["seconds"]) / geometric_mean(rows[row]["seconds"]) for _, rows in there]
        axes.plot(speeds, at, label=row, **dot(i))
    axes.axvline(PAYS, color="#222", lw=0.8, ls=":")
    axes.set(yticks=range(len(cases)), xlabel="speed over the fastest worker alone")
    batches = len({case["batch"] for case in cases}) > 1
    axes.set_yticklabels([case["place"] + (f", b0 = {case['batch']}" if batches else "") for case in cases])
    axes.invert_yaxis()
    legend_below(axes)
    return [Section(figure=figure, caption="From the dotted line on, distributing pays.")]

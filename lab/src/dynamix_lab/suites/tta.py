"""`dynamix bench tta`: time to accuracy on emulated clusters, scenario by scenario, resumable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder, commit, machine
from dynamix_lab.emulator import load_scenario
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.launch import LaunchSettings
from dynamix_lab.harness.runs import A_A_LIMIT, AGAIN, CENSOR_FACTOR, is_learned, is_static
from dynamix_lab.harness.suite import Cell, Context, Suite
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
)
from dynamix_lab.statistics import censored, geometric_mean, paired_ratio
from dynamix_lab.suites.comparison.run import run_comparison

SCENARIOS = ("even", "steady-uneven", "moving-neighbour", "slow-link", "pai-replay", "paper-like")
QUICK_SCENARIOS = ("steady-uneven", "moving-neighbour")


@dataclass(frozen=True, slots=True)
class TtaPlan:
    """What one call runs; `quick` is only the label of the command."""

    scenarios: tuple[str, ...]
    seeds: int
    seed: int
    policies: tuple[str, ...]
    quick: bool = False

    def settings(self) -> dict[str, LaunchSettings]:
        """One comparison per scenario."""
        if "static" not in self.policies:
            raise ConfigError("policies", list(self.policies), "static among them", "add static: all ratios are to it")
        again = not self.quick
        return {
            name: LaunchSettings(
                scenario=name,
                seeds=self.seeds,
                seed=self.seed,
                policies=self.policies,
                again=again,
                command=f"dynamix bench tta --scenarios {name} --seeds {self.seeds} --seed {self.seed} "
                f"--policies {','.join(self.policies)}",
            )
            for name in self.scenarios
        }

    def check(self) -> None:
        """Raises `ConfigError` before anything is started."""
        for settings in self.settings().values():
            settings.check()
        places = [place(name) for name in self.scenarios]
        if len(set(places)) < len(places):
            raise ConfigError("scenarios", list(self.scenarios), "names that differ", "rename a file")


@dataclass(frozen=True)
class TtaSuite(Suite):
    """`dynamix bench tta`: a cell is a scenario with one more seed.

    Every scenario gets its first seed before any gets its second, so a call that is interrupted leaves all of them with
    equally many pairs. Each scenario is a comparison with a folder of its own, which also resumes.
    """

    plan: TtaPlan
    display: Display | None = None
    name: str = "tta"
    grows: ClassVar[frozenset[str]] = frozenset({"seeds"})

    def facts(self) -> dict[str, Any]:
        plan = self.plan
        hashes = {name: load_scenario(name).sha256 for name in plan.scenarios}
        seeds = list(range(plan.seed, plan.seed + plan.seeds))
        return {"cluster": "emulator", "seeds": seeds, "policies_run": list(plan.policies), "scenario_sha256": hashes}

    def bound_to(self) -> dict[str, Any]:
        return {"commit": commit(), "machine": machine()}

    def cells(self) -> list[Cell]:
        places, seeds = self.plan.scenarios, range(1, self.plan.seeds + 1)
        return [Cell(_key(self.plan, name, count), (name, count)) for count in seeds for name in places]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        name, count = cell.what
        path = context.folder.path / place(name)
        folder = RunFolder("comparison", path, resume=(path / "run.json").is_file())
        settings = replace(self.plan.settings()[name], seeds=count)
        result, arrived = run_comparison(settings, folder, display=self.display)
        return {"result": result, "arrived": arrived}

    def whole(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        plan = self.plan
        kept: dict[str, Any] = {}
        for count in range(1, plan.seeds + 1):
            keys = [_key(plan, name, count) for name in plan.scenarios]
            if not all(key in found for key in keys):
                break
            kept |= {key: found[key] for key in keys}
        return kept

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        count = len(cells) // len(self.plan.scenarios)
        results = {name: cells[_key(self.plan, name, count)]["result"] for name in self.plan.scenarios}
        first = next(iter(results.values()))
        same = {"mechanisms": first["mechanisms"], "seeds": first["seeds"]}
        arrived = all(cell["arrived"] for cell in cells.values())
        return {**same, **combine(results), "arrived": arrived, "scenarios": results}

    def table(self, result: Mapping[str, Any]) -> str:
        return table(result).markdown()

    def page(self, result: Mapping[str, Any]) -> str:
        return page(result)


def _key(plan: TtaPlan, scenario: str, count: int) -> str:
    return f"{place(scenario)}-{plan.seed + count - 1}"


def place(scenario: str) -> str:
    """The folder of a scenario in the run's: its name, without the path of a file.

    >>> place("slow-link"), place("mine/two-hosts.yaml")
    ('slow-link', 'two-hosts')
    """
    return Path(scenario).stem


def combine(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All scenarios together: the lists of `policies` run over `pairs`, ratios weigh every scenario alike.

    `best_static` of a scenario is the fastest of the static sizes that ran there, chosen in hindsight, in its favour.
    The attainable cut is 1 - t_ref/t_best_static with t_ref the best of the reference and the rules; a policy's share
    of it above 1 is reported as it is.
    """
    times = {scenario: _times(result) for scenario, result in results.items()}
    cuts = {scenario: _cut(mine) for scenario, mine in times.items()}

    def ratio(name: str, base: Callable[[str], str]) -> dict[str, float | None]:
        above = {scenario: mine[name] for scenario, mine in times.items()}
        return paired_ratio(above, {scenario: mine[base(scenario)] for scenario, mine in times.items()}).to_dict()

    names = [name for name in next(iter(times.values())) if name != "static"]
    ratios = {f"{name}/static": ratio(name, lambda _: "static") for name in names}
    for name in names:
        if not is_static(name):
            ratios[f"{name}/best_static"] = ratio(name, lambda scenario: str(cuts[scenario]["best_static"]))
    targets = {result["target"] for result in results.values()}
    return {
        "pairs": [[scenario, seed] for scenario, result in results.items() for seed in result["seeds"]],
        "target": targets.pop() if len(targets) == 1 else None,
        "policies": _joined(results),
        "ratios": ratios,
        "a_a": _a_a(times),
        "cuts": cuts,
    }


def _cut(times: dict[str, list[float]]) -> dict[str, Any]:
    """The attainable cut of one scenario, and every policy's part of it."""
    best_static = min((n for n in times if is_static(n) and n != AGAIN), key=lambda n: geometric_mean(times[n]))
    base = times[best_static]
    over = {name: geometric_mean([a / b for a, b in zip(mine, base, strict=True)]) for name, mine in times.items()}
    rules = [name for name in over if not is_static(name) and not is_learned(name)] or [best_static]
    by = min(rules, key=lambda name: over[name])
    cut = 1 - over[by]
    shares = {n: round((1 - value) / cut, 3) for n, value in over.items() if cut > 0.02 and not is_static(n)}
    return {
        "best_static": best_static,
        "attainable_cut": round(cut, 4),
        "attained_by": by,
        "fraction_of_cut": shares,
        "over_best_static": {name: round(value, 4) for name, value in over.items()},
    }


def _a_a(times: dict[str, dict[str, list[float]]]) -> dict[str, Any] | None:
    """Static against itself over all scenarios: the machine's own part in every other ratio."""
    if not all(AGAIN in mine for mine in times.values()):
        return None
    again, static = ({scenario: mine[name] for scenario, mine in times.items()} for name in (AGAIN, "static"))
    ratio = paired_ratio(again, static)
    each = [a / b for scenario in times for a, b in zip(again[scenario], static[scenario], strict=True)]
    within = bool(abs(ratio.median - 1) <= A_A_LIMIT)
    return {**ratio.to_dict(), "each": [round(v, 4) for v in each], "limit": A_A_LIMIT, "within": within}


def _joined(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """What every scenario has per seed, one after another; other details stay with their scenario."""
    keys = ("time_to_target_s", "final_accuracy", "samples_per_s", "wait_fraction")
    names = next(iter(results.values()))["policies"]
    return {
        name: {key: [v for part in results.values() for v in part["policies"][name].get(key, [])] for key in keys}
        for name in names
    }


def _times(result: dict[str, Any]) -> dict[str, list[float]]:
    """Policy -> seconds by seed, censored at twice static's; seeds in which static did not arrive are left out of
    all.
    """
    runs = {name: part["time_to_target_s"] for name, part in result["policies"].items()}
    kept = [i for i, t in enumerate(runs["static"]) if t is not None]
    if not kept:
        raise ConfigError(
            "static", "never reached the target", "one seed at least", "allow more time, or another target"
        )
    bound = [CENSOR_FACTOR * runs["static"][i] for i in kept]
    return {name: censored([t[i] for i in kept], bound).tolist() for name, t in runs.items()}


def table(result: Mapping[str, Any]) -> Table:
    """Rows are scenarios; a cell is time over the best static's there, geometric mean of the pairs."""
    cuts = result["cuts"]
    names = [name for name in next(iter(cuts.values()))["over_best_static"] if name != AGAIN]
    rows = []
    for scenario, part in result["scenarios"].items():
        cut, a_a = cuts[scenario], part["a_a"]
        own = number(None if a_a is None else a_a["median"], 3)
        head = [scenario, cut["best_static"], f"{percent(cut['attainable_cut'])} ({cut['attained_by']})", own]
        rows.append([*head, *[number(cut["over_best_static"][name], 3) for name in names]])
    return Table(["scenario", "best static", "attainable cut (by)", "A/A", *names], rows)


def page(result: Mapping[str, Any]) -> str:
    """report.html: the table, a plot, and links to every scenario's own page."""
    cuts: Mapping[str, Any] = result["cuts"]
    names = list(next(iter(cuts.values()))["over_best_static"])
    figure, (axes,) = new_figure()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [cut["over_best_static"].get(name, float("nan")) for cut in cuts.values()]
        axes.bar([x + i * width for x in range(len(cuts))], heights, width, label=name, color=look(i)["color"])
    axes.axhline(1.0, color="#222", lw=0.8, ls=":")
    axes.set(xticks=[x + 0.4 - width / 2 for x in range(len(cuts))], ylabel="time to target / best static's")
    axes.set_xticklabels(list(cuts))
    legend_beside(axes, columns=2)
    said = (
        "Emulated clusters on one machine. A cell is time to the target over the best static's there, geometric mean "
        "of the pairs: below 1 is faster. A/A is static over itself, the machine's own part."
    )
    sections = [
        Section(table=table(result)),
        Section(figure=figure, caption="The same figures."),
        Section("Each scenario by itself", links={name: f"{place(name)}/report.html" for name in cuts}),
    ]
    return Page(result["command"], sections, lead=[said, provenance(result)], details=measured(result)).html()

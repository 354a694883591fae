"""Experiments: `dynamix bench transfer`, `guard`, `excavation`, `calibration`.

Those that train keep what is finished in their folder, and `--resume` goes on with the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dynamix.cli.console import Json, Out, guarded, print_json
from dynamix_lab.commands.group import Resume, about, bench, command_line, names_of, numbers_of, progress

Forms = Annotated[str | None, typer.Option(help="Of dynamix,dynamix-paper, comma-separated (default: both).")]
Quick = Annotated[bool, typer.Option("--quick", help="Smoke run: trainings that learn nothing.")]
Work = Callable[[Path, Callable[[str, float], None]], dict[str, Any]]


def _in_folder(
    context: typer.Context, cluster: str, out: Path | None, resume: bool, work: Work
) -> tuple[dict[str, Any], Path]:
    """The result of `work(folder, tell)` with its head, written to the run folder; and that folder."""
    from dynamix.events.run_folder import RunFolder

    name = context.command.name or ""
    with progress(name) as tell, RunFolder(name, out, resume=resume) as folder:
        folder.write_run(command=command_line(context), cluster=cluster)
        result = {**about(context, cluster), **work(folder.path, tell)}
        folder.write_result(result)
    return result, folder.path


@bench.command("transfer")
@guarded
def bench_transfer(
    context: typer.Context,
    forms: Forms = None,
    pairs: Annotated[
        str | None, typer.Option(help="Parts of names of pairs, comma-separated: depth, GPUs, Adam (default: all).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the trainings.")] = 0,
    quick: Quick = False,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Policies learned on one job and used on another, beside policies learned on the target."""
    from dynamix_lab.experiments.short import QUICK, forms_of
    from dynamix_lab.experiments.transfer import markdown, pairs_named, run_transfer

    how: dict[str, Any] = {"pairs": pairs_named(names_of(pairs)), "forms": forms_of(names_of(forms)), "seed": seed}
    how |= {"budget": QUICK, "clusters": 4, "windows": 6} if quick else {"clusters": 32, "windows": 40}
    result, _ = _in_folder(
        context, "simulator", out, resume, lambda folder, tell: run_transfer(folder, tell=tell, **how)
    )
    print_json(result) if as_json else typer.echo(markdown(result))


@bench.command("guard")
@guarded
def bench_guard(
    context: typer.Context,
    workers: Annotated[str, typer.Option(help="Comma-separated.")] = "4,16",
    rows: Annotated[int, typer.Option(min=1, help="Clusters times workers of a family and seed.")] = 64,
    windows: Annotated[int, typer.Option(min=1, help="Decisions of a run.")] = 100,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Ten policies that do harm, each under a guard, against the goodput rule alone, on simulated jobs."""
    from dynamix_lab.suites.guard import GuardPlan, adversaries_guarded, table

    plan = GuardPlan(workers=numbers_of("workers", workers) or (), rows=rows, windows=windows)
    result, _ = _in_folder(context, "simulator", out, False, lambda _, tell: adversaries_guarded(plan, tell=tell))
    print_json(result) if as_json else typer.echo(table(result).markdown())


@bench.command("excavation")
@guarded
def bench_excavation(
    context: typer.Context,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Of s-madrl,visits,madqn,sight-2,mappo,mappo-typed,maddpg,hand,counting,random, comma-separated "
            "(default: all that run here). Those on typed traces with :no-decay, :fast-decay, :noise or :late, too."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each method.")] = 10,
    ground: Annotated[str, typer.Option(help="two-lane or single-file; hand rules need the latter.")] = "single-file",
    slow: Annotated[float, typer.Option(help="Speed of every second agent; 1 is as fast as the others.")] = 1.0,
    horizon: Annotated[int, typer.Option(min=1, help="Steps of an episode.")] = 1000,
    scale: Annotated[float, typer.Option(help="Of the number of steps of every stage.")] = 1.0,
    processes: Annotated[int, typer.Option(min=1, help="Trainings at a time, one thread each.")] = 1,
    minutes: Annotated[
        float | None,
        typer.Option(help="After these no training begins; 0 with --resume sums up what is finished (default: all)."),
    ] = None,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """S-MADRL against MADQN, MAPPO and MADDPG: agents that fetch pellets through a narrow tunnel."""
    from dynamix_lab.experiments.excavation.config import ExperimentConfig, task_of
    from dynamix_lab.experiments.excavation.experiment import run
    from dynamix_lab.experiments.excavation.foretelling import somebody_is_coming
    from dynamix_lab.experiments.excavation.speed import world_speed
    from dynamix_lab.experiments.excavation.summary import draw, table

    config = ExperimentConfig.of(
        methods=names_of(methods), seeds=seeds, ground=ground, slow=slow, horizon=horizon, scale=scale
    )

    def work(folder: Path, tell: Callable[[str, float], None]) -> dict[str, Any]:
        found = run(config, folder, processes=processes, minutes=minutes, tell=tell)
        if ground == "single-file" and {"s-madrl", "hand"} & found["methods"].keys():
            found["coming"] = somebody_is_coming(config.task)
        return {**found, "speed": world_speed(task_of(config.task, "s-madrl"))}

    result, folder = _in_folder(context, "excavation task", out, resume, work)
    draw(result, folder / "figure.png")
    speed = f"{result['speed']['steps_per_core_second']:,} steps of a world a core and second"
    print_json(result) if as_json else typer.echo(f"{table(result)}\n\n{speed}\nwrote {folder}")


@bench.command("calibration")
@guarded
def bench_calibration(
    sources: Annotated[Path, typer.Argument(help="Folder of the public measurements, which are not shipped.")],
    file: Annotated[Path, typer.Argument(help="To write, such as lab/src/dynamix_lab/simulator/calibration.json.")],
    as_json: Json = False,
) -> None:
    """Fit the simulator's calibration to the public measurements, and print its errors on points it has not seen."""
    from dynamix_lab.experiments.calibration_fit import lines, write_calibration

    fitted = write_calibration(sources, file)
    print_json(fitted["held_out"]) if as_json else typer.echo("\n".join(lines(fitted)))

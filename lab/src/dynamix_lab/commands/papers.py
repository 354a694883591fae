"""Other measurements and fits: `dynamix bench excavation`, `dynamix bench calibration`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynamix.cli.console import Json, Out, guarded, print_json
from dynamix_lab.commands.group import Resume, about, bench, names_of, progress


@bench.command("excavation")
@guarded
def bench_excavation(
    context: typer.Context,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Of s-madrl-team,s-madrl,visits,madqn,sight-2,mappo,mappo-typed,hand,counting,random, comma-separated "
            "(default: all). Those on typed traces with :no-decay, :fast-decay, :noise or :late, too."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each method.")] = 10,
    ground: Annotated[
        str,
        typer.Option(
            help="single-file, two-lane (not for hand rules), or drawn: learned on grounds drawn anew for every "
            "episode, and measured on ten on which nobody learned."
        ),
    ] = "single-file",
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
    """S-MADRL against MADQN and MAPPO: agents that fetch pellets through a narrow tunnel."""
    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.excavation.config import ExperimentConfig
    from dynamix_lab.excavation.experiment import run
    from dynamix_lab.excavation.summary import draw, table

    config = ExperimentConfig.of(
        methods=names_of(methods), seeds=seeds, ground=ground, slow=slow, horizon=horizon, scale=scale
    )
    head = about(context, "excavation task")
    with progress("excavation") as tell, RunFolder("excavation", out, resume=resume) as folder:
        folder.write_run(command=head["command"], cluster=head["cluster"])
        found = run(config, folder.path, processes=processes, minutes=minutes, tell=tell)
        result = {**head, **found}
        folder.write_result(result)
    draw(result, folder.path / "figure.png")
    print_json(result) if as_json else typer.echo(f"{table(result)}\n\nwrote {folder.path}")


@bench.command("calibration")
@guarded
def bench_calibration(
    sources: Annotated[
        Path | None, typer.Argument(help="Folder of the public measurements, which are not shipped, to fit anew.")
    ] = None,
    file: Annotated[Path, typer.Argument(help="To write, where it is fitted anew.")] = Path("calibration.json"),
    as_json: Json = False,
) -> None:
    """Errors of the simulator's calibration on points it has not seen; with SOURCES fitted anew, and written."""
    from dynamix_lab.simulator import calibration
    from dynamix_lab.simulator.calibration_fit import lines, write_calibration

    errors = calibration().held_out if sources is None else write_calibration(sources, file)["held_out"]
    print_json(errors) if as_json else typer.echo("\n".join(lines(errors)))

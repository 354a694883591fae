"""Exchanges of gradients: `dynamix bench compression`, `compression-cases`, `codec-speed`, `aggregator`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dynamix.cli.console import Json, Out, guarded, print_json
from dynamix_lab.commands.group import Resume, about, bench, conducted, names_of, numbers_of, progress

_JOBS = "ratings, ncf, lstm-tied, transformer-tied, moe, lora, rows-0, rows-50, rows-100, lstm, transformer, vgg19"


@bench.command("compression")
@guarded
def bench_compression(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two workloads, four hosts, 100 Mbit/s, 50 steps of the identity check.")
    ] = False,
    workloads: Annotated[str | None, typer.Option(help=f"Comma-separated: {_JOBS} (default: all).")] = None,
    rates: Annotated[str | None, typer.Option(help="Link rates, Mbit/s, comma-separated (default: 100,1000).")] = None,
    workers: Annotated[str | None, typer.Option(help="Hosts, comma-separated (default: 4,8).")] = None,
    ways: Annotated[
        str | None, typer.Option(help="Comma-separated, dense,dense-again among them (default: all).")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Turns of each way in a cell (default: 3).")] = None,
    steps: Annotated[int | None, typer.Option(help="Timed steps a turn, at least (default: 3, quick 4).")] = None,
    turn_s: Annotated[
        float | None, typer.Option(help="Seconds that a turn's timed steps last, at least (default: 0.5); 0: no more.")
    ] = None,
    identity_steps: Annotated[
        int | None, typer.Option(help="Of the check against dense in fixed point; 0: none (default: 500, quick 50).")
    ] = None,
    identity_only: Annotated[bool, typer.Option("--identity-only", help="Only that check: no links, no root.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, data and the order of turns.")] = 0,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Gradient exchanges side by side on emulated hosts with shaped links: time, bytes, and whether training is the
    same.
    """
    from dynamix_lab.suites.compression.suite import CompressionPlan, CompressionSuite
    from dynamix_lab.suites.compression.summary import unexplained

    plan = CompressionPlan.of(
        quick=quick,
        jobs=names_of(workloads),
        rates_mbit_s=() if identity_only else numbers_of("rates", rates),
        workers=numbers_of("workers", workers),
        ways=names_of(ways),
        rounds=rounds,
        steps=steps,
        turn_s=turn_s,
        identity_steps=identity_steps,
        seed=seed,
    )
    result = conducted(context, CompressionSuite(plan), out=out, resume=resume, as_json=as_json)
    if unexplained(result["cells"]):
        typer.echo("error: a lossless way that never went dense did not train as dense in fixed point does", err=True)
        raise typer.Exit(1)


@bench.command("compression-cases")
@guarded
def bench_compression_cases(
    context: typer.Context,
    count: Annotated[int, typer.Option(min=1, help="Cases.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the first case.")] = 0,
    adversarial: Annotated[
        bool, typer.Option("--adversarial", help="Hard gradients, and in a third of the cases a flipped bit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Randomised exchanges, each decoded sum against exact integers; exit code 1 if one differs."""
    from dynamix_lab.suites.compression.cases import lines, run_cases

    with progress("cases") as tell:
        result = {**about(context, "threads"), **run_cases(count, seed=seed, adversarial=adversarial, tell=tell)}
    print_json(result) if as_json else typer.echo("\n".join(lines(result)))
    if result["failed"]:
        raise typer.Exit(1)


@bench.command("compression-map")
@guarded
def bench_compression_map(
    context: typer.Context,
    hop_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds of a message from host to host.")] = 0.1,
    against: Annotated[
        Path | None, typer.Option(help="result.json of `bench compression`: its measured bytes beside the model's.")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Where sums that never decode beat every other way, by a model of bytes and hops; nothing is run."""
    from dynamix.events.run_folder import RunFolder
    from dynamix_lab.report import sections_markdown
    from dynamix_lab.suites.compression.region import compare, make_map, sections

    result = {**about(context, "model of bytes and hops"), **make_map(hop_ms / 1e3)}
    if against is not None:
        result["against"] = compare(json.loads(against.read_text()))
    with RunFolder("compression-map", out) as folder:
        folder.write_run()
        folder.write_result(result)
    print_json(result) if as_json else typer.echo(sections_markdown(sections(result)))


@bench.command("codec-speed")
@guarded
def bench_codec_speed(
    context: typer.Context,
    elements: Annotated[int, typer.Option(min=1024, help="float32 elements of the bucket.")] = 1 << 20,
    as_json: Json = False,
) -> None:
    """How fast one core encodes and decodes a bucket, and how near the bytes come to the bound."""
    from dynamix_lab.suites.compression.codec_speed import codec_speeds, lines

    with progress("codec") as tell:
        result = {**about(context, "one process, one thread"), "figures": codec_speeds(elements, tell=tell)}
    print_json(result) if as_json else typer.echo("\n".join(lines(result["figures"])))


@bench.command("aggregator")
@guarded
def bench_aggregator(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter turns, 10,000 hostile frames.")] = False,
    workers: Annotated[str | None, typer.Option(help="Workers of a job, comma-separated (default: 8,32).")] = None,
    frames: Annotated[int | None, typer.Option(min=0, help="Hostile frames (default: 1000000); 0: none.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another one damages otherwise.")] = 0,
    resume: Resume = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """What one core of an aggregator carries beside its line and its memory; and hostile frames: no sum is wrong."""
    from dynamix_lab.suites.aggregator.suite import AggregatorPlan, AggregatorSuite

    plan = AggregatorPlan.of(quick=quick, workers=numbers_of("workers", workers), frames=frames, seed=seed)
    result = conducted(context, AggregatorSuite(plan), out=out, resume=resume, as_json=as_json)
    found = result["frames"]
    if found["wrong"] or found["hung"] or found["other"]:
        typer.echo("error: hostile frames made a wrong sum, a hang, or an error that is none of ours", err=True)
        raise typer.Exit(1)

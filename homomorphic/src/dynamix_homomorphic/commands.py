"""The command `dynamix aggregator`, found by entry point."""

from pathlib import Path
from typing import Annotated

import typer

from dynamix.cli.console import Json, guarded, read_token


@guarded
def aggregator(
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need a token and TLS.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    token_file: Annotated[Path | None, typer.Option(help="Holds what workers must know.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file: its certificate, which names the host.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file: the key of the certificate.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="PEM file: the authority of all workers' certificates.")] = None,
    jobs: Annotated[int, typer.Option(help="At once.")] = 16,
    jobs_per_address: Annotated[int, typer.Option(help="At once, of those that workers of one address opened.")] = 8,
    connections_per_address: Annotated[int, typer.Option(help="At once, of the workers of one address.")] = 512,
    memory_mb: Annotated[int, typer.Option(help="For what all jobs have under way.")] = 1024,
    timeout: Annotated[float, typer.Option(help="Longest wait for a worker within a round, seconds.")] = 600,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of loopback, for /healthz and /metrics; default: none.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Add gradients in the network, for many jobs, until interrupted: CompressionState(aggregator="host:port")."""
    from dynamix_homomorphic.aggregator.job import AggregatorLimits
    from dynamix_homomorphic.aggregator.service import serve
    from dynamix_homomorphic.aggregator.tls import TlsFiles

    tls = TlsFiles.of(tls_cert, tls_key, tls_ca)
    limits = AggregatorLimits(
        jobs=jobs,
        jobs_per_address=jobs_per_address,
        connections_per_address=connections_per_address,
        memory_bytes=memory_mb << 20,
        timeout_s=timeout,
    )
    serve(host, port, token=read_token(token_file), tls=tls, limits=limits, metrics_port=metrics_port, as_json=as_json)

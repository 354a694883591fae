"""The command `dynamix aggregator`: a server with its figures, until a service manager or ^C ends it."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
from pathlib import Path

from dynamix.errors import ConfigError
from dynamix_homomorphic.aggregator.job import AggregatorLimits
from dynamix_homomorphic.aggregator.metrics import MetricsServer
from dynamix_homomorphic.aggregator.server import MIN_TOKEN, AggregatorServer
from dynamix_homomorphic.aggregator.tls import TlsFiles


def serve(
    host: str,
    port: int,
    *,
    token_file: Path | None,
    tls: TlsFiles | None = None,
    limits: AggregatorLimits,
    metrics_port: int | None = None,
    as_json: bool = False,
) -> None:
    """Print the address, serve until interrupted (^C or SIGTERM), print what happened.

    metrics_port   of loopback, for /healthz and /metrics; 0 takes a free one. None: nothing listens
    """
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    server = AggregatorServer(host, port, token=read_token(token_file), tls=tls, limits=limits)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        said = {"address": server.address}
        if metrics_port is not None:
            said["metrics"] = stack.enter_context(MetricsServer(server, metrics_port)).url
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # what stops a service ends it as ^C does
        try:
            with contextlib.suppress(KeyboardInterrupt):
                print(json.dumps(said) if as_json else _in_words(said), flush=True)
                server.serve()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would cut the statistics off
            server.close()
            print(json.dumps(server.statistics()), flush=True)


def _in_words(said: dict[str, str]) -> str:
    more = f"\nmetrics on {said['metrics']}" if "metrics" in said else ""
    return f"listening on {said['address']}{more}"


def read_token(file: Path | None) -> str:
    """The token that a file holds, "" without a file. Raises `ConfigError` if it cannot be read or is empty."""
    if file is None:
        return ""
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("token_file", str(file), "a readable text file", str(error)) from error
    if not token:
        raise ConfigError("token_file", str(file), f"{MIN_TOKEN} characters or more", "it is empty")
    return token

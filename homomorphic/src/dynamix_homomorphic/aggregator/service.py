"""The command `dynamix aggregator`: runs a server and its metrics until a service manager or ^C ends it."""

from __future__ import annotations

import contextlib
import json
import logging
import signal

from dynamix_homomorphic.aggregator.job import AggregatorLimits
from dynamix_homomorphic.aggregator.metrics import MetricsServer
from dynamix_homomorphic.aggregator.server import AggregatorServer
from dynamix_homomorphic.aggregator.tls import TlsFiles


def serve(
    host: str,
    port: int,
    *,
    token: str,
    tls: TlsFiles | None = None,
    limits: AggregatorLimits,
    metrics_port: int | None = None,
    as_json: bool = False,
) -> None:
    """Print the address, serve until interrupted (^C or SIGTERM), print the statistics.

    metrics_port   on loopback, for /healthz and /metrics; 0 takes a free one. None: no port is opened
    """
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    server = AggregatorServer(host, port, token=token, tls=tls, limits=limits)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        said = {"address": server.address}
        if metrics_port is not None:
            said["metrics"] = stack.enter_context(MetricsServer(server, metrics_port)).url
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's SIGTERM ends it as ^C does
        try:
            with contextlib.suppress(KeyboardInterrupt):
                print(json.dumps(said) if as_json else _in_words(said), flush=True)
                server.serve()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would cut off the statistics
            server.close()
            print(json.dumps(server.statistics()), flush=True)


def _in_words(said: dict[str, str]) -> str:
    more = f"\nmetrics on {said['metrics']}" if "metrics" in said else ""
    return f"listening on {said['address']}{more}"

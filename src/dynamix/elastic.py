"""Jobs that torchrun restarts: workers come and go, and training resumes from its last checkpoint.

    elastic.require_restartable()              # checks torchrun's options
    torch.distributed.init_process_group("gloo")
    controller = dynamix.Controller(...)
    elastic.stop_on_sigterm(controller)        # a host leaves, or others join: all stop after the same step
    ...                                        # load the newest checkpoint
    for x, y in loader:
        ...
        controller.step(loss=loss)
        if controller.stopping:
            save(controller.state_dict(gather=True))
            elastic.leave(controller)          # torchrun starts the job again with whoever is there

A worker that returns to its host gets the share of the batch that it had there. Hosts are identified by their names, or
by the environment variable DYNAMIX_HOST if names change (docs/elastic.md, examples/elastic.py).
"""

import logging
import os
import signal
import sys
import time
from typing import Any, NoReturn

import torch.distributed as dist

from dynamix.errors import UsageError
from dynamix.runtime.controller import Controller

AGAIN = 75
"""Exit code of a worker that should be restarted (EX_TEMPFAIL)."""
PATIENCE_S = 3.0  # of a worker that its own agent has not asked to end, in case the agent is about to

_asked = False
_log = logging.getLogger("dynamix")


def require_restartable() -> None:
    """Raise `UsageError` if torchrun was started in a way in which a gloo job cannot be restarted.

    By default workers find each other in the store of torchrun's own rendezvous. It still holds keys of the last start,
    so after a restart gloo connects to addresses of processes that no longer exist (pytorch#135712). Nothing is checked
    without torchrun, if it may not restart anything, or if a process group exists and gloo has no part in it.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    if agent != "True" or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return
    if dist.is_initialized() and "gloo" not in _backends():
        return
    line = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ... (several hosts: with --rdzv-endpoint HOST:PORT, too)"
    why = "torchrun's own store outlives its workers, so gloo would find addresses of dead processes in it"
    raise UsageError(f"this job cannot be restarted: {why}. Start it with {line}")


def stop_on_sigterm(controller: Controller) -> None:
    """Make SIGTERM stop all ranks after the same step, a few seconds later (`controller.stopping`).

    torchrun sends it to its workers before it ends them: when its host is taken away, or when others want to join.
    """

    def asked(*_: Any) -> None:
        global _asked
        _asked = True
        controller.request_stop()

    signal.signal(signal.SIGTERM, asked)


def leave(controller: Controller | None = None) -> NoReturn:
    """End this process after a stop that was not the job's end, so that the job is restarted. Rank 0 logs it.

    A worker that its own agent asked to end exits with 0. Other workers wait up to `PATIENCE_S` for such a request, and
    then exit with 75: an exit with 0 would tell torchrun that the job is done.
    """
    if controller is not None:
        if controller.rank == 0:
            at = controller.metrics()["step"], controller.samples_seen
            _log.warning("dynamix: the job stops at step %d, sample %d, to be started again", *at)
        controller.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    until = time.monotonic() + PATIENCE_S
    while not _asked and time.monotonic() < until:
        time.sleep(0.05)
    sys.exit(0 if _asked else AGAIN)


def _backends() -> str:
    return str(dist.get_backend_config()) if hasattr(dist, "get_backend_config") else str(dist.get_backend())

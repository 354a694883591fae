"""Cases that run over any wire: ranks in threads of this process, or in processes over gloo (one launch for all)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from dynamix.runtime.ranks import watch
from dynamix.runtime.ranks.opening import open_ranks
from dynamix.runtime.ranks.process_groups import destroy_groups
from dynamix.runtime.ranks.threads import in_threads
from tests.ranks import run_ranks

Case = Callable[[Any], Any]


def over_threads(case: Case, workers: int) -> list[Any]:
    """What `case(ranks)` returns on each rank, or the words of what it raises."""
    return in_threads(partial(_outcome, case), workers)


def over_gloo(cases: Mapping[str, Case], workers: int) -> dict[str, list[Any]]:
    """The same of each case, which must be a function of a module. Each has a group of its own."""
    by_rank = run_ranks(_every_case, workers, dict(cases), timeout_s=150)
    return {name: [told[name] for told in by_rank] for name in cases}


def _every_case(rank: int, cases: Mapping[str, Case]) -> dict[str, Any]:
    watch.BESIDE_S = watch.SETUP_ERROR_S = 0.5
    return {name: _in_a_group(case) for name, case in cases.items()}


def _in_a_group(case: Case) -> Any:
    ranks = open_ranks(dist.group.WORLD, {})
    found = _outcome(case, ranks)
    # A rank that ended by itself closes its sockets; one that waits no longer for others cannot.
    waited = isinstance(found, str) and found.split(":")[0] in ("UsageError", "StateError", "WorkerLostError")
    destroy_groups(ranks.group.release() if ranks.group else [], patience_s=0.0 if waited else 2.0)
    return found


def _outcome(case: Case, ranks: Any) -> Any:
    try:
        found = case(ranks)
    except Exception as error:
        ranks.leave_with(error)
        return f"{type(error).__name__}: {error}"
    ranks.leave()
    return found

"""What `Controller(...)` accepts."""

import logging
import math
import os
from collections.abc import Sequence

import numpy as np

from dynamix.data.lengths import Lengths, SampleCosts
from dynamix.errors import ConfigError, spelling
from dynamix.model.rounds import MOST
from dynamix.policies import Policy, make_policy
from dynamix.policies.wrappers import peers_of
from dynamix.runtime.decide.job_facts import fixed_at
from dynamix.window import Bounds, Ints

POLICY_VARIABLE, MEET_VARIABLE = "DYNAMIX_POLICY", "DYNAMIX_MEET"  # of the environment; they win over the script's
_log = logging.getLogger("dynamix")


def from_outside(policy: str | Policy, meet: str) -> tuple[str | Policy, str]:
    """`policy` and `meet`, or what DYNAMIX_POLICY and DYNAMIX_MEET say instead: a job is compared without editing it.

    >>> from_outside("dynamix", "gradients")
    ('dynamix', 'gradients')
    """
    told = {name: os.environ.get(name, "") for name in (POLICY_VARIABLE, MEET_VARIABLE)}
    if any(told.values()):
        _log.info("set from outside: %s", ", ".join(f"{name}={value}" for name, value in told.items() if value))
    return told[POLICY_VARIABLE] or policy, told[MEET_VARIABLE] or meet


def check_counts(**values: object) -> None:
    """Raises `ConfigError` naming the first that is not a whole number of 1 or more."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(name, value, "a whole number, 1 or more", _whole(name, value))


def _whole(name: str, value: object) -> str:
    """The fix for what is no whole number of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        return "give a number" + ", without quotes" * isinstance(value, str)
    return f"write {name}={round(float(value))}" if math.isfinite(value) and value >= 1 else "give a larger one"


def per_rank(name: str, value: int | Sequence[int], workers: int) -> int | list[int]:
    """One number for all ranks, or a list of one per rank; raises `ConfigError` for anything else.

    >>> per_rank("max_batch_size", [64, 32], 2)
    [64, 32]
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    sizes = np.asarray(value)
    if sizes.shape not in ((), (workers,)) or sizes.dtype.kind not in "iu":
        allowed = f"one whole number or a list of {workers}, one per rank"
        fix = "match the world size" if sizes.ndim and sizes.shape != (workers,) else _whole(name, value)
        raise ConfigError(name, value, allowed, fix)
    whole: int | list[int] = sizes.tolist()
    return whole


def policy_of(policy: str | Policy) -> Policy:
    """The policy that a name, a file or an object stands for."""
    made = make_policy(policy) if isinstance(policy, str) else policy
    if not isinstance(made, Policy):
        fix = f"write batch_size={policy}" if isinstance(policy, int) else "see dynamix.Policy"
        raise ConfigError("policy", policy, "a name, or an object with decide, state_dict, load_state_dict", fix)
    return made


def watched(policy: Policy, guard: bool | None) -> Policy:
    """`policy` under a `Guard` if `guard` says so; None: if it is a learned one."""
    if guard not in (None, True, False):
        raise ConfigError("guard", guard, "True, False, None", "leave it out: learned policies are then watched")
    wanted = getattr(policy, "net", None) is not None if guard is None else guard
    if not wanted or getattr(policy, "guarded", False):
        return policy
    from dynamix.policies.guard import Guard

    return Guard(policy)


def check_interval(interval: int | str, policy: Policy) -> None:
    """Raises `ConfigError` unless it is a whole number, or "auto" with a policy that decides in one place."""
    if not isinstance(interval, str):
        check_counts(interval=interval)
    elif interval != "auto":
        fix = spelling(interval, ("auto",), "check the argument")
        raise ConfigError("interval", interval, "a whole number, 1 or more, or 'auto'", fix)
    elif peers_of(policy) is not None:
        fix = "give it a number, or take a policy that decides in one place, such as goodput"
        raise ConfigError("interval", interval, "a whole number with this policy", fix)


def paced(policy: Policy, interval: int | str) -> tuple[Policy, int]:
    """`policy`, under a `Paced` where `interval` is "auto"; and the length of its first window."""
    if isinstance(interval, int):
        return policy, interval
    from dynamix.policies.paced import FIRST, Paced

    return Paced(policy), FIRST


Each = int | Sequence[int] | None  # of every worker


def job_bounds(
    workers: int,
    batch_size: int,
    each: tuple[Each, Each],
    total: tuple[int | None, int | None],
    global_batch: str,
    *,
    quantum: int = 1,
    accumulate: int = 1,
    micro_batch: int | None = None,
    apart: bool = False,
    max_change: float = float("inf"),
) -> tuple[Bounds, Ints]:
    """A job's bounds and its first allocation, from `Controller`'s arguments. Raises `ConfigError` for impossible ones.

    `batch_size`, `each` and `quantum` are of a micro-batch, `total` and what is returned of a round of `accumulate`.
    With `micro_batch` all are of a round; without a `quantum` sizes are then such that its pieces have few shapes.

    >>> bounds, start = job_bounds(2, 32, (None, 48), (None, None), "fixed", accumulate=2)
    >>> start.tolist(), bounds.high.tolist(), int(bounds.total_low), int(bounds.total_high)
    ([64, 64], [96, 96], 128, 128)
    """
    if global_batch not in ("adaptive", "fixed"):
        fix = spelling(global_batch, ("adaptive", "fixed"))
        raise ConfigError("global_batch", global_batch, "'adaptive' or 'fixed'", fix)
    for name, value in zip(("min_global_batch", "max_global_batch"), total, strict=True):
        if global_batch == "fixed" and value is not None:
            fix = f"leave {name} out, or use global_batch='adaptive'"
            raise ConfigError(name, value, "None with global_batch='fixed', which is the starting total", fix)
        if value is not None and not (isinstance(value, (int, float, np.number)) and float(value).is_integer()):
            raise ConfigError(name, value, "a whole number, 1 or more", _whole(name, value))
    if not isinstance(max_change, (int, float, np.number)):
        raise ConfigError("max_change", max_change, "a number, more than 1", "use 2.0 to at most double or halve")
    least, most = 1, 8 * batch_size
    if micro_batch is not None:
        moves = apart and global_batch == "adaptive"  # the number of pieces, up to the most that are of any use
        # Rounds that may grow are made such that whole pieces fit the workers' speeds.
        quantum = quantum if quantum > 1 else micro_batch if moves else grain(batch_size, micro_batch)
        if moves:  # and every worker takes one at least, or nobody would know how fast it is
            least, most = micro_batch, max(most, 8 * int(MOST) * micro_batch)
    low, high = (default if given is None else given for given, default in zip(each, (least, most), strict=True))
    low, high = per_rank("min_batch_size", low, workers), per_rank("max_batch_size", high, workers)
    piece = Bounds.of(workers, low, high, quantum=quantum, max_change=max_change)
    start = accumulate * starting_sizes(batch_size, piece)
    reach = accumulate * int(piece.high.sum())
    if total[0] is not None and total[0] > min(reach, reach if total[1] is None else total[1]):
        allowed = f"at most max_global_batch, and the {reach} samples that the workers' bounds allow"
        raise ConfigError("min_global_batch", total[0], allowed, "lower it, or raise the others")
    bounds = Bounds.of(
        workers,
        accumulate * piece.low,
        accumulate * piece.high,
        total_low=total[0],
        total_high=total[1],
        quantum=accumulate * quantum,
        max_change=max_change,
    )
    return (fixed_at(bounds, int(start.sum())) if global_batch == "fixed" else bounds), start


def grain(batch_size: int, micro_batch: int) -> int:
    """What shares are multiples of: whole pieces where a worker has 8 or more, else quarters of one.

    >>> grain(256, 32), grain(64, 32), grain(64, 10)
    (32, 8, 5)
    """
    if batch_size >= 8 * micro_batch:
        return micro_batch
    return next(micro_batch // n for n in (4, 2, 1) if micro_batch % n == 0)


def costs_by_length(
    lengths: Lengths | None, padded: bool, samples: int, *, apart: bool, fixed: bool
) -> SampleCosts | None:
    """What `Controller.batch_sampler` was told of lengths. Raises `ConfigError` for what does not go together."""
    if lengths is None:
        if padded:
            raise ConfigError("padded", padded, "False without lengths", "give lengths=, or leave padded out")
        return None
    if padded and apart:
        fix = "leave padded out: rounds are then cut by the sum of lengths, and every worker trains on a fair sample"
        raise ConfigError("padded", padded, "False where workers step apart (meet='parameters', 'auto')", fix)
    if padded and not fixed:
        fix = "leave padded out, or use global_batch='fixed': batches of like samples do not tell the noise scale"
        raise ConfigError("padded", padded, "False with global_batch='adaptive'", fix)
    return SampleCosts(lengths, samples, padded=padded)


def starting_sizes(batch_size: int, bounds: Bounds) -> Ints:
    """`batch_size` for every worker whose bounds leave a choice, int64 (W,).

    Raises `ConfigError` naming the first rank whose bounds forbid it.

    >>> starting_sizes(12, Bounds.of(3, [16, 1, 1], [16, 64, 64])).tolist()
    [16, 12, 12]
    """
    start = np.where(bounds.low == bounds.high, bounds.low, batch_size).astype(np.int64)
    fits = (start >= bounds.low) & (start <= bounds.high) & (start % bounds.quantum == 0)
    if not fits.all():
        rank = int(np.argmin(fits))
        steps = f" in steps of {bounds.quantum}" if bounds.quantum > 1 else ""
        allowed = f"{int(bounds.low[rank])} to {int(bounds.high[rank])}{steps} on rank {rank}"
        raise ConfigError("batch_size", batch_size, allowed, "change batch_size or the bounds")
    return start

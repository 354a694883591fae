"""`JobConfig`: a job's arguments, checked together, and what is derived from them."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from dynamix.errors import ConfigError, spelling
from dynamix.events.replay import recorded
from dynamix.model.auto_sync import AutoSync
from dynamix.model.rounds import MOST, LocalSteps, RoundSize
from dynamix.model.sync_schedule import SyncSchedule
from dynamix.policies import Policy, make_policy
from dynamix.policies.alternating import WHOLE_RUNS
from dynamix.policies.protocol import boundary
from dynamix.policies.static import Static
from dynamix.policies.wrappers import peers_of
from dynamix.runtime.limits import Limits, check_counts, per_rank, starting_sizes, whole
from dynamix.runtime.rules import rule_of
from dynamix.window import Bounds, Ints

OUTSIDE = {  # arguments, and the environment variables that override them
    "policy": "DYNAMIX_POLICY",
    "meet": "DYNAMIX_MEET",
    "global_batch": "DYNAMIX_GLOBAL_BATCH",
}
OFF = "static"  # as DYNAMIX_POLICY, this policy turns all adaptation off
UNSAID = 128  # samples of a worker if no batch_size is given
ONE_PLACE = "take a policy that decides in one place, for all workers, such as goodput"
_log = logging.getLogger("dynamix")


@dataclass(frozen=True)
class JobConfig:
    """The arguments of `Controller` for a job of `workers`, as given, and what is derived from them.

    Opens no file but that of `replay`, which it reads. Raises `ConfigError` for impossible values, and `StateError` for
    a file that cannot be replayed.

    fixed       the global batch stays as at the start
    bounds      bounds of batch sizes, samples per round, on a grid that pieces divide
    start       samples per round of every worker at the start, int64 (W,)
    own_policy  the policy object that `policy` names
    served      the policy to ask: `own_policy`, in a `Guard` if it is watched, in a `Paced` with interval="auto"
    clock       seconds spent deciding, which count with interval="auto"; in a virtual job deciding takes no time
    replayed    window index -> the decision used instead of asking the policy; None: the policy is asked

    >>> config = JobConfig(2, "lb_bsp", 32, accumulate=2, limits=Limits(max_batch_size=48))
    >>> config.start.tolist(), config.bounds.high.tolist(), int(config.bounds.total_low), config.base_batch
    ([64, 64], [96, 96], 128, 128)
    """

    workers: int
    policy: str | Policy = "dynamix"
    batch_size: int = UNSAID
    global_batch: str = "fixed"
    limits: Limits = field(default_factory=Limits)
    interval: int | str = 5
    accumulate: int = 1
    micro_batch: int | None = None
    meet: str = "gradients"
    lr_rule: str = "auto"
    rate_for: int | None = None
    replay: str | os.PathLike[str] | None = None
    guard: bool | None = None
    clock: Callable[[], float] = time.thread_time

    fixed: bool = field(init=False, repr=False, compare=False)
    bounds: Bounds = field(init=False, repr=False, compare=False)
    start: Ints = field(init=False, repr=False, compare=False)
    own_policy: Policy = field(init=False, repr=False, compare=False)
    served: Policy = field(init=False, repr=False, compare=False)
    replayed: dict[int, dict[str, Any]] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        follows = vars(self)  # sets fields although the dataclass is frozen
        follows["fixed"] = self.global_batch == "fixed"
        rule_of(self.lr_rule)  # raises if the rule does not exist
        if self.rate_for is not None:
            check_counts(rate_for=self.rate_for)
        check_counts(batch_size=self.batch_size, accumulate=self.accumulate, quantum=self.limits.quantum)
        self._check_pieces()
        self._check_totals()
        follows["bounds"], follows["start"] = self._sizes()
        follows["own_policy"] = policy_of(self.policy)
        self._check_policy()
        follows["served"] = self._served()
        follows["replayed"] = None if self.replay is None else recorded(self.replay, self.workers)

    # ------------------------------------------------------------ what follows

    @property
    def base_batch(self) -> int:
        """Samples per round of all workers at the start."""
        return int(self.start.sum())

    @property
    def slack(self) -> int:
        """Rounds that may still be issued under the old allocation after a window has closed."""
        return 0 if boundary(self.own_policy) == "epoch" else 1

    @property
    def shares_only(self) -> bool:
        """Whether the global batch may change, but the policy never changes it."""
        return not (self.fixed or self._sizes_rounds or self._watched or getattr(self.own_policy, "adapts", True))

    @property
    def rates_follow(self) -> bool:
        """Whether learning rates, or the progress that a sample counts as, may depend on the gradient noise."""
        return not self.fixed or self.rate_for is not None

    @property
    def loop_batches(self) -> dict[str, int]:
        """The sizes that the loop's batches may have at the start, by argument name."""
        return {"batch_size": self.batch_size} | ({} if self.micro_batch is None else {"micro_batch": self.micro_batch})

    @property
    def facts(self) -> dict[str, Any]:
        """The arguments that must be the same on every rank: plain values by name."""
        same = ("accumulate", "interval", "guard", "lr_rule", "rate_for", "global_batch", "meet")
        return {
            "policy": self.policy if isinstance(self.policy, str) else type(self.policy).__name__,
            **self.loop_batches,
            **{name: getattr(self, name) for name in same},
            "replay": self.replayed,
            **vars(self.limits),
            "min_batch_size": self.bounds.low,
            "max_batch_size": self.bounds.high,
            "shape of the policy's state": shape_of(self.own_policy.state_dict()),
        }

    def sync_schedule(self) -> SyncSchedule:
        """Makes the schedule that chooses how workers synchronise. It keeps state: make one for each job."""
        if self.meet != "parameters":
            return AutoSync(self.workers) if self.meet == "auto" else SyncSchedule()
        return (LocalSteps if self.fixed else RoundSize)(self.micro_batch or 0)

    @property
    def _watched(self) -> bool:
        """Whether this job puts a `Guard` around the policy."""
        wanted = getattr(self.own_policy, "net", None) is not None if self.guard is None else self.guard
        return wanted and not getattr(self.own_policy, "guarded", False)

    @property
    def _sizes_rounds(self) -> bool:
        """Whether something other than the policy chooses the samples of a round."""
        return self.meet == "auto" or (not self.fixed and self.meet == "parameters")

    # ------------------------------------------------------------ what is possible

    def _check_pieces(self) -> None:
        """Raise `ConfigError` if `accumulate` or `micro_batch` does not fit `meet`."""
        given, pieces = self.accumulate, self.micro_batch
        if pieces is not None:
            check_counts(micro_batch=pieces)
            if given > 1:
                fix = "leave accumulate out: micro_batch cuts a worker's batch into pieces already"
                raise ConfigError("accumulate", given, "1 together with micro_batch", fix)
        if self.meet not in (ways := ("gradients", "parameters", "auto")):
            raise ConfigError("meet", self.meet, "'gradients', 'parameters' or 'auto'", spelling(self.meet, ways))
        if self.meet == "auto" and given > 1:
            fix = "leave accumulate out: every batch is an optimizer step"
            raise ConfigError("accumulate", given, "1 with meet='auto'", fix)
        if self.meet == "auto" and pieces is not None:
            fix = "leave micro_batch out: a worker's local steps have batch_size samples"
            raise ConfigError("micro_batch", pieces, "None with meet='auto'", fix)
        if self.meet == "parameters" and given > 1:
            fix = "leave accumulate out, and set micro_batch= to the samples of one optimizer step"
            raise ConfigError("accumulate", given, "1 with meet='parameters'", fix)
        if self.meet == "parameters" and pieces is None and not self.fixed:
            fix = "set micro_batch= to the samples of one optimizer step"
            raise ConfigError("micro_batch", None, "1 or more with meet='parameters' and global_batch='adaptive'", fix)

    def _check_totals(self) -> None:
        """Raise `ConfigError` for an unknown `global_batch`, and for limits of it that are not numbers."""
        if self.global_batch not in (known := ("adaptive", "fixed")):
            fix = spelling(self.global_batch, known, "set a size by batch_size=, the samples of one worker")
            raise ConfigError("global_batch", self.global_batch, "'adaptive' or 'fixed'", fix)
        for name in ("min_global_batch", "max_global_batch"):
            value: object = getattr(self.limits, name)
            if self.fixed and value is not None:
                fix = f"leave {name} out, or use global_batch='adaptive'"
                raise ConfigError(name, value, "None with global_batch='fixed', which keeps the starting total", fix)
            if value is not None and not (isinstance(value, (int, float)) and float(value).is_integer()):
                raise ConfigError(name, value, "a whole number, 1 or more", whole(name, value))
        if not isinstance(self.limits.max_change, (int, float, np.number)):
            raise ConfigError("max_change", self.limits.max_change, "a number, more than 1", "use 2.0, say")

    def _sizes(self) -> tuple[Bounds, Ints]:
        """`bounds` and `start`. `batch_size`, workers' bounds and `quantum` are per micro-batch, totals per round.

        With `micro_batch` all sizes are per round. The default grid then makes pieces of few shapes.
        """
        limits, pieces = self.limits, self.accumulate
        quantum, least, most = limits.quantum, 1, 8 * self.batch_size
        if self.micro_batch is not None:
            # Whether rounds may grow, up to the most pieces that are of any use. Shares are then made of whole pieces.
            moves = self.meet == "parameters" and not self.fixed
            usual = self.micro_batch if moves else grain(self.batch_size, self.micro_batch)
            quantum = quantum if quantum > 1 else usual
            if moves:  # at least one piece each: a worker without one has no measured speed
                least, most = self.micro_batch, max(most, 8 * int(MOST) * self.micro_batch)
        low, high = limits.min_batch_size, limits.max_batch_size
        low = least if low is None else per_rank("min_batch_size", low, self.workers)
        high = most if high is None else per_rank("max_batch_size", high, self.workers)
        piece = Bounds.of(self.workers, low, high, quantum=quantum, max_change=limits.max_change)
        start, reach = pieces * starting_sizes(self.batch_size, piece), pieces * int(piece.high.sum())
        total_low, total_high = limits.min_global_batch, limits.max_global_batch
        if total_low is None:  # by default it only grows, because smaller batches cost time
            total_low = min(int(start.sum()), total_high or reach)
        if total_low is not None and total_low > min(reach, reach if total_high is None else total_high):
            allowed = f"at most max_global_batch, and at most {reach}, the sum of the workers' upper bounds"
            raise ConfigError("min_global_batch", total_low, allowed, "lower it, or raise the other bounds")
        bounds = Bounds.of(
            self.workers,
            pieces * piece.low,
            pieces * piece.high,
            total_low=start.sum() if self.fixed else total_low,
            total_high=start.sum() if self.fixed else total_high,
            quantum=pieces * quantum,
            max_change=limits.max_change,
        )
        return bounds, start

    def _check_policy(self) -> None:
        """Raise `ConfigError` for an impossible `interval` or `guard`, and for settings that do not fit the policy."""
        if not isinstance(self.interval, str):
            check_counts(interval=self.interval)
        elif self.interval != "auto":
            fix = spelling(self.interval, ("auto",), "check the argument")
            raise ConfigError("interval", self.interval, "a whole number, 1 or more, or 'auto'", fix)
        elif peers_of(self.own_policy) is not None:
            fix = f"give it a number, or {ONE_PLACE}"
            raise ConfigError("interval", "auto", "a whole number with this policy", fix)
        if self.fixed and getattr(self.own_policy, "even", False):
            allowed = f"'adaptive' with {self.policy!r}, which gives all workers equal batches"
            fix = "say global_batch='adaptive', or take lb_bsp or goodput"
            raise ConfigError("global_batch", "fixed", allowed, fix)
        if self.guard not in (None, True, False):
            raise ConfigError("guard", self.guard, "True, False, None", "leave it out: learned policies get one")
        if getattr(self.own_policy, "alternates", False):
            self._check_turns()
        if self._sizes_rounds and peers_of(self.own_policy) is not None:
            if self.meet == "auto":
                raise ConfigError("meet", "auto", "'gradients' or 'parameters' with this policy", ONE_PLACE)
            allowed, fix = "'fixed' with meet='parameters' and this policy", f"say global_batch='fixed', or {ONE_PLACE}"
            raise ConfigError("global_batch", "adaptive", allowed, fix)

    def _check_turns(self) -> None:
        """Raise `ConfigError` for settings that do not fit policies taking turns: only shares may change, at once."""
        numbers = self.interval if isinstance(self.interval, int) else "a number"
        for name, value, only, fix in (
            ("global_batch", self.global_batch, "fixed", f"set {OUTSIDE['global_batch']}=fixed, or {WHOLE_RUNS}"),
            ("meet", self.meet, "gradients", f"set {OUTSIDE['meet']}=gradients, or {WHOLE_RUNS}"),
            ("interval", self.interval, numbers, "write interval=5: windows have five steps here"),
            ("guard", self.guard or None, None, "leave it out; or compare guarded:NAME"),
            ("replay", self.replay, None, "leave it out"),
            ("max_change", self.limits.max_change, math.inf, "leave it out while policies take turns"),
        ):
            if value != only:
                raise ConfigError(name, value, f"{only} while policies are compared in one job", fix)

    def _served(self) -> Policy:
        policy = self.own_policy
        if self._watched:
            from dynamix.policies.guard import Guard

            policy = Guard(policy)
        if isinstance(self.interval, int):
            return policy
        from dynamix.policies.paced import Paced

        return Paced(policy, self.clock)


def job_config(workers: int, given: Mapping[str, Any]) -> JobConfig:
    """The `JobConfig` of `given` and the environment. An error names the variable that set an impossible value."""
    try:
        return JobConfig(workers, **from_outside(given))
    except ConfigError as error:
        if not os.environ.get(variable := OUTSIDE.get(error.name, "")):
            raise
        raise type(error)(variable, error.value, error.allowed, error.fix) from None


def from_outside(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments `given`, overridden by environment variables, to compare policies without editing the script.

    DYNAMIX_POLICY=static turns off all adaptation: sizes, also those of a saved state, the global batch, meet="auto",
    interval="auto", a guard that could take over, a replay. The other variables still apply.

    >>> from_outside({"policy": "dynamix", "meet": "gradients"})
    {'policy': 'dynamix', 'meet': 'gradients'}
    """
    told: dict[str, Any] = {name: said for name, variable in OUTSIDE.items() if (said := os.environ.get(variable))}
    if told:
        _log.info("set from outside: %s", ", ".join(f"{OUTSIDE[name]}={value}" for name, value in told.items()))
    if told.get("policy") == OFF:
        told = {**_off(given), **told, "policy": Static(anew=True)}
    chosen = {**given, **told}
    if told.get("global_batch") == "fixed" and isinstance(limits := given.get("limits"), Limits):
        chosen["limits"] = replace(limits, min_global_batch=None, max_global_batch=None)
    return chosen


def _off(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that turn adaptation off. Local steps stay if the script always uses them."""
    off: dict[str, Any] = {"global_batch": "fixed", "guard": None, "replay": None}
    off |= {"meet": "gradients"} if given.get("meet") == "auto" else {}
    return off | ({"interval": JobConfig.interval} if given.get("interval") == "auto" else {})


def policy_of(policy: str | Policy) -> Policy:
    """The policy for a name, a file or an object."""
    made = make_policy(policy) if isinstance(policy, str) else policy
    if not isinstance(made, Policy):
        fix = f"write batch_size={policy}" if isinstance(policy, int) else "see dynamix.Policy"
        raise ConfigError("policy", policy, "a name, or an object with decide, state_dict, load_state_dict", fix)
    return made


def grain(batch_size: int, micro_batch: int) -> int:
    """The grid of shares: whole pieces if a worker has 8 or more, otherwise quarters of a piece (if not whole, halves).

    >>> grain(256, 32), grain(64, 32), grain(64, 10)
    (32, 8, 5)
    """
    if batch_size >= 8 * micro_batch:
        return micro_batch
    return next(micro_batch // n for n in (4, 2, 1) if micro_batch % n == 0)


def shape_of(value: Any) -> Any:
    """The shape of a policy's state: its keys, and each value's type and length.

    >>> shape_of({"net": np.zeros((2, 3)), "asked": 3, "sizes": [1, 2], "none": None})
    {'net': 'float64 [2, 3]', 'asked': 'number', 'sizes': '2 x number', 'none': 'None'}
    """
    if isinstance(value, Mapping):
        return {str(key): shape_of(part) for key, part in value.items()}
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, list | tuple):
        kinds = list(dict.fromkeys(json.dumps(shape_of(part)).strip('"') for part in value))
        return f"{len(value)} x {', '.join(kinds)}" if kinds else "empty"
    if isinstance(value, bool | int | float):
        return "number"
    return "None" if value is None else type(value).__name__

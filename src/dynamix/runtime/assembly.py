"""What a `Controller` is made of, from its arguments; and how it is taken apart again."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from dynamix.errors import ConfigError, spelling
from dynamix.events.background import BackgroundLog, background_log
from dynamix.model.rounds import RoundSize
from dynamix.model.ways import Ways
from dynamix.policies import Policy
from dynamix.policies.protocol import boundary
from dynamix.policies.wrappers import peers_of
from dynamix.runtime.arguments import check_counts, check_interval, job_bounds, paced, policy_of, watched
from dynamix.runtime.decide.channel import DRAIN_S
from dynamix.runtime.decide.decision import Decider, recorded
from dynamix.runtime.decide.job_facts import JobFacts
from dynamix.runtime.decide.peer_channel import open_channel
from dynamix.runtime.job import TrainingJob
from dynamix.runtime.memory import ExitNote
from dynamix.runtime.ranks.compare import shape_of
from dynamix.runtime.ranks.hosts import own_host
from dynamix.runtime.ranks.opening import one_for_all
from dynamix.runtime.ranks.process_groups import destroy_groups
from dynamix.runtime.ranks.store import store_is_there
from dynamix.runtime.rate.scaling import rule
from dynamix.runtime.sync.loss_weight import LossWeight


@dataclass(frozen=True)
class JobArguments:
    """`Controller`'s, by their names there; `each` and `total` are its lowest and highest sizes."""

    policy: str | Policy
    batch_size: int
    global_batch: str
    each: tuple[int | Sequence[int] | None, int | Sequence[int] | None]
    total: tuple[int | None, int | None]
    interval: int | str
    quantum: int
    max_change: float
    accumulate: int
    micro_batch: int | None
    meet: str
    lr_rule: str
    events: str | os.PathLike[str] | None
    replay: str | os.PathLike[str] | None
    guard: bool | None


@dataclass
class Assembly:
    """The parts of one rank's controller."""

    policy: Policy
    coordinator: TrainingJob
    events: BackgroundLog | None
    decider: Decider | None
    exit_note: ExitNote | None = None

    def close(self) -> None:
        """`Controller.close`."""
        coordinator, error = self.coordinator, sys.exception()
        ranks = coordinator.ranks
        failing = error or ranks.lost
        if error is not None and self.exit_note is not None:
            self.exit_note.uncaught(error)  # the loop closes its controller on its way out
        if error is not None:
            ranks.leave_with(error)
        try:
            if not failing:
                coordinator.decisions.settle()
        finally:
            patience_s = 0.0 if failing else DRAIN_S
            groups = coordinator.close(patience_s=patience_s)
            self.end_events()
            if ranks.group is not None:
                groups += ranks.group.release()
            destroy_groups(groups, patience_s=patience_s)
            ranks.close()

    def end_events(self) -> None:
        """Write the steps after the last window, and close the events file. A rank does it alone; twice does no harm.

        Also called for loops that do not close their controller.
        """
        decider, self.decider = self.decider, None
        decisions = self.coordinator.decisions
        if decider is not None and (rest := decisions.rest()) is not None:
            with contextlib.suppress(RuntimeError):  # no thread can start any more: the process ends, none was written
                decider.write_rest(rest, decisions.ended_s)
        if self.events is not None:
            self.events.close()


def require_way_of_meeting(given: JobArguments) -> None:
    """Raise `ConfigError` where workers cannot meet as `given.meet` says."""
    if given.meet not in (ways := ("gradients", "parameters", "auto")):
        raise ConfigError("meet", given.meet, "'gradients', 'parameters' or 'auto'", spelling(given.meet, ways))
    if given.meet == "auto":
        if given.accumulate > 1:
            fix = "leave accumulate out: every batch is an optimizer step"
            raise ConfigError("accumulate", given.accumulate, "1 with meet='auto'", fix)
        if given.micro_batch is not None:
            fix = "leave micro_batch out: where workers step apart their steps are of batch_size samples"
            raise ConfigError("micro_batch", given.micro_batch, "None with meet='auto'", fix)
    if given.meet == "parameters":
        if given.accumulate > 1:
            fix = "leave accumulate out: every piece of a share is an optimizer step; micro_batch= says how large"
            raise ConfigError("accumulate", given.accumulate, "1 with meet='parameters'", fix)
        if given.global_batch != "fixed" and given.micro_batch is None:
            fix = "say how many samples an optimizer step has: micro_batch="
            raise ConfigError("micro_batch", None, "1 or more where rounds of local steps are adaptive", fix)


def warn_of_shares_only(policy: str | Policy) -> None:
    """Say that a global batch which may move will not."""
    name = policy if isinstance(policy, str) else type(policy).__name__
    why = f"the policy {name} moves shares only, so global_batch='adaptive' leaves the global batch as it is"
    fix = "Leave global_batch out, or take a policy that adapts it: goodput, dynamix or stigmergic"
    warnings.warn(f"{why}. {fix}", RuntimeWarning, stacklevel=5)


@store_is_there()
def assemble(group: dist.ProcessGroup | None, rank: int, given: JobArguments) -> Assembly:
    """The parts of a controller of `rank` in `group`. A collective call; its errors are `Controller`'s."""
    workers = 1 if group is None else dist.get_world_size(group)
    with one_for_all(group) as same:
        rule(given.lr_rule)  # raises for one that does not exist
        counts = {name: getattr(given, name) for name in ("batch_size", "accumulate", "quantum")}
        check_counts(**counts)
        if given.micro_batch is not None:
            counts["micro_batch"] = given.micro_batch
            check_counts(micro_batch=given.micro_batch)
            if given.accumulate > 1:
                fix = "leave accumulate out: a worker's share of a round is cut into pieces of micro_batch"
                raise ConfigError("accumulate", given.accumulate, "1 beside micro_batch", fix)
        require_way_of_meeting(given)
        bounds, start = job_bounds(
            workers,
            each=given.each,
            total=given.total,
            global_batch=given.global_batch,
            **counts,
            apart=given.meet == "parameters",
            max_change=given.max_change,
        )
        policy = policy_of(given.policy)
        check_interval(given.interval, policy)
        if given.global_batch == "fixed" and getattr(policy, "even", False):
            allowed = f"'adaptive' with {given.policy!r}, which gives all workers the same"
            fix = "say global_batch='adaptive', or take lb_bsp or goodput"
            raise ConfigError("global_batch", "fixed", allowed, fix)
        replayed = None if given.replay is None else recorded(given.replay, workers)
        events = background_log(given.events) if rank == 0 else None
        same |= {"policy": given.policy if isinstance(given.policy, str) else type(given.policy).__name__}
        same |= {**counts, "interval": given.interval, "guard": given.guard}
        same |= {"lr_rule": given.lr_rule, "replay": replayed}
        same |= {"max_change": given.max_change, "global_batch": given.global_batch, "meet": given.meet}
        same |= {"min_batch_size": bounds.low, "max_batch_size": bounds.high}
        same |= {"min_global_batch": given.total[0], "max_global_batch": given.total[1]}
        same |= {"shape of the policy's state": shape_of(policy.state_dict())}
    ranks = same.ranks
    guarded = watched(policy, given.guard)
    served, interval = paced(guarded, given.interval)
    slack, fixed = 0 if boundary(policy) == "epoch" else 1, given.global_batch == "fixed"
    apart = given.meet == "parameters"
    rounds: RoundSize | Ways | None = None
    if given.meet == "auto":
        rounds = Ways(workers)
    elif apart and given.micro_batch and not fixed:
        rounds = RoundSize(float(given.micro_batch))
    if rounds is not None and peers_of(policy) is not None:
        fix = "take a policy that decides in one place, such as goodput"
        if given.meet == "auto":
            raise ConfigError("meet", "auto", "'gradients' or 'parameters' with this policy", fix)
        allowed = "'fixed' with meet='parameters' and this policy"
        raise ConfigError("global_batch", "adaptive", allowed, f"say global_batch='fixed', or {fix}")
    hosts = tuple(ranks.gather(own_host(), "the names of hosts"))
    job = JobFacts(
        bounds, int(start.sum()), accumulate=given.accumulate, slack=slack, fixed=fixed, rounds=rounds, hosts=hosts
    )
    decider = Decider(served, job, replay=replayed, events=events) if rank == 0 else None
    channel = open_channel(ranks, workers, job, served, decider, replays=replayed is not None, lr_rule=given.lr_rule)
    coordinator = TrainingJob(
        job,
        served,
        channel,
        start,
        LossWeight(group, given.accumulate, ranks),
        rank=rank,
        interval=interval,
        lr_rule=given.lr_rule,
        ranks=ranks,
        micro_batch=given.micro_batch,
        apart=apart,
        begins=None if decider is None else decider.begin,
    )
    if not fixed and rounds is None and not getattr(guarded, "adapts", True) and rank == 0:
        warn_of_shares_only(given.policy)
    return Assembly(policy, coordinator, events, decider)

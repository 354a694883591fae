"""Saving a controller's job and going on with it: a state is checked against the job before any of it is applied."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from typing import Any, Protocol

import numpy as np
import torch

from dynamix.data import Allocations, BatchSampler, Stream
from dynamix.errors import StateError, UsageError, shown
from dynamix.model.ways import Ways
from dynamix.policies import Policy
from dynamix.policies.guard import as_written_now
from dynamix.policies.wrappers import after_answer, carry_over, load_policy, unfit
from dynamix.projection import project
from dynamix.runtime.decide.job_facts import JobFacts
from dynamix.runtime.decide.peer_channel import PeerChannel
from dynamix.runtime.decide.progress import Progress
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.ranks.hosts import remembered, shares_of, workers_of
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.rate.rates import Rates
from dynamix.runtime.state import random_state
from dynamix.runtime.state.load_atomically import Taking, load_atomically
from dynamix.runtime.state.packing import checksum, pack, unpack
from dynamix.runtime.state.schema import ORDER, SavedState, own_source, source_state
from dynamix.runtime.sync.connected_model import ConnectedModel
from dynamix.window import Bounds, Ints, Window

_NEAR = 8  # frames between `torch.distributed.checkpoint` and here, at most
RANDOM_UP_TO = 64  # ranks whose random state a gathered state holds: 10 kB each


class Resumable(Protocol):
    """What of a `TrainingJob` is saved."""

    facts: JobFacts
    policy: Policy
    allocations: Allocations
    progress: Progress
    recorder: Recorder
    rates: Rates
    ranks: Ranks
    source: BatchSampler | Stream | None
    models: list[ConnectedModel]
    windows: Any


def save(job: Resumable, *, gather: bool = False) -> dict[str, Any]:
    """`Controller.state_dict`."""
    pieces, workers = job.facts.accumulate, job.allocations.workers
    ledger = job.allocations.state_dict()
    shares = job.facts.shares
    if job.facts.hosts:
        shares = remembered(shares, workers_of(job.facts.hosts), np.asarray(ledger["sizes"][-1]))
    source, iterable = source_state(None if job.source is None else job.source.state_dict(), workers, pieces)
    own = {"recorder": job.recorder.state_dict(), "rng": random_state.capture(), "iterable": iterable}
    ranks = {job.ranks.rank: own}
    if gather and workers > 1:
        own |= {"policy": job.policy.state_dict()} if isinstance(job.windows.channel, PeerChannel) else {}
        ranks = _gathered(job, own if workers <= RANDOM_UP_TO else {**own, "rng": None})
    return SavedState(
        world_size=workers,
        rank=job.ranks.rank,
        hosts={"names": list(job.facts.hosts), "shares": shares},
        accumulate=pieces,
        base_batch=job.facts.base_batch,
        progress=job.progress.state_dict(),
        ledger_rounds=[step // pieces for step in ledger["steps"]],
        ledger_sizes=[[pieces * size for size in sizes] for sizes in ledger["sizes"]],
        ledger_pieces=ledger.get("pieces", [0] * len(ledger["steps"])),
        source=source,
        policy=job.policy.state_dict(),
        noise_scale=job.facts.noise_scale.state_dict(),
        schedules=[schedule.state_dict() for schedule in job.rates.schedules],
        hooks=[attached.state_dict() for attached in job.models],
        ranks=ranks,
    ).write()


def _gathered(job: Resumable, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
    group = job.ranks.group
    if group is None:
        raise UsageError("state_dict(gather=True) needs the ranks' control group: call it on every rank of a live job")
    every = group.all_gather_object(pack(own))
    return {rank: unpack(packed, f"ranks[{rank}]") for rank, packed in enumerate(every)}


def save_alike(job: Resumable) -> dict[str, Any]:
    """The first rank's state with every rank's own part in it, the same on all ranks. A collective call."""
    state, group = save(job, gather=True), job.ranks.group
    alike: dict[str, Any] = state if group is None else group.broadcast_object(state)
    return alike


def asked_by_distributed_checkpoint() -> bool:
    """Whether `torch.distributed.checkpoint` is asking all ranks for their states.

    Of a value that several ranks have under one name it keeps that of any of them, a different one for each value. So
    what it is given must be the same on all ranks.
    """
    frame = sys._getframe(1)
    for _ in range(_NEAR):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            while frame.f_back is not None and "no_dist" not in frame.f_locals:
                frame = frame.f_back
            return not frame.f_locals.get("no_dist", False)
    return False


def load(job: Resumable, state: Any, *, policy: bool = True) -> dict[str, Any]:
    """`Controller.load_state_dict`; returns the parts that wait for what does not exist yet.

    Nothing of the job is changed where this raises, also where a policy or a hook's state of the user's does.
    """
    saved = SavedState.read(state)
    same = saved.world_size == job.allocations.workers and _stayed(job, saved)
    facts = _facts_of(job, saved)
    rounds, sizes, apart, opens = _ledger(job, saved, facts, same)
    parts = _parts(job, saved, same)
    takings: list[Taking] = []
    if policy:
        # Where every rank decides for itself, each goes on with what it remembers of itself.
        known = saved.ranks.get(job.ranks.rank, {}).get("policy", saved.policy) if same else saved.policy
        check_policy(job.policy, known, sizes[-1], facts.bounds, same=same)
        takings.append((job.policy, lambda: (load_policy if same else carry_over)(job.policy, known)))
    takings += _takings(job, parts)
    _say_what_is_overridden(job, saved)
    load_atomically(takings)
    # From here on nothing raises.
    job.progress.load_state_dict({**saved.progress, "opens": opens})
    job.facts.resume(saved.base_batch, saved.progress["steps"], saved.progress["samples"])
    job.facts.shares = saved.hosts["shares"]
    job.facts.noise_scale.load_state_dict(saved.noise_scale)
    job.allocations.load_state_dict(
        {
            "steps": [job.facts.accumulate * r for r in rounds],
            "sizes": [s // job.facts.accumulate for s in sizes],
            "pieces": apart,
        }
    )
    return parts


def _say_what_is_overridden(job: Resumable, saved: SavedState) -> None:
    """Warn where the state brings another global batch than the script asks for. Other workers share the saved one."""
    here, workers = job.facts.base_batch, job.allocations.workers
    if job.ranks.rank != 0 or saved.world_size != workers or saved.base_batch == here:
        return
    why = f"the loaded state goes on with a global batch of {saved.base_batch} samples, as the job that saved it began"
    pieces = job.facts.accumulate
    mine = f"batch_size={here / workers / pieces:g}, accumulate={pieces} on {workers} workers"
    theirs = f"batch_size={saved.base_batch / workers / saved.accumulate:g}, accumulate={saved.accumulate}"
    fix = f"Write {theirs}, or leave load_state_dict out to begin with yours"
    said = f"{why}; this script asks for {here} ({mine}), which is not used. {fix}"
    warnings.warn(said, RuntimeWarning, stacklevel=5)


def _stayed(job: Resumable, saved: SavedState) -> bool:
    """Whether every rank is on the host that it was on, as far as that is known."""
    before = saved.hosts["names"]
    return not (job.facts.hosts and before) or list(job.facts.hosts) == before


def _facts_of(job: Resumable, saved: SavedState) -> JobFacts:
    """The job's facts as they will be. Raises what `JobFacts.resume` raises."""
    trial = copy.copy(job.facts)
    trial.resume(saved.base_batch, saved.progress["steps"], saved.progress["samples"])
    return trial


def _ledger(
    job: Resumable, saved: SavedState, facts: JobFacts, same: bool
) -> tuple[list[int], list[Ints], list[int], int]:
    """Rounds, sizes and pieces of the ledger to go on with, and the round from which measurements count.

    The saved ledger, within the bounds of today. With other workers the global batch is kept: those whose hosts were
    there before have the shares that they had, new ones the mean of these. Where workers step apart, what they train at
    the same time is kept too.
    """
    rounds, opens = saved.ledger_rounds, saved.progress["opens"]
    sizes = [np.asarray(of, dtype=np.int64) for of in saved.ledger_sizes]
    apart = saved.ledger_pieces if isinstance(facts.rounds, Ways) else [0] * len(sizes)
    now = saved.source["rounds"]
    first = max(i for i, begin in enumerate(rounds) if begin <= max(now, rounds[0]))
    if same:
        to_come = [project(of, facts.bounds_of(piece)) for of, piece in zip(sizes, apart, strict=True)][first:]
        fits = all(map(np.array_equal, to_come, sizes[first:]))
        if fits and not any((of % job.facts.accumulate).any() for of in sizes):
            return rounds, sizes, apart, opens
        within, piece = to_come[-1], apart[-1]
    else:
        known = job.facts.hosts or ("",) * job.allocations.workers
        shares, total = shares_of(saved.hosts["shares"], workers_of(known)), sizes[first].sum()
        piece = _part(apart[first] * saved.world_size, job.allocations.workers)
        within = project(shares * total / shares.sum(), facts.bounds_of(piece), total=total)
    return [now], [within], [piece], now


def _part(at_once: int, workers: int) -> int:
    """A worker's part of what all train at the same time, where they step apart."""
    return max(round(at_once / workers), 1) if at_once else 0


def _parts(job: Resumable, saved: SavedState, same: bool) -> dict[str, Any]:
    """What waits for its owner, each checked against the owner where there is one."""
    own = saved.ranks.get(job.ranks.rank) if saved.world_size == job.allocations.workers else None
    of_any = own or saved.ranks[saved.rank]
    iterable = of_any["iterable"] if own or not saved.source["sharded"] else None
    source = own_source(saved.source, iterable, job.facts.accumulate)
    if source is not None and job.source is not None:
        _same_order(source, job.source)
    parts: dict[str, Any] = {"source": source}
    for i, of in enumerate(saved.schedules):
        parts[f"schedule {i}"] = of
        if i < len(job.rates.schedules):
            _alike(f"schedules[{i}]", of, job.rates.schedules[i].state_dict())
    for i, of in enumerate(saved.hooks):
        parts[f"hook {i}"] = of
        if of and i < len(job.models) and (mine := job.models[i].state_dict()):
            _alike(f"hooks[{i}]", of, mine, also=("inner",))
    if same:
        notebook = of_any["recorder"]
        # Others' figures are not this rank's; how many steps the open window has, all ranks must agree on.
        parts["recorder"] = notebook if own else {**notebook, "series": {}, "before": {}}
    if own is not None and own["rng"] is not None:
        parts["rng"] = own["rng"]
        _random(own["rng"])
    return parts


def _takings(job: Resumable, parts: dict[str, Any]) -> list[Taking]:
    """Those of `parts` that objects of the user's load, where these exist; they are taken out of it."""

    def load(owner: Any, part: Any) -> Taking:
        return owner, lambda: owner.load_state_dict(part)

    owners: dict[str, Any] = {f"hook {i}": attached for i, attached in enumerate(job.models)}
    owners |= {f"schedule {i}": schedule for i, schedule in enumerate(job.rates.schedules)}
    return [load(owner, parts.pop(name)) for name, owner in owners.items() if name in parts]


def _same_order(saved: dict[str, Any], source: Any) -> None:
    mine, _ = source_state(source.state_dict(), source.world_size, source.accumulate)
    for name in ORDER:
        if saved[name] != mine[name] or type(saved[name]) is not type(mine[name]):
            raise StateError(
                f"{name}={shown(saved[name])} in the checkpoint, {name}={shown(mine[name])} here: the order of samples "
                "would differ, and some would be lost or repeated; resume with the data set and sampler that saved it"
            )
    source.check_state(saved)


def _alike(name: str, saved: Any, mine: Any, also: tuple[str, ...] = ()) -> None:
    """Raise `StateError` unless both have the same keys, and values of one kind. Those in `also` are not looked at."""
    if not isinstance(saved, dict) or saved.keys() != mine.keys():
        raise StateError(f"the controller's state has {name} of another kind: make the same objects before loading it")
    for key in saved.keys() - set(also):
        one, other = saved[key], mine[key]
        numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (one, other))
        if isinstance(other, dict) and isinstance(one, dict) and key == "scheduler":
            _alike(f"{name}.{key}", one, other)
        elif not (numbers or type(one) is type(other) or one is None or other is None):
            raise StateError(f"the controller's state has {name}.{key}={shown(one)}, where this job has {shown(other)}")


def _random(saved: Any) -> None:
    """Raise `StateError` for random states that the generators would not take."""
    try:
        version, internal, gauss = saved["python"]
        random.Random().setstate((version, tuple(internal), gauss))
        np.random.RandomState().set_state(random_state.of_numpy(saved["numpy"]))
        torch.Generator().set_state(saved["torch"].cpu())
        if type(saved["cuda"]) not in (list, tuple) or not all(isinstance(d, torch.Tensor) for d in saved["cuda"]):
            raise TypeError("cuda")
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise StateError(f"the controller's state holds random states that do not fit: {error}") from error


def check_policy(policy: Policy, state: Any, sizes: Ints, bounds: Bounds, *, same: bool) -> None:
    """Raise `StateError` unless `policy` could go on from `state`: a copy of it takes it, and one of ours decides.

    A policy that cannot be copied is not tried.
    """
    try:
        trial = copy.deepcopy(policy)
    except Exception:  # of any kind: locks, sockets, what a user's policy holds
        return
    before = random_state.capture()
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            (load_policy if same else carry_over)(trial, state)
            if _ours(trial):
                if same and _differ(trial.state_dict(), state):
                    raise ValueError("it holds what the policy does not know, or numbers in another form")
                _decide(trial, sizes, bounds)
    except StateError:
        raise
    except Exception as error:  # a damaged state fails anywhere
        raise unfit(policy, state, error) from error
    finally:
        random_state.restore(before)


_OUR_PACKAGES = ("dynamix", "dynamix_lab")  # a policy of the lab's arrives by entry point, and is held to the same


def _ours(policy: Any) -> bool:
    while True:
        if type(policy).__module__.partition(".")[0] not in _OUR_PACKAGES:
            return False
        inner = getattr(policy, "policy", None)
        if inner is None:
            return True
        policy = inner


def _differ(mine: Any, saved: Any) -> bool:
    """Whether two states of the same kind of policy differ."""
    if not isinstance(saved, dict) or mine.keys() != saved.keys():
        return isinstance(saved, dict) and not {"guarded", "paced"} & (mine.keys() ^ saved.keys())
    return checksum({"policy": pack(mine)}) != checksum({"policy": pack(as_written_now(saved))})


def _decide(policy: Any, sizes: Ints, bounds: Bounds) -> None:
    """Two windows, as a job might see them next; also of what a guard has under it."""
    share = np.maximum(sizes, 1) / max(float(sizes.mean()), 1.0)
    times: dict[str, Any] = {
        "compute": 0.1 * share,
        "compute_std": 0.01 * share,
        "wait": 0.01,
        "communication": 0.05,
        "data": 0.001,
    }
    known: dict[str, Any] = {
        "steps": 5.0,
        "noise": 100.0,
        "signal": 1.0,
        "global_norm_sq": 1.0,
        "gradient_norm_sq": 2.0,
    }
    for _ in range(2):
        window = Window.of(sizes, **times, **known, loss=1.0, loss_std=0.1, loss_change=-0.1)
        inner = policy
        while inner is not None:
            project(np.asarray(inner.decide(window, bounds)), bounds, current=sizes)
            inner = getattr(inner, "policy", None)
        after_answer(policy)

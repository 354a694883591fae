"""The parts of one rank's job, made of what it is told and put together."""

from __future__ import annotations

import torch.distributed as dist

from dynamix.events.background import BackgroundLog
from dynamix.runtime.config import JobConfig
from dynamix.runtime.decide.decision import Decider
from dynamix.runtime.decide.job_facts import JobFacts
from dynamix.runtime.decide.peer_channel import open_channel
from dynamix.runtime.job import TrainingJob
from dynamix.runtime.ranks.group import ControlGroup
from dynamix.runtime.ranks.hosts import own_host
from dynamix.runtime.ranks.liveness import Liveness
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.sync.loss_weight import LossWeight


def open_job(
    config: JobConfig, group: dist.ProcessGroup | None, control: ControlGroup | None, events: BackgroundLog | None
) -> TrainingJob:
    """This rank's part of the job of `config`. A collective call.

    group     in which workers train; None: there is one worker
    control   over the same ranks, for the controllers' own messages
    events    what the rank that decides writes to
    """
    rank = 0 if control is None else control.rank
    hosts = [own_host()] if control is None else control.all_gather_object(own_host())
    facts = JobFacts.of(config, hosts=tuple(hosts))
    decider = None
    if rank == 0:
        decider = Decider(config.served, facts, replay=config.replayed, events=events)
    channel = open_channel(
        control,
        config.workers,
        facts,
        config.served,
        decider,
        replays=config.replayed is not None,
        lr_rule=config.lr_rule,
    )
    job = TrainingJob(
        facts,
        config.served,
        channel,
        config.start,
        LossWeight(group, config.accumulate),
        rank=rank,
        interval=config.first_interval,
        lr_rule=config.lr_rule,
        ranks=None if control is None else Ranks(control),
        micro_batch=config.micro_batch,
        apart=config.apart,
        decider=decider,
    )
    if control is not None and job.ranks is not None and config.workers > 1:
        liveness = job.liveness = Liveness.open(control)
        channel.explain = job.ranks.explain = job.loss_weight.explain = liveness.explain
    return job

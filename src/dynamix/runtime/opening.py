"""The parts of one rank's job, made of what it is told and put together."""

from __future__ import annotations

import torch.distributed as dist

from dynamix.events.background import BackgroundLog
from dynamix.runtime.config import JobConfig
from dynamix.runtime.decide.decision import Decider
from dynamix.runtime.decide.job_facts import JobFacts
from dynamix.runtime.decide.peer_channel import open_channel
from dynamix.runtime.job import TrainingJob
from dynamix.runtime.ranks.hosts import own_host
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.sync.loss_weight import LossWeight


def open_job(
    config: JobConfig, group: dist.ProcessGroup | None, ranks: Ranks, events: BackgroundLog | None
) -> TrainingJob:
    """This rank's part of the job of `config`. A collective call.

    group     in which workers train; None: there is one worker
    ranks     the same ranks, for the controllers' own messages
    events    what the rank that decides writes to
    """
    facts = JobFacts(config, hosts=tuple(ranks.gather(own_host(), "the names of hosts")))
    decides = ranks.rank == 0
    decider = Decider(config.served, facts, replay=config.replayed, events=events) if decides else None
    channel = open_channel(ranks, config, facts, decider)
    return TrainingJob(config, facts, channel, LossWeight(group, config.accumulate, ranks), ranks, decider=decider)

"""A policy of dynamix, in the loop of its README. Unlike the other jobs here it runs in our own interpreter."""

from __future__ import annotations

import datetime
import itertools
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from dynamix.policies import make_policy
from dynamix.runtime.controller import Controller
from dynamix_lab.harness.reference import references
from dynamix_lab.peers.jobs.job import Run, Task, as_is


def main(path: str) -> None:
    task = Task(path)
    told = task.settings
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    task.warm_up(DDP)
    net = task.model()
    optimizer, run = task.optimizer(net.parameters()), Run(task, net)
    others = references(told["scenario"], seed=told["disturbance_seed"], clock=run.clock)
    least, most = told["bounds"]
    controller = Controller(
        make_policy(told["policy"], others=others),
        task.share,
        min_batch_size=least,
        max_batch_size=most,
        interval=told["interval"],
        lr_rule=told["lr_rule"],
        events=task.config["events"],
        global_batch="adaptive",
    )
    sampler = controller.batch_sampler(task.data, seed=task.seed)
    loader = DataLoader(task.data, batch_sampler=sampler, collate_fn=as_is, generator=torch.Generator())
    model = controller.wrap(DDP(net), optimizer)
    run.begin()
    going = True
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            logits = model(inputs)
            loss = task.loss(logits, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss, logits=logits, target=targets)
            going = run.goes_on(controller.samples_seen, loss.item(), controller.batch_sizes.tolist())
            if not going:
                break
        if not going:
            break
    controller.close()
    dist.barrier()
    run.finish(overhead_s=controller.overhead_s)


if __name__ == "__main__":
    main(sys.argv[1])

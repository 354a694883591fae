"""One rank of a comparison of policies: trains the same model once per policy, in turn, in one launch.

Started as `python -m dynamix_lab.harness.worker CONFIG.json` with torchrun's environment variables. Rank 0 talks to the
parent through a Unix socket (a path, so it crosses network namespaces).
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from dynamix.policies import Policy, make_policy
from dynamix.runtime.controller import Controller
from dynamix_lab.harness.channel import JobChannel
from dynamix_lab.harness.reference import references
from dynamix_lab.harness.runs import file_name
from dynamix_lab.tasks import Arrays, Workload, as_is, make_workload

Clock = Callable[[], float]


class Watch:
    """What happens beside training: snapshots every s samples, progress, and the end of the run.

    All ranks must stop at the same step, so rank 0's wish travels by a broadcast that is posted at one snapshot and
    taken at the next: nobody ever waits for it.
    """

    def __init__(
        self, link: JobChannel | None, model: nn.Module, config: dict[str, Any], name: str, clock: Clock
    ) -> None:
        self.link, self.model, self.name, self.clock = link, model, name, clock
        self.every, self.limit = config["snapshot_samples"], config["max_steps"]
        self.folder = Path(config["snapshots"])
        self.ends: list[float] = []
        self._next = self.every
        self._flag = torch.zeros(1)
        self._work: dist.Work | None = None

    def goes_on(self, controller: Controller, loss: float) -> bool:
        """After every step. False ends the run, on every rank at the same step."""
        self.ends.append(self.clock())
        samples, step = controller.samples_seen, len(self.ends)
        if self.link is not None and step % 5 == 0:
            sizes = controller.batch_sizes.tolist()
            self.link.send("progress", time_s=self.ends[-1], step=step, samples=samples, loss=loss, batch_sizes=sizes)
        if samples >= self._next or step >= self.limit:
            self._next += self.every
            self._snapshot(samples)
            if self._stop_agreed():
                return False
        return step < int(self.limit)

    def _snapshot(self, samples: int) -> None:
        if self.link is None:
            return
        path = self.folder / f"{file_name(self.name)}-{len(self.ends)}.f32"
        with torch.no_grad():
            torch.cat([p.reshape(-1) for p in self.model.parameters()]).numpy().tofile(path)
        self.link.send("snapshot", time_s=self.ends[-1], step=len(self.ends), samples=samples, path=str(path))

    def _stop_agreed(self) -> bool:
        if self._work is not None:
            self._work.wait()
            if self._flag.item():
                self._work = None
                return True
        self._flag.fill_(float(self.link is not None and stop_asked(self.link)))
        self._work = dist.broadcast(self._flag, 0, async_op=True)
        return False

    def finish(self) -> None:
        """Take the last broadcast, so that nothing is under way when the process group goes."""
        if self._work is not None:
            self._work.wait()


def ask(link: JobChannel, kind: str, **fields: Any) -> None:
    """Send and wait for the answer "go"; a stop that came too late for its run is thrown away."""
    link.send(kind, **fields)
    while (answer := link.receive()) is None or answer["kind"] != "go":
        pass


def stop_asked(link: JobChannel) -> bool:
    """Whether the parent wants this run to end."""
    message = link.receive(timeout_s=0)
    return message is not None and message["kind"] == "stop"


def warm_up(workload: Workload, data: Arrays, config: dict[str, Any]) -> None:
    """Steps on a model that is thrown away: first calls, allocations and sockets cost their time before the clock."""
    model = DDP(workload.make_model(config["seed"]))
    optimizer = workload.make_optimizer(model.parameters())
    inputs, targets = data.__getitems__(range(config["batch_size"]))
    for _ in range(config["warm_up_steps"]):
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(config: dict[str, Any], name: str, workload: Workload, data: Arrays, link: JobChannel | None) -> None:
    """One run: the user's loop of the README, under one policy."""
    warm_up(workload, data, config)
    began = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began

    net = workload.make_model(config["seed"])
    optimizer = workload.make_optimizer(net.parameters())
    if (rate := config.get("learning_rate")) is not None:  # else the workload's
        for group in optimizer.param_groups:
            group["lr"] = rate
    controller = Controller(
        policy=make_named_policy(config, name, clock),
        batch_size=config["batch_size"],
        min_batch_size=workload.min_batch,
        max_batch_size=workload.max_batch,
        interval=config["interval"],
        lr_rule=config["lr_rule"],
        events=config["events"].format(run=file_name(name)),
        global_batch="adaptive",
    )
    sampler = controller.batch_sampler(data, seed=config["seed"])
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=as_is, generator=torch.Generator())
    model = controller.wrap(DDP(net), optimizer)
    watch = Watch(link, net, config, name, clock)
    dist.barrier()
    if link is not None:
        ask(link, "start", run=name)  # the parent throttles the hosts and starts the neighbour's schedule
    dist.barrier()
    began = time.perf_counter()
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            logits = model(inputs)
            loss = workload.loss(logits, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss, logits=logits, target=targets)
            if not watch.goes_on(controller, loss.item()):
                break
        else:
            continue
        break
    end_s, samples, sizes = clock(), controller.samples_seen, controller.batch_sizes.tolist()
    watch.finish()
    controller.close()
    dist.barrier()
    if link is not None:
        ask(
            link,
            "finished",
            run=name,
            time_s=end_s,
            samples=samples,
            batch_sizes=sizes,
            step_ends_s=watch.ends,
            overhead_s=controller.overhead_s,
            events=config["events"].format(run=file_name(name)),
        )
    dist.barrier()


def make_named_policy(config: dict[str, Any], name: str, clock: Clock) -> Policy:
    """The policy of a run; a name with a suffix ("static-again", the A/A partner) is the same policy once more."""
    plain = name.removesuffix("-again")
    others = references(config["scenario"], seed=config["disturbance_seed"], clock=clock)
    return make_policy(config["policy_files"].get(plain, plain), others=others)


def main(path: str) -> None:
    """All runs of one launch."""
    config = json.loads(Path(path).read_text())
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=config["timeout_s"])
    link = JobChannel.connect(config["socket"]) if rank == 0 else None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout)
    workload = make_workload(config["workload"])
    data = workload.make_data(config["seed"], train=config["train_samples"], test=config["test_samples"]).train
    for name in config["runs"]:
        prefixed = PrefixStore(name, store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world_size, timeout=timeout)
        try:
            train(config, name, workload, data, link)
        finally:
            dist.destroy_process_group()
    if link is not None:
        link.send("done")


if __name__ == "__main__":
    main(sys.argv[1])

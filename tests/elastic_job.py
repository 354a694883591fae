"""A job under torchrun whose workers come and go: what `test_elastic` starts on two "hosts" of this machine.

Counts how often each sample was trained, as the checkpoints' line of descent has it; host "b" is a third as fast.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import dynamix
from dynamix import elastic

SAMPLES, BATCH, EVERY = 6000, 48, 5


def main(folder: Path) -> None:
    """Until the end of the epoch in which the folder has a file `enough`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    elastic.require_restartable()
    dist.init_process_group("gloo")
    rank, workers, host = dist.get_rank(), dist.get_world_size(), os.environ["DYNAMIX_HOST"]
    (folder / f"{host}.pid").write_text(str(os.getpid()))
    x = torch.randn(SAMPLES, 4)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    controller = dynamix.Controller("lb_bsp", batch_size=BATCH // workers, interval=2)
    elastic.stop_on_sigterm(controller)
    loader = controller.loader(DataLoader(range(SAMPLES), batch_size=BATCH // workers, shuffle=True))  # type: ignore
    model = controller.wrap(DDP(net), optimizer)
    trained, saved = torch.zeros(SAMPLES, dtype=torch.int64), folder / "checkpoint.pt"
    before = trained.clone()

    def save() -> None:
        state, union = controller.state_dict(gather=True), trained.clone()
        dist.all_reduce(union)
        if rank == 0:
            everything = {"net": net.state_dict(), "controller": state, "trained": before + union}
            torch.save(everything, saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)

    if saved.exists():
        state = torch.load(saved, weights_only=True)
        net.load_state_dict(state["net"])
        controller.load_state_dict(state["controller"])
        before = state["trained"]
    said = {"workers": workers, "host": host, "samples": controller.samples_seen, "at": time.time()}
    if rank == 0:
        with (folder / "starts.jsonl").open("a") as lines:
            lines.write(json.dumps(said | {"sizes": controller.batch_sizes.tolist()}) + "\n")
    steps = 0
    ended = torch.zeros(())
    while not ended:
        for picked in loader:
            began = time.monotonic()
            model(x[picked]).square().mean().backward()
            time.sleep(max(0.0, len(picked) * (0.0015 if host == "b" else 0.0005) - time.monotonic() + began))
            optimizer.step()
            optimizer.zero_grad()
            trained[picked] += 1
            controller.step()
            steps += 1
            if rank == 0:
                now = {"host": host, "samples": controller.samples_seen, "sizes": controller.batch_sizes.tolist()}
                (folder / "now.new").write_text(json.dumps(now))
                os.replace(folder / "now.new", folder / "now.json")
            if steps % EVERY == 0 or controller.stopping:
                save()
            if controller.stopping:
                elastic.leave(controller)
        ended = torch.tensor(float((folder / "enough").exists()))  # a host may see it an epoch before the other
        dist.all_reduce(ended, dist.ReduceOp.MAX)
    save()
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

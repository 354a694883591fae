"""A rank that runs out of memory in the user's own loop ends all ranks, and each says what to write."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import sys, time
import torch, dynamix
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

where, meet = sys.argv[1:]
FULL = "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."
step = 0

def full(place):
    if place in where and step == 6 and dist.get_rank() == (0 if "first" in where else 1):
        print("full at", time.time(), flush=True)
        raise torch.OutOfMemoryError("CUDA out of memory.") if "CUDA" in where else RuntimeError(FULL)

class Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        full("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        full("backward")
        return gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.between = nn.BatchNorm1d(8) if "buffers" in where else nn.ReLU()

    def forward(self, x):
        return self.last(Full.apply(self.between(self.first(x))))

torch.set_num_threads(1)
dist.init_process_group("gloo")
data = TensorDataset(torch.randn(4000, 4), torch.randint(0, 3, (4000,)))
pieces = {"meet": meet, "micro_batch": 4} if meet == "parameters" else {}
controller = dynamix.Controller("static", batch_size=24, interval=5, **pieces)
loader = DataLoader(data, batch_sampler=controller.batch_sampler(data))
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = controller.wrap(DDP(net), optimizer)
try:
    for x, y in loader:
        with controller.piece():
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
        if controller.optimizer_due:
            optimizer.step()
            optimizer.zero_grad()
        controller.step(loss=loss)
        step += 1
finally:
    if "closing" in where:
        controller.close()
"""


@pytest.mark.parametrize(
    ("where", "meet"),
    [
        ("forward", "gradients"),
        ("backward", "gradients"),
        ("forward buffers closing", "gradients"),
        ("backward first CUDA", "gradients"),
        ("backward", "parameters"),
    ],
)
def test_all_ranks_end_and_name_the_rank_its_batch_and_the_line(tmp_path: Path, where: str, meet: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(JOB)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(script), where, meet]
    logs = [tmp_path / f"rank{rank}" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            env = {**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    try:
        for rank in ranks:
            rank.wait(100)
    finally:
        for rank in ranks:
            rank.kill()
    said = [log.read_text() for log in logs]
    full, samples = int("first" not in where), 4 if meet == "parameters" else 24
    assert all(rank.returncode for rank in ranks), said  # gloo may abort a process whose peer has ended
    at = re.search(r"full at ([\d.]+)", said[full])
    assert at, said
    # Until its last word: how long torch's own processes take to end is theirs.
    assert max(log.stat().st_mtime for log in logs) - float(at[1]) < 10, said
    for of in said:
        assert f"rank {full} ran out of memory in a pass of {samples} samples" in of, said
        assert "controller.find_limits(step_fn, example)" in of
        assert f"Controller(micro_batch={samples // 2})" in of
    assert "WorkerLostError" not in said[full]

"""torch.distributed over emulated hosts."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from dynamix_lab.emulator import Emulation, emulate

pytestmark = [pytest.mark.emulator, pytest.mark.multiproc]

JOB = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from dynamix_lab.emulator import control

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
if rank == 0:
    assert control.request("start-clock")
dist.barrier()
x = torch.full((100_000,), float(rank + 1))
dist.all_reduce(x)
print(x[0].item(), flush=True)
if os.environ.get("DIES") == str(rank):
    os._exit(3)
# The dead rank's peers notice a closed connection or the timeout, never nothing.
for _ in range(3):
    dist.all_reduce(x)
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("privileged")
def test_all_reduce_across_four_hosts_and_one_dies(tmp_path: Path) -> None:
    with Emulation("demo", run_dir=tmp_path, mechanism="privileged") as cluster:
        cluster.launch([sys.executable, "-c", JOB], env={"DIES": "1"})
        while None in (codes := cluster.poll()) and not any(codes):
            time.sleep(0.1)
        assert cluster.throttled  # the job asked for it
        died = time.monotonic()
        codes = cluster.wait(90, grace_s=65)
        assert time.monotonic() - died < 60
    outputs = [(tmp_path / f"rank{rank}.out").read_text().strip() for rank in range(4)]
    errors = [(tmp_path / f"rank{rank}.err").read_text()[-2000:] for rank in range(4)]
    assert outputs == ["10.0"] * 4, errors
    assert codes == [1, 3, 1, 1], errors  # an exception of torch's, not a signal of ours


SIXTEEN = """
import time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", timeout=timedelta(seconds=180))
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(40, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
steps, stop = 0, torch.zeros(1)
began = time.monotonic()
while not stop:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(1000 * rank + steps))
    torch.nn.functional.cross_entropy(model(x), x.argmax(1) % 10).backward()
    optimizer.step(); optimizer.zero_grad()
    steps += 1
    stop[0] = time.monotonic() - began > 3 and steps >= 10
    dist.broadcast(stop, 0)
print(steps, model.module.weight.double().sum().item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)  # importing torch sixteen times on two cores
@pytest.mark.usefixtures("privileged")
def test_sixteen_hosts_train_together_under_limits_and_disturbances(tmp_path: Path) -> None:
    scenario = {
        "hosts": [{"cpu": 0.12, "rate_mbit_s": 20, "loss": 0.001}] * 16,
        "disturbances": [{"kind": "load", "factor": 0.5, "probability": 0.3, "every_s": 1}],
        "schedule": [{"at_s": 1, "host": 3, "rate_mbit_s": 5}],
    }
    result = emulate(scenario, [sys.executable, "-c", SIXTEEN], out=tmp_path / "run", echo=None, mechanism="privileged")
    outputs = [(tmp_path / "run/ranks/0" / f"rank{rank}.out").read_text().split() for rank in range(16)]
    assert result["exit_codes"] == [0] * 16, (tmp_path / "run/ranks/0/rank0.err").read_text()[-2000:]
    assert len({tuple(output) for output in outputs}) == 1  # the same steps and the same weights everywhere
    assert int(outputs[0][0]) >= 10
    assert result["mechanisms"]["link"] == "tbf+bpf"

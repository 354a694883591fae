"""torch.distributed over emulated hosts."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from dynamix.emulator import Emulation

pytestmark = [pytest.mark.emulator, pytest.mark.multiproc]

JOB = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from dynamix.emulator import control

dist.init_process_group("gloo", timeout=timedelta(seconds=10))
rank = dist.get_rank()
if rank == 0:
    assert control.request("start-clock")
dist.barrier()
x = torch.full((100_000,), float(rank + 1))
dist.all_reduce(x)
print(x[0].item(), flush=True)
if os.environ.get("DIES") == str(rank):
    os._exit(3)
for _ in range(3):
    dist.all_reduce(x)
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("privileged")
def test_all_reduce_across_four_hosts(tmp_path: Path) -> None:
    with Emulation("demo", run_dir=tmp_path, mechanism="privileged") as cluster:
        cluster.launch([sys.executable, "-c", JOB])
        assert cluster.wait(90, grace_s=15) == [0] * 4, [
            (tmp_path / f"rank{r}.err").read_text()[-2000:] for r in range(4)
        ]
        assert cluster.throttled
    assert [float((tmp_path / f"rank{r}.out").read_text()) for r in range(4)] == [10.0] * 4


@pytest.mark.usefixtures("privileged")
def test_one_rank_dies_and_the_others_end_by_themselves(tmp_path: Path) -> None:
    hosts = {"hosts": [{"cpu": 0.5}, {"cpu": 0.5}, {"cpu": 0.5}]}
    with Emulation(hosts, run_dir=tmp_path, mechanism="privileged") as cluster:
        cluster.launch([sys.executable, "-c", JOB], env={"DIES": "1"})
        while None in (codes := cluster.poll()) and not any(codes):
            time.sleep(0.1)
        died = time.monotonic()
        codes = cluster.wait(60, grace_s=40)
        assert time.monotonic() - died < 30
    assert codes == [1, 3, 1]  # an exception of torch's, not a signal of ours

"""torch.distributed over emulated hosts."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from dynamix_lab.emulator import Emulation

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

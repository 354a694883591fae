"""How well steps on device hosts keep the device's times, and DDP's exchange its own: a part of `dynamix bench
emulator-accuracy`.

Two equal hosts train eight linear layers under DDP, in one bucket or in eight, on links without a limit and on slow
ones. The formula: a third of a step's time `T` is forward; of eight layers the k-th in the order of backward has its
gradients at `T (1/3 + 2/3 k/8)`. Bucket j is ready with its last layer, and the link carries one bucket after the
other: `end_j = max(end_{j-1}, ready_j) + transfer_j`. Exposed is what lies between `T` and the last end.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamix_lab.emulator import Emulation
from dynamix_lab.emulator.devices import too_many_overruns
from dynamix_lab.harness.suite import Tell, untold
from dynamix_lab.report import Table

STEPS = 25
_SETTLING = 3
_FORWARD = 1 / 3
_FRAME = 1514 / 1448  # bytes on the wire for a segment's, with Ethernet's, IP's and TCP's headers

PROGRAM = """
import json, sys, time
import torch, torch.distributed as dist
from torch import nn
from dynamix_lab.emulator import control
width, buckets, steps = map(int, sys.argv[1:])
torch.set_num_threads(1)
dist.init_process_group("gloo")
net = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(width, width), nn.ReLU())))
size_mb = 4 * width * (width + 1) / 2**20
model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1000 if buckets == 1 else 0.9 * size_mb)
optimizer, x, times = torch.optim.SGD(net.parameters(), lr=0.01), torch.randn(8, width), []
def step():
    began = time.perf_counter()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - began)
for _ in range(3): step()
dist.barrier()
if dist.get_rank() == 0: control.request("start-clock")
dist.barrier()
times.clear()
for _ in range(steps): step()
sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
print(json.dumps([times, [int(size) for size in sizes.split(",")]]))
dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True)
class DeviceCell:
    """Device time of a step, ms; width of the layers; buckets of DDP, 1 or 8; rate of the links, None for no limit."""

    device_ms: float
    width: int
    buckets: int
    rate_mbit_s: float | None


CELLS = (
    *(DeviceCell(36.0, 64, buckets, None) for buckets in (1, 8)),
    *(DeviceCell(200.0, 64, buckets, None) for buckets in (1, 8)),
    *(DeviceCell(200.0, 512, buckets, 400.0) for buckets in (1, 8)),
)


def exposed_s(step_s: float, bucket_bytes: Sequence[int], rate_mbit_s: float) -> float:
    """Seconds of a step's exchange that computing does not hide, of equal layers between two hosts: the formula above.

    Sent are as many bytes as a bucket has, in each direction.

    >>> round(exposed_s(0.3, [8_000_000], 1000.0), 4), round(exposed_s(0.3, [4_000_000] * 2, 1000.0), 4)
    (0.0669, 0.0335)
    """
    carried, end_s, total = 0, 0.0, sum(bucket_bytes)
    for size in bucket_bytes:
        carried += size
        ready_s = step_s * (_FORWARD + (1 - _FORWARD) * carried / total)
        end_s = max(end_s, ready_s) + size * _FRAME * 8e-6 / rate_mbit_s
    return end_s - step_s


def measure(cell: DeviceCell) -> dict[str, Any]:
    """Median seconds of a step on the first rank, and what the formula says."""
    host = {"cpu": 1.0} if cell.rate_mbit_s is None else {"cpu": 1.0, "rate_mbit_s": cell.rate_mbit_s}
    scenario = {"hosts": [host] * 2, "device": {"fixed_ms": cell.device_ms, "per_sample_ms": 0.0}}
    with tempfile.TemporaryDirectory() as folder, Emulation(scenario, run_dir=folder) as cluster:
        cluster.launch([sys.executable, "-c", PROGRAM, str(cell.width), str(cell.buckets), str(STEPS)])
        cluster.wait(180)
        times, sizes = json.loads((Path(folder) / "rank0.out").read_text())
        steps = cluster.overruns()
    step_s, device_s = sorted(times[_SETTLING:])[(STEPS - _SETTLING) // 2], 1e-3 * cell.device_ms
    expected_s = 0.0 if cell.rate_mbit_s is None else exposed_s(device_s, sizes, cell.rate_mbit_s)
    return {
        **{"device_s": device_s, "width": cell.width, "buckets": len(sizes), "rate_mbit_s": cell.rate_mbit_s},
        **{"step_s": step_s, "exposed_s": step_s - device_s, "expected_s": expected_s},
        **{"overruns": sum(rank.overruns for rank in steps), "too_many_overruns": too_many_overruns(steps)},
    }


def measure_devices(*, tell: Tell = untold) -> list[dict[str, Any]]:
    """One row for each of `CELLS`."""
    rows = []
    for i, cell in enumerate(CELLS):
        tell(
            f"device of {cell.device_ms:g} ms, {cell.buckets} buckets, {cell.rate_mbit_s or 'any'} Mbit/s",
            i / len(CELLS),
        )
        rows.append(measure(cell))
    return rows


def device_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line for each cell. `off`: of the step's time without a link's limit, of the exposed time with one."""
    heads = ["device, ms", "buckets", "link, Mbit/s", "step, ms", "exposed, ms", "formula", "off", "overruns"]
    lines = []
    for row in rows:
        error = row["exposed_s"] - row["expected_s"]
        off = error / (row["expected_s"] or row["device_s"])
        times = [f"{1e3 * row[name]:.1f}" for name in ("step_s", "exposed_s", "expected_s")]
        overran = f"{row['overruns']}{' (too many)' if row['too_many_overruns'] else ''}"
        rate = "-" if row["rate_mbit_s"] is None else f"{row['rate_mbit_s']:g}"
        lines.append([f"{1e3 * row['device_s']:.0f}", str(row["buckets"]), rate, *times, f"{off:+.1%}", overran])
    return Table(heads, lines)

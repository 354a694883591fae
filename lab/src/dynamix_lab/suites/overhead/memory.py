"""Peak memory of a job's ranks over plain DDP, by how they synchronise.

(DDP reads the annotations of a hook as objects, so they are not postponed here.)
"""

import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from dynamix.events.records import EventLog
from dynamix.runtime.controller import Controller
from dynamix_lab.harness.processes import in_processes
from dynamix_lab.report import Table, number
from dynamix_lab.suites.overhead.ranks import PLAIN, RANKS, Repeated, join_ranks, network
from dynamix_lab.tasks import as_is

BATCH, WIDTH = 16, 3072  # few samples and many parameters, because copies of these are measured
STEPS, INTERVAL = 25, 5
APART = "auto, while they step apart"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "gradients": {},
    "parameters": {"meet": "parameters", "micro_batch": BATCH // 2},
    "auto, while gradients meet": {"meet": "auto"},
    APART: {"meet": "auto"},
}


def peak_bytes(rank: int, store: str, way: str, device: str = "cpu", width: int = WIDTH) -> tuple[int, int]:
    """This rank's peak memory after some steps of a model synchronised in that way, and the size of its parameters.

    On a CPU it is the process's, on another device what torch has allocated. A collective call in `RANKS` processes.

    store   path of a file that does not exist yet, for the rendezvous of the ranks
    """
    join_ranks(rank, store)
    try:
        net, loader = network(width).to(device), DataLoader(Repeated(2**16), batch_size=BATCH, collate_fn=as_is)
        optimizer, controller = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9), None
        model = DDP(net)
        if way != PLAIN:
            replay = _replayed(Path(f"{store}-{rank}.jsonl"), apart=way == APART) if way.startswith("auto") else None
            controller = Controller("static", BATCH, interval=INTERVAL, replay=replay, **WAYS[way])
            loader, model = controller.loader(loader), controller.wrap(model, optimizer)
        _train(model, optimizer, loader, controller, device)
        if controller is not None:
            controller.close()
        on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        dist.barrier()  # no rank may close what the other still uses
        peak = on_host if device == "cpu" else torch.cuda.max_memory_allocated(device)
        return peak, sum(p.numel() * p.element_size() for p in net.parameters())
    finally:
        dist.destroy_process_group()


def _train(model: Any, optimizer: Any, loader: Any, controller: Controller | None, device: str) -> None:
    for step, batch in enumerate(loader, 1):
        inputs, targets = (part.to(device) for part in batch)
        F.cross_entropy(model(inputs), targets).backward()
        if controller is None or controller.optimizer_due:
            optimizer.step()
            optimizer.zero_grad()
        if controller is not None:
            controller.step()
        if step == STEPS if controller is None else controller.checkpoint_due(every=STEPS):
            break


def _replayed(path: Path, *, apart: bool) -> Path:
    """The events of an earlier run in which nothing changed, or ranks took local steps (`apart`) after one window."""
    new = {"decision": "new", "allocation": [4 * BATCH] * RANKS, "from_step": 2 * INTERVAL, "piece": BATCH}
    told = new if apart else {"decision": "keep", "allocation": [BATCH] * RANKS, "from_step": 0}
    with EventLog(path) as events:
        events.write(window_index=0, noise=None, signal=None, **told)
    return path


def memory(width: int = WIDTH, launches: int = 3) -> dict[str, dict[str, dict[str, float]]]:
    """By device and way: megabytes of a rank over plain DDP, and the same in copies of the parameters.

    The minimum over some launches, because the placement of memory adds to a peak.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        each = {way: [_launched(way, device, width) for _ in range(launches)] for way in WAYS}
        least = {way: min(peak for peak, _ in of) for way, of in each.items()}
        over = {way: peak - least[PLAIN] for way, peak in least.items()}
        found[device] = {
            way: {
                "peak_mb": round(least[way] / 1e6, 1),
                "over_mb": round(over[way] / 1e6, 1),
                "copies": round(over[way] / of[0][1], 2),
            }
            for way, of in each.items()
        }
    return found


def _launched(way: str, device: str, width: int) -> tuple[float, int]:
    """`peak_bytes` of a launch, mean over its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        given = {rank: (rank, f"{folder}/store", way, device, width) for rank in range(RANKS)}
        told = dict(in_processes(peak_bytes, given, RANKS))
    return sum(peak for peak, _ in told.values()) / RANKS, told[0][1]


def memory_table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    """A row per device and way: megabytes over plain DDP, and the same in copies of the parameters."""
    rows = [
        [device, way, number(of["peak_mb"], 1), number(of["over_mb"], 1), number(of["copies"], 2)]
        for device, ways in found.items()
        for way, of in ways.items()
    ]
    return Table(["device", "ranks meet over", "peak, MB", "MB over ddp", "copies of the parameters"], rows)

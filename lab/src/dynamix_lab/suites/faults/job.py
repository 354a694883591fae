"""A rank of `dynamix bench faults`: trains, saves every few steps, resumes from the newest complete save, and logs what
it did with every sample.

Started as `python -m dynamix_lab.suites.faults.job FOLDER`; the folder's job.json has the `FaultsJob`. Every rank
appends to log/RUN-RANK.jsonl a first line {"from": step} and a line for each optimizer step.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import sys
import time
import zlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix_lab.emulator import control

FEATURES, CLASSES = 32, 10
STOPPED = "stopped"  # printed by a rank that stopped as requested


@dataclass(frozen=True, slots=True)
class FaultsJob:
    """The job that is trained.

    width     of the two hidden layers
    raises    (step, rank): where a ValueError is raised in the loop, in the first run
    jumps     (step, rank, seconds): where the wall clock jumps, in the first run
    """

    seed: int = 0
    samples: int = 2400
    epochs: int = 2
    batch_size: int = 16
    width: int = 48
    rate: float = 0.05
    timeout_s: float = 20.0
    save_every: int = 10
    raises: tuple[int, int] | None = None
    jumps: tuple[int, int, float] | None = None


def network(job: FaultsJob) -> nn.Module:
    """The same on every rank and in the replay: float64, without layers that mix samples."""
    torch.manual_seed(job.seed)
    widths = (FEATURES, job.width, job.width, CLASSES)
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).double()


def optimizer_of(job: FaultsJob, net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=job.rate, momentum=0.9)


def data(job: FaultsJob, *, held_out: bool = False) -> TensorDataset:
    """(x, y, index): a teacher's classes, a tenth of them wrong. The task is the same for every seed."""
    generator = torch.Generator().manual_seed(1 + held_out)
    x = torch.randn(job.samples, FEATURES, generator=generator, dtype=torch.float64)
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (x @ teacher).argmax(1)
    wrong = torch.rand(len(y), generator=generator) < 0.1
    y[wrong] = torch.randint(0, CLASSES, (int(wrong.sum()),), generator=generator)
    return TensorDataset(x, y, torch.arange(job.samples))


def traces_of(net: nn.Module) -> tuple[int, list[float]]:
    """Values that distinguish parameters: a checksum of all bits, and two projections."""
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    waves = torch.arange(len(flat), dtype=torch.float64)
    return zlib.crc32(flat.numpy().tobytes()), [float(flat @ torch.cos(waves)), float(flat @ torch.sin(0.1 * waves))]


@torch.no_grad()
def held_out_loss(job: FaultsJob, net: nn.Module) -> float:
    x, y, _ = data(job, held_out=True).tensors
    return float(F.cross_entropy(net(x), y))


class Saves:
    """Saves of all ranks in one folder that all can read, a file per rank. The last three are kept."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self.failed = 0

    def write(self, step: int, state: dict[str, Any]) -> None:
        """Write a save. If it fails, it leaves no files, and training continues."""
        path = self._path(step, self.rank)
        unfinished = path.with_suffix(".unfinished")
        try:
            self.folder.mkdir(exist_ok=True)
            torch.save(state, unfinished)
            unfinished.replace(path)
        except (OSError, RuntimeError) as error:
            unfinished.unlink(missing_ok=True)
            self.failed += 1
            logging.warning("save of step %d failed: %s", step, str(error).splitlines()[0])
            return
        for old in self._steps(self.rank)[:-3]:
            self._path(old, self.rank).unlink()

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """The newest save that every rank has finished: (step, this rank's state)."""
        whole = set.intersection(*(set(self._steps(rank)) for rank in range(self.ranks)))
        if not whole:
            return None
        return max(whole), torch.load(self._path(max(whole), self.rank), weights_only=True)

    def _path(self, step: int, rank: int) -> Path:
        return self.folder / f"{step:06d}-{rank}.pt"

    def _steps(self, rank: int) -> list[int]:
        return sorted(int(path.name[:6]) for path in self.folder.glob(f"*-{rank}.pt"))


def train(job: FaultsJob, folder: Path, run: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net, dataset = network(job), data(job)
    optimizer = optimizer_of(job, net)
    controller = dynamix.Controller(
        "dynamix", job.batch_size, global_batch="fixed", interval=5, events=folder / "disk" / "events.jsonl"
    )
    signal.signal(signal.SIGTERM, lambda *_: controller.request_stop())
    sampler = controller.batch_sampler(dataset, seed=job.seed)
    model = controller.wrap(DistributedDataParallel(net, bucket_cap_mb=0.2), optimizer)
    saves = Saves(folder / "disk" / "saves", rank, ranks)
    steps = 0
    if (saved := saves.newest()) is not None:
        steps, state = saved
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        controller.load_state_dict(state["controller"])
    loader = DataLoader(dataset, batch_sampler=sampler)
    with (folder / "log" / f"{run}-{rank}.jsonl").open("w") as log:

        def tell(**line: Any) -> None:
            log.write(json.dumps(line) + "\n")
            log.flush()

        tell(**{"from": steps})
        dist.barrier()
        if rank == 0:
            control.request("start-clock")
        while controller.samples_seen < job.epochs * job.samples and not controller.stopping:
            for x, y, index in loader:
                plan = sampler.plan()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                ids = index.tolist() if plan.counts[rank] else []
                tell(step=steps, ids=ids, sizes=plan.counts.tolist(), traces=traces_of(net))
                controller.step(loss=loss)
                steps += 1
                if steps % job.save_every == 0 or controller.stopping:
                    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                    saves.write(steps, {**state, "controller": controller.state_dict()})
                if controller.stopping:
                    break
                if run == 0:
                    _suffer(job, steps, rank)
        if controller.stopping:
            print(STOPPED, flush=True)
        elif rank == 0:
            tell(loss=held_out_loss(job, net))
        tell(ended=True, failed_saves=saves.failed)
    controller.close()
    dist.destroy_process_group()


def _suffer(job: FaultsJob, step: int, rank: int) -> None:
    if job.raises == (step, rank):
        raise ValueError("injected into the loop")
    if job.jumps is not None and job.jumps[:2] == (step, rank):
        jump, wall = job.jumps[2], time.time
        time.time = lambda: wall() + jump
        time.time_ns = lambda: int(1e9 * (wall() + jump))


def main() -> None:
    folder = Path(sys.argv[1])
    given = json.loads((folder / "job.json").read_text())
    run = given.pop("run")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    job = FaultsJob(**values)
    logging.basicConfig(format="%(created).3f %(message)s", level=logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_s))
    train(job, folder, run)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()

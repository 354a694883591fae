"""A small job for training loops that are right or wrong, and what both kinds must lead to on every rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.errors import DynamixError, UsageError
from dynamix.runtime.ranks import watch
from dynamix.window import Bounds, Window
from tests.ranks import run_ranks
from tests.union import Script

SAMPLES = 96


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )


class Slowly(Script):
    """Takes its time to answer."""

    def __init__(self, answers: list[list[int]], decides_s: float) -> None:
        super().__init__(answers)
        self.decides_s = decides_s

    def decide(self, window: Window, bounds: Bounds) -> Any:
        time.sleep(self.decides_s)
        return super().decide(window, bounds)


@dataclass
class Job:
    """What the loops are made of, over a group of their own: what a wrong one leaves behind must not reach the next."""

    rank: int
    accumulate: int = 1
    micro_batch: int | None = None
    num_workers: int = 0
    buffers: bool = False
    decides_s: float = 0.0  # how long the policy takes
    sharded: bool = False  # by FSDP2, not under DDP

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.group = dist.new_group()
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        if self.buffers:
            self.net.insert(1, nn.BatchNorm1d(5))
        answers = [[3, 5, 4], [5, 3, 4]]
        self.controller = dynamix.Controller(
            Slowly([a[: dist.get_world_size()] for a in answers], self.decides_s),
            4,
            max_batch_size=8,
            interval=2,
            accumulate=self.accumulate,
            micro_batch=self.micro_batch,
            process_group=self.group,
            global_batch="adaptive",
        )
        self.sampler = self.controller.batch_sampler(data())
        self.loader = DataLoader(data(), batch_sampler=self.sampler, num_workers=self.num_workers)
        self.ddp: Any = _sharded(self.net, self.group) if self.sharded else DDP(self.net, process_group=self.group)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.steps = 0

    def wrap(self) -> Any:
        return self.controller.wrap(self.ddp, self.optimizer)

    def batches(self, epochs: int = 1) -> Iterator[Any]:
        """Wraps the model and reads the loader."""
        self.wrap()
        for _ in range(epochs):
            yield from self.loader

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.ddp(x), y)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, **given: Any) -> None:
        self.controller.step(**given)
        self.steps += 1

    def train(self, x: Tensor, y: Tensor) -> None:
        self.loss(x, y).backward()
        self.update()
        self.step()

    def train_in_closure(self, x: Tensor, y: Tensor) -> None:
        """The optimizer makes the passes itself, as L-BFGS does."""

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(x, y)
            loss.backward()
            return loss

        self.optimizer.step(closure)
        self.step()


def _sharded(net: nn.Module, group: Any) -> nn.Module:
    """With a `no_sync` like DDP's, so that loops can be for both."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for part in (net[0], net):
        fully_shard(part, mesh=mesh)

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        net.set_requires_gradient_sync(False)
        yield
        net.set_requires_gradient_sync(True)

    net.__dict__.update(no_sync=no_sync, module=net)
    return net


Loop = Callable[[Job], None]


class Loops:
    """Loops of one subject. What each of a loop's jobs is made with is in its attribute `options`."""

    def __init__(self) -> None:
        self.of_wrong: list[tuple[Loop, str]] = []
        self.of_right: list[Loop] = []

    def wrong(self, says: str, **options: Any) -> Callable[[Loop], Loop]:
        """`says` is part of the line that every rank is told to write."""

        def note(loop: Loop) -> Loop:
            self.of_wrong.append((loop, says))
            return _noted(loop, options)

        return note

    def right(self, loop: Loop) -> Loop:
        return self.right_with()(loop)

    def right_with(self, **options: Any) -> Callable[[Loop], Loop]:
        def note(loop: Loop) -> Loop:
            if loop not in self.of_right:
                self.of_right.append(loop)
            return _noted(loop, options)

        return note

    def check_wrong(self, workers: int) -> None:
        """Every rank raises `UsageError` with the line to write, soon."""
        loops = [loop for loop, _ in self.of_wrong]
        results = run_ranks(_run_wrong, workers, loops, timeout_s=150, group_timeout_s=40)
        for i, (loop, says) in enumerate(self.of_wrong):
            for rank, told in enumerate(results):
                assert told[i].startswith(UsageError.__name__), (loop.__name__, rank, told[i])
                assert says in told[i], (loop.__name__, rank, told[i])
                assert int(told[i].split()[2].rstrip(":")) <= 12, (loop.__name__, rank, told[i])

    def check_right(self, *, sharded: bool = False) -> None:
        """Nobody raises anything."""
        for rank, told in enumerate(run_ranks(run_loops, 2, self.of_right, sharded, timeout_s=150, group_timeout_s=40)):
            for i, loop in enumerate(self.of_right):
                assert told[i].startswith("silent"), (loop.__name__, rank, told[i])


def _noted(loop: Loop, options: dict[str, Any]) -> Loop:
    loop.__dict__.setdefault("options", []).append(options)
    return loop


def run_loops(rank: int, loops: list[Loop], sharded: bool = False) -> list[str]:
    """What became of each of them on this rank; of a loop with several jobs, of the first that is not silent."""
    return [_run(rank, loop, sharded) for loop in loops]


def _run_wrong(rank: int, loops: list[Loop]) -> list[str]:
    # No rank goes on after an error here, and none comes to an agreement late: nobody needs to wait long for that.
    watch.SETUP_ERROR_S = watch.BESIDE_S = 1.5
    return run_loops(rank, loops)


def _run(rank: int, loop: Loop, sharded: bool) -> str:
    said = "never run"
    for options in loop.__dict__.get("options", [{}]):
        job, began = Job(rank, sharded=sharded, **options), time.monotonic()
        try:
            loop(job)
            said = f"silent after {job.steps}"
            job.controller.close()
        except (DynamixError, RuntimeError) as error:
            said = f"{type(error).__name__} after {job.steps}: {error}"
        said += f" [{time.monotonic() - began:.1f} s, {options}]"
        if not said.startswith("silent"):
            break
    return said

"""Loops that do not do what the plan says end on every rank with one message; loops that do stay silent."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.errors import DynamixError, UsageError
from tests.ranks import run_ranks
from tests.union import Script

pytestmark = pytest.mark.multiproc
SAMPLES = 96


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )


@dataclass
class Job:
    """What the loops are made of, over a group of their own: what a wrong one leaves behind must not reach the next."""

    rank: int
    accumulate: int = 1
    num_workers: int = 0
    buffers: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.group = dist.new_group()
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        if self.buffers:
            self.net.insert(1, nn.BatchNorm1d(5))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        answers = [[3, 5, 4], [5, 3, 4]]
        self.controller = dynamix.Controller(
            Script([a[: dist.get_world_size()] for a in answers]),
            4,
            max_batch_size=8,
            interval=2,
            accumulate=self.accumulate,
            process_group=self.group,
        )
        self.sampler = self.controller.batch_sampler(_data())
        self.loader = DataLoader(_data(), batch_sampler=self.sampler, num_workers=self.num_workers)
        self.ddp = DDP(self.net, process_group=self.group)
        self.steps = 0

    def wrap(self) -> Any:
        return self.controller.wrap(self.ddp, self.optimizer)

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


Loop = Callable[[Job], None]
WRONG: dict[str, tuple[Loop, str]] = {}
RIGHT: dict[str, Loop] = {}


def wrong(says: str) -> Callable[[Loop], Loop]:
    """`says` is part of the line that every rank is told to write."""

    def note(loop: Loop) -> Loop:
        WRONG[loop.__name__.strip("_")] = loop, says
        return loop

    return note


def right(loop: Loop) -> Loop:
    RIGHT[loop.__name__.strip("_")] = loop
    return loop


# ------------------------------------------------------------ step() and the batch


@wrong("call controller.step() once for every batch")
def _never_stepped(job: Job) -> None:
    job.wrap()
    for x, y in job.loader:
        job.loss(x, y).backward()
        job.update()


@wrong("call controller.step() once for every batch")
def _stepped_every_second_batch(job: Job) -> None:
    job.wrap()
    for i, (x, y) in enumerate(job.loader):
        job.loss(x, y).backward()
        job.update()
        if i % 2:
            job.step()


@wrong("call controller.step() once for every batch")
def _continue_past_step_on_one_rank(job: Job) -> None:
    job.wrap()
    for i, (x, y) in enumerate(job.loader):
        job.loss(x, y).backward()
        job.update()
        if i == 3 and job.rank == 1:
            continue
        job.step()


@wrong("call controller.step() once for every batch")
def _stepped_twice_with_workers_on_one_rank(job: Job) -> None:
    job.wrap()
    for i, (x, y) in enumerate(job.loader):
        job.train(x, y)
        if i == 2 and job.rank == 0:
            job.controller.step()


_stepped_twice_with_workers_on_one_rank.options = {"num_workers": 2}  # type: ignore[attr-defined]


@wrong("controller.step()")
def _stepped_twice(job: Job) -> None:
    job.wrap()
    for x, y in job.loader:
        job.train(x, y)
        job.controller.step()


@wrong("call controller.step() once for every batch")
def _stepped_before_backward(job: Job) -> None:
    job.wrap()
    for x, y in job.loader:
        loss = job.loss(x, y)
        job.controller.step()
        loss.backward()
        job.update()


_stepped_before_backward.options = {"num_workers": 2}  # type: ignore[attr-defined]


@wrong("call controller.step() once for every batch")
def _last_batch_never_stepped(job: Job) -> None:
    job.wrap()
    for _ in range(2):
        batches = len(job.loader)
        for i, (x, y) in enumerate(job.loader):
            job.loss(x, y).backward()
            job.update()
            if i < batches - 1 and not job.sampler.plan().last:
                job.step()


@wrong("call controller.step() for a batch that is passed over")
def _dropped_on_one_rank(job: Job) -> None:
    job.wrap()
    batches = iter(job.loader)
    for i, (x, y) in enumerate(batches):
        job.train(*(next(batches) if i == 2 and job.rank == 1 else (x, y)))


_dropped_on_one_rank.options = {"num_workers": 1}  # type: ignore[attr-defined]


@wrong("call controller.step() for a batch that is passed over")
def _every_second_batch(job: Job) -> None:
    job.wrap()
    for i, (x, y) in enumerate(job.loader):
        if i % 2:
            job.train(x, y)


@wrong("in_order=False")
def _out_of_order(job: Job) -> None:
    job.wrap()
    for x, y in DataLoader(_data(), batch_sampler=job.sampler, num_workers=2, in_order=False):
        job.train(x, y)


@wrong("DataLoader(dataset, batch_sampler=sampler")
def _sampler_beside_batch_size(job: Job) -> None:
    job.wrap()
    for x, y in DataLoader(_data(), sampler=job.sampler, batch_size=4):
        job.train(x, y)


# ------------------------------------------------------------ backward passes


@wrong("Controller(accumulate=A)")
def _accumulated_under_no_sync_undeclared(job: Job) -> None:
    job.wrap()
    for i, (x, y) in enumerate(job.loader):
        with contextlib.nullcontext() if i % 2 else job.ddp.no_sync():
            job.loss(x, y).backward()
        if i % 2:
            job.update()
        job.step()


@wrong("Controller(accumulate=A)")
def _accumulated_undeclared(job: Job) -> None:
    job.wrap()
    for i, (x, y) in enumerate(job.loader):
        job.loss(x, y).backward()
        if i % 2:
            job.update()
        job.step()


@wrong("Controller(accumulate=A)")
def _accumulated_undeclared_and_unstepped(job: Job) -> None:
    job.wrap()
    for i, (x, y) in enumerate(job.loader):
        with contextlib.nullcontext() if i % 2 else job.ddp.no_sync():
            job.loss(x, y).backward()
        if i % 2:
            job.update()
            job.step()


@wrong("Leave no_sync() out")
def _never_synchronised(job: Job) -> None:
    job.wrap()
    for x, y in job.loader:
        with job.ddp.no_sync():
            job.loss(x, y).backward()
        job.update()
        job.step()


@wrong("past the DDP module")
def _past_the_ddp_module_on_one_rank(job: Job) -> None:
    job.wrap()
    for x, y in job.loader:
        if job.rank == 1 and job.steps == 2:
            F.cross_entropy(job.ddp.module(x), y).backward()
            job.update()
            job.step()
        else:
            job.train(x, y)


@wrong("Leave no_sync() out")
def _synchronised_first_and_local_last(job: Job) -> None:
    job.wrap()
    for i, (x, y) in enumerate(job.loader):
        with job.ddp.no_sync() if i % 2 else contextlib.nullcontext():
            job.loss(x, y).backward()
        if i % 2:
            job.update()
        job.step()


_synchronised_first_and_local_last.options = {"accumulate": 2}  # type: ignore[attr-defined]


@wrong("(loss1 + loss2).backward()")
def _two_losses_that_both_synchronise(job: Job) -> None:
    job.wrap()
    for x, y in job.loader:
        job.loss(x, y).backward()
        job.loss(x, y).backward()
        job.update()
        job.step()


@wrong("or a second time")
def _two_losses_of_one_forward(job: Job) -> None:
    job.wrap()
    for x, y in job.loader:
        logits = job.ddp(x)
        F.cross_entropy(logits, y).backward(retain_graph=True)
        logits.square().mean().backward()
        job.update()
        job.step()


@wrong("accumulate=2")
def _optimizer_at_every_batch_of_an_accumulation(job: Job) -> None:
    job.wrap()
    for x, y in job.loader:
        job.train(x, y)


_optimizer_at_every_batch_of_an_accumulation.options = {"accumulate": 2}  # type: ignore[attr-defined]


@wrong("call controller.step() once for every batch")
def _step_once_for_an_accumulation(job: Job) -> None:
    job.wrap()
    for i, (x, y) in enumerate(job.loader):
        with contextlib.nullcontext() if i % 2 else job.ddp.no_sync():
            job.loss(x, y).backward()
        if i % 2:
            job.update()
            job.step()


_step_once_for_an_accumulation.options = {"accumulate": 2}  # type: ignore[attr-defined]


@wrong("Use controller.weight(loss, count=...)")
def _other_count_on_one_rank_with_buffers(job: Job) -> None:
    job.wrap()
    for x, y in job.loader:
        job.loss(x, y).backward()
        job.update()
        job.step(count=len(x) - (job.rank == 1 and job.steps == 2))


_other_count_on_one_rank_with_buffers.options = {"buffers": True}  # type: ignore[attr-defined]


# ------------------------------------------------------------ models, optimizers, groups


@wrong("once for each model")
def _a_list_of_optimizers(job: Job) -> None:
    parts = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (job.net[0], job.net[2])]
    job.controller.wrap(job.ddp, parts)  # type: ignore[arg-type]


@wrong("make the optimizer from model.parameters()")
def _the_optimizer_of_another_model(job: Job) -> None:
    job.controller.wrap(job.ddp, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


@wrong("once for each model")
def _a_second_model_behind_the_optimizer(job: Job) -> None:
    second = DDP(nn.Linear(3, 3), process_group=job.group)
    job.controller.wrap(job.ddp, torch.optim.SGD([*job.net.parameters(), *second.parameters()], lr=0.1))


@wrong("once for each model")
def _a_second_model_with_its_own_optimizer(job: Job) -> None:
    job.wrap()
    second = DDP(nn.Linear(3, 3), process_group=job.group)
    other = torch.optim.SGD(second.parameters(), lr=0.1)
    for x, y in job.loader:
        job.loss(x, y).backward()
        second(torch.ones(len(x), 3)).sum().backward()
        job.update()
        other.step()
        job.step()


@wrong("Controller(process_group=group)")
def _a_foreign_process_group(job: Job) -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    job.controller.wrap(DDP(job.net, process_group=groups[job.rank]), job.optimizer)


# ------------------------------------------------------------ loops that are right


@right
def _plain(job: Job) -> None:
    job.wrap()
    for _ in range(2):
        for x, y in job.loader:
            job.train(x, y)


@right
def _workers(job: Job) -> None:
    _plain(job)


_workers.options = {"num_workers": 2}  # type: ignore[attr-defined]


@right
def _prefetched_in_a_thread(job: Job) -> None:
    job.wrap()
    ready: queue.Queue[Any] = queue.Queue(3)

    def read() -> None:
        for batch in job.loader:
            ready.put(batch)
        ready.put(None)

    for _ in range(2):
        threading.Thread(target=read, daemon=True).start()
        while (batch := ready.get()) is not None:
            time.sleep(0.001 * (job.steps % 3))
            job.train(*batch)


@right
def _one_batch_ahead(job: Job) -> None:
    job.wrap()

    def ahead(batches: Iterator[Any]) -> Iterator[Any]:
        now = next(batches)
        for following in batches:
            yield now
            now = following
        yield now

    for _ in range(2):
        for x, y in ahead(iter(job.loader)):
            job.train(x, y)


@right
def _read_in_chunks(job: Job) -> None:
    job.wrap()
    batches = iter(job.loader)
    while chunk := list(itertools.islice(batches, 3)):
        for x, y in chunk:
            job.train(x, y)


@right
def _continue_after_step(job: Job) -> None:
    job.wrap()
    for i, (x, y) in enumerate(job.loader):
        if i % 3 == 1:
            job.step()
            continue
        job.train(x, y)
        if i % 2:
            continue


@right
def _skipped_backward(job: Job) -> None:
    job.wrap()
    for i, (x, y) in enumerate(job.loader):
        with torch.no_grad():
            bad = i % 3 == 1
        if not bad:
            job.loss(x, y).backward()
            job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=False)
        job.step()


@right
def _evaluation_in_between(job: Job) -> None:
    job.wrap()
    held_out = DataLoader(_data(), batch_size=16)
    for i, (x, y) in enumerate(job.loader):
        job.train(x, y)
        if i % 4 == 0:
            job.ddp.eval()
            with torch.no_grad():
                for vx, vy in held_out:
                    job.loss(vx, vy)
            if job.rank == 0:
                for vx, vy in held_out:
                    F.cross_entropy(job.ddp.module(vx), vy)  # no_grad() forgotten
            job.ddp.train()


@right
def _training_in_eval_mode(job: Job) -> None:
    job.wrap()
    job.ddp.eval()
    for x, y in job.loader:
        job.train(x, y)


@right
def _checkpointed(job: Job) -> None:
    class Net(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.parts, self.reentrant = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), reentrant
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.parts[0](x)
            for part in self.parts[1:]:
                x = checkpoint(part, x, use_reentrant=self.reentrant)
            return self.out(x)

    net = Net(job.rank >= 0 and job.buffers)
    job.ddp = DDP(net, process_group=job.group, bucket_cap_mb=1e-4)
    job.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _plain(job)


@right
def _checkpointed_reentrant(job: Job) -> None:
    _checkpointed(job)


_checkpointed_reentrant.options = {"buffers": True}  # type: ignore[attr-defined]


@right
def _two_losses_summed(job: Job) -> None:
    job.wrap()
    for x, y in job.loader:
        logits = job.ddp(x)
        (F.cross_entropy(logits, y) + logits.square().mean()).backward()
        job.update()
        job.step()


@right
def _two_losses_of_which_the_last_synchronises(job: Job) -> None:
    job.wrap()
    for x, y in job.loader:
        with job.ddp.no_sync():
            job.loss(x, y).backward()
        job.loss(x, y).backward()
        job.update()
        job.step()


def _accumulates(job: Job, *, no_sync: bool) -> None:
    job.wrap()
    for i, (x, y) in enumerate(job.loader):
        last = i % 3 == 2
        with job.ddp.no_sync() if no_sync and not last else contextlib.nullcontext():
            (job.loss(x, y) / 3).backward()
        if last:
            job.update()
        job.step()


@right
def _accumulated(job: Job) -> None:
    _accumulates(job, no_sync=True)


@right
def _accumulated_and_always_synchronised(job: Job) -> None:
    _accumulates(job, no_sync=False)


_accumulated.options = _accumulated_and_always_synchronised.options = {"accumulate": 3}  # type: ignore[attr-defined]


@right
def _scaled(job: Job) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    job.controller.wrap(job.ddp, job.optimizer, scaler=scaler)
    for x, y in job.loader:
        loss = job.loss(x, y) * (float("inf") if job.steps == 4 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad(set_to_none=False)
        job.step()


@right
def _gradients_on_the_side(job: Job) -> None:
    job.wrap()
    for i, (x, y) in enumerate(job.loader):
        job.loss(x, y).backward()
        if i % 2:
            torch.autograd.grad(F.cross_entropy(job.net(x), y), list(job.net.parameters()))
        job.update()
        torch.autograd.grad(F.cross_entropy(job.net(x), y), list(job.net.parameters()))
        job.step()


@right
def _closure(job: Job) -> None:
    job.optimizer = torch.optim.LBFGS(job.net.parameters(), lr=0.01, max_iter=3)
    job.wrap()
    for x, y in job.loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            job.optimizer.zero_grad()
            loss = job.loss(x, y)
            loss.backward()
            return loss

        job.optimizer.step(closure)
        job.step()


@right
def _broken_off_and_begun_again(job: Job) -> None:
    job.wrap()
    for _ in range(5):
        for i, (x, y) in enumerate(job.loader):
            job.train(x, y)
            if i == 2:
                break


_broken_off_and_begun_again.options = {"num_workers": 2}  # type: ignore[attr-defined]


@right
def _peek_on_rank_zero(job: Job) -> None:
    if job.rank == 0:
        x, _ = next(iter(job.loader))
        job.net(x)
    job.ddp = DDP(job.net, process_group=job.group)
    _plain(job)


@right
def _optimizers_for_parts_of_a_model(job: Job) -> None:
    parts = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (job.net[0], job.net[2])]
    for part in parts:
        job.controller.wrap(job.ddp, part)
    for x, y in job.loader:
        job.loss(x, y).backward()
        for part in parts:
            part.step()
            part.zero_grad()
        job.step()


@right
def _generator_and_discriminator(job: Job) -> None:
    generator = DDP(nn.Linear(2, 6), process_group=job.group)
    critic = DDP(nn.Linear(6, 1), process_group=job.group)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (generator, critic))
    job.controller.wrap(generator, ours)
    job.controller.wrap(critic, theirs)
    for x, _ in job.loader:
        fake = generator(torch.randn(len(x), 2))
        theirs.zero_grad()
        both = critic(torch.cat([x, fake.detach()]))
        (both[len(x) :].mean() - both[: len(x)].mean()).backward()
        theirs.step()
        ours.zero_grad()
        with critic.no_sync():
            (-critic(fake).mean()).backward()
        ours.step()
        job.step()


# ------------------------------------------------------------ the tests


def _run(rank: int, names: list[str], kind: str) -> dict[str, str]:
    told = {}
    for name in names:
        loop = WRONG[name][0] if kind == "wrong" else RIGHT[name]
        job, began = Job(rank, **getattr(loop, "options", {})), time.monotonic()
        try:
            loop(job)
            told[name] = f"silent after {job.steps}"
            job.controller.close()
        except (DynamixError, RuntimeError) as error:
            told[name] = f"{type(error).__name__} after {job.steps}: {error}"
        told[name] += f" [{time.monotonic() - began:.1f} s]"
    return told


@pytest.mark.parametrize("workers", [2, 3])
def test_wrong_loops_end_on_every_rank_with_the_line_to_write(workers: int) -> None:
    results = run_ranks(_run, workers, list(WRONG), "wrong", timeout_s=150, group_timeout_s=40)
    for name, (_, says) in WRONG.items():
        for rank, told in enumerate(results):
            assert told[name].startswith(UsageError.__name__), (name, rank, told[name])
            assert says in told[name], (name, rank, told[name])
            assert int(told[name].split()[2].rstrip(":")) <= 12, (name, rank, told[name])


def test_right_loops_stay_silent() -> None:
    for rank, told in enumerate(run_ranks(_run, 2, list(RIGHT), "right", timeout_s=150, group_timeout_s=40)):
        for name in RIGHT:
            assert told[name].startswith("silent"), (name, rank, told[name])

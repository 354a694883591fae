"""A small training under a controller: what tests need before they come to what they are about."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.data.plan import Piece
from dynamix.events.records import read_events
from dynamix.model.auto_sync import AutoSync
from dynamix.model.sync_schedule import Ask, Conditions
from dynamix.runtime.decide import peer_channel
from dynamix.runtime.measure.noise import NoiseScale
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.measure.row import ROW
from dynamix.window import Bounds, Floats, Ints, Window
from tests.union import larger


def classes(samples: int, width: int = 6) -> TensorDataset:
    """Points of three classes, the same ones whenever they are asked for."""
    x = torch.randn(samples, width, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(samples) % 3)


def adaptive(policy: Any, batch_size: int = 8, **options: Any) -> dynamix.Controller:
    """A controller that may change the global batch, if its policy does, after short windows."""
    moves = policy not in ("lb_bsp", "dbs")
    given: dict[str, Any] = {"interval": 2, "global_batch": "adaptive" if moves else "fixed", **options}
    return dynamix.Controller(policy, batch_size, **given)


def apart(policy: Any, batch_size: int, **options: Any) -> dynamix.Controller:
    """A controller whose workers take own steps on pieces of four, and meet over parameters."""
    given: dict[str, Any] = {"min_batch_size": 0, "max_batch_size": 64, "interval": 2, "micro_batch": 4}
    return dynamix.Controller(policy, batch_size, **{**given, "meet": "parameters", **options})


def classifier(width: int = 6) -> nn.Linear:
    """A linear one with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Linear(width, 3)


class Training:
    """A model under a controller, with SGD and a loader of all data, as a user's script has them.

    net       the model; None: a linear classifier of six features
    sampling  options of the sampler
    ddp       options of DistributedDataParallel, which is around a model that is not sharded and whose gradients meet
    wrap      options of `controller.wrap`
    """

    def __init__(
        self,
        controller: dynamix.Controller,
        data: Any,
        net: nn.Module | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        lr: float = 0.1,
        sampling: dict[str, Any] | None = None,
        ddp: dict[str, Any] | None = None,
        num_workers: int = 0,
        **wrap: Any,
    ) -> None:
        self.controller, self.data = controller, data
        self.net: Any = classifier() if net is None else net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=lr) if optimizer is None else optimizer
        self.sampler = controller.batch_sampler(data, **(sampling or {}))
        self.loader = DataLoader(data, batch_sampler=self.sampler, num_workers=num_workers)
        apart = controller.metrics()["steps_apart"] > 0  # from the beginning, so never over gradients
        alone = controller.world_size == 1 or apart or isinstance(net, FSDPModule)
        model = self.net if alone else DDP(self.net, process_group=controller.group, **(ddp or {}))
        self.model: Any = controller.wrap(model, self.optimizer, **wrap)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """One pass; its loss."""
        loss = self.loss(x, y)
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self, **told: Any) -> None:
        """What follows a pass: the optimizer's step if it is due, and the controller's."""
        if self.controller.optimizer_due:
            self.update()
        self.controller.step(**told)

    def train(self, x: Tensor, y: Tensor) -> None:
        """A batch whole; the controller is told the loss."""
        self.finish(loss=self.backward(x, y))

    def train_piece(self, x: Tensor, y: Tensor) -> None:
        with self.controller.piece():
            loss = self.backward(x, y)
        self.finish(loss=loss)

    def batches(self, epochs: int) -> Iterator[Any]:
        """Those of some epochs, each named to the sampler."""
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            yield from self.loader

    def weights(self) -> Tensor:
        """Of a sharded model this rank's."""
        held = (p.to_local() if isinstance(p, DTensor) else p for p in self.net.parameters())
        return torch.cat([p.detach().flatten() for p in held])

    def union_error(self, loss_of: Callable[..., Tensor], seed: int = 0) -> float:
        """How far gradients are from that of `loss_of(net, *batch)` with all that ranks are dealt in this round."""
        plan = self.sampler.plan()
        end = plan.start + int(plan.counts.sum())
        union = self.data[order_of(len(self.data), plan.epoch, seed)[end - plan.round.samples : end]]
        return furthest(self.net, torch.autograd.grad(loss_of(self.net, *union), [*self.net.parameters()]))

    def worst_error(self, loss_of: Callable[..., Tensor], told: Callable[..., Tensor] | None = None) -> float:
        """The largest of all optimizer steps of an epoch; the backward pass is that of `told(loss, *batch)`."""
        worst = 0.0
        for batch in self.loader:
            with self.controller.piece():
                loss = loss_of(self.model, *batch)
                (loss if told is None else told(loss, *batch)).backward()
            if self.controller.optimizer_due:
                worst = larger(worst, self.union_error(loss_of))
            self.finish(loss=loss)
        self.controller.close()
        return worst


def ends_apart(make: Callable[[], Training], stop: Callable[[int, Piece], bool], epochs: int = 2) -> float:
    """How far a job that goes on with what another saved ends from one that trains through.

    stop   told the meetings so far and the piece just trained: whether the job is saved here
    """

    def train(job: Training, first: int = 0, stop: Callable[[int, Piece], bool] = lambda met, piece: False) -> Any:
        meetings, parts = 0, (job.controller, job.net, job.optimizer)
        for epoch in range(first, epochs):
            job.sampler.set_epoch(epoch)
            for *_, x, y in job.loader:
                piece = job.sampler.piece()
                job.train_piece(x, y)
                meetings += job.controller.met
                if job.controller.met and stop(meetings, piece):
                    saved = copy.deepcopy([part.state_dict() for part in parts])
                    job.controller.close()
                    return saved, epoch
        job.controller.close()
        return job.weights()

    straight = train(make())
    saved, epoch = train(make(), stop=stop)
    again = make()
    for part, state in zip((again.controller, again.net, again.optimizer), saved, strict=True):
        part.load_state_dict(state)
    return float((train(again, epoch) - straight).abs().max())


def decided(path: Any) -> list[dict[str, Any]]:
    """The events of windows on which somebody decided: without the last, short one."""
    return [event for event in read_events(path) if not event.get("short")]


def order_of(samples: int, epoch: int = 0, seed: int = 0) -> Tensor:
    """Of samples in an epoch, as samplers shuffle them."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))


def furthest(net: nn.Module, wanted: Any) -> float:
    """The largest difference of any element of a gradient from what it should be."""
    pairs = zip(net.parameters(), wanted, strict=True)
    found = torch.stack([(p.grad - true).abs().max() for p, true in pairs if p.grad is not None])
    assert len(found) == len(list(net.parameters()))
    return larger(0.0, float(found.max()))


def noise_of(own: Tensor, counts: Ints) -> tuple[float, float]:
    """(S, G2) by the whole gradients of all ranks, of so many samples each; `own` is this rank's."""
    union = own * float(counts[dist.get_rank()] / counts.sum())
    dist.all_reduce(union)
    squares = [torch.zeros((), dtype=own.dtype) for _ in counts]
    dist.all_gather(squares, own.square().sum())
    local = np.array([float(square) for square in squares])
    return NoiseScale.estimate(local, float(union.square().sum()), counts.astype(np.float64))


@contextlib.contextmanager
def measured_noise() -> Iterator[list[tuple[float, float]]]:
    """(S, G2) of every estimate that jobs of this process make meanwhile, before it is smoothed."""
    found: list[tuple[float, float]] = []
    update = NoiseScale.update

    def noted(scale: NoiseScale, noise: float, signal: float) -> None:
        found.append((noise, signal))
        update(scale, noise, signal)

    with mock.patch.object(NoiseScale, "update", noted):
        yield found


@contextlib.contextmanager
def recorded_times(sample_s: float, exchange_s: float = 1e-5) -> Iterator[None]:
    """Let windows of this rank say meanwhile that each sample takes so long, and each exchange with all waiting."""
    row = Recorder.row

    def told(recorder: Recorder, **given: Any) -> Floats:
        found = row(recorder, **given).copy()
        computing_s = sample_s * found[ROW.index("count")]
        for name, value in {"compute": computing_s, "compute_std": 0.03 * computing_s, "data": 0.0}.items():
            found[ROW.index(name)] = value
        found[len(ROW) :] = exchange_s
        return found

    with mock.patch.object(Recorder, "row", told):
        yield


# ---------------------------------------------------------------- in a rank's process, whose jobs they are for


def wait_for_decisions() -> None:
    """Let none be late, however busy the machine is."""
    peer_channel.PATIENCE_S = 20.0


def in_turns() -> None:
    """Where both ways are open, let workers meet otherwise after every window; apart they take 3 steps in the mean."""

    def decide(ways: AutoSync, ask: Ask, window: Window, bounds: Bounds, now: Conditions) -> tuple[Ints, int]:
        sizes = ask(ways.as_step(window, now.piece), bounds)
        after = ways._piece(int(sizes.sum()), bounds, 0)
        return (sizes, 0) if now.piece else (ways._shares(sizes, after, 3 * after * len(sizes)), after)

    AutoSync.decide = decide  # type: ignore[method-assign]

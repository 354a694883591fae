"""Gradients that do not meet those of other ranks: they are finished here, and tell the noise scale in pairs."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from dynamix.data import Allocations, BatchSampler, Stream
from dynamix.runtime.check.loop import LoopCheck
from dynamix.runtime.measure.noise import ConsecutiveNoise
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.sync.connected_model import ConnectedModel
from dynamix.runtime.sync.loss_weight import LossWeight


class Trains(Protocol):
    """What of a `TrainingJob` its gradients concern."""

    accumulate: int
    allocations: Allocations
    attached: ConnectedModel | None
    loop: LoopCheck
    loss_weight: LossWeight
    recorder: Recorder
    source: BatchSampler | Stream | None


class SingleWorkerSync:
    """Of one rank of the job `of`, which is its only one or steps apart from the others.

    every   one pair in so many steps is compared; 0: gradients meet, and nothing is done here
    """

    def __init__(self, of: Trains, *, every: int) -> None:
        self.of = of
        self._pairs = ConsecutiveNoise(every) if every else None

    def watch(self, optimizer: Optimizer) -> None:
        """See to gradients before `optimizer`, the first one, applies them."""
        if self._pairs is not None:
            optimizer.register_step_pre_hook(self._before_optimizer)

    def finish(self, attached: ConnectedModel, *, more: bool = False) -> None:
        """A single worker's gradients of this round are there, to be clipped or applied; `more`: not all of them."""
        of, piece = self.of, self.of.loop.piece_of_pass()
        if self._pairs is not None and piece is not None and of.loss_weight.in_gradient(piece) is None:
            (attached.reopen if more else attached.finish)(piece, of.accumulate)

    def observe_pair(self, parameters: list[nn.Parameter], samples: int) -> None:
        """A single worker's noise scale, from its gradients of so many samples in two steps that follow each other."""
        gradients = [None if p.grad is None or p.grad.is_sparse else p.grad for p in parameters]
        if self._pairs is None or all(g is None for g in gradients):  # a closure makes them inside the step
            return
        if pair := self._pairs.observe(gradients, float(samples)):
            self.of.recorder.add("pair_noise", pair[0])
            self.of.recorder.add("pair_signal", pair[1])

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        of = self.of
        if of.attached is not None and of.source is not None and of.source.issued > of.source.consumed:
            piece = of.source.piece()
            if of.allocations.workers > 1 and not piece.plan.apart:
                return  # gradients have met, and were measured, in DDP's hook
            of.recorder.gradients_ready()
            of.recorder.reduced()
            self.finish(of.attached)
            own = piece.samples if piece.plan.apart else piece.plan.samples
            if own:
                self.observe_pair([p for g in optimizer.param_groups for p in g["params"]], own)

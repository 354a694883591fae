"""Gradients of a worker that exchanges none: they are finished here, and tell the noise scale in pairs of steps."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from dynamix.data import BatchSampler, Piece, Stream
from dynamix.runtime.measure.noise import ConsecutiveNoise
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.sync.connected_model import ConnectedModel
from dynamix.runtime.sync.loss_weight import LossWeight


class SingleWorkerSync:
    """Of a job's only rank, or of one that steps apart from the others.

    every   one pair in so many steps is compared; 0: gradients meet, and nothing is done here
    """

    def __init__(self, recorder: Recorder, loss_weight: LossWeight, *, every: int) -> None:
        self.recorder, self.loss_weight = recorder, loss_weight
        self.source: BatchSampler | Stream | None = None
        self._pairs = ConsecutiveNoise(every) if every else None

    def feed(self, source: BatchSampler | Stream) -> None:
        """Batches come from `source`."""
        self.source = source

    def watch(self, model: ConnectedModel, optimizer: Optimizer, *, first: bool) -> None:
        """See to the gradients of `model` before `optimizer` applies them; of the `first` one they are measured."""
        if first and self._pairs is not None:
            optimizer.register_step_pre_hook(lambda *of: self._before_optimizer(model, optimizer))
        elif not first and model.averaging is None:
            optimizer.register_step_pre_hook(lambda *of: self.finish(model, self._piece()))

    def _piece(self) -> Piece | None:
        return None if self.source is None else self.source.current

    def finish(self, model: ConnectedModel, piece: Piece | None, *, more: bool = False) -> None:
        """A single worker's gradients of this round are there, to be clipped or applied; `more`: not all of them."""
        if self._pairs is not None and piece is not None and self.loss_weight.in_gradient(piece) is None:
            model.finish(piece, self.loss_weight.accumulate, more=more)

    def observe_pair(self, parameters: list[nn.Parameter], samples: int) -> None:
        """A single worker's noise scale, from its gradients of so many samples in two steps that follow each other."""
        gradients = [None if p.grad is None or p.grad.is_sparse else p.grad for p in parameters]
        if self._pairs is None or all(g is None for g in gradients):  # a closure makes them inside the step
            return
        if pair := self._pairs.observe(gradients, float(samples)):
            self.recorder.add("pair_noise", pair[0])
            self.recorder.add("pair_signal", pair[1])

    def _before_optimizer(self, model: ConnectedModel, optimizer: Optimizer) -> None:
        piece: Any = self._piece()
        if piece is None or (self.loss_weight.workers > 1 and not piece.round.apart):
            return  # gradients have met, and were measured, in DDP's hook
        if not self.recorder.muted:
            self.recorder.timer.gradients_ready()
            self.recorder.timer.reduced()
        self.finish(model, piece)
        if own := piece.samples if piece.round.apart else piece.round.samples:
            self.observe_pair([p for g in optimizer.param_groups for p in g["params"]], own)

"""A job with one worker, which exchanges nothing: scales its accumulated gradients to those of the whole round."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dynamix.data import Piece
from dynamix.runtime.sync.gradients import Around, scale_
from dynamix.runtime.sync.shards import is_fully_sharded
from dynamix.runtime.sync.sync import Sync


class SingleWorker(Sync):
    """A model of a job with one worker, not under DDP.

    Pieces of unequal sizes accumulate with the last piece's weight. At the end of its backward pass the sum is scaled
    to the round's mean, so that the loop clips the gradients that the optimizer applies.
    """

    def __init__(self, model: nn.Module, around: Around) -> None:
        super().__init__(model, around.recorder)
        self._weights = around.weights
        self._piece: Piece | None = None  # of the current passes
        self._finished: Piece | None = None  # the piece whose gradients are scaled already
        self._ends = False  # a backward pass runs, and gradients will be scaled at its end
        self._cuts = around.in_pieces or around.weights.accumulate > 1
        self._beside: list[nn.Parameter] = []  # its optimizers' parameters outside the model
        self._hooks: dict[Any, Any] = {}

    def add_optimizer(self, optimizer: Optimizer) -> None:
        known = {id(p) for p in (*self.model.parameters(), *self._beside)}
        self._beside += [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]

    def _watch(self) -> None:
        """Hook all parameters that are trained now, because a loop may have unfrozen some."""
        alive = weakref.ref(self)  # weak: garbage collection does not see references in C++

        def begins(gradient: Tensor) -> None:
            if (sync := alive()) is not None and not sync._ends:
                sync._backward_begins()

        def passed(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(begins)

        # Under FSDP parameters' hooks are not called, and FSDP's own hook of outputs comes first.
        if is_fully_sharded(self.model) and self.model not in self._hooks:
            self._hooks[self.model] = self.model.register_forward_hook(passed)
        for parameter in (*self.model.parameters(), *self._beside):
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_hook(begins)

    def own_gradients(self) -> list[Tensor]:
        beside = (p.grad for p in self._beside if p.grad is not None)
        return [*super().own_gradients(), *({id(g): g for g in beside}.values())]

    def pass_begins(self, piece: Piece, kept: bool) -> None:
        self._piece = piece
        if self._cuts and piece.last and torch._C._current_graph_task_id() == -1:
            self._ends = False  # the previous backward pass may have been aborted
            self._watch()

    def _backward_begins(self) -> None:
        """A backward pass has its first gradient, which is not yet accumulated."""
        if self._piece is not None and self._piece.last and not self.recorder.muted:
            self._ends = True
            self._finish(more=True)
            cast(Any, Variable._execution_engine).queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._ends = False
        self._finish()

    @contextmanager
    def piece(self, piece: Piece) -> Iterator[None]:
        """For passes that bypass the model's own call."""
        self._piece = piece
        self._finish(more=True)
        yield
        self._finish()

    def before_optimizer(self, piece: Piece | None) -> None:
        self._piece = piece
        self._finish()

    def _finish(self, *, more: bool = False) -> None:
        """Scale gradients to the round's weight, once for its last piece. `more`: undo it, as more will accumulate."""
        piece, finished = self._piece, self._finished is self._piece
        if piece is None or not (piece.last and piece.samples) or self._weights.in_gradient(piece) is not None:
            return
        self._finished = None if more else piece
        own, whole = self._weights.accumulate * piece.samples, piece.share
        if finished == more:
            scale_(self.own_gradients() if own != whole else (), whole / own if more else own / whole)

    def close(self) -> list[dist.ProcessGroup]:
        for hook in self._hooks.values():
            hook.remove()
        return []

"""One worker, which exchanges nothing: its gradients become those of the whole round here."""

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

    Pieces of unlike sizes accumulate in the weight of the last. The excess over the round's mean is taken away at the
    end of the last piece's backward pass, so that the loop clips what the optimizer applies.
    """

    def __init__(self, model: nn.Module, around: Around) -> None:
        super().__init__(model, around.recorder)
        self._weights = around.weights
        self._piece: Piece | None = None  # of the passes under way
        self._finished: Piece | None = None  # whose gradients are as the optimizer is to have them
        self._ends = False  # a backward pass is under way, at whose end they will be
        self._cuts = around.in_pieces or around.weights.accumulate > 1
        self._beside: list[nn.Parameter] = []  # of its optimizers, and not in the model
        self._hooks: dict[Any, Any] = {}

    def add_optimizer(self, optimizer: Optimizer) -> None:
        known = {id(p) for p in (*self.model.parameters(), *self._beside)}
        self._beside += [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]

    def _watch(self) -> None:
        """Hear of the gradients of all that is trained by now: a loop may have thawed some of it."""
        alive = weakref.ref(self)  # what torch holds in C++ no collector of garbage sees

        def begins(gradient: Tensor) -> None:
            if (sync := alive()) is not None and not sync._ends:
                sync._backward_begins()

        def passed(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(begins)

        # Under FSDP no parameter's hook is called; FSDP's own hook of outputs comes first.
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
            self._ends = False  # a backward pass before it may have been broken off
            self._watch()

    def _backward_begins(self) -> None:
        """The first gradient of a backward pass is known, and not yet added to others."""
        if self._piece is not None and self._piece.last and not self.recorder.muted:
            self._ends = True
            self._finish(more=True)
            cast(Any, Variable._execution_engine).queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._ends = False
        self._finish()

    @contextmanager
    def piece(self, piece: Piece) -> Iterator[None]:
        """Passes need not go through the model's own call."""
        self._piece = piece
        self._finish(more=True)
        yield
        self._finish()

    def before_optimizer(self, piece: Piece | None) -> None:
        self._piece = piece
        self._finish()

    def _finish(self, *, more: bool = False) -> None:
        """Bring the gradients to the round's weight, once for its last piece; `more` will be added: take it back."""
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

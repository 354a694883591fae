"""Base class for how workers synchronise one model; `wrap` chooses the class once, by the model and the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.data import Piece
from dynamix.errors import ConfigError, UsageError, spelling
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.part import Part
from dynamix.runtime.sync.gradients import scale_
from dynamix.runtime.sync.parameter_averaging import Averaging, ParameterAveraging
from dynamix.runtime.sync.shards import gradients_of

LOSS_SIDE = "pass wrap(..., weighting='loss') and call controller.weight(loss).backward() in the loop"


class Sync(Part):
    """Its passes do not communicate, or need no weights from a hook. `averagings` average at the end of a round.

    exchanges   what is exchanged, and how, equal on all ranks; `settings`: details by name, plain values
    owners      objects made for it: parts with their own state and process groups, including `averagings`
    alike       its parameters must be equal on all ranks after every optimizer step
    settled     training passes need no check before they begin
    comes_first   its forward hook must run before all others
    crossed     synchronised backward passes so far
    """

    settled = True
    comes_first = False
    crossed = 0

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        *owners: Any,
        exchanges: str = "none",
        settings: dict[str, Any] | None = None,
        alike: bool = False,
    ) -> None:
        self.model, self.recorder, self.owners = model, recorder, owners
        self.averagings = [owner for owner in owners if isinstance(owner, ParameterAveraging)]
        self.exchanges, self.settings, self.alike = exchanges, settings or {}, alike

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer of the model. Raises `UsageError` for one that this kind of synchronisation cannot serve."""
        for averaging in self.averagings:
            averaging.add_optimizer(optimizer)

    def before_forward(self, piece: Piece) -> None:
        """A forward pass of training begins. Raises `UsageError` if torch would later fail without a clear reason."""

    def before_optimizer(self, piece: Piece | None) -> None:
        """One of the optimizers is about to step."""
        for averaging in self.averagings:
            averaging.before_step(piece)

    def piece(self, piece: Piece) -> AbstractContextManager[None]:
        """Around the passes of `piece`: gradients stay local unless it is the last of its round."""
        return nullcontext()

    @torch.no_grad()
    def make_ready(self, piece: Piece, applied: float | Tensor | None) -> None:
        """After a batch that is not the last of its round: scale accumulated gradients to the next batch's weight.

        applied   the weight in the loss, if it was weighted there

        Raises `UsageError` if reduced gradients cannot be distinguished from local ones.
        """
        now, following = piece.samples, piece.following
        if applied is None and following and now != following:
            scale_(self.own_gradients(), now / following)

    def own_gradients(self) -> list[Tensor]:
        """The gradients that only this rank has accumulated."""
        return gradients_of(self.model)

    @contextmanager
    def discarded(self) -> Iterator[None]:
        """Passes inside are undone: buffers and gradients are restored, and nothing is measured."""
        buffers = [b.detach().clone() for b in self.model.buffers()]
        gradients = [None if p.grad is None else p.grad.detach().clone() for p in self.model.parameters()]
        with self.recorder.mute():
            try:
                yield
            finally:
                with torch.no_grad():
                    for buffer, kept in zip(self.model.buffers(), buffers, strict=True):
                        buffer.copy_(kept)
                    for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                        parameter.grad = gradient
                self.passes_discarded()

    def passes_discarded(self) -> None:
        """Called after discarded passes. A collective call."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Passes inside do not communicate."""
        yield

    def close(self) -> list[dist.ProcessGroup]:
        """Release the groups for gradients and parameters, and return them."""
        return [group for owner in self.owners for group in owner.close()]

    @property
    def whose(self) -> str:
        """The class of the user's object that holds most of the state; errors in loading name it."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        return {name: value for owner in self.owners for name, value in owner.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for owner in self.owners if state else ():
            owner.load_state_dict(state)


@dataclass(frozen=True)
class Options:
    """The options of `Controller.wrap`, checked as far as possible without a model. Raises `ConfigError`."""

    hook: Callable[[Any, Any], Any] | None
    hook_state: Any
    scaler: Any
    weighting: Literal["hook", "loss", "given"]
    batchnorm: Literal["rank0", "weighted"]
    averaging: Averaging | None

    def __post_init__(self) -> None:
        for name, allowed in (("weighting", ("hook", "loss", "given")), ("batchnorm", ("rank0", "weighted"))):
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(name, value, " or ".join(allowed), spelling(value, allowed))

    def require_no_hook(self) -> None:
        """Raise `UsageError` if a communication hook was given, but nothing would run it."""
        if self.hook is not None:
            raise UsageError("wrap(hook=...) needs a DistributedDataParallel model, which is what runs the hook")

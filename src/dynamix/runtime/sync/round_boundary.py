"""When workers that step apart meet, and what becomes of their models and optimizers then."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any, Protocol

from torch.optim import Optimizer

from dynamix.data import Allocations, BatchSampler, Piece, Stream
from dynamix.errors import DynamixError, UsageError
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.sync.connected_model import ConnectedModel

_WHERE = "call it at a meeting: `if controller.checkpoint_due(every=N):`, or at any of them, `if controller.met:`"


class StepsApart(Protocol):
    """What of a `TrainingJob` meetings concern."""

    steps_apart: bool
    rank: int
    allocations: Allocations
    connected: list[ConnectedModel]
    ranks: Ranks
    recorder: Recorder
    source: BatchSampler | Stream | None

    def fail(self, error: DynamixError) -> DynamixError: ...


class RoundBoundary:
    """Of one rank of the job `of`, which steps apart from the others in rounds whose plan says so.

    between   this rank has stepped apart since the last meeting
    """

    def __init__(self, of: StepsApart) -> None:
        self.of, self.between = of, False

    def passed(self, piece: Piece) -> None:
        """A piece is over. If a round apart ends with it, a collective call: the workers' models become one."""
        self.between = piece.plan.apart
        if piece.last and piece.plan.apart:
            self._average(piece.share / piece.plan.samples)

    def before_step(self, attached: ConnectedModel) -> None:
        """An optimizer of a model that meets in both ways is about to step."""
        meeting, source = attached.meeting, self.of.source
        if meeting is None or source is None or source.issued <= source.consumed:
            return
        if source.plan().apart:
            meeting.begin()
        else:
            with self.of.ranks.naming("the ranks could not average the state of their optimizers"):
                meeting.together()

    @functools.cached_property
    def payload(self) -> float:
        """Bytes that a meeting moves over those of a gradient, by what optimizers remember when it is first asked."""
        every = [attached.meeting.payload for attached in self.of.connected if attached.meeting is not None]
        return max(every, default=1.0)

    def _average(self, weight: float) -> None:
        """`weight` is this rank's."""
        of = self.of
        of.recorder.gradients_ready()
        for attached in of.connected:
            if attached.meeting is not None:
                with of.ranks.naming("the ranks could not average their models"):
                    attached.meeting.meet(weight)
        of.recorder.reduced()
        self.between = False

    def facts(self) -> dict[str, Any]:
        """What every rank must hold alike of how models are averaged, by name."""
        every = [attached.meeting.facts() for attached in self.of.connected if attached.meeting is not None]
        return {f"averaging: {name}": [facts[name] for facts in every] for name in (every[0] if every else ())}

    def require(self, what: str) -> None:
        """Raise `UsageError`, on all ranks, between two meetings."""
        if self.between:
            raise self.of.fail(UsageError(f"{what}, and the workers' models differ between two meetings: {_WHERE}"))

    def require_no(self, what: str) -> None:
        """Raise `UsageError` where workers step apart, and so weigh nothing in their own passes."""
        if self.of.steps_apart:
            why = "with meet='parameters' a worker's loss is the mean over its own samples, and moves are weighted"
            raise UsageError(f"{what}: {why}. Call loss.backward()")

    def warn_between(self) -> None:
        """The loop has ended: say so if models differ."""
        if self.between and sys.exc_info()[0] is None:
            left = "the loop was left between two meetings, so the workers' models differ"
            fix = "leave it where controller.met is true; at a limit of steps, where controller.checkpoint_due(every=N)"
            warnings.warn(f"{left}: {fix}", RuntimeWarning, stacklevel=3)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """`Controller.optimizer_state`."""
        if not self.of.steps_apart:
            fix = "save optimizer.state_dict(), which all ranks have alike"
            raise UsageError(f"optimizer_state() is for Controller(meet='parameters'): {fix}")
        self.require("optimizer_state() is the mean over workers")
        for attached in self.of.connected:
            if attached.meeting is not None and any(optimizer is own for own in attached.meeting.optimizers):
                with self.of.ranks.naming("the ranks could not average the state of an optimizer"):
                    return attached.meeting.optimizer_state(optimizer)
        raise UsageError("optimizer_state() got an optimizer that controller.wrap(model, optimizer) was not given")

"""When workers that step apart meet, and what becomes of their models and optimizers then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from torch.optim import Optimizer

from dynamix.data import Piece
from dynamix.errors import DynamixError, UsageError
from dynamix.runtime.liveness import failed_collective
from dynamix.runtime.observation import Recorder
from dynamix.runtime.weighting import Attached

_WHERE = "call it where the last piece of a round was stepped: `if controller.met:`"


class StepsApart(Protocol):
    """What of a `Coordinator` meetings concern."""

    apart: bool
    connected: list[Attached]
    recorder: Recorder

    def fail(self, error: DynamixError) -> DynamixError: ...


class Meetings:
    """Of one rank of the job `of`, which steps apart from the others where `of.apart`.

    between   this rank has stepped apart since the last meeting
    """

    def __init__(self, of: StepsApart) -> None:
        self.of, self.between = of, False

    def stepped(self, piece: Piece) -> None:
        """A piece is over."""
        self.between = self.of.apart
        for attached in self.of.connected:
            if attached.meeting is not None and piece.samples:
                attached.meeting.steps += 1

    def meet(self, piece: Piece) -> None:
        """A collective call after a round's last piece: models become one."""
        of = self.of
        of.recorder.gradients_ready()
        for attached in of.connected:
            if attached.meeting is not None:
                with _naming(attached, "the ranks could not average their models"):
                    attached.meeting.meet(piece.share / piece.plan.samples)
        of.recorder.reduced()
        self.between = False

    def require(self, what: str) -> None:
        """Raise `UsageError`, on all ranks, between two meetings."""
        if self.between:
            raise self.of.fail(UsageError(f"{what}, and the workers' models differ between two meetings: {_WHERE}"))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """`Controller.optimizer_state`."""
        if not self.of.apart:
            fix = "save optimizer.state_dict(), which all ranks have alike"
            raise UsageError(f"optimizer_state() is for Controller(meet='parameters'): {fix}")
        self.require("optimizer_state() is the mean over workers")
        for attached in self.of.connected:
            if attached.meeting is not None and any(optimizer is own for own in attached.meeting.optimizers):
                with _naming(attached, "the ranks could not average the state of an optimizer"):
                    return attached.meeting.optimizer_state(optimizer)
        raise UsageError("optimizer_state() got an optimizer that controller.wrap(model, optimizer) was not given")


@contextlib.contextmanager
def _naming(attached: Attached, what: str) -> Iterator[None]:
    """A failed collective inside becomes an error that names the rank."""
    try:
        yield
    except RuntimeError as error:
        if not failed_collective(error):
            raise
        raise attached.explain(error, what) from error

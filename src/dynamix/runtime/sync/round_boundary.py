"""The end of rounds with local steps: averages models and optimizers, and checks what happens within a round."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from dynamix.data import Piece
from dynamix.errors import DynamixError, UsageError
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.part import Observation, Part
from dynamix.runtime.sync.parameter_averaging import ParameterAveraging
from dynamix.runtime.sync.stray import StrayCollectives

_WHERE = "call it at a meeting, under `if controller.checkpoint_due(every=N):` or `if controller.met:`"


class RoundBoundary(Part):
    """The boundary of rounds on one rank, which takes local steps in rounds whose plan says so.

    averagings   of all models connected so far
    strays       detects the loop's own collectives
    steps_apart  some rounds have local steps
    """

    def __init__(
        self,
        averagings: Sequence[ParameterAveraging],
        recorder: Recorder,
        strays: StrayCollectives,
        fail: Callable[[DynamixError], DynamixError],
        *,
        steps_apart: bool,
    ) -> None:
        self.averagings, self.recorder, self.strays, self._fail = averagings, recorder, strays, fail
        self.steps_apart = steps_apart
        self._between = False  # this rank has taken local steps since the last averaging

    def piece_done(self, piece: Piece, seen: Observation) -> None:
        """If a round with local steps ends with this piece, average the workers' models: a collective call."""
        self._between = piece.round.apart
        if not piece.round.apart:
            return
        if (wrong := self.strays.look()) is not None:
            raise self._fail(wrong)
        if piece.last:
            self.strays.end()
            self.recorder.timer.gradients_ready()
            for averaging in self.averagings:
                averaging.meet(piece.share / piece.round.samples)
            self.recorder.timer.reduced()
            self._between = False

    def job_ends(self) -> None:
        self.strays.end()

    @functools.cached_property
    def payload(self) -> float:
        """Bytes that an averaging sends, relative to a gradient's, with the optimizers' state at the first call."""
        return max((averaging.payload for averaging in self.averagings), default=1.0)

    def alike(self) -> dict[str, Any]:
        """Options of averaging that must be equal on all ranks, by name."""
        every = [averaging.facts() for averaging in self.averagings]
        return {f"averaging: {name}": [facts[name] for facts in every] for name in (every[0] if every else ())}

    def require(self, what: str) -> None:
        """Raise `UsageError`, on all ranks, within a round of local steps."""
        if self._between:
            raise self._fail(UsageError(f"{what}, but the workers' models differ between two meetings: {_WHERE}"))

    def require_no(self, what: str) -> None:
        """Raise `UsageError` if workers take local steps, whose losses need no weights."""
        if self.steps_apart:
            why = "with local steps a loss is the mean over the worker's own samples; models are weighted later"
            raise UsageError(f"{what}: {why}. Call loss.backward()")

    def warn_between(self) -> None:
        """The loop has ended: warn if the workers' models differ."""
        if self._between and sys.exc_info()[0] is None:
            left = "the loop ended between two meetings, so the workers' models differ"
            fix = "leave it only `if controller.met`; at a limit of steps, `if controller.checkpoint_due(every=N)`"
            warnings.warn(f"{left}: {fix}", RuntimeWarning, stacklevel=3)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """`Controller.optimizer_state`."""
        if not self.steps_apart:
            fix = "save optimizer.state_dict(), which all ranks have alike"
            raise UsageError(f"optimizer_state() is for Controller(meet='parameters'): {fix}")
        self.require("optimizer_state() is the mean over workers")
        for averaging in self.averagings:
            if any(optimizer is own for own in averaging.optimizers):
                return averaging.optimizer_state(optimizer)
        raise UsageError("optimizer_state() got an optimizer that controller.wrap(model, optimizer) was not given")

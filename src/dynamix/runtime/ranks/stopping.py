"""Ranks agree on the step after which all stop: it is proposed, answered and settled outside the training step.

The first rank proposes a step that probably no rank has reached, and every rank answers whether it is still before it.
If all are, the step is settled; otherwise the first rank proposes a later one. A rank that has agreed and reaches the
step before it is settled waits there; no other rank ever waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

AHEAD_S = 2.5  # time to the first proposal, at the current speed; an answer takes less
_POLL_S = 0.02


class Stopping:
    """One rank's part. The first rank also calls `lead`.

    alone    the only rank: a request is enough
    wanted   this rank requests to stop soon
    steps    optimizer steps that this rank has done
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.alone, self.wanted, self.steps = alone, False, 0
        self._at: int | None = None
        self._round, self._sure = 0, False
        self._answer: list[Any] = [0, False]
        self._seen: tuple[int, float] | None = None
        self._steps_per_s, self._retries = 0.0, 0

    def want(self) -> None:
        """Request to stop soon."""
        self.wanted = True

    @property
    def under_way(self) -> bool:
        """Whether a step is still to be settled."""
        return (self.wanted or self._at is not None) and not self._sure

    def reached(self, steps: int, check: Callable[[], None]) -> bool:
        """A step is done, number `steps`: whether to stop. `check` raises if waiting has become useless."""
        self.steps = steps
        if self.alone:
            return self.wanted
        while (at := self._at) is not None and steps >= at:
            if self._sure:
                return True
            check()
            time.sleep(_POLL_S)
        return False

    def beat(self) -> dict[str, Any]:
        """This rank's message to the first rank."""
        return {"steps": self.steps, "wants": self.wanted, "answer": self._answer}

    def proposal(self) -> tuple[int, int | None, bool]:
        """The first rank's message to all."""
        return self._round, self._at, self._sure

    def follow(self, proposal: Sequence[Any]) -> None:
        """Answer the first rank's proposal."""
        number, at, sure = proposal
        if number != self._round:
            self._take(number, at)
        self._sure = self._sure or (sure and self._at is not None)

    def lead(self, beats: Sequence[Mapping[str, Any]], now: float) -> None:
        """On the first rank, with the beats of all ranks including its own: propose or settle."""
        if self._seen is not None and now > self._seen[1]:
            self._steps_per_s = max(0.0, (self.steps - self._seen[0]) / (now - self._seen[1]))
        self._seen = self.steps, now
        if self._sure or not any(beat["wants"] for beat in beats):
            return
        answers = [beat["answer"] for beat in beats]
        if self._round and any(answer[0] != self._round for answer in answers):
            return
        if self._round and all(answer[1] for answer in answers):
            self._sure = True
            return
        ahead = (1 + int(AHEAD_S * self._steps_per_s)) << self._retries
        self._retries += 1
        self._take(self._round + 1, max(self.steps, *(beat["steps"] for beat in beats)) + ahead)

    def _take(self, number: int, at: int | None) -> None:
        self._at = at  # before reading `steps`: `reached` writes that first, so one of the two sees the other
        before = at is not None and self.steps < at
        self._round, self._answer = number, [number, before]
        if not before:
            self._at = None

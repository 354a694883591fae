"""How ranks agree on the step after which all of them stop: proposed, answered, settled, off the step path.

The first rank proposes a step that nobody should have reached, every rank answers whether it was still before it, and
when all were, the step is sure. One that was not makes it propose a later one. A rank that has said yes and arrives
there before it is sure waits; nobody else ever does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

AHEAD_S = 2.5  # how far ahead the first proposal is, by the speed of the moment: an answer takes less
_POLL_S = 0.02


class Stopping:
    """One rank's part; the first rank also calls `lead`.

    alone    there are no others, and a wish is enough
    wanted   set by this rank: stop soon
    steps    optimizer steps this rank has done
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.alone, self.wanted, self.steps = alone, False, 0
        self._at: int | None = None
        self._round, self._sure = 0, False
        self._answer: list[Any] = [0, False]
        self._seen: tuple[int, float] | None = None
        self._steps_per_s, self._retries = 0.0, 0

    def want(self) -> None:
        """Stop soon."""
        self.wanted = True

    @property
    def under_way(self) -> bool:
        """Whether something is still to be settled."""
        return (self.wanted or self._at is not None) and not self._sure

    def reached(self, steps: int, check: Callable[[], None]) -> bool:
        """A step is over, `steps` in all: whether to stop. `check` raises where waiting has become useless."""
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
        """Answer what the first rank proposes."""
        number, at, sure = proposal
        if number != self._round:
            self._take(number, at)
        self._sure = self._sure or (sure and self._at is not None)

    def lead(self, beats: Sequence[Mapping[str, Any]], now: float) -> None:
        """On the first rank, with everybody's beat, its own included: propose, or settle."""
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
        self._at = at  # before `steps` is read: `reached` writes that first, so one of the two sees the other
        before = at is not None and self.steps < at
        self._round, self._answer = number, [number, before]
        if not before:
            self._at = None

"""Decaying traces on the cells of many worlds, which agents leave for each other instead of sending messages.

S-MADRL (arXiv 2510.03592): rho <- (1 - alpha) rho + beta on a visited cell, rho <- (1 - alpha) rho on every other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamix.errors import ConfigError, StateError
from dynamix.window import Floats, Ints


@dataclass(frozen=True, slots=True)
class Decay:
    """How traces fade. The three defaults are second-hand: treat them as settings, not as facts.

    alpha   share lost per step, 0 (never fades) to 1 (gone after its own step)
    beta    added per visit; a cell visited at every step tends to beta / alpha
    start   value of every cell at step 0
    """

    alpha: float = 0.05
    beta: float = 0.1
    start: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError("alpha", self.alpha, "0 to 1", "give the share that a trace loses per step")
        for name in ("beta", "start"):
            if not (np.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(name, getattr(self, name), "a finite number, 0 or more", "give what is on a cell")


class FadingField:
    """The traces of B worlds of C cells. `open_` (C,) marks the cells that hold traces.

    late   delay of `smelt`, in steps

    >>> field = FadingField(np.array([True, True, False]), Decay(alpha=0.5, beta=1.0, start=0.0), worlds=1)
    >>> field.deposit(np.array([[0, 0, 2]]))
    >>> field.fade()
    >>> field.value.tolist()
    [[1.0, 0.0, 0.0]]
    """

    def __init__(self, open_: NDArray[np.bool_], decay: Decay, *, worlds: int, late: int = 0) -> None:
        if late < 0:
            raise ConfigError("late", late, "0 or more", "give a number of steps")
        self.decay, self.open_, self.late = decay, open_, late
        self._first = (np.arange(worlds) * len(open_))[:, None]
        self.value: Floats = np.empty((worlds, len(open_)))
        self._past: list[Floats] = []
        self.clear()

    def clear(self) -> None:
        self.value[:] = self.decay.start * self.open_
        self._past = []

    def fade(self) -> None:
        """Let all traces fade by one step. Call it before the next step's deposits."""
        if self.late:
            self._past = [*self._past, self.value.copy()][-self.late :]
        self.value *= 1.0 - self.decay.alpha

    def deposit(self, cell: Ints, amount: NDArray[Any] | float = 1.0) -> None:
        """Add `amount` visits (a number, or (B, n)) to cells (B, n) of their worlds. A cell may occur repeatedly."""
        visits = self.decay.beta * amount * self.open_[cell]
        np.add.at(self.value.reshape(-1), (cell + self._first).reshape(-1), visits.reshape(-1))

    def smelt(self, cell: Ints) -> Floats:
        """The traces on cells (B, ...) of their worlds, as of `late` steps ago."""
        now = self._past[0] if self.late and self._past else self.value
        first = self._first.reshape(-1, *([1] * (cell.ndim - 1)))
        return np.asarray(now.reshape(-1).take(cell + first))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.copy(), "past": [value.copy() for value in self._past]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["value"].shape != self.value.shape:
            raise StateError(f"the saved field has {state['value'].size} cells, this one {self.value.size}")
        self.value[:] = state["value"]
        self._past = [value.copy() for value in state["past"]]

"""Decaying traces in a shared field: what agents leave for each other instead of messages.

S-MADRL (arXiv 2510.03592): a visited cell becomes rho <- (1 - alpha) rho + beta, every other one (1 - alpha) rho. Decay
is lazy: a cell holds its value and the step at which that was true, so a step costs as much as there are visits, not
cells. Deposits of one step add up, and the order in which deposits arrive does not matter, even if some arrive late.

Ranks of a training job each hold the whole field (`dynamix.runtime.decide.peer_channel`): what all left of a window
reaches everybody as one sum.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamix.errors import ConfigError, StateError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_TABLE = 4096  # steps whose share that is left is looked up


@dataclass(frozen=True, slots=True)
class Decay:
    """How traces fade. The three numbers are known at second hand only; they are settings, not facts.

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

    def kept(self, steps: ArrayLike) -> Floats:
        """The share of a trace that is left after so many steps (0 or more).

        >>> Decay(alpha=0.5).kept([0, 1, 2]).tolist()
        [1.0, 0.5, 0.25]
        """
        return np.asarray((1.0 - self.alpha) ** np.asarray(steps, dtype=np.float64))


class Field(Protocol):
    """Cells that hold traces. `cell` is an integer array (..., n); what is read has its shape, NaN where unknown.

    deposit   `amount` visits (any shape that broadcasts to `cell`'s) at `step`; the same cell may be named repeatedly
    read      values as seen at `step`. Never raises because of what the field lives in: it answers NaN
    """

    decay: Decay

    def deposit(self, cell: ArrayLike, amount: ArrayLike = 1.0, *, step: int) -> None: ...

    def read(self, cell: ArrayLike, *, step: int) -> Floats: ...


def checked(cell: ArrayLike, cells: int) -> Ints:
    """`cell` as int64. Raises `ConfigError` for anything that is not a cell of a field of `cells` cells."""
    index = np.asarray(cell)
    if not np.issubdtype(index.dtype, np.integer):
        raise ConfigError("cell", index.dtype.name, "integers", "pass indices of cells")
    if index.size and (index.min() < 0 or index.max() >= cells):
        raise ConfigError("cell", (int(index.min()), int(index.max())), f"0 to {cells - 1}", "check the indices")
    return index.astype(np.int64, copy=False)


class MemoryField:
    """A field in this process, or one in each of many worlds at once: worlds (...), cells (..., n).

    >>> field = MemoryField(3, Decay(alpha=0.5, beta=1.0, start=0.0))
    >>> field.deposit([0, 0, 2], step=1)
    >>> field.read([0, 1, 2], step=2).tolist()
    [1.0, 0.0, 0.5]
    """

    def __init__(self, cells: int, decay: Decay | None = None, *, worlds: tuple[int, ...] = ()) -> None:
        if cells < 1 or any(n < 1 for n in worlds):
            raise ConfigError("cells, worlds", (cells, worlds), "1 or more each", "check the arguments")
        self.decay, self.cells, self.worlds = decay or Decay(), cells, worlds
        count = int(np.prod(worlds, dtype=np.int64))
        self._first = (np.arange(count) * cells).reshape(*worlds, 1)
        self._kept = self.decay.kept(np.arange(_TABLE))  # to look up: a power for every cell would take longest
        self._value = np.empty(count * cells)
        self._stamp = np.empty(count * cells, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        """Back to step 0."""
        self._value[:] = self.decay.start
        self._stamp[:] = 0

    def deposit(self, cell: ArrayLike, amount: ArrayLike = 1.0, *, step: int) -> None:
        flat = self._flat(cell)
        amounts = np.broadcast_to(np.asarray(amount, dtype=np.float64), flat.shape)
        before = self._stamp[flat]
        now = np.maximum(before, step)
        self._value[flat] *= self._after(now - before)
        self._stamp[flat] = now
        np.add.at(self._value, flat, self.decay.beta * amounts * self._after(now - step))

    def read(self, cell: ArrayLike, *, step: int) -> Floats:
        flat = self._flat(cell)
        return np.asarray(self._value[flat] * self._after(np.maximum(step - self._stamp[flat], 0)))

    def everywhere(self, *, step: int) -> Floats:
        """All cells of all worlds, (..., cells)."""
        return self.read(np.broadcast_to(np.arange(self.cells), (*self.worlds, self.cells)), step=step)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._value.copy(), "stamp": self._stamp.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["value"].shape != self._value.shape:
            raise StateError(f"the saved field has {state['value'].size} cells, this one {self._value.size}")
        self._value[:], self._stamp[:] = state["value"], state["stamp"]

    def _after(self, steps: Ints) -> Floats:
        """`Decay.kept`."""
        kept = self._kept[np.minimum(steps, _TABLE - 1)]
        if self._kept[-1] and (late := steps >= _TABLE).any():
            kept[late] = self.decay.kept(steps[late])
        return kept

    def _flat(self, cell: ArrayLike) -> Ints:
        return np.asarray(self._first + checked(cell, self.cells)) if self.worlds else checked(cell, self.cells)

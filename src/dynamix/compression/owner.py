"""One state serves one model: buckets of a second model would be confused with those of the first."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from dynamix.errors import UsageError

_FIX = "make one CompressionState for each model, in the same order on every rank"


class Owner:
    """The model whose gradients a state reduces: the one it was given, else that of the first backward pass."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._pass: list[Tensor] = []

    def check(self, parameters: Sequence[Tensor], *, last: bool) -> None:
        """Check one bucket's parameters; `last` of its backward pass. Raises `UsageError` for another model's."""
        if self._model is not None:
            if not all(self._knows(p) for p in parameters):
                model = self._model()
                self._learn([] if model is None else model.parameters())
                if model is not None and not all(self._knows(p) for p in parameters):
                    raise UsageError(
                        f"a gradient is not of the model that CompressionState(model=...) was given: {_FIX}"
                    )
            return
        self._pass += parameters
        if last:
            seen, self._pass = self._pass, []
            alive = [ref for ref in self._known.values() if ref() is not None]
            if alive and not any(self._knows(p) for p in seen):
                raise UsageError(f"this CompressionState reduces gradients of two models: {_FIX}")
            self._learn(seen)

    def _knows(self, parameter: Tensor) -> bool:
        ref = self._known.get(id(parameter))
        return ref is not None and ref() is parameter

    def _learn(self, parameters: Iterable[Tensor]) -> None:
        self._known |= {id(p): weakref.ref(p) for p in parameters}

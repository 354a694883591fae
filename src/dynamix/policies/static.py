"""The floor every adaptive policy is measured against: nothing ever changes."""

from __future__ import annotations

from typing import Any

from dynamix.window import Bounds, Ints, Window


class Static:
    """Keeps the batch sizes in force, whatever is observed.

    >>> Static().decide(Window.of([32, 32]), Bounds.of(2)).tolist()
    [32, 32]
    """

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        return window.batch_size.copy()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

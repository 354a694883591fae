"""The baseline of every adaptive policy: sizes never change."""

from typing import Any

import numpy as np

from dynamix.errors import ConfigError
from dynamix.projection import project
from dynamix.window import Bounds, Ints, Window


class Static:
    """Keeps the batch sizes in force, whatever is observed; or, with `batch_size`, that many samples for every worker.

    The second form is `make_policy("static:256")`: a static batch that differs from the job's first one, at the same
    base batch, so that a sweep over static batches is a fair comparison.

    >>> Static().decide(Window.of([32, 32]), Bounds.of(2)).tolist()
    [32, 32]
    >>> Static(64).decide(Window.of([32, 32]), Bounds.of(2)).tolist()
    [64, 64]

    anew   begin with even sizes at the global batch in force, even if the job resumes; no policy state is loaded
    """

    def __init__(self, batch_size: int | None = None, *, anew: bool = False) -> None:
        if batch_size is not None and batch_size < 1:
            raise ConfigError("static batch_size", batch_size, "1 or more", "use static:128, say")
        self.batch_size, self.begins_anew = batch_size, anew

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        if self.begins_anew:
            now = window.batch_size
            return project(np.ones(now.shape), bounds, total=now.sum(-1), current=now)
        if self.batch_size is None:
            return window.batch_size.copy()
        wish = np.clip(np.full(window.batch_size.shape, self.batch_size), bounds.low, bounds.high)
        return project(wish, bounds, current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

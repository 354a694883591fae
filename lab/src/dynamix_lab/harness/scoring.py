"""Scores snapshots during training, off its clock: in a thread of the parent, on CPU that hosts do not get."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from dynamix_lab.tasks import Arrays, Workload, score


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """Weights `time_s` after the run's clock started. Scored once `score` is a number."""

    run: str
    time_s: float
    step: int
    samples: int
    path: Path
    score: float = float("nan")


def by_parameters(workload: Workload, test: Arrays) -> Callable[[Tensor], float]:
    """For `Scorer`: maps flattened parameters to the metric of that model on all of `test`."""
    model = workload.make_model(0)

    def value(weights: Tensor) -> float:
        vector_to_parameters(weights, model.parameters())
        return score(workload, model, test)

    return value


class Scorer:
    """Scores snapshots in order of arrival and passes each to `scored`, from its own thread.

    value   weights, float32 and flattened, -> their score

    `wait` re-raises an error of that thread.
    """

    def __init__(self, value: Callable[[Tensor], float], scored: Callable[[WeightSnapshot], None]) -> None:
        self.value, self.scored = value, scored
        self._queue: queue.Queue[WeightSnapshot | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dynamix-score", daemon=True)
        self._thread.start()

    def add(self, snapshot: WeightSnapshot) -> None:
        """Queue one snapshot. Its file is removed after scoring."""
        self._queue.put(snapshot)

    def wait(self) -> None:
        """Wait until all snapshots are scored."""
        self._queue.join()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (snapshot := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self.scored(self._scored(snapshot))
            except Exception as error:
                self._error = error
            finally:
                snapshot.path.unlink(missing_ok=True)
                self._queue.task_done()

    def _scored(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        weights = torch.from_numpy(np.fromfile(snapshot.path, dtype=np.float32))
        return replace(snapshot, score=self.value(weights))

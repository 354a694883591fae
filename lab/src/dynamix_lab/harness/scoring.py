"""Scores snapshots while training goes on, off its clock: in a thread of the parent, on CPU the hosts do not get."""

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
    """Weights as they were `time_s` after the run's clock started; scored once `score` is a number."""

    run: str
    time_s: float
    step: int
    samples: int
    path: Path
    score: float = float("nan")


def by_parameters(workload: Workload, test: Arrays) -> Callable[[Tensor], float]:
    """The metric on all of `test` of a model with these parameters, which lie in a row, for `Scorer`."""
    model = workload.make_model(0)

    def value(weights: Tensor) -> float:
        vector_to_parameters(weights, model.parameters())
        return score(workload, model, test)

    return value


class Scorer:
    """Scores snapshots in the order they come and hands each to `scored`, from its own thread.

    value   weights, float32 in a row, -> their score

    An error of that thread is raised again by `wait`.
    """

    def __init__(self, value: Callable[[Tensor], float], scored: Callable[[WeightSnapshot], None]) -> None:
        self.value, self.scored = value, scored
        self._queue: queue.Queue[WeightSnapshot | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dynamix-score", daemon=True)
        self._thread.start()

    def add(self, snapshot: WeightSnapshot) -> None:
        """Queue one snapshot; its file is removed once scored."""
        self._queue.put(snapshot)

    def wait(self) -> None:
        """Until everything added is scored."""
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

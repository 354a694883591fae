"""The state of one bucket, and of the sparse gradients of one backward pass."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.futures import Future

from dynamix.compression.auto import Chooser
from dynamix.compression.bucket import BucketExchange
from dynamix.compression.ways import AGGREGATED


@dataclass
class BucketLine:
    """One bucket: its layout's key, its exchange, its way or chooser, and its step."""

    shapes: tuple[tuple[int, int], ...]
    exchange: BucketExchange
    way: str
    chooser: Chooser | None
    step: int = 0

    @property
    def route(self) -> str:
        """The current way, with the prefix "aggregator-" if `auto` uses an aggregator."""
        return self.chooser.way if self.chooser else self.way

    def next(self) -> tuple[str, bool]:
        """The route of this step, and whether it must be timed."""
        return self.chooser.next() if self.chooser else (self.way, False)

    def advance(self, seconds: float | None, *, full: bool = False) -> None:
        """End the step; `seconds` if it was timed; `full`: dense would have sent less, and was used."""
        self.step += 1
        if self.chooser:
            self.chooser.record(seconds, full=full)

    def again(self) -> None:
        """Start over after ranks disagreed, which all of them know: then they count and choose alike again."""
        self.step = 0
        if self.chooser:
            self.chooser = Chooser(self.chooser.candidates, budget=self.chooser.budget)


def way_of(route: str) -> str:
    """The way of a route: without the aggregator."""
    return route.removeprefix(AGGREGATED)


@dataclass
class SparsePass:
    """Sparse gradients that wait for the last bucket of their backward pass."""

    gradients: list[Tensor] = field(default_factory=list)
    futures: list[Future[Tensor]] = field(default_factory=list)

    def add(self, gradient: Tensor) -> Future[Tensor]:
        """Add a gradient; returns the future of its mean."""
        future = new_future(gradient)
        self.gradients.append(gradient)
        self.futures.append(future)
        return future

    def settle(self, means: list[Tensor]) -> None:
        """Set the means of all gradients."""
        for future, mean in zip(self.futures, means, strict=True):
            future.set_result(mean)

    def fail(self, error: Exception) -> None:
        """Set an error on all futures; backward raises it on the user's thread."""
        for future in self.futures:
            future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it wrongly


def new_future(values: Tensor) -> Future[Tensor]:
    """A future that handles its device's streams."""
    return Future(devices=[values.device]) if values.is_cuda else Future()


def now(values: Tensor) -> float:
    """Time in seconds, once the device is idle."""
    if values.is_cuda:
        torch.cuda.synchronize(values.device)
    return time.perf_counter()

"""Finds each rank's largest micro-batch that fits in memory, before training: doubling, then bisection."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from dynamix.errors import ConfigError, DynamixError, UsageError
from dynamix.runtime import random_state
from dynamix.runtime.memory.batches import resized
from dynamix.runtime.memory.exit_advice import ExitNote
from dynamix.runtime.memory.gauge import Gauge, all_of, is_out_of_memory, release
from dynamix.runtime.ranks.ranks import Ranks
from dynamix.runtime.sync.shards import is_fully_sharded
from dynamix.runtime.sync.sync import Sync
from dynamix.window import Bounds, Ints


class Search:
    """Chooses the next size to try between `low` and `high`, and records what fits.

    >>> search = Search(8, 1000, quantum=1)
    >>> tried = []
    >>> while not search.done:
    ...     tried.append(search.size)
    ...     search.tell(fitted=search.size <= 100)
    >>> tried, search.fits
    ([8, 16, 32, 64, 128, 96, 112, 104, 100, 102], 100)
    """

    def __init__(self, low: int, high: int, *, quantum: int) -> None:
        self.low, self.high, self.quantum = low, high, quantum
        self.fits, self.fails = 0, high + quantum
        self.size = low

    @property
    def done(self) -> bool:
        """Whether the largest fitting size is known to 1/32; `size` is then that size, or 0 if not even `low` fits."""
        if self.fits:
            return self.fails - self.fits <= max(self.quantum, self.fits // 32)
        return self.fails <= self.low

    def tell(self, *, fitted: bool) -> None:
        """Record whether `size` fitted. If a size that fitted before fails now, memory is shared."""
        if fitted:
            self.fits = max(self.fits, self.size)
        else:
            self.fails, self.fits = self.size, 0 if self.size <= self.fits else self.fits
        if self.done:
            self.size = self.fits
        elif not self.fits:
            self.size = max(self.low, self._grid(self.fails * 3 // 4))
        elif self.fails > self.high:
            self.size = min(2 * self.fits, self.high)
        else:
            self.size = max(self._grid((self.fits + self.fails) // 2), self.fits + self.quantum)

    def _grid(self, size: int) -> int:
        return size // self.quantum * self.quantum


class Memory:
    """A job's limits of memory, for the model that was connected first. Its methods are collective.

    In a search all ranks try sizes in step, and finished ranks repeat their largest. So ranks that share a device or a
    control group find what fits simultaneously. Gradients, buffers and random state are restored.

    note     the message if training itself runs out of memory
    """

    def __init__(self, first: Sync, ranks: Ranks, note: ExitNote) -> None:
        self.first, self.note, self._ranks = first, note, ranks
        self._models: list[tuple[Sync, Optimizer]] = []
        self._gauge = Gauge(first.recorder.device)

    def add(self, model: Sync, optimizer: Optimizer) -> None:
        """Add a model that passes may use; `optimizer` is its first one."""
        self._models.append((model, optimizer))

    def check(self, margin: float) -> None:
        """Raise what `find` would raise on this rank before it communicates."""
        if not 0 <= margin < 1:
            raise ConfigError("margin", margin, "0 to below 1", "use 0.1")
        if self._ranks.workers == 1:
            return
        for module in self.first.model.modules():
            if isinstance(module, nn.SyncBatchNorm) or is_fully_sharded(module):
                why = f"runs passes of one rank alone, and {type(module).__name__} exchanges in its forward pass"
                fix = "pass Controller(max_batch_size=[...]), one number per rank, instead"
                raise UsageError(f"controller.find_limits() {why}: {fix}")

    def find(self, step_fn: Callable[[Any], Any], example: Any, bounds: Bounds, *, margin: float) -> Ints:
        """`Controller.find_limits`, after `check`: caps (W,) within `bounds`.

        A cap is the largest size that ran, less `margin`; `bounds.high` if every size ran. Raises `ConfigError` on
        every rank if the smallest allowed batch does not fit on one.
        """
        q = bounds.quantum
        high = int(bounds.high[self._ranks.rank])
        # A batch of one has no variance for batch normalisation; an epoch's steps have at least two samples.
        low = min(max(int(bounds.low[self._ranks.rank]), -(-2 // q) * q), high)
        search = Search(low, high, quantum=q)
        self._gauge.share(self._ranks)
        release()  # otherwise memory that the C library holds from before would count as used
        with self._apart():
            self._run(search, step_fn, example)
        largest = search.fits
        if 0 < largest < high:
            # The gap to the failing size is already part of the margin.
            largest = max(int(largest * (1 - margin)) // q * q, low)
        found = all_of(largest, self._ranks)
        if (found == 0).any():
            at = int(np.argmin(found))
            allowed = f"what fits the memory of rank {at}, where not even {max(int(bounds.low[at]), 2)} samples do"
            fix = "lower min_batch_size if set, or use a smaller model, checkpointing, or a worker with more memory"
            raise ConfigError("min_batch_size", int(max(bounds.low[at], 1)), allowed, fix)
        return found

    def _run(self, search: Search, step_fn: Callable[[Any], Any], example: Any) -> None:
        first = True  # ignore a process's first pass: it takes memory that later passes do not
        while all_of(not search.done, self._ranks).any():
            headroom, fitted, error = self._gauge.headroom_bytes(), False, None
            all_of(0, self._ranks)  # wait until all ranks have read their headroom, before any grows
            if search.size:
                fitted, error = self._try(step_fn, example, search.size, headroom)
            failed = all_of(error is not None, self._ranks)
            if error is not None:
                raise error
            if failed.any():
                told = f"find_limits: step_fn failed on rank {int(np.argmax(failed))}"
                raise DynamixError(f"{told}; its own error is in that rank's output")
            if search.size and not first:
                search.tell(fitted=fitted)
            first = False
            release()

    def _try(
        self, step_fn: Callable[[Any], Any], example: Any, size: int, headroom: float
    ) -> tuple[bool, Exception | None]:
        """Whether `size` fits; and any error other than running out of memory."""
        if not self._gauge.allows(size, headroom):
            return False, None
        try:
            with self._gauge.measure(size):
                step_fn(resized(example, size))
        except Exception as error:
            return False, None if is_out_of_memory(error) else error
        finally:
            for parameter in itertools.chain(*(attached.model.parameters() for attached, _ in self._models)):
                parameter.grad = None
        return self._gauge.allows(size, headroom), None  # it ran once; it must fit every time

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Passes inside do not communicate and are undone; memory for optimizer states to come is reserved."""
        saved, copies = random_state.capture(), list[Tensor]()
        with ExitStack() as stack:
            stack.callback(random_state.restore, saved)
            for attached, optimizer in self._models:
                stack.enter_context(attached.discarded())
                stack.enter_context(attached.alone())
                times = range(_states_to_come(optimizer))
                copies += [p.detach().clone() for _ in times for p in attached.model.parameters()]
            stack.callback(copies.clear)
            yield
        release()


def _states_to_come(optimizer: Optimizer) -> int:
    """Values per parameter that the optimizer will keep but has not made yet: 2, as with Adam, if unknown."""
    if optimizer.state:
        return 0
    if isinstance(optimizer, SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return 2


def within(bounds: Bounds, caps: Ints, *, may_fall: bool = False) -> Bounds:
    """`bounds` with no worker above its cap (W,), samples per round.

    may_fall   the user set no minimum of the global batch: lower it to what fits, if that is less than at the start

    Raises `ConfigError` if the global batch can no longer be reached.
    """
    high = np.minimum(bounds.high, caps)
    if may_fall:
        total_low = np.minimum(bounds.total_low, high.sum() // bounds.quantum * bounds.quantum)
        bounds = dataclasses.replace(bounds, total_low=total_low)
    if int(bounds.total_low) > int(high.sum()):
        allowed = f"at most {int(high.sum())}, which is what fits: {caps.tolist()}"
        fix = "lower batch_size, and min_global_batch if it is set"
        raise ConfigError("min_global_batch", int(bounds.total_low), allowed, fix)
    total = {"total_low": bounds.total_low, "total_high": bounds.total_high}
    return Bounds.of(len(caps), bounds.low, high, **total, quantum=bounds.quantum, max_change=bounds.max_change)

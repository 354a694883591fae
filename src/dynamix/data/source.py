"""Reads an iterable ahead, keeps samples until they are consumed, and finds its position again after a restart."""

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from dynamix.errors import StateError, UsageError


class Source:
    """One pass over `iterable`, with samples from the oldest unconsumed one kept in memory.

    Positions count samples since the epoch began. An iterable's own `set_epoch` is called when an epoch starts. If it
    has both `state_dict` and `load_state_dict`, a resumed job need not read finished samples again.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable
        self.started = False
        self.dry = False
        self._latest: list[Any] = []  # the last 2 samples dropped
        self._iterator: Iterator[Any] | None = None
        self._kept: list[Any] = []
        self._first = 0  # position of _kept[0]
        self._snapshots: deque[tuple[int, Any]] = deque()
        self._stateful = hasattr(iterable, "state_dict") and hasattr(iterable, "load_state_dict")

    def start(self, epoch: int, position: int = 0, state: dict[str, Any] | None = None) -> None:
        """Begin a pass at `position`: from the iterable's own saved `state` if given, else by reading up to there."""
        if self._iterator is self.iterable:
            raise UsageError(
                "this iterable can be read only once (its iterator is itself): pass an object whose __iter__ starts "
                "again, such as an IterableDataset, to train for several epochs"
            )
        if hasattr(self.iterable, "set_epoch"):
            self.iterable.set_epoch(epoch)
        self.dry, self._latest, self._kept, self._first = False, [], [], 0
        self._snapshots.clear()
        if state is not None and self._stateful:
            self.iterable.load_state_dict(state["state"])  # type: ignore[attr-defined]
            self._first = int(state["read"])
        self._iterator = iter(self.iterable)
        self.started = True
        while self._first < position:
            want = min(position - self._first, 1024)
            if self.available(self._first, want) < want:
                raise StateError(
                    f"the iterable ended after {self._first + len(self._kept)} samples, but the checkpoint is at "
                    f"sample {position}: it must give the same samples in the same order when read again"
                )
            self.drop(self._first + want)

    def stop(self) -> None:
        """End this pass; the next request for a batch begins another."""
        self.started = False

    def available(self, position: int, want: int) -> int:
        """Samples held from `position` on, after reading ahead to `want` of them; fewer only if the source is dry."""
        assert self._iterator is not None
        missing = position + want - self._first - len(self._kept)
        if missing > 0 and not self.dry:
            if self._stateful:
                read = self._first + len(self._kept)
                self._snapshots.append((read, copy.deepcopy(self.iterable.state_dict())))  # type: ignore[attr-defined]
            for _ in range(missing):
                try:
                    self._kept.append(next(self._iterator))
                except StopIteration:
                    self.dry = True
                    break
        return self._first + len(self._kept) - position

    def take(self, position: int, count: int) -> list[Any]:
        """`count` samples from `position` on; they stay in memory until dropped."""
        at = position - self._first
        return self._kept[at : at + count]

    def before(self, position: int) -> list[Any]:
        """The last samples before `position`, at most 2: placeholders of a rank that ran dry."""
        return (self._latest + self._kept[: position - self._first])[-2:]

    def drop(self, before: int) -> None:
        """Drop samples before position `before`: they are consumed."""
        count = before - self._first
        if count <= 0:
            return
        self._latest = (self._latest + self._kept[max(count - 2, 0) : count])[-2:]
        del self._kept[:count]
        self._first = before
        # After a resume a dry rank needs its last 2 samples, so keep a snapshot at least that old.
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= before - 2:
            self._snapshots.popleft()

    def state_at(self, position: int) -> dict[str, Any] | None:
        """The iterable's own state from which `position` can be reached, and the number of samples it had given."""
        usable = [s for s in self._snapshots if s[0] <= max(position - 2, 0)]
        return {"read": usable[-1][0], "state": usable[-1][1]} if usable else None

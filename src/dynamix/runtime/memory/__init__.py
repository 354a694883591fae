"""How large a batch fits: every rank's limit, found before training."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.memory.exit_advice import ExitNote
from dynamix.runtime.memory.gauge import Gauge, is_out_of_memory
from dynamix.runtime.memory.limits import LimitSearch, within
from dynamix.runtime.ranks.group import ControlGroup
from dynamix.runtime.ranks.opening import open_another
from dynamix.runtime.ranks.ranks import ALONE, Ranks
from dynamix.runtime.sync.connected_model import ConnectedModel
from dynamix.runtime.sync.shards import is_fully_sharded
from dynamix.window import Bounds, Ints

__all__ = ["ExitNote", "Memory", "is_out_of_memory", "within"]


class Memory:
    """What a controller does about memory, for the model that was connected first. Its methods are collective.

    note     what is said where training itself runs out
    group    of `ranks`. They talk on another, made at first use: the control group carries decisions meanwhile
    """

    def __init__(
        self,
        first: ConnectedModel,
        ranks: Ranks = ALONE,
        *,
        group: dist.ProcessGroup | None,
        note: ExitNote | None = None,
    ) -> None:
        self.first, self.group, self.note, self._ranks = first, group, note, ranks
        self._models: list[tuple[ConnectedModel, Optimizer]] = []
        self._gauge = Gauge(first.recorder.device)
        self._talk: ControlGroup | None = None

    def add(self, model: ConnectedModel, optimizer: Optimizer) -> None:
        """Passes may go through `model`; `optimizer` is the first of it."""
        self._models.append((model, optimizer))

    def check(self, margin: float) -> None:
        """Raises what `find` would raise on this rank before it talks to others."""
        if not 0 <= margin < 1:
            raise ConfigError("margin", margin, "0 to below 1", "use 0.1")
        if self.group is None or self.group.size() == 1:
            return
        for module in self.first.model.modules():
            if isinstance(module, nn.SyncBatchNorm) or is_fully_sharded(module):
                why = f"runs passes of one rank alone, and {type(module).__name__} exchanges in its forward pass"
                fix = "pass Controller(max_batch_size=[...]), one number per rank, instead"
                raise UsageError(f"controller.find_limits() {why}: {fix}")

    def find(self, step_fn: Callable[[Any], Any], example: Any, bounds: Bounds, *, margin: float) -> Ints:
        """`Controller.find_limits`, after `check`: caps (W,)."""
        search = LimitSearch(self._models, group=self._group(), gauge=self._gauge)
        return search.find(step_fn, example, bounds, margin=margin)

    def close(self) -> list[dist.ProcessGroup]:
        """Let go of the group that all this talked on, and return it."""
        group, self._talk = self._talk, None
        return [] if group is None else group.release()

    def _group(self) -> ControlGroup | None:
        if self._talk is None and self.group is not None:
            self._talk = open_another(self.group, self._ranks)
        return self._talk

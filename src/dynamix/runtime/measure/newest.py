"""Values of a device that have come to the host by themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Newest:
    """The newest values of a device that are on the host, for which nobody waits; with what is to be known of them.

    From a CUDA device one copy is under way at a time; the values of a CPU are here at once.

    here   both; before any have arrived, what is to be known then
    """

    here: tuple[list[float], Any]
    _under_way: tuple[Tensor, torch.cuda.Event, Any] | None = field(default=None, init=False)

    def send(self, values: list[Tensor], about: Any) -> None:
        """Take what has arrived. If nothing is under way then, `values`, 0-dim, are the newest once they are there."""
        if self._under_way is not None and self._under_way[1].query():
            host, _, of_host = self._under_way
            self.here, self._under_way = (host.tolist(), of_host), None
        if not values or self._under_way is not None:
            return
        flat = torch.stack(values)
        if flat.device.type == "cpu":
            self.here = flat.tolist(), about
            return
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        host.copy_(flat, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._under_way = host, event, about

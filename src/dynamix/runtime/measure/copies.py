"""Values of a device on their way to the host, for which nobody waits."""

from typing import Any

import torch
from torch import Tensor


class Newest:
    """The newest values that are on the host, with what is to be known of them: `here`.

    From a CUDA device one copy is under way at a time; the values of a CPU are here at once.

    of_none   what is to be known before any have arrived
    """

    def __init__(self, of_none: Any) -> None:
        self.here: tuple[list[float], Any] = [], of_none
        self._under_way: tuple[Tensor, torch.cuda.Event, Any] | None = None

    def idle(self) -> bool:
        """Take what has arrived. Whether values can be sent: nothing is under way."""
        if self._under_way is not None and self._under_way[1].query():
            host, _, about = self._under_way
            self.here, self._under_way = (host.tolist(), about), None
        return self._under_way is None

    def send(self, values: Tensor, about: Any) -> None:
        """Let `values` (n,) be the newest, once they are on the host."""
        if values.device.type == "cpu":
            self.here = values.tolist(), about
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._under_way = host, event, about

"""Values of a device on their way to the host, for which nobody waits."""

from itertools import islice
from typing import Any

import torch
from torch import Tensor


class Copy:
    """One copy. `values` are on a CUDA device, of shape (n,)."""

    def __init__(self, values: Tensor) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self) -> list[float] | None:
        """The values; None if they are still on their way."""
        return self._host.tolist() if self._event.query() else None


class Statistics:
    """Series of a window by name, each of single values, and what is to be known of that window besides.

    They are on a CUDA device. The newest that have arrived may be of the window before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._under_way: tuple[Copy, dict[str, int], dict[str, float]] | None = None
        self._here: tuple[dict[str, list[float]], dict[str, float]] = {}, {}

    def newest(
        self, series: dict[str, list[Any]], of_window: dict[str, float]
    ) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Send these, of the window that closes, and return the newest that are here."""
        if self._under_way is not None:
            copy, lengths, sent_with = self._under_way
            if (values := copy.arrived()) is not None:
                each = iter(values)
                self._here = {name: list(islice(each, length)) for name, length in lengths.items()}, sent_with
                self._under_way = None
        if self._under_way is None and series:
            all_of = [value for values in series.values() for value in values]
            flat = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self._device) for v in all_of])
            self._under_way = Copy(flat), {name: len(of) for name, of in series.items()}, of_window
        return self._here

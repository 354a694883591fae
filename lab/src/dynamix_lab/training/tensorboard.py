"""Scalars of a training for TensorBoard, where it is installed."""

import importlib.util
from pathlib import Path
from typing import Any


class TensorBoard:
    """Scalars by round, written to `folder`; None, or no `tensorboard` package, writes nothing.

    >>> TensorBoard(None).add("loss", 0.5, 1)
    """

    def __init__(self, folder: str | Path | None) -> None:
        self.writer: Any = None
        if folder is not None and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder))

    def add(self, name: str, value: float, at: int) -> None:
        """One point."""
        if self.writer is not None:
            self.writer.add_scalar(name, value, at)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

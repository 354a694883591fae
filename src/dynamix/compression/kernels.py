"""Selects the kernels for a tensor: numba on the CPU if numba is installed, else torch (also on CUDA)."""

import functools
import importlib.util
from types import ModuleType

from torch import Tensor


@functools.cache
def available() -> bool:
    """Whether numba is installed (`pip install '.[compression]'`)."""
    return importlib.util.find_spec("numba") is not None


def compiled_for(tensor: Tensor) -> ModuleType | None:
    """`dynamix.compression.compiled` if it can serve `tensor`, else None: then the torch reference runs."""
    if tensor.device.type != "cpu" or not available():
        return None
    from dynamix.compression import compiled

    return compiled

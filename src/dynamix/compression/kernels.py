"""Which kernels serve a tensor: the numba ones on the CPU where numba is installed, else torch (also on CUDA)."""

import functools
import importlib.util
import os
from types import ModuleType

from torch import Tensor

TRITON = "DYNAMIX_TRITON"  # set to 1: experimental kernels on CUDA


@functools.cache
def available() -> bool:
    """Whether numba is installed (`pip install dynamix-train[compression]`)."""
    return importlib.util.find_spec("numba") is not None


def compiled_for(tensor: Tensor) -> ModuleType | None:
    """`dynamix.compression.compiled` when it can serve `tensor`, else None: then the torch reference runs."""
    if tensor.device.type != "cpu" or not available():
        return None
    from dynamix.compression import compiled

    return compiled


def fast_for(tensor: Tensor) -> ModuleType | None:
    """As `compiled_for`, for what `dynamix.compression.triton_kernels` has, too: that one on CUDA where it is asked
    for and triton is installed.
    """
    if not tensor.is_cuda:
        return compiled_for(tensor)
    if os.environ.get(TRITON) != "1" or importlib.util.find_spec("triton") is None:
        return None
    from dynamix.compression import triton_kernels

    return triton_kernels

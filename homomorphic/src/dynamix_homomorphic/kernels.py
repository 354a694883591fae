"""Chooses the kernels for a tensor: numba on the CPU if it is installed, else torch (also on CUDA)."""

from types import ModuleType

from torch import Tensor

from dynamix.compression import kernels


def compiled_for(tensor: Tensor) -> ModuleType | None:
    """`dynamix_homomorphic.compiled` if it supports `tensor`, else None: then use the torch reference."""
    if tensor.device.type != "cpu" or not kernels.available():
        return None
    from dynamix_homomorphic import compiled

    return compiled

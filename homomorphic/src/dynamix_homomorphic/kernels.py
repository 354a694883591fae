"""Which kernels serve a tensor: the numba ones on the CPU where numba is installed, else torch (also on CUDA)."""

from types import ModuleType

from torch import Tensor

from dynamix.compression import kernels


def compiled_for(tensor: Tensor) -> ModuleType | None:
    """`dynamix_homomorphic.compiled` when it can serve `tensor`, else None: then the torch reference runs."""
    if tensor.device.type != "cpu" or not kernels.available():
        return None
    from dynamix_homomorphic import compiled

    return compiled

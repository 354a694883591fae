"""What every rank would import for itself, a second or two each: optimizers import torch._dynamo, compression numba.

It is frozen then, because a collection of garbage would copy all of it into every rank.
"""

# ruff: noqa: F401
import contextlib
import gc

import numpy.random
import pytest
import torch._dynamo
import torch.distributed
import torch.nn.parallel
import torch.utils.data

import dynamix.policies.learned.policy
import dynamix.runtime.controller
import tests.ranks

with contextlib.suppress(ImportError):
    import dynamix_homomorphic.compiled

gc.collect()
gc.freeze()

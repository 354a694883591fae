"""Lossless gradient compression: ranks exchange sparse gradients as index and values.

    state = dynamix.compression.CompressionState("auto", model=net)
    model.register_comm_hook(state, dynamix.compression.compression_hook)

Means equal those of a dense all-reduce up to the order of additions. dynamix-homomorphic adds ways in fixed point, and
sums computed in the network; it registers them (see `dynamix.compression.ways`).
"""

from typing import Any

from dynamix.compression.bucket import BucketExchange
from dynamix.compression.built_in import register
from dynamix.compression.checks import Statistics
from dynamix.compression.hooks import CompressionState, compression_hook
from dynamix.compression.layout import Layout
from dynamix.compression.settings import ExchangeSettings
from dynamix.compression.ways import include
from dynamix.compression.wire import GroupWire, LocalWire, Wire
from dynamix.removed import MODULES, message

__all__ = [
    "BucketExchange",
    "CompressionState",
    "ExchangeSettings",
    "GroupWire",
    "Layout",
    "LocalWire",
    "Statistics",
    "Wire",
    "compression_hook",
]

include(register)  # before the first use of a way

_MOVED = ("Aggregator", "AggregatorWire", "ErrorFeedback", "LossyState", "lossy_hook", "lossy_topk_hook")


def __getattr__(name: str) -> Any:
    fix = MODULES.get(f"dynamix.compression.{name}")
    if name in _MOVED:
        fix = f"from dynamix_homomorphic import {name} (pip install ./homomorphic, in dynamix's source tree)"
    if fix is not None:
        raise ImportError(f"dynamix.compression.{name}: {message(fix)}", name=f"dynamix.compression.{name}")
    raise AttributeError(f"module 'dynamix.compression' has no attribute {name!r}")

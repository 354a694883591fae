"""Lossless homomorphic gradient compression: sparse gradients cross ranks as index and values, or as sketches.

    state = dynamix.compression.CompressionState("auto", model=net)
    model.register_comm_hook(state, dynamix.compression.compression_hook)

Lossless means: the integer sum that is decoded equals the integer sum of the inputs, which were quantised once to 25 to
30 bits below their block's largest magnitude. What cannot be verified is reduced densely and counted. With
`aggregator="host:port"` a process in the network forms the sums (`dynamix aggregator`).
"""

from dynamix.compression.aggregator.client import Aggregator
from dynamix.compression.aggregator.wire import AggregatorWire
from dynamix.compression.bucket import BucketExchange
from dynamix.compression.checks import Statistics
from dynamix.compression.hooks import CompressionState, compression_hook
from dynamix.compression.layout import Layout
from dynamix.compression.sketch import ExchangeSettings
from dynamix.compression.wire import GroupWire, LocalWire, Wire

__all__ = [
    "Aggregator",
    "AggregatorWire",
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

"""Homomorphic gradient compression for dynamix: sums of sketches and of indexed integers, which need not be decoded.

    dynamix.compression.CompressionState("compaction", model=net)      # or "lhc", "lhc-one-phase"; "auto" tries them
    dynamix.compression.CompressionState(aggregator="host:port")       # sums are formed by `dynamix aggregator`
    dynamix_homomorphic.LossyState(net, keep=0.01, ...)                # LOSSY: only the largest elements are sent

Lossless means: the integer sum that is decoded equals the integer sum of the inputs, which were quantised once to 25 to
30 bits below their block's largest magnitude. A bucket that cannot be verified is reduced densely and counted.

Names are imported on first use, so that the command line need not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamix_homomorphic.aggregator.client import Aggregator
    from dynamix_homomorphic.aggregator.wire import AggregatorWire
    from dynamix_homomorphic.lossy import ErrorFeedback, LossyState, lossy_hook, lossy_topk_hook

__version__ = "0.3.0.dev0"

__all__ = ["Aggregator", "AggregatorWire", "ErrorFeedback", "LossyState", "lossy_hook", "lossy_topk_hook"]

_HOMES = {"Aggregator": "aggregator.client", "AggregatorWire": "aggregator.wire"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"dynamix_homomorphic.{_HOMES.get(name, 'lossy')}"), name)
    raise AttributeError(f"module 'dynamix_homomorphic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

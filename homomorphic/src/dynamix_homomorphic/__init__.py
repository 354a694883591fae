"""Homomorphic gradient compression for dynamix: sketches and indexed integers are summed without decoding them first.

    dynamix.compression.CompressionState("compaction", model=net)      # or "lhc", "lhc-one-phase"; "auto" tries them
    dynamix.compression.CompressionState(aggregator="host:port")       # sums are formed by `dynamix aggregator`
    dynamix_homomorphic.LossyState(net, keep=0.01, ...)                # LOSSY: only the largest elements are sent

Lossless means: the decoded integer sum equals the integer sum of the inputs. Inputs are quantised once, to 25 to 30
bits below the largest magnitude of their block. A bucket that cannot be verified is reduced densely and counted.

Names are imported on first use, so that the command line does not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamix_homomorphic.aggregator.client import Aggregator
    from dynamix_homomorphic.aggregator.wire import AggregatorWire
    from dynamix_homomorphic.lossy import ErrorFeedback, LossyState, lossy_hook, lossy_topk_hook

__version__ = "0.3.0"

__all__ = ["Aggregator", "AggregatorWire", "ErrorFeedback", "LossyState", "lossy_hook", "lossy_topk_hook"]

_HOMES = {"Aggregator": "aggregator.client", "AggregatorWire": "aggregator.wire"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"dynamix_homomorphic.{_HOMES.get(name, 'lossy')}"), name)
    raise AttributeError(f"module 'dynamix_homomorphic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

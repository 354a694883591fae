"""The global sample stream: every sample once, unequal shares, one order whatever the split."""

from dynamix.data.allocations import Allocations
from dynamix.data.order import StepPlan
from dynamix.data.sampler import BatchSampler
from dynamix.data.stream import Stream

__all__ = ["Allocations", "BatchSampler", "StepPlan", "Stream"]

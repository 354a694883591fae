"""The global sample stream: every sample once an epoch, unequal shares, one order for every split."""

from dynamix.data.allocations import Allocations
from dynamix.data.plan import Piece, Round, StepPlan
from dynamix.data.sampler import BatchSampler
from dynamix.data.stream import Stream

__all__ = ["Allocations", "BatchSampler", "Piece", "Round", "StepPlan", "Stream"]

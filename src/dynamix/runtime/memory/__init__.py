"""How large a batch fits: every rank's limit, found before training."""

from dynamix.runtime.memory.exit_advice import ExitNote
from dynamix.runtime.memory.limits import Memory, within

__all__ = ["ExitNote", "Memory", "within"]

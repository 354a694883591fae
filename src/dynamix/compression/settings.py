"""What all ranks of an exchange must hold alike."""

from __future__ import annotations

from dataclasses import dataclass

from dynamix.errors import ConfigError

MAX_LANES = 1024


@dataclass(frozen=True)
class ExchangeSettings:
    """What all ranks must hold alike. Only the ways of dynamix-homomorphic read it.

    seed      of the hash functions
    lanes     neighbours hashed as one block in LHC, a power of two up to 1024; 1 hashes each item by itself
    ratio     counters per item in LHC; None: 1.4, and 1.5 below 10,000 items
    """

    seed: int = 0
    lanes: int = 1
    ratio: float | None = None

    def __post_init__(self) -> None:
        if self.ratio is not None and not 0.5 <= self.ratio <= 16:
            raise ConfigError("ratio", self.ratio, "0.5 to 16", "leave it out: below 1.3 decoding mostly fails")
        check_lanes(self.lanes)


def check_lanes(lanes: int) -> None:
    """Raise `ConfigError` unless `lanes` neighbours can be hashed as one block."""
    if not 1 <= lanes <= MAX_LANES or lanes & (lanes - 1):
        raise ConfigError("lanes", lanes, f"powers of two from 1 to {MAX_LANES}", "1 hashes every item by itself")

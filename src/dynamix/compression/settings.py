"""Settings of an exchange that must be equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from dynamix.errors import ConfigError


@dataclass(frozen=True)
class ExchangeSettings:
    """Settings that must be equal on all ranks. Only the ways of dynamix-homomorphic read it.

    seed      of the hash functions
    ratio     counters per item in LHC; None: 1.4, and 1.5 below 10,000 items
    """

    seed: int = 0
    ratio: float | None = None

    def __post_init__(self) -> None:
        if self.ratio is not None and not 0.5 <= self.ratio <= 16:
            raise ConfigError("ratio", self.ratio, "0.5 to 16", "leave it out: below 1.3 decoding mostly fails")

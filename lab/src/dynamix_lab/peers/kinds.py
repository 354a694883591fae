"""Which peers there are, and the settings each runs with. Reasons: docs/design/peers.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynamix.errors import ConfigError

KINDS = ("ddp", "adaptdl", "hivemind", "hivemind-local")
BASE_BATCH = 512  # what the workload's learning rate is for
PEERS = (
    "ddp",
    "ddp-256",
    "ddp-128",
    "adaptdl",
    "adaptdl-256",
    "adaptdl-128",
    "hivemind",
    "hivemind-256",
    "hivemind-local",
)
SHARE_BOUNDS = (8, 512)
# Of its default (averaged gradients): small parts, so that a slow rank's last one does not hold the others up.
PART = 32
# Of local updates: parameters are averaged whenever all ranks together have used so many samples.
AVERAGE_EVERY = 32 * BASE_BATCH


def split_name(name: str) -> tuple[str, int]:
    """What runs, and the global batch it begins with; of dynamix's own policies too.

    >>> split_name("dynamix-128"), split_name("hivemind-local")
    (('dynamix', 128), ('hivemind-local', 512))
    """
    kind, _, number = name.rpartition("-")
    return (kind, int(number)) if kind and number.isdecimal() else (name, BASE_BATCH)


@dataclass(frozen=True, slots=True)
class Peer:
    """A kind of peer with a global batch: what `ddp-256` or `hivemind-local` stand for.

    >>> Peer.of("adaptdl-256"), Peer.of("hivemind-local").name
    (Peer(kind='adaptdl', total=256), 'hivemind-local')
    """

    kind: str
    total: int = BASE_BATCH

    @classmethod
    def of(cls, name: str) -> Peer:
        """Raises `ConfigError` for a name that is none."""
        kind, total = split_name(name)
        if kind not in KINDS or not 4 * SHARE_BOUNDS[0] <= total <= 4 * SHARE_BOUNDS[1]:
            allowed = f"{', '.join(KINDS)}, each also with a global batch of 32 to 2048, as in ddp-256"
            raise ConfigError("peer", name, allowed, "correct the name")
        return cls(kind, total)

    @property
    def name(self) -> str:
        return self.kind if self.total == BASE_BATCH else f"{self.kind}-{self.total}"

    @property
    def environment(self) -> str:
        """Which environment it runs in."""
        return self.kind.partition("-")[0]

    def settings(self, workers: int) -> dict[str, Any]:
        """What its job is told beyond the task."""
        if self.kind == "adaptdl":
            return {"local_batch_bounds": list(SHARE_BOUNDS)}
        if self.environment == "hivemind":
            local = self.kind == "hivemind-local"
            return {
                "local_updates": local,
                "batch_size_per_step": self.total // workers if local else PART,
                "target_batch_size": AVERAGE_EVERY * self.total // BASE_BATCH if local else self.total,
                "matchmaking_s": 1.0,
                "request_timeout_s": 0.5,
                "averaging_timeout_s": 5.0,
                "average_state_every": 1 if local else 10,
                "refresh_s": 0.1,
            }
        return {}

"""The kinds of peers, and their settings. docs/design/peers.md explains them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from dynamix.errors import ConfigError
from dynamix_lab.emulator.scenario import Device, Scenario

KINDS = ("ddp", "adaptdl", "hivemind", "hivemind-local", "torchft-local", "torchft-diloco")
MEET_SELDOM = ("hivemind-local", "torchft-local", "torchft-diloco")  # they average parameters after several steps
BASE_BATCH = 512  # the global batch for which the workload's learning rate is meant
BASE_EVERY = 32
PEERS = (
    *("ddp", "ddp-256", "ddp-128", "adaptdl", "adaptdl-256", "adaptdl-128", "hivemind", "hivemind-256"),
    *("hivemind-local", "torchft-local", "torchft-local-every8", "torchft-diloco"),
)
SHARE_BOUNDS = (8, 512)
# For Hivemind's default (averaged gradients): small parts, so that a slow rank's last one does not delay the others.
PART, LEAST_PART = 32, 8
# DiLoCo's outer optimizer, as in its paper (arXiv 2311.08105) and in torchft's example.
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
# Twelve trials for every kind: batch and learning rate, or these and the steps between averagings.
_TOTALS, _RATES, _EVERY = (512, 256, 128), (0.025, 0.05, 0.1, 0.2), (8, 32)
_NAME = re.compile(r"(?P<kind>.+?)(-(?P<total>\d+))?(-lr(?P<rate>\d*\.?\d+))?(-every(?P<every>\d+))?")


def split_name(name: str) -> tuple[str, int]:
    """What a name runs, and its initial global batch; also for dynamix's own policies.

    >>> split_name("dynamix-128"), split_name("hivemind-local"), split_name("torchft-local-256-lr0.1-every8")
    (('dynamix', 128), ('hivemind-local', 512), ('torchft-local', 256))
    """
    found = _NAME.fullmatch(name)
    return (found["kind"], int(found["total"] or BASE_BATCH)) if found else (name, BASE_BATCH)


def rate_of(name: str) -> float | None:
    """The learning rate in a name; None: the workload's.

    >>> rate_of("dynamix-256-lr0.2"), rate_of("dynamix-256")
    (0.2, None)
    """
    found = _NAME.fullmatch(name)
    return float(found["rate"]) if found and found["rate"] else None


def own_name(name: str) -> str:
    """The canonical name of a policy of dynamix with its initial settings.

    >>> own_name("dynamix-512-lr0.20")
    'dynamix-lr0.2'
    """
    (policy, total), rate = split_name(name), rate_of(name)
    return "-".join([policy, *([str(total)] if total != BASE_BATCH else []), *([f"lr{rate:g}"] if rate else [])])


def part_of(device: Device | None) -> int:
    """Samples of a part: enough to keep a device at four fifths of its peak rate; `PART` without a device.

    >>> part_of(Device(fixed_ms=20.0, per_sample_ms=1.25))
    64
    """
    if device is None or not device.per_sample_ms:
        return PART
    return max(LEAST_PART, math.ceil(4 * device.fixed_ms / device.per_sample_ms))


def trials(kind: str) -> list[str]:
    """The names of a sweep, equally many for every kind. Raises `ConfigError` for an unknown kind.

    >>> len(trials("ddp")), trials("torchft-local")[:2]
    (12, ['torchft-local-lr0.025-every8', 'torchft-local-lr0.025'])
    """
    if Peer.of(kind).kind != kind:
        raise ConfigError("peer", kind, ", ".join(KINDS), "name kinds only: a sweep tries batches and rates itself")
    if kind in MEET_SELDOM:
        return [Peer(kind, b, lr, e).name for b in (_TOTALS[0], _TOTALS[2]) for lr in _RATES[:3] for e in _EVERY]
    return [Peer(kind, b, lr).name for b in _TOTALS for lr in _RATES]


@dataclass(frozen=True, slots=True)
class Peer:
    """A kind of peer with its initial settings: the meaning of `ddp-256` or `torchft-local-lr0.1-every8`.

    total           global batch, samples
    learning_rate   None: the workload's
    every           for kinds with local steps: a rank's steps (their mean, if they differ) between averagings

    >>> Peer.of("adaptdl-256").total, Peer.of("torchft-local-every8").every, Peer.of("hivemind-local").name
    (256, 8, 'hivemind-local')
    """

    kind: str
    total: int = BASE_BATCH
    learning_rate: float | None = None
    every: int = BASE_EVERY

    @classmethod
    def of(cls, name: str) -> Peer:
        """Parse a name. Raises `ConfigError` for an unknown one."""
        parts = _NAME.fullmatch(name)
        kind, total = split_name(name)
        rate, every = (parts["rate"], parts["every"]) if parts else (None, None)
        known = kind in KINDS and (every is None or kind in MEET_SELDOM)
        positive = all(value is None or float(value) > 0 for value in (rate, every))
        if not (known and positive and 4 * SHARE_BOUNDS[0] <= total <= 4 * SHARE_BOUNDS[1]):
            allowed = (
                f"{', '.join(KINDS)}, each also with a global batch of 32 to 2048 and a learning rate, as in "
                f"ddp-256-lr0.1; {', '.join(MEET_SELDOM)} also with steps between meetings, as in torchft-local-every8"
            )
            raise ConfigError("peer", name, allowed, "correct the name")
        return cls(kind, total, float(rate) if rate else None, int(every) if every else BASE_EVERY)

    @property
    def name(self) -> str:
        parts = [self.kind]
        parts += [str(self.total)] if self.total != BASE_BATCH else []
        parts += [f"lr{self.learning_rate:g}"] if self.learning_rate is not None else []
        parts += [f"every{self.every}"] if self.every != BASE_EVERY else []
        return "-".join(parts)

    @property
    def environment(self) -> str:
        """The name of its environment."""
        return self.kind.partition("-")[0]

    def settings(self, scenario: Scenario) -> dict[str, Any]:
        """The settings of its job, in addition to the task."""
        if self.kind == "adaptdl":
            return {"local_batch_bounds": list(SHARE_BOUNDS)}
        if self.environment == "torchft":
            return {"sync_every": self.every, "outer": OUTER if self.kind == "torchft-diloco" else None}
        if self.environment == "hivemind":
            local, share = self.kind == "hivemind-local", self.total // scenario.workers
            return {
                "local_updates": local,
                "batch_size_per_step": share if local else min(share, part_of(scenario.device)),
                "target_batch_size": self.every * self.total if local else self.total,
                "matchmaking_s": 1.0,
                "request_timeout_s": 0.5,
                "averaging_timeout_s": 5.0,
                "average_state_every": 1 if local else 10,
                "refresh_s": 0.1,
            }
        return {}

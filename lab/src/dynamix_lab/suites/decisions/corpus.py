"""What the decision corpus asks: trajectories of windows for every policy, from seeds alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
POLICIES = (
    *(
        "static",
        "static:64",
        "dbs",
        "lb_bsp",
        "noise_scale",
        "pollux",
        "cannikin",
        "goodput",
        "dynamix",
        "dynamix-paper",
    ),
    *("stigmergic", "guarded:dynamix", "guarded:dynamix-paper", "guarded:lb_bsp", "guarded:stigmergic"),
    *("learning:dynamix", "learning:dynamix-paper", "guarded:learning:dynamix"),
)
# Guards that decide sooner, learners that move further, and policies that fail.
UNUSUAL = (
    *("guarded:erratic:raises", "quick:erratic:raises", "quick:erratic:nonsense", "quick:erratic:backwards"),
    *("quick:erratic:greedy", "quick:erratic:timid", "quick:erratic:even", "quick:pollux", "quick:dynamix"),
    *("quick:failing:dynamix", "keen:dynamix", "keen:dynamix-paper", "quick:keen:dynamix"),
)
QUICK = {"margin": 0.005, "patience": 0.05, "veto": 0.4, "verify": 6, "rest": 2, "longest": 6}
KEEN = {"learning_rate": 0.01, "kl_limit": 0.05, "every_s": 0.5, "warm_up": 3, "memory": 12}
# (length of a trajectory, leading shape, W); trajectories of several parts go on with another number of workers.
SHAPES: tuple[tuple[tuple[int, tuple[int, ...], int], ...], ...] = (
    ((30, (), 1),),
    ((40, (), 2),),
    ((30, (), 3),),
    ((50, (), 4),),
    ((40, (), 8),),
    ((30, (), 32),),
    ((30, (), 100),),
    ((30, (), 256),),
    ((30, (), 1024),),
    ((40, (3,), 4),),
    ((30, (2,), 8),),
    ((30, (2,), 32),),
    ((30, (3,), 1),),
    ((15, (), 4), (12, (), 6), (12, (), 3), (12, (), 4)),
    ((12, (2,), 4), (12, (3,), 4), (12, (), 8), (12, (), 2)),
)
LONG: tuple[tuple[tuple[int, tuple[int, ...], int], ...], ...] = (((100, (4,), 4),), ((80, (), 8),), ((80, (), 2),))
PER_WORKER = (
    "compute",
    "compute_std",
    "wait",
    "communication",
    "data",
    "loss",
    "loss_std",
    "loss_change",
    "accuracy",
    "accuracy_std",
    "accuracy_change",
    "gradient_norm_sq",
    "bytes_per_s",
    "retransmits_per_s",
    "rtt_s",
    "cpu",
    "memory",
    "device",
)
PER_CLUSTER = ("steps", "age", "step", "base_batch", "global_norm_sq", "noise", "signal")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One policy's decisions in a row.

    parts         (windows, leading shape, W) one after the other; the policy keeps its state
    share         samples per micro-batch of an even share; `low` in samples, `high` in shares
    total         "wide", "narrow" (half to twice the base batch) or "fixed"
    noise         "known", "unknown", "lost" (the signal is now and then lost in noise) or "mixed"
    offset        mean fixed seconds of a worker over those of its share
    gaps, upsets  chance per window that something is not measured; that the allocation is late, forced, or told twice
    absent        fields that are never measured
    jumps         slowdowns per ten windows
    reload        the state is saved and loaded into a fresh policy after so many windows; 0: never
    """

    policy: str
    seed: int
    parts: tuple[tuple[int, tuple[int, ...], int], ...]
    share: int
    low: int
    high: float
    total: str
    quantum: int
    max_change: float
    micro_batches: int
    noise: str
    offset: float
    jitter: float
    gaps: float
    upsets: float
    absent: tuple[str, ...]
    jumps: float
    cliffs: bool
    steps: tuple[int, int]
    reload: int

    @property
    def windows(self) -> int:
        """Decisions in it."""
        return sum(windows for windows, _, _ in self.parts)

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """Shape of each answer in turn."""
        for windows, lead, workers in self.parts:
            yield from [(*lead, workers)] * windows

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Trajectory:
        """The inverse of `dataclasses.asdict`, after JSON."""
        parts = tuple((windows, tuple(lead), workers) for windows, lead, workers in plain["parts"])
        return cls(**{**plain, "parts": parts, "absent": tuple(plain["absent"]), "steps": tuple(plain["steps"])})


def plan(seed: int = 17) -> list[Trajectory]:
    """All trajectories of the corpus."""
    made: list[Trajectory] = []
    for name in POLICIES:
        long = 0 if name in ("static", "static:64", "dbs") else 1 if "learning:" in name else 3  # learners take longest
        shapes = (*SHAPES, *LONG[:long])
        made += [_trajectory(name, parts, [seed, len(made) + i]) for i, parts in enumerate(shapes)]
    few = (SHAPES[1], SHAPES[6], SHAPES[13], SHAPES[14], *LONG)
    for name in UNUSUAL:
        shapes = few[:-1] if "keen:" in name else few
        made += [_trajectory(name, parts, [seed, 1000 + len(made) + i]) for i, parts in enumerate(shapes)]
    return made


def _trajectory(policy: str, parts: tuple[tuple[int, tuple[int, ...], int], ...], key: list[int]) -> Trajectory:
    rng = generator(*key, 0)

    def one(*choices: Any) -> Any:
        return choices[int(rng.random() * len(choices))]

    quantum = one(1, 1, 1, 8, 32)
    share = one(16, 64, 96, 128, 512) if quantum < 32 else one(64, 128, 512)
    large = parts[0][2] >= 256  # sizes of many workers fill the file
    return Trajectory(
        policy=policy,
        seed=int(rng.random() * 2**31),
        parts=parts,
        share=min(share, 96) if large else share,
        low=one(1, 1, 8, 0),
        high=one(2.0, 4.0, 8.0),
        total=one("wide", "wide", "narrow", "fixed"),
        quantum=quantum,
        max_change=one(np.inf, np.inf, 2.0),
        micro_batches=one(1, 1, 4),
        noise=one("known", "known", "mixed", "lost", "unknown"),
        offset=one(0.0, 0.2, 1.0, 4.0),
        jitter=one(0.003, 0.02, 0.08),
        gaps=one(0.0, 0.05, 0.3),
        upsets=one(0.0, 0.1, 0.3),
        absent=one(
            (),
            (),
            (),
            ("communication",),
            ("wait", "compute_std"),
            ("data", "bytes_per_s", "rtt_s"),
            ("base_batch", "steps"),
        ),
        jumps=one(0.0, 1.0, 4.0),
        cliffs=one(False, True),
        steps=one((5, 5), (10, 10), (1, 4), (3, 40)),
        reload=one(0, 0, 7, 13),
    )


def generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(key))


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Nearly normal numbers, by a way that no release of NumPy changes."""
    return np.asarray((rng.random((4, *shape)).sum(0) - 2.0) * np.sqrt(3.0))

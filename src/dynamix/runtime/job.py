"""The facts of a job that every rank holds: what its windows are measured by, and what its allocations must satisfy."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from dynamix.errors import ConfigError
from dynamix.runtime.agreement import Kind, Message
from dynamix.runtime.noise import NoiseScale
from dynamix.window import Bounds, Ints


@dataclass(frozen=True, slots=True)
class Closing:
    """The window being decided on, as every rank knows it."""

    window_index: int
    sizes: Ints  # the allocation in force while it was open
    consumed: int  # micro-steps done when it closed
    issued: int  # micro-steps this rank's sampler had issued by then
    age: float  # optimizer steps since `sizes` came into force
    step: int  # optimizer steps done
    samples: int


@dataclass
class JobFacts:
    """What every rank of a job holds; they change only at moments on which the ranks agree."""

    bounds: Bounds  # what batch sizes are kept within
    base_batch: int  # samples per optimizer step of all workers at the start (B0)
    accumulate: int = 1  # micro-batches per optimizer step
    slack: int = 0  # micro-steps that may still be issued under the old allocation after a window closed
    fixed: bool = False  # the global batch stays at `base_batch`
    # Smoothed over windows, where this rank learns of it: the one that decides, or all if each does.
    noise_scale: NoiseScale = field(default_factory=NoiseScale)
    closing: Closing = field(init=False)  # the newest window that closed

    def __post_init__(self) -> None:
        self.closing = Closing(0, self.bounds.low, 0, 0, 0.0, 0, 0)

    def limit_to(self, samples: int) -> None:
        """No global step may outgrow a data set: every step would be a tail, and no window would ever close."""
        bounds = self.bounds
        most = max(samples // self.accumulate // bounds.quantum * bounds.quantum, int(np.max(bounds.total_low)))
        self.bounds = dataclasses.replace(bounds, total_high=np.minimum(bounds.total_high, most))

    def facts(self, closing: Closing) -> dict[str, float]:
        """What a `Window` says of the job itself, by field."""
        own = {"micro_batches": self.accumulate, "base_batch": self.base_batch}
        return own | {"age": closing.age, "step": closing.step}

    def keep(self, kind: Kind) -> Message:
        """The message that changes nothing."""
        return self.message(kind, self.closing.consumed, self.closing.sizes)

    def change(self, sizes: Ints, issued: int) -> Message:
        """The message that puts `sizes` (W,) in force, `issued` being the most micro-steps that any rank had issued."""
        first_free = issued + self.slack
        return self.message(Kind.NEW, -(-first_free // self.accumulate) * self.accumulate, sizes)

    def message(self, kind: Kind, from_step: int, sizes: Ints) -> Message:
        """A message that carries this rank's noise scale."""
        return Message(kind, from_step, self.noise_scale.noise, self.noise_scale.signal, sizes)

    def resume(self, base_batch: int) -> None:
        """Go on as a job that began with `base_batch`. Raises `ConfigError` where a fixed one is out of bounds."""
        self.base_batch = base_batch
        if self.fixed:
            self.bounds = fixed_at(self.bounds, base_batch, self.accumulate)


def fixed_at(bounds: Bounds, global_batch: int, accumulate: int = 1) -> Bounds:
    """`bounds` that allow one global batch only, samples per optimizer step. Raises `ConfigError` if they cannot.

    >>> fixed = fixed_at(Bounds.of(2, 1, 64), 96)
    >>> int(fixed.total_low), int(fixed.total_high)
    (96, 96)
    """
    per_micro_step = global_batch // accumulate
    grid = bounds.quantum * accumulate
    least, most = int(bounds.low.sum()), int(bounds.high.sum())
    if global_batch % grid or not least <= per_micro_step <= most:
        allowed = f"{least * accumulate} to {most * accumulate} in steps of {grid}, by the workers' bounds"
        fix = "widen min_batch_size and max_batch_size, lower quantum, or use global_batch='adaptive'"
        raise ConfigError("global batch", global_batch, allowed, fix)
    total = np.asarray(per_micro_step, dtype=np.int64)
    return dataclasses.replace(bounds, total_low=total, total_high=total)

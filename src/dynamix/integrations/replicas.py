"""Shares of one global batch for replicas that come and go between rounds; each replica computes the same decision."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamix.data.computed_order import COMPUTED, LARGE, Order, order_of_epoch
from dynamix.data.cutting import next_group
from dynamix.data.order import require_known
from dynamix.data.plan import pieces_of
from dynamix.errors import ConfigError, UsageError
from dynamix.policies.protocol import boundary
from dynamix.projection import project
from dynamix.runtime.config import from_outside, policy_of
from dynamix.runtime.limits import check_counts, fixed_at
from dynamix.window import Bounds, Floats, Ints, Window

_UNKNOWN = -1.0  # samples of a replica that has not trained yet


class ReplicaShares:
    """Decides what a replica trains next if no process group holds all of them: fault-tolerant training.

    Every replica holds one, with the same arguments. In `meet` they exchange their samples and seconds; then each asks
    its own policy the same question. The global batch stays the same for any number of replicas. Samples from `deal`
    count as trained once `done` reports that they were committed. A failed round is dealt again, to the replicas
    present then. So each sample comes once an epoch, and all replicas hold the same state after a round that all
    committed. A replica that was absent loads it from another.

    samples      in the data set
    batch_size   samples of a round, all replicas together
    policy       as in `Controller`; it sees only computing times. It must decide by windows. DYNAMIX_POLICY wins
    interval     rounds between decisions. If replicas come or go, shares follow at once
    low, high    samples of a replica and round; None: no upper bound
    seed, shuffle   of the order of samples, as in `Controller.batch_sampler`
    device       on which replicas exchange these figures; "cuda" if they communicate through NCCL

    Raises `ConfigError` for a policy that gives all the same size or decides once an epoch, and for sizes below 1.

    >>> shares = ReplicaShares(10, 4, shuffle=False)
    >>> shares.meet(0, 1, average=lambda told: None)
    >>> shares.deal(), shares.weight
    ([0, 1, 2, 3], 1.0)
    >>> shares.done(committed=True), shares.position
    (True, 4)
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        policy: str = "lb_bsp",
        interval: int = 5,
        low: int = 1,
        high: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        device: str = "cpu",
    ) -> None:
        check_counts(samples=samples, batch_size=batch_size, interval=interval)
        self._name = from_outside({"policy": policy})["policy"]
        self._policy = policy_of(self._name)
        turns = getattr(self._policy, "alternates", False)
        if turns or getattr(self._policy, "even", False) or boundary(self._policy) == "epoch":
            raise ConfigError("policy", self._name, "one that moves shares between windows", "take lb_bsp or static")
        if batch_size > samples:
            raise ConfigError("batch_size", batch_size, f"1 to {samples}, the size of the data set", "lower it")
        self.samples, self.batch_size, self.interval = samples, batch_size, interval
        self.low, self.high, self.seed, self.shuffle = low, high or batch_size, seed, shuffle
        self.device = device
        self.epoch = self.position = self.rounds = 0
        self.sizes: Ints = np.zeros(0, dtype=np.int64)  # (W,) in force; empty before the first `meet`
        self.counts: Ints = self.sizes  # (W,) of the round that was dealt
        self.rank: int | None = None
        self.weight = 1.0  # of this replica's part in a plain mean over replicas
        self._seen: Floats = np.zeros((2, 0))  # samples and seconds (2, W) since the last decision
        self._dealt, self._own = 0, (_UNKNOWN, 0.0)
        self._began: float | None = None
        self._order_name = COMPUTED if samples >= LARGE else ""  # a loaded state keeps its order
        self._order: tuple[int, Order] | None = None
        self._kept = self._state()

    def meet(self, rank: int | None, workers: int, average: Callable[[Tensor], object]) -> None:
        """Call when all `workers` replicas are present; this one is number `rank`. Collective.

        average   makes a float64 tensor its mean over replicas, in place

        Raises `UsageError` for a replica that takes no part in the round.
        """
        if rank is None:
            raise UsageError("spare replicas get no samples: use torchft's WorldSizeMode.DYNAMIC")
        self._load(self._kept)
        told = torch.zeros(2, workers, dtype=torch.float64)
        told[:, rank] = torch.tensor(self._own, dtype=torch.float64)
        told = told.to(self.device)
        average(told)
        trained, seconds = told.cpu().numpy() * workers
        self.rank = rank
        weights = np.maximum(trained, 0.0)
        self.weight = float(weights[rank] * workers / weights.sum()) if weights.sum() else 1.0
        changed = workers != self.sizes.size or bool((trained < 0).any())
        if changed:
            self._policy, self._seen = policy_of(self._name), np.zeros((2, workers))
        self._seen = self._seen + np.stack([weights, np.where(weights > 0, seconds, 0.0)])
        if changed or self.rounds % self.interval == 0:
            self._decide(workers, even=changed)

    def deal(self, *, least: int = 0) -> list[int]:
        """Indices of the samples that this replica trains in the next round.

        least   at least this many, even from outside of the round: a pass with gradients of weight 0 needs some
        """
        if self.rank is None:
            raise UsageError("no replica has met another yet: start torchft's quorum before the first batch")
        left, caps = self.samples - self.position, np.full(self.sizes.size, self.high)
        lows = np.full(self.sizes.size, self.low)
        group = next_group(left, self.sizes, accumulate=1, low=lows, high=caps, first=self.position == 0)
        self.counts = group[0]
        self._dealt, mine = int(self.counts.sum()), int(self.counts[self.rank])
        self.weight = mine * self.sizes.size / self._dealt
        begin = self.position + int(self.counts[: self.rank].sum())
        self._began = time.perf_counter()
        taken = max(mine, least)
        first = min(begin, self.samples - taken)  # samples outside of the round may be any
        picked: list[int] = self._epoch_order()[first : first + taken].tolist()
        return picked

    def pieces(self, micro_batch: int) -> list[list[int]]:
        """The samples of `deal`, in lists of at most `micro_batch`; empty before the first `meet`."""
        share = [] if self.rank is None else self.deal()
        sizes = pieces_of(len(share), micro_batch) if share else []
        ends = np.cumsum(sizes).tolist()
        return [share[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def computed(self) -> None:
        """Call when this replica has finished its samples and is about to wait. Synchronises an accelerator."""
        if self._began is None or self.rank is None:
            return
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._own = float(self.counts[self.rank]), time.perf_counter() - self._began
        self._began = None

    def weigh_(self, tensor: Tensor) -> Tensor:
        """Scale `tensor`, in place, so that a plain mean over replicas becomes a mean over samples."""
        self.computed()
        return tensor.mul_(self.weight) if self.weight else tensor.zero_()  # a pass without samples may give NaN

    def done(self, *, committed: bool) -> bool:
        """End the round. Its samples count as trained if it was committed; otherwise they are dealt again."""
        if committed:
            self._commit()
        return committed

    def _commit(self) -> None:
        self.position, self.rounds = self.position + self._dealt, self.rounds + 1
        self._dealt = 0
        if self.position >= self.samples:
            self.epoch, self.position = self.epoch + 1, 0
        self._kept = self._state()

    def state_dict(self) -> dict[str, Any]:
        """The committed samples, and the number in the current round: the same on all replicas."""
        return copy.deepcopy(self._kept) | {"dealt": self._dealt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as the replica that gave `state`, from now on."""
        require_known(state.get("order", ""))
        self._load(state)
        self._dealt = state["dealt"]
        self._kept = self._state()

    def _decide(self, workers: int, *, even: bool) -> None:
        bounds = fixed_at(Bounds.of(workers, self.low, self.high), self.batch_size)
        sizes = project(np.ones(workers), bounds, total=self.batch_size) if even else self.sizes
        if (self._seen[0] > 0).any():
            with np.errstate(divide="ignore", invalid="ignore"):
                per_sample = np.where(self._seen[0] > 0, self._seen[1] / self._seen[0], np.nan)
            window = Window.of(sizes, compute=per_sample * sizes, steps=self.interval, step=self.rounds)
            sizes = project(self._policy.decide(window, bounds), bounds)
        self.sizes, self._seen = sizes, np.zeros((2, workers))

    def _epoch_order(self) -> Order:
        if self._order is None or self._order[0] != self.epoch:
            seed, computed = self.seed if self.shuffle else None, self._order_name == COMPUTED
            self._order = self.epoch, order_of_epoch(self.epoch, self.samples, seed, computed=computed)
        return self._order[1]

    def _state(self) -> dict[str, Any]:
        where = {"epoch": self.epoch, "position": self.position, "rounds": self.rounds, "order": self._order_name}
        decided = {"sizes": self.sizes.tolist(), "seen": self._seen.tolist(), "policy": self._policy.state_dict()}
        return where | copy.deepcopy(decided)

    def _load(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self.rounds = state["epoch"], state["position"], state["rounds"]
        if (order := state.get("order", "")) != self._order_name:  # a state of 0.2 has the drawn order
            self._order_name, self._order = order, None
        self.sizes = np.asarray(state["sizes"], dtype=np.int64)
        self._seen = np.asarray(state["seen"], dtype=np.float64).reshape(2, -1)
        self._policy.load_state_dict(copy.deepcopy(state["policy"]))

"""torchft: unequal shares, weighted means and local steps for replica groups of one process (docs/clusters.md)."""

from typing import Any

import torch

from dynamix.errors import UsageError
from dynamix.integrations.replicas import ReplicaShares


class WeightedManager:
    """A `torchft.Manager(use_async_quorum=False)` whose means are by samples; `shares` deals the samples."""

    def __init__(self, manager: Any, shares: ReplicaShares) -> None:
        if manager._use_async_quorum:
            raise UsageError("replicas must be whole before samples are dealt: use Manager(use_async_quorum=False)")
        self._manager, self.shares = manager, shares
        manager.register_state_dict_fn("dynamix", shares.load_state_dict, shares.state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def start_quorum(self, *args: Any, **options: Any) -> None:
        self.shares.computed()
        self._manager.start_quorum(*args, **options)
        rank, replicas = self._manager.participating_rank(), self._manager.num_participants()
        self.shares.meet(rank, replicas, lambda told: self._manager.allreduce(told).wait())

    def allreduce(self, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        return _Work(self._manager, self._manager.allreduce(self.shares.weigh_(tensor), *args, **options), tensor)

    def should_commit(self, *args: Any, **options: Any) -> bool:
        return self.shares.done(committed=bool(self._manager.should_commit(*args, **options)))

    def pieces(self, averaging: Any, micro_batch: int) -> list[list[int]]:
        """A round of torchft's LocalSGD or DiLoCo: lists of indices, one per optimizer step. A new replica has none."""
        pieces = self.shares.pieces(micro_batch)
        averaging._sync_every = max(len(pieces), 1)  # torchft has one number for all replicas
        if not pieces:
            averaging._local_optimizer.zero_grad()
            averaging._local_optimizer.step()  # changes nothing, but its hook synchronises with the others
        return pieces


class _Work:
    """An all-reduce. It has a future even if a replica was lost, because the hook of torchft 0.2's DDP needs one."""

    def __init__(self, manager: Any, work: Any, tensor: torch.Tensor) -> None:
        self._manager, self._work, self._tensor = manager, work, tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def get_future(self) -> Any:
        if self._manager.errored() is None:
            return self._work.get_future()
        future: Any = torch.futures.Future()
        future.set_result(self._tensor)
        future._fut = future
        return future

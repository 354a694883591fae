"""How a loop gets its batches from a controller: a sampler, a loader made anew, or a stream."""

from collections.abc import Callable, Iterable, Sized
from typing import Any, cast

from torch.utils.data import DataLoader, default_collate

from dynamix.data import BatchSampler, Stream
from dynamix.data.lengths import Lengths
from dynamix.data.loader import Loader, made_anew, order_of, require_batch_size
from dynamix.data.sampler import Partition
from dynamix.runtime.arguments import costs_by_length
from dynamix.runtime.status import ControllerStatus

Collate = Callable[[Any], Any]


class Feeding(ControllerStatus):
    """The part of `Controller` that makes batches; one of the three is called, once."""

    _batch_sizes: dict[str, int]  # what the loop's batches may be at the start, by the argument's name

    def batch_sampler(
        self,
        dataset: Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        partition: Partition = "stream",
        lengths: Lengths | None = None,
        padded: bool = False,
    ) -> BatchSampler:
        """A sampler for `DataLoader(dataset, batch_sampler=...)`: unequal shares, every sample once per epoch.

        partition   "stream": all ranks read one shared order. "contiguous": each rank reads a region of its own, cut by
                    share at every epoch (DBS's data partition, local disks); any policy then decides once per epoch.
        lengths     what each sample costs, above 0: tokens, frames, anything that adds up. An array, or a function of
                    the index that is called once for each sample. A round keeps its samples, but each rank gets as many
                    as make its part of the round's *cost*, and policies see times by cost (docs/lengths.md)
        padded      batches are padded to their longest sample, so they cost their number of samples times its length.
                    A round's samples are then dealt by length, which leaves little to pad

        Give the loader a `generator=` of its own if resumed runs must repeat random numbers exactly. Raises
        `ConfigError` when the data set is smaller than one global step.
        """
        coordinator = self._coordinator
        with coordinator.setting_up():
            if partition == "contiguous":
                # Regions are cut once per epoch: so it decides.
                coordinator.per_epoch, coordinator.job.slack = True, 0
            coordinator.job.limit_to(len(dataset))
            costs = costs_by_length(
                lengths, padded, len(dataset), apart=coordinator.steps_apart, fixed=coordinator.job.fixed
            )
            known = {"shuffle": shuffle, "partition": partition, "costs": costs, "size_now": lambda: len(dataset)}
            return coordinator.sampler(len(dataset), seed=seed, **known)

    def loader(
        self,
        loader: DataLoader[Any],
        *,
        seed: int | None = None,
        lengths: Lengths | None = None,
        padded: bool = False,
        placeholder: Collate | None = None,
    ) -> Loader:
        """`loader` made anew with batches of the controller's: the same data, processes, collation and pinning.

            loader = controller.loader(DataLoader(dataset, batch_size=128, shuffle=True, num_workers=4))

        Its `batch_size` must be the controller's; `shuffle` and a `DistributedSampler`'s shuffle and seed are kept. A
        tail that `drop_last` would drop is trained on: every sample comes once an epoch. `set_epoch` is the sampler's.

        seed              of the order; None: the `DistributedSampler`'s, else 0
        lengths, padded   as in `batch_sampler`
        placeholder       of a batch that stands for a share of zero samples (the end of an epoch may have one): returns
                          what the loop is to get in its place. Needed with wrap(weighting="given") only, where it
                          makes labels such that they do not count

        Raises `UsageError` for a loader whose order cannot be kept (iterable data, other samplers, a framework's
        loader), and `ConfigError` for another batch size.
        """
        with self._coordinator.setting_up():
            shuffle, own = order_of(loader)
            require_batch_size(loader, self._batch_sizes)
            data = cast(Sized, loader.dataset)
            seed = own if seed is None else seed
            sampler = self.batch_sampler(data, seed=seed, shuffle=shuffle, lengths=lengths, padded=padded)
            sampler.placeholder = placeholder
            return made_anew(loader, sampler)

    def stream(
        self, iterable: Iterable[Any], *, sharded: bool = False, collate_fn: Collate = default_collate
    ) -> Stream:
        """Batches cut from an iterable data set in the main process; see `dynamix.data.Stream` for the guarantees.

        sharded   False: every rank iterates the same global stream. True: each rank iterates its own.
        """
        with self._coordinator.setting_up():
            return self._coordinator.stream(iterable, sharded=sharded, collate_fn=collate_fn)

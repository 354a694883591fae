"""The three ways to get a loop's batches from a controller: a sampler, a rebuilt loader, or a stream."""

from collections.abc import Callable, Iterable, Sized
from typing import Any, Literal, cast

from torch.utils.data import DataLoader, Sampler, default_collate

from dynamix.data import BatchSampler, Stream
from dynamix.data.lengths import Lengths, costs_by_length
from dynamix.data.loader import Loader, LoaderOrder, made_anew, order_of, require_batch_size
from dynamix.data.sampler import Partition
from dynamix.data.selection import Indices, Selection, Weights
from dynamix.errors import ConfigError
from dynamix.runtime.config import JobConfig
from dynamix.runtime.job import TrainingJob
from dynamix.runtime.rate.budget import Budget

Collate = Callable[[Any], Any]


class Feeding:
    """The methods of `Controller` that make batches; a job calls one of the three, once."""

    _config: JobConfig
    _job: TrainingJob

    def batch_sampler(
        self,
        dataset: Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        partition: Partition = "stream",
        indices: Indices | None = None,
        weights: Weights | None = None,
        num_samples: int | None = None,
        lengths: Lengths | None = None,
        padded: bool = False,
    ) -> BatchSampler:
        """A sampler for `DataLoader(dataset, batch_sampler=...)`: unequal shares, every sample once per epoch.

        partition   "stream": all ranks read one shared order. "contiguous": each rank reads its own region, cut by
                    share at every epoch (DBS's data partition, local disks); any policy then decides once per epoch
        indices     samples to train on, if not all of the data set: each is used once an epoch
        weights     of each sample (of `indices`, if given), 0 or more: an epoch's samples are drawn with replacement,
                    in proportion to them. All ranks share one draw, so each sample's weight is exact for any shares
        num_samples  draws of an epoch over all ranks; None: as many as there are weights
        lengths     what each sample costs, above 0: tokens, frames, or any other additive cost. An array, or a function
                    of the index that is called once for each sample. A round keeps its samples, but each rank gets
                    enough samples to make up its share of the round's *cost*, and policies see times by cost
                    (docs/lengths.md)
        padded      batches are padded to their longest sample, so a batch costs its number of samples times that
                    length. A round's samples are then dealt by length, which reduces padding

        Give the loader its own `generator=` if resumed runs must repeat random numbers exactly. Raises `ConfigError` if
        an epoch is smaller than one global step, and for impossible indices and weights.
        """
        order = LoaderOrder(shuffle, seed, indices, weights, num_samples)
        return self._sampler(dataset, order, lengths, padded, partition=partition)

    def _sampler(
        self, dataset: Sized, order: LoaderOrder, lengths: Lengths | None, padded: bool, **others: Any
    ) -> BatchSampler:
        """Like `batch_sampler`; `others` are arguments of `BatchSampler`."""
        job = self._job
        shuffle, seed, indices, weights, num_samples = order
        with job.ranks.setting_up():
            _require_data(dataset)
            if others.get("partition") == "contiguous":
                job.facts.decide_per_epoch()  # regions are cut once per epoch
            chosen = None
            if any(given is not None for given in (indices, weights, num_samples)):
                chosen = Selection(len(dataset), indices=indices, weights=weights, num_samples=num_samples)
            if weights is not None and not shuffle:
                raise ConfigError("shuffle", False, "True with weights, whose samples are drawn", "leave shuffle out")
            size = len(dataset) if chosen is None else chosen.size
            job.facts.limit_to(size)
            apart, fixed = job.facts.sync_schedule.steps_apart, job.facts.fixed
            costs = costs_by_length(lengths, padded, len(dataset), apart=apart, fixed=fixed)
            own = job.of_source() | {"size_now": (lambda: len(dataset)) if chosen is None else None}
            sampler = BatchSampler(
                size, job.allocations, seed=seed, shuffle=shuffle, selection=chosen, costs=costs, **others, **own
            )
            job.feed(sampler)
            return sampler

    def loader(
        self,
        loader: DataLoader[Any],
        *,
        seed: int | None = None,
        lengths: Lengths | None = None,
        padded: bool = False,
        placeholder: Collate | None = None,
    ) -> Loader:
        """`loader` rebuilt with the controller's batches: the same data, processes, collation and pinning.

            loader = controller.loader(DataLoader(dataset, batch_size=128, shuffle=True, num_workers=4))

        Its `batch_size` must be the controller's; `shuffle` and a `DistributedSampler`'s shuffle and seed are kept. A
        `SubsetRandomSampler`'s subset is kept, and so are a `WeightedRandomSampler`'s weights and number of draws; that
        number then counts an epoch's draws over all ranks. A tail that `drop_last` would drop is trained on. Call
        `set_epoch` on the sampler.

        seed              of the order; None: the `DistributedSampler`'s, else 0
        lengths, padded   as in `batch_sampler`
        placeholder       takes a batch that stands for a share of zero samples (the end of an epoch may have one) and
                          returns what the loop gets instead. Needed only with wrap(weighting="given"), to make labels
                          that do not count

        Raises `UsageError`, which names what to write instead, for a loader whose order cannot be kept (iterable data,
        samplers of your own, a framework's loader), and `ConfigError` for another batch size.
        """
        with self._job.ranks.setting_up():
            order = order_of(loader)
            require_batch_size(loader, self._config.loop_batches)
            if seed is not None:
                order = order._replace(seed=seed)
            sampler = self._sampler(cast(Sized, loader.dataset), order, lengths, padded, placeholder=placeholder)
            return made_anew(loader, sampler)

    def stream(
        self, iterable: Iterable[Any], *, sharded: bool = False, collate_fn: Collate = default_collate
    ) -> Stream:
        """Batches cut from an iterable data set in the main process; see `dynamix.data.Stream` for the guarantees.

        sharded   False: every rank iterates the same global stream. True: each rank iterates its own.
        """
        job = self._job
        with job.ranks.setting_up():
            own = job.of_source() | {"agree": job.loss_weight.sum_async}
            stream = Stream(iterable, job.allocations, sharded=sharded, collate_fn=collate_fn, **own)
            job.feed(stream)
            return stream

    def budget(
        self,
        samples: int | None = None,
        *,
        epochs: int | None = None,
        count: Literal["progress", "samples"] = "progress",
    ) -> Budget:
        """How much the job is to learn: as much as these samples, or epochs, teach at the global batch of the start.

            for epoch in controller.budget(epochs=10):
                sampler.set_epoch(epoch)
                for x, y in loader:
                    ...
                    controller.step(loss=loss)
                    if controller.stopping:
                        break

        If the global batch is fixed, the budget is these samples. Those of a larger batch teach less, so the job then
        trains on more (`dynamix.runtime.rate.budget.Budget`). `stopping` is true once the budget is spent, and
        schedules of `scheduler` count likewise. Call it once the sampler, loader or stream exists, before training.

        count   "progress": what samples teach; "samples": the number of samples

        Raises `ConfigError` for impossible values.
        """
        job = self._job
        with job.ranks.setting_up():
            return job.rates.spend(job.need_source(), samples, epochs=epochs, count=count, leaves=lambda: job.stopping)


def _require_data(dataset: Any) -> None:
    """Raise `ConfigError` if the number of samples is unknown, or the length is not that of the samples."""
    if not hasattr(dataset, "__len__"):
        fix = "for data without a length write controller.stream(dataset, collate_fn=...)"
    elif isinstance(dataset, DataLoader) and _differs(dataset.dataset, dataset):
        fix = "write controller.loader(loader), or give this the loader's data set"
    elif isinstance(dataset, Sampler) and _differs(getattr(dataset, "data_source", None), dataset):
        fix = "give the data set itself; indices= and weights= say which of its samples to take"
    else:
        return
    raise ConfigError("dataset", type(dataset).__name__, "a data set with len(dataset)", fix)


def _differs(inner: Any, outer: Any) -> bool:
    """Whether `outer`, which is made from `inner`, is known to have another length."""
    return not hasattr(inner, "__len__") or len(inner) != len(outer)

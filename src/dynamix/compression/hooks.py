"""A DDP communication hook that exchanges compressed gradients, without loss.

    state = CompressionState()
    model.register_comm_hook(state, compression_hook)                                        # plain DDP
    controller.wrap(DDP(net), optimizer, hook=compression_hook, hook_state=CompressionState())   # unequal batches

A bucket takes several collectives. On gloo they run on one thread, in bucket order, over their own process group. So
ranks issue them in the same order whatever else is in flight, and backward continues meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket as Bucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from dynamix.compression.auto import Chooser
from dynamix.compression.bucket import DTYPES, BucketExchange, warm_up
from dynamix.compression.checks import Statistics, are_same, digest, marks_of
from dynamix.compression.layout import Layout
from dynamix.compression.line import BucketLine, SparsePass, new_future, now, way_of
from dynamix.compression.owner import Owner
from dynamix.compression.path import Path, paths_of
from dynamix.compression.rows_exchange import RowsExchange
from dynamix.compression.settings import ExchangeSettings
from dynamix.compression.sparse import mean_of_sparse
from dynamix.compression.traffic import HEADER_BYTES
from dynamix.compression.ways import AGGREGATED, ELSEWHERE, NetworkLink, registry
from dynamix.compression.wire import Wire
from dynamix.errors import ConfigError, StateError, UsageError
from dynamix.removed import removed_arguments

MIN_BYTES = 1 << 16  # below this size latency dominates, and "auto" keeps buckets dense
_log = logging.getLogger(__name__)


class CompressionState:
    """The state of `compression_hook`. Constructing it is a collective call, with the same arguments on every rank.

    mode           "auto" predicts and measures each bucket, and chooses; "gather" sends nonzero items from all to all;
                   "blocks" sends an index, then each rank sums its share of the union's values for all; "dense" is a
                   plain all-reduce. With dynamix-homomorphic also "compaction" (index, then values), "lhc" (sketch,
                   two-phase) and "lhc-one-phase"; "fixed" is dense in the same fixed point, equal to those three bit
                   for bit
    model          its embeddings are indexed by row; without it every element has its own index. One state serves
                   one model
    process_group  that of DDP, with any back end; None: the default group
    ratio, seed   see `dynamix.compression.ExchangeSettings`
    min_bytes      smaller buckets stay dense under "auto"
    timeout        of the process groups made here (gloo only); None: torch's default
    aggregator     computes sums in the network, "host:port" or a `dynamix_homomorphic.Aggregator`; without one the
                   process group computes them. If it is lost, the same way continues over the process group; when it
                   is back, it is joined again

    Sparse gradients (`nn.Embedding(sparse=True)`) are summed by rows in every mode except "dense", those of one
    backward pass together, each table gathered or in blocks.

    `statistics` has counts, `ways` the current way of each bucket. Raises `ConfigError` for modes that are unknown or
    not installed, for arguments and embeddings that differ between ranks, and for an aggregator that does not admit
    all ranks; `UsageError` without a process group and, from backward, if two models share a state.
    """

    @removed_arguments(lanes="nothing: every item is hashed by itself")
    def __init__(
        self,
        mode: str = "auto",
        *,
        model: nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        ratio: float | None = None,
        min_bytes: int = MIN_BYTES,
        timeout: timedelta | None = None,
        aggregator: Any = None,
    ) -> None:
        self._known = registry()
        if mode.startswith(AGGREGATED):  # such names are internal: only an aggregator's ways have them
            raise ConfigError("mode", mode, ", ".join(("auto", *self._known.names)), "pick one")
        if mode != "auto":
            self._known.of(mode, "mode")
        if aggregator is not None and mode in ("dense", "gather", "blocks"):
            raise ConfigError(
                "mode", mode, "every mode but dense, gather and blocks with an aggregator", "it sums fixed point"
            )
        if aggregator is not None and self._known.link is None:
            raise ConfigError("aggregator", aggregator, "None", ELSEWHERE)
        if not dist.is_available() or not dist.is_initialized():
            fix = "call torch.distributed.init_process_group() first"
            raise UsageError(f"CompressionState needs a process group: {fix}")
        self.mode, self.min_bytes, self.statistics = mode, min_bytes, Statistics()
        self.settings = ExchangeSettings(seed=seed, ratio=ratio)
        self.process_group = process_group or cast(dist.ProcessGroup, dist.group.WORLD)
        modules = () if model is None else model.modules()
        self._embeddings = [m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        self._owner = Owner(model)
        self._lines: dict[int, BucketLine] = {}
        self._sparse, self._sparse_memory = SparsePass(), RowsExchange()
        self._thread: ThreadPoolExecutor | None = None
        self._queued = False  # whether the thread has work of this backward pass
        self._rerouted = False  # the aggregator was lost or is back: update choosers before the next backward pass
        self._said_mixed = False
        self._paths = paths_of(self.process_group, timeout)
        if not self._paths:
            raise UsageError("CompressionState's process group serves neither CPUs nor CUDA devices: pass another one")
        main = self._paths.get("cuda" if "cpu" not in self._paths else "cpu")
        assert main is not None
        device = torch.device("cpu") if "cpu" in self._paths else torch.device("cuda", torch.cuda.current_device())
        self._require_same_arguments(main, device, aggregator is not None)
        if "cpu" in self._paths and mode != "dense":
            warm_up()
        self._link: NetworkLink | None = None
        if aggregator is not None and self._known.link is not None:
            self._link = self._known.link(aggregator, main.chain.group, device)

    @property
    def ways(self) -> dict[int, str]:
        """The current way of each bucket, by bucket index; with the prefix "aggregator-" if `auto` chose that."""
        return {i: line.route for i, line in sorted(self._lines.items())}

    def reduce(self, bucket: Bucket) -> Future[Tensor]:
        """The mean of one bucket over ranks; DDP calls it through `compression_hook`."""
        self._owner.check(bucket.parameters(), last=bucket.is_last())
        if bucket.index() == 0 and self._rerouted:
            self._reroute()
        flat = bucket.buffer()
        path = self._paths.get(flat.device.type)
        if path is None:
            served = " and ".join(self._paths)
            raise UsageError(f"gradients are on {flat.device}, the process group serves {served}: pass another one")
        if bucket.index() == 0:
            self._queued, self._sparse = False, SparsePass()  # also after a backward pass that was abandoned
        future = self._begin(bucket, flat, path)
        if bucket.is_last() and self._sparse.gradients:
            together, self._sparse = self._sparse, SparsePass()
            self._run(path, lambda: self._gather_sparse(together, path), last=True)
        return future

    def _begin(self, bucket: Bucket, flat: Tensor, path: Path) -> Future[Tensor]:
        if flat.is_sparse and self.mode != "dense":
            return self._sparse.add(flat)
        if flat.is_sparse:
            bucket.set_buffer(flat.clone())  # torch's hook divides in place, and this may be a view of other gradients
        if flat.is_sparse or flat.dtype not in DTYPES:
            return default_hooks.allreduce_hook(path.dense, bucket)
        line = self._line_of(bucket)
        route, timed = line.next()
        if route == "dense" and not timed:
            line.advance(None)
            self.statistics.count("dense", dense_bytes=flat.nbytes, payload_bytes=flat.nbytes)
            return default_hooks.allreduce_hook(path.dense, bucket)
        future = new_future(flat)
        last = bucket.is_last() and not self._sparse.gradients
        self._run(path, lambda: self._settle(future, line, flat, path), last=last)
        return future

    def _run(self, path: Path, work: Callable[[], None], *, last: bool) -> None:
        """Run `work`: on one thread if calls block, so that backward continues; else at once, in stream order.

        Also at once if backward has no other work left and no other exchange of this pass is pending. The choice of the
        thread is the same on all ranks.
        """
        if not path.gloo or (last and not self._queued):
            work()
            return
        self._queued = True
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dynamix-compression")
        self._thread.submit(work)

    def _settle(self, future: Future[Tensor], line: BucketLine, flat: Tensor, path: Path) -> None:
        try:
            self._exchange(line, flat, path)
        except Exception as error:  # backward raises it on the user's thread
            future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it wrongly
        else:
            future.set_result(flat)

    @torch.no_grad()
    def _gather_sparse(self, together: SparsePass, path: Path) -> None:
        try:
            messages, memory = path.chain.messages, self._sparse_memory
            means = mean_of_sparse(together.gradients, messages, statistics=self.statistics, memory=memory)
        except Exception as error:
            together.fail(error)
        else:
            together.settle(means)

    @torch.no_grad()
    def _exchange(self, line: BucketLine, flat: Tensor, path: Path) -> None:
        if self._link is not None and self._link.away and self._link.look():
            self.statistics.count_rejoined()
            self._rerouted = True
        route, timed = line.next()
        wire: Wire = path.chain
        if self._link is not None and (self.mode != "auto" or route.startswith(AGGREGATED)):
            wire = self._link.wire(wire)
        due = line.chooser is not None and line.chooser.due
        start = now(flat) if timed else 0.0
        doubt = line.exchange.reduce_(flat, way_of(route), wire, step=line.step, statistics=self.statistics)
        if doubt == "lost" and self._link is not None:
            self._link.lost()
            self._rerouted = True
        line.advance(now(flat) - start if timed else None, full=doubt == "full")
        if doubt == "mixed":
            self._say_mixed(line)
        elif due and line.chooser is not None:
            self._agree(line, line.chooser, path, flat)

    def _agree(self, line: BucketLine, chooser: Chooser, path: Path, flat: Tensor) -> None:
        speed = path.chain.speed
        filled = int(torch.count_nonzero(flat)) / max(flat.numel(), 1) if chooser.full else 1.0
        numbers = chooser.report(hop_s=speed.hop_s, byte_s=speed.byte_s, filled=filled)
        speed.restart()
        report = torch.tensor(numbers, dtype=torch.float64, device=flat.device)
        dist.all_reduce(report, op=dist.ReduceOp.MIN, group=path.chain.group)
        chooser.agree(report.tolist(), line.exchange.spread)

    def _say_mixed(self, line: BucketLine) -> None:
        line.again()
        if not self._said_mixed:
            self._said_mixed = True
            why = "so it was sent densely: state.statistics.dense_after['mixed'] counts such buckets"
            _log.warning("dynamix: ranks disagreed about bucket %d, %s", line.exchange.index, why)

    def _reroute(self) -> None:
        """All ranks do this at the same step, because no exchange is pending between two backward passes."""
        self._rerouted = False
        for line in self._lines.values():
            if line.chooser is not None:
                line.chooser.restrict(self._candidates)

    @property
    def _candidates(self) -> tuple[str, ...]:
        return self._known.candidates if self._link is None or self._link.away else self._link.candidates

    def state_dict(self) -> dict[str, Any]:
        """Settings, for comparison. Nothing else is saved: sums do not depend on measurements or counts."""
        return {"settings": [self.mode, self.settings.seed]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the settings. A rank need not load: the state has no effect on sums."""
        written, mine = list(state["settings"]), [self.mode, self.settings.seed]
        if written != mine:
            differs = f"the checkpoint was written with mode, seed = {written}, this state has {mine}"
            raise StateError(f"{differs}: construct CompressionState with those")

    def _line_of(self, bucket: Bucket) -> BucketLine:
        index = bucket.index()
        rows = {m.weight.data_ptr(): m.weight.shape[1] for m in self._embeddings}
        shapes = tuple((p.numel(), rows.get(p.data_ptr(), 1)) for p in bucket.parameters())
        line = self._lines.get(index)
        if line is None or line.shapes != shapes:  # DDP changes its buckets after the first step
            layout = Layout.of((n // width, width) for n, width in shapes)
            exchange = BucketExchange(layout, index=index, settings=self.settings)
            auto = self.mode == "auto" and bucket.buffer().nbytes >= self.min_bytes
            way = "dense" if self.mode == "auto" else self.mode
            if way in ("gather", "blocks") and bucket.buffer().nbytes <= HEADER_BYTES * self.process_group.size():
                way = "dense"  # the header alone would send more
            chooser = Chooser(self._candidates) if auto else None
            line = self._lines[index] = BucketLine(shapes, exchange, way, chooser)
        return line

    def _require_same_arguments(self, path: Path, device: torch.device, aggregated: bool) -> None:
        rows = [tuple(m.weight.shape) for m in self._embeddings]
        mine = (self.mode, self.min_bytes, aggregated, self.settings, rows, self._known.candidates)
        marks = marks_of(digest(*mine), device)
        path.chain.maximum(marks)
        if not are_same(marks):
            name = "mode, min_bytes, aggregator, settings, embeddings, ways"
            fix = "pass the same arguments and the model, and install the same distributions"
            raise ConfigError(name, mine, "the same on every rank", fix)


def compression_hook(state: CompressionState, bucket: Bucket) -> Future[Tensor]:
    """A DDP communication hook: `model.register_comm_hook(CompressionState(), compression_hook)`.

    Also an inner hook of `Controller.wrap` and `dynamix.weighted`. The result is the mean over ranks. It equals that of
    a dense all-reduce up to the order of additions; in fixed point, up to one rounding of each gradient to
    2^-(30 - ceil(log2 W)) of its block's largest magnitude.
    """
    return state.reduce(bucket)


compression_hook.lossless = True  # type: ignore[attr-defined]
compression_hook.ordered = True  # type: ignore[attr-defined]  # it needs no process group for each bucket
compression_hook.takes_sparse = True  # type: ignore[attr-defined]
compression_hook.__annotations__.clear()  # DDP checks them, and rejects strings

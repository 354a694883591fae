"""DDP communication hooks that exchange gradients compressed, without loss beyond one quantisation.

    state = CompressionState()
    model.register_comm_hook(state, compression_hook)                                        # plain DDP
    controller.wrap(DDP(net), optimizer, hook=compression_hook, hook_state=CompressionState())   # unequal batches

A bucket takes several collectives. On gloo they run on one thread in bucket order and on a process group of their own,
so that ranks issue them in the same order whatever else is in flight; backward goes on meanwhile.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket as Bucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from dynamix.compression.aggregator.client import Aggregator, AggregatorClient
from dynamix.compression.aggregator.wire import AggregatorWire, join, report_loss
from dynamix.compression.auto import Chooser
from dynamix.compression.bucket import BucketExchange, Way, warm_up
from dynamix.compression.checks import Statistics, are_same, digest, marks_of
from dynamix.compression.fixed_point import DTYPES
from dynamix.compression.layout import Layout
from dynamix.compression.sketch import ExchangeSettings
from dynamix.compression.wire import GroupWire, OrMethod, Wire, find_or_method
from dynamix.errors import ConfigError, StateError, UsageError

Mode = Literal["auto", "dense", "fixed", "compaction", "lhc", "lhc-one-phase"]
MIN_BYTES = 1 << 16  # below this latency decides, and "auto" leaves buckets alone


class CompressionState:
    """What `compression_hook` holds. Constructing it is a collective call, with the same arguments on every rank.

    mode           "auto" measures per bucket and picks; "compaction" (index, then values), "lhc" (sketch, two-phase)
                   and "lhc-one-phase" always take that way; "fixed" is dense in the same fixed point, equal to them bit
                   for bit; "dense" is a plain all-reduce
    model          its embeddings are indexed by row; without it every element has a bit of its own
    process_group  that of DDP; the default group when None
    lanes, ratio, seed   see `dynamix.compression.ExchangeSettings`
    min_bytes      smaller buckets stay dense under "auto"
    timeout        of the process groups made here (gloo only); torch's default when None
    aggregator     where sums are formed in the network, "host:port" or an `Aggregator`; without one the process group
                   forms them. When it is lost, the bucket at hand and all that follow are reduced densely

    `statistics` counts what happened, `ways` says which way each bucket takes now. Raises `ConfigError` for unknown
    modes, for arguments that differ between ranks and for an aggregator that does not let all ranks in, `UsageError`
    without a process group.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        *,
        model: nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        lanes: int = 1,
        ratio: float | None = None,
        min_bytes: int = MIN_BYTES,
        timeout: timedelta | None = None,
        aggregator: str | Aggregator | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigError("mode", mode, ", ".join(get_args(Mode)), "pick one")
        if aggregator is not None and mode == "dense":
            raise ConfigError("mode", mode, "every mode but dense with an aggregator", "it sums fixed point only")
        if not dist.is_available() or not dist.is_initialized():
            fix = "call torch.distributed.init_process_group() first"
            raise UsageError(f"CompressionState needs a process group: {fix}")
        self.mode, self.min_bytes, self.statistics = mode, min_bytes, Statistics()
        self.settings = ExchangeSettings(seed=seed, lanes=lanes, ratio=ratio)
        self.process_group = process_group or cast(dist.ProcessGroup, dist.group.WORLD)
        modules = () if model is None else model.modules()
        self._embeddings = [m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        self._lines: dict[int, _Line] = {}
        self._steps: dict[int, int] = {}  # of buckets loaded from a checkpoint
        self._wires: dict[str, GroupWire] = {}
        self._client: AggregatorClient | None = None
        self._lost = False  # agreed by vote, and read and written where buckets are exchanged only
        self._thread: ThreadPoolExecutor | None = None
        self._home = self.process_group
        gloo = dist.get_backend(self._home) == "gloo"
        device = torch.device("cpu") if gloo else torch.device("cuda", torch.cuda.current_device())
        self._require_same_arguments(device, aggregator is not None)
        if gloo and mode != "dense":
            warm_up()
        self._or_method: OrMethod = find_or_method(self._home, device)
        self._chain = _new_gloo_group(self._home, timeout) if gloo else self._home
        self._dense = _new_gloo_group(self._home, timeout) if gloo else self._home
        if aggregator is not None:
            where = Aggregator(aggregator) if isinstance(aggregator, str) else aggregator
            self._client = join(where, self._home, device)

    @property
    def ways(self) -> dict[int, str]:
        """The way each bucket takes at present, by bucket index."""
        return {i: line.way_now for i, line in sorted(self._lines.items())}

    def reduce(self, bucket: Bucket) -> Future[Tensor]:
        """The mean of one bucket over ranks; what DDP calls through `compression_hook`."""
        flat, group = bucket.buffer(), self.process_group
        chain, dense = (self._chain, self._dense) if group is self._home else (group, group)
        if flat.is_sparse or flat.dtype not in DTYPES:
            return default_hooks.allreduce_hook(dense, bucket)
        line = self._line_of(bucket)
        way, timed = line.next()
        if way == "dense" and not timed:
            line.advance(None)
            self.statistics.count("dense", dense_bytes=flat.nbytes, payload_bytes=flat.nbytes)
            return default_hooks.allreduce_hook(dense, bucket)
        if flat.is_cuda:
            self._exchange(line, flat, chain)
            done: Future[Tensor] = Future(devices=[flat.device])
            done.set_result(flat)
            return done
        future: Future[Tensor] = Future()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dynamix-compression")
        self._thread.submit(self._settle, future, line, flat, chain)
        return future

    def _settle(self, future: Future[Tensor], line: _Line, flat: Tensor, group: dist.ProcessGroup) -> None:
        try:
            self._exchange(line, flat, group)
        except Exception as error:  # backward raises it on the user's thread
            future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it wrongly
        else:
            future.set_result(flat)

    @torch.no_grad()
    def _exchange(self, line: _Line, flat: Tensor, group: dist.ProcessGroup) -> None:
        reserve = self._wires.setdefault(group.group_name, GroupWire(group, self._or_method))
        wire: Wire = reserve if self._client is None else AggregatorWire(self._client, reserve)
        if self._lost:  # since this bucket was handed over
            line.retired = True
            line.exchange.reduce_(flat, "dense", wire, step=line.step, statistics=self.statistics)
            line.advance(None)
            return
        way, timed = line.next()
        due = line.chooser is not None and line.chooser.due
        density = float(torch.count_nonzero(flat)) / flat.numel() if due else 0.0
        start = _now(flat) if timed else 0.0
        doubt = line.exchange.reduce_(flat, way, wire, step=line.step, statistics=self.statistics)
        if doubt == "lost" and self._client is not None:
            report_loss(self._client)
            self._client, self._lost, line.retired = None, True, True
        line.advance(_now(flat) - start if timed else None)
        if due and line.chooser is not None and not self._lost:
            report = torch.tensor(line.chooser.report(density), dtype=torch.float64, device=flat.device)
            dist.all_reduce(report, op=dist.ReduceOp.MIN, group=group)
            line.chooser.agree(report.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Steps taken, which key the hash functions. Measurements are made anew after loading."""
        steps = self._steps | {index: line.step for index, line in self._lines.items()}
        return {"settings": [self.mode, self.settings.seed], "steps": steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        written, mine = state["settings"], [self.mode, self.settings.seed]
        if written != mine:
            differs = f"the checkpoint was written with mode, seed = {written}, this state has {mine}"
            raise StateError(f"{differs}: construct CompressionState with those")
        self._steps = {int(index): int(step) for index, step in state["steps"].items()}
        self._lines.clear()

    def _line_of(self, bucket: Bucket) -> _Line:
        index = bucket.index()
        rows = {m.weight.data_ptr(): m.weight.shape[1] for m in self._embeddings}
        shapes = tuple((p.numel(), rows.get(p.data_ptr(), 1)) for p in bucket.parameters())
        line = self._lines.get(index)
        if line is None or line.shapes != shapes:  # DDP lays buckets out anew after the first step
            step = line.step if line is not None else self._steps.get(index, 0)
            layout = Layout.of((n // width, width) for n, width in shapes)
            exchange = BucketExchange(layout, index=index, settings=self.settings)
            auto = self.mode == "auto" and bucket.buffer().nbytes >= self.min_bytes
            way: Way = "dense" if self.mode == "auto" else self.mode
            line = self._lines[index] = _Line(shapes, exchange, way, Chooser() if auto else None, step)
        return line

    def _require_same_arguments(self, device: torch.device, aggregated: bool) -> None:
        mine = (self.mode, self.min_bytes, aggregated)
        marks = marks_of(digest(*mine), device)
        dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self._home)
        if not are_same(marks):
            name, allowed = "mode, min_bytes, aggregator", "the same on every rank"
            raise ConfigError(name, mine, allowed, "pass the same arguments")


@dataclass
class _Line:
    """One bucket: its layout's key, its exchange, its way or chooser, and its step.

    `retired` once it has been reduced without the lost aggregator: DDP waits for every bucket of a step, so from the
    next step on all ranks see it alike.
    """

    shapes: tuple[tuple[int, int], ...]
    exchange: BucketExchange
    way: Way
    chooser: Chooser | None
    step: int
    retired: bool = False

    @property
    def way_now(self) -> Way:
        if self.retired:
            return "dense"
        return self.chooser.way if self.chooser else self.way

    def next(self) -> tuple[Way, bool]:
        if self.retired:
            return "dense", False
        return self.chooser.next() if self.chooser else (self.way, False)

    def advance(self, seconds: float | None) -> None:
        self.step += 1
        if self.chooser and not self.retired:
            self.chooser.record(seconds)


def compression_hook(state: CompressionState, bucket: Bucket) -> Future[Tensor]:
    """A DDP communication hook: `model.register_comm_hook(CompressionState(), compression_hook)`.

    Also an inner hook of `Controller.wrap` and `dynamix.weighted`. The result is the mean over ranks: equal to that of
    a dense all-reduce up to one rounding of each gradient to 2^-(30 - ceil(log2 W)) of its block's largest magnitude.
    """
    return state.reduce(bucket)


compression_hook.lossless = True  # type: ignore[attr-defined]
compression_hook.__annotations__.clear()  # DDP checks them, and takes strings for wrong types


def _new_gloo_group(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    subset = len(ranks) != dist.get_world_size()
    made = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=subset)
    return cast(dist.ProcessGroup, made)


def _now(flat: Tensor) -> float:
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)
    return time.perf_counter()

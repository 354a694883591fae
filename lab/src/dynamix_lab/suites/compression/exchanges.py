"""The ways to exchange gradients that `dynamix bench compression` compares, as DDP communication hooks by name.

Ours are in `dynamix.compression`; here are the others, as they are usually done, and nothing here is offered to users:

dense      torch's all-reduce of float32, the whole gradient in one bucket
dense-1mb, dense-5mb, dense-25mb   plain DDP without a hook, with buckets of so many megabytes
sparse     plain DDP without a hook on `nn.Embedding(sparse=True)`: torch's sparse all-reduce
bf16       gradients rounded to bfloat16 (lossy)
index-gather   sizes, then padded 64-bit index, then padded values of nonzero rows, all-gathered: as one writes it down
fp16       torch's `fp16_compress_hook` (lossy)
powersgd   torch's PowerSGD of rank 4 with error feedback and warm start (lossy; Vogels et al., arXiv 1905.13727)
topk       the largest 1 % of each rank, gathered as index and value (lossy; `dynamix_homomorphic.lossy`)
omnireduce blocks of 256 elements that are not zero, after OmniReduce (Fei et al., SIGCOMM 2021)

`gather-sparse` is what this library's page advises for embeddings: `sparse=True` and the hook in its mode `auto`.
OmniReduce streams the nonzero blocks of each worker to aggregators, which add the blocks of one position and send the
sum to all: what crosses a link is a worker's own nonzero blocks up and the union's down. `omnireduce` is its idea on an
all-reduce, where there is no aggregator: one bit a block is ORed over ranks, then the blocks of the union are
all-reduced in float32. On a ring a host sends and receives 2 (W-1)/W of the union instead of its own part up and the
union down. No streaming: a bucket's blocks go at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket as Bucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from dynamix.compression import CompressionState, Statistics, compression_hook
from dynamix.compression.index import pack, unpack
from dynamix.compression.wire import bitwise_or
from dynamix.errors import ConfigError
from dynamix_homomorphic.lossy import LossyState, lossy_topk_hook

Hook = Callable[[Any, Bucket], "Future[Tensor]"]

AGAIN = "dense-again"  # dense once more: what differs between the two is the machine
BUCKETS_MB = {"dense-1mb": 1.0, "dense-5mb": 5.0, "dense-25mb": 25.0}
PLAIN = ("sparse", *BUCKETS_MB)  # DDP as it is: no hook, so the exchange has no time of its own
SPARSE_TENSORS = ("sparse", "gather-sparse")  # embeddings with sparse gradients
BASELINES = (
    "dense",
    AGAIN,
    *BUCKETS_MB,
    "sparse",
    "fp16",
    "bf16",
    "powersgd",
    "topk",
    "omnireduce",
    "index-gather",
)
AGGREGATED = {"aggregator-compaction": "compaction", "aggregator-lhc": "lhc-one-phase"}  # what they send through it
OURS = ("gather", "gather-sparse", "blocks", "compaction", "lhc", "lhc-one-phase", "auto", *AGGREGATED)
# What these take depends little on where zeros are: they run with the four jobs that were here first.
ELSEWHERE = ("dense-1mb", "dense-5mb", "fp16", "bf16", "powersgd", "topk", "lhc-one-phase", *AGGREGATED)
LOSSY = ("fp16", "bf16", "powersgd", "topk")
WAYS = (*BASELINES, *OURS)
BLOCK = 256  # elements, OmniReduce's usual block
TOPK = 0.01
RANK = 4
POWERSGD_START = 2  # torch wants at least two dense steps before error feedback


@dataclass(frozen=True)
class GradientExchange:
    """One way: a hook, what it holds, and what it counted, where it counts.

    by_row   whether its index has one bit a row of an embedding, else one an element
    """

    name: str
    hook: Hook
    state: Any
    by_row: bool = False
    statistics: Statistics | None = None

    def ways(self) -> dict[int, str]:
        """Which way each bucket takes now, where that is chosen."""
        inner = self._inner()
        return {} if inner is None else inner.ways

    def spread(self) -> dict[str, Any] | None:
        """Which part of the gradient was not zero, over ranks, where the way has looked at that."""
        inner = self._inner()
        seen = [] if inner is None else list(inner.spreads.values())
        return asdict(seen[0]) if len(seen) == 1 else None

    def _inner(self) -> CompressionState | None:
        return self.state if isinstance(self.state, CompressionState) else None


def make_exchange(
    name: str,
    net: nn.Module,
    *,
    timeout: timedelta | None = None,
    aggregator: Mapping[str, Any] | None = None,
) -> GradientExchange:
    """The way called `name` for gradients of `net`. A collective call, as many ways make process groups.

    aggregator   address and token of one, for the ways through it
    """
    if name in ("dense", AGAIN, *PLAIN):
        return GradientExchange(name, default_hooks.allreduce_hook, None)
    if name == "fp16":
        return GradientExchange(name, default_hooks.fp16_compress_hook, None)
    if name == "bf16":
        return GradientExchange(name, bf16_hook, None)
    if name == "powersgd":
        powersgd = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=RANK, start_powerSGD_iter=POWERSGD_START
        )
        return GradientExchange(name, powerSGD_hook.powerSGD_hook, powersgd)
    if name == "topk":
        return GradientExchange(name, lossy_topk_hook, LossyState(net, keep=TOPK))
    if name == "omnireduce":
        return GradientExchange(name, nonzero_blocks_hook, None)
    if name == "index-gather":
        widths = {m.weight.data_ptr(): m.weight.shape[1] for m in net.modules() if isinstance(m, nn.Embedding)}
        return GradientExchange(name, index_gather_hook, widths)
    if name in OURS:
        more: dict[str, Any] = {}
        if name in AGGREGATED:
            if aggregator is None:
                raise ConfigError("way", name, "with an aggregator", "run it in `dynamix bench compression`")
            from dynamix_homomorphic.aggregator.client import Aggregator

            more["aggregator"] = Aggregator(**aggregator, job=name)
        mode: Any = "auto" if name == "gather-sparse" else AGGREGATED.get(name, name)
        state = CompressionState(mode, model=net, timeout=timeout, **more)
        return GradientExchange(name, compression_hook, state, True, state.statistics)
    raise ConfigError("way", name, ", ".join(WAYS), "check the spelling")


def nonzero_blocks_hook(state: dist.ProcessGroup | None, bucket: Bucket) -> Future[Tensor]:
    """All-reduce the blocks that are not zero on any rank. Two collectives in a row, waited for in the hook."""
    group = state if state is not None else dist.group.WORLD
    assert group is not None
    flat = bucket.buffer()
    n = flat.numel()
    blocks = torch.nn.functional.pad(flat, (0, -n % BLOCK)).view(-1, BLOCK)
    bits = pack((blocks != 0).any(1))
    bitwise_or(bits, group)
    union = unpack(bits)[: blocks.shape[0]].nonzero().squeeze(1)
    payload = blocks[union].div_(group.size())
    if union.numel():
        dist.all_reduce(payload, group=group)
    blocks.zero_()
    blocks[union] = payload
    done: Future[Tensor] = Future()
    done.set_result(flat.copy_(blocks.view(-1)[:n]))
    return done


def bf16_hook(state: None, bucket: Bucket) -> Future[Tensor]:
    """All-reduce in bfloat16; torch's own hook of that kind refuses CPUs."""
    flat = bucket.buffer()
    half = flat.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(half, async_op=True)
    assert work is not None
    done: Future[Tensor] = work.get_future().then(lambda _: flat.copy_(half))
    return done


def index_gather_hook(widths: Mapping[int, int], bucket: Bucket) -> Future[Tensor]:
    """All-gather index and values of nonzero rows, padded to the longest, and add them up."""
    workers, flat = dist.get_world_size(), bucket.buffer()
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        table = gradient.view(-1, widths.get(parameter.data_ptr(), 1))
        rows = (table != 0).any(1).nonzero().squeeze(1)
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(workers)]
        dist.all_gather(counts, torch.tensor([rows.numel()]))
        longest = max(int(count) for count in counts)
        index, values = rows.new_zeros(longest), table.new_zeros(longest, table.shape[1])
        index[: rows.numel()], values[: rows.numel()] = rows, table[rows]
        indices, added = ([torch.empty_like(own) for _ in range(workers)] for own in (index, values))
        dist.all_gather(indices, index)
        dist.all_gather(added, values)
        table.zero_()
        for theirs, rows_of_theirs in zip(indices, added, strict=True):
            table.index_add_(0, theirs, rows_of_theirs, alpha=1 / workers)
    done: Future[Tensor] = Future()
    done.set_result(flat)
    return done


for _hook in (bf16_hook, index_gather_hook):
    _hook.__annotations__.clear()
nonzero_blocks_hook.__annotations__.clear()  # DDP checks them, and takes strings for wrong types

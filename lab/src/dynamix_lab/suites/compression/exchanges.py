"""The ways to exchange gradients that `dynamix bench compression` compares, as DDP communication hooks by name.

Ours are in `dynamix.compression`. The others are here, as they are usually done, and are not offered to users:

dense      torch's all-reduce of float32, the whole gradient in one bucket
dense-25mb plain DDP without a hook, with buckets of so many megabytes
sparse     plain DDP without a hook on `nn.Embedding(sparse=True)`: torch's sparse all-reduce
omnireduce blocks of 256 elements that are not zero, after OmniReduce (Fei et al., SIGCOMM 2021)

`fixed` is a dense exchange in the other ways' fixed point. `gather-sparse` is what this library's page advises for
embeddings: `sparse=True` and the hook in its mode `auto`. `aggregator-...` sends to an aggregator inside the switch,
without a link of its own; `host-aggregator-lhc` to one on its own host, behind a link like all others.

OmniReduce streams each worker's nonzero blocks to aggregators. They add the blocks of one position and send the sum to
all, so a link carries the worker's own nonzero blocks up and the union's down. `omnireduce` does this by all-reduce,
without an aggregator: one bit per block is ORed over ranks, then the union's blocks are all-reduced in float32. On a
ring a host sends and receives 2 (W-1)/W of the union, instead of its own blocks up and the union down. It does not
stream: a bucket's blocks are sent at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket as Bucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from dynamix.compression import CompressionState, Statistics, compression_hook
from dynamix.compression.index import pack, unpack
from dynamix.compression.wire import bitwise_or
from dynamix.errors import ConfigError

Hook = Callable[[Any, Bucket], "Future[Tensor]"]

AGAIN = "dense-again"  # dense once more: the difference between the two is due to the machine
BUCKETS_MB = {"dense-25mb": 25.0}
PLAIN = ("sparse", *BUCKETS_MB)  # plain DDP without a hook, so the exchange cannot be timed separately
SPARSE_TENSORS = ("sparse", "gather-sparse")  # embeddings with sparse gradients
ON_HOST = "host-aggregator-lhc"  # the aggregator is outside the switch
AGGREGATED = {"aggregator-compaction": "compaction", "aggregator-lhc": "lhc-one-phase", ON_HOST: "lhc-one-phase"}
OURS = ("fixed", "gather", "gather-sparse", "blocks", "compaction", "lhc", "lhc-one-phase", "auto", *AGGREGATED)
WAYS = ("dense", AGAIN, *BUCKETS_MB, "sparse", "omnireduce", *OURS)
BLOCK = 256  # elements, OmniReduce's usual block


@dataclass(frozen=True)
class GradientExchange:
    """One way: a hook, its state, and its counters if it has any.

    by_row   whether its index has one bit per row of an embedding, else one per element
    """

    name: str
    hook: Hook
    state: Any
    by_row: bool = False
    statistics: Statistics | None = None

    def ways(self) -> dict[int, str]:
        """The present way of each bucket, if it is chosen automatically."""
        return self.state.ways if isinstance(self.state, CompressionState) else {}


def make_exchange(
    name: str,
    net: nn.Module,
    *,
    by_row: bool = True,
    timeout: timedelta | None = None,
    aggregator: Mapping[str, Any] | None = None,
) -> GradientExchange:
    """The way called `name` for gradients of `net`. A collective call, because many ways make process groups.

    by_row       an embedding's row is one item of ours; not after top-k, which leaves single elements
    aggregator   address and token of one, for the ways that use it
    """
    if name in ("dense", AGAIN, *PLAIN):
        return GradientExchange(name, default_hooks.allreduce_hook, None)
    if name == "omnireduce":
        return GradientExchange(name, nonzero_blocks_hook, None)
    if name in OURS:
        more: dict[str, Any] = {}
        if name in AGGREGATED:
            if aggregator is None:
                raise ConfigError("way", name, "with an aggregator", "run it in `dynamix bench compression`")
            from dynamix_homomorphic.aggregator.client import Aggregator

            more["aggregator"] = Aggregator(**aggregator, job=name)
        mode: Any = "auto" if name == "gather-sparse" else AGGREGATED.get(name, name)
        state = CompressionState(mode, model=net if by_row else None, timeout=timeout, **more)
        return GradientExchange(name, compression_hook, state, by_row, state.statistics)
    raise ConfigError("way", name, ", ".join(WAYS), "check the spelling")


def nonzero_blocks_hook(state: dist.ProcessGroup | None, bucket: Bucket) -> Future[Tensor]:
    """All-reduce the blocks that are nonzero on some rank. Two collectives in sequence; the hook waits for both."""
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


nonzero_blocks_hook.__annotations__.clear()  # DDP checks annotations, and rejects strings

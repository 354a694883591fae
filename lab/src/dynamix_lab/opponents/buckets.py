"""The buckets in which DDP exchanges gradients, and how much of a step is computed before each may leave."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

# As in DistributedDataParallel: the first bucket is small, so that the exchange begins early.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
FORWARD_PART = 1 / 3  # of a step's work; the rest is backward, spread evenly over the layers


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """`size_bytes` of gradients that may be sent after the fraction `ready_at` (0 to 1) of a step's work."""

    size_bytes: int
    ready_at: float


def gradient_buckets(
    model: nn.Module, *, first_bytes: int = FIRST_BUCKET_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> tuple[GradientBucket, ...]:
    """A model's buckets in the order of sending: last layers first, as DDP fills them.

    The parameter with which a bucket reaches its size is its last. A layer is a module that has parameters of its own.
    Dense gradients only.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    >>> gradient_buckets(net)
    (GradientBucket(size_bytes=104, ready_at=1.0),)
    >>> [(bucket.size_bytes, round(bucket.ready_at, 3)) for bucket in gradient_buckets(net, first_bytes=8)]
    [(8, 0.667), (96, 1.0)]
    """
    layers = [own for m in model.modules() if (own := [p for p in m.parameters(recurse=False) if p.requires_grad])]
    found, size, limit = list[GradientBucket](), 0, first_bytes
    for done, layer in enumerate(reversed(layers), 1):
        ready_at = FORWARD_PART + (1 - FORWARD_PART) * done / len(layers)
        for parameter in reversed(layer):
            size += parameter.numel() * parameter.element_size()
            if size >= limit:
                found.append(GradientBucket(size, ready_at))
                size, limit = 0, bucket_bytes
    return (*found, GradientBucket(size, 1.0)) if size else tuple(found)

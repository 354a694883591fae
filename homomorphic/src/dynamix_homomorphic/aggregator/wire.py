"""A wire whose sums and unions are formed by an aggregator in the network, with a process group as fallback.

The process group carries what an aggregator cannot do (means in floating point), and decides on each bucket: ranks may
see the aggregator die at different points of a round, so only the group can tell whether all of them have the sum.
"""

import logging
import secrets
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dynamix.compression.wire import Messages, Wire, WireLost
from dynamix.errors import ConfigError
from dynamix_homomorphic.aggregator.client import CONNECT_S, Aggregator, AggregatorClient
from dynamix_homomorphic.aggregator.protocol import ADD, OR, Bytes

ONE_ROUND = 512  # values; up to 16 KiB a second round trip costs more than the bytes
_REASON_BYTES = 512
_log = logging.getLogger(__name__)


class AggregatorWire:
    """Maximum, union and total over `client`, mean over `reserve`. Raises `WireLost`, perhaps on some ranks only."""

    def __init__(self, client: AggregatorClient, reserve: Wire) -> None:
        self.client, self.reserve = client, reserve
        self.workers, self.payload_bytes = reserve.workers, 0

    @property
    def messages(self) -> Messages:
        return self.reserve.messages

    def maximum(self, values: Tensor) -> None:
        values.copy_(torch.from_numpy(maximum_by_or(values.detach().cpu().numpy(), self._or)))

    def union(self, bits: Tensor, beside: Tensor | None = None) -> None:
        self._reduce((OR, bits), *(() if beside is None else ((ADD, beside),)))

    def total(self, values: Tensor) -> None:
        self._reduce((ADD, values))

    def mean(self, values: Tensor) -> None:
        self.payload_bytes += values.nbytes
        self.reserve.mean(values)

    def _or(self, bits: Bytes) -> None:
        self.payload_bytes += bits.nbytes
        self.client.reduce_((OR, bits))

    def _reduce(self, *parts: tuple[int, Tensor]) -> None:
        hosts = [values.detach().cpu().contiguous() for _, values in parts]  # a tensor on the host is not copied
        self.payload_bytes += sum(host.nbytes for host in hosts)
        sent = [host.view(torch.uint8).numpy() for host in hosts]
        self.client.reduce_(*((op, host) for (op, _), host in zip(parts, sent, strict=True)))
        for (_, values), host in zip(parts, hosts, strict=True):
            if host.data_ptr() != values.data_ptr():
                values.copy_(host)


def join(
    where: Aggregator, group: dist.ProcessGroup, device: torch.device, *, patience_s: float = CONNECT_S
) -> AggregatorClient:
    """Connect all ranks of `group`, or none: a collective call. If a rank is refused, every rank raises `ConfigError`
    with the reason of the first such rank.
    """
    session = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8).to(device)
    dist.broadcast(session, dist.get_global_rank(group, 0), group=group)
    client: AggregatorClient | None = None
    why = ""
    try:
        name = bytes(session.tolist()).hex()
        workers, rank = group.size(), group.rank()
        client = AggregatorClient.connect(where, session=name, workers=workers, rank=rank, patience_s=patience_s)
    except (WireLost, ConfigError) as error:
        why = str(error)
    first_out = torch.tensor([group.size() if client is not None else group.rank()], device=device)
    dist.all_reduce(first_out, op=dist.ReduceOp.MIN, group=group)
    out = int(first_out[0])
    if client is not None and out == group.size():
        return client
    if client is not None:
        client.close()
    theirs = _told_by(out, why, group, device)
    raise ConfigError(
        "aggregator", where.address, "one that runs and lets every rank in", why or f"rank {out}: {theirs}"
    )


def _told_by(rank: int, text: str, group: dist.ProcessGroup, device: torch.device) -> str:
    """Broadcast the text of one rank to all."""
    brought = text.encode()[:_REASON_BYTES].ljust(_REASON_BYTES)
    told = torch.frombuffer(bytearray(brought), dtype=torch.uint8).to(device)
    dist.broadcast(told, dist.get_global_rank(group, rank), group=group)
    return bytes(told.tolist()).decode(errors="replace").rstrip()


def report_loss(client: AggregatorClient) -> None:
    """Log the loss on each rank, and close the connection."""
    reason = client.reason or "another rank lost it"
    client.close(reason)
    _log.warning("the aggregator is lost (%s): the process group forms the sums until it is back", reason)


def maximum_by_or(values: Bytes, union: Callable[[Bytes], None]) -> Bytes:
    """The maximum over ranks of uint8 (n,). `union` ORs its argument over ranks in place.

    An aggregator cannot take a maximum, so each value becomes one set bit, and the highest bit of the union wins. One
    round with 256 places per byte costs 32 bytes a value. Longer buffers take two rounds of 16 places: first the upper
    four bits, then the lower four of those ranks that hold the highest. That is 4 bytes a value in all.

    >>> maximum_by_or(np.array([0, 7, 255], dtype=np.uint8), lambda bits: None).tolist()
    [0, 7, 255]
    """
    if values.size <= ONE_ROUND:
        places = np.zeros((values.size, 32), np.uint8)
        places[np.arange(values.size), values >> 3] = np.left_shift(1, values & 7)
        union(places.reshape(-1))
        bits = np.unpackbits(places, axis=1, bitorder="little")
        return np.asarray(255 - np.argmax(bits[:, ::-1], axis=1), np.uint8)
    high = np.right_shift(values, 4, dtype=np.uint8)
    top = _highest(high, np.ones(values.size, np.bool_), union)
    low = _highest(np.bitwise_and(values, 15, dtype=np.uint8), high == top, union)
    return np.asarray(top * 16 + low, np.uint8)


def _highest(nibbles: Bytes, taking_part: NDArray[np.bool_], union: Callable[[Bytes], None]) -> Bytes:
    places = np.where(taking_part, np.left_shift(np.uint16(1), nibbles, dtype=np.uint16), np.uint16(0))
    union(places.view(np.uint8))
    highest = np.frexp(places.astype(np.float32))[1] - 1
    return np.asarray(np.maximum(highest, 0), np.uint8)

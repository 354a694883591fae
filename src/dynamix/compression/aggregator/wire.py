"""A wire whose sums and unions are formed by an aggregator in the network, with a process group behind it.

The process group carries what an aggregator cannot do (means in floating point), and the last word on each bucket: ranks
may see the aggregator die at different points of a round, so only the group can say whether all of them have the sum.
"""

from __future__ import annotations

import logging
import secrets

import torch
import torch.distributed as dist
from torch import Tensor

from dynamix.compression.aggregator.client import Aggregator, Link
from dynamix.compression.aggregator.maximum import maximum_by_or
from dynamix.compression.aggregator.protocol import ADD, OR, Bytes
from dynamix.compression.wire import Wire, WireLost
from dynamix.errors import ConfigError

_log = logging.getLogger(__name__)


class AggregatorWire:
    """Maximum, union and total over `link`, mean over `reserve`. Raises `WireLost`, perhaps on some ranks only."""

    def __init__(self, link: Link, reserve: Wire) -> None:
        self.link, self.reserve = link, reserve
        self.workers, self.payload_bytes = reserve.workers, 0

    def maximum(self, values: Tensor) -> None:
        values.copy_(torch.from_numpy(maximum_by_or(values.detach().cpu().numpy(), self._or)))

    def union(self, bits: Tensor, beside: Tensor | None = None) -> None:
        hosted = [(OR, bits, _on_host(bits))]
        if beside is not None:
            hosted.append((ADD, beside, _on_host(beside)))
        self._reduce([(op, host) for op, _, host in hosted])
        for _, values, host in hosted:
            _bring_back(values, host)

    def total(self, values: Tensor) -> None:
        host = _on_host(values)
        self._reduce([(ADD, host)])
        _bring_back(values, host)

    def mean(self, values: Tensor) -> None:
        self.payload_bytes += values.nbytes
        self.reserve.mean(values)

    def _or(self, bits: Bytes) -> None:
        self.payload_bytes += bits.nbytes
        self.link.reduce_((OR, bits))

    def _reduce(self, parts: list[tuple[int, Tensor]]) -> None:
        self.payload_bytes += sum(host.nbytes for _, host in parts)
        self.link.reduce_(*((op, host.view(torch.uint8).numpy()) for op, host in parts))


def _on_host(values: Tensor) -> Tensor:
    return values.detach().cpu().contiguous()  # the tensor's own memory, where it is there already


def _bring_back(values: Tensor, host: Tensor) -> None:
    if host.data_ptr() != values.data_ptr():
        values.copy_(host)


def join(where: Aggregator, group: dist.ProcessGroup, device: torch.device) -> Link:
    """Connect all ranks of `group`, or none: a collective call. Raises `ConfigError` on every rank alike."""
    session = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8).to(device)
    dist.broadcast(session, dist.get_global_rank(group, 0), group=group)
    link: Link | None = None
    why = "another rank was not let in"
    try:
        name = bytes(session.tolist()).hex()
        link = Link.connect(where, session=name, workers=group.size(), rank=group.rank())
    except WireLost as error:
        why = str(error)
    everyone = torch.tensor([link is not None], dtype=torch.uint8, device=device)
    dist.all_reduce(everyone, op=dist.ReduceOp.MIN, group=group)
    if link is None or not bool(everyone[0]):
        if link is not None:
            link.close()
        raise ConfigError("aggregator", where.address, "one that runs and lets every rank in", why)
    return link


def report_loss(link: Link) -> None:
    """One line in the log of each rank, and an end of the connection."""
    reason = link.reason or "another rank lost it"
    link.close(reason)
    _log.warning("the aggregator is lost (%s): from this step on gradients are reduced densely", reason)

"""Peeling: decode a sketch of given items, exactly or not at all.

If only one remaining item has touched a counter, the counter is that item's value. Subtract it from the item's other
counters, and repeat. All such items are taken at once, round by round, so that the order is the same everywhere. Which
items can be decoded depends on their hashes, not on their values, so it is known before a sketch is sent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dynamix_homomorphic.kernels import compiled_for

MAX_ROUNDS = 200  # 12-13 are usual; a set that needs more is unlikely to finish


@dataclass(frozen=True)
class Peeling:
    """The order in which items come out of a sketch.

    order   int32 (p,), indices into the items, round after round, ascending within each
    source  int8 (p,), which of an item's three counters held it alone
    ends    length of `order` after each round
    """

    order: Tensor
    source: Tensor
    ends: list[int]
    items: int

    @property
    def complete(self) -> bool:
        return self.order.numel() == self.items


def peel(where: Tensor, counters: int) -> Peeling:
    """Peel the structure, without values. `where`: int32 (k, 3), the counters of each item."""
    fast = compiled_for(where)
    if fast is None:
        return _peel(where, counters)
    order, source, ends = fast.peel(where, counters, MAX_ROUNDS)
    return Peeling(order, source, ends, where.shape[0])


def _peel(where: Tensor, counters: int) -> Peeling:
    at = where.long()
    degree = torch.bincount(at.view(-1), minlength=counters)
    alive = torch.arange(at.shape[0], device=at.device)
    orders, sources, done = [alive[:0]], [alive[:0]], 0
    ends: list[int] = []
    while alive.numel() and len(ends) < MAX_ROUNDS:
        alone = degree[at[alive]] == 1
        free = alone.any(1)
        taken = alive[free]
        if not taken.numel():
            break
        orders.append(taken)
        sources.append(alone[free].int().argmax(1))  # the first counter that holds it alone
        degree.index_add_(0, at[taken].view(-1), degree.new_full((taken.numel() * 3,), -1))
        alive, done = alive[~free], done + taken.numel()
        ends.append(done)
    return Peeling(torch.cat(orders).int(), torch.cat(sources).to(torch.int8), ends, at.shape[0])


def extract(table: Tensor, where: Tensor, signs: Tensor, peeling: Peeling, width: int) -> Tensor:
    """Take the items' values, int32 (k * width,), out of `table` in place. A sound table then holds only zeros.

    Items that `peeling` does not reach are 0; callers never use an incomplete one.
    """
    out = torch.zeros(where.shape[0] * width, dtype=torch.int32, device=table.device)
    fast = compiled_for(table)
    if fast is not None:
        fast.extract(table, where, signs, peeling.order, peeling.source, width, out)
        return out
    rows, values, start = table.view(-1, width), out.view(-1, width), 0
    for end in peeling.ends:
        items, j = peeling.order[start:end], peeling.source[start:end].long().unsqueeze(1)
        at, sign = where[items], signs[items]
        found = rows[at.gather(1, j).squeeze(1)] * sign.gather(1, j)
        values[items] = found
        for other in range(3):
            rows.index_add_(0, at[:, other], -(found * sign[:, other : other + 1]))
        start = end
    return out

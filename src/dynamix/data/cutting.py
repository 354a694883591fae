"""Cuts an epoch into optimizer steps: how many samples each rank takes in each micro-step.

Pure functions of the samples left, so every rank computes the same answer. An optimizer step is a group of A
micro-steps, shape (A, W). Ordinary groups repeat the allocation. Most of this module is about the end of an epoch: a
rank has the same count in all A micro-steps, but what A does not divide goes to one rank in the last.
"""

import numpy as np

from dynamix.projection import project
from dynamix.window import Bounds, Ints

RULES_VERSION = 3  # saved with regions: those cut by other rules for an epoch's end cannot be resumed
NO_LIMIT = 2**40  # samples; stands for "no upper bound" if a number is needed


def next_group(left: int, sizes: Ints, *, accumulate: int, low: Ints, high: Ints, first: bool = False) -> Ints:
    """Counts (A, W) of the next optimizer step, at most `left` in all, which is 1 or more.

    left    samples left in the epoch, all ranks together
    sizes   (W,) allocation in force, sum >= 1; ranks with 0 stay at 0
    low, high   (W,) bounds per micro-step; a tail may fall below `low`, nothing exceeds max(high, sizes)
    first       whether it is the first step of its epoch

    If a tail has less than half a step's samples, it and the step before it are halved, in the proportions of `sizes`.
    A step of a few samples is mostly noise to batch norm and the gradient, and would undo many others. (The first step
    of an epoch is not halved: if it is the only one of the usual sizes, windows need it.) A remainder under 2 A joins
    the step before it if a rank has room. If no rank has room for the samples that A does not divide, a tail is halved,
    if both halves can be cut. Less than a step goes to as many ranks as can have 2 samples per micro-step (those with
    the largest sizes, ties to the lower rank). If bounds make all this impossible (a cap below A + 1, say), the samples
    left over fill the last micro-step of several ranks, and a rank may get 1 sample.

    >>> none, cap = np.array([1, 1, 1]), np.array([64, 64, 64])
    >>> next_group(100, np.array([16, 8, 8]), accumulate=1, low=none, high=cap).tolist()
    [[16, 8, 8]]
    >>> next_group(33, np.array([16, 8, 8]), accumulate=1, low=none, high=cap).tolist()   # 1 left over: it joins
    [[17, 8, 8]]
    >>> next_group(36, np.array([16, 8, 8]), accumulate=1, low=none, high=cap).tolist()   # 4 would be: 18 and 18
    [[9, 5, 4]]
    >>> next_group(5, np.array([16, 8, 8]), accumulate=1, low=none, high=cap).tolist()    # a tail
    [[3, 2, 0]]
    """
    if is_regular(left, int(sizes.sum()), accumulate, first=first):
        return np.broadcast_to(sizes, (accumulate, sizes.size))
    return _last_groups(left, sizes, accumulate, low, np.maximum(high, sizes))


def enough(total: int, accumulate: int) -> int:
    """Samples with which an ordinary optimizer step of `total` per micro-step leaves at least half a step."""
    whole = accumulate * total
    return whole + max(2 * accumulate, -(-whole // 2))


def is_regular(left: int, total: int, accumulate: int, *, first: bool = False) -> bool:
    """Whether an ordinary optimizer step leaves either nothing or enough for another."""
    needed = accumulate * (total + 2) if first else enough(total, accumulate)
    return left == accumulate * total or left >= needed


def regular_groups(left: int, total: int, accumulate: int, *, first: bool = False) -> int:
    """How many ordinary optimizer steps come before `next_group` must apply the rules of an epoch's end."""
    whole = accumulate * total
    groups = max((left - enough(total, accumulate)) // whole + 1, 0)
    if not groups and is_regular(left, total, accumulate, first=first):
        return 1
    return groups + (left - groups * whole == whole)


def whole_epoch(
    left: int, sizes: Ints, *, accumulate: int, low: Ints, high: Ints, first: bool = False
) -> tuple[int, Ints]:
    """(optimizer steps, samples per rank (W,)) that use up `left` under one allocation."""
    groups = regular_groups(left, int(sizes.sum()), accumulate, first=first)
    totals = groups * accumulate * sizes
    left -= int(totals.sum())
    while left:
        group = next_group(left, sizes, accumulate=accumulate, low=low, high=high)
        totals = totals + group.sum(0)
        left -= int(group.sum())
        groups += 1
    return groups, totals


def _last_groups(left: int, sizes: Ints, accumulate: int, low: Ints, high: Ints) -> Ints:
    each, extra = divmod(left, accumulate)
    total = int(sizes.sum())
    counts: tuple[Ints, int] | None = None
    if left > accumulate * total:
        if each - total < 2:
            counts = _join(each - total, extra, sizes, high)
    else:
        counts = _split(each, extra, sizes, low, high)
    if counts is None and (half := _half(left, sizes, accumulate, low, high)) is not None:
        counts, extra = half, 0
    if counts is None and each > 2 and high[sizes > 0].max() >= 2 + extra:
        counts = _split(min(total, each - 2), 0, sizes, low, high)
        extra = 0 if counts is not None else extra
    if counts is None:
        return _squeeze(each, extra, sizes, accumulate, low, high)
    per_step, receiver = counts
    group = np.tile(per_step, (accumulate, 1))
    group[-1, receiver] += extra
    return group


def _half(left: int, sizes: Ints, accumulate: int, low: Ints, high: Ints) -> tuple[Ints, int] | None:
    """Half of the samples left, so that the other half can be cut too; None if bounds allow neither rounding."""
    for each in (-(-left // (2 * accumulate)), left // (2 * accumulate)):
        rest = left - accumulate * each
        if rest >= 2 * accumulate and _split(*divmod(rest, accumulate), sizes, low, high) is not None:
            counts = _split(each, 0, sizes, low, high)
            if counts is not None:
                return counts
    return None


def _join(more: int, extra: int, sizes: Ints, high: Ints) -> tuple[Ints, int] | None:
    """`sizes` plus the remainder, given to the rank with the largest size that has room; ties to the lower rank."""
    roomy = (sizes > 0) & (high - sizes >= more + extra)
    if not roomy.any():
        return None
    receiver = int(np.argmax(np.where(roomy, sizes, 0)))
    counts = sizes.copy()
    counts[receiver] += more
    return counts, receiver


def _split(each: int, extra: int, sizes: Ints, low: Ints, high: Ints, least: int = 2) -> tuple[Ints, int] | None:
    """`each` samples over as many ranks as can have `least`, with room for `extra` more at the receiver; or None."""
    caps = np.where(sizes > 0, high, 0)
    order = np.argsort(-sizes, kind="stable")
    order = order[sizes[order] > 0]
    if extra:
        receiver = order[np.argmax(caps[order])]
        order = np.concatenate([[receiver], order[order != receiver]])
        caps[receiver] -= extra
    wanted = np.minimum(least, sizes)
    floors = np.minimum(wanted, caps)
    if floors[order[0]] < wanted[order[0]]:
        return None
    chosen = order[: int(np.searchsorted(np.cumsum(floors[order]), each, side="right"))]
    if chosen.size and caps[chosen].sum() < each:
        # All chosen are capped at `least` and one sample is left over: replace the last of them by a rank with room.
        roomy = order[chosen.size :][caps[order[chosen.size :]] > caps[chosen[-1]]]
        if not roomy.size or (extra and chosen.size == 1):
            return None
        chosen = np.append(chosen[:-1], roomy[0])
    if not chosen.size:
        return None
    floor = np.minimum(np.maximum(low[chosen], floors[chosen]), caps[chosen])
    if floor.sum() > each:
        floor = floors[chosen]
    counts = np.zeros_like(sizes)
    counts[chosen] = project(sizes[chosen], Bounds.of(chosen.size, floor, caps[chosen]), total=each)
    return counts, int(order[0])


def _squeeze(each: int, extra: int, sizes: Ints, accumulate: int, low: Ints, high: Ints) -> Ints:
    """The cut that bounds allow if no clean split exists: at least one sample, and the rest for another group."""
    each = min(each, int(sizes.sum()))
    base = _split(each, 0, sizes, low, high) or _split(each, 0, sizes, low, high, least=1)
    counts = np.zeros_like(sizes) if base is None else base[0]
    group = np.tile(counts, (accumulate, 1))
    room = np.where((counts if counts.any() else sizes) > 0, high - counts, 0)
    order = np.argsort(-room, kind="stable")
    before = np.cumsum(room[order]) - room[order]
    group[-1, order] += np.clip(extra - before, 0, room[order])
    return group

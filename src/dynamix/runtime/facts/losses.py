"""Checks that a job's losses carry the weights that `weighting` says."""

import re
from collections.abc import Callable, Iterator
from math import prod, sqrt
from typing import Any

import numpy as np
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from dynamix.window import Floats, Ints, Window

ROWS = 8  # fewest comparisons of workers for a verdict
ERRORS = 6.0  # standard errors by which the verdict must differ from the alternative
ALIKE = 3  # consecutive windows with one loss on all workers: then it may use all workers' samples
LAST_BITS = 1e-6  # of a loss: unlike devices differ by up to this if they compute the same
NODES = 100  # nodes of a loss's graph to visit: what it is computed from is near its end

_TWICE = (
    "the loss is in proportion to each worker's share of the batch, so it is weighted already, and the controller "
    "would weight its gradient a second time: write wrap(..., weighting='given'), or take the mean over the worker's "
    "own samples"
)
_NEVER = (
    "wrap(weighting='given') says that the loss carries the weights already, but it does not follow the workers' "
    "shares of the batch: leave weighting= out, or make it (its sum * number of ranks / samples of all ranks)"
)
_OF_ALL = (
    "the loss is made of the samples of all ranks (features gathered from them, or a statistic of the global batch), "
    "so its gradient is the union batch's already, and the controller would weight it by shares: write "
    "wrap(..., weighting='given')"
)


class WeightTest:
    """Compares workers' mean losses with their shares, window by window, until it is certain what losses carry.

    If all workers' samples are drawn alike, they have the same expected loss. So the slope of log(loss) over
    log(share), both less their means over workers, is 0 for a mean loss, and 1 for a loss multiplied by n_i W / N. It
    is a least-squares fit over all windows so far, in which shares must differ; its error follows from the residuals. A
    verdict needs `ROWS` comparisons, and `ERRORS` standard errors to both sides.

    A loss that is equal on all workers says nothing about weights: it may have been averaged for logging, or use all
    workers' samples. Then `judge` checks how it was computed.

    given     losses carry the weights, as the user says; windows hold them without the weights
    suspects  whether to pass the next loss to `judge`

    >>> test = WeightTest(given=False)
    >>> for scale in (2.3, 2.2, 2.1, 2.0, 1.9, 1.8, 1.7, 1.6):
    ...     test.look(Window.of([12, 4], loss=[1.5 * scale, 0.51 * scale]))
    >>> test.wrong[:32]
    'the loss is in proportion to eac'
    """

    def __init__(self, *, given: bool) -> None:
        self.given = given
        self.wrong: str | None = None  # the message for the user
        self.decided = self.suspects = False
        self._alike, self._last = 0, 0.0
        self._rows, self._shares_sq, self._both, self._losses_sq = 0, 0.0, 0.0, 0.0

    def look(self, window: Window) -> None:
        """Process a window of one cluster."""
        shares, losses = np.asarray(window.batch_size, dtype=float), np.asarray(window.loss)
        if self.decided or not (np.isfinite(losses) & (losses != 0) & (shares > 0)).all():
            return
        if self._one_loss(losses * shares if self.given else losses, shares) or (losses < 0).any():
            return
        x, y = (np.log(values) - np.log(values).mean() for values in (shares, losses))
        self._shares_sq += float(x @ x)
        self._both += float(x @ y)
        self._losses_sq += float(y @ y)
        self._rows += x.size - 1 if np.ptp(shares) else 0
        if self._rows >= ROWS:
            self._judge()

    def _one_loss(self, losses: Floats, shares: Floats) -> bool:
        """Whether all workers have the same loss."""
        if np.ptp(losses) > LAST_BITS * np.abs(losses).max():
            self._alike = 0
            return False
        if not self.given and np.ptp(shares) and losses[0] != self._last:
            self._alike, self._last = self._alike + 1, losses[0]
            self.suspects = self._alike >= ALIKE
        return True

    def judge(self, loss: Any, own: int, counts: Ints) -> None:
        """Check whether this worker's `loss` uses all workers' samples, `counts` (W,), instead of its `own` only."""
        self.suspects, loss = False, getattr(loss, "loss", loss)
        if isinstance(loss, Tensor) and _made_of_all(loss.grad_fn, own, int(counts.sum()), counts.size):
            self.wrong = _OF_ALL

    def _judge(self) -> None:
        slope = self._both / self._shares_sq
        error = sqrt(max(self._losses_sq - slope * self._both, 0.0) / (self._rows * self._shares_sq))
        toward = -slope if self.given else slope  # 0: as the user said; 1: the opposite
        # Losses that grow with the batch, such as contrastive ones, may have nearly the slope of a weighted loss.
        self.decided = ERRORS * error < 0.5 and (abs(toward) < 0.25 or abs(toward - 1) < 0.1)
        if self.decided and toward > 0.5:
            self.wrong = _NEVER if self.given else _TWICE


def _made_of_all(last: Any, own: int, total: int, workers: int) -> bool:
    """Whether the loss's graph, from its `last` node to its inputs, first reaches tensors of all ranks' samples.

    Such tensors have as many rows as all samples, or twice as many (two views), or come out of a collective. A path
    must lead from them to tensors of this rank's own samples, where paths end, so weights of a similar shape do not
    count. Nor does one number per rank, such as averaged mean losses.
    """
    ours, of_all = {own, 2 * own}, {total, 2 * total}

    def sizes_of(node: Any) -> set[int]:
        return {n for shape in shapes_of(node, workers) for n in shape}

    def before(node: Any) -> list[Any]:
        """Without own samples that an operation of torch only reshapes."""
        made_of = [] if sizes_of(node) & ours else nodes_before(node)
        one = len(node.next_functions) < 2 and not isinstance(node, BackwardCFunction)
        if not one or re.search("c10d|CppNode", node.name()):
            return made_of  # it may have added other ranks' samples
        return [of for of in made_of if not sizes_of(of) & ours]

    for node in walk(last, before):
        rows, sizes = {shape[0] for shape in shapes_of(node, workers)}, sizes_of(node)
        of_others = rows & of_all or (sizes and _may_be_collective(node, own, sizes))
        ways = before(node) if of_others and not sizes & ours else []
        if any(sizes_of(further) & ours for way in ways for further in walk(way, before)):
            return True
    return False


def walk(last: Any, before: Callable[[Any], list[Any]]) -> Iterator[Any]:
    """At most `NODES` nodes of a loss's graph, starting at `last`; `before` returns the nodes to visit from a node."""
    nodes = [] if last is None else [last]
    for node in nodes:
        yield node
        nodes += [further for further in before(node) if further not in nodes]
        del nodes[NODES:]


def nodes_before(node: Any) -> list[Any]:
    """The nodes that `node` was computed from."""
    return [before for before, _ in node.next_functions if before is not None]


def shapes_of(node: Any, least: int) -> list[tuple[int, ...]]:
    """The shapes of those tensors that an operation made which have more than `least` elements."""
    return [tuple(of.shape) for of in node._input_metadata if prod(of.shape) > least]


def _may_be_collective(node: Any, own: int, sizes: set[int]) -> bool:
    """Whether a node with tensors of these sizes may be a collective, not torch's own operation on local tensors."""
    name = node.name()
    if not isinstance(node, BackwardCFunction):
        return "c10d" in name or ("CppNode" in name and re.search("Gather|Reduce", name) is not None)
    return re.search("gather|reduce", name, re.IGNORECASE) is not None or all(n % own for n in sizes)

"""Detects samples that a loop trains in addition to its batch: from another loader, or a buffer of its own.

They would get the weight of the rank's share. Lengths alone are no proof: rows may be views, padding or negatives. So
the check needs three signs: every rank has the same number of them for any share, the loss has a term over them, and
they differ between ranks. Samples that are equal on all ranks have the correct gradient with any weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from dynamix.data import Piece
from dynamix.runtime.facts.losses import nodes_before, shapes_of, walk
from dynamix.window import Floats

# Round, number of samples, and a figure each of the first and of the last so many rows.
Told = tuple[int, int, Tensor, Tensor]

JOINED = 4  # different shares that must be seen before a joint mean cannot be padding to a multiple
LOOKS = 512  # batches after which the check ends
READ = 64  # elements in a figure
ALIKE = 1e-4  # figures of equal samples differ less, even on unlike devices

_OTHERS = (
    "the loop trains {0} samples more on every rank than the controller's batch has, from another loader or a buffer, "
    "so weights would be wrong: write wrap(..., weighting='loss') and weight each part of the loss by its own number "
    "of samples, (controller.weight(mine, count=len(x)) + controller.weight(other, count={0}))"
    ".backward(). If the loss gives every sample its weight already, write controller.step(count=len(x))"
)


class Beside:
    """Counts, for one loop, the rows in a batch's passes that are not samples of the batch.

    count   number of such rows, in the previous batches
    seen    whether a pass of the current batch may have had some
    """

    def __init__(self) -> None:
        self._passes: list[tuple[int, Tensor | None]] = []  # passes with gradients: rows, and their tensor
        self._open: tuple[int, Tensor | None, int] | None = None  # current pass, and backward passes before it
        self.count, self.seen = 0, False
        self._sizes = set[int]()  # shares that were seen with this `count`
        self._looks = 0  # batches whose losses and samples were checked

    def may_be_others(self, length: int, inputs: Iterable[Any], backwards: int) -> None:
        """A pass begins whose length is not the batch's, or is `count`, after `backwards` backward passes."""
        self.next_pass(backwards)
        self.seen = True
        tensor = next((value for value in inputs if isinstance(value, Tensor)), None)
        # Keep and read tensors on a device only once there is a suspicion.
        self._open = length, tensor if tensor is None or tensor.is_cpu or len(self._sizes) > 1 else None, backwards

    def next_pass(self, backwards: int) -> None:
        """Another pass begins, or the batch's last pass has ended."""
        if self._open is not None and backwards > self._open[2]:
            self._passes.append(self._open[:2])
        self._open = None

    def piece_done(self, piece: Piece, loss: Any, backwards: int, *, fits: bool) -> Told | None:
        """The current batch is done: what to report of other samples; None: nothing.

        fits   some of its passes had the batch's length
        """
        self.next_pass(backwards)
        passes, self._passes, self.seen = self._passes, [], False
        lengths, mine, counts = {length for length, _ in passes}, piece.samples, piece.plan.counts
        count = 0 if len(lengths) != 1 else lengths.pop() - (0 if fits else mine)
        if fits and count == mine and len(passes) < 2:
            return None  # the batch itself
        if count != self.count:
            self.count = count
            self._sizes.clear()
        self._sizes.add(mine)
        if count <= 0 or self._looks == LOOKS or (counts == counts[0]).all():
            return None
        self._looks += 1
        if not (fits or self._has_term(loss, count, count + mine)):
            return None
        (_, first), (_, last) = passes[0], passes[-1]
        if first is None or last is None:
            return None
        return piece.round.index, count, _figure(first[:count]), _figure(last[-count:])

    def _has_term(self, loss: Any, count: int, rows: int) -> bool:
        """Whether `loss` has a term over `count` of the `rows` in the model's passes, or over all of them."""
        last = getattr(getattr(loss, "loss", loss), "grad_fn", None)
        for node in walk(last, lambda node: [] if shapes_of(node, 1) else nodes_before(node)):
            shapes = shapes_of(node, 1)
            if any(shape[0] == rows for shape in shapes) and len(self._sizes) >= JOINED:
                return True
            if any(shape[0] == count for shape in shapes):
                made_of = (shape for further in walk(node, nodes_before) for shape in shapes_of(further, 1))
                if any(shape[0] == rows for shape in made_of):
                    return True
        return False


def wrong(told: Floats) -> str | None:
    """The message if ranks report (W, 4) different samples in addition to their shares; None if they do not.

    >>> import numpy as np
    >>> wrong(np.array([[7, 4, 0.1, 0.1], [7, 4, 0.2, 0.3]]))[:39]
    'the loop trains 4 samples more on every'
    >>> wrong(np.array([[7, 4, 0.1, 0.1], [7, 4, 0.2, 0.1]])), wrong(np.array([[7, 4, 0.1, 0.1], [7, 6, 0.2, 0.3]]))
    (None, None)
    """
    if not np.isfinite(told).all() or (told[:, :2] != told[0, :2]).any():
        return None
    # If only the first rows, or only the last, are equal on all ranks, the other end holds the dealt samples.
    return _OTHERS.format(int(told[0, 1])) if (np.ptp(told[:, 2:], axis=0) > ALIKE).all() else None


def _figure(rows: Tensor) -> Tensor:
    """A figure between -1 and 1 made of some elements; NaN if all are zero. Stays on their device."""
    flat = rows.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // READ)][:READ].float()
    return (some[::2].sum() - some[1::2].sum()) / some.abs().sum()

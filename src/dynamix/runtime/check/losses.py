"""Whether the losses of a job carry the weights that the controller was told they carry."""

from math import sqrt

import numpy as np

from dynamix.errors import UsageError
from dynamix.window import Window

ROWS = 8  # comparisons of workers that a verdict needs at least
ERRORS = 6.0  # standard errors that it must be away from what else it could be

_TWICE = (
    "the loss is in proportion to each worker's share of the batch, so it is weighted already, and the controller "
    "would weight its gradient a second time: write wrap(..., weighting='given'), or take the mean over the worker's "
    "own samples"
)
_NEVER = (
    "wrap(weighting='given') says that the loss carries the weights already, but it does not follow the workers' "
    "shares of the batch: leave weighting= out, or divide by the count of all workers and multiply by their number"
)


class WeightTest:
    """Compares workers' mean losses with their shares, window by window, until it is clear what a loss carries.

    Samples that are drawn alike have the same mean loss on every worker. So the slope of log(loss) over log(share),
    both less their means over workers, is 0 for a mean loss, and 1 for one that is multiplied by n_i W / N. The slope
    is the least-squares one over all windows so far, in which shares must differ; its error comes from what it leaves
    unexplained. A verdict needs `ROWS` comparisons and `ERRORS` standard errors to both sides.

    given   losses are said to carry the weight; windows hold them without it

    >>> test = WeightTest(given=False)
    >>> for scale in (2.3, 2.2, 2.1, 2.0, 1.9, 1.8, 1.7, 1.6):
    ...     test.look(Window.of([12, 4], loss=[1.5 * scale, 0.51 * scale]))
    >>> test.wrong[:32]
    'the loss is in proportion to eac'
    """

    def __init__(self, *, given: bool) -> None:
        self.given = given
        self.wrong: str | None = None  # what to tell the user
        self.decided = False
        self._rows, self._shares_sq, self._both, self._losses_sq = 0, 0.0, 0.0, 0.0

    def look(self, window: Window) -> None:
        """Take a window of one cluster into account."""
        shares, losses = np.asarray(window.batch_size, dtype=float), np.asarray(window.loss)
        if self.decided or not (np.isfinite(losses) & (losses > 0) & (shares > 0)).all():
            return
        x, y = (np.log(values) - np.log(values).mean() for values in (shares, losses))
        self._shares_sq += float(x @ x)
        self._both += float(x @ y)
        self._losses_sq += float(y @ y)
        self._rows += x.size - 1 if np.ptp(shares) else 0
        if self._rows >= ROWS:
            self._judge()

    def require_right(self) -> None:
        """Raise `UsageError` where a verdict is that weights are wrong."""
        if self.wrong is not None:
            raise UsageError(self.wrong)

    def _judge(self) -> None:
        slope = self._both / self._shares_sq
        unexplained = max(self._losses_sq - slope * self._both, 0.0)
        error = sqrt(unexplained / (self._rows * self._shares_sq))
        toward = -slope if self.given else slope  # 0: as it was said; 1: the other way
        # Losses that grow with the batch by themselves, such as contrastive ones, may come near the slope of a weight.
        self.decided = ERRORS * error < 0.5 and (abs(toward) < 0.25 or abs(toward - 1) < 0.1)
        if self.decided and toward > 0.5:
            self.wrong = _NEVER if self.given else _TWICE

"""The goodput rule: the allocation that the job model finds best, reached slowly where training has never been."""

from typing import Any

import numpy as np

from dynamix.model import JobModel
from dynamix.model.measured import asked_once
from dynamix.model.split import at_most
from dynamix.policies.fitted import FittedModel
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window

# Log of the global batch over the largest that training has met, per optimizer step: the learning rate grows with the
# batch, and a net that is thrown into a rate it never met learns less than AdaScale counts (docs/design/baselines.md).
GROWTH = 0.02
USUAL_STEPS = 5.0  # of a window that does not say
MOST_STEPS = 500.0
LEAST_GAIN = 0.005  # in log goodput, for which `Goodput` changes sizes at all


class Goodput:
    """Our strongest rule without learning: Cannikin's choice on estimates that follow a cluster that changes.

    Sizes are those of highest goodput that `JobModel` expects, with equal finishing times; beyond what training has met
    they grow only by `GROWTH` a step. If the noise scale is unknown, the global batch stays and only shares move.

    >>> policy, sizes = Goodput(), np.array([64, 64])
    >>> for _ in range(4):
    ...     seconds = np.array([0.1, 0.0]) + np.array([1e-3, 4e-3]) * sizes
    ...     sizes = policy.decide(Window.of(sizes, compute=seconds, compute_std=1e-4, steps=5), Bounds.of(2))
    >>> sizes.tolist()
    [82, 46]
    """

    def __init__(self) -> None:
        self.fitted = FittedModel()

    def fit_model(self, window: Window) -> JobModel:
        """Take in `window` ahead of `decide`; the job model after it."""
        return self.fitted.take_in(window)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        model = self.fitted.to_decide(window, self.fit_model)
        best = wish(model, window, bounds)
        return worth_changing(model, window, bounds, project(best, bounds, current=window.batch_size), best)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.fitted.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fitted.load_state_dict(state)


@asked_once  # by the policy, and by a guard over it
def wish(model: JobModel, window: Window, bounds: Bounds) -> Floats:
    """The rule's answer to the window that `model` has taken in, as real sizes (..., W), not projected."""
    return model.best(at_most(bounds, _ceiling(model, window)))


def worth_changing(model: JobModel, window: Window, bounds: Bounds, sizes: Ints, best: Floats) -> Ints:
    """`sizes`, or those in force where `sizes` promise less than `LEAST_GAIN` more; `best` is the rule's `wish`.

    A size that is new to a worker has its price, in kernels that are chosen or compiled for it. On a slow way up, where
    each step promises little, none is refused.
    """
    now = window.batch_size
    promised, present = model.log_goodput(np.stack([sizes, now]))
    total, ceiling = now.sum(-1), _ceiling(model, window)
    # It would go further if it might.
    growing = (best.sum(-1) >= 0.99 * ceiling) & (ceiling < bounds.total_high)
    allowed = ((now >= bounds.low) & (now <= bounds.high) & (now % bounds.quantum == 0)).all(-1)
    allowed &= (total >= bounds.total_low) & (total <= bounds.total_high)
    little = allowed & ~growing & (promised - present < LEAST_GAIN)
    return np.asarray(np.where(little[..., None], now, sizes))


def _ceiling(model: JobModel, window: Window) -> Floats:
    """The largest global batch (...) to which the rule grows in this decision."""
    steps = np.where(np.isnan(window.steps), USUAL_STEPS, np.minimum(window.steps, MOST_STEPS))
    return np.asarray(model.largest.total * np.exp(GROWTH * steps))

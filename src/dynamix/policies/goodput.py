"""The goodput rule: the job model's best allocation; beyond batches of the training so far it grows slowly."""

from typing import Any

import numpy as np

from dynamix.model import JobModel
from dynamix.model.measured import asked_once
from dynamix.model.split import at_most
from dynamix.policies.fitted import FittedModel
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window

# Growth of log global batch per optimizer step, beyond the largest of the training so far. The learning rate grows with
# the batch, and a net put suddenly into a new rate learns less than AdaScale counts (docs/design/baselines.md).
GROWTH = 0.02
USUAL_STEPS = 5.0  # for a window without a number of steps
MOST_STEPS = 500.0
LEAST_GAIN = 0.005  # in log goodput; `Goodput` changes no sizes for less


class Goodput:
    """Our strongest rule without learning: Cannikin's choice, on estimates that follow a changing cluster.

    Sizes are those of the highest goodput that `JobModel` expects, with equal finishing times. Beyond batches of the
    training so far they grow only by `GROWTH` a step. Without a noise scale only shares change.

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
        """Take in `window` before `decide`; returns the job model after it."""
        return self.fitted.take_in(window)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        model = self.fitted.to_decide(window, self.fit_model)
        best = wish(model, window, bounds)
        return worth_changing(model, window, bounds, project(best, bounds, current=window.batch_size), best)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.fitted.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fitted.load_state_dict(state)


@asked_once  # the policy asks, and so does a guard around it
def wish(model: JobModel, window: Window, bounds: Bounds) -> Floats:
    """The rule's answer to the last window of `model`, as real sizes (..., W), not projected."""
    return model.best(at_most(bounds, _ceiling(model, window)))


def worth_changing(model: JobModel, window: Window, bounds: Bounds, sizes: Ints, best: Floats) -> Ints:
    """`sizes`, or those in force if `sizes` promise less than `LEAST_GAIN` more; `best` is the rule's `wish`.

    A size that is new to a worker costs time, because kernels are chosen or compiled for it. While the batch grows
    slowly, each step promises little, so no change is rejected.
    """
    now = window.batch_size
    promised, present = model.log_goodput(np.stack([sizes, now]))
    total, ceiling = now.sum(-1), _ceiling(model, window)
    # The ceiling stops the growth, not the goodput.
    growing = (best.sum(-1) >= 0.99 * ceiling) & (ceiling < bounds.total_high)
    allowed = ((now >= bounds.low) & (now <= bounds.high) & (now % bounds.quantum == 0)).all(-1)
    allowed &= (total >= bounds.total_low) & (total <= bounds.total_high)
    little = allowed & ~growing & (promised - present < LEAST_GAIN)
    return np.asarray(np.where(little[..., None], now, sizes))


def _ceiling(model: JobModel, window: Window) -> Floats:
    """The largest global batch (...) that the rule may reach in this decision."""
    steps = np.where(np.isnan(window.steps), USUAL_STEPS, np.minimum(window.steps, MOST_STEPS))
    return np.asarray(model.largest.total * np.exp(GROWTH * steps))

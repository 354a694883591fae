"""One job model for a policy and the wrappers that check it, fitted once a window."""

from collections.abc import Callable
from typing import Any

from dynamix.errors import StateError
from dynamix.model import JobModel
from dynamix.window import Window


class FittedModel:
    """A policy's `JobModel`, or that of the policy it wraps; the first request in a window fits it.

    A policy that decides by a job model has the optional method `fit_model(window) -> JobModel`. It takes in a window
    before `decide`, which then does not take in the same `Window` object again. So a wrapper fits the model, asks the
    policy, and judges its answer by the same fit, even if the policy fails.

    now   the model after the last window
    """

    def __init__(self) -> None:
        self.now = JobModel()
        self._ahead: Window | None = None  # taken in, but not decided on yet

    def take_in(self, window: Window, policy: Any = None) -> JobModel:
        """Take in `window`, through `policy` if that has a model of its own."""
        fit = getattr(policy, "fit_model", None)
        self._ahead = window
        self.now = self.now.update(window) if fit is None else fit(window)
        return self.now

    def to_decide(self, window: Window, fit_model: Callable[[Window], JobModel]) -> JobModel:
        """The model to decide on `window` by. `fit_model` takes the window in, unless that was already done."""
        if self._ahead is not window:
            fit_model(window)
        self._ahead = None
        return self.now

    def forget(self) -> None:
        """Start with a new model."""
        self.now = JobModel()

    def state_dict(self, policy: Any = None) -> dict[str, Any] | None:
        """The model's state; None if `policy` saves it, or if there was no window."""
        held = hasattr(policy, "fit_model") or not self.now.sizes.size
        return None if held else self.now.state_dict()

    def load_state_dict(self, policy_state: dict[str, Any]) -> None:
        """Load the model from `policy_state["model"]`, where the policy keeps the result of `state_dict`."""
        if "model" not in policy_state:
            raise StateError("a policy's state without a job model is of another policy: begin without that state")
        state = policy_state["model"]
        self.now = JobModel() if state is None else JobModel.from_state(state)
        self._ahead = None

"""One job model for a policy and all that watch over it, fitted once a window."""

from collections.abc import Callable
from typing import Any

from dynamix.errors import StateError
from dynamix.model import JobModel
from dynamix.window import Window


class FittedModel:
    """A policy's `JobModel`, or that of the policy it wraps, whoever asks for it first.

    A policy that decides by a job model has the optional method `fit_model(window) -> JobModel`: it takes a window in
    ahead of `decide`, which then does not take in the same `Window` object again. So a wrapper fits the model, asks the
    policy and judges its answer by one and the same fit, also where the policy fails.

    now   after the last window
    """

    def __init__(self) -> None:
        self.now = JobModel()
        self._ahead: Window | None = None  # taken in, and not decided on yet

    def take_in(self, window: Window, policy: Any = None) -> JobModel:
        """Take in `window`, through `policy` if that has a model of its own."""
        fit = getattr(policy, "fit_model", None)
        self._ahead = window
        self.now = self.now.update(window) if fit is None else fit(window)
        return self.now

    def to_decide(self, window: Window, fit_model: Callable[[Window], JobModel]) -> JobModel:
        """The model by which `window` is decided on; taken in by `fit_model` unless that was done ahead."""
        if self._ahead is not window:
            fit_model(window)
        self._ahead = None
        return self.now

    def forget(self) -> None:
        """Begin anew."""
        self.now = JobModel()

    def state_dict(self, policy: Any = None) -> dict[str, Any] | None:
        """The model's state; None if `policy` saves it, or if no window was seen."""
        held = hasattr(policy, "fit_model") or not self.now.sizes.size
        return None if held else self.now.state_dict()

    def load_state_dict(self, policy_state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, which the policy keeps as `model` in its own state."""
        if "model" not in policy_state:
            raise StateError("a policy's state without a job model is of another policy: begin without that state")
        state = policy_state["model"]
        self.now = JobModel() if state is None else JobModel.from_state(state)
        self._ahead = None

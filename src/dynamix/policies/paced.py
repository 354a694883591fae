"""How long the next window is: as short as what changes asks for, as long as decisions cost."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from dynamix.model import JobModel
from dynamix.model.measured import step_seconds
from dynamix.model.state import array_of
from dynamix.policies.fitted import FittedModel
from dynamix.policies.protocol import Policy, boundary
from dynamix.policies.wrappers import load_policy, peers_of, report_of
from dynamix.window import Bounds, Floats, Ints, Window

LEAST, MOST = 1, 20  # optimizer steps of a window
FIRST = 2  # of the first window; each later one may be a step longer than there were windows before it
DECISION_S = 0.003  # processor time of a decision; it may hide behind a device
CHANGE = 0.03  # of a step: what a decision costs besides, in new sizes and in sizes that only errors moved
PRIOR = 0.0036  # log goodput a step that goes stale where nothing is known; then a window has four steps
PRIOR_STEPS = 100.0
FORGET_STEPS = 500.0


@dataclass(frozen=True, slots=True)
class PaceState:
    """What a pace knows, arrays (...).

    stale    log goodput that jumps of workers made an allocation lose, summed over jumps that lasted
    steps    optimizer steps over which; both forget
    found    the same of a jump that the next window must confirm
    step_s   seconds of a step
    windows  so far
    """

    stale: Floats
    steps: Floats
    found: Floats
    step_s: Floats
    windows: Floats

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> PaceState:
        """Nothing known of so many clusters."""
        none = np.zeros(shape)
        return cls(stale=none, steps=none, found=none, step_s=np.full(shape, np.nan), windows=none)


class Paced:
    """`policy`, asked after windows whose length follows what changes.

    A window of k steps costs a part D/k of every step, D being what a decision costs in steps. A worker that changes
    its speed leaves the allocation stale for half a window: with S log goodput that becomes stale a step, S k/2. Both
    are least together at k = sqrt(2 D/S). S is counted from jumps that lasted (`WorkerCosts`): what the new answer
    promises over the sizes in force in the window that found one.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy, self.fitted = policy, FittedModel()
        self.state = PaceState.of(())

    @property
    def boundary(self) -> Literal["window", "epoch"]:
        """How often the policy wants to be asked."""
        return boundary(self.policy)

    @property
    def window_length(self) -> Ints:
        """Optimizer steps (...) of the next window."""
        s = self.state
        rate = (PRIOR * PRIOR_STEPS + s.stale) / (PRIOR_STEPS + s.steps)
        cost = CHANGE + DECISION_S / np.where(s.step_s > 0, s.step_s, np.inf)
        best = np.sqrt(2.0 * cost / rate)
        return np.asarray(np.clip(np.rint(np.minimum(best, FIRST + s.windows)), LEAST, MOST), dtype=np.int64)

    def fit_model(self, window: Window) -> JobModel:
        """Take in `window` ahead of `decide`; the job model after it."""
        return self.fitted.take_in(window, self.policy)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        lead = window.batch_size.shape[:-1]
        before = self.fitted.now
        known = before.costs.lasted if before.sizes.shape == window.batch_size.shape else np.zeros((*lead, 2))
        model = self.fitted.to_decide(window, self.fit_model)
        answer = self.policy.decide(window, bounds)
        if self.state.stale.shape != lead:
            self.state = PaceState.of(lead)
        self._learn(window, model, known, np.asarray(answer))
        return answer

    def _learn(self, window: Window, model: JobModel, known: Floats, answer: Ints) -> None:
        s, costs = self.state, model.costs
        steps = np.where(np.isnan(window.steps), 0.0, window.steps)
        lasted = costs.lasted[..., 0] - 0.95 * known[..., 0] > 0.5
        jumped = np.isfinite(costs.before[..., 0]).any(-1)
        promised, present = model.log_goodput(np.stack([answer, window.batch_size]))
        gain = np.nan_to_num(np.maximum(promised - present, 0.0))
        forget = np.exp(-steps / FORGET_STEPS)
        step_s = step_seconds(window)
        self.state = PaceState(
            stale=forget * s.stale + np.where(lasted, s.found, 0.0),
            steps=forget * s.steps + steps,
            found=np.where(jumped, gain, 0.0),
            step_s=np.where(step_s > 0, step_s, s.step_s),
            windows=s.windows + 1.0,
        )

    def report(self, *, asked: bool = True) -> dict[str, Any]:
        """The policy's own report."""
        return report_of(self.policy, asked=asked)

    def peers(self) -> Any:
        return peers_of(self.policy)

    def state_dict(self) -> dict[str, Any]:
        own = {e.name: np.asarray(getattr(self.state, e.name), np.float64).tolist() for e in fields(PaceState)}
        return {"paced": self.policy.state_dict(), "model": self.fitted.state_dict(self.policy), "pace": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also of a policy whose windows were of one length: the pace then starts anew."""
        if "paced" not in state:
            load_policy(self.policy, state)
            return
        load_policy(self.policy, state["paced"])
        self.fitted.load_state_dict(state)
        self.state = PaceState(**{entry.name: array_of(state["pace"][entry.name]) for entry in fields(PaceState)})

"""The length of the next window: short if the cluster changes often, long if decisions cost much."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from dynamix.model import JobModel
from dynamix.model.measured import step_seconds
from dynamix.policies.fitted import FittedModel
from dynamix.policies.protocol import Policy, boundary
from dynamix.policies.wrappers import load_policy, pace_as_written_now, peers_of, report_of
from dynamix.window import Bounds, Floats, Ints, Window

FIRST, LEAST, MOST = 2, 1, 20  # optimizer steps of a window
CHANGE = 0.03  # steps that a decision costs besides its own time, through new sizes and sizes changed by mere errors
PRIOR = 0.004  # log goodput a step that goes stale, before measurements; a window then has four steps
MEMORY = 100.0  # steps
NO_LESS = 1e-9  # lower limit of the stale part, which in a quiet job falls without end


class Paced:
    """`policy`, asked after windows whose length follows how fast the cluster changes.

    A window of k steps adds D/k to every step, if a decision costs D steps. A worker that changes its speed makes the
    allocation stale for half a window on average: with S log goodput that becomes stale a step, that costs S k/2. The
    sum is least at k = sqrt(2 D/S). S is a mean over the last steps. It counts the gain that a new answer promised over
    the sizes in force, per step, in windows in which a worker's seconds left the expected ones by more than noise.

    clock   processor seconds of the deciding thread; a clock that stands still if deciding takes no time
    stale   S of each cluster (...)
    """

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.thread_time) -> None:
        self.policy, self.clock, self.fitted = policy, clock, FittedModel()
        self.stale, self._length = np.asarray(PRIOR), np.asarray(FIRST)

    @property
    def boundary(self) -> Literal["window", "epoch"]:
        """How often the policy wants to be asked."""
        return boundary(self.policy)

    @property
    def window_length(self) -> Ints:
        """Optimizer steps (...) of the next window."""
        return self._length

    def fit_model(self, window: Window) -> JobModel:
        """Take in `window` before `decide`; returns the job model after it."""
        return self.fitted.take_in(window, self.policy)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        began = self.clock()
        model = self.fitted.to_decide(window, self.fit_model)
        answer = np.asarray(self.policy.decide(window, bounds))
        self.stale = self._staler(window, model, answer)
        step_s = step_seconds(window)
        cost = CHANGE + (self.clock() - began) / np.where(step_s > 0, step_s, np.inf)
        self._length = np.clip(np.rint(np.sqrt(2.0 * cost / np.fmax(self.stale, NO_LESS))), LEAST, MOST).astype(
            np.int64
        )
        return answer

    def _staler(self, window: Window, model: JobModel, answer: Ints) -> Floats:
        """`stale` after `window`, which was answered by `answer`."""
        promised, present = model.log_goodput(np.stack([answer, window.batch_size]))
        left = np.isfinite(model.costs.before[..., 0]).any(-1)
        gain = np.where(left, np.nan_to_num(np.maximum(promised - present, 0.0)), 0.0)
        steps = np.where(window.steps >= 1, window.steps, 1.0)
        keep = np.exp(-steps / MEMORY)
        return np.asarray(keep * self.stale + (1.0 - keep) * gain / steps)

    def report(self, *, asked: bool = True) -> dict[str, Any]:
        """The policy's own report."""
        return report_of(self.policy, asked=asked)

    def peers(self) -> Any:
        return peers_of(self.policy)

    def state_dict(self) -> dict[str, Any]:
        model = self.fitted.state_dict(self.policy)
        return {"paced": self.policy.state_dict(), "model": model, "pace": self.stale.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state. If the policy's windows had a fixed length, the pace starts anew."""
        if "paced" not in state:
            load_policy(self.policy, state)
            return
        load_policy(self.policy, state["paced"])
        self.fitted.load_state_dict(state)
        self.stale = np.asarray(pace_as_written_now(state["pace"]), dtype=np.float64)

"""Learning on a real job (DYNAMIX, arXiv 2510.08522, trains on real jobs): a policy that goes on learning while it
serves.

`LearningPolicy` asks the policy it wraps, now and then answers a little beside it, and follows what came of it with
policy-gradient steps between decisions. What it may cost is bounded three ways: by the size of the deviations, by their
expected loss, and by how far the policy may move from the one that was loaded (docs/design/live-learning.md).
"""

import copy
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynamix.errors import ConfigError, StateError
from dynamix.model import JobModel, log_goodput
from dynamix.model.measured import step_seconds
from dynamix.model.running import SlowAverage
from dynamix.model.state import restored, saved
from dynamix.policies.fitted import FittedModel
from dynamix.policies.learned.deviations import DeviationTrial, LiveConfig, Pending, deviated, log_ratio, means
from dynamix.policies.protocol import Policy, boundary
from dynamix.policies.wrappers import after_answer, report_of
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window

LEAST_WINDOWS = 4  # explored windows before the first gradient step
SLIGHTEST = 1e-300  # samples


class LearningPolicy:
    """`policy`, which goes on learning: what `Controller(policy, learn=True)` makes of it.

    `policy.net` must be a torch module called by `policy.decide` as `net(observed, mask)` that returns (delta (N, W,
    1), growth (N, 1), value), the action in log share and log global batch; or a net with methods `mean_action` and
    `divergence` (see `AdditiveNet`). Raises `ConfigError` for policies without one. `decide` answers; `improve`, called
    after the answer is out, makes at most one gradient step. One thread may decide while another saves. Windows may
    have any leading shape; all clusters of one object learn one policy together.
    """

    def __init__(self, policy: Policy, config: LiveConfig | None = None, *, seed: int = 0) -> None:
        self.policy, self.config = policy, config or LiveConfig()
        self.boundary = boundary(policy)
        self.net = net_of(policy)
        self.anchor = copy.deepcopy(self.net).requires_grad_(False)
        self.net.register_forward_hook(self._capture)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=self.config.learning_rate, eps=1e-5)
        self.generator = torch.Generator().manual_seed(seed)
        self.fitted, self.reference = FittedModel(), SlowAverage()
        self.trials: list[DeviationTrial] = []
        self.windows = self.tried = self.updates = 0
        self.elapsed_s = self.spent_s = np.zeros(0)  # (N,); expected loss of all trials
        self.divergence = self.learning_s = self.longest_s = self.learned_at_s = 0.0
        self._pending: Pending | None = None
        self._owed = self._capturing = False
        self._seen: tuple[Tensor, Tensor] | None = None
        self._regret = float("nan")
        self._lock = threading.RLock()

    @property
    def learns_by(self) -> LiveConfig:
        """What a policy that learns already is known by."""
        return self.config

    def fit_model(self, window: Window) -> JobModel:
        """Take in `window` ahead of `decide`; the job model after it, the policy's own if it decides by one."""
        with self._lock:
            return self.fitted.take_in(window, self.policy)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        with self._lock:
            self.improve()  # if the last window's was never called for
            model = self.fitted.to_decide(window, self.fit_model)
            self._judge(model, window)
            self._capturing, self._seen = True, None
            try:
                answer: Ints = np.asarray(self.policy.decide(window, bounds))
            finally:
                self._capturing = False
            self._owed = True
            return self._deviate(model, window, bounds, answer)

    def improve(self) -> None:
        """The learning that the last decision owes: at most one gradient step. Does nothing when called again."""
        with self._lock:
            owed, self._owed = self._owed, False
            if not owed or len(self.trials) < min(LEAST_WINDOWS, self.config.memory):
                return
            now_s = float(self.elapsed_s.mean())
            if now_s < self.learned_at_s + self.config.every_s:
                return
            self.learned_at_s = now_s
            began = time.perf_counter()
            with torch.inference_mode(False), torch.enable_grad():  # whatever the training loop is in the middle of
                self._gradient_step()
            took_s = time.perf_counter() - began
            self.learning_s, self.longest_s = self.learning_s + took_s, max(self.longest_s, took_s)

    def after_answer(self) -> None:
        self.improve()
        after_answer(self.policy)

    def report(self, *, asked: bool = True) -> dict[str, Any]:
        """The policy's own report, and as `learning` what was tried, what it may have cost, where the policy is."""
        elapsed = float(self.elapsed_s.sum())
        expected_loss = float(self.spent_s.sum()) / elapsed if elapsed else 0.0
        counted = {name: getattr(self, name) for name in ("windows", *_COUNTED) if name != "learned_at_s"}
        learning = {**counted, "expected_loss": expected_loss, "regret": self._regret}
        return {**report_of(self.policy, asked=asked), "learning": learning}

    def save(self, path: str | Path) -> None:
        """Write the policy as it is now to a file of its kind, to serve elsewhere without learning."""
        with self._lock:
            save = getattr(self.policy, "save", None)
            if save is None:
                raise ConfigError("policy", type(self.policy).__name__, "a policy with `save`", "save its net yourself")
            save(path)

    def _capture(self, module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        """What the policy's network was shown for its answer."""
        if self._capturing:
            self._seen = given[0], given[1]

    def _judge(self, model: JobModel, window: Window) -> None:
        """Count the time, judge the last trial."""
        workers = window.workers
        seconds = step_seconds(window).reshape(-1)
        tried = [*self.trials, *([] if self._pending is None else [self._pending.trial])]
        other_job = any(trial.mask.shape[-1] != workers for trial in tried[-2:])
        if self.elapsed_s.shape != seconds.shape or other_job:
            self.elapsed_s, self.spent_s = np.zeros(seconds.shape), np.zeros(seconds.shape)
            self._pending, self.trials, self.windows = None, [], 0
        self.windows += 1
        steps = np.where(window.steps >= 1, window.steps, 1.0).reshape(-1)
        self.elapsed_s = self.elapsed_s + np.nan_to_num(seconds * steps)
        before, achieved = self.reference.value, model.achieved(window, noise="window")
        self.reference = self.reference.update(achieved)
        if before.shape == achieved.shape:
            self._regret = float(np.nan_to_num(achieved - before).mean())
        pending, self._pending = self._pending, None
        if pending is None:
            return
        applied = (window.batch_size.reshape(-1, workers) == pending.sizes).all(-1)
        total = window.batch_size.sum(-1).astype(np.float64).reshape(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            worth = _log_value(model, total, np.log(seconds)) - _log_value(model, pending.total, pending.log_step)
        known = applied & np.isfinite(worth)
        if known.any():
            pending.trial.worth = torch.from_numpy(np.where(known, worth, np.nan)).float()
            newest = max(min(self.config.memory, self.config.rows // (workers * len(seconds))), LEAST_WINDOWS)
            self.trials = [*self.trials, pending.trial][-newest:]

    def _deviate(self, model: JobModel, window: Window, bounds: Bounds, answer: Ints) -> Ints:
        """The answer, or one a little beside it where that is affordable."""
        c, lead, workers = self.config, window.batch_size.shape[:-1], window.workers
        count = int(np.prod(lead))
        of_share = bool(torch.rand(1, generator=self.generator) < 0.5) and workers > 1
        noise = torch.randn((count, 2 * c.draws + 1, workers if of_share else 1), generator=self.generator).double()
        if self._seen is None or self.windows <= c.warm_up or answer.shape != window.batch_size.shape:
            return answer
        greedy = answer.reshape(-1, workers).astype(np.float64)
        known_noise = model.guided.reshape(-1)
        draws = noise.numpy() * (c.share_sd if of_share else c.global_sd)
        draws[:, c.draws : -1] = -draws[:, : c.draws]  # antithetic: their mean is zero
        wished = deviated(greedy[:, None], draws, of_share)
        price, expected = _price(model, lead, greedy, wished[:, :-1])
        seconds = np.exp(expected) * np.where(window.steps >= 1, window.steps, 1.0).reshape(-1)
        allowed = self.spent_s + price * seconds <= c.max_loss * (self.elapsed_s + seconds)
        allowed &= np.isfinite(price) & (known_noise | of_share)
        wish = np.where(allowed[:, None], wished[:, -1], greedy).reshape(window.batch_size.shape)
        total = np.where(allowed & (not of_share), wished[:, -1].sum(-1), greedy.sum(-1)).reshape(lead)
        tried: Ints = project(wish, bounds, total=total, current=window.batch_size)
        tried = np.where(allowed.reshape(*lead, 1), tried, answer)
        self._remember(window, greedy, tried.reshape(-1, workers), expected, price * seconds, of_share)
        return tried

    def _remember(
        self, window: Window, greedy: Floats, tried: Ints, expected: Floats, price_s: Floats, of_share: bool
    ) -> None:
        """Note the deviation as it came out after rounding and bounds, and what it is expected to cost."""
        active = (greedy > 0) & (tried > 0)
        differs = (tried != greedy).any(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(active, np.log(tried / greedy), 0.0)
            growth = np.log(tried.sum(-1) / greedy.sum(-1))
        mean = share.sum(-1, keepdims=True) / np.maximum(active.sum(-1, keepdims=True), 1)
        share = np.where(active, share - mean, 0.0)
        self.spent_s = self.spent_s + np.where(differs, np.nan_to_num(price_s), 0.0)
        self.tried += int(differs.sum())
        if not differs.any() or self._seen is None:
            return
        observed, mask = (seen.clone() for seen in self._seen)  # inference tensors cannot be learned from
        with torch.no_grad():
            mean_share, mean_growth = means(self.net, observed, mask)
        kept = torch.from_numpy(differs)
        of_shares = torch.from_numpy(share).float() * kept[:, None] * of_share
        of_growth = torch.from_numpy(growth).float() * kept * (not of_share)
        unknown = torch.full((len(greedy),), torch.nan)
        trial = DeviationTrial(observed, mask, of_shares, of_growth, mean_share, mean_growth, unknown)
        self._pending = Pending(trial, tried.copy(), greedy.sum(-1), expected)

    def _gradient_step(self) -> None:
        """One clipped policy-gradient step on the newest trials, kept within the divergence allowed."""
        c, trials = self.config, self.trials
        batch = {entry.name: torch.cat([getattr(t, entry.name) for t in trials]) for entry in fields(DeviationTrial)}
        known = torch.isfinite(batch["worth"])
        worth = batch["worth"][known]
        advantage = torch.zeros_like(batch["worth"])
        advantage[known] = (worth - worth.mean()) / (worth.std(correction=0) + 1e-6)
        mean_share, mean_growth = means(self.net, batch["observed"], batch["mask"])
        of_shares = log_ratio(mean_share - batch["mean_share"], batch["share"], c.share_sd)
        of_growth = log_ratio(mean_growth - batch["mean_growth"], batch["growth"], c.global_sd)
        gain = (self._clipped(of_shares, advantage[:, None]) * (batch["share"] != 0)).sum(-1)
        gain = gain + self._clipped(of_growth, advantage) * (batch["growth"] != 0)
        self.optimizer.zero_grad(set_to_none=True)
        (-gain.mean()).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.updates += 1
        self._keep_near(batch["observed"], batch["mask"])

    def _clipped(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        ratio = log_ratio.clamp(-5, 5).exp()
        return torch.minimum(ratio * advantage, ratio.clamp(1 - self.config.clip, 1 + self.config.clip) * advantage)

    @torch.no_grad()
    def _keep_near(self, observed: Tensor, mask: Tensor) -> None:
        """Draw the weights back towards the anchor's until the divergence on these observations is within its limit."""
        for _ in range(20):
            self.divergence = self._divergence(observed, mask)
            if self.divergence <= self.config.kl_limit:
                return
            for mine, held in zip(self.net.parameters(), self.anchor.parameters(), strict=True):
                mine.lerp_(held, 0.25)
        self.net.load_state_dict(self.anchor.state_dict())
        self.divergence = 0.0

    def _divergence(self, observed: Tensor, mask: Tensor) -> float:
        """KL from the anchor, nats: of the net's own distribution, else of the deviations' around both means."""
        if (own := getattr(self.net, "divergence", None)) is not None:
            return float(own(self.anchor, observed, mask))
        share, growth = means(self.net, observed, mask)
        held_share, held_growth = means(self.anchor, observed, mask)
        of_share = ((share - held_share).square() * mask).sum() / mask.sum().clamp(min=1)
        of_growth = (growth - held_growth).square().mean()
        c = self.config
        return float(of_share / (2 * max(c.share_sd, 1e-3) ** 2) + of_growth / (2 * max(c.global_sd, 1e-3) ** 2))

    def state_dict(self) -> dict[str, Any]:
        """Policy, learner, optimizer, random generator, budget and what was tried: to go on exactly."""
        with self._lock:
            return {
                "policy": self.policy.state_dict(),
                "learned": self._learned(),
                "model": self.fitted.state_dict(self.policy),
                "reference": saved(self.reference),
                "trials": [trial.state_dict() for trial in self.trials],
                "pending": None if self._pending is None else self._pending.state_dict(),
                "owed": self._owed,
                "windows": self.windows,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`, or from the state of the same policy without learning."""
        with self._lock:
            if "learned" not in state:
                self.policy.load_state_dict(state)
                return
            self._check(state["learned"])
            self.policy.load_state_dict(state["policy"])
            self._load_learned(state["learned"])
            self.fitted.load_state_dict(state)
            self.reference = restored(self.reference, state["reference"])
            self.trials = [DeviationTrial(**trial) for trial in state["trials"]]
            self._pending = None if state["pending"] is None else Pending.of(state["pending"])
            self._owed, self.windows = bool(state["owed"]), int(state["windows"])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def carry_over(self, state: dict[str, Any]) -> None:
        """Take all that was learned from the state of a job with another number of workers."""
        with self._lock:
            if "learned" in state:
                self._load_learned(state["learned"])

    def _learned(self) -> dict[str, Any]:
        return {
            "net": {name: value.clone() for name, value in self.net.state_dict().items()},
            "anchor": {name: value.clone() for name, value in self.anchor.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "generator": self.generator.get_state(),
            "elapsed_s": self.elapsed_s.tolist(),
            "spent_s": self.spent_s.tolist(),
            **{name: getattr(self, name) for name in _COUNTED},
        }

    def _check(self, saved: dict[str, Any]) -> None:
        shapes, given = ({k: v.shape for k, v in net.items()} for net in (self.net.state_dict(), saved["net"]))
        if shapes != given:
            raise StateError(
                "the learned weights in this checkpoint are of another network, as by a version with other features: "
                "go on with learn=False, or begin learning anew without the checkpoint's policy state"
            )

    def _load_learned(self, saved: dict[str, Any]) -> None:
        self._check(saved)
        self.net.load_state_dict(saved["net"])
        self.anchor.load_state_dict(saved["anchor"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.generator.set_state(saved["generator"])
        self.elapsed_s, self.spent_s = (np.asarray(saved[name], np.float64) for name in ("elapsed_s", "spent_s"))
        for name in _COUNTED:
            setattr(self, name, saved[name])


_COUNTED = ("tried", "updates", "divergence", "learned_at_s", "learning_s", "longest_s")


def _log_value(model: JobModel, total: Floats, log_step: Floats) -> Floats:
    """log goodput (N,) of global batches (N,) whose steps take that long, at the noise scale known now.

    Without a noise scale, log samples/s: then only shares are tried, and the global batch is no temptation.
    """
    return log_goodput(total, log_step, model.log_waste(total.reshape(model.base.shape)).reshape(-1))


def _price(model: JobModel, lead: tuple[int, ...], greedy: Floats, wished: Floats) -> tuple[Floats, Floats]:
    """Expected loss (N,) in log goodput of sizes (N, K, W) against `greedy` (N, W), and log step time of that.

    A deviation that the model calls a gain counts nothing rather than less than nothing.
    """
    every = np.concatenate([greedy[:, None], wished], 1)
    each = np.moveaxis(every.reshape(*lead, *every.shape[1:]), -2, 0)  # (1 + K, ..., W)
    # A worker that is given nothing still counts with its fixed cost here.
    step = model.log_step(np.maximum(each, SLIGHTEST))
    total = each.sum(-1)
    value = np.moveaxis(log_goodput(total, step, model.log_waste(total)), 0, -1).reshape(len(greedy), -1)
    price = np.maximum(value[:, :1] - value[:, 1:], 0.0).mean(-1)
    return np.asarray(price), step[0].reshape(-1)


def learning(policy: Policy, learn: bool | LiveConfig) -> Policy:
    """`policy`, made to learn if `learn` says so."""
    if not isinstance(learn, bool | LiveConfig):
        fix = "see dynamix.policies.learned.deviations.LiveConfig"
        raise ConfigError("learn", learn, "True, False or a LiveConfig", fix)
    if (learns_by := getattr(policy, "learns_by", None)) is not None:
        if isinstance(learn, LiveConfig) and learn != learns_by:
            raise ConfigError("learn", learn, "what the policy already learns by", "give the policy without learning:")
        return policy
    if learn is False:
        return policy
    return LearningPolicy(policy, None if learn is True else learn)


def net_of(policy: Policy) -> nn.Module:
    """The network of the policy, or of the one it watches over."""
    inner: Any = policy
    for _ in range(4):
        net = getattr(inner, "net", None)
        if isinstance(net, nn.Module):
            return net
        inner = getattr(inner, "policy", None)
    allowed = "with policies that have a network: dynamix, dynamix-paper, a .safetensors file"
    raise ConfigError("learn", True, allowed, f"{type(policy).__name__} has nothing to learn; use learn=False")

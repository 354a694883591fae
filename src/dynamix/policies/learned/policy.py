"""The learned DYNAMIX policy: a small network's residual around the goodput rule's answer.

b = project(B_rule * exp(g) * softmax(log share_rule_i + delta_i)): one delta per worker, of which only differences
count, and one g per cluster. Untrained (delta = g = 0) it *is* the rule. Trained, it corrects the errors of the rule's
job model. The network reads each worker's part of `features(window)` and the features of `ResidualMemory`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dynamix.errors import PolicyFileError
from dynamix.features import LOCAL_FEATURES, local_features
from dynamix.model import JobModel
from dynamix.policies.files import fill_network, read_policy, write_policy
from dynamix.policies.fitted import FittedModel
from dynamix.policies.goodput import worth_changing
from dynamix.policies.learned.networks import apart, flat, pooled
from dynamix.policies.learned.residual import OWN_FEATURES, Foretold, ResidualMemory
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window

KIND = "residual"
INPUTS = (*LOCAL_FEATURES, *OWN_FEATURES)
# The residual changes a size by at most e^+-1.5, and the global batch from e^-1.5 times the rule's up to the rule's. A
# batch that is too small costs little and recovers. Too large batches made early versions run away, and they hide from
# the rule what smaller ones would cost.
DELTA_LIMIT, LEAST_GROWTH, MOST_GROWTH = 1.5, -1.5, 0.0
# A decision leaves each size between the one in force and the rule's, or at most e^0.3 beyond either. So the residual
# may hold the rule back entirely, but its own changes come in steps that the next windows can judge.
TRUST = 0.3
FEW_WORKERS = 64  # up to this number torch's products take longer than NumPy's
PRETRAINED = Path(__file__).parents[1] / "pretrained" / "dynamix.safetensors"


class ResidualNet(nn.Module):
    """Per-worker encoder, mean and max pooling, one head per worker (delta), one per cluster (g), one central critic.

    The heads' last layers are zero, so an untrained network answers exactly 0. It is permutation-equivariant.
    """

    def __init__(self, inputs: int = len(INPUTS), hidden: int = 64) -> None:
        super().__init__()
        self.inputs, self.hidden = inputs, hidden
        self.encode = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.own = nn.Linear(hidden, hidden)
        self.context = nn.Linear(2 * hidden, hidden, bias=False)  # computed once a cluster
        self.local = nn.Sequential(nn.Tanh(), nn.Linear(hidden, 1))
        self.shared = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.critic = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.log_std_local = nn.Parameter(torch.full((1,), -2.5))
        self.log_std_shared = nn.Parameter(torch.full((1,), -2.5))
        for head in (self.local, self.shared, self.critic):
            for parameter in head[-1].parameters():
                nn.init.zeros_(parameter)

    def forward(self, observed: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps observations (N, W, F) and active workers (N, W) to means (N, W, 1), (N, 1) and values (N,)."""
        hidden = self.encode(observed)
        of_all = pooled(hidden, mask)
        local = self.local(self.own(hidden) + self.context(of_all).unsqueeze(1))
        return local, self.shared(of_all), self.critic(of_all).squeeze(-1)

    @torch.no_grad()
    def answer(self, observed: NDArray[np.float32], active: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """`forward` of one cluster, (W, F) and (W,), without its value; the same up to float rounding.

        Uses NumPy, whose `tanh` and calls cost less than torch's. Only products for many workers use torch, which
        keeps to the number of threads that training set.
        """

        def linear(layer: Any, x: NDArray[np.float32]) -> NDArray[np.float32]:
            if len(observed) > FEW_WORKERS:
                return np.asarray(layer(torch.from_numpy(x)).numpy())
            y = x @ layer.weight.detach().numpy().T
            return np.asarray(y if layer.bias is None else y + layer.bias.detach().numpy())

        with np.errstate(over="ignore", invalid="ignore"):  # absurd weights give absurd answers, clipped later
            hidden = np.tanh(linear(self.encode[2], np.tanh(linear(self.encode[0], observed))))
            only, every = active[:, None], bool(active.all())
            mean = (hidden if every else hidden * only).sum(0) / max(int(active.sum()), 1)
            most = hidden if every else np.where(only, hidden, np.float32(-2.0))
            of_all = np.concatenate([mean, most.max(0)])
            local = linear(self.local[1], np.tanh(linear(self.own, hidden) + linear(self.context, of_all)))
            shared = linear(self.shared[2], np.tanh(linear(self.shared[0], of_all)))
        return local[:, 0].astype(np.float64), shared[0].astype(np.float64)


class LearnedPolicy:
    """The share/global residual policy; deterministic at inference (the mean action).

    >>> from dynamix.policies.goodput import Goodput
    >>> from dynamix.window import Bounds, Window
    >>> window = Window.of([32, 32], compute=[0.1, 0.3])
    >>> LearnedPolicy().decide(window, Bounds.of(2)).tolist()                       # untrained: the goodput rule
    [52, 12]
    >>> Goodput().decide(window, Bounds.of(2)).tolist()
    [52, 12]
    """

    def __init__(self, net: ResidualNet | None = None, *, about: dict[str, Any] | None = None) -> None:
        with apart():
            self.net, self.about = (net or ResidualNet()).eval(), about or {}
        self.trust = float(self.about.get("trust", TRUST))
        self.memory, self.fitted = ResidualMemory(), FittedModel()
        self._answer: Ints | None = None  # the newest

    def fit_model(self, window: Window) -> JobModel:
        """Take in `window` before `decide`; returns the job model after it. If the workers change, all starts anew."""
        if self.memory.is_of_others(window):
            self.memory = ResidualMemory()
            self.fitted.forget()
        self.memory.foretold = Foretold.by(self.fitted.now)
        return self.fitted.take_in(window)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        observed = self.observe(window, bounds)
        self._answer = self.answer(window, bounds, *self.act(observed, window.batch_size > 0))
        return self._answer

    def answer(self, window: Window, bounds: Bounds, delta: Floats, growth: Floats) -> Ints:
        """The decision for an action: its allocation, or the sizes in force if a change promises little."""
        sizes = self.allocate(window, bounds, delta, growth)
        return worth_changing(self.fitted.now, window, bounds, sizes, self.memory.wish)

    def report(self, *, asked: bool = True) -> dict[str, Any]:
        """For the events, as `residual`: how the newest answer differs from the rule's (docs/run-folder.md)."""
        answer, wish = self._answer, self.memory.wish
        if not asked or answer is None or wish.shape != answer.shape:
            return {}
        total, rules = np.maximum(answer.sum(-1), 1.0), np.maximum(wish.sum(-1), 1.0)
        moved = np.abs(answer / total[..., None] - wish / rules[..., None]).sum(-1) / 2
        return {"residual": {"total": np.round(total / rules, 4).tolist(), "moved": np.round(moved, 4).tolist()}}

    def observe(self, window: Window, bounds: Bounds) -> NDArray[np.float32]:
        """Take in the window, update the memory and return the network's input, (..., W, F)."""
        model = self.fitted.to_decide(window, self.fit_model)
        own = self.memory.update(window, bounds, model)
        return np.concatenate([local_features(window), own], axis=-1)

    def act(self, observed: NDArray[np.float32], active: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """The mean action: delta (..., W) and g (...)."""
        lead, workers = observed.shape[:-2], observed.shape[-2]
        if not lead:
            return self.net.answer(observed, active)
        with torch.inference_mode():
            local, shared, _ = (out.double().numpy() for out in self.net(*flat(observed, active)))
        return local.reshape(*lead, workers), shared.reshape(lead)

    def allocate(self, window: Window, bounds: Bounds, delta: Floats, growth: Floats) -> Ints:
        """The allocation of an action, around the rule's answer to the last window observed."""
        wish, active = self.memory.wish, window.batch_size > 0
        delta = np.where(active & np.isfinite(delta), delta, 0.0)
        delta = delta - delta.sum(-1, keepdims=True) / np.maximum(active.sum(-1, keepdims=True), 1)
        delta = np.minimum(np.maximum(np.where(active, delta, 0.0), -DELTA_LIMIT), DELTA_LIMIT)
        guided, measured = self.fitted.now.guided, self.fitted.now.measured[..., None]
        growth = np.clip(np.where(np.isnan(growth) | ~guided, 0.0, growth), LEAST_GROWTH, MOST_GROWTH)
        moved = wish * np.exp(delta)
        whole = wish.sum(-1) / np.maximum(moved.sum(-1), 1e-9) * np.exp(growth)
        low, high = self.trusted(window)
        sizes = np.where(measured, np.minimum(np.maximum(moved * whole[..., None], low), high), wish)
        total = np.where(guided, sizes.sum(-1), wish.sum(-1))
        return project(sizes, bounds, total=total, current=window.batch_size)

    def trusted(self, window: Window) -> tuple[Floats, Floats]:
        """Least and greatest sizes (..., W) that this decision may give; they contain the rule's."""
        wish = self.memory.wish
        now = np.where(window.batch_size > 0, window.batch_size, wish)
        return np.minimum(now, wish) * np.exp(-self.trust), np.maximum(now, wish) * np.exp(self.trust)

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory.state_dict(), "model": self.fitted.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fitted.load_state_dict(state)
        self.memory.load_state_dict(state["memory"])

    def save(self, path: str | Path) -> None:
        """Write `path` (safetensors) and its description next to it (`.json`); never pickle."""
        write_policy(path, KIND, self.net, self.about, features=INPUTS)

    @classmethod
    def load(cls, path: str | Path) -> LearnedPolicy:
        """The policy in a file written by `save`. Raises `PolicyFileError` if it cannot be trusted."""
        about, weights = read_policy(path, KIND, features=INPUTS)
        trust = about.get("trust", TRUST)
        if isinstance(trust, bool) or not isinstance(trust, (int, float)) or not 0 < trust <= DELTA_LIMIT:
            allowed = f"a number above 0, at most {DELTA_LIMIT}, beside {path}"
            raise PolicyFileError("trust", trust, allowed, f"{TRUST} is what training writes")
        with apart():
            net = ResidualNet(hidden=about["architecture"]["hidden"])
        fill_network(net, weights, path, KIND)
        return cls(net, about=about)


def pretrained(**options: Any) -> LearnedPolicy:
    """The policy that ships with dynamix; `path=` names another file."""
    return LearnedPolicy.load(options.pop("path", PRETRAINED), **options)

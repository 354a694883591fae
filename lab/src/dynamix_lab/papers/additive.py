"""The form of the DYNAMIX paper (arXiv 2510.08522): each worker's batch size changes by one of five additive steps.

One network with shared weights, pi(a_i | s_i, s_global), reads a worker's own state and the pooled state of all, and
chooses among {-100, -25, 0, +25, +100} samples, clamped to [32, 1024]. Unlike `dynamix.policies.learned` it has no
model of the system and no rule to correct. If the sources are silent or second-hand, the choice is a value of `Actions`
(docs/design/paper-form.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dynamix.errors import ConfigError, PolicyFileError
from dynamix.features import FEATURES, features
from dynamix.model.measured import base_total
from dynamix.policies.files import fill_network, read_policy, retrain, write_policy
from dynamix.policies.learned.networks import apart, flat, pooled
from dynamix.projection import project
from dynamix.window import Bounds, Floats, Ints, Window

KIND = "additive"
PRETRAINED = Path(__file__).parent / "pretrained" / "dynamix-paper.safetensors"
SLOW = 0.1  # weight of the newest window in the slow average of iteration times
REFERENCE = 128.0  # the paper's batch size per worker, the unit of `Actions`

OWN_FEATURES = (
    "log2_batch",  # log2(b_i / 128), in the actions' unit
    "last_step",  # log2 of this worker's size over its size one window before
    "iteration_time",  # log(iteration time / its slow average), global
    "last_iteration_time",  # that of the previous window
    "log_sigma",  # log of sqrt(tr Sigma / B0) / |G|, global
)
INPUTS = (*FEATURES, *OWN_FEATURES)
# The three families of the paper's state. Sizes and times belong to none, because every policy needs them.
STATE_FAMILIES: dict[str, tuple[str, ...]] = {
    "network": ("log_bytes", "retransmits", "log_rtt", "missing_network"),
    "system": ("cpu", "memory", "device", "missing_host", "missing_device"),
    "statistics": (
        *("loss_change", "accuracy_change", "log_norm_ratio", "log_noise_ratio", "log_sigma"),
        *("missing_training", "missing_noise"),
    ),
}


@dataclass(frozen=True, slots=True)
class Actions:
    """The actions of a worker."""

    steps: tuple[float, ...] = (-100.0, -25.0, 0.0, 25.0, 100.0)  # samples added to a worker's batch size
    low: float = 32.0  # sizes are clamped to low, high; a worker that is outside already may stay there
    high: float = 1024.0
    # "base": all numbers are for a job with 128 samples a worker, and scale with the user's own batch size (with 8
    # samples a worker a step of 25 means 1.6 samples). "samples": literally.
    scale: Literal["base", "samples"] = "base"

    def __post_init__(self) -> None:
        if len(self.steps) < 2 or 0.0 not in self.steps or not np.isfinite(np.array(self.steps, np.float64)).all():
            raise ConfigError("steps", self.steps, "two or more numbers, 0 among them", "use the paper's five")
        if not 0 < self.low < self.high:
            raise ConfigError("low, high", (self.low, self.high), "0 < low < high", "use 32 and 1024")
        if self.scale not in ("base", "samples"):
            raise ConfigError("scale", self.scale, "base, samples", "use base unless jobs start at 128 a worker")

    def unit(self, window: Window) -> Floats:
        """Samples (...) per unit of `steps`, `low` and `high`."""
        base = base_total(window) / window.workers
        return base / REFERENCE if self.scale == "base" else np.ones_like(base)

    def sizes(self, window: Window, chosen: Ints) -> Floats:
        """Real sizes (..., W) after the steps with these indices."""
        now, unit = window.batch_size.astype(np.float64), self.unit(window)[..., None]
        after = now + np.asarray(self.steps)[chosen] * unit
        return np.clip(after, np.minimum(self.low * unit, now), np.maximum(self.high * unit, now))


class State:
    """The part of the paper's state that spans windows, for windows of shape (..., W)."""

    def __init__(self, actions: Actions) -> None:
        self.actions = actions
        self.log_size: Floats | None = None  # (..., W), log2 samples one window before
        self.average: Floats | None = None  # (...), log s
        self.last_time: Floats | None = None  # (...)

    def update(self, window: Window) -> NDArray[np.float32]:
        """Add a window. Returns the own features (..., W, len(OWN_FEATURES)), finite."""
        shape = window.batch_size.shape
        if self.log_size is None or self.log_size.shape != shape:
            self.log_size = self.average = self.last_time = None
        log_size = np.log2(np.maximum(window.batch_size, 1))
        seconds = np.where(np.isfinite(window.step_time), window.step_time, -np.inf).max(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_time = np.where(np.isfinite(seconds) & (seconds > 0), np.log(seconds), np.nan)
            log_sigma = 0.5 * np.log(window.noise_scale / window.base_batch)
        average = log_time if self.average is None else np.where(np.isnan(self.average), log_time, self.average)
        time = log_time - average
        time = np.where(np.isfinite(time), time, 0.0)
        own = np.empty((*shape, len(OWN_FEATURES)))
        own[..., 0] = log_size - np.log2(REFERENCE * self.actions.unit(window))[..., None]
        own[..., 1] = 0.0 if self.log_size is None else np.clip(log_size - self.log_size, -3.0, 3.0)
        own[..., 2] = np.clip(time, -3.0, 3.0)[..., None]
        own[..., 3] = 0.0 if self.last_time is None else np.clip(self.last_time, -3.0, 3.0)[..., None]
        own[..., 4] = np.where(np.isnan(log_sigma), 0.0, np.clip(log_sigma, -5.0, 5.0))[..., None]
        self.log_size, self.last_time = log_size, time
        self.average = average + SLOW * time
        return own.astype(np.float32)

    _FIELDS = ("log_size", "average", "last_time")

    def state_dict(self) -> dict[str, Any]:
        return {name: None if getattr(self, name) is None else getattr(self, name).tolist() for name in self._FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._FIELDS:
            saved = state[name]
            setattr(self, name, None if saved is None else np.asarray(saved, dtype=np.float64))


class AdditiveNet(nn.Module):
    """Per-worker encoder, mean and max pooling (s_global), logits per worker, one central critic.

    Untrained, it prefers no change. Permutation-equivariant.
    """

    steps: Tensor

    def __init__(self, actions: Actions | None = None, *, hidden: int = 64) -> None:
        super().__init__()
        actions = actions or Actions()
        self.actions, self.hidden, self.inputs = actions, hidden, len(FEATURES) + len(OWN_FEATURES)
        self.encode = nn.Sequential(nn.Linear(self.inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.own = nn.Linear(hidden, hidden)
        self.context = nn.Linear(2 * hidden, hidden, bias=False)
        self.head = nn.Linear(hidden, len(actions.steps))
        self.critic = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.register_buffer("steps", torch.tensor(actions.steps), persistent=False)
        nn.init.zeros_(self.head.weight)
        with torch.no_grad():
            self.head.bias.copy_((self.steps == 0).float())
            for parameter in self.critic[2].parameters():
                parameter.zero_()

    def forward(self, observed: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Observations (N, W, F) and active workers (N, W) to logits (N, W, A) and values (N,)."""
        hidden = self.encode(observed)
        of_all = pooled(hidden, mask)
        logits = self.head(torch.tanh(self.own(hidden) + self.context(of_all).unsqueeze(1)))
        return logits, self.critic(of_all).squeeze(-1)

    @torch.no_grad()
    def fold(self, constant: Tensor, value: Tensor) -> None:
        """Make the output independent of the inputs `constant` (F,) bool, as if they always had `value` (F,).

        For inputs that did not vary in training: the simulator measures no network, and untrained weights would turn a
        real measurement into noise.
        """
        weight, bias = (self.encode[0].get_parameter(name) for name in ("weight", "bias"))
        bias.add_(weight[:, constant] @ value[constant])
        weight[:, constant] = 0.0


class AdditivePolicy:
    """The policy of the DYNAMIX paper (arXiv 2510.08522): each worker's size changes by one of a few additive steps.

    Deterministic at inference: each worker takes its likeliest action.

    without   families of the state to leave out: "network", "system", "statistics" (ablations; as trained)

    >>> from dynamix.window import Bounds, Window
    >>> policy = AdditivePolicy()
    >>> policy.decide(Window.of([128, 128], compute=[1.0, 3.0]), Bounds.of(2)).tolist()    # untrained: no change
    [128, 128]
    >>> with torch.no_grad(): _ = policy.net.head.bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0, 0.0]))
    >>> policy.decide(Window.of([128, 128], compute=[1.0, 3.0]), Bounds.of(2)).tolist()
    [103, 103]
    """

    trained_as = "dynamix-paper"  # the name with which `dynamix policy train` makes files of this kind

    def __init__(
        self, net: AdditiveNet | None = None, *, without: Sequence[str] = (), about: dict[str, Any] | None = None
    ) -> None:
        self._kept = kept_features(without)
        with apart():
            self.net = (net or AdditiveNet()).eval()
        self.without, self.about, self.state = tuple(without), about or {}, State(self.net.actions)

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        return self.allocate(window, bounds, self.choose(self.observe(window), window.batch_size > 0))

    def observe(self, window: Window) -> NDArray[np.float32]:
        """Update the state and return the network's input, (..., W, F)."""
        own = self.state.update(window)
        seen: NDArray[np.float32] = np.concatenate([features(window), own], axis=-1) * self._kept
        return seen

    def choose(self, observed: NDArray[np.float32], active: NDArray[np.bool_]) -> Ints:
        """Index of each worker's likeliest action, (..., W)."""
        with torch.inference_mode():
            logits, _ = self.net(*flat(observed, active))
        chosen: Ints = logits.argmax(-1).numpy().reshape(observed.shape[:-1])
        return chosen

    def allocate(self, window: Window, bounds: Bounds, chosen: Ints) -> Ints:
        """The allocation of these actions. Clusters without any timing in this window keep their allocation."""
        measured = (np.isfinite(window.compute) & (window.batch_size > 0)).any(-1, keepdims=True)
        wish = np.where(measured, self.net.actions.sizes(window, chosen), window.batch_size)
        return project(wish, bounds, current=window.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)

    def save(self, path: str | Path) -> None:
        """Write `path` (safetensors) and its description next to it (`.json`); never pickle."""
        own = {"actions": dataclasses.asdict(self.net.actions), "without": list(self.without)}
        write_policy(path, KIND, self.net, {**self.about, **own}, features=INPUTS)

    @classmethod
    def load(cls, path: str | Path) -> AdditivePolicy:
        """Load a file written by `save`. Raises `PolicyFileError` if it cannot be trusted."""
        about, weights = read_policy(path, KIND, features=INPUTS)
        try:
            actions = Actions(**{**about["actions"], "steps": tuple(about["actions"]["steps"])})
            with apart():
                net = AdditiveNet(actions, hidden=about["architecture"]["hidden"])
            policy = cls(net, without=about["without"], about=about)
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            allowed = "actions, and families of the state that it is without"
            raise PolicyFileError("policy", str(path), f"{allowed}, in its .json", retrain(KIND)) from error
        fill_network(net, weights, path, KIND)
        return policy


def kept_features(without: Sequence[str]) -> NDArray[np.float32]:
    """1 for inputs (F,) that remain, 0 for those of the named families, including their mean and maximum.

    Raises `ConfigError` for an unknown family.

    >>> int(len(kept_features(())) - kept_features(("network",)).sum())    # four features, their means and maxima
    12
    """
    unknown = sorted(set(without) - set(STATE_FAMILIES))
    if unknown:
        raise ConfigError("without", unknown[0], ", ".join(STATE_FAMILIES), "name families of the state")
    names = [*(name.removeprefix("mean_").removeprefix("max_") for name in FEATURES), *OWN_FEATURES]
    left_out = {name for family in without for name in STATE_FAMILIES[family]}
    return np.array([name not in left_out for name in names], dtype=np.float32)


def pretrained(**options: Any) -> AdditivePolicy:
    """The shipped policy `dynamix-paper`; `path=` names another file."""
    return AdditivePolicy.load(options.pop("path", PRETRAINED), **options)

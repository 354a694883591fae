"""The learned policy's inputs besides the window: the goodput rule's answer, and how well the rule did lately."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamix.model import JobModel
from dynamix.model.elasticity import LocalElasticity
from dynamix.model.exchange import Exchange
from dynamix.model.measured import base_total, busy_seconds, step_seconds
from dynamix.model.state import UNKNOWN, restored, saved
from dynamix.policies.goodput import wish
from dynamix.window import Bounds, Floats, Window

OWN_FEATURES = (
    # the rule's answer and its model of this worker
    "move",  # log(rule's size / size in force)
    "rule_share",  # log(rule's size / mean of the rule's sizes)
    "rule_elasticity",  # of the rule's line at the size in force
    "rule_to_cap",  # log(rule's size / largest allowed)
    "to_cap",  # log(size in force / largest allowed)
    "at_cap",  # share of recent windows at the largest size
    "coarse",  # 1 / size in force: the effect of rounding
    "uncertainty",  # log sd of this worker's level in the rule's model
    "jitter",  # log sd of one step's seconds
    # how good its predictions were
    "surprise",  # log(measured / predicted seconds)
    "last_surprise",  # the same, a window earlier
    "older_surprise",  # and two windows earlier
    "residue",  # log(measured / fitted seconds): what the rule treats as noise
    "from_slow",  # fitted log seconds at the base share minus their slow average
    "from_best",  # the same minus their slowly forgotten minimum: is this worker slowed down?
    "age",  # windows since its last jump, log
    "hazard",  # share of recent windows with a jump
    "last_share",  # share of recent windows in which it was the slowest
    # how its time grows with the batch
    "change",  # log(size in force / size of the window before)
    "swing",  # how far recent changes cancelled each other
    "warned",  # log seconds of the rule's answer beyond its line, by the elasticities learned for each size
    *("steep_below", "steep_above"),  # learned elasticity beyond the line's, just below and above the size in force
    *("known_below", "known_above"),  # how well each is known
    # global
    "rule_growth",  # log(rule's global batch / the one in force)
    "growth",  # log(global batch / that of the window before)
    "step_surprise",  # log(measured / predicted seconds of a step)
    "spread",  # log(slowest worker's mean / slowest mean worker)
    "noise_ratio",  # smoothed log(noise scale / global batch)
    "measuring_error",  # log sd of times that jitter does not explain
    "windows",  # number so far, log
    "steps",  # of a window, log
)
JUMP = 0.2  # log seconds: a surprise beyond this counts as a jump of speed

# Fields of `ResidualMemory.per_worker`.
_WORKER = (
    *("last_surprise", "older_surprise", "slow", "best", "windows_since", "jumps", "last_share", "at_cap"),
    *("log_batch", "change", "swing"),
)


class Foretold(NamedTuple):
    """A job model's forecast of the next window: lines (..., W), `JobModel.stretch` (...), and the exchange."""

    alpha: Floats
    beta: Floats
    stretch: Floats
    exchange: Exchange

    @classmethod
    def by(cls, model: JobModel) -> Foretold:
        return cls(*model.line, model.stretch, model.exchange)


class ResidualMemory:
    """Follows how well the goodput rule's model predicts, for windows of shape (..., W).

    After `update`, `wish` holds the rule's real sizes. `foretold` is the model's prediction made before the window.
    """

    def __init__(self) -> None:
        self.curve = LocalElasticity()
        self.wish: Floats = UNKNOWN  # (..., W)
        self.per_worker: Floats = UNKNOWN  # (len(_WORKER), ..., W), each by name below
        self.total: Floats = UNKNOWN  # (...) log global batch of the window before
        self.windows = 0
        self.foretold = Foretold.by(JobModel())

    def is_of_others(self, window: Window) -> bool:
        """Whether `window` has another number of workers, so that nothing remembered applies to it."""
        return self.windows > 0 and self.per_worker.shape[1:] != window.batch_size.shape

    def update(self, window: Window, bounds: Bounds, model: JobModel) -> NDArray[np.float32]:
        """Take in a window that `model` has taken in; returns the features (..., W, len(OWN_FEATURES)) in [-3, 3]."""
        shape = window.batch_size.shape
        first = self.windows == 0
        if first:
            self.per_worker, self.total = np.zeros((len(_WORKER), *shape)), np.full(shape[:-1], np.nan)
        past = dict(zip(_WORKER, self.per_worker, strict=True))
        batch, busy = window.batch_size.astype(np.float64), busy_seconds(window)
        worked = np.where(window.batch_size > 0, window.worked, 0.0)
        unit = base_total(window)[..., None] / window.workers
        nothing = 0.0 * batch, 0.0 * batch[..., 0]
        surprise, step_surprise = nothing if first else _surprises(self.foretold, window, worked, busy)
        self.wish = wish(model, window, bounds)
        alpha, beta = model.line
        self.curve = self.curve.update(unit, worked, busy)
        own = self._of_rule(model, window, bounds, unit) | self._of_curve(model, unit, batch)
        own |= self._of_time(past, np.log(np.maximum(alpha + beta * unit, 1e-12)), surprise, first)
        with np.errstate(divide="ignore", invalid="ignore"):
            own["residue"] = np.log(busy / (alpha + beta * worked))
        own["last_share"] = _follow(past["last_share"], busy == _peak(busy), 0.15)
        own["at_cap"] = _follow(past["at_cap"], batch >= bounds.high, 0.2)
        log_batch = np.log(np.maximum(batch, 0.5))
        own["change"] = 0.0 * batch if first else log_batch - past["log_batch"]
        undone = np.where(own["change"] * past["change"] < 0, np.minimum(abs(own["change"]), abs(past["change"])), 0.0)
        own["swing"] = _follow(past["swing"], undone, 0.3)
        total = np.log(np.maximum(batch.sum(-1), 1.0))
        own["growth"], own["step_surprise"] = _wide(total - self.total), _wide(step_surprise)
        self.total, self.windows = total, self.windows + 1
        own["windows"] = np.asarray(np.log(self.windows) / 2 - 1)
        kept = {**own, "log_batch": log_batch, "older_surprise": past["last_surprise"], "last_surprise": surprise}
        own["older_surprise"], own["last_surprise"] = past["older_surprise"], past["last_surprise"]
        self.per_worker = _known(_stacked(kept, _WORKER, shape))
        # One feature at a time is faster than one worker at a time.
        features = _known(_stacked(own, OWN_FEATURES, shape))
        np.minimum(np.maximum(features, -3.0, out=features), 3.0, out=features)
        return np.ascontiguousarray(np.moveaxis(features, 0, -1), dtype=np.float32)

    def _of_rule(self, model: JobModel, window: Window, bounds: Bounds, unit: Floats) -> dict[str, Floats]:
        batch, (alpha, beta) = np.maximum(window.batch_size, 0.5), model.line
        wish, high = np.maximum(self.wish, 0.5), np.maximum(bounds.high, 1.0)
        total, now = wish.sum(-1), batch.sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return {
                "move": np.log(wish / batch),
                "rule_share": np.log(wish / wish.mean(-1, keepdims=True)),
                "rule_elasticity": beta * batch / (alpha + beta * batch) - 0.8,
                "rule_to_cap": np.log(wish / high) / 2,
                "to_cap": np.log(batch / high) / 2,
                "coarse": 4.0 / (4.0 + batch),
                "uncertainty": 0.5 * np.log(model.costs.variance + 1e-6) + 4.0,
                "jitter": 0.5 * np.log(model.costs.jitter + 1e-6) + 3.0,
                "rule_growth": _wide(np.log(total / now)),
                "spread": 5 * _wide(np.log(model.stretch)),
                "noise_ratio": _wide(model.noise.level - np.log(now)) / 2,
                "measuring_error": _wide(0.5 * np.log(model.costs.error + 1e-6)) + 4.0,
                "steps": _wide(np.log(window.steps) - 1.6) + 0.0 * unit,
            }

    def _of_curve(self, model: JobModel, unit: Floats, batch: Floats) -> dict[str, Floats]:
        excess = self.curve.excess(unit, *model.line)
        steep, known = (np.moveaxis(x, -1, 0) for x in self.curve.around(excess, unit, batch))
        beside = {"steep_below": steep[0], "steep_above": steep[1], "known_below": known[0], "known_above": known[1]}
        return {"warned": self.curve.beyond(excess, unit, batch, self.wish), **beside}

    @staticmethod
    def _of_time(past: dict[str, Floats], level: Floats, surprise: Floats, first: bool) -> dict[str, Floats]:
        """`level` is the fitted log seconds at the base share."""
        slow = level if first else past["slow"] + 0.05 * (level - past["slow"])
        best = level if first else past["best"] + np.where(level < past["best"], 0.5, 0.01) * (level - past["best"])
        jump = np.abs(surprise) > JUMP
        age, jumps = np.where(jump, 0.0, past["windows_since"] + 1), _follow(past["jumps"], jump, 0.03)
        of_speed = {"from_slow": level - slow, "from_best": level - best, "slow": slow, "best": best}
        of_jumps = {"windows_since": age, "age": np.log1p(age) / 2 - 1, "jumps": jumps, "hazard": 5 * jumps}
        return {"surprise": surprise, **of_speed, **of_jumps}

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).tolist() for name in ("per_worker", "total")}
        return {**arrays, "windows": self.windows, "curve": saved(self.curve)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.curve = restored(self.curve, state["curve"])
        self.per_worker, self.total = (np.asarray(state[name], dtype=np.float64) for name in ("per_worker", "total"))
        self.windows = int(state["windows"])


def _surprises(foretold: Foretold, window: Window, batch: Floats, busy: Floats) -> tuple[Floats, Floats]:
    """Measured minus predicted log seconds, of workers (..., W) and of steps (...)."""
    expected = foretold.alpha + foretold.beta * batch
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = np.log(busy / expected)
        slowest = np.maximum((foretold.stretch[..., None] * expected).max(-1), 1e-12)
        step = np.log(step_seconds(window)) - foretold.exchange.log_step(slowest[..., None])[..., 0]
    return _known(surprise), _known(step)


def _stacked(values: dict[str, Floats], names: tuple[str, ...], shape: tuple[int, ...]) -> Floats:
    """The named values, each in full shape (..., W): (len(names), ..., W)."""
    stacked = np.empty((len(names), *shape))
    for row, name in zip(stacked, names, strict=True):
        row[...] = values[name]
    return stacked


def _follow(average: Floats, value: np.ndarray, weight: float) -> Floats:
    return np.asarray(average + weight * (value - average))


def _wide(x: Floats) -> Floats:
    return np.asarray(x[..., None])


def _peak(x: Floats) -> Floats:
    return np.asarray(np.where(np.isfinite(x), x, -np.inf).max(-1, keepdims=True))


def _known(x: Floats) -> Floats:
    return np.where(np.isfinite(x), x, 0.0)

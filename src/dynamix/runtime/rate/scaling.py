"""Scales the learning rate with the global batch, and drives schedules by samples instead of steps.

The user's learning rate applies to the base batch B0. During an optimizer step it is multiplied by a factor. Before and
after, and in all of the user's code, it has the user's value.
"""

import functools
import math
import types
import warnings
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dynamix.data import Round
from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.limits import check_counts
from dynamix.runtime.rules import rule_of

_OTHERS = 3  # times that others moved a schedule before a warning: loading its state moves it, too
_ROUNDED = 1e-9  # of a step: tolerance for sums of what rounds taught


class LearningRate:
    """Multiplies an optimizer's learning rates by `factor`, only during its steps.

    Closures, schedules stepped in a later hook, and `state_dict()` see the user's rates. So does all code after a step
    that raised: torch then runs no post-hook, so `step` of this object is wrapped, too. Tensor rates are changed in
    place, so captured graphs keep working. GradScaler and schedulers may be made before or after. Raises `ConfigError`
    for an unknown `rule`, or a factor that is not positive and finite.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(1)); weight.grad = torch.ones(1)
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> learning_rate = LearningRate(optimizer, "linear")
    >>> learning_rate.set_factor(3.0)
    >>> optimizer.step()
    >>> round(weight.item(), 6), optimizer.param_groups[0]["lr"]
    (-0.3, 0.1)
    """

    def __init__(self, optimizer: Optimizer, rule: str) -> None:
        self.optimizer, self.rule = optimizer, rule_of(rule, optimizer)
        self.factor = 1.0  # multiplies the rates in the next steps
        # (group, the user's rate, tensor changed in place or None); empty unless a step is running
        self._users: list[tuple[dict[str, Any], Any, Tensor | None]] = []
        post = optimizer.register_step_post_hook(self._restore)
        # Run before the user's own hooks; torch has no `prepend` here.
        if (hooks := getattr(optimizer, "_optimizer_step_post_hooks", None)) is not None:
            hooks.move_to_end(post.id, last=False)
        self._handles = [post, optimizer.register_step_pre_hook(self._before)]
        self._handles.append(optimizer.register_state_dict_post_hook(self._in_state_dict))
        self._wrap_step()

    def set_factor(self, value: float) -> None:
        """Multiply by `value` from now on. Raises `ConfigError` unless it is positive and finite."""
        if not (math.isfinite(value) and value > 0):
            raise ConfigError("factor", value, "positive and finite", "check the batch sizes behind it")
        self.factor = float(value)

    def remove(self) -> None:
        """Remove every hook; the optimizer is as it was before."""
        self._restore()
        for handle in self._handles:
            handle.remove()
        own = vars(self.optimizer)
        if own.get("step") is self._wrapped:  # otherwise other code wrapped ours, which now does nothing
            del own["step"]
            if self._own_step is not None:
                own["step"] = self._own_step

    def _wrap_step(self) -> None:
        optimizer, inner = self.optimizer, self.optimizer.step
        self._own_step: Any = vars(optimizer).get("step")

        # A scheduler made later unwraps `step.__func__`, so ours must be a bound method. One made earlier left marks on
        # the function, which `wraps` copies.
        @functools.wraps(getattr(inner, "__func__", inner))
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            finally:
                if self._users:
                    self._restore()

        self._wrapped = types.MethodType(step, optimizer)
        vars(optimizer)["step"] = self._wrapped

    def _before(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if self._users:
            self._restore()  # from a step that raised and was called past our wrapper
        if self.factor != 1.0:
            self._apply()
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._outside(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):  # args[0] is the optimizer
            return (args[0], self._outside(args[1]), *args[2:]), kwargs
        return None

    def _apply(self) -> None:
        known: dict[int, Tensor] = {}
        for group in self.optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor):
                if id(rate) not in known:  # groups may share one tensor
                    known[id(rate)] = rate.clone()
                    rate.mul_(self.factor)
                self._users.append((group, known[id(rate)], rate))
            elif rate is not None:  # some optimizers compute their own
                self._users.append((group, rate, None))
                group["lr"] = rate * self.factor

    def _restore(self, *of_step: Any) -> None:
        users, self._users = self._users, []
        for group, rate, tensor in users:
            if tensor is None:
                group["lr"] = rate
            else:
                tensor.copy_(rate)

    def _outside(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The user's closure, run with the user's rates."""

        @functools.wraps(closure)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._restore()
            try:
                return closure(*args, **kwargs)
            finally:
                if self.factor != 1.0:
                    self._apply()

        return run

    def _in_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        position = {id(group): index for index, group in enumerate(optimizer.param_groups)}
        for group, rate, _ in self._users:
            state["param_groups"][position[id(group)]]["lr"] = rate


class SampleSchedule:
    """Drives a torch learning-rate scheduler by samples: one `scheduler.step()` per `nominal_batch_size` of them.

    So a schedule written for steps of a fixed global batch keeps its meaning. A schedule with an end (OneCycleLR) stays
    at its last rate instead of raising. Restore the optimizer's own state, too: as in torch, it holds the current
    rates. A state also holds the nominal batch, as torch's holds the length: both are those of the job that began.
    Raises `ConfigError` for a nominal batch below 1, negative samples, and a scheduler that needs a metric.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> schedule = SampleSchedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), nominal_batch_size=256)
    >>> [schedule.advance(samples) for samples in (200, 200, 400)], schedule.samples
    ([0, 1, 2], 800)
    >>> optimizer.param_groups[0]["lr"]
    0.125
    """

    def __init__(self, scheduler: LRScheduler, *, nominal_batch_size: int) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            allowed, fix = "a scheduler whose step() takes no metric", "call its step(metric) after each evaluation"
            raise ConfigError("scheduler", type(scheduler).__name__, allowed, fix)
        check_counts(nominal_batch_size=nominal_batch_size)
        self.scheduler, self.nominal_batch_size = scheduler, int(nominal_batch_size)
        self.samples: float = 0
        self._carry: float = 0
        self._epoch, self._moved = self._now(), 0  # where this object left the scheduler; times that others moved it

    def step(self, *_: object) -> None:
        """Raises `UsageError`, because `Controller.step` calls `advance`."""
        raise UsageError("controller.step() advances this schedule: leave scheduler.step() out of the loop")

    def advance(self, samples: float) -> int:
        """Add global samples just trained on, or what they taught. Returns how often the scheduler was stepped."""
        if samples < 0:
            raise ConfigError("samples", samples, "0 or more", "pass the samples of this optimizer step")
        self._moved += self._now() != self._epoch
        if self._moved == _OTHERS:
            why = "controller.step() advances this schedule, and so did the loop. Leave scheduler.step() out"
            warnings.warn(f"{why}, or the schedule ends too early", RuntimeWarning, stacklevel=2)
        self._epoch = self._now()
        self.samples += samples
        self._carry += samples
        due = int(self._carry / self.nominal_batch_size + _ROUNDED)
        self._carry -= due * self.nominal_batch_size
        for step in range(due):
            if _at_end(self.scheduler):
                return step
            with warnings.catch_warnings():
                # torch's advice is for a loop of steps; here GradScaler may have skipped the first ones.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step|Seems like `optimizer.step")
                self.scheduler.step()
            self._epoch = self._now()
        return due

    def _now(self) -> int:
        return int(getattr(self.scheduler, "last_epoch", 0))

    def get_last_lr(self) -> list[float | Tensor]:
        """The scheduler's rates, one per group; those of the steps also follow the global batch, if a rule says so."""
        return self.scheduler.get_last_lr()

    @property
    def whose(self) -> str:
        """The class of the user's object that holds most of the state."""
        return type(self.scheduler).__name__

    def state_dict(self) -> dict[str, Any]:
        counted = {"samples": self.samples, "carry": self._carry, "nominal_batch_size": self.nominal_batch_size}
        return counted | {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        nominal, counted = int(state.get("nominal_batch_size", 0)), (state["samples"], state["carry"])
        self.nominal_batch_size = nominal if nominal >= 1 else self.nominal_batch_size  # 0.2 did not save it
        self.samples, self._carry = (n if isinstance(n, float) else int(n) for n in counted)
        self.scheduler.load_state_dict(state["scheduler"])
        self._epoch = self._now()


class SchedulerWatch:
    """Warns once if a torch scheduler counts optimizer steps although the global batch changes.

    If the batch changes, an epoch has another number of steps than the schedule was made for, so it ends too early or
    too late. A scheduler sets `initial_lr` in the optimizer's groups; rates that differ within an epoch show that it is
    stepped by steps. Rates on another device are ignored: reading one would wait for it.

    base_batch   samples per optimizer step for which the schedule was made
    apart        local steps: faster workers take more of them, so their schedules advance further
    """

    def __init__(self, optimizer: Optimizer, base_batch: int, *, apart: bool = False) -> None:
        self.base_batch, self.apart = base_batch, apart
        self._optimizer, self._changes, self._seen, self._done = optimizer, 0, False, False
        self._rate: Any = None

    def look(self) -> None:
        """Compare the learning rate with the last one seen. Call it between optimizer steps, as often as you like."""
        group = self._optimizer.param_groups[0]
        rate = rate_of(group) if "initial_lr" in group else None
        if self._seen and rate != self._rate:
            self._changes += 1
        self._rate, self._seen = rate, True

    def round_done(self, done: Round) -> None:
        """A round is done."""
        if done.last:  # a change at the end of an epoch is correct: many schedules count epochs
            self._seen = False
        usual = done.samples == self.base_batch and not self.apart
        if self._done or self._changes < 2 or usual or not done.regular:
            return  # one change may be a loaded state, or the user's own decision
        self._done = True
        do = "scheduler = controller.scheduler(scheduler), and leave scheduler.step() out of the loop"
        problem = "a learning-rate scheduler counts optimizer steps"
        if self.apart:
            problem += ", and faster workers take more of them, so rates differ by rank"
        else:
            moves = f"{done.samples} samples a step now, {self.base_batch} at the start"
            problem += f", but the global batch changes ({moves}), so the schedule ends too early or too late"
            do += "; or Controller(global_batch='fixed')"
        warnings.warn(f"{problem}. Write {do}", RuntimeWarning, stacklevel=5)


def rate_of(group: dict[str, Any]) -> Any:
    """The learning rate of an optimizer's group; None if it has none, or if reading it would wait for a device.

    >>> rate_of({"lr": 0.5}), rate_of({})
    (0.5, None)
    """
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        return rate.item() if rate.device.type == "cpu" else None
    return rate


def _at_end(scheduler: Any) -> bool:
    """Whether one more step would exceed a schedule's declared end, also inside torch's composed schedulers."""
    total = getattr(scheduler, "total_steps", None)
    # N steps in total have the rates 0 to N - 1.
    if total is not None and scheduler.last_epoch >= total - 1:
        return True
    parts = getattr(scheduler, "_schedulers", [])
    milestones = getattr(scheduler, "_milestones", None)
    if milestones is not None:
        next_epoch = scheduler.last_epoch + 1
        if next_epoch in milestones:
            return False  # the next part is about to begin
        parts = parts[bisect_right(milestones, next_epoch) :][:1]
    return any(_at_end(part) for part in parts)

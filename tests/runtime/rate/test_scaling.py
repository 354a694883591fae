"""Learning-rate rules act during a step only; schedules count samples."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

import dynamix
from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.rate.scaling import LearningRate, SampleSchedule
from dynamix.runtime.rules import RULES
from dynamix.runtime.rules import rule_of as rule
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, classes
from tests.union import Script

NAN = math.nan
positive = st.floats(1e-6, 1e6)


def gain(s: float, noise: float, signal: float, base: float = 64.0) -> float:
    return rule("adascale")(s, noise, signal, base_batch=base)


class TestRules:
    def test_values(self) -> None:
        assert [round(f(4.0, 640.0, 10.0, base_batch=64), 6) for f in RULES.values()] == [1.0, 4.0, 2.0, 1.6]

    @pytest.mark.parametrize("name", RULES)
    def test_the_base_batch_keeps_the_users_rate(self, name: str) -> None:
        assert rule(name)(1.0, 500.0, 3.0, base_batch=64) == pytest.approx(1.0)
        assert rule(name)(1.0, NAN, NAN, base_batch=64) == 1.0

    @given(s=st.floats(0.1, 100), noise=positive, signal=positive, base=st.floats(1, 1e4))
    def test_adascale_is_scale_times_statistical_efficiency(
        self, s: float, noise: float, signal: float, base: float
    ) -> None:
        b_noise = noise / signal
        efficiency = (b_noise + base) / (b_noise + s * base)
        assert gain(s, noise, signal, base) == pytest.approx(s * efficiency, rel=1e-9)

    def test_adascale_without_knowledge_claims_nothing(self) -> None:
        for noise, signal in ((NAN, NAN), (5.0, NAN), (NAN, 5.0), (0.0, 0.0), (-1.0, -1.0), (math.inf, 1.0)):
            assert gain(4.0, noise, signal) == 1.0
            assert gain(0.5, noise, signal) == 0.5

    def test_adascale_with_a_signal_estimated_below_zero_is_linear(self) -> None:
        assert gain(4.0, 10.0, -0.1) == pytest.approx(4.0)


def sgd(lr: Any = 0.1, **options: Any) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([1.0, -2.0, 0.5])
    return weight, torch.optim.SGD([weight], lr=lr, **options)


KINDS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, momentum=0.9),
    "sgd foreach": lambda p: torch.optim.SGD(p, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
    "adamw": torch.optim.AdamW,
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": torch.optim.Adagrad,
}


def two_groups(scale: float = 1.0, *, tensor: bool = False) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    groups = []
    for lr in (0.1, 0.02):
        weight = nn.Parameter(torch.randn(4))
        weight.grad = torch.randn(4)
        groups.append({"params": [weight], "lr": torch.tensor(lr * scale) if tensor else lr * scale})
    return groups


def weights(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([p.detach() for group in optimizer.param_groups for p in group["params"]])


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class TestLearningRate:
    # torch wants `capturable`, hence a GPU, for tensor rates with foreach.
    @pytest.mark.parametrize(
        ("kind", "tensor"), [(kind, t) for kind in KINDS for t in (False, True) if not (t and "foreach" in kind)]
    )
    def test_a_step_equals_one_with_the_scaled_rate(self, kind: str, tensor: bool) -> None:
        ours, plain = KINDS[kind](two_groups(tensor=tensor)), KINDS[kind](two_groups(2.5))
        before, given = rates(ours), [group["lr"] for group in ours.param_groups]
        LearningRate(ours, "linear").set_factor(2.5)
        for _ in range(3):
            ours.step()
            plain.step()
            assert rates(ours) == before
        torch.testing.assert_close(weights(ours), weights(plain))
        assert not tensor or all(group["lr"] is lr for group, lr in zip(ours.param_groups, given, strict=True))

    def test_lbfgs_runs_its_closure_under_the_users_rate(self) -> None:
        def train(lr: float, factor: float | None) -> tuple[Tensor, set[float]]:
            weight = nn.Parameter(torch.tensor([3.0, -4.0]))
            optimizer = torch.optim.LBFGS([weight], lr=lr, max_iter=4)
            if factor:
                LearningRate(optimizer, "linear").set_factor(factor)
            seen = set()

            def closure() -> Tensor:
                seen.add(optimizer.param_groups[0]["lr"])
                seen.add(optimizer.state_dict()["param_groups"][0]["lr"])
                optimizer.zero_grad()
                loss = (weight**4).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            optimizer.step(closure=closure)
            return weight.detach(), seen

        ours, seen = train(0.05, 2.0)
        plain, _ = train(0.1, None)
        torch.testing.assert_close(ours, plain)
        assert seen == {0.05}

    @pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
    def test_the_rate_is_back_when_a_step_raises(self, lr: Any) -> None:
        _, optimizer = sgd(lr)
        LearningRate(optimizer, "linear").set_factor(3.0)

        def closure() -> Tensor:
            raise FloatingPointError

        with pytest.raises(FloatingPointError):
            optimizer.step(closure)
        assert rates(optimizer) == [pytest.approx(0.1)]

    def test_all_of_the_users_hooks_see_the_users_rate(self) -> None:
        _, optimizer = sgd()
        seen: list[float] = []

        def look(opt: torch.optim.Optimizer, *_: Any) -> None:
            seen.extend([opt.param_groups[0]["lr"], opt.state_dict()["param_groups"][0]["lr"]])

        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        learning_rate = LearningRate(optimizer, "linear")
        optimizer.register_step_post_hook(look)
        learning_rate.set_factor(3.0)
        optimizer.step()
        assert seen == [0.1] * 6

    def test_a_schedule_stepped_in_a_post_hook_is_not_lost(self) -> None:
        _, optimizer = sgd(lr=1.0)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        LearningRate(optimizer, "linear").set_factor(3.0)
        optimizer.step()
        optimizer.step()
        assert rates(optimizer) == [0.25]

    @pytest.mark.parametrize("ours_first", [False, True])
    def test_schedulers_made_before_or_after_work_without_warnings(self, ours_first: bool) -> None:
        weight, optimizer = sgd(lr=1.0)
        if ours_first:
            learning_rate = LearningRate(optimizer, "linear")
        schedules = [lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(2)]
        if not ours_first:
            learning_rate = LearningRate(optimizer, "linear")
        learning_rate.set_factor(2.0)
        optimizer.step()
        schedules[0].step()
        assert weight[0].item() == -1.0
        assert rates(optimizer) == [0.5]
        optimizer.step()
        assert weight[0].item() == -2.0

    def test_copies_and_pickles_of_the_optimizer_are_plain(self) -> None:
        _, optimizer = sgd()
        LearningRate(optimizer, "linear").set_factor(2.0)
        for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            weight = twin.param_groups[0]["params"][0]
            weight.grad = torch.ones(3)
            twin.step()
            torch.testing.assert_close(weight.detach()[0], torch.tensor(0.9))

    @pytest.mark.multiproc
    def test_a_sharded_optimizer_is_served_as_what_is_inside_of_it(self) -> None:
        for ours, plain, seen, factor in run_ranks(_zero, 2):
            assert ours == pytest.approx(plain)
            assert seen == [0.1] * 3
            assert factor == math.sqrt(2.0)  # Adam divides by the size of gradients


def _zero(rank: int) -> tuple[list[float], list[float], list[float], float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def train(lr: float, factor: float | None) -> tuple[list[float], list[float], Any]:
        parameters = [nn.Parameter(torch.ones(3) * i) for i in range(1, 4)]
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=lr)
        if factor:
            LearningRate(optimizer, "linear").set_factor(factor)
        seen = []
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones(3)
            optimizer.step()
            seen.append(optimizer.param_groups[0]["lr"])
        optimizer.consolidate_state_dict(to=0)
        seen.append(optimizer.state_dict()["param_groups"][0]["lr"] if rank == 0 else lr)
        return torch.cat([p.detach() for p in parameters]).tolist(), seen, optimizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, seen, optimizer = train(0.1, 2.0)
        plain, *_ = train(0.2, None)
    return ours, plain, seen, rule("auto", optimizer)(4.0, NAN, NAN, base_batch=1)


def schedule_of(
    make: Callable[[torch.optim.Optimizer], Any], nominal: int = 10
) -> tuple[torch.optim.Optimizer, SampleSchedule]:
    _, optimizer = sgd(lr=1.0)
    return optimizer, SampleSchedule(make(optimizer), nominal_batch_size=nominal)


class TestSampleSchedule:
    def test_an_end_inside_composed_schedulers(self) -> None:
        def one_cycle(o: torch.optim.Optimizer) -> Any:
            return lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=5, cycle_momentum=False)

        def after(o: torch.optim.Optimizer) -> Any:
            return lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o, 0.5), one_cycle(o)], milestones=[3])

        def before(o: torch.optim.Optimizer) -> Any:
            return lr_scheduler.SequentialLR(o, [one_cycle(o), lr_scheduler.ConstantLR(o, 0.5)], milestones=[5])

        def chain(o: torch.optim.Optimizer) -> Any:
            return lr_scheduler.ChainedScheduler([one_cycle(o), lr_scheduler.ConstantLR(o, 0.5)])

        assert schedule_of(after)[1].advance(500) == 3 + 4
        assert schedule_of(before)[1].advance(500) == 50
        assert schedule_of(chain)[1].advance(500) == 4

    def test_a_loop_that_steps_it_is_told_that_the_controller_does(self) -> None:
        _, schedule = schedule_of(lambda o: lr_scheduler.StepLR(o, 3))
        with pytest.raises(UsageError, match=r"leave scheduler.step\(\) out of the loop"):
            schedule.step()

    def test_resuming_goes_on_at_the_same_sample(self) -> None:
        def make(o: torch.optim.Optimizer) -> Any:
            return lr_scheduler.StepLR(o, 3, gamma=0.1)

        optimizer, schedule = schedule_of(make)
        schedule.advance(37)
        saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
        straight = schedule.advance(23)
        resumed_optimizer, resumed = schedule_of(make)
        resumed_optimizer.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        assert (resumed.samples, resumed.advance(23), resumed.samples) == (37, straight, 60)
        assert rates(resumed_optimizer) == rates(optimizer)

    def test_resuming_keeps_the_nominal_batch_and_a_state_of_0_2_does_not_set_it(self) -> None:
        def make(o: torch.optim.Optimizer) -> Any:
            return lr_scheduler.StepLR(o, 3, gamma=0.1)

        saved = schedule_of(make, nominal=12)[1].state_dict()
        resumed, older = schedule_of(make, nominal=8)[1], schedule_of(make, nominal=8)[1]
        resumed.load_state_dict(saved)
        del saved["nominal_batch_size"]
        older.load_state_dict(saved)
        assert (resumed.advance(24), older.advance(24)) == (2, 3)
        assert resumed.get_last_lr() == rates(resumed.scheduler.optimizer)

    def test_a_loop_that_steps_it_too_is_warned_and_one_that_loads_it_is_not(self) -> None:
        saved = schedule_of(lambda o: lr_scheduler.StepLR(o, 3))[1].scheduler.state_dict()
        _, schedule = schedule_of(lambda o: lr_scheduler.StepLR(o, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(5):
                schedule.advance(10)
            schedule.scheduler.load_state_dict(saved)
            schedule.advance(10)
            schedule.scheduler.step()
            schedule.advance(10)
        schedule.scheduler.step()
        with pytest.warns(RuntimeWarning, match="and so did the loop"):
            schedule.advance(10)

    def test_bad_input(self) -> None:
        with pytest.raises(ConfigError, match="nominal_batch_size=0"):
            schedule_of(lambda o: lr_scheduler.StepLR(o, 1), nominal=0)
        with pytest.raises(ConfigError, match="takes no metric"):
            schedule_of(lr_scheduler.ReduceLROnPlateau)
        with pytest.raises(ConfigError, match="samples=-1"):
            schedule_of(lambda o: lr_scheduler.StepLR(o, 1))[1].advance(-1)


@pytest.mark.parametrize(
    ("made", "root"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False),
        (lambda p: torch.optim.Adam(p, lr=0.1), True),
        (lambda p: torch.optim.AdamW(p, lr=0.1), True),
        (lambda p: torch.optim.RMSprop(p, lr=0.1), True),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), True),
    ],
)
def test_auto_is_the_gain_and_its_root_if_the_optimizer_divides_by_the_size_of_gradients(
    made: Callable[[Any], torch.optim.Optimizer], root: bool
) -> None:
    optimizer = made([nn.Parameter(torch.zeros(1))])
    follows = LearningRate(optimizer, "auto").rule
    for noise, expected in ((0.0, 1.0), (64 * 5.0, 1.6), (1e9, 4.0), (NAN, 2.0)):  # noise counts four times
        found = follows(4.0, noise, 20.0, base_batch=64)
        assert found == pytest.approx(math.sqrt(expected) if root else expected, rel=1e-3)


@given(k=st.floats(0.1, 64), noise=positive, signal=positive, room=st.floats(0, 1))
def test_auto_goes_beyond_the_root_as_far_as_it_has_room(k: float, noise: float, signal: float, room: float) -> None:
    least, here, most = (rule("auto")(k, noise, signal, base_batch=64, room=part) for part in (0.0, room, 1.0))
    assert least <= here <= most == pytest.approx(gain(k, 4 * noise, signal))
    assert least <= math.sqrt(k) * (1 + 1e-9)


def _factors(lr: Callable[[int], Any], resumed_at: int | None = None) -> list[float]:
    """The rule's factors in 40 steps of 64 samples, with rates for 8, as `lr` has them."""

    def begun() -> Training:
        return Training(dynamix.Controller("static", 64, interval=2, rate_for=8), classes(64 * 40), lr=lr(0))

    job, found = begun(), list[float]()
    while len(found) < 40:
        if len(found) == resumed_at:
            state, job = copy.deepcopy((job.controller.state_dict(), job.net.state_dict())), begun()
            job.controller.load_state_dict(state[0])
            job.net.load_state_dict(state[1])
            resumed_at = None
        for x, y in job.loader:
            if len(found) == resumed_at:
                break
            job.optimizer.param_groups[0]["lr"] = lr(len(found))
            job.backward(x, y)
            found.append(job.controller.metrics()["lr_factor"])
            job.finish()
    job.controller.close()
    return found


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_auto_begins_at_the_root_and_goes_on_as_the_users_rate_falls(kind: Callable[[float], Any]) -> None:
    def falls(step: int) -> Any:
        return kind(0.01 if step < 20 else 0.006 if step < 30 else 0.002)

    stays, found = _factors(lambda _: kind(0.01)), _factors(falls)
    root = math.sqrt(8)
    assert found[:20] == stays[:20]
    assert max(stays) <= root * (8 / root) ** (40 / 1000)  # slowly: 1000 steps until it may be what the noise allows
    assert max(found[20:30]) > 1.1 * max(stays)
    assert max(found[30:]) > 1.1 * max(found[20:30])
    assert _factors(falls, resumed_at=25)[:30] == found[:30]  # then a window counts that the pause cut short


@pytest.mark.parametrize(
    ("given", "factors"),
    [
        ({"global_batch": "adaptive", "lr_rule": "linear"}, {1.0, 2.0}),
        ({"global_batch": "adaptive", "lr_rule": "none"}, {1.0}),
        ({}, {1.0}),
    ],
    ids=str,
)
def test_the_rate_follows_the_global_batch_but_not_an_epochs_tail(given: dict[str, Any], factors: set[float]) -> None:
    job = Training(dynamix.Controller(Script([[16], [8]]), 8, interval=2, **given), classes(90))
    seen, tails, used = set(), 0, []
    job.optimizer.register_step_pre_hook(lambda *_: used.append(job.optimizer.param_groups[0]["lr"]))
    for x, y in job.loader:
        tails += not job.sampler.plan().regular
        job.backward(x, y)
        job.update()
        seen.add(job.controller.metrics()["lr_factor"])
        job.controller.step()
    job.controller.close()
    assert tails
    assert seen == factors
    assert {round(rate / 0.1, 6) for rate in used} == factors

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
from dynamix.errors import ConfigError
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

    @given(s=st.floats(0.1, 100), noise=positive, signal=positive)
    def test_adascale_lies_between_none_and_linear(self, s: float, noise: float, signal: float) -> None:
        assert min(1, s) * (1 - 1e-9) <= gain(s, noise, signal) <= max(1, s) * (1 + 1e-9)

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

    def test_an_unknown_rule_names_the_known_ones(self) -> None:
        for make in (rule, lambda name: LearningRate(sgd()[1], name)):
            with pytest.raises(ConfigError, match=r"lr_rule='cubic'.*auto, none, linear, sqrt, adascale"):
                make("cubic")


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
        before = rates(ours)
        LearningRate(ours, "linear").set_factor(2.5)
        for _ in range(3):
            ours.step()
            plain.step()
            assert rates(ours) == before
        torch.testing.assert_close(weights(ours), weights(plain))

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

    def test_the_rate_is_back_when_a_step_raises(self) -> None:
        class Broken(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                seen.append(self.param_groups[0]["lr"])
                raise FloatingPointError("no")

        for lr in (0.1, torch.tensor(0.1)):
            seen: list[Any] = []
            optimizer = Broken([nn.Parameter(torch.zeros(1))], lr=lr)
            learning_rate = LearningRate(optimizer, "linear")
            learning_rate.set_factor(3.0)
            for _ in range(2):
                with pytest.raises(FloatingPointError):
                    optimizer.step()
                assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
            learning_rate.remove()
            assert len(seen) == 2

    def test_the_rate_is_back_when_a_closure_raises(self) -> None:
        _, optimizer = sgd()
        LearningRate(optimizer, "linear").set_factor(3.0)

        def closure() -> Tensor:
            raise FloatingPointError

        with pytest.raises(FloatingPointError):
            optimizer.step(closure)
        assert rates(optimizer) == [0.1]

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

    def test_a_state_dict_taken_during_a_step_shows_the_users_rate(self) -> None:
        shared = torch.tensor(0.1)
        for lr in (0.1, shared):
            groups = two_groups()
            for group in groups:
                group["lr"] = lr
            optimizer = torch.optim.SGD(groups)
            learning_rate = LearningRate(optimizer, "linear")
            seen = []

            def look(opt, *_, seen=seen):
                seen.append((rates(opt), [float(g["lr"]) for g in opt.state_dict()["param_groups"]]))

            optimizer.register_step_pre_hook(look)  # registered after ours, so it runs under the scaled rates
            learning_rate.set_factor(3.0)
            optimizer.step()
            assert seen == [(pytest.approx([0.3, 0.3]), pytest.approx([0.1, 0.1]))]
            assert rates(optimizer) == pytest.approx([0.1, 0.1])

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

    def test_a_skipped_step_changes_nothing(self) -> None:
        weight, optimizer = sgd()
        LearningRate(optimizer, "linear").set_factor(2.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for value, moved in ((math.inf, False), (1.0, True)):
            before = weight.detach().clone()
            optimizer.zero_grad()
            scaler.scale((weight * value).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert rates(optimizer) == [0.1]
            assert bool((weight != before).any()) == moved
        torch.testing.assert_close(weight.detach(), before - 0.2)

    def test_a_tensor_rate_stays_the_same_tensor(self) -> None:
        lr = torch.tensor(0.1)
        weight, optimizer = sgd(lr=lr)
        LearningRate(optimizer, "linear").set_factor(3.0)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] is lr
        assert lr.item() == torch.tensor(0.1).item()
        torch.testing.assert_close(weight.detach()[0], torch.tensor(0.7))

    def test_a_rate_set_between_steps_is_the_one_scaled(self) -> None:
        weight, optimizer = sgd()
        LearningRate(optimizer, "linear").set_factor(2.0)
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.step()
        assert weight[0].item() == -1.0

    @pytest.mark.parametrize("scheduled", [False, True])
    def test_remove_leaves_the_optimizer_as_it_was(self, scheduled: bool) -> None:
        weight, optimizer = sgd()
        if scheduled:
            lr_scheduler.ExponentialLR(optimizer, 0.5)
        before = optimizer.__dict__.get("step")
        learning_rate = LearningRate(optimizer, "linear")
        learning_rate.set_factor(2.0)
        learning_rate.remove()
        assert optimizer.__dict__.get("step") is before
        optimizer.step()
        torch.testing.assert_close(weight.detach()[0], torch.tensor(0.9))

    def test_remove_under_somebody_elses_wrapper(self) -> None:
        weight, optimizer = sgd()
        learning_rate = LearningRate(optimizer, "linear")
        learning_rate.set_factor(2.0)
        lr_scheduler.ExponentialLR(optimizer, 0.5)
        learning_rate.remove()
        optimizer.step()
        torch.testing.assert_close(weight.detach()[0], torch.tensor(0.9))

    def test_copies_and_pickles_of_the_optimizer_are_plain(self) -> None:
        _, optimizer = sgd()
        LearningRate(optimizer, "linear").set_factor(2.0)
        for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            weight = twin.param_groups[0]["params"][0]
            weight.grad = torch.ones(3)
            twin.step()
            torch.testing.assert_close(weight.detach()[0], torch.tensor(0.9))

    def test_load_state_dict_between_steps(self) -> None:
        _, optimizer = sgd(momentum=0.9)
        LearningRate(optimizer, "linear").set_factor(2.0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.load_state_dict(saved)
        optimizer.step()
        assert rates(optimizer) == [0.1]

    @pytest.mark.parametrize("value", [0.0, -1.0, NAN, math.inf])
    def test_an_impossible_factor_is_refused(self, value: float) -> None:
        learning_rate = LearningRate(sgd()[1], "linear")
        with pytest.raises(ConfigError, match="positive and finite"):
            learning_rate.set_factor(value)
        assert learning_rate.factor == 1.0

    @pytest.mark.multiproc
    def test_zero_redundancy_optimizer(self) -> None:
        for ours, plain, seen in run_ranks(_zero, 2):
            assert ours == pytest.approx(plain)
            assert seen == [0.1] * 3


def _zero(rank: int) -> tuple[list[float], list[float], list[float]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def train(lr: float, factor: float | None) -> tuple[list[float], list[float]]:
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
        if rank == 0:
            seen.append(optimizer.state_dict()["param_groups"][0]["lr"])
        else:
            seen.append(lr)
        return torch.cat([p.detach() for p in parameters]).tolist(), seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, seen = train(0.1, 2.0)
        plain, _ = train(0.2, None)
    return ours, plain, seen


def schedule_of(
    make: Callable[[torch.optim.Optimizer], Any], nominal: int = 10
) -> tuple[torch.optim.Optimizer, SampleSchedule]:
    _, optimizer = sgd(lr=1.0)
    return optimizer, SampleSchedule(make(optimizer), nominal_batch_size=nominal)


class TestSampleSchedule:
    @given(st.lists(st.integers(0, 60), max_size=30))
    def test_progress_depends_on_the_samples_only(self, parts: list[int]) -> None:
        optimizer, schedule = schedule_of(lambda o: lr_scheduler.LambdaLR(o, lambda t: 1.0 / (1 + t)))
        steps = sum(schedule.advance(n) for n in parts)
        assert steps == sum(parts) // 10
        assert schedule.samples == sum(parts)
        assert rates(optimizer) == pytest.approx([1.0 / (1 + steps)])

    def test_at_the_nominal_batch_it_is_the_plain_loop(self) -> None:
        def make(o: torch.optim.Optimizer) -> Any:
            return lr_scheduler.CosineAnnealingLR(o, 7)

        optimizer, schedule = schedule_of(make)
        _, other = sgd(lr=1.0)
        plain = make(other)
        for _ in range(7):
            optimizer.step()
            assert schedule.advance(10) == 1
            other.step()
            plain.step()
            assert rates(optimizer) == rates(other)

    def test_one_cycle_stays_at_its_end(self) -> None:
        optimizer, schedule = schedule_of(
            lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=8, cycle_momentum=False)
        )
        assert schedule.advance(65) == 6
        assert schedule.advance(1000) == 1
        last = rates(optimizer)
        assert schedule.advance(1000) == 0
        assert rates(optimizer) == last == pytest.approx([1.0 / 25 / 1e4])

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

    def test_torch_does_not_warn_about_the_order(self) -> None:
        # Nothing was stepped yet, as when GradScaler skips the first steps. Warnings are errors in this suite.
        optimizer, schedule = schedule_of(lambda o: lr_scheduler.StepLR(o, 1))
        assert schedule.advance(20) == 2
        optimizer, schedule = schedule_of(lambda o: lr_scheduler.StepLR(o, 1))
        optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
        assert schedule.advance(20) == 2

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

    def test_bad_input(self) -> None:
        with pytest.raises(ConfigError, match="nominal_batch_size=0"):
            schedule_of(lambda o: lr_scheduler.StepLR(o, 1), nominal=0)
        with pytest.raises(ConfigError, match="takes no metric"):
            schedule_of(lr_scheduler.ReduceLROnPlateau)
        with pytest.raises(ConfigError, match="samples=-1"):
            schedule_of(lambda o: lr_scheduler.StepLR(o, 1))[1].advance(-1)

    def test_together_with_a_rule(self) -> None:
        weight, optimizer = sgd(lr=1.0)
        schedule = SampleSchedule(lr_scheduler.StepLR(optimizer, 1, gamma=0.5), nominal_batch_size=10)
        learning_rate = LearningRate(optimizer, "linear")
        for factor, expected in ((1.0, 0.0), (2.0, -1.0), (4.0, -2.0)):
            learning_rate.set_factor(factor)
            optimizer.step()
            schedule.advance(10)
            assert weight[0].item() == expected


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


def _rule_of_zero(rank: int) -> float:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.Adam, lr=0.1)
    return rule("auto", optimizer)(4.0, math.nan, math.nan, base_batch=1)


def test_auto_asks_the_optimizer_inside_of_a_sharded_one() -> None:
    assert run_ranks(_rule_of_zero, 1) == [math.sqrt(2.0)]


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

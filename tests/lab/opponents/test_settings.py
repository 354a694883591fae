"""Trials, periods, shares, meetings and the profile: what each promises by itself."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dynamix.errors import ConfigError
from dynamix.window import Bounds, Window
from dynamix_lab.opponents.local import EndlessOrder, RoundBook
from dynamix_lab.opponents.meetings import Baggage, Met, NesterovOuter
from dynamix_lab.opponents.periods import QSR, AdaComm, Moment, period_of
from dynamix_lab.opponents.profiled import STEPS, Profiled
from dynamix_lab.opponents.shares import FIRST_STEPS, StepShares, steps_of, whole_steps
from dynamix_lab.opponents.trial import LocalSettings, Trial
from tests.refused import refused


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 0}, "batch_size=0 .* a whole number, 1 or more"),
        ({"batch_size": True}, "batch_size=True"),
        ({"learning_rate": float("nan")}, "learning_rate=nan .* above 0"),
        ({"lr_rule": "cube"}, "lr_rule='cube' .* adascale"),
        ({"schedule": "cosine"}, "budget=None .* cosine"),
        ({"policy": "static", "local": {"period": "qsr"}}, "period='qsr' .* fixed, ratio, auto with a policy"),
        ({"policy": None, "local": {"period": "ratio"}}, "policy=None"),
        ({"colour": 1}, "field of Trial='colour' .* batch_size"),
        ({"local": 3}, "local=3 "),
        ({"learning_rate": ...}, "learning_rate"),
        ({"local": {"period": "often"}}, "period='often' .* qsr"),
        ({"local": {"period": "adacomm"}}, "budget=None .* adacomm"),
        ({"local": {"steps": 9, "most_steps": 8}}, "most_steps=8 .* 9 or more"),
        ({"local": {"speeds": [1.0, 0.0]}}, "speeds=0.0"),
    ],
)
def test_what_is_wrong_in_a_trial_is_named(change: dict[str, Any], said: str) -> None:
    plain = Trial("local", None, 32, 0.1, local=LocalSettings()).to_dict()
    given = {name: value for name, value in {**plain, **change}.items() if value is not ...}
    refused(ConfigError, said, Trial.from_dict, given)


def test_schedules_are_functions_of_samples() -> None:
    cosine = Trial("x", None, 8, 0.1, schedule="cosine", budget=1000)
    steps = Trial("x", None, 8, 0.1, schedule="steps", budget=1000)
    assert [round(cosine.rate_factor(s), 4) for s in (0, 500, 1000, 5000)] == [1.0, 0.505, 0.01, 0.01]
    assert [round(steps.rate_factor(s), 4) for s in (0, 499, 500, 750, 5000)] == [1.0, 1.0, 0.1, 0.01, 0.01]


# ---------------------------------------------------------------- periods


def test_post_local_switches_where_the_rate_first_decays() -> None:
    local = LocalSettings(period="post_local", steps=16, switch_at=0.25)
    constant = period_of(Trial("post_local", None, 8, 0.1, local=local, budget=1000))
    decaying = period_of(Trial("post_local", None, 8, 0.1, local=local, budget=1000, schedule="steps"))
    at = (0, 249, 250, 499, 500)
    assert [constant.at(Moment(s, 0.1, 1.0)).steps for s in at] == [1, 1, 16, 16, 16]
    assert [decaying.at(Moment(s, 0.1, 1.0)).steps for s in at] == [1, 1, 1, 1, 16]


def test_qsr_goes_with_the_square_of_the_rate() -> None:
    rule = QSR(2, alpha=0.4, most=50)
    assert [rule.at(Moment(0, rate, 1.0)).steps for rate in (0.4, 0.2, 0.1, 0.06, 0.01)] == [2, 4, 16, 44, 50]


def test_adacomm_falls_with_the_loss_and_rises_with_a_falling_rate() -> None:
    waiting = AdaComm(16, every=100, most=64)
    assert waiting.at(Moment(0, 0.1, float("nan"))) == waiting  # no loss yet
    rule = waiting.at(Moment(10, 0.1, 4.0))
    fallen = rule.at(Moment(100, 0.1, 1.0))
    assert fallen.steps == 8  # sqrt(1/4) of 16
    assert fallen.at(Moment(150, 0.1, 0.1)).steps == 8  # looks again at 200
    assert fallen.at(Moment(200, 0.1, 1.0)).steps == 4  # the loss stands still
    assert fallen.at(Moment(200, 0.025, 1.0)).steps == 16  # the rate is a quarter
    assert AdaComm(16, every=1, most=20).at(Moment(1, 0.1, 1.0)).at(Moment(2, 0.001, 1.0)).steps == 20


def test_the_period_is_asked_with_samples_rate_and_loss_of_the_run() -> None:
    local = LocalSettings(period="post_local", steps=4, proportional=False)
    book = RoundBook(Trial("post_local", None, 10, 0.1, local=local, budget=100), workers=2)
    seen = []
    for _ in range(6):
        plan = book.plan()
        seen.append((plan.start, plan.steps.tolist()))
        book.met(plan, Met(torch.zeros(1), 20.0, 1.0, np.array([0.1, 0.1]), stop=False))
    assert seen == [(0, [1, 1]), (20, [1, 1]), (40, [1, 1]), (60, [4, 4]), (140, [4, 4]), (220, [4, 4])]


# ---------------------------------------------------------------- shares


def test_steps_follow_speeds_by_largest_remainder() -> None:
    assert steps_of([5.0, 4.0, 3.0, 1.0], 4).tolist() == [6, 5, 4, 1]
    assert steps_of([100.0, 1.0], 2).tolist() == [3, 1]


def test_whole_steps_never_wait_longer_than_proportional_ones_and_fill_the_slowest_ones_time() -> None:
    step_s = np.array([1.0, 1.25, 2.0, 5.0])
    for mean in (1, 2, 3, 4, 8, 32):
        proportional, whole = steps_of(1 / step_s, mean), whole_steps(step_s, mean)
        speeds = [float(steps.sum() / (steps * step_s).max()) for steps in (proportional, whole)]
        assert mean * 4 <= whole.sum() <= 1.5 * mean * 4
        assert whole.min() >= 1
        assert speeds[1] >= 0.97 * speeds[0]
    assert whole_steps([1.0, 1.0, 1.0, 5.0], 2).tolist() == [4, 4, 3, 1]  # 12 steps at most
    assert whole_steps([1.0, 1.0, 1.0, 5.0], 4).tolist() == [5, 5, 5, 1]


def _measured(shares: StepShares, step_s: list[float], mean: int = 8) -> list[int]:
    shares.measured(shares.plan(0, mean), np.array(step_s))
    return [int(n) for n in shares.plan(0, mean).steps]


def test_shares_start_even_and_short_then_follow_what_was_measured_whatever_one_pause() -> None:
    shares = StepShares(2, 16)
    assert shares.plan(0, 8).steps.tolist() == [FIRST_STEPS, FIRST_STEPS]
    assert _measured(shares, [0.1, 0.3]) == [12, 4]
    assert _measured(shares, [0.1, 0.3]) == [12, 4]
    assert _measured(shares, [30.0, 0.3]) == [12, 4]


def test_shares_without_proportion_and_with_known_speeds() -> None:
    even, known = StepShares(2, 16, proportional=False), StepShares(2, 16, speeds=(3.0, 1.0))
    assert _measured(even, [0.1, 0.3]) == [8, 8]
    assert known.plan(0, 8).steps.tolist() == [12, 4]
    refused(ConfigError, r"speeds=3 .* 2, one for each worker", StepShares, 2, 16, speeds=(1.0, 1.0, 1.0))


def test_smaller_pieces_bring_a_slow_worker_into_a_fair_round_even_with_a_fixed_cost() -> None:
    shares = StepShares(4, 32, smaller_pieces=True)
    plan = shares.plan(0, 2)
    for _ in range(12):
        shares.measured(plan, np.array([1.0, 1.0, 1.0, 9.0]) * (0.005 + 0.001 * plan.pieces))
        plan = shares.plan(0, 2)
    took = plan.steps * np.array([1.0, 1.0, 1.0, 9.0]) * (0.005 + 0.001 * plan.pieces)
    assert plan.pieces[:3].tolist() == [32, 32, 32]
    assert 1 <= plan.pieces[3] < 32
    assert took[3] < 1.4 * took[0]


def test_the_stream_gives_every_sample_once_an_epoch_however_it_is_cut() -> None:
    order = EndlessOrder(50, seed=3)
    pieces = [order.take(start, 7) for start in range(0, 350, 7)]
    whole = torch.cat(pieces)
    for epoch in range(7):
        assert sorted(whole[50 * epoch : 50 * epoch + 50].tolist()) == list(range(50))
    assert torch.equal(EndlessOrder(50, seed=3).take(120, 200), whole[120:320])


# ---------------------------------------------------------------- meetings


def _net_of(value: float, momentum: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    with torch.no_grad():
        net.weight.fill_(value + momentum)  # the step below moves it by its gradient, which is the momentum then
    net.weight.grad = torch.full_like(net.weight, momentum)
    optimizer.step()
    return net, optimizer


def _meet(settings: LocalSettings) -> list[tuple[list[float], list[float] | None]]:
    """Weights 1 and 4 with momenta 2 and 8, of 30 and 10 samples; what both go home with."""
    made = [_net_of(1.0, 2.0), _net_of(4.0, 8.0)]
    bags = [Baggage(net, optimizer, settings, rank, 2) for rank, (net, optimizer) in enumerate(made)]
    total = bags[0].packed(30, 0.5, 0.1) + bags[1].packed(10, 0.9, 0.4, stop=True)
    mets = [bag.unpacked(total.clone()) for bag in bags]
    assert (mets[0].samples, mets[0].stop) == (40, True)
    assert mets[0].loss == pytest.approx(0.6)
    assert mets[0].step_s.tolist() == pytest.approx([0.1, 0.4])
    homes = []
    for bag, met, (net, optimizer) in zip(bags, mets, made, strict=True):
        bag.taken_home(met)
        state = optimizer.state.get(next(net.parameters()), {})
        buffer = state.get("momentum_buffer")
        homes.append((next(net.parameters()).flatten().tolist(), None if buffer is None else buffer.flatten().tolist()))
    return homes


@pytest.mark.parametrize(("mode", "momenta"), [("kept", [2.0, 8.0]), ("averaged", [3.5, 3.5]), ("reset", [None, None])])
def test_parameters_are_averaged_by_samples_and_momentum_as_asked(mode: str, momenta: list[float | None]) -> None:
    homes = _meet(LocalSettings(momentum=mode))
    assert [weights for weights, _ in homes] == [[1.75, 1.75], [1.75, 1.75]]
    assert [None if buffer is None else buffer[0] for _, buffer in homes] == momenta


def test_the_outer_step_is_that_of_torchs_nesterov_sgd() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(5), nn.Parameter(torch.zeros(5))
    theirs.data.copy_(ours)
    outer, optimizer = NesterovOuter(0.7, 0.9), torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        mean = ours + 0.1 * torch.randn(5)
        theirs.grad = theirs.detach() - mean
        optimizer.step()
        ours = outer.step(ours, mean)
        torch.testing.assert_close(ours, theirs.detach())


# ---------------------------------------------------------------- profile


def _profile(
    policy: Profiled, bounds: Bounds, sizes: np.ndarray[Any, Any], windows: int, steps: float
) -> list[list[int]]:
    """Sizes in force, window by window, of workers with lines of their own."""
    fixed, each, seen = np.array([0.02, 0.05]), np.array([0.001, 0.002]), []
    for _ in range(windows):
        seen.append([int(n) for n in sizes])
        sizes = policy.decide(Window.of(sizes, compute=fixed + each * sizes, steps=steps), bounds)
    return seen


def test_the_profile_takes_twenty_steps_at_three_sizes_and_then_holds_what_makes_all_finish_together() -> None:
    seen = _profile(Profiled(), Bounds.of(2, 1, 256), np.array([40, 40]), 20, steps=STEPS / 4)
    assert seen[:12] == [[40, 40]] * 4 + [[20, 20]] * 4 + [[60, 60]] * 4
    # 0.02 + 0.001 a = 0.05 + 0.002 (80 - a)
    assert seen[12:] == [[63, 17]] * 8
    narrow = _profile(Profiled(), Bounds.of(2, 40, 60), np.array([40, 40]), 6, steps=STEPS)
    assert narrow[0] == narrow[1] == [40, 40]
    assert sum(narrow[-1]) == 80


def test_a_profile_goes_on_from_its_state() -> None:
    bounds, first = Bounds.of(2, 1, 256), Profiled()
    sizes = _profile(first, bounds, np.array([40, 40]), 2, steps=STEPS)[-1]
    second = Profiled()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    again = [_profile(policy, bounds, np.array([60, 60]), 3, steps=STEPS) for policy in (first, second)]
    assert sizes == [20, 20]
    assert again[0] == again[1]

"""The rule of one worker, number by number: what it leaves, and how far it goes for what it smells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynamix.policies.goodput import GROWTH
from dynamix.policies.stigmergic.crowd import CANDIDATES, LEAST, Crowd, Smell
from dynamix.policies.stigmergic.policy import Parameters, StigmergicPolicy
from dynamix.policies.stigmergic.traces import Own, TraceKind, noise_part
from dynamix.runtime.measure.noise import NoiseScale
from dynamix.window import Bounds, Floats

UNIT = 64.0
WIDE = Bounds.of(2, 1, 4096)


def own(size: Any = (64, 64), busy: Any = (0.1, 0.1), blocked: Any = (0.0, 0.0), **given: Any) -> Own:
    """Two workers' windows; `given` replaces other fields."""
    known: dict[str, Any] = {"jitter": 0.01, "steps": 5.0, "noise": 0.5, "square": 1.0, "fits": np.inf}
    known |= {"least": blocked, **given}
    arrays = {name: np.broadcast_to(np.asarray(v, dtype=np.float64), 2).copy() for name, v in known.items()}
    sizes, busy_s, blocked_s = (np.asarray(v, dtype=np.float64) for v in (size, busy, blocked))
    return Own(size=sizes, unit=np.full(2, UNIT), busy=busy_s, blocked=blocked_s, workers=2, **arrays)


def taught(seen: Own, parameters: Parameters | None = None, *, sizes: Any = ((64, 64), (32, 96), (96, 32))) -> Any:
    """A policy whose workers know their costs: 20 ms and what `seen` says of a sample. Nobody has moved yet."""
    policy = StigmergicPolicy(parameters)
    a_sample = (seen.busy - 0.02) / seen.size
    for size in (*sizes, seen.size):
        policy.observe(own(size, 0.02 + a_sample * np.asarray(size), (0.005, 0.005)))
    return policy


def smell_of(policy: Any, seen: Own, **traces: float) -> tuple[Any, Floats, Floats]:
    """What its workers sense, and what is smelt after all have left their traces; `traces` are put over them."""
    sense, left = policy.observe(seen)
    total = left.sum(-2)
    for name, value in traces.items():
        total[TraceKind[name]] = value
    smelt, new = policy.smell(total, np.zeros(len(TraceKind)))
    return sense, smelt[None], new[None]


def moves(policy: Any, seen: Own, **traces: float) -> Floats:
    """Log changes of the two workers' wishes, without the common move."""
    sense, smelt, new = smell_of(policy, seen, **traces)
    policy.choose(seen, sense, smelt, new, WIDE)
    return np.asarray(np.log(policy.habit.wish / seen.size) - policy.common)


def at(step_s: float) -> dict[str, Any]:
    """A window of five steps that took so long, for `Crowd.best_move`."""
    return {"seconds": np.full(1, step_s), "steps": np.full(1, 5.0), "reach": 0.6}


def test_who_ends_a_tenth_before_the_last_hardly_counts_among_the_last() -> None:
    policy = StigmergicPolicy()
    policy.crowd.last = np.array([1.0])
    _, left = policy.observe(own(busy=(0.1, 0.09), blocked=(0.0, 0.01)))
    assert left[0, TraceKind.LATE] == pytest.approx(1.0)
    assert left[1, TraceKind.LATE] < 0.02


def test_whose_smallest_size_takes_half_of_a_step_holds_nobody_up() -> None:
    policy = taught(own())
    policy.habit.least = np.array([27.0, 62.0])  # 20 ms and 1.25 ms a sample: 54 and 97 ms of a step of 105
    policy.crowd.last = np.array([1.0])
    _, left = policy.observe(own(blocked=(0.005, 0.005)))
    assert left[0, TraceKind.HEAVY] < 0.01
    assert left[1, TraceKind.HEAVY] > 0.3


def test_an_unsteady_worker_counts_as_slower_than_it_is() -> None:
    steady, unsteady = (
        policy.observe(own(jitter=0.3))[1][0, TraceKind.SPEED]
        for policy in (StigmergicPolicy(Parameters(hedge=0.0)), StigmergicPolicy(Parameters(hedge=1.0)))
    )
    assert unsteady == pytest.approx(steady / 1.3, rel=0.02)


def test_a_worker_at_a_bound_leaves_what_it_has_and_no_speed() -> None:
    policy = taught(own())
    policy.habit.pinned = np.array([True, False])
    sense, left = policy.observe(own(blocked=(0.005, 0.005)))
    assert left[0, TraceKind.SPEED] == 0.0
    assert left[0, TraceKind.HELD] == pytest.approx(1.0 + sense.offset[0])
    assert left[1, TraceKind.SPEED] > 0.0
    assert left[1, TraceKind.HELD] == 0.0


def test_who_could_do_more_goes_part_of_the_way_who_is_late_the_whole() -> None:
    seen = own(busy=(0.06, 0.12), blocked=(0.065, 0.005))
    eager, slow = (moves(taught(seen, Parameters(eager=e, calm=1.0)), seen) for e in (1.0, 0.25))
    assert eager[0] > 0.05
    assert slow[0] == pytest.approx(0.25 * eager[0], rel=0.05)
    assert eager[1] < -0.05
    assert slow[1] == pytest.approx(eager[1], rel=0.05)


def test_what_a_stall_took_is_taken_back_faster_than_other_growth() -> None:
    seen = own(busy=(0.06, 0.12), blocked=(0.065, 0.005))
    policy, stalled = (taught(seen, Parameters(eager=0.2, back=0.8)) for _ in range(2))
    usual = moves(policy, seen)
    sense, smelt, new = smell_of(stalled, seen)
    stalled.habit.refuted = np.array([True, False])
    stalled.choose(seen, sense, smelt, new, WIDE)
    back = np.log(stalled.habit.wish / seen.size) - stalled.common
    assert back[0] > 3.0 * usual[0] > 0.0
    assert back[1] == pytest.approx(usual[1])
    policy, late = (taught(seen, Parameters(back=0.05)) for _ in range(2))
    usual = moves(policy, seen)
    late.habit.refuted = np.array([False, True])  # who is late, and was taken for slow before, still goes the whole way
    assert moves(late, seen)[1] == pytest.approx(usual[1])
    lazy = taught(seen, Parameters(eager=0.2, back=0.05))
    lazy.habit.refuted = np.array([True, False])
    assert moves(lazy, seen)[0] == pytest.approx(moves(taught(seen, Parameters(eager=0.2)), seen)[0])


@pytest.mark.parametrize(
    ("aim", "ahead", "more"), [(0.3, 0.0, 0.0), (0.3, 0.1, 0.1), (0.04, 0.1, 0.04), (-0.3, 0.1, 0.0)]
)
def test_growth_goes_on_from_what_all_wanted_though_sizes_lag_behind(aim: float, ahead: float, more: float) -> None:
    smell = crowd_of(1.5, noise=0.95, aim=np.log(1.5) + aim)
    _, free = Crowd(1.0).best_move(smell, load=smell.load, **at(0.15), price=0.01, ahead=ahead)
    assert free[0] == pytest.approx(5.0 * GROWTH + more)


def test_what_was_aimed_at_stays_met_and_the_policy_allows_it() -> None:
    crowd, known = Crowd(1.0), {**at(0.15), "price": 0.01}
    for aim, later in ((np.log(1.5) + 0.3, 0.1), (np.nan, 0.1)):
        smell = crowd_of(1.5, noise=0.95, aim=aim)
        _, free = crowd.best_move(smell, load=smell.load, ahead=0.1, **known)
        assert free[0] == pytest.approx(5.0 * GROWTH + later)
    common = []
    for ahead in (0.0, 0.1):  # much noise, equal workers, who aimed at 0.3 more than they do
        policy, seen = taught(own(noise=0.99), Parameters(ahead=ahead)), own(noise=0.99, blocked=(0.005, 0.005))
        sense, smelt, new = smell_of(policy, seen, AIM=0.6, AIMING=2.0)
        policy.target = np.full(1, 0.3)
        policy.choose(seen, sense, smelt, new, WIDE)
        common.append(policy.common[0])
    assert common[1] - common[0] == pytest.approx(0.1, abs=0.02)


def test_one_slow_window_does_not_make_a_worker_doubt_the_next() -> None:
    slow = taught(own())
    for busy in (0.2, 0.1, 0.1, 0.1):  # a stall, and as before
        slow.observe(own(busy=(busy, busy)))
    assert slow.habit.costs.error.max() == slow.habit.costs.apart.max() == 0.0
    assert slow.observe(own())[0].pace_s[0] == pytest.approx(taught(own()).observe(own())[0].pace_s[0], rel=0.02)
    older = slow.state_dict()
    older["habit"]["costs"] |= {"error": [0.01, 0.01], "apart": [0.01, 0.01]}
    slow.load_state_dict(older)
    slow.observe(own())
    assert slow.habit.costs.error.max() == slow.habit.costs.apart.max() == 0.0


def test_errors_of_every_window_move_what_a_worker_believes_no_further_than_they_are() -> None:
    policy, rng, believed = taught(own()), np.random.default_rng(3), []
    for _ in range(60):
        factor = np.exp(0.08 * rng.normal(size=2))
        believed.append(policy.observe(own(busy=0.1 * factor, jitter=0.001))[0].pace_s[0])
    assert np.log(believed[10:]).std() < 0.08


def test_while_some_grow_and_others_shrink_less_is_made_up_for() -> None:
    seen = own(busy=(0.06, 0.12), blocked=(0.065, 0.005))
    calm = moves(taught(seen, Parameters(damp=4.0)), seen)
    churning = moves(taught(seen, Parameters(damp=4.0)), seen, GROW=0.5, SHRINK=0.5)  # a quarter of a load each
    assert np.abs(churning).max() == pytest.approx(np.abs(calm).max() / 2.0, rel=0.1)


def test_a_slip_of_the_own_search_is_taken_back() -> None:
    seen = own(blocked=(0.005, 0.005))
    common = []
    for slip in (0.0, 0.1):
        policy = taught(seen, Parameters(push=0.0))
        sense, smelt, new = smell_of(policy, seen, AIM=0.0, AIMING=2.0)
        policy.target = np.full(1, slip)  # this worker's; all found 0
        policy.choose(seen, sense, smelt, new, WIDE)
        common.append(float(policy.common[0]))
    assert common == pytest.approx([0.0, -0.1])


def test_what_all_left_of_their_way_counts_one_window_later() -> None:
    policy = StigmergicPolicy()
    way, nothing = np.zeros((2, len(TraceKind)))
    way[TraceKind.GROW] = 1.5
    policy.smell(nothing, nothing)
    smelt, new = policy.smell(nothing, way)
    assert smelt[TraceKind.GROW] == pytest.approx(1.5 * (1 - policy.parameters.fade))
    assert new[TraceKind.GROW] == pytest.approx(smelt[TraceKind.GROW])
    assert policy.smell(nothing, nothing)[0][TraceKind.GROW] == pytest.approx(1.5 * (1 - policy.parameters.fade) ** 2)


def test_what_all_do_alike_is_no_way_of_ones_own() -> None:
    policy = StigmergicPolicy()
    policy.common = np.log(np.array([1.5]))
    left = policy.moved(np.array([64.0, 64.0]), np.array([1.0, 1.0]), np.array([96, 144]))
    assert left[:, TraceKind.GROW].tolist() == pytest.approx([0.0, 0.5])
    assert left[:, TraceKind.SHRINK].tolist() == pytest.approx([0.0, 0.0])


def test_the_noise_is_averaged_over_windows() -> None:
    habit, scale = StigmergicPolicy().habit, NoiseScale()
    assert np.isnan(habit.steady(float("nan"), float("nan"), 10.0, 10.0)).all()
    for number, (share, square) in enumerate(((0.1, 100.0), (0.9, 10.0), (0.8, 10.0), (1.2, 5.0))):
        found = habit.steady(share, square, 10.0, 10.0)
        scale.update(10.0 * share * square, square * (1.0 - share))
        assert number < 2 or found == pytest.approx((scale.noise / 10.0 / (scale.signal + scale.noise / 10.0), 1.0))
    assert habit.steady(float("nan"), 1.0, 10.0, 10.0) == pytest.approx(found)


def test_averages_of_an_older_checkpoint_begin_anew() -> None:
    policy = StigmergicPolicy()
    older = policy.state_dict()
    older["habit"]["heard"] = [3.0, 2.0]
    policy.load_state_dict(older)
    assert policy.state_dict()["habit"]["heard"] == [3.0, 2.0]  # a load that changes anything is refused
    assert policy.habit.steady(0.5, 2.0, 10.0, 10.0) == pytest.approx((0.5, 1.0))


@pytest.mark.parametrize("part", [(0.5, 0.5), (0.15, 0.85)])
@pytest.mark.parametrize("grows", [1.0, 1.1, 2.0, 0.8])
def test_the_noise_scale_stays_while_the_batch_moves(grows: float, part: tuple[float, float]) -> None:
    """Of gradients whose noise is known exactly, workers of unequal batches leave what gives it back."""
    per_sample, signal, weight = 300.0, 0.15, np.array(part)
    policies = [StigmergicPolicy() for _ in part]
    for window in range(6):
        total = 100.0 * grows**window
        local, whole = signal + per_sample / (weight * total), signal + per_sample / total
        shares = noise_part(weight, local, np.array(whole), 2)
        heard = [p.habit.steady(float(n), whole, total, total) for p, n in zip(policies, shares, strict=True)]
        each = [own(noise=noise, square=square) for noise, square in heard]
        left = sum(p.observe(seen)[1][0] for p, seen in zip(policies, each, strict=True))
        assert left[TraceKind.NOISE] / left[TraceKind.HEARD] == pytest.approx(per_sample / total / whole)


def crowd_of(load: float, **given: float) -> Smell:
    """The smell of a crowd in which everybody works alike: 20 ms, 80 ms a load, an exchange of a tenth of a step."""
    known = {"offset": 0.25, "fixed": 0.25, "last": 0.9, "floor": 0.0, "noise": 0.5, "churn": 0.0, "aim": np.nan}
    known |= {"oom": 0.0, "load": load, "speed": (load + 0.25) / 0.9, **given}
    return Smell(**{name: np.full(1, value) for name, value in known.items()})


def best(load: float, *, critical: float = 3.0, price: float = 0.03, **given: float) -> float:
    """The move of a crowd whose noise scale is `critical` loads."""
    crowd = Crowd(1.0)
    smell = crowd_of(load, noise=critical / (critical + load), **given)
    for _ in range(3):
        known = at(0.08 * (load + 0.25) / 0.9)
        found, _ = crowd.best_move(smell, load=smell.load, **known, price=price, ahead=0.0)
    return float(found[0])


def test_a_load_whose_betterment_is_slight_stays() -> None:
    loads = np.exp(np.linspace(-2.0, 1.5, 141))
    found = np.array([best(load) for load in loads])
    at_rest = loads[found == 0.0]
    assert found[0] > 0.0 > found[-1]
    # A grid of moves alone, 0.0375 apart, would rest on less than that to both sides.
    assert np.log(at_rest.max() / at_rest.min()) > 3.0 * (CANDIDATES[1] - CANDIDATES[0]) * 0.6
    assert LEAST > 0.0


def test_the_pull_to_the_base_batch_is_what_is_left_where_no_noise_is_known() -> None:
    crowd, smell = Crowd(1.0), replace(crowd_of(2.0), noise=np.full(1, np.nan))
    for _ in range(12):
        found, _ = crowd.best_move(smell, load=smell.load, **at(0.2), price=0.1, ahead=0.0)
    assert found[0] < -0.3
    assert best(2.0, critical=50.0, price=0.3) < best(2.0, critical=50.0, price=0.003)


def test_with_less_load_time_falls_no_faster_than_the_load_does() -> None:
    smell = crowd_of(1.0, offset=-0.5)  # much of the load is held by who is at a bound
    half = float(smell.finish(np.array([0.75]))[0])
    assert half == pytest.approx(0.75 * float(smell.finish(np.array([1.0]))[0]))


def test_what_rounding_took_is_remembered() -> None:
    policy = taught(own())
    policy.habit.wish = np.array([64.4, 70.0])
    assert policy.habit.intended(np.array([64.0, 64.0]), 1).tolist() == [64.4, 64.0]


def test_slight_moves_are_not_made() -> None:
    seen = own(busy=(0.096, 0.104), blocked=(0.013, 0.005))
    sizes = []
    for still in (0.0, 0.06):
        policy = taught(seen, Parameters(push=0.0, still=still, calm=1.0, sure=1.0, eager=1.0))
        sense, smelt, new = smell_of(policy, seen, AIM=0.0, AIMING=2.0)
        policy.habit.wish = np.array([64.45, 63.55])
        sizes.append(policy.choose(seen, sense, smelt, new, WIDE).tolist())
    assert sizes[1] == [64, 64] != sizes[0]


def test_a_worker_that_hardly_knows_its_fixed_costs_believes_in_those_of_the_crowd() -> None:
    seen = own(blocked=(0.005, 0.005))
    offsets = []
    for kin in (0.0, 30.0):
        policy = StigmergicPolicy(Parameters(kin=kin))
        for _ in range(3):
            sense, smelt, new = smell_of(policy, seen, OFFSET=4.0)
            policy.choose(seen, sense, smelt, new, WIDE)
        offsets.append(float(policy.observe(seen)[0].offset[0]))
    assert offsets[1] > offsets[0] + 0.1


def test_memory_that_ran_out_is_told_until_the_own_size_fits() -> None:
    _, left = StigmergicPolicy().observe(own(fits=(32.0, 96.0)))
    assert left[:, TraceKind.OOM].tolist() == [1.0, 0.0]


def test_much_noise_makes_all_grow_no_faster_than_training_may_and_less_when_memory_ran_out() -> None:
    seen, common = own(blocked=(0.005, 0.005), noise=0.98), []
    for oom in (0.0, 1.0):
        policy = taught(seen)
        sense, smelt, new = smell_of(policy, seen, OOM=oom)
        policy.choose(seen, sense, smelt, new, WIDE)
        common.append(float(policy.common[0]))
    assert common[0] == pytest.approx(5 * GROWTH, rel=0.01)
    assert 0.0 < common[1] < 0.1 * common[0]


def test_what_may_be_chance_is_made_up_for_in_part() -> None:
    seen = own(busy=(0.097, 0.103), blocked=(0.011, 0.005), jitter=0.3)
    calm, whole = (moves(taught(seen, Parameters(calm=part, hedge=0.0)), seen) for part in (0.1, 1.0))
    assert 0.0 < -calm[1] < -0.5 * whole[1]

"""What traces tell every worker: when all can finish, and which load teaches most a second."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.policies.goodput import GROWTH
from dynamix.policies.stigmergic.crowd import Crowd, Smell
from dynamix.policies.stigmergic.traces import TRACES, TraceKind

STEP_S = 0.5


def traces(load: Any, alpha: Any, beta: Any, **more: Any) -> Any:
    """The sum of what workers leave whose seconds are alpha + beta load, in steps of half a second, (1, 14)."""
    load, alpha, beta = (np.asarray(x, dtype=np.float64) for x in (load, alpha, beta))
    left = np.zeros((len(load), len(TRACES)))
    left[:, TraceKind.PRESENT], left[:, TraceKind.LOAD] = 1.0, load
    left[:, TraceKind.SPEED], left[:, TraceKind.OFFSET] = STEP_S / beta, alpha / beta
    left[:, TraceKind.LATE], left[:, TraceKind.WAIT] = 1.0, 0.1
    for name, value in more.items():
        left[:, TRACES.index(name)] = value
    return left.sum(0)[None]


positive = st.floats(0.05, 3.0)


@given(st.lists(st.tuples(positive, st.floats(0.0, 0.3), positive), min_size=1, max_size=12), st.floats(0.5, 4.0))
def test_sizes_for_the_common_finish_add_up_to_the_load_and_end_together(workers: Any, wanted: float) -> None:
    load, alpha, beta = (np.array(x) for x in zip(*workers, strict=True))
    left = traces(load, alpha, beta)
    smell = Crowd(0.4).read(left)
    at = smell.finish(np.array([wanted]))
    sizes = STEP_S / beta * at - alpha / beta  # what each worker makes of it, knowing only itself
    np.testing.assert_allclose(sizes.mean(), wanted, rtol=1e-9)
    np.testing.assert_allclose(alpha + beta * sizes, np.full(len(load), float(at[0]) * STEP_S), rtol=1e-9)


def test_who_is_at_a_bound_has_no_part_in_what_the_others_share() -> None:
    load, alpha, beta = np.array([1.0, 1.0, 0.2]), np.array([0.1, 0.1, 0.0]), np.array([0.4, 0.2, 0.01])
    held = np.array([0, 0, 1.0]) * (load + alpha / beta)
    speed = STEP_S / beta * np.array([1, 1, 0])
    left = traces(load, alpha, beta, held=held, speed=speed)
    smell = Crowd(0.4).read(left)
    at = smell.finish(np.array([1.0]))
    free = (STEP_S / beta * at - alpha / beta)[:2]
    np.testing.assert_allclose(free.sum() + 0.2, 3.0)
    left = traces(load, alpha, beta, held=load + alpha / beta, speed=0.0)
    everybody = Crowd(0.4).read(left)
    np.testing.assert_allclose(everybody.finish(2 * everybody.load), 2 * everybody.last)


def test_unknown_traces_say_nothing() -> None:
    crowd = Crowd(0.4)
    unknown = np.full((1, len(TRACES)), np.nan)
    smell = crowd.read(unknown)
    best, _ = crowd.best_move(
        smell, load=smell.load, seconds=np.array([0.1]), steps=np.array([5.0]), reach=0.5, price=0.05, ahead=0.0
    )
    assert np.isnan(best).all()


def _move(
    crowd: Crowd, load: float, noise: float, *, windows: int = 12, floor: float = 0.0, price: float = 0.01
) -> float:
    """Where the crowd goes at a mean load: costs 0.02 + 0.1 load seconds, an exchange of 0.1 s."""
    busy, best = 0.02 + 0.1 * load, np.nan
    for _ in range(windows):
        left = np.zeros((1, len(TRACES)))
        step = busy + 0.1
        values = {"PRESENT": 1.0, "LOAD": load, "SPEED": step / 0.1, "OFFSET": 0.2, "LATE": 1.0, "WAIT": 0.1 / step}
        values |= {"NOISE": noise, "HEARD": float(noise > 0), "HEAVY": float(floor > 0), "FLOOR": floor}
        for name, value in values.items():
            left[:, TraceKind[name]] = value
        smell, known = crowd.read(left), {"seconds": np.array([step]), "steps": np.array([5.0])}
        found, _ = crowd.best_move(smell, load=smell.load, **known, reach=0.6, price=price, ahead=0.0)
        best = float(found[0])
    return best


def test_much_noise_asks_for_more_load_and_little_for_less_and_none_known_for_the_base() -> None:
    assert _move(Crowd(0.4), 1.0, 0.95) > 0.3
    assert _move(Crowd(0.4), 1.0, 0.05) < -0.3
    assert abs(_move(Crowd(0.4), 1.0, 0.0)) < 1e-9
    assert _move(Crowd(0.4), 1.5, 0.0) < 0


def test_where_the_slowest_cannot_finish_earlier_more_load_costs_nothing() -> None:
    assert _move(Crowd(0.4), 1.0, 0.3) < _move(Crowd(0.4), 1.0, 0.3, floor=0.9)


def crowd_of(load: float, **given: float) -> Smell:
    """The smell of a crowd in which everybody works alike: 20 ms, 80 ms a load, an exchange of a tenth of a step."""
    known = {"offset": 0.25, "fixed": 0.25, "last": 0.9, "floor": 0.0, "noise": 0.5, "aim": np.nan}
    known |= {"oom": 0.0, "load": load, "speed": (load + 0.25) / 0.9, **given}
    return Smell(**{name: np.full(1, value) for name, value in known.items()})


@pytest.mark.parametrize(
    ("aim", "ahead", "more"), [(0.3, 0.0, 0.0), (0.3, 0.1, 0.1), (0.04, 0.1, 0.04), (-0.3, 0.1, 0.0)]
)
def test_growth_goes_on_from_what_all_wanted_though_sizes_lag_behind(aim: float, ahead: float, more: float) -> None:
    crowd, known = Crowd(1.0), {"seconds": np.full(1, 0.15), "steps": np.full(1, 5.0), "reach": 0.6, "price": 0.01}
    for wanted in (np.log(1.5) + aim, np.nan):  # what was aimed at stays met
        smell = crowd_of(1.5, noise=0.95, aim=wanted)
        _, free = crowd.best_move(smell, load=smell.load, ahead=ahead, **known)
        assert free[0] == pytest.approx(5.0 * GROWTH + more)


def test_with_less_load_time_falls_no_faster_than_the_load_does() -> None:
    smell = crowd_of(1.0, offset=-0.5)  # much of the load is held by who is at a bound
    half = float(smell.finish(np.array([0.75]))[0])
    assert half == pytest.approx(0.75 * float(smell.finish(np.array([1.0]))[0]))

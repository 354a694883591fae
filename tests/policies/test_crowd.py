"""What traces tell every worker: when all can finish, and which load teaches most a second."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynamix.policies.stigmergic.crowd import Crowd, Smell
from dynamix.policies.stigmergic.traces import TRACES, TraceKind

STEP_S = 0.5


def traces(load: Any, alpha: Any, beta: Any, **more: Any) -> Any:
    """The sum of what workers leave whose seconds are alpha + beta load, in steps of half a second, (1, 16)."""
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
    smell = Crowd(0.4).read(left, left)
    at = smell.finish(np.array([wanted]))
    sizes = STEP_S / beta * at - alpha / beta  # what each worker makes of it, knowing only itself
    np.testing.assert_allclose(sizes.mean(), wanted, rtol=1e-9)
    np.testing.assert_allclose(alpha + beta * sizes, np.full(len(load), float(at[0]) * STEP_S), rtol=1e-9)


def test_who_is_at_a_bound_has_no_part_in_what_the_others_share() -> None:
    load, alpha, beta = np.array([1.0, 1.0, 0.2]), np.array([0.1, 0.1, 0.0]), np.array([0.4, 0.2, 0.01])
    held = np.array([0, 0, 1.0]) * (load + alpha / beta)
    speed = STEP_S / beta * np.array([1, 1, 0])
    left = traces(load, alpha, beta, held=held, speed=speed)
    smell = Crowd(0.4).read(left, left)
    at = smell.finish(np.array([1.0]))
    free = (STEP_S / beta * at - alpha / beta)[:2]
    np.testing.assert_allclose(free.sum() + 0.2, 3.0)
    left = traces(load, alpha, beta, held=load + alpha / beta, speed=0.0)
    everybody = Crowd(0.4).read(left, left)
    np.testing.assert_allclose(everybody.finish(2 * everybody.load), 2 * everybody.last)


def test_of_sizes_and_of_who_is_last_only_the_newest_window_counts() -> None:
    first = traces([1.0, 1.0], [0.0, 0.0], [1.0, 1.0], heavy=60.0, floor=60.0)
    new = traces([2.0, 4.0], [0.0, 0.0], [0.5, 0.5], heavy=0.5, floor=0.25)
    smell = Crowd(0.4).read(0.5 * first + new, new)
    np.testing.assert_allclose([smell.load, smell.speed, smell.floor], [[3.0], [1.0], [0.5]], rtol=1e-6)


def test_unknown_traces_say_nothing() -> None:
    crowd = Crowd(0.4)
    unknown = np.full((1, len(TRACES)), np.nan)
    smell = crowd.read(unknown, unknown)
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
        smell, known = crowd.read(left, left), {"seconds": np.array([step]), "steps": np.array([5.0])}
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


def test_a_restored_crowd_goes_on_as_if_nothing_had_happened() -> None:
    crowd, again = Crowd(0.4), Crowd(0.4)
    _move(crowd, 1.2, 0.5, windows=4)
    again.load_state_dict(json.loads(json.dumps(crowd.state_dict())))
    assert _move(again, 1.3, 0.6, windows=1) == _move(crowd, 1.3, 0.6, windows=1)


def test_a_smell_speaks_of_several_loads_at_once() -> None:
    one = np.ones(1)
    smell = Smell(one, 2 * one, 0.5 * one, one, one, 0 * one, one, 0 * one, 0 * one, 0 * one)
    assert smell.finish(np.array([[1.0, 2.0, 3.5]])).tolist() == [[0.75, 1.25, 2.0]]

"""What holds for every policy that a name stands for, whatever it is shown."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.errors import StateError
from dynamix.policies.registry import make_policy, policy_names
from dynamix.projection import project
from dynamix.window import PER_WORKER, Bounds, Window
from tests.policies.worlds import affine

NAMES = [*policy_names(), "static:48", "guarded:lb_bsp", "guarded:dynamix"]
COMPARED = "compare:static,goodput"  # whose turns are of one job
ADAPTIVE = [name for name in NAMES if not name.startswith("static")]

every = pytest.mark.parametrize("name", NAMES)


@st.composite
def _runs(draw: st.DrawFn) -> tuple[Bounds, np.ndarray, np.random.Generator, float]:
    workers, q = draw(st.integers(1, 6)), draw(st.sampled_from([1, 4]))
    low = np.array(draw(st.lists(st.integers(0, 4), min_size=workers, max_size=workers))) * q
    high = low + np.array(draw(st.lists(st.integers(1, 60), min_size=workers, max_size=workers))) * q
    top = draw(st.integers(max(int(low.sum()) // q, 1), int(high.sum()) // q)) * q
    change = draw(st.sampled_from([np.inf, 1.5]))
    bounds = Bounds.of(workers, low, high, total_high=top, quantum=q, max_change=change)
    return (
        bounds,
        project(np.ones(workers), bounds, total=top),
        np.random.default_rng(draw(st.integers(0, 10**6))),
        draw(st.floats(0, 1)),
    )


def _anything(sizes: np.ndarray, rng: np.random.Generator, missing: float) -> Window:
    """A window of positive random figures, each missing with that chance; now and then absurd."""
    shape = sizes.shape
    known: dict[str, Any] = {}
    for name in PER_WORKER:
        value = np.exp(rng.normal(-2, rng.choice([0.1, 3.0]), shape))
        known[name] = np.where(rng.random(shape) < missing, np.nan, value)
    for name in ("noise", "signal", "steps", "global_norm_sq"):
        value = np.exp(rng.normal(2, 3, shape[:-1])) * rng.choice([1.0, 1.0, 1.0, 0.0, -1.0])
        known[name] = np.where(rng.random(shape[:-1]) < missing, np.nan, value)
    return Window.of(sizes, **known)


@pytest.mark.parametrize("name", [*NAMES, COMPARED])
@settings(max_examples=15, deadline=None)
@given(run=_runs())
def test_bounds_hold_whatever_is_measured_or_missing(
    name: str, run: tuple[Bounds, np.ndarray, np.random.Generator, float]
) -> None:
    bounds, sizes, rng, missing = run
    policy = make_policy(name)
    for _ in range(4):
        before = sizes
        sizes = policy.decide(_anything(sizes, rng, missing), bounds)
        assert sizes.dtype == np.int64
        assert sizes.shape == before.shape
        assert ((sizes >= bounds.low) & (sizes <= bounds.high) & (sizes % bounds.quantum == 0)).all()
        if np.isinf(bounds.max_change):
            assert bounds.total_low <= sizes.sum() <= bounds.total_high


@pytest.mark.parametrize("name", ADAPTIVE)
def test_nothing_measured_changes_nothing(name: str) -> None:
    window, policy = Window.of([[30, 30], [30, 30]]), make_policy(name)
    for _ in range(3):
        assert (policy.decide(window, Bounds.of(2)) == 30).all()


@every
def test_permuting_the_workers_permutes_the_answer(name: str) -> None:
    rng = np.random.default_rng(5)
    alpha, beta = rng.uniform(0, 0.05, 6), rng.uniform(1e-3, 5e-3, 6)
    order, bounds = rng.permutation(6), Bounds.of(6, 1, 400)
    one, other = make_policy(name), make_policy(name)
    sizes = np.full(6, 64)
    for _ in range(5):
        answer = one.decide(affine(sizes, alpha, beta), bounds)
        permuted = other.decide(affine(sizes[order], alpha[order], beta[order]), bounds)
        assert (np.abs(answer[order] - permuted) <= 1).all()
        sizes = answer


@every
def test_clusters_in_one_array_are_decided_as_if_alone(name: str) -> None:
    rng = np.random.default_rng(6)
    alpha, beta = rng.uniform(0, 0.05, (3, 4)), rng.uniform(1e-3, 5e-3, (3, 4))
    together, alone = make_policy(name), [make_policy(name) for _ in range(3)]
    sizes, bounds = np.full((3, 4), 64), Bounds.of(4, 1, 400)
    for _ in range(6):
        single = [p.decide(affine(sizes[i], alpha[i], beta[i]), bounds) for i, p in enumerate(alone)]
        sizes = together.decide(affine(sizes, alpha, beta), bounds)
        # One job's network answers in NumPy, several jobs' in torch: rounding may move a sample.
        assert np.abs(sizes - np.stack(single)).max() <= ("dynamix" in name)


@pytest.mark.parametrize("name", [*NAMES, COMPARED])
@pytest.mark.parametrize("windows", [0, 4])
def test_a_saved_policy_goes_on_as_if_never_stopped(name: str, windows: int) -> None:
    rng, bounds = np.random.default_rng(7), Bounds.of(3, 1, 400)
    policy, resumed, sizes = make_policy(name), make_policy(name), np.full(3, 64)
    for _ in range(windows):
        sizes = policy.decide(affine(sizes, 0.02, rng.uniform(1e-3, 3e-3, 3)), bounds)
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    for _ in range(3):
        window = affine(sizes, 0.02, rng.uniform(1e-3, 3e-3, 3))
        sizes = policy.decide(window, bounds)
        np.testing.assert_array_equal(sizes, resumed.decide(window, bounds))


@pytest.mark.parametrize("name", [*NAMES, COMPARED])
def test_another_world_size_starts_over(name: str) -> None:
    policy = make_policy(name)
    for workers in (2, 3, 2):
        sizes = np.full(workers, 64)
        sizes = policy.decide(affine(sizes, 0.02, 1e-3), Bounds.of(workers, 1, 400))
        assert sizes.shape == (workers,)


@pytest.mark.parametrize("name", ["goodput", "dynamix"])
def test_a_state_of_another_version_is_refused_in_words(name: str) -> None:
    with pytest.raises(StateError, match="begin without"):
        make_policy(name).load_state_dict({"costs": {}, "noise": {}})

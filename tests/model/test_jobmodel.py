"""The job model: it never changes, treats each cluster as if alone, and finds the allocation that it says is best."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.errors import ConfigError, UsageError
from dynamix.model import JobModel, log_goodput
from dynamix.model.measured import base_total
from dynamix.window import PER_CLUSTER, PER_WORKER, Bounds, Window
from tests.model.trajectories import CASES, windows


def fitted(case: str, count: int = 12) -> JobModel:
    model = JobModel()
    for window in windows(case)[:count]:
        model = model.update(window)
    return model


def affine(sizes: Any, alpha: Any, beta: Any, *, exchange: float = 0.1, phi: Any = 500.0, **more: Any) -> Window:
    """One noiseless window of workers that take alpha + beta b seconds."""
    batch = np.asarray(sizes)
    seconds = np.asarray(alpha) + np.asarray(beta) * batch
    known = {"base_batch": 64.0 * batch.shape[-1], "steps": 5.0, **more}
    return Window.of(
        batch,
        compute=seconds,
        compute_std=1e-4,
        wait=seconds.max(-1, keepdims=True) - seconds,
        communication=exchange,
        noise=phi,
        signal=1.0,
        **known,
    )


def known(
    alpha: Any, beta: Any, *, exchange: float = 0.1, phi: float = 500.0, scales: Any = (1.0, 1.5, 0.7, 1.2)
) -> JobModel:
    """A model that has seen affine workers at several sizes, last at 64 each."""
    model = JobModel()
    for scale in (*scales, 1.0):
        model = model.update(affine(np.full(len(beta), round(64 * scale)), alpha, beta, exchange=exchange, phi=phi))
    return model


def of_cluster(window: Window, at: Any) -> Window:
    """The part of `window` at index `at` of its leading dimensions, or in another order of workers."""
    fields = {name: getattr(window, name)[at] for name in PER_WORKER + PER_CLUSTER}
    return Window.of(window.batch_size[at], **fields)


def everything(model: JobModel) -> str:
    return json.dumps(model.state_dict())


def same(one: JobModel, other: JobModel) -> None:
    """Both know and answer the same, to the last bit."""
    assert everything(one) == everything(other)
    sizes = np.stack([one.sizes, 2 * one.sizes, 0.5 * one.sizes])
    for costs in ("tangent", "full"):
        np.testing.assert_array_equal(one.log_goodput(sizes, costs=costs), other.log_goodput(sizes, costs=costs))


# ------------------------------------------------------------ taking windows in


@pytest.mark.parametrize("case", ["four", "clusters", "twenty"])
def test_update_leaves_the_model_and_the_window_as_they_are(case: str) -> None:
    models, states = [JobModel()], [everything(JobModel())]
    for window in windows(case):
        before = copy.deepcopy(window)
        models.append(models[-1].update(window))
        states.append(everything(models[-1]))
        for entry in dataclasses.fields(Window):
            np.testing.assert_array_equal(getattr(window, entry.name), getattr(before, entry.name))
    assert [everything(model) for model in models] == states
    assert len(set(states)) == len(states)
    with pytest.raises(dataclasses.FrozenInstanceError):
        models[-1].base = np.zeros(1)  # type: ignore[misc]


def test_clusters_in_one_array_are_fitted_as_if_alone() -> None:
    together, alone = JobModel(), [JobModel(), JobModel()]
    for window in windows("clusters"):
        together = together.update(window)
        alone = [model.update(of_cluster(window, c)) for c, model in enumerate(alone)]
    sizes, bounds = together.sizes * 1.2, Bounds.of(3, 4, 300)
    for c, model in enumerate(alone):
        for costs in ("tangent", "full"):
            many, one = together.log_goodput(sizes, costs=costs), model.log_goodput(sizes[c], costs=costs)
            np.testing.assert_allclose(many[c], one, rtol=1e-12)
        np.testing.assert_allclose(together.best(bounds)[c], model.best(bounds), rtol=1e-9)
        np.testing.assert_allclose(together.costs.loss[c], model.costs.loss, rtol=1e-12)


def test_another_order_of_workers_gives_the_same_model_in_that_order() -> None:
    order = np.array([2, 0, 3, 1])
    one, other = JobModel(), JobModel()
    for window in windows("four"):
        swapped = {name: getattr(window, name)[order] for name in PER_WORKER}
        cluster = {name: getattr(window, name) for name in PER_CLUSTER}
        one, other = one.update(window), other.update(Window.of(window.batch_size[order], **swapped, **cluster))
    bounds = Bounds.of(4, 4, 300)
    np.testing.assert_allclose(one.best(bounds)[order], other.best(bounds), rtol=1e-6)
    for mine, swapped in zip(one.line, other.line, strict=True):
        np.testing.assert_allclose(mine[order], swapped, rtol=1e-9)


@pytest.mark.parametrize("case", list(CASES))
def test_a_restored_model_answers_and_goes_on_as_the_one_that_was_saved(case: str) -> None:
    seen = windows(case)
    for count in (5, 9):
        model = fitted(case, count)
        again = JobModel.from_state(json.loads(json.dumps(model.state_dict())))
        same(model, again)
        for window in seen[count:]:
            model, again = model.update(window), again.update(window)
            same(model, again)


def test_a_model_that_has_seen_nothing_can_be_saved_and_restored() -> None:
    again = JobModel.from_state(json.loads(json.dumps(JobModel().state_dict())))
    same(again.update(windows("four")[0]), fitted("four", 1))


def test_a_window_whose_step_is_not_above_the_last_is_ignored() -> None:
    seen = windows("four")
    model = fitted("four", 6)
    assert model.update(seen[5]) is model
    assert model.update(seen[2]) is model
    assert model.update(dataclasses.replace(seen[6], step=seen[5].step)) is model
    assert everything(model.update(seen[6])) != everything(model)


def test_a_window_that_names_no_step_is_never_ignored_and_does_not_forget_the_step() -> None:
    seen, unnamed = windows("four"), windows("four", steps_known=False)
    model = fitted("four", 6)
    twice = model.update(unnamed[5])
    assert everything(twice) != everything(model)
    assert twice.update(seen[5]) is twice
    without = JobModel()
    for window in unnamed[:6]:
        without = without.update(window)
    assert json.dumps(without.state_dict()["costs"]) == json.dumps(model.state_dict()["costs"])
    assert np.isnan(without.step)
    assert without.update(seen[0]).step == seen[0].step


def test_only_the_clusters_that_a_window_is_new_to_take_it_in() -> None:
    seen = windows("clusters")
    before = fitted("clusters", 6)
    half = dataclasses.replace(seen[6], step=np.array([seen[6].step[0], seen[5].step[1]]))
    after, whole = before.update(half), before.update(seen[6])
    assert after.step.tolist() == half.step.tolist()
    sizes = np.stack([after.sizes, np.full((2, 3), 50.0)])
    for costs in ("tangent", "full"):
        mixed, new, old = (m.log_goodput(sizes, costs=costs, unknown="base") for m in (after, whole, before))
        np.testing.assert_allclose(mixed[:, 0], new[:, 0], rtol=1e-12)
        np.testing.assert_allclose(mixed[1, 1], old[1, 1], rtol=1e-12)
    following = [model.update(seen[7]).log_goodput(sizes)[:, 0] for model in (after, whole)]
    np.testing.assert_allclose(*following, rtol=1e-12)


def test_another_number_of_workers_begins_with_new_costs_in_the_same_job() -> None:
    before = known([0.05, 0.0], [1e-3, 2e-3], scales=(1.0, 3.0))
    window = affine([64, 64, 64], 0.02, [1e-3, 2e-3, 3e-3], step=1.0)
    after = dataclasses.replace(before, step=np.asarray(90.0)).update(window)
    fresh = JobModel().update(window)
    assert json.dumps(after.state_dict()["costs"]) == json.dumps(fresh.state_dict()["costs"])
    assert float(after.largest.total) == float(before.largest.total) > float(fresh.largest.total)
    assert float(after.step) == 1.0
    assert float(after.exchange.count) == float(before.exchange.count) + 1


# ------------------------------------------------------------ asking


def test_before_any_window_nothing_can_be_asked() -> None:
    for ask in (
        lambda m: m.step_s([1, 2]),
        lambda m: m.log_waste(3.0),
        lambda m: m.best(Bounds.of(2)),
    ):
        with pytest.raises(UsageError, match="no window"):
            ask(JobModel())


def test_what_cannot_be_asked_is_refused_by_name() -> None:
    model = fitted("four")
    for ask in (model.step_s, model.speedup):
        with pytest.raises(ConfigError, match=r"quantile=1\.0.*more than 0, less than 1"):
            ask(model.sizes, quantile=1.0)
    with pytest.raises(ConfigError, match=r"costs='line'.*tangent, full"):
        model.step_s(model.sizes, costs="line")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"unknown='zero'.*none, base"):
        model.log_waste(100.0, unknown="zero")  # type: ignore[arg-type]


def test_a_step_takes_the_slowest_workers_time_and_the_exchange() -> None:
    model = known([0.1, 0.0], [1e-3, 4e-3], exchange=0.2)
    sizes = np.array([[70.0, 50.0], [40.0, 60.0], [0.0, 60.0], [70.0, 0.0]])
    expected = np.array([0.2, 0.24, 0.24, 0.17]) + 0.2
    np.testing.assert_allclose(model.step_s(sizes), expected, rtol=0.02)
    np.testing.assert_allclose(model.step_s(sizes, costs="full"), expected, rtol=0.03)
    np.testing.assert_allclose(np.log(model.step_s(sizes)), model.log_step(sizes), rtol=1e-12)
    assert model.step_s(sizes[0]).shape == ()


FOUR = fitted("four")


@settings(max_examples=50)
@given(st.integers(0, 3), st.floats(1.0, 200.0), st.floats(1.01, 3.0), st.sampled_from(["tangent", "full"]))
def test_more_samples_never_take_less_time(worker: int, size: float, factor: float, costs: Any) -> None:
    model = FOUR
    less = np.full(4, 60.0)
    less[worker] = size
    more = less.copy()
    more[worker] *= factor
    assert model.step_s(more, costs=costs) >= model.step_s(less, costs=costs) * (1 - 1e-12)


def test_the_tangent_touches_the_full_costs_at_the_sizes_in_force() -> None:
    model = fitted("four", 11)
    at = model.step_s(model.sizes), model.step_s(model.sizes, costs="full")
    np.testing.assert_allclose(*at, rtol=1e-12)
    assert (abs(np.log(model.step_s(4 * model.sizes) / model.step_s(4 * model.sizes, costs="full"))) > 1e-5).all()


def test_where_nothing_was_measured_no_step_time_is_known_and_sizes_stay() -> None:
    window = Window.of([[30, 50], [30, 50]], compute=[[np.nan, np.nan], [0.1, np.nan]], noise=100.0, signal=1.0)
    model = JobModel().update(window)
    assert np.isnan(model.step_s(model.sizes)).tolist() == [True, False]
    assert np.isnan(model.step_s(model.sizes, costs="full")).tolist() == [True, False]
    assert model.measured.tolist() == [False, True]
    alpha, beta = model.line
    assert alpha[0].tolist() == [0.0, 0.0]
    assert beta[0].tolist() == [1.0, 1.0]
    best = model.best(Bounds.of(2))
    assert best[0].tolist() == [30.0, 50.0]
    assert best[1].tolist() != [30.0, 50.0]


def test_waste_is_what_the_noise_scale_makes_of_a_batch() -> None:
    model = known([0.0, 0.0], [1e-3, 1e-3], phi=300.0, scales=())
    assert float(model.log_waste(128.0)) == pytest.approx(0.0, abs=1e-12)
    phi = 300.0 * 4**0.2  # it grows with the batch
    assert float(np.exp(model.log_waste(512.0))) == pytest.approx((phi + 512) / (phi + 128))
    both = model.log_waste([128.0, 512.0])
    np.testing.assert_allclose(both, [model.log_waste(128.0), model.log_waste(512.0)])
    np.testing.assert_array_equal(model.log_waste([256.0], unknown="base"), model.log_waste([256.0]))


def test_an_unknown_noise_scale_counts_nothing_or_as_the_base_batch() -> None:
    model = known([0.0, 0.0], [1e-3, 1e-3], phi=np.nan)
    assert model.log_waste([64.0, 512.0]).tolist() == [0.0, 0.0]
    np.testing.assert_allclose(np.exp(model.log_waste([64.0, 512.0, -1.0], unknown="base")), [0.75, 2.5, 0.5])
    assert not model.guided


def test_goodput_is_samples_a_second_over_the_waste_of_all_parts() -> None:
    total, step, waste = np.array([100.0, 0.0]), np.log([0.5, 0.5]), np.log([4.0, 1.0])
    np.testing.assert_allclose(np.exp(log_goodput(total, step, waste)), [50.0, 2e-9])
    model = fitted("clusters")
    sizes = np.stack([model.sizes, np.full((2, 3), 80.0)])
    for costs, unknown in (("tangent", "none"), ("full", "base")):
        whole = model.log_goodput(sizes, costs=costs, unknown=unknown)  # type: ignore[arg-type]
        step = model.log_step(sizes, costs=costs)  # type: ignore[arg-type]
        waste = model.log_waste(sizes.sum(-1), unknown=unknown)  # type: ignore[arg-type]
        np.testing.assert_array_equal(whole, log_goodput(sizes.sum(-1), step, waste))
    window = windows("clusters")[11]
    np.testing.assert_array_equal(model.base, base_total(window))


# ------------------------------------------------------------ the best allocation


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0.0, 0.1), st.floats(5e-4, 8e-3)), min_size=1, max_size=5),
    st.floats(0.005, 0.5),
    st.floats(30.0, 1e4),
    st.integers(0, 2**31),
    st.floats(0.0, 1.0),
)
def test_no_random_allocation_within_bounds_is_better_than_the_best(
    workers: list[tuple[float, float]], exchange: float, phi: float, seed: int, reach: float
) -> None:
    alpha, beta = (np.array(x) for x in zip(*workers, strict=True))
    model, rng = known(alpha, beta, exchange=exchange, phi=phi), np.random.default_rng(seed)
    low, high = rng.integers(0, 20, len(beta)), rng.integers(40, 400, len(beta))
    top = max(int(rng.integers(30, 300) * len(beta)), int(low.sum()), 1)
    bounds = Bounds.of(len(beta), low, high, total_high=min(top, int(high.sum())))
    now = float(model.sizes.sum())
    limit = math.floor(min(float(bounds.total_high), max(now * math.exp(reach), float(bounds.total_low))))
    floor = math.ceil(max(float(bounds.total_low), min(now * math.exp(-reach), float(limit))))
    bounds = dataclasses.replace(bounds, total_low=np.asarray(min(floor, limit)), total_high=np.asarray(limit))
    best = model.best(bounds)
    assert ((best >= low - 1e-9) & (best <= high + 1e-9)).all()
    assert floor - 1e-6 <= best.sum() <= limit + 1e-6
    tried = np.clip(
        best * np.exp(0.7 * rng.normal(size=(400, len(beta)))) + rng.normal(size=(400, len(beta))), low, high
    )
    tried = tried[(tried.sum(-1) <= limit) & (tried.sum(-1) >= floor)]
    if len(tried) and best.sum() >= 1.0:
        assert model.log_goodput(tried).max() <= model.log_goodput(best) + 2e-3


def test_without_a_noise_scale_the_global_batch_stays_and_the_shares_move() -> None:
    model = known([0.0, 0.0], [1e-3, 3e-3], phi=np.nan)
    np.testing.assert_allclose(model.best(Bounds.of(2, 1, 500)), [96.0, 32.0], rtol=0.02)


def test_a_slowest_worker_who_changes_from_step_to_step_makes_all_later() -> None:
    seconds = np.array([0.1, 0.1])
    steady = JobModel().update(Window.of([64, 64], compute=seconds, wait=0.0, communication=0.05, steps=5))
    torn = JobModel().update(Window.of([64, 64], compute=seconds, wait=0.03, communication=0.05, steps=5))
    assert float(steady.stretch) == pytest.approx(1.0)
    assert float(torn.stretch) == pytest.approx(1.3)
    assert float(torn.step_s([64, 64])) == pytest.approx(0.18, rel=1e-3)
    late = JobModel().update(Window.of([64, 64], compute=seconds, wait=0.5, communication=0.05, steps=5))
    assert float(late.stretch) == pytest.approx(2.0)
    assert float(JobModel().update(Window.of([64, 64])).stretch) == 1.0


def test_clusters_with_and_without_a_noise_scale_are_answered_as_if_alone() -> None:
    together, alone = JobModel(), [JobModel(), JobModel()]
    for scale in (1.0, 1.5, 0.7, 1.0):
        sizes = np.full((2, 2), round(64 * scale))
        window = affine(sizes, 0.02, np.array([1e-3, 3e-3]), phi=np.array([400.0, np.nan]))
        together = together.update(window)
        alone = [model.update(of_cluster(window, c)) for c, model in enumerate(alone)]
    bounds = Bounds.of(2, 1, 400)
    np.testing.assert_allclose(together.best(bounds), [model.best(bounds) for model in alone], rtol=1e-9)
    assert together.guided.tolist() == [True, False]

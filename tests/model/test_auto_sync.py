"""Which way workers meet, and how many samples a round then has: by what exchanges and computing take."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.model.auto_sync import AutoSync
from dynamix.model.sync_schedule import Conditions
from dynamix.projection import project
from dynamix.runtime.limits import fixed_at
from dynamix.window import Bounds, Ints, Window

PIECE = 32


class Job:
    """A chooser and what is in force: sizes, and the piece of workers that step apart; its policy keeps the shares."""

    def __init__(self, workers: int = 4, samples: float = math.inf, *, moves: bool = False) -> None:
        self.ways = AutoSync(workers, samples)
        self.base, self.sizes, self.piece = workers * PIECE, np.full(workers, PIECE), 0
        free = Bounds.of(workers, 1, 8 * PIECE)
        self.bounds = free if moves else fixed_at(free, self.base)

    @property
    def apart(self) -> bool:
        return self.piece > 0

    def see(
        self,
        window: Window,
        *,
        total: int | None = None,
        payload: float = 1.0,
        samples: float = 1e6,
    ) -> Job:
        """Take in a window; `total` is what the policy wishes a step to have."""

        def wish(step: Window, bounds: Bounds) -> Ints:
            return project(step.batch_size, bounds, total=total or step.batch_size.sum())

        now = Conditions(self.piece, payload, samples)
        self.sizes, self.piece = self.ways.decide(wish, window, self.bounds, now)
        return self

    def seen(self, exchange_s: float, **known: Any) -> Window:
        return seen(self.sizes, exchange_s, self.base, **known)


def seen(
    sizes: Ints,
    exchange_s: float,
    base: int,
    *,
    speeds: float | list[float] = 1000.0,
    late_s: float = 0.0,
    noise: float = np.nan,
    loss: float = np.nan,
) -> Window:
    compute = np.asarray(sizes) / np.asarray(speeds)
    known = {"compute": compute, "communication": exchange_s, "wait": compute.max() - compute + late_s}
    known |= {"loss": loss, "loss_std": 0.1}
    return Window.of(sizes, **known, base_batch=base, noise=noise, signal=1.0, steps=5.0)


def test_the_network_decides_and_a_little_changes_nothing() -> None:
    job = Job()
    for exchange_s, payload, apart in (
        (1e-4, 1, False),
        (0.03, 1, True),
        (1e-4, 1, True),
        (1, 50, False),
        (1e-4, 1, False),
    ):
        job.see(job.seen(exchange_s), payload=payload)
        assert job.apart == apart == (job.ways.report["meet"] == "parameters")
        assert np.isfinite([job.ways.report["gradients"], job.ways.report["parameters"]]).all()
    job.see(job.seen(0.03))
    assert "promises" in job.ways.why
    assert "30 ms" in job.ways.why


def test_gradients_that_travel_while_workers_compute_are_taken_for_what_they_are() -> None:
    """3 of 30 ms are left over gradients; a meeting hides nothing. What the first one shows is remembered."""
    job = Job()
    assert job.see(job.seen(0.008)).apart
    job.see(job.seen(0.4))
    assert job.ways.hidden_s == pytest.approx(0.392)
    assert not job.apart  # 8 ms a step are less than 400 ms a meeting
    for _ in range(3):
        assert not job.see(job.seen(0.008)).apart
    assert job.see(job.seen(0.5)).apart  # a link has become ten times as slow


def test_a_slow_worker_is_foreseen_at_its_pieces_and_not_at_its_small_share() -> None:
    """All have 20 ms a pass beside 1 ms a sample at speed 1; over gradients the slow one has 8 samples of 128."""
    job, speeds, promised = Job(), np.array([1.0, 1.0, 1.0, 0.3]), []
    for sizes in ([32, 32, 32, 32], [38, 38, 38, 14], [40, 40, 40, 8], [40, 40, 40, 8], [40, 40, 40, 8]):
        shares = np.array(sizes)
        compute = (0.020 + 0.001 * shares) / speeds
        window = Window.of(shares, compute=compute, communication=1e-3, wait=compute.max() - compute)
        job.ways.decide(lambda *_, answer=shares: answer, window, job.bounds, Conditions())
        promised.append(job.ways.parameters)
    assert promised[-1] == pytest.approx(promised[0], rel=0.03)


@pytest.mark.parametrize("trained", [0.0, 1e3, 1e4, 1e5])
def test_a_round_apart_is_a_small_part_of_what_was_trained(trained: float) -> None:
    job = Job()
    job.see(job.seen(0.3), samples=trained)
    if job.piece:
        assert job.sizes.sum() <= max(0.1 * trained, 2 * job.piece * len(job.sizes))


def test_workers_that_stall_now_and_then_need_not_wait_for_each_other_in_every_step() -> None:
    job = Job()
    for _ in range(4):
        job.see(job.seen(1e-4, late_s=0.02))
    assert job.apart


@given(
    speeds=st.lists(st.floats(100, 5000), min_size=2, max_size=6),
    exchange_s=st.floats(0, 10),
    payload=st.floats(0.5, 3),
    moves=st.booleans(),
    data=st.data(),
)
def test_a_round_is_one_step_over_gradients_or_whole_pieces_of_everybody(
    speeds: list[float], exchange_s: float, payload: float, moves: bool, data: st.DataObject
) -> None:
    samples = data.draw(st.integers(len(speeds) * PIECE, 10**5))
    job = Job(len(speeds), samples, moves=moves)
    for _ in range(3):
        noise = data.draw(st.sampled_from([np.nan, 1.0, 1e9]))
        wish = data.draw(st.integers(1, 2 * job.base)) if moves else None
        job.see(job.seen(exchange_s, speeds=speeds, noise=noise), total=wish, payload=payload)
        sizes, piece = job.sizes, job.piece
        if piece:
            assert 2 * len(speeds) * piece <= sizes.sum() <= samples
            assert (sizes % piece == 0).all()
            assert (sizes >= piece).all()
            assert piece <= job.bounds.high.min()
            assert (project(sizes, job.ways.apart_bounds(piece)) == sizes).all()
        else:
            assert (project(sizes, job.bounds) == sizes).all()
        if not moves:
            assert piece in (0, PIECE)


def test_nothing_measured_changes_nothing() -> None:
    job = Job()
    assert job.see(Window.of(job.sizes)).sizes.tolist() == [PIECE] * 4
    job.sizes, job.piece = 8 * job.sizes, PIECE
    assert job.see(Window.of(job.sizes)).sizes.tolist() == [8 * PIECE] * 4
    assert job.piece == PIECE


# ---------------------------------------------------------------- a batch that moves


def test_a_policy_sees_a_round_apart_as_one_of_its_steps() -> None:
    job = Job(2, moves=True)
    job.see(job.seen(0.02))
    rounds = Window.of([4 * PIECE] * 2, compute=[0.4, 0.2], wait=[0.0, 0.2], communication=0.08, steps=2.0, noise=50.0)
    step = job.ways.as_step(rounds, PIECE)
    assert step.batch_size.tolist() == [PIECE] * 2
    assert step.compute == pytest.approx([0.1, 0.05])
    assert step.communication == pytest.approx(0.02)  # what it would be over gradients
    assert (float(step.steps), float(step.noise)) == (8.0, 50.0)
    shares = job.ways.as_step(Window.of([6 * PIECE, 2 * PIECE], compute=[0.6, 0.1], communication=0.08), PIECE)
    assert shares.batch_size.tolist() == [48, 16]
    assert 0.1 < shares.compute[0] < 0.15  # one pass of 48 samples, with its fixed cost once


def test_pieces_follow_the_policys_batch_and_stay_where_it_hardly_moves() -> None:
    job = Job(moves=True)
    for total, piece in ((128, 32), (130, 32), (135, 32), (160, 40), (2000, 256)):
        job.see(job.seen(1.0, noise=1e4), total=total)
        assert job.piece == piece
    assert (job.sizes % 256 == 0).all()


def test_ways_are_compared_by_what_samples_teach() -> None:
    """Larger batches save exchanges as rounds apart do. Where they teach as much, rounds apart are of less use."""
    more = {}
    for noise in (1.0, 1e6):
        job = Job(moves=True)
        job.see(job.seen(0.03, noise=noise))
        more[noise] = job.ways.parameters / job.ways.gradients
    assert 1 < more[1e6] < 0.9 * more[1.0]


def test_gradients_meet_now_and_then_where_the_batch_moves_to_tell_the_noise_scale() -> None:
    job, met = Job(moves=True), []
    for samples in (100_000, 110_000, 125_000, 135_000, 140_000):
        job.see(job.seen(1.0, noise=1e4), samples=samples)
        met.append(job.apart)
    assert met == [True, True, True, False, True]


@pytest.mark.parametrize(("workers", "noise", "apart"), [(4, 1e6, True), (32, 1e6, False), (32, 1.0, True)])
def test_many_workers_step_apart_only_where_their_own_gradients_are_not_much_noisier(
    workers: int, noise: float, apart: bool
) -> None:
    """A rate for the gradient of all would be too high for one worker's."""
    job = Job(workers, moves=True)
    assert job.see(job.seen(0.06, noise=noise)).apart is apart
    assert Job(32).see(Job(32).seen(0.06)).apart is False  # a noise scale that is unknown may be large


@pytest.mark.parametrize("given", [True, False])
def test_where_the_loss_rises_apart_gradients_meet_and_rounds_apart_must_promise_twice_as_much(given: bool) -> None:
    """A rate that all workers' gradients bear may be too high for one's own. A loss that is not given says nothing."""
    job, lost = Job(), 1.0 if given else np.nan
    assert job.see(job.seen(0.03, loss=2 * lost)).apart
    assert job.see(job.seen(0.03, loss=2.1 * lost)).apart  # a rise, not a clear one
    assert job.see(job.seen(0.03, loss=2.6 * lost)).apart is not given
    assert ("the loss rose" in job.ways.why) is given
    assert job.see(job.seen(0.03, loss=2 * lost)).apart is not given  # 30 ms promise less than twice as much
    assert job.see(job.seen(0.3, loss=2 * lost)).apart


def test_rounds_that_take_longer_than_shares_of_now_would_promise_less() -> None:
    """Speeds change while a round is under way: it was cut for what was."""
    steady, moving = Job(), Job()
    for number in range(6):
        for job, speeds in ((steady, [1000.0, 1000, 1000, 1000]), (moving, [1000.0, 1000, 1000, 1000])):
            if job is moving:
                speeds[number % 4] = 300.0
            job.see(job.seen(0.03, speeds=speeds))
    assert steady.ways.lags == pytest.approx([1, 1])
    assert moving.ways.parameters < 0.7 * steady.ways.parameters  # though the speeds' sum is 0.8 of the other

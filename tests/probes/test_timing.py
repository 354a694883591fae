"""Where a step's time goes, by marks alone."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from dynamix.probes.timing import StepTimer, StepTimes, attribute_wait

CPU = torch.device("cpu")


class ManualClock:
    """A device whose work advances by hand: `now` orders the marks, `reached` is how far the device has got."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = math.inf

    def mark(self) -> float:
        return self.now

    def passed(self, *marks: float) -> bool:
        return max(marks) <= self.reached

    def seconds(self, start: float, end: float) -> float:
        assert max(start, end) <= self.reached, "read before the device got there"
        return end - start

    def recycle(self, *marks: float) -> None:
        """Numbers need no pool."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timer(clock: ManualClock) -> StepTimer:
    return StepTimer(CPU, clock=clock)


def play(timer: StepTimer, clock: ManualClock, script: str, at: float = 0.0) -> None:
    """Calls by letter, one second apart: F forward, G gradients, R reduced, I interrupted, M micro, S step; '.'
    waits."""
    calls = {"F": timer.forward_started, "G": timer.gradients_ready, "R": timer.reduced, "I": timer.interrupted}
    calls |= {"M": timer.micro_done, "S": timer.step_done, ".": lambda: None}
    for letter in script:
        clock.now += 1.0
        calls[letter]()


def times(step: StepTimes) -> list[float]:
    return [step.compute, step.comm, step.data, step.total]


def same(a: list[float], b: list[float]) -> bool:
    return bool(np.array_equal(a, b, equal_nan=True))


NAN = math.nan
# Calls, and (compute, comm, data, total) of the last steps.
SCRIPTS = {
    # forward at 3 s after the end before; last gradient 4 s later, last reduction 3 s after it, update 3 s
    "usual": ("S..F.G.GR.R..S", [[4.0 + 3.0, 3.0, 3.0, 13.0]]),
    "the first step has nothing before it": ("FGRS", [[2.0, 1.0, NAN, NAN]]),
    "without a hook comm is unknown": ("SF.S", [[2.0, NAN, 1.0, 3.0]]),
    "a reduction that was over before the last gradient costs nothing": ("SFGRG.S", [[5.0, 0.0, 1.0, 6.0]]),
    "accumulation sums micro-steps, those without reduction too": ("SF..M.FG.RS", [[3.0 + 2.0, 2.0, 1.0 + 2.0, 10.0]]),
    "accumulation with reduction in every micro-step": ("SFGRMFG.RS", [[2.0 + 2.0, 1.0 + 2.0, 1.0 + 1.0, 9.0]]),
    "only the first forward of a step counts": ("SFFGRS", [[3.0, 1.0, 1.0, 5.0]]),
    "several updates of a batch": ("SFGRFG..RS", [[2.0 + 2.0, 1.0 + 3.0, 1.0, 9.0]]),
    "evaluation between steps is not waiting for data": (
        "SI......FGRSFGRS",
        [[2.0, 1.0, NAN, NAN], [2.0, 1.0, 1.0, 4.0]],
    ),
    "evaluation before the end of a step is not computing": ("SFGRI...S", [[NAN, 1.0, 1.0, NAN]]),
    "a step without any mark is unknown": ("SSFGS", [[NAN, NAN, NAN, 1.0], [NAN, NAN, 1.0, 3.0]]),
}


class TestStepTimer:
    @pytest.mark.parametrize(("script", "expected"), SCRIPTS.values(), ids=SCRIPTS)
    def test_a_step_is_compute_comm_and_data(
        self, timer: StepTimer, clock: ManualClock, script: str, expected: list[list[float]]
    ) -> None:
        play(timer, clock, script)
        steps = timer.take()
        assert [step.step for step in steps] == list(range(len(steps)))
        for step, wanted in zip(steps[-len(expected) :], expected, strict=True):
            assert same(times(step), wanted)

    def test_an_exchange_of_buffers_is_communication(self, timer: StepTimer, clock: ManualClock) -> None:
        for script in ("G.RS", "MF..GRS"):  # also under no_sync, in which case nothing is reduced
            play(timer, clock, "F")
            with timer.exchanging():
                clock.now += 3.0
            play(timer, clock, script)
        first, second = timer.take()
        assert [first.compute, first.comm] == [2.0, 2.0 + 3.0]
        assert times(second) == [1.0 + 4.0, 3.0 + 1.0, 1.0 + 1.0, 11.0]
        with timer.exchanging():  # an evaluation's, say
            clock.now += 5.0
        play(timer, clock, "FGRS")
        assert times(timer.take()[0]) == [2.0, 1.0, 6.0, 9.0]

    def test_records_come_once_in_order_and_only_when_the_device_is_there(
        self, timer: StepTimer, clock: ManualClock
    ) -> None:
        clock.reached = 5.0
        play(timer, clock, "FGRSFGRSFGRS")
        assert [s.step for s in timer.take()] == [0]
        assert timer.take() == []
        clock.reached = 8.0
        assert [s.step for s in timer.take()] == [1]
        clock.reached = 99.0
        assert [s.step for s in timer.take()] == [2]

    def test_a_late_reduction_on_another_stream_holds_its_record_back(
        self, timer: StepTimer, clock: ManualClock
    ) -> None:
        clock.reached = 4.0
        play(timer, clock, "FG")
        clock.now = 50.0
        timer.reduced()
        clock.now = 3.0
        timer.reduced()
        timer.step_done()
        assert timer.take() == []
        clock.reached = 50.0
        assert timer.take()[0].comm == 48.0


class TestAttributeWait:
    def test_recovers_true_waits_when_the_straggler_changes(self) -> None:
        rng = np.random.default_rng(0)
        arrival = rng.gamma(2.0, [4e-3, 2e-3, 3e-3, 3e-3], size=(20, 4))
        truth = (arrival.max(1, keepdims=True) - arrival).mean(0)
        comm = arrival.max(1, keepdims=True) - arrival + 0.005 + rng.exponential(2e-4, size=(20, 1))
        wait, transfer = attribute_wait(comm)
        np.testing.assert_allclose(wait, truth, atol=1e-12)
        assert transfer == pytest.approx(np.full(4, 0.0052), abs=2e-4)
        # Differences of window means are what one would be tempted to gather instead: wrong by as much as the waits.
        assert np.abs(comm.mean(0) - comm.mean(0).min() - truth).min() > 0.002

    def test_missing_values_are_left_out(self) -> None:
        nan = math.nan
        wait, transfer = attribute_wait([[1.0, 3.0, nan], [nan, nan, 9.0], [2.0, 1.0, nan]])
        # The middle step has one witness, so nobody can tell its waiting from its transfer.
        assert same(wait.tolist(), [0.5, 1.0, nan])
        assert transfer.tolist() == [1.0, 1.0, 1.0]

    def test_a_single_worker_never_waits(self) -> None:
        wait, transfer = attribute_wait([[0.2], [0.4]])
        assert wait.tolist() == [0.0]
        assert transfer.tolist() == pytest.approx([0.3])


@pytest.mark.gpu
def test_cuda_events_are_read_only_when_complete() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    timer = StepTimer(device)
    a = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(3):
        timer.forward_started()
        for _ in range(50):
            a = a @ a
            a = a / a.norm()
        timer.gradients_ready()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            (a @ a).sum()
            timer.reduced()
        torch.cuda.current_stream().wait_stream(side)
        timer.step_done()
        timer.take()
    enqueued = time.perf_counter() - started
    torch.cuda.synchronize()
    steps = timer.take()
    assert [s.step for s in steps][-1] == 2
    for step in steps[1:]:
        assert step.compute > 0
        assert step.comm > 0
        assert step.data >= 0
    assert sum(s.compute for s in steps) > enqueued or enqueued < 1.0

"""What ranks do for each other, over every wire: threads of one process, and gloo between processes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from dynamix.errors import StateError
from dynamix.policies.stigmergic.policy import StigmergicPolicy
from tests.runtime.ranks.wires import Case, over_gloo, over_threads
from tests.runtime.thread_job import ThreadJob
from tests.union import Script

WORKERS = 3
SAMPLES = 400
CASES: dict[str, Case] = {}
Told = Callable[[str], list[Any]]


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def of_gloo() -> Told:
    return over_gloo(CASES, WORKERS).__getitem__


@pytest.fixture(params=["threads", pytest.param("gloo", marks=pytest.mark.multiproc)])
def told(request: pytest.FixtureRequest) -> Told:
    """By a case's name, what it came to on each rank."""
    if request.param == "gloo":
        return request.getfixturevalue("of_gloo")
    return lambda name: over_threads(CASES[name], WORKERS)


# ---------------------------------------------------------------- messages


@case
def objects(ranks: Any) -> Any:
    return [ranks.gather({"rank": ranks.rank, "text": "x" * length * ranks.rank}, "objects") for length in (1, 3)]


def test_objects_come_in_the_order_of_ranks(told: Told) -> None:
    for every in told("objects"):
        for length, objects in zip((1, 3), every, strict=True):
            assert objects == [{"rank": r, "text": "x" * length * r} for r in range(WORKERS)]


# ---------------------------------------------------------------- what is compared


@case
def facts_that_are_near(ranks: Any) -> Any:
    ranks.compare({"lr": 0.1 * (1 + 1e-12 * ranks.rank)}, {"lr": 1e-9})
    ranks.compare({"lr": 0.1 * (1 + ranks.rank)}, {"lr": 1e-9})


def test_numbers_that_are_near_count_as_alike(told: Told) -> None:
    for words in told("facts_that_are_near"):
        assert words.startswith("UsageError: The ranks no longer agree during training: lr is 0.1 on rank 0, 0.2 ")


@case
def unlike_words(ranks: Any) -> Any:
    ranks.wait_for_all("a step")
    ranks.wait_for_all("a save" if ranks.rank else "an evaluation")


@case
def one_waits_where_others_decide(ranks: Any) -> Any:
    row, answer = torch.zeros(3), torch.zeros(4)
    if ranks.rank == 2:
        ranks.wait_for_all("a save")
    elif ranks.rank == 0:
        ranks.wait(ranks.group.collect(row, torch.zeros(WORKERS, 3)))
    else:
        ranks.wait(ranks.group.send(row, answer))


@pytest.mark.parametrize("name", ["unlike_words", "one_waits_where_others_decide"])
def test_ranks_that_wait_for_unlike_things_all_end(told: Told, name: str) -> None:
    for words in told(name):
        assert words.startswith("UsageError: ")
        assert "make such a call on every rank" in words


# ---------------------------------------------------------------- errors


@case
def one_ends_the_job(ranks: Any) -> Any:
    if ranks.rank == 1:
        raise ranks.end(StateError("no such state"))
    ranks.gather(0, "a gather that never ends")


def test_an_error_of_one_rank_ends_all_with_its_words(told: Told) -> None:
    for rank, words in enumerate(told("one_ends_the_job")):
        assert words == f"StateError: {'' if rank == 1 else 'rank 1 ended the job: '}no such state"


@case
def one_leaves(ranks: Any) -> Any:
    ranks.gather(0, "a gather of all")
    if ranks.rank == 2:
        raise ValueError("a bug in the loop")
    try:
        ranks.gather(0, "a gather that never ends")
    finally:
        assert ranks.lost is not None
        assert ranks.lost.ranks == (2,)


def test_a_rank_that_leaves_is_named_and_nobody_hangs(told: Told) -> None:
    for words in told("one_leaves")[:2]:
        assert words.startswith("WorkerLostError: not all ranks came to a gather that never ends: rank 2")
        assert "ValueError: a bug in the loop" in words


@case
def one_cannot_set_up(ranks: Any) -> Any:
    with ranks.setting_up():
        if ranks.rank == 1:
            raise StateError("this is no state of a controller")
    ranks.agree({})


def test_an_error_before_training_ends_those_that_wait(told: Told) -> None:
    for rank, words in enumerate(told("one_cannot_set_up")):
        assert words == f"StateError: {'' if rank == 1 else 'rank 1 ended the job: '}this is no state of a controller"


@case
def one_deals_with_it(ranks: Any) -> Any:
    if ranks.rank == 1:
        with pytest.raises(StateError), ranks.setting_up():
            raise StateError("this is no state of a controller")
    ranks.agree({})
    return ranks.gather(ranks.rank, "a gather of all")


def test_an_error_that_a_rank_has_dealt_with_ends_nobody(told: Told) -> None:
    assert told("one_deals_with_it") == [list(range(WORKERS))] * WORKERS


# ---------------------------------------------------------------- stopping


@case
def one_wants_to_stop(ranks: Any) -> Any:
    for step in range(1, 100_000):
        if step == 3 and ranks.rank == 1:
            ranks.request_stop()
        ranks.wait(ranks.group.all_sum(torch.ones(1), torch.zeros(1)))
        if ranks.stop_after(step):
            return step
    return None


def test_all_stop_after_the_same_step(told: Told) -> None:
    steps = told("one_wants_to_stop")
    assert len(set(steps)) == 1
    assert steps[0] >= 3


# ---------------------------------------------------------------- decisions

SPEEDS = np.array([1000.0, 500.0, 250.0])
POLICIES = {"lb_bsp": "fixed", "dbs": "fixed", "goodput": "adaptive", "dynamix": "adaptive", "stigmergic": "adaptive"}


def decisions(ranks: Any, policy: str) -> Any:
    job = ThreadJob(ranks, policy, global_batch=POLICIES[policy], speeds=SPEEDS).train(2)
    return job.plans, job.seen


CASES |= {f"decisions of {policy}": partial(decisions, policy=policy) for policy in POLICIES}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_allocation_at_the_same_round_and_every_sample_once(told: Told, policy: str) -> None:
    ranks = told(f"decisions of {policy}")
    plans = ranks[0][0]
    assert all(of_rank == plans for of_rank, _ in ranks)
    assert len({shares for *_, shares in plans}) > 1 + (POLICIES[policy] == "adaptive")
    assert plans[-2][2][0] > plans[-2][2][2]  # who is faster has more
    assert Counter(index for _, seen in ranks for index in seen) == Counter([*range(SAMPLES)] * 2)


@pytest.mark.multiproc
@pytest.mark.parametrize("policy", POLICIES)
def test_threads_decide_what_processes_decide(of_gloo: Told, policy: str) -> None:
    name = f"decisions of {policy}"
    assert over_threads(CASES[name], WORKERS) == of_gloo(name)


class Slow(Script):
    """It answers the first window once it may, which is long after it was asked."""

    def __init__(self) -> None:
        super().__init__([[8, 4, 2]])
        self.may = threading.Event()

    def decide(self, window: Any, bounds: Any) -> Any:
        assert self.may.wait(60)
        return super().decide(window, bounds)


@case
def late(ranks: Any) -> Any:
    policy = Slow()
    job = ThreadJob(ranks, policy, patience_s=0.0)
    for plan in job.rounds(2):
        if plan.index == 20:
            policy.may.set()
            assert job.job.windows.channel.drain(60)
            job.job.windows.channel.patience_s = 60.0
    job.close()
    return [shares for *_, shares in job.plans]


def test_a_late_policy_keeps_the_allocation_and_training_goes_on(told: Told) -> None:
    ranks = told("late")
    assert all(shares == ranks[0] for shares in ranks)
    assert set(ranks[0][:21]) == {(4, 4, 4)}
    assert (8, 4, 2) in ranks[0]


class Failing(Script):
    def decide(self, window: Any, bounds: Any) -> Any:
        if self.asked == 2:
            raise ZeroDivisionError("a bug in the policy")
        return super().decide(window, bounds)


@case
def failing_policy(ranks: Any) -> Any:
    ThreadJob(ranks, Failing([[4, 4, 5], [5, 4, 4]])).train()


def test_a_failing_policy_ends_every_rank_with_its_error(told: Told) -> None:
    first, *others = told("failing_policy")
    assert "a bug in the policy" in first
    assert others == ["DynamixError: the policy failed on rank 0; its own error is in that rank's output"] * 2


class FailsOnOne(StigmergicPolicy):
    rank = 0

    def choose(self, *args: Any, **known: Any) -> Any:
        return super().choose(*args, **known) if self.rank != 1 else {}[0]


@case
def failing_rule(ranks: Any) -> Any:
    policy = FailsOnOne()
    policy.rank = ranks.rank
    ThreadJob(ranks, policy).train()


def test_a_rule_that_fails_on_one_rank_ends_all_with_its_error(told: Told) -> None:
    first, own, last = told("failing_rule")
    assert "KeyError" in own
    assert first == last == (
        "DynamixError: choosing a size failed on rank 1; its own error is in that rank's output"
    )  # fmt: skip


@case
def another_seed_on_one(ranks: Any) -> Any:
    ThreadJob(ranks, sampling={"seed": 7 * (ranks.rank == 2)}).train()


def test_no_round_is_done_where_samplers_differ(told: Told) -> None:
    for words in told("another_seed_on_one"):
        assert words.startswith("UsageError: The ranks do not begin training with the same settings: ")
        assert "seed is 0 on ranks 0-1, 7 on rank 2. Write controller.batch_sampler" in words


# ---------------------------------------------------------------- states


def saved_after(ranks: Any, rounds: int, policy: Any) -> tuple[list[int], Any]:
    """Samples that this rank saw in so many rounds, and the state of all after them."""
    job = ThreadJob(ranks, policy, speeds=SPEEDS)
    for plan in job.rounds():
        if plan.index + 1 == rounds:
            state = job.job.state_dict(gather=True)
            job.close()
            return job.seen, state
    raise AssertionError("the epoch is shorter")


def gone_on(ranks: Any, state: Any, policy: Any) -> ThreadJob:
    speeds = np.linspace(1000.0, 300.0, ranks.workers)
    return ThreadJob(ranks, policy, batch_size=12 // ranks.workers, speeds=speeds, state=state).train()


@pytest.mark.parametrize("workers", [2, 12])
def test_a_job_goes_on_with_fewer_or_more_ranks_with_every_sample_once(workers: int) -> None:
    saved = over_threads(partial(saved_after, rounds=9, policy=Script([[6, 1, 2], [2, 5, 1]])), WORKERS)
    script = Script([[12 // workers] * workers, [*range(1, workers + 1)]])
    after = over_threads(partial(gone_on, state=saved[0][1], policy=script), workers)
    assert Counter(index for seen, _ in saved for index in seen) + Counter(
        index for job in after for index in job.seen
    ) == Counter(range(SAMPLES))
    assert all(job.plans == after[0].plans for job in after)
    assert len({shares for *_, shares in after[0].plans}) > 1  # it goes on deciding


# ---------------------------------------------------------------- many ranks

MANY = 1024


@pytest.mark.timeout(120)
def test_1024_ranks_put_a_decision_in_force_at_the_same_round() -> None:
    def train(ranks: Any) -> Any:
        speeds = np.linspace(500.0, 1000.0, MANY)
        return (
            ThreadJob(ranks, "lb_bsp", samples=40_000, batch_size=8, global_batch="fixed", speeds=speeds).train().plans
        )

    plans = over_threads(train, MANY)
    assert all(of_rank == plans[0] for of_rank in plans)
    shares = [shares for *_, shares in plans[0]]
    assert shares[0] == (8,) * MANY
    assert shares[-2][0] < 8 < shares[-2][-1]  # who is slower has less; the last round has what is left


def test_many_ranks_stop_after_the_same_round_before_the_epoch_ends() -> None:
    def train(ranks: Any) -> Any:
        job = ThreadJob(ranks, samples=5000 * 16 * 4)
        for plan in job.rounds():
            if plan.index == 3 and ranks.rank == 7:
                ranks.request_stop()
            if ranks.stop_after(job.job.progress.steps):
                break
        return job.close().plans

    plans = over_threads(train, 16)
    assert all(of_rank == plans[0] for of_rank in plans)
    assert 5 <= len(plans[0]) < 5000


@pytest.mark.timeout(120)
def test_1024_ranks_end_where_one_leaves() -> None:
    def wait(ranks: Any) -> None:
        if ranks.rank == 1000:
            raise ValueError("a bug in the loop")
        ranks.gather(0, "a gather that never ends")

    said = over_threads(wait, MANY)
    assert said.count("ValueError: a bug in the loop") == 1
    assert sum("has ended (ValueError: a bug in the loop)" in words for words in said) == MANY - 1

"""Gossiped traces: laws of joining, what they say, simulated rounds, and workers that are killed and cut off."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.errors import ConfigError, StateError
from dynamix_lab.suites.gossip import pages
from dynamix_lab.suites.gossip.ledger import weights
from dynamix_lab.suites.gossip.live import GossipPlace, play_live
from dynamix_lab.suites.gossip.rules import Fixed, Gossiped, Oracle, Riding, Tracker
from dynamix_lab.suites.gossip.simulate import NEEDED, STEPS, Play
from dynamix_lab.suites.gossip.sketches import MarkArrays, Pairs, ways_to_sum
from dynamix_lab.suites.gossip.suite import GossipPlan, compared, concluded
from dynamix_lab.suites.gossip.traces import End, GossipedTraces, later, priority
from dynamix_lab.suites.gossip.world import made_world

# Few marks and rounds, so that some are always left out; values repeat, so that ties come up.
LEFT = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 5), st.sampled_from([1.0, 2.0, 0.1]), st.sampled_from([0.5, 3.0])),
    max_size=12,
)


def holding(left: list[tuple[int, int, float, float]]) -> GossipedTraces:
    traces = GossipedTraces(size=3, memory=3)
    for worker, number, speed, meeting_s in left:
        traces.leave(worker, number, speed=speed, meeting_s=meeting_s)
    return traces


def joined(*parts: GossipedTraces) -> dict[int, tuple[tuple[int, float, float], ...]]:
    """What somebody holds who hears of all of them, in this order."""
    listener = GossipedTraces(size=3, memory=3)
    for part in parts:
        listener.join(part.message(rounds=3))
    return listener.marks


@given(LEFT, LEFT, LEFT)
def test_traces_join_in_any_order_and_any_number_of_times(a: list, b: list, c: list) -> None:  # type: ignore[type-arg]
    parts = [holding(left) for left in (a, b, c)]
    ways = [joined(*order) for order in itertools.permutations(parts)]
    ways.append(joined(*parts, *parts, parts[0]))  # copies of messages
    nested = GossipedTraces(size=3, memory=3)
    nested.marks = joined(parts[1], parts[2])
    ways.append(joined(parts[0], nested))  # what another has joined before
    assert all(way == ways[0] for way in ways)


ENDS = st.tuples(st.integers(0, 4), st.sampled_from([1.0, 2.5, 7.0, math.inf]))


@given(ENDS, ENDS, ENDS)
def test_announced_ends_join_in_any_order(a: End, b: End, c: End) -> None:
    assert later(a, b) == later(b, a)
    assert later(a, later(b, c)) == later(later(a, b), c)
    assert later(a, a) == a


@given(st.binary(max_size=80))
def test_damaged_messages_are_refused_or_taken_whole(message: bytes) -> None:
    traces = GossipedTraces()
    try:
        traces.join(message)
    except StateError:
        assert not traces.marks


def test_few_workers_are_summed_exactly_and_many_by_a_uniform_sample() -> None:
    speeds = 1.0 + np.arange(1000) % 7
    few, many = GossipedTraces(), GossipedTraces()
    for worker, speed in enumerate(speeds):
        if worker < 20:
            few.leave(worker, 4, speed=float(speed), meeting_s=2.0)
        many.leave(worker, 4, speed=float(speed), meeting_s=2.0)
    exact, sampled = few.crowd(5), many.crowd(5)
    assert exact is not None
    assert sampled is not None
    assert (exact.workers, exact.meeting_s) == (20.0, 2.0)
    assert exact.speed == pytest.approx(speeds[:20].mean())
    assert sampled.speed == pytest.approx(speeds.mean(), rel=3 * 0.5 / math.sqrt(32))
    assert sampled.workers == pytest.approx(1000, rel=3 / math.sqrt(31))


def test_old_rounds_count_less_and_the_round_under_way_not_at_all() -> None:
    traces = GossipedTraces(kept=0.25)
    for number, speed in ((1, 100.0), (2, 200.0), (3, 900.0)):
        traces.leave(0, number, speed=speed, meeting_s=1.0)
    crowd = traces.crowd(3)
    assert crowd is not None
    assert crowd.speed == pytest.approx((0.25 * 100 + 200) / 1.25)
    assert traces.crowd(1) is None


def test_arrays_of_marks_hold_what_traces_of_single_workers_hold() -> None:
    rng = np.random.default_rng(3)
    arrays, single = MarkArrays(rng, 40, 3), [GossipedTraces(size=3) for _ in range(40)]
    arrays.rank = np.argsort(np.argsort([priority(worker, 1) for worker in range(40)])).astype(np.uint32)
    arrays.owner = np.argsort(arrays.rank)
    values = rng.uniform(1, 2, (40, 2)).astype(np.float32).astype(np.float64)
    arrays.leave(np.arange(40), values)
    for worker in range(40):
        single[worker].leave(worker, 1, speed=values[worker, 0], meeting_s=values[worker, 1])
    for _ in range(6):
        order = rng.permutation(40)
        arrives = rng.random((2, 20)) < 0.8
        pairs = Pairs(order[:20], order[20:], arrives[0], arrives[0] & arrives[1])
        arrays.talk(pairs)
        for one, two, heard, answered in zip(pairs.asking, pairs.asked, pairs.heard, pairs.answered, strict=True):
            told = single[one].message()
            if answered:  # before it joins: an answer holds what both know, or less
                single[one].join(single[two].message())
            if heard:
                single[two].join(told)
    count, sums = arrays.sums(np.arange(40))
    for worker in range(40):
        crowd = single[worker].crowd(2)
        assert crowd is not None
        assert sums[worker] / count[worker] == pytest.approx([crowd.speed, crowd.meeting_s])


def test_marks_agree_where_push_sum_drifts() -> None:
    found = ways_to_sum(64, 0, exchanges=16, names=("marks", "push-sum", "table"))
    assert found["marks"]["apart"][-1] < 1e-6
    assert found["table"]["error"][-1] < 1e-6
    assert found["push-sum"]["error"][-1] > 0.005


@given(st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=6))
def test_models_weigh_what_not_all_have_trained_and_it_counts_once(rows: list[list[int]]) -> None:
    ledgers = np.array(rows)
    found = weights(ledgers)
    assert found.sum() == pytest.approx(1.0)
    assert (found >= 0).all()
    new = ledgers.max(0) - ledgers.min(0)
    if new.sum():
        # Who holds alone what it has beyond all others weighs at least by that.
        second = np.sort(ledgers, axis=0)[-2:].min(0)
        alone = np.maximum(ledgers - second, 0).sum(1)
        assert (found >= alone / new.sum() - 1e-9).all()


def test_what_many_steps_apart_teach_is_what_the_recorded_result_says() -> None:
    path = next(iter(sorted(Path("results").glob("how-often-*"))))
    rows = json.loads((path / "result.json").read_text())["rows"]
    by_job: dict[tuple[str, float], dict[str, float]] = {}
    for row in rows:
        if row["row"] in map(str, STEPS) and row["job"] != "unlike data":
            by_job.setdefault((row["job"], row["spread"]), {})[row["row"]] = float(np.log(row["samples"]).mean())
    jobs = [[job[str(steps)] for steps in STEPS] for job in by_job.values()]
    over = np.exp(np.mean(np.array(jobs) - np.array(jobs)[:, :1], axis=0))
    assert over == pytest.approx(NEEDED, abs=0.002)


@pytest.mark.parametrize("place", ["churn", "partition", "slow network", "groups"])
def test_simulated_workers_agree_and_come_near_a_rank_that_knows_all(place: str) -> None:
    world, size = made_world(place, 64, 5), 16 if place == "groups" else None
    traces = Gossiped(world, np.random.default_rng(1))
    gossiped = Play(world, traces, np.random.default_rng(2), gossips=True, size=size).run()
    oracle = Play(world, Oracle(), np.random.default_rng(2), size=size).run()
    assert gossiped["pace"] > 0.95 * oracle["pace"]
    assert gossiped["apart"] < 0.03
    if place == "partition":
        assert gossiped["settled"] is not None
        assert gossiped["settled"] <= 4


def test_sums_that_ride_on_meetings_of_groups_leave_groups_apart() -> None:
    world = made_world("groups", 64, 5)
    riding = Play(world, Riding(world), np.random.default_rng(2), size=16).run()
    gossiped = Play(
        world, Gossiped(world, np.random.default_rng(1)), np.random.default_rng(2), gossips=True, size=16
    ).run()
    assert riding["apart"] > 3 * gossiped["apart"]
    assert riding["pace"] < gossiped["pace"]


def test_halves_that_meet_again_lose_nothing_but_under_a_tracker_that_drops_who_is_behind() -> None:
    world = made_world("partition", 8, 0)
    kept = Play(world, Fixed(8.0), np.random.default_rng(2)).run()
    assert kept["useful"] > 0.6
    tracker = Tracker(8.0, world)
    play = Play(world, tracker, np.random.default_rng(2))
    play.run()
    assert all(meeting.pieces >= 0 or meeting.met == 0 for meeting in play.meetings)


def test_the_best_settings_are_chosen_and_the_tables_say_so() -> None:
    cell = {"kind": "simulated", "place": "churn", "workers": 8, "rows": compared("churn", 8, [0])}
    result = concluded([cell])
    markdown = pages.markdown(result)
    best = max((row for row in cell["rows"] if row.startswith("deadline")), key=lambda r: cell["rows"][r][0]["pace"])
    assert result["simulated"][0]["settings"]["deadline"] == best
    assert "| churn | 8 |" in markdown
    assert "all, one setting" in markdown


def test_impossible_plans_are_named() -> None:
    with pytest.raises(ConfigError, match="sums"):
        GossipPlan(only=("guesses",)).check()
    with pytest.raises(ConfigError, match="steady"):
        GossipPlan(places=("nowhere",)).check()


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.multiproc
def test_live_workers_outlive_a_kill_and_a_cut_and_meet_again(tmp_path: Path) -> None:
    place = GossipPlace(
        speeds=(1.0, 0.7, 0.5, 0.4),
        seconds=5.0,
        rate=50.0,
        kills=((1.0, 3),),
        cut=(1.8, 3.0),
        changes=(),
        slow=(9.0, 9.5),
    )
    found = play_live(place, "gossip", 0.0, tmp_path / "run", seed=1)
    assert found["codes"][:3] == [0, 0, 0]
    assert found["ended"] == 3
    assert found["whole"] is not None
    assert found["useful"] > 0.4
    losses = [loss for _, loss in found["losses"]]
    assert losses[-1] < losses[0]

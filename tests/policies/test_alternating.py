"""Policies that take turns: each sees its own windows, goes on from its own sizes, and what is counted has no bias."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix.policies import make_policy
from dynamix.policies.alternating import LEARNING, TURN, Alternating, by_names
from dynamix.policies.static import Static
from dynamix.policies.wrappers import own_part, report_of
from dynamix.window import Bounds, Ints, Window
from tests.refused import refused

BOUNDS = Bounds.of(2, 1, 63, total_low=64, total_high=64)
SECONDS = np.array([0.001, 0.003])  # a sample


class Drifting:
    """Gives worker 0 one sample more whenever it is asked, and remembers what it was shown."""

    def __init__(self, first: int) -> None:
        self.next, self.saw = first, list[list[int]]()

    def decide(self, window: Window, bounds: Bounds) -> Ints:
        self.saw.append(window.batch_size.tolist())
        self.next += 1
        return np.array([self.next, 64 - self.next])

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def window_of(sizes: Any, seconds: Any = SECONDS) -> Window:
    compute = np.asarray(sizes) * seconds
    return Window.of(sizes, compute=compute, wait=compute.max() - compute, communication=0.01, steps=5)


def played(turns: Alternating, windows: int, sizes: Any = (32, 32)) -> list[dict[str, Any]]:
    """What is told of so many windows, each with the sizes that were asked for before it."""
    told = []
    for _ in range(windows):
        now, sizes = sizes, turns.decide(window_of(sizes), BOUNDS)
        told.append({"sizes": list(now), **report_of(turns)["compare"]})
    return told


def test_each_policy_sees_its_own_windows_and_goes_on_from_its_own_sizes() -> None:
    first, second = Drifting(5), Drifting(40)
    played(Alternating({"first": first, "second": second}), 40)
    for policy, begins in ((first, 5), (second, 40)):
        assert policy.saw == [[32, 32], *([begins + n, 64 - begins - n] for n in range(1, len(policy.saw)))]
        assert len(policy.saw) == 20


def test_a_block_has_a_turn_of_each_in_an_order_that_changes_and_counts_later_windows_only() -> None:
    told = played(by_names("static,lb_bsp,goodput"), 3 * TURN * 12)
    blocks = [told[at : at + 3 * TURN] for at in range(0, len(told), 3 * TURN)]
    orders = set()
    for number, block in enumerate(blocks):
        assert {window["block"] for window in block} == {number}
        order = [window["turn"] for window in block]
        assert order[::TURN] == order[1::TURN]
        assert Counter(order) == dict.fromkeys(("static", "lb_bsp", "goodput"), TURN)
        assert [window["counts"] for window in block] == [
            number >= LEARNING and n % TURN > 0 for n in range(len(block))
        ]
        orders.add(tuple(order))
    assert len(orders) > 3
    assert {tuple(window["sizes"]) for window in told if window["turn"] == "static"} == {(32, 32)}
    assert told[-1]["of"] == ["static", "lb_bsp", "goodput"]


def test_static_has_even_sizes_whatever_a_loaded_job_brings() -> None:
    turns = by_names("static,lb_bsp")
    sizes = turns.decide(window_of([60, 4]), BOUNDS)
    assert sizes.tolist() == [32, 32]
    assert report_of(turns) == {}  # nobody's window
    assert {tuple(w["sizes"]) for w in played(turns, 20, sizes) if w["turn"] == "static"} == {(32, 32)}


def test_a_window_whose_sizes_were_not_asked_for_is_nobodys() -> None:
    turns, shown = Alternating({"first": (first := Drifting(5)), "second": Drifting(40)}), 0
    sizes = turns.decide(window_of([32, 32]), BOUNDS)
    for _ in range(3):  # the answer is late
        shown = len(first.saw)
        again = turns.decide(window_of([32, 32]) if sizes.tolist() != [32, 32] else window_of([33, 31]), BOUNDS)
        assert again.tolist() == sizes.tolist()
        assert report_of(turns) == {}
        assert len(first.saw) == shown
    turns.decide(window_of(sizes), BOUNDS)
    assert report_of(turns)["compare"]["block"] == 0
    assert report_of(turns, asked=False) == {}


def test_a_policy_goes_on_with_its_part_of_a_comparison_and_a_comparison_with_its_own_only() -> None:
    turns = by_names("static,lb_bsp,goodput")
    played(turns, 30)
    state = turns.state_dict()
    assert own_part(make_policy("lb_bsp"), state) == state["compared"]["lb_bsp"]
    assert own_part(make_policy("goodput"), state) == state["compared"]["goodput"]
    assert own_part(make_policy("stigmergic"), state) is None
    assert own_part(by_names("static,lb_bsp,goodput"), state) is state
    assert own_part(by_names("static,lb_bsp"), state) is None
    lone = make_policy("lb_bsp").state_dict()
    assert own_part(turns, lone) is None
    assert own_part(Static(anew=True), lone) is None
    assert own_part(Static(anew=True), state) is None


def test_names_stand_for_policies_and_one_may_come_twice() -> None:
    turns = make_policy("compare:static, lb_bsp,static,dynamix")
    assert isinstance(turns, Alternating)
    assert list(turns.policies) == ["static", "lb_bsp", "static (2)", "dynamix"]
    assert getattr(turns.policies["dynamix"], "guarded", False)  # as in a job of its own


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("static,", "two or more"),
        ("static,stigmergic", "each worker decides for itself"),
        ("static,dbs", "once an epoch"),
        ("static,noise_scale", "moves the global batch alone"),
        ("static,lbbsp", "did you mean 'lb_bsp'"),
        ("static,goodput:adaptive", "dynamix emulate SCENARIO --compare"),
        ("static,goodput:adaptive:auto", "dynamix emulate SCENARIO --compare"),
        ("static,local", "dynamix emulate SCENARIO --compare"),
    ],
)
def test_what_cannot_take_turns_is_refused_with_what_to_do(names: str, says: str) -> None:
    refused(ConfigError, says, make_policy, f"compare:{names}")

"""Whether distributing pays: figures worked out by hand, the rung that is named, and what is said of the unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamix.observe.gains import Gain, Gains, Pays, best_rung
from dynamix.observe.recorder import FIELDS
from dynamix.observe.run import conclude
from tests.observe.files import OWN_S, TRANSFER_S, write

NINE_TENTHS = {name: 9 * seconds for name, seconds in (("forward", 0.02), ("backward", 0.04), ("update", 0.002))}
NINE_TENTHS |= {"between": 9 * 0.005}  # more: then a rank has a tenth of the speed


def told(folder: Path, more: list[dict[str, float]], **given: Any) -> tuple[dict[str, Any], str]:
    write(folder, more, **given)
    result = conclude(folder)
    return result["gains"], result["text"]


def test_of_three_with_one_at_a_tenth_the_others_are_faster_without_it(tmp_path: Path) -> None:
    gains, text = told(tmp_path, [{}, {}, NINE_TENTHS])
    step_s = 10 * OWN_S + TRANSFER_S
    assert gains["alone"]["median"] == pytest.approx((32 / OWN_S) / (96 / step_s), rel=0.02)  # 3.3
    assert gains["without"]["median"] == pytest.approx((64 / (OWN_S + TRANSFER_S)) / (96 / step_s), rel=0.02)  # 6.4
    assert gains["without"]["rank"] == 2
    assert gains["without"]["low"] <= gains["without"]["median"] <= gains["without"]["high"]
    assert "if rank 2 stays as slow" in text
    assert "It was slow in 100% of the steps." in text


def test_of_two_with_one_at_a_tenth_the_other_alone_is_faster(tmp_path: Path) -> None:
    gains, text = told(tmp_path, [NINE_TENTHS, {}])
    assert (gains["best"], gains["alone"]["rank"], gains["without"]) == ("do not distribute", 1, None)
    assert gains["alone"]["median"] == pytest.approx((10 * OWN_S + TRANSFER_S) / (2 * OWN_S), rel=0.02)  # 5.0
    after_head = text.splitlines()[2:4]
    assert after_head[0] == "Do not distribute this job: one worker alone is as fast as all that meet in every step."
    assert after_head[1].split("#")[0].strip() == "torchrun --nproc-per-node 1 train.py"
    assert "on the device of rank 1" in after_head[1]


def test_behind_a_slow_network_one_worker_alone_is_as_fast(tmp_path: Path) -> None:
    gains, text = told(tmp_path, [{}, {}], transfer_s=0.2)
    assert gains["best"] == "do not distribute"
    assert gains["alone"]["median"] == pytest.approx((OWN_S + 0.2) / (2 * OWN_S), rel=0.02)  # 2.0
    assert "while the network stays as slow." in text


def test_equal_workers_stay_with_plain_ddp(tmp_path: Path) -> None:
    gains, text = told(tmp_path, [{}, {}, {}])
    assert (gains["best"], gains["without"]) == ("plain", None)
    assert gains["alone"]["median"] == pytest.approx((OWN_S + TRANSFER_S) / (3 * OWN_S), rel=0.02)  # 0.35
    assert text.splitlines()[2] == "Nothing to gain: stay with plain DDP. There is nothing to write."
    assert "while ranks stay as they are" in text
    assert "dynamix.Controller" not in text


def test_a_rank_of_half_the_speed_is_balanced(tmp_path: Path) -> None:
    slow = {name: seconds / 9 for name, seconds in NINE_TENTHS.items()}
    gains, text = told(tmp_path, [{}, {}, {}, slow])
    assert gains["best"] == "balance"
    assert text.splitlines()[2].startswith("Begin with balance")
    assert "dynamix.Controller(policy='goodput', batch_size=32)" in text.splitlines()[3]


@pytest.mark.parametrize(
    ("transfer_s", "best", "words"),
    [
        (0.05, "adapt", ", global_batch='adaptive')"),
        (0.15, "adapt and choose how to meet", ", global_batch='adaptive', meet='auto')"),
    ],
)
def test_the_batch_moves_where_the_exchange_is_long(transfer_s: float, best: str, words: str, tmp_path: Path) -> None:
    gains, text = told(tmp_path, [{}] * 8, transfer_s=transfer_s)
    assert gains["best"] == best
    assert gains["exchange"] == pytest.approx(transfer_s / (OWN_S + transfer_s), abs=0.03)
    assert words in text
    assert "in time alone, while the network stays as it is." in text


@pytest.mark.parametrize(
    ("balance", "follows", "best"),
    [
        (Gain(1.04, 1.01, 1.05), False, "balance"),
        (Gain(1.04, 0.99, 1.05), False, "plain"),
        (Gain(1.20, 0.90, 1.40), True, "balance"),
        (Gain(1.05, 0.90, 1.40), True, "plain"),
    ],
)
def test_in_doubt_plain_ddp_is_named(balance: Gain, follows: bool, best: str) -> None:
    gains = Gains(balance, None, None, [40, 24], [32, 32], float("nan"), grounded=True, sizes_known=True)
    pays = Pays(Gain(0.5, 0.4, 0.6, 0), None, balance, follows, 0.1, None)
    assert best_rung(pays, gains, leave=not follows, can_meet=True) == best


@pytest.mark.parametrize("given", [{"passes": 2}, {"stack": "FSDP2"}])
def test_only_ddp_without_accumulation_can_choose_how_to_meet(given: dict[str, Any], tmp_path: Path) -> None:
    gains, text = told(tmp_path, [{}] * 8, transfer_s=0.15, **given)
    assert gains["best"] == "adapt"
    assert "meet='auto'" not in text
    assert ("if the model fits it" in text) == ("stack" in given)


def test_slowness_that_came_and_went_is_told_from_a_steady_one(tmp_path: Path) -> None:
    gains, text = told(tmp_path, [{}, {}, {"forward": 0.2}], when=lambda step: step // 15 % 2 == 0)
    assert "if rank 2 is slow as often again" in text
    assert "of the steps: that came and went" in text
    assert gains["without"]["low"] < 0.8 < gains["without"]["median"] < 2.0 < gains["without"]["high"]
    assert gains["best"] == "balance"  # a rank that is slow now and then is not left out


def test_where_slowness_came_and_went_balance_is_what_shares_of_the_window_before_would_reach(tmp_path: Path) -> None:
    """Rank 2 takes twice as long in the first 27 of 57 steps that count: 137 ms a step, then 70."""
    gains, text = told(tmp_path, [{}, {}, {"forward": OWN_S}], when=lambda step: step < 30)
    # From the second window on: 17 steps at 137 ms and 30 at 70 in place of 20 at 83.4, 10 at 80.7 and 17 at 70.
    assert gains["balance"]["median"] == pytest.approx(4.429 / 3.665, rel=0.02)
    assert gains["alone"]["median"] == pytest.approx((27 * 0.137 + 30 * 0.07) / (57 * 3 * OWN_S), rel=0.02)
    assert gains["best"] == "balance"
    assert "with shares that follow a window later, if rank 2 is slow as often again" in text


def test_one_process_has_nothing_to_distribute(tmp_path: Path) -> None:
    gains, text = told(tmp_path, [{}])
    assert [gains[name] for name in ("alone", "without", "balance", "best")] == [None] * 4
    assert "One rank alone waits for nobody." in text
    assert not any(word in text for word in ("distribute", "times", "known"))


@pytest.mark.parametrize("what", ["samples", "exchange", "backward"])
def test_what_was_hardly_measured_promises_nothing(what: str, tmp_path: Path) -> None:
    write(tmp_path, [{}, {}, NINE_TENTHS])
    for rank in range(3) if what != "backward" else [1]:
        path = tmp_path / f"ranks/0/rank{rank}.steps"
        rows = np.fromfile(path, dtype="<f4").reshape(-1, len(FIELDS))
        rows[7:, FIELDS.index(what)] = np.nan
        rows.tofile(path)
    result = conclude(tmp_path)
    assert (result["gains"]["alone"], result["gains"]["without"]) == (None, None)
    assert "alone, in steps" not in result["text"]
    assert "Without rank" not in result["text"]
    assert result["gains"]["best"] not in ("do not distribute", "leave one out")


def test_a_rank_that_wrote_nothing_leaves_it_open_whether_distributing_pays(tmp_path: Path) -> None:
    write(tmp_path, [NINE_TENTHS, {}, {}])
    for name in ("rank2.json", "rank2.steps"):
        (tmp_path / "ranks/0" / name).unlink()
    result = conclude(tmp_path)
    assert (result["missing"], result["gains"]["alone"]) == ([2], None)
    assert result["gains"]["best"] != "do not distribute"

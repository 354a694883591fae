"""Whether distributing pays: figures worked out by hand, the rung that is named, and what is said of the unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from dynamix.observe.gains import Gain, Gains, Pays, best_rung
from dynamix.observe.hooks import gpus
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
    times = f"{gains['without']['median']:.2f} times as many samples a second as all ranks do now."
    assert f"Leave rank 2 out: the others would train {times}" in text


def test_of_two_with_one_at_a_tenth_the_other_alone_is_faster(tmp_path: Path) -> None:
    gains, text = told(tmp_path, [NINE_TENTHS, {}])
    assert (gains["best"], gains["alone"]["rank"], gains["without"]) == ("do not distribute", 1, None)
    assert gains["alone"]["median"] == pytest.approx((10 * OWN_S + TRANSFER_S) / (2 * OWN_S), rel=0.02)  # 5.0
    after_head = text.splitlines()[2:4]
    assert after_head[0].endswith("one worker alone is at least as fast as all together.")
    assert after_head[1] == "    torchrun --nproc-per-node 1 train.py  # your script, on host of rank 1"  # older files


# Hosts of four ranks, their GPUs, the slow rank and how slow, and what to start there: all but it, or it alone.
STARTS: list[tuple[str, str, int, int, str]] = [
    ("aaaa", "0123", 0, 9, "CUDA_VISIBLE_DEVICES=1,2,3 torchrun --nproc-per-node 3 train.py  # your script,"),
    ("aabb", "0101", 3, 9, "CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 1 train.py  # your script,"),
    ("aaab", "0120", 3, 9, "# your command, but nothing"),
    ("aaaa", "0001", 3, 9, "CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 3 train.py  # your script,"),
    ("aabb", "----", 3, 9, "torchrun --nproc-per-node 1 train.py  # your script,"),
    ("aabb", "3210", 3, 0, "CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 1 train.py  # your script,"),
]


@pytest.mark.parametrize(("hosts", "gpus", "slow", "times", "line"), STARTS)
def test_the_line_to_start_names_the_devices(
    hosts: str, gpus: str, slow: int, times: int, line: str, tmp_path: Path
) -> None:
    """With `times` 0 the exchange takes long, and the slow rank is the fastest of all: it should work alone."""
    more = [{"forward": 0.001} if times == 0 else {} for _ in range(4)]
    more[slow] = {name: times * seconds / 9 for name, seconds in NINE_TENTHS.items()}
    write(tmp_path, more, transfer_s=TRANSFER_S if times else 1.0)
    for rank, (host, gpu) in enumerate(zip(hosts, gpus, strict=True)):
        path = tmp_path / f"ranks/0/rank{rank}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": host, "gpus": gpu.strip("-")}))
    rest = ", any other host as before" if times else ""
    assert f"\n    {line} on host {hosts[slow]}{rest}\n" in conclude(tmp_path)["text"]


@pytest.mark.parametrize(
    ("visible", "named"), [(None, "1,2"), ("", "1,2"), ("4, 5, 6", "5,6"), ("GPU-a,GPU-b,c", "GPU-b,c")]
)
def test_gpus_are_named_as_a_new_process_must_name_them(
    visible: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with FakeTensorMode():  # this machine need not have any
        model = torch.nn.ParameterList([torch.empty(2, device=f"cuda:{at}") for at in (2, 1, 2)])
        assert gpus(model) == named
    assert gpus(torch.nn.Linear(2, 2)) == ""


HALF_SPEED = {name: seconds / 9 for name, seconds in NINE_TENTHS.items()}
# By case: what ranks take more, how they are written, the rung that is named, and what is said of it.
RUNGS: dict[str, tuple[list[dict[str, float]], dict[str, Any], str, str]] = {
    "slow network": ([{}, {}], {"transfer_s": 0.2}, "do not distribute", "while the network stays as slow."),
    "equal": ([{}, {}, {}], {}, "plain", "Nothing to gain: stay with plain DDP. There is nothing to write."),
    "half the speed": ([{}, {}, {}, HALF_SPEED], {}, "balance", "Controller(policy='goodput', batch_size=32)"),
    "long exchange": ([{}] * 8, {"transfer_s": 0.05}, "adapt", ", global_batch='adaptive')"),
    "longer": ([{}] * 8, {"transfer_s": 0.15}, "adapt and choose how to meet", "'adaptive', meet='auto')"),
    "accumulating": ([{}] * 8, {"transfer_s": 0.15, "passes": 2}, "adapt", "global_batch='adaptive')"),
    "sharded": ([{}] * 8, {"transfer_s": 0.15, "stack": "FSDP2"}, "adapt", "if the model fits it"),
}


@pytest.mark.parametrize("case", RUNGS)
def test_the_rung_that_pays_is_named_with_the_line_to_write(case: str, tmp_path: Path) -> None:
    more, given, best, says = RUNGS[case]
    gains, text = told(tmp_path, more, **given)
    assert gains["best"] == best
    if not any(more):
        alone = (OWN_S + given.get("transfer_s", TRANSFER_S)) / (len(more) * OWN_S)
        assert gains["alone"]["median"] == pytest.approx(alone, rel=0.05)
    assert says in text
    assert ("meet='auto'" in text) == ("meet" in best)
    assert ("dynamix.Controller" in text) == (best not in ("plain", "do not distribute"))


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


def test_slowness_that_came_and_went_is_told_from_a_steady_one(tmp_path: Path) -> None:
    gains, text = told(tmp_path, [{}, {}, {"forward": 0.2}], when=lambda step: step // 15 % 2 == 0)
    assert "if rank 2 is slow as often as in this run" in text
    assert "Rank 2 holds the job back at times: " in text
    assert gains["without"]["low"] < 0.8 < gains["without"]["median"] < 2.0 < gains["without"]["high"]
    assert gains["best"] == "balance"  # a rank that is slow now and then is not left out


def test_where_slowness_came_and_went_balance_is_what_shares_of_the_window_before_would_reach(tmp_path: Path) -> None:
    """Rank 2 takes twice as long in the first 27 of 57 steps that count: 137 ms a step, then 70."""
    gains, text = told(tmp_path, [{}, {}, {"forward": OWN_S}], when=lambda step: step < 30)
    # From the second window on: 17 steps at 137 ms and 30 at 70 in place of 20 at 83.4, 10 at 80.7 and 17 at 70.
    assert gains["balance"]["median"] == pytest.approx(4.429 / 3.665, rel=0.02)
    assert gains["alone"]["median"] == pytest.approx((27 * 0.137 + 30 * 0.07) / (57 * 3 * OWN_S), rel=0.02)
    assert gains["best"] == "balance"
    assert "with shares that lag the speeds by some steps, if rank 2 is slow as often as in this run" in text


def test_one_process_has_nothing_to_distribute(tmp_path: Path) -> None:
    gains, text = told(tmp_path, [{}])
    assert [gains[name] for name in ("alone", "without", "balance", "best")] == [None] * 4
    assert "There is only one rank, so no rank waits." in text
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

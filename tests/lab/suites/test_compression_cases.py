"""The randomised cases themselves: they cover what they claim, pass, and notice an exchange that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynamix.compression.layout import Layout
from dynamix.errors import ConfigError
from dynamix_homomorphic import exchange
from dynamix_lab.suites.compression import cases
from dynamix_lab.suites.compression.cases import KINDS, WAYS_TRIED, WORKERS, ExchangeCase, integer_sums, run_cases


def test_a_hundred_cases_and_more_decode_to_the_integer_reference() -> None:
    found = run_cases(150)
    assert found["failures"] == []
    taken = found["decoded"] + found["gathered"]
    assert taken + sum(found["dense_after"].values()) == found["exchanges"] == 300
    assert found["decoded"] > 140
    assert found["gathered"] > 20


def test_hard_gradients_and_flipped_bits_end_right_or_refused() -> None:
    found = run_cases(120, adversarial=True)
    assert found["failures"] == []
    assert found["refused"] > 2
    assert any("nonfinite" in reason for reason in found["dense_after"])


def test_ten_thousand_would_draw_everything() -> None:
    drawn = [ExchangeCase.draw(seed) for seed in range(600)]
    assert {case.kind for case in drawn} == set(KINDS)
    assert {case.workers for case in drawn} == set(WORKERS)
    assert {case.way for case in drawn} == set(WAYS_TRIED)
    assert {case.dtype for case in drawn} == {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    assert any(case.elements % 512 for case in drawn)
    assert any(case.rows for case in drawn)


def test_a_wrong_mean_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = exchange.write_mean_

    def wrong(values: torch.Tensor, *rest: Any) -> None:
        right(values, *rest)
        values[0] += 1

    monkeypatch.setattr(exchange, "write_mean_", wrong)
    monkeypatch.setattr(cases, "WAYS_TRIED", ("compaction",))
    assert run_cases(5)["failed"] == 5


def test_a_wrong_gathered_mean_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cases.ordered_means
    monkeypatch.setattr(cases, "ordered_means", lambda inputs: [one + 1 for one in right(inputs)])
    assert run_cases(60)["failed"] > 5


def test_a_wrong_integer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the mean would hide."""
    right = cases.integer_sums

    def other(*given: Any) -> Any:
        sums, quantum = right(*given)
        return sums + 1, quantum * 0

    monkeypatch.setattr(cases, "integer_sums", other)
    monkeypatch.setattr(cases, "WAYS_TRIED", ("compaction", "lhc"))
    found = run_cases(5)
    assert found["failed"] == 5
    assert any("integers" in line for line in found["failures"][0]["wrong"])


def test_the_reference_is_the_definition() -> None:
    layout = Layout.of([(3, 1)])
    sums, quantum = integer_sums([torch.tensor([1.0, -0.25, 0.0]), torch.tensor([-1.0, 0.5, 0.0])], layout)
    assert sums.tolist() == [0, 2**26, 0]
    assert quantum.tolist() == [2.0**-28] * 3
    with pytest.raises(ConfigError, match="count=0"):
        run_cases(0)

"""The loop of the README serves every way of meeting: it trains what the loop of `controller.piece()` trains."""

from __future__ import annotations

import dataclasses

import pytest

from tests.ranks import run_ranks
from tests.runtime.one_loop import WAYS, Case, compared, the_loop

pytestmark = pytest.mark.multiproc
SWITCHES = 11

ALIKE = {
    "sgd": Case(),
    "adamw": Case(optimizer="adamw"),
    "batchnorm": Case(kind="batchnorm", optimizer="adamw"),
    "batchnorm in eval mode": Case(kind="batchnorm", in_eval=True),
    "loader workers": Case(num_workers=2, epochs=7),
    "bucket views": Case(ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}),
    "two forwards": Case(forwards=2),
    "two losses": Case(kind="twin"),
    "reentrant checkpoint": Case(kind="reentrant", optimizer="adamw"),
    "checkpoint": Case(kind="recomputed"),
    "evaluation in between": Case(evaluates=True, kind="batchnorm"),
}
UNUSED = {
    f"layers unused, bucket views {views}": Case(
        kind="sometimes", optimizer="adamw", ddp={"find_unused_parameters": True, "gradient_as_bucket_view": views}
    )
    for views in (False, True)
}
COMPILED = {"compiled inside": Case(compiled="inside"), "compiled around": Case(compiled="around")}


@pytest.mark.parametrize("cases", [ALIKE, UNUSED, COMPILED], ids=["alike", "unused", "compiled"])
def test_the_plain_loop_trains_the_same_bits_over_many_changes_of_way(cases: dict[str, Case]) -> None:
    asked = {name: (the_loop, case) for name, case in cases.items()}
    for told in run_ranks(compared, 2, asked, timeout_s=100):
        assert {name: differs for name, (differs, _, _) in told.items() if differs} == {}
        assert [*told] == [*cases]
        assert min(switches for _, _, switches in told.values()) >= SWITCHES


@pytest.mark.parametrize("meet", WAYS[:2])
def test_the_plain_loop_trains_the_same_bits_in_one_way(meet: str) -> None:
    kept = {name: case for name, case in ALIKE.items() if name != "loader workers"}
    asked = {name: (the_loop, dataclasses.replace(case, meet=meet, epochs=1)) for name, case in kept.items()}
    pieces = {"micro_batch": 4, "max_batch_size": 64}
    if meet == "gradients":
        asked |= {
            f"{name}, in pieces": (of, dataclasses.replace(case, options=pieces)) for name, (of, case) in asked.items()
        }
    for told in run_ranks(compared, 2, asked, timeout_s=100):
        assert {name: differs for name, (differs, _, _) in told.items() if differs} == {}
        assert [*told] == [*asked]
        assert min(rounds for _, rounds, _ in told.values()) >= 12

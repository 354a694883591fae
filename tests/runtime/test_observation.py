"""What a rank writes down about its micro-batches."""

from __future__ import annotations

import pytest
import torch

from dynamix.runtime.observation import ACCURACY_ROWS, ROW, Recorder


def _row(recorder: Recorder) -> dict[str, float]:
    recorder.step_done(keep=True, first_of_epoch=False)
    return dict(zip(ROW, recorder.row(issued=1, count=1.0, weight=1.0), strict=False))


@pytest.mark.parametrize("right_in", ["first", "rest"])
def test_accuracy_is_of_the_first_256_rows_alone(right_in: str) -> None:
    recorder = Recorder(torch.device("cpu"))
    logits, target = torch.zeros(1000, 5), torch.full((1000,), 3)
    logits[slice(0, ACCURACY_ROWS) if right_in == "first" else slice(ACCURACY_ROWS, None), 3] = 1.0
    recorder.observe(None, logits, target)
    assert ACCURACY_ROWS == 256
    assert _row(recorder)["accuracy"] == (1.0 if right_in == "first" else 0.0)


def test_accuracy_of_sequences_counts_every_position_of_those_rows() -> None:
    recorder = Recorder(torch.device("cpu"))
    logits, target = torch.zeros(300, 4, 10), torch.zeros(300, 10, dtype=torch.long)  # (rows, classes, positions)
    logits[:ACCURACY_ROWS, 0, :5] = 1.0
    logits[:ACCURACY_ROWS, 1, 5:] = 1.0
    recorder.observe(None, logits, target)
    assert _row(recorder)["accuracy"] == 0.5


def test_targets_that_are_no_classes_give_no_accuracy() -> None:
    recorder = Recorder(torch.device("cpu"))
    recorder.observe(torch.tensor(2.0), torch.zeros(8, 3), torch.zeros(8, 3))
    row = _row(recorder)
    assert row["loss"] == 2.0
    assert row["accuracy"] != row["accuracy"]

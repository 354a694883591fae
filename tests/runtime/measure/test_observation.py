"""What a rank writes down about its micro-batches."""

from __future__ import annotations

import math
import time
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.measure.row import ROW
from tests.ranks import run_ranks
from tests.runtime.check.loops import Job


def _row(recorder: Recorder) -> dict[str, float]:
    recorder.step_done(keep=True, first_of_epoch=False)
    return dict(zip(ROW, recorder.row(issued=1, count=1.0, weight=1.0), strict=False))


def test_accuracy_is_of_every_position_of_the_first_256_rows_alone() -> None:
    recorder = Recorder(torch.device("cpu"))
    logits, target = torch.zeros(300, 4, 10), torch.zeros(300, 10, dtype=torch.long)  # (rows, classes, positions)
    logits[:256, 0, :5] = 1.0
    logits[:256, 1, 5:] = 1.0
    recorder.observe(None, logits, target)
    assert _row(recorder)["accuracy"] == 0.5


def _read(logits: Any, target: Any, loss: Any = None) -> float:
    recorder = Recorder(torch.device("cpu"))
    recorder.observe(loss, logits, target)
    assert recorder.reader.unread == 0
    return _row(recorder)["accuracy"]


B, T, C = 6, 4, 3
INDEX = torch.arange(B) % C
POSITIONS = torch.arange(B * T).reshape(B, T) % C


def _scores(target: Tensor, classes: int = C) -> Tensor:
    """Logits (..., classes) that are right but for the first position."""
    logits = F.one_hot(target, classes).float() * 5
    logits.view(-1, classes)[0] = torch.roll(logits.view(-1, classes)[0], 1)
    return logits


class Output(OrderedDict[str, Any]):
    """As Hugging Face's ModelOutput: a dict whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Fields(NamedTuple):
    logits: Tensor
    aux_logits: Tensor


FORMS: dict[str, tuple[Any, Any, float]] = {
    "(B, C)": (_scores(INDEX), INDEX, 5 / 6),
    "(B, C), half precision": (_scores(INDEX).bfloat16(), INDEX.int(), 5 / 6),
    "(B, C) with (B, 1)": (_scores(INDEX), INDEX[:, None], 5 / 6),
    "(B, C, T)": (_scores(POSITIONS).transpose(1, 2), POSITIONS, 23 / 24),
    "(B, T, V)": (_scores(POSITIONS), POSITIONS, 23 / 24),
    "(B, T, V), T = V": (_scores(POSITIONS, T), POSITIONS, 23 / 24),
    "(B, T, V) with flat targets": (_scores(POSITIONS), POSITIONS.flatten(), 23 / 24),
    "flat logits with (B, T)": (_scores(POSITIONS).flatten(0, 1), POSITIONS, 23 / 24),
    "(B, C, H, W)": (_scores(POSITIONS.view(2, 3, T)).movedim(-1, 1), POSITIONS.view(2, 3, T), 23 / 24),
    "(B, C, H, W) with (B, 1, H, W)": (
        _scores(POSITIONS.view(2, 3, T)).movedim(-1, 1), POSITIONS.view(2, 1, 3, T), 23 / 24,
    ),
    "one-hot": (_scores(INDEX), F.one_hot(INDEX, C), 5 / 6),
    "one-hot (B, C, T)": (
        _scores(POSITIONS).transpose(1, 2), F.one_hot(POSITIONS, C).transpose(1, 2).float(), 23 / 24,
    ),
    "one-hot (B, T, V)": (_scores(POSITIONS), F.one_hot(POSITIONS, C), 23 / 24),
    "soft": (_scores(INDEX), 0.9 * F.one_hot(INDEX, C) + 0.1 / C, 5 / 6),
    "masked": (_scores(INDEX), torch.where(torch.arange(B) < 3, INDEX, -100), 2 / 3),
    "masked by a class too large": (_scores(INDEX), torch.where(torch.arange(B) < 3, INDEX, 255), 2 / 3),
    "masked (B, T, V)": (_scores(POSITIONS), torch.where(torch.arange(T) < 1, POSITIONS, -100), 5 / 6),
    "masked one-hot": (_scores(INDEX), F.one_hot(INDEX, C) * (torch.arange(B) < 3)[:, None], 2 / 3),
    "all masked": (_scores(INDEX), torch.full((B,), -1), math.nan),
    "binary": (torch.tensor([2.0, -1.0, 3.0, 0.5]), torch.tensor([1.0, 0.0, 1.0, 0.0]), 3 / 4),
    "binary (B, 1)": (torch.tensor([[2.0], [-1.0]]), torch.tensor([0, 0]), 1 / 2),
    "dict": ({"logits": _scores(INDEX), "loss": 1.0}, {"ids": INDEX, "labels": INDEX}, 5 / 6),
    "model output": (Output(loss=None, logits=_scores(INDEX)), INDEX, 5 / 6),
    "named tuple": (Fields(_scores(INDEX), torch.zeros(B, 9)), INDEX, 5 / 6),
    "tuple": ((torch.tensor(0.3), _scores(INDEX), [torch.zeros(2)]), INDEX, 5 / 6),
    "NumPy": (_scores(INDEX).numpy(), INDEX.numpy(), 5 / 6),
    "no logits": (None, INDEX, math.nan),
    "no target": (_scores(INDEX), None, math.nan),
    "one sample": (torch.tensor([0.0, 3.0, 1.0]), torch.tensor(1), 1.0),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_accuracy_is_read_from_every_usual_form(form: str) -> None:
    logits, target, expected = FORMS[form]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if form == "all masked" else "error")
        recorder = Recorder(torch.device("cpu"))
        recorder.observe(None, logits, target)
        assert _row(recorder)["accuracy"] == pytest.approx(expected, nan_ok=True)
    assert recorder.reader.unread == (form == "all masked")


def test_classes_where_positions_are_as_many_are_found_by_an_earlier_batch_or_by_the_loss() -> None:
    last, target = _scores(POSITIONS, T), POSITIONS
    first = last.transpose(1, 2)
    for logits in (last, first):
        loss = F.cross_entropy(last.flatten(0, 1), target.flatten())
        assert _read(logits, target, loss) == pytest.approx(23 / 24)
        assert _read(logits, target, 1.03 * loss) == pytest.approx(23 / 24)  # label smoothing, another term
    recorder = Recorder(torch.device("cpu"))
    recorder.observe(None, first[..., :3], target[:, :3])  # only dimension 1 can hold the classes here
    recorder.observe(None, first, target)
    assert _row(recorder)["accuracy"] == pytest.approx((17 / 18 + 23 / 24) / 2)


LOSSES: dict[str, tuple[Any, float]] = {
    "tensor": (torch.tensor(2.5, requires_grad=True), 2.5),
    "one element": (torch.tensor([[2.5]]), 2.5),
    "unreduced": (torch.tensor([1.0, 4.0]), 2.5),
    "half precision": (torch.tensor(2.5, dtype=torch.bfloat16), 2.5),
    "float": (2.5, 2.5),
    "NumPy": (np.float32(2.5), 2.5),
    "dict": ({"loss": torch.tensor(2.5), "other": 1}, 2.5),
    "model output": (Output(loss=torch.tensor(2.5), logits=torch.zeros(2)), 2.5),
    "None": (None, math.nan),
    "infinite": (torch.tensor(math.inf), math.nan),
}


@pytest.mark.parametrize("form", LOSSES)
def test_the_loss_is_read_from_every_usual_form(form: str) -> None:
    given, expected = LOSSES[form]
    recorder = Recorder(torch.device("cpu"))
    recorder.observe(given, None, None)
    assert _row(recorder)["loss"] == pytest.approx(expected, nan_ok=True)
    assert recorder.reader.unread == 0


UNREADABLE: dict[str, tuple[Any, Any]] = {
    "shapes apart": (torch.zeros(8, 3), torch.zeros(5, dtype=torch.long)),
    "numbers for targets": (torch.zeros(8, 3), torch.zeros(8)),
    "regression": (torch.randn(8, 3), torch.randn(8, 3)),
    "regression of one": (torch.randn(8), torch.randn(8)),
    "dict without logits": ({"start": torch.zeros(2, 3), "end": torch.zeros(2, 3)}, torch.zeros(2).long()),
    "text": ("logits", ["a", "b"]),
    "objects": (object(), object()),
    "no dimensions": (torch.tensor(1.0), torch.tensor(1)),
    "no samples": (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)),
    "no classes": (torch.zeros(3, 0), torch.zeros(3, dtype=torch.long)),
    "complex": (torch.zeros(3, 2, dtype=torch.complex64), torch.zeros(3, dtype=torch.long)),
    "sparse": (torch.eye(3).to_sparse(), torch.arange(3)),
    "on no device": (torch.zeros(3, 2, device="meta"), torch.zeros(3, dtype=torch.long, device="meta")),
    "empty tuple": ((), torch.zeros(3).long()),
}


@pytest.mark.parametrize("form", UNREADABLE)
def test_what_cannot_be_read_is_unknown_and_warned_of_once(form: str) -> None:
    recorder = Recorder(torch.device("cpu"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            recorder.observe(torch.tensor(2.0), *UNREADABLE[form])
            row = _row(recorder)
            assert row["loss"] == 2.0
            assert math.isnan(row["accuracy"])
    said = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    assert len(said) == 1
    assert "cannot read the accuracy" in said[0]
    assert recorder.reader.unread == 3


@pytest.mark.parametrize("given", [{"a": 1.0, "b": 2.0}, "1.5x", object(), torch.zeros(0), torch.zeros(()).to("meta")])
def test_a_loss_that_cannot_be_read_is_unknown_and_warned_of_once(given: Any) -> None:
    recorder = Recorder(torch.device("cpu"))
    with pytest.warns(RuntimeWarning, match="cannot read the loss"):
        recorder.observe(given, None, None)
    recorder.observe(given, None, None)  # a second warning would be an error here
    assert math.isnan(_row(recorder)["loss"])


@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=4),
    st.lists(st.integers(0, 5), min_size=0, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.sampled_from([torch.float32, torch.int64, torch.int32, torch.bool]),
)
def test_no_pair_of_shapes_raises(one: list[int], other: list[int], dtype: torch.dtype, kind: torch.dtype) -> None:
    recorder = Recorder(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder.observe(torch.ones(one), torch.ones(one, dtype=dtype), torch.ones(other, dtype=kind))
        accuracy = _row(recorder)["accuracy"]
    assert math.isnan(accuracy) or 0 <= accuracy <= 1


def test_a_window_of_two_steps_knows_how_accuracy_changed() -> None:
    recorder, row = Recorder(torch.device("cpu")), {}
    for right in ([2, 3], [3, 4]):
        for hits in right:
            recorder.observe(None, torch.eye(4), torch.arange(4).where(torch.arange(4) < hits, 0))
            recorder.step_done(keep=True, first_of_epoch=False)
        row = _row(recorder)
    assert row["accuracy_std"] > 0
    assert row["accuracy_change"] > 0


@pytest.mark.parametrize("reads", [None, {"watts": 3.0, "memory": -1.0}, {"compute": -1.0, "memory": -1.0}])
def test_a_probe_that_fails_or_reads_what_it_may_not_is_dropped(
    reads: dict[str, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        name, asked = "broken", 0

        def sample(self) -> dict[str, float]:
            self.asked += 1
            if reads is None:
                raise OSError("gone")
            return reads

    recorder, broken = Recorder(torch.device("cpu")), Broken()
    monkeypatch.setattr("dynamix.runtime.measure.recorder.PROBE_EVERY_S", 0.0)
    recorder.probes.asked.append(broken)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="broken probe failed.*" + ("gone" if reads is None else min(reads))):
        _row(recorder)
    assert _row(recorder)["memory"] >= 0
    assert broken.asked == 1


def _waits_before_forward(rank: int) -> list[dict[str, float]]:
    told = []
    for batchnorm in ("rank0", "weighted"):
        job = Job(rank, buffers=True)
        job.controller.wrap(job.ddp, job.optimizer, batchnorm=batchnorm)  # type: ignore[arg-type]
        for x, y in job.loader:
            time.sleep(0.05 if rank == 0 else 0.0)  # its loader is slow
            job.train(x, y)
        told.append(job.controller.metrics())
        job.controller.close()
    return told


@pytest.mark.multiproc
@pytest.mark.timeout(90)
def test_who_waits_for_the_buffers_of_another_rank_computes_nothing_meanwhile() -> None:
    for late, waits in zip(*run_ranks(_waits_before_forward, 2), strict=True):
        assert late["data_s"] > 0.045
        assert waits["compute_s"] < 0.03
        assert waits["exchange_s"] > 0.03


def test_figures_of_any_size_in_a_loaded_notebook_do_no_harm() -> None:
    recorder = Recorder(torch.device("cpu"))
    for before in ([1e300, 1e300], [-1e308, 1e308], [math.inf, math.nan]):
        recorder.load_state_dict({"steps": 0, "series": {}, "before": {"loss": before}})
        recorder.observe(torch.tensor(1.0), None, None)
        recorder.step_done(keep=True, first_of_epoch=False)
        recorder.row(issued=1, count=1.0, weight=1.0)

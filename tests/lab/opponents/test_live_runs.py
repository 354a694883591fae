"""Opponents on real ranks: the same training as on the virtual clock, agreed ends, one worker alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from dynamix_lab.opponents.live import RunObserver, run_rank, weights_of
from dynamix_lab.opponents.runs import RunLimits, TrialRun
from dynamix_lab.opponents.trial import LocalSettings, Trial
from dynamix_lab.opponents.virtual import run_virtual
from dynamix_lab.tasks import Workload
from tests.lab.opponents.tiny import ConstantWorld, make_data, workload
from tests.ranks import run_ranks

pytestmark = pytest.mark.multiproc
SPEEDS = (1.0, 0.5, 0.3)
LIMITS = RunLimits(samples=480, every_samples=160)


class Weights(RunObserver):
    """Keeps what each snapshot held."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, torch.Tensor]] = []
        self.starts = 0

    def start(self) -> None:
        self.starts += 1

    def snapshot(self, time_s: float, samples: int, weights: torch.Tensor) -> None:
        self.seen.append((samples, weights.clone()))


def _known(**settings: Any) -> Trial:
    """Steps that do not depend on anybody's clock."""
    return Trial("local", None, 8, 0.05, local=LocalSettings(speeds=SPEEDS, **settings))


FORCED = {
    "averaged": _known(steps=4),
    "kept": _known(steps=4, momentum="kept"),
    "reset": _known(steps=3, momentum="reset", smaller_pieces=True),
    "nesterov": _known(steps=4, outer="nesterov"),
    "cosine": dataclasses.replace(
        _known(period="qsr", steps=2, alpha=0.08), lr_rule="none", schedule="cosine", budget=480
    ),
    "adacomm": Trial("ada", None, 8, 0.05, local=LocalSettings(period="adacomm", speeds=SPEEDS), budget=480),
}


def _job(name: str) -> Workload:
    """In double precision: only the order of sums differs, and nothing amplifies that."""
    return workload(norm=name in ("kept", "nesterov"), dtype=torch.float64)


PLAIN = Trial("local", None, 8, 0.05, local=LocalSettings(steps=4, proportional=False))
OURS = Trial("static-parameters", "static", 8, 0.05, local=LocalSettings(steps=4))
RATIO = Trial("lb_bsp", "lb_bsp", 8, 0.05, local=LocalSettings(period="ratio"))


def _everything(rank: int) -> dict[str, Any]:
    """All trials of this file in turn, in one process group."""
    found: dict[str, Any] = {"forced": {}, "twins": []}
    job, data = workload(norm=True, dtype=torch.float64), make_data(dtype=torch.float64)
    for name, trial in FORCED.items():
        watch = Weights()
        run = run_rank(trial, _job(name), data, seed=4, limits=LIMITS, observer=watch, warm_up_steps=2)
        found["forced"][name] = (run, watch.seen, watch.starts)
    for trial in (PLAIN, OURS):
        watch = Weights()
        run = run_rank(trial, job, data, seed=4, limits=RunLimits(samples=288, every_samples=96), observer=watch)
        found["twins"].append((run, watch.seen))
    found["ratio"] = run_rank(RATIO, job, data, seed=4, limits=RunLimits(samples=600, every_samples=300))
    found["ends"] = _ends()
    return found


def _ends() -> dict[str, TrialRun | None]:
    found: dict[str, TrialRun | None] = {}
    data, job = make_data(), workload()
    clock = RunLimits(time_s=0.4, every_s=0.1)
    measured = Trial("local", None, 8, 0.05, local=LocalSettings(steps=4))
    for trial in (measured, Trial("static", "static", 8, 0.05), Trial("single", None, 8, 0.05)):
        how: dict[str, Any] = {"seed": 1, "warm_up_steps": 2, "fastest": 1}
        found[f"{trial.row} clock"] = run_rank(trial, job, data, limits=clock, **how)
    for row, policy in (("static", "static"), ("profiled", "profiled"), ("goodput", "goodput")):
        cosine = Trial(row, policy, 8, 0.05, schedule="cosine", budget=480)
        found[row] = run_rank(cosine, job, data, seed=1, limits=LIMITS, warm_up_steps=2)
    learns = Trial("adapt", "goodput", 8, 0.05, schedule="cosine", budget=480, rate_for=8, count="progress")
    spent = RunLimits(samples=4800, budget=480, every_samples=160)
    found["adapt"] = run_rank(learns, job, data, seed=1, limits=spent, warm_up_steps=2)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of three ranks found."""
    return run_ranks(_everything, len(SPEEDS), timeout_s=200)


def test_live_rounds_are_the_virtual_clocks_rounds(ranks: list[dict[str, Any]]) -> None:
    for name, trial in FORCED.items():
        run, seen, starts = ranks[0]["forced"][name]
        twin, expected = _on_the_virtual_clock(trial, _job(name))
        other, _, others = ranks[1]["forced"][name]
        assert other is None
        assert (starts, others) == (1, 0)
        assert run.samples_by_worker == twin.samples_by_worker
        assert run.steps == twin.steps
        assert len(set(run.samples_by_worker)) == 3  # unlike steps
        assert [e.samples for e in run.evaluations] == [e.samples for e in twin.evaluations]
        assert [e.loss for e in run.evaluations] == pytest.approx([e.loss for e in twin.evaluations], abs=1e-5)
        torch.testing.assert_close(seen[-1][1], expected, atol=1e-9, rtol=0)


def _on_the_virtual_clock(trial: Trial, job: Workload) -> tuple[TrialRun, torch.Tensor]:
    """The run, and the weights at its end."""
    made: list[torch.nn.Module] = []

    def kept(seed: int) -> torch.nn.Module:
        made.append(job.make_model(seed))
        return made[-1]

    watched, world = dataclasses.replace(job, make_model=kept), ConstantWorld(SPEEDS, batch_size=8)
    run = run_virtual(trial, watched, make_data(dtype=torch.float64), world, seed=4, limits=LIMITS)
    return run, weights_of(made[0])


def test_rounds_of_the_product_train_as_a_plain_implementation_does(ranks: list[dict[str, Any]]) -> None:
    (plain, expected), (ours, seen) = ranks[0]["twins"]
    assert plain.samples_by_worker == ours.samples_by_worker
    assert [e.loss for e in ours.evaluations] == pytest.approx([e.loss for e in plain.evaluations], abs=1e-9)
    for (samples, weights), (same, others) in zip(seen, expected, strict=True):
        assert samples == same
        torch.testing.assert_close(weights, others, atol=1e-9, rtol=0)


def test_runs_end_by_clock_samples_and_progress_on_all_ranks_alike(ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]["ends"]
    assert all(run is None for rank in ranks[1:] for run in rank["ends"].values())
    assert sum(ranks[0]["ratio"].samples_by_worker) >= 600
    for row in ("local", "static", "single"):
        run = first[f"{row} clock"]
        assert run.cluster == "live"
        assert run.time_s >= 0.4
        assert run.evaluations[-1].samples == run.samples > 0
        assert len(run.evaluations) >= 3
        assert run.evaluations[-1].loss < run.evaluations[0].loss
    assert first["single clock"].samples_by_worker[0] == 0
    live, world = first["static"], ConstantWorld((1.0,) * len(SPEEDS), batch_size=8)
    virtual = run_virtual(live.trial, workload(), make_data(), world, seed=1, limits=LIMITS)
    assert [e.loss for e in live.evaluations] == pytest.approx([e.loss for e in virtual.evaluations], abs=1e-5)
    assert first["profiled"].samples >= 480
    assert first["goodput"].samples >= 480
    assert 480 <= first["adapt"].samples < 4800

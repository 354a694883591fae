"""Opponents on real ranks: the same training as on the virtual clock, agreed ends, one worker alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynamix_lab.opponents.live import RunObserver, put_weights, run_rank, weights_of
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


def _forced(rank: int) -> dict[str, Any]:
    """Every forced trial in turn on this rank, in one process group."""
    found = {}
    for name, trial in FORCED.items():
        watch, data = Weights(), make_data(dtype=torch.float64)
        run = run_rank(trial, _job(name), data, seed=4, limits=LIMITS, observer=watch, warm_up_steps=2)
        found[name] = (run, watch.seen, watch.starts)
    return found


def test_live_rounds_are_the_virtual_clocks_rounds() -> None:
    results = run_ranks(_forced, 3, timeout_s=100)
    for name, trial in FORCED.items():
        run, seen, starts = results[0][name]
        twin, expected = _on_the_virtual_clock(trial, _job(name))
        assert results[1][name][0] is None
        assert (starts, results[1][name][2]) == (1, 0)
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


PLAIN = Trial("local", None, 8, 0.05, local=LocalSettings(steps=4, proportional=False))
OURS = Trial("static-parameters", "static", 8, 0.05, local=LocalSettings(steps=4))


def _both(rank: int) -> list[tuple[TrialRun | None, list[tuple[int, torch.Tensor]]]]:
    """The plain implementation and the product's, on the same samples."""
    found = []
    for trial in (PLAIN, OURS):
        watch = Weights()
        job, data = workload(norm=True, dtype=torch.float64), make_data(dtype=torch.float64)
        run = run_rank(trial, job, data, seed=4, limits=RunLimits(samples=288, every_samples=96), observer=watch)
        found.append((run, watch.seen))
    return found


def test_rounds_of_the_product_train_as_a_plain_implementation_does() -> None:
    (plain, expected), (ours, seen) = run_ranks(_both, 3, timeout_s=100)[0]
    assert plain.samples_by_worker == ours.samples_by_worker
    assert [e.loss for e in ours.evaluations] == pytest.approx([e.loss for e in plain.evaluations], abs=1e-9)
    for (samples, weights), (same, others) in zip(seen, expected, strict=True):
        assert samples == same
        torch.testing.assert_close(weights, others, atol=1e-9, rtol=0)


def _ratio(rank: int, trial: Trial) -> TrialRun | None:
    job, data = workload(norm=True, dtype=torch.float64), make_data(dtype=torch.float64)
    return run_rank(trial, job, data, seed=4, limits=RunLimits(samples=2000, every_samples=500))


@pytest.mark.parametrize("period", ["ratio", "auto"])
def test_rounds_by_what_is_measured_end_together(period: str) -> None:
    trial = Trial("lb_bsp", "lb_bsp", 8, 0.05, local=LocalSettings(period=period))
    run = run_ranks(_ratio, 3, trial, timeout_s=100)[0]
    assert sum(run.samples_by_worker) >= 2000


def _ends(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    data, job = make_data(), workload()
    clock = RunLimits(time_s=0.4, every_s=0.1)
    measured = Trial("local", None, 8, 0.05, local=LocalSettings(steps=4))
    static = Trial("static", "static", 8, 0.05)
    single = Trial("single", None, 8, 0.05)
    for trial in (measured, static, single):
        how = {"seed": 1, "warm_up_steps": 2, "fastest": 1}
        found[f"{trial.row} clock"] = run_rank(trial, job, data, limits=clock, **how)
    limits = RunLimits(samples=480, every_samples=160)
    for row, policy in (("static", "static"), ("profiled", "profiled"), ("goodput", "goodput")):
        cosine = Trial(row, policy, 8, 0.05, schedule="cosine", budget=480)
        found[row] = run_rank(cosine, job, data, seed=1, limits=limits, warm_up_steps=2)
    learns = Trial("adapt", "goodput", 8, 0.05, schedule="cosine", budget=480, rate_for=8, count="progress")
    spent = RunLimits(samples=4800, budget=480, every_samples=160)
    found["adapt"] = run_rank(learns, job, data, seed=1, limits=spent, warm_up_steps=2)
    dist.barrier()
    return found


def test_runs_end_by_clock_samples_and_progress_on_all_ranks_alike() -> None:
    first, second = run_ranks(_ends, 2, timeout_s=100)
    assert all(run is None for run in second.values())
    for row in ("local", "static", "single"):
        run = first[f"{row} clock"]
        assert run.cluster == "live"
        assert 0.4 <= run.time_s < 2.0
        assert run.evaluations[-1].samples == run.samples > 0
        assert len(run.evaluations) >= 3
        assert run.evaluations[-1].loss < run.evaluations[0].loss
    assert first["single clock"].samples_by_worker[0] == 0
    world, limits = ConstantWorld((1.0, 1.0), batch_size=8), RunLimits(samples=480, every_samples=160)
    virtual = run_virtual(first["static"].trial, workload(), make_data(), world, seed=1, limits=limits)
    live = first["static"]
    assert [e.loss for e in live.evaluations] == pytest.approx([e.loss for e in virtual.evaluations], abs=1e-5)
    assert first["profiled"].samples >= 480
    assert first["goodput"].samples >= 480
    assert 480 <= first["adapt"].samples < 4800


def test_weights_go_in_a_row_and_back() -> None:
    job = workload(norm=True)
    first, second = job.make_model(1), job.make_model(2)
    put_weights(second, weights_of(first))
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)

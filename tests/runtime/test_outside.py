"""What the environment says wins over the script; DYNAMIX_POLICY=static turns off all that moves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dynamix
from dynamix.errors import ConfigError
from dynamix.model.rounds import LocalSteps, RoundSize
from dynamix.model.sync_schedule import SyncSchedule
from dynamix.policies.static import Static
from dynamix.runtime.config import JobConfig, job_config
from dynamix.runtime.limits import Limits
from dynamix.runtime.sync.parameter_averaging import Averaging
from dynamix.window import Bounds, Window
from tests.ranks import run_ranks
from tests.refused import refused
from tests.runtime.jobs import Training, classes, in_turns, wait_for_decisions
from tests.union import Script

GIVEN: dict[str, Any] = {"policy": "dynamix", "batch_size": 8, "limits": Limits(), "interval": 10, "accumulate": 1}


def job_of(**options: Any) -> JobConfig:
    return job_config(2, {**GIVEN, "micro_batch": None, "meet": "gradients", "guard": None, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"global_batch": "adaptive"},
        {"global_batch": "adaptive", "limits": Limits(min_global_batch=4, max_global_batch=64)},
        {"meet": "auto"},
        {"meet": "auto", "global_batch": "adaptive", "interval": "auto"},
        {"micro_batch": 4, "global_batch": "adaptive"},
        {"accumulate": 4},
        {"guard": True},
        {"interval": "auto"},
        {"policy": "stigmergic"},
        {"policy": "dbs"},
        {"replay": "/no/such/events.jsonl"},
    ],
)
def test_static_from_outside_turns_off_all_that_moves(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIX_POLICY", "static")
    job = job_of(**options)
    assert type(job.served) is Static
    assert (job.fixed, job.replayed) == (True, None)
    assert type(job.sync_schedule()) is SyncSchedule
    assert job.bounds.total_low == job.bounds.total_high == 16 * options.get("accumulate", 1)


def test_local_steps_stay_if_the_script_always_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"meet": "parameters", "micro_batch": 4, "global_batch": "adaptive"}
    assert type(job_of(**options).sync_schedule()) is RoundSize
    monkeypatch.setenv("DYNAMIX_POLICY", "static")
    assert type(job_of(**options).sync_schedule()) is LocalSteps  # rounds of one size
    monkeypatch.setenv("DYNAMIX_MEET", "gradients")
    assert type(job_of(**options).sync_schedule()) is SyncSchedule


def test_each_variable_stands_for_its_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIX_POLICY", "goodput")
    monkeypatch.setenv("DYNAMIX_GLOBAL_BATCH", "adaptive")
    assert not job_of().fixed
    monkeypatch.setenv("DYNAMIX_GLOBAL_BATCH", "fixed")
    assert job_of(global_batch="adaptive", limits=Limits(max_global_batch=64)).fixed
    monkeypatch.setenv("DYNAMIX_GLOBAL_BATCH", "fix")
    refused(ConfigError, "^DYNAMIX_GLOBAL_BATCH='fix' is not possible: .* did you mean 'fixed'", job_of)
    monkeypatch.setenv("DYNAMIX_POLICY", "static")
    monkeypatch.setenv("DYNAMIX_MEET", "auto")
    monkeypatch.delenv("DYNAMIX_GLOBAL_BATCH")
    assert job_of().meet == "auto"  # it was asked for as well
    monkeypatch.setenv("DYNAMIX_POLICY", "static:4")
    assert not job_of(global_batch="adaptive").fixed  # a static size is a policy like others


def test_a_variable_that_is_nearly_one_of_ours_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for other in ("HOST", "DEVICE", "OBSERVE", "OBSERVE_STEPS", "ROW", "STARTUP", "BPF", "EMULATED", "MINE"):
        monkeypatch.setenv(f"DYNAMIX_{other}", "1")
    monkeypatch.setenv("DYNAMIX_MEET", "gradients")
    monkeypatch.setenv("MY_DYNAMIX_POLICY", "static")
    dynamix.Controller("lb_bsp", 8)
    assert caplog.text == ""
    monkeypatch.setenv("DYNAMIX_POLICIES", "static")
    monkeypatch.setenv("dynamix_events", "events.jsonl")
    dynamix.Controller("lb_bsp", 8)
    assert "DYNAMIX_POLICIES means nothing to dynamix: did you mean DYNAMIX_POLICY?" in caplog.text
    assert "dynamix_events means nothing to dynamix: did you mean DYNAMIX_EVENTS?" in caplog.text


def test_settings_say_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIX_POLICY", "static")
    settings = dynamix.Settings("goodput", meet="auto", global_batch="adaptive", min_global_batch=4)
    assert settings.options["meet"] == "gradients"
    controller = settings.bind(batch_size=8)
    assert int(controller.bounds.total_high) == 8
    controller.close()


def all_that_moves(rank: int, folder: str, policy: str, *, resume: bool = False) -> dict[str, Any]:
    """A script that lets everything move, and says how models are averaged; what it went on from, and its sizes."""
    os.environ["DYNAMIX_POLICY"] = policy
    options: dict[str, Any] = {"meet": "auto", "global_batch": "adaptive", "max_global_batch": 64, "interval": 2}
    controller = dynamix.Controller(Script([[12, 4], [20, 10], [14, 2]]), 8, **options)
    job = Training(controller, classes(400), averaging=Averaging(optimizer_state="kept"))
    saved, sizes = Path(folder) / f"{rank}.pt", []
    if resume:
        controller.load_state_dict(torch.load(saved, weights_only=True))
    before = controller.batch_sizes.tolist()
    for x, y in job.batches(2):
        sizes.append(controller.batch_sizes.tolist())
        job.train(x, y)
        if controller.met:
            assert controller.optimizer_state(job.optimizer)["param_groups"]
        if not policy and controller.checkpoint_due(every=10):
            torch.save(controller.state_dict(), saved)
            break
    assert job.weights().isfinite().all()
    controller.close()
    return {"before": before, "sizes": sizes}


def _plain_and_resumed(rank: int, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    plain = all_that_moves(rank, folder, "static")
    wait_for_decisions()
    in_turns()
    all_that_moves(rank, folder, "")
    return plain, all_that_moves(rank, folder, "static", resume=True)


@pytest.mark.multiproc
def test_a_script_that_lets_all_move_trains_as_plain_ddp_does_also_from_a_checkpoint(tmp_path: Path) -> None:
    for plain, resumed in run_ranks(_plain_and_resumed, 2, str(tmp_path)):
        assert plain["sizes"] == [[8, 8]] * 50
        assert resumed["before"] != [8, 8]
        assert sum(resumed["before"]) == 16
        assert resumed["sizes"][-1] == [8, 8]


def test_static_is_even_where_bounds_allow_it() -> None:
    bounds = Bounds.of(3, [16, 1, 1], [16, 64, 64], total_low=40, total_high=40)
    assert Static(anew=True).decide(Window.of([16, 4, 20]), bounds).tolist() == [16, 12, 12]

"""Restarts under torchrun: workers come and go, and no sample is lost or trained twice."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import dynamix
from dynamix import elastic
from dynamix.errors import UsageError
from tests.elastic_job import BATCH, EVERY, SAMPLES
from tests.ranks import free_port, refusal, run_ranks, start_script
from tests.runtime.jobs import Training, classes

JOB, AGENT = (Path(__file__).parent / name for name in ("elastic_job.py", "torchrun.py"))


def _torchrun(folder: Path, host: str, port: int) -> Any:
    """One host's agent, with one worker."""
    told = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DYNAMIX_HOST": host}
    told |= {"PYTHONPATH": os.pathsep.join([str(JOB.parents[1]), *sys.path])}
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job"]
    timing = ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"]
    timing += ["--monitor-interval", "0.1"]
    size = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9"]
    return start_script(AGENT, [*size, *meeting, *timing, str(JOB), str(folder)], folder / f"{host}.log", env=told)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def _starts(folder: Path) -> list[dict[str, Any]]:
    path = folder / "starts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _until(folder: Path, what: Callable[[], bool]) -> None:
    for _ in range(1200):
        if what():
            return
        time.sleep(0.1)
    logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
    raise AssertionError(f"waited for two minutes; {_starts(folder)}; {logs}")


def _now(folder: Path) -> dict[str, Any]:
    path = folder / "now.json"
    return json.loads(path.read_text()) if path.exists() else {"samples": 0}  # type: ignore[no-any-return]


def _uneven(said: dict[str, Any], times: float = 1.5) -> bool:
    """Whether host "a" has clearly more than host "b", which is a third as fast."""
    first, second = said.get("sizes", (1, 1))
    return bool(first > times * second if said["host"] == "a" else second > times * first)


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_host_is_lost_and_comes_back(tmp_path: Path) -> None:
    port = free_port()
    agents = {"a": _torchrun(tmp_path, "a", port)}
    _until(tmp_path, lambda: _listens(port))  # the first host is the one that the others ask
    agents["b"] = _torchrun(tmp_path, "b", port)
    try:
        _until(tmp_path, lambda: bool(_starts(tmp_path)) and _starts(tmp_path)[-1]["workers"] == 2)
        first = _starts(tmp_path)[-1]["samples"]
        _until(tmp_path, lambda: _now(tmp_path)["samples"] > first and _uneven(_now(tmp_path)))
        uneven = _now(tmp_path)["samples"]
        _until(tmp_path, lambda: _now(tmp_path)["samples"] > uneven + 2 * EVERY * BATCH)
        for process in (agents["b"].pid, int((tmp_path / "b.pid").read_text())):
            os.kill(process, signal.SIGKILL)  # the whole host, without a word
        agents["b"].join()
        last = _now(tmp_path)["samples"]
        saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["controller"]["hosts"][0]
        shares = json.loads(saved)["shares"]  # nobody saves again before there is one host
        _until(tmp_path, lambda: _starts(tmp_path)[-1]["workers"] == 1)
        assert last - _starts(tmp_path)[-1]["samples"] <= (EVERY + 1) * BATCH
        agents["b"] = _torchrun(tmp_path, "b", port)
        _until(tmp_path, lambda: _starts(tmp_path)[-1]["workers"] == 2)
        (tmp_path / "enough").touch()
        for agent in agents.values():
            agent.join(120)
        assert [agent.exitcode for agent in agents.values()] == [0, 0]
        assert "dynamix: the job stops at step" in (tmp_path / "a.log").read_text()  # when "b" came back
    finally:
        for agent in agents.values():
            agent.terminate()
            agent.join(60)
    trained = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["trained"]
    assert trained[0] >= 1
    assert torch.equal(trained, trained[0].expand(SAMPLES))  # every sample once an epoch
    # What is known of a host stays known while it is away. It may have moved back until then, on few cores.
    begun = _starts(tmp_path)[-1]  # rank 0 is the host whose agent has the smaller process id
    share = shares[f"{begun['host']}/0"] / sum(shares.values())
    assert begun["sizes"][0] == pytest.approx(BATCH * share, abs=1.5)


def test_a_stop_that_was_asked_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    job = Training(dynamix.Controller("static", 8, interval=10), classes(520))
    for x, y in itertools.islice(job.batches(1), 7):
        job.train(x, y)
    with pytest.raises(SystemExit):
        elastic.leave(job.controller)
    assert "the job stops at step 7, sample 56, to be started again" in caplog.text


JOBS = [
    ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}, "SHARE_RDZV_TCP_STORE=1 torchrun"),
    ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}, "accepted"),
    ({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_MAX_RESTARTS": "3"}, "accepted"),
    ({}, "accepted"),
]


def _required(rank: int) -> list[str]:
    said = []
    for environment, _ in JOBS:
        with mock.patch.dict(os.environ, environment):
            said.append(refusal(UsageError, elastic.require_restartable))
    return said


@pytest.mark.multiproc
def test_a_job_that_could_not_be_started_again_is_refused() -> None:
    (answers,) = run_ranks(_required, 1)
    for before, answer in zip(_required(0), answers, strict=True):
        assert before == answer, "the same before there is a process group"
    for (environment, said), answer in zip(JOBS, answers, strict=True):
        assert said in answer, environment

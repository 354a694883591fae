"""Unchanged scripts, observed: weights are those of the unobserved run, bit by bit, and the slow rank is named."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError
from dynamix.observe import hooks
from dynamix.observe.run import conclude, observe
from tests.integrations.jobs import as_under_torchrun
from tests.observe import jobs
from tests.ranks import run_ranks
from tests.refused import refused

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]
STACKS = ("ddp", "accumulated", "compiled", "fsdp2", "lightning", "transformers")


def both_ways(rank: int, stack: str, folder: str) -> tuple[Any, Any]:
    """What a rank has trained without and with being observed. Sleeps change no number."""
    torch.use_deterministic_algorithms(False)
    if stack == "transformers":
        as_under_torchrun(rank)
    plain = jobs.train(stack, {})
    watch = hooks.start(torch, folder)
    observed = jobs.train(stack, {"data": 0.03} if rank == 1 else {})
    watch.stop()
    if dist.is_initialized():
        dist.barrier()
    return plain, observed


@pytest.mark.parametrize("stack", STACKS)
def test_training_is_the_same_bit_by_bit(stack: str, tmp_path: Path) -> None:
    if stack in ("lightning", "transformers") and importlib.util.find_spec(stack) is None:
        pytest.skip(f"{stack} is not installed")
    for plain, observed in run_ranks(both_ways, 2, stack, str(tmp_path), timeout_s=120):
        assert plain["losses"] == observed["losses"]
        assert plain["weights"].keys() == observed["weights"].keys()
        for name, weights in plain["weights"].items():
            assert torch.equal(weights, observed["weights"][name]), name
    result = conclude(tmp_path)
    assert (result["slow"]["rank"], result["slow"]["part"]) == (1, "data"), result["text"]
    assert result["steps"] == (jobs.STEPS // 2 if stack == "accumulated" else jobs.STEPS)
    told = json.loads((tmp_path / "ranks/0/rank0.json").read_text())
    assert told["stack"] == ("FSDP2" if stack == "fsdp2" else "DDP")
    assert not told["note"]


def test_a_script_of_two_ranks_is_observed_from_its_command_line(tmp_path: Path) -> None:
    said = run("-m", "dynamix.observe", "--out", str(tmp_path / "run"), str(jobs.__file__), "ddp", "backward", "1")
    assert "Rank 1 holds the job back" in said
    assert "backward pass" in said
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["rank"], result["part"], result["missing"], result["unfinished"]) == (1, "backward", [], [])


def test_a_launcher_is_observed_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/sitecustomize.py").write_text("import sys; sys.theirs = True")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "theirs"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    checked = "import runpy, sys; assert sys.theirs; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    said = io.StringIO()
    command = [*launcher, sys.executable, "-c", checked, str(jobs.__file__), "ddp", "forward", "0"]
    result = observe(command, out=tmp_path / "run", every_s=2.0, echo=said)
    assert (result["exit_code"], result["rank"], result["part"]) == (0, 0, "forward"), said.getvalue()
    assert "Rank 0 holds the job back" in said.getvalue()
    again = CliRunner().invoke(app, ["observe", "--read", str(tmp_path / "run")])
    assert again.exit_code == 0
    assert again.output == result["text"]


def test_a_command_that_trains_nothing_says_so(tmp_path: Path) -> None:
    said = io.StringIO()
    result = observe([sys.executable, "-c", "raise SystemExit(3)"], out=tmp_path / "run", echo=said)
    assert (result["exit_code"], result["text"]) == (3, "")
    assert "holds no observed steps" in said.getvalue()
    refused(ConfigError, "a program that can be started", observe, ["/no/such/program"], out=tmp_path / "other")
    refused(ConfigError, "every=0", observe, ["true"], every_s=0.0)


def run(*arguments: str, ranks: int = 2) -> str:
    """`python ARGUMENTS` on every rank; their output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    usual = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    started = []
    for rank in range(ranks):
        of_rank = {"MASTER_PORT": port, "WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen([sys.executable, *arguments], env={**usual, **of_rank}, **pipes))
    try:
        output = "".join(job.communicate(timeout=120)[0] for job in started)
    finally:
        for job in started:
            job.kill()
    assert not any(job.returncode for job in started), output[-4000:]
    return output


def test_a_signal_reaches_the_job_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    job = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(9)); print('up', flush=True); time.sleep(60)"
    script = f"from dynamix.observe.run import observe; import sys; r = observe([sys.executable, '-c', {job!r}], "
    script += f"out={str(tmp_path / 'run')!r}); sys.exit(r['exit_code'])"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as wrapper:
        assert wrapper.stdout.readline() == b"up\n"
        wrapper.terminate()
        assert wrapper.wait(30) == 9


def test_what_cannot_be_observed_trains_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "script.py").write_text("import torch; print('trained', torch.ones(1).item())")
    command = [sys.executable, "-m", "dynamix.observe", "--out"]
    environment = {**os.environ, "DYNAMIX_OBSERVE_STEPS": "1e6"}
    for folder in ("file/below", "run"):
        line = [*command, str(tmp_path / folder), str(tmp_path / "script.py")]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=environment, check=True)
        assert "trained 1.0" in done.stdout
        assert ("runs unobserved" if folder == "file/below" else "is no whole number") in done.stderr

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

import dynamix
from dynamix.cli.app import app
from dynamix.errors import ConfigError
from dynamix.observe import __main__ as observe_main
from dynamix.observe import hooks
from dynamix.observe.run import conclude, observe
from tests.integrations.jobs import as_under_torchrun
from tests.observe import jobs
from tests.ranks import run_ranks, run_script
from tests.refused import refused

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]
STACKS = [("accumulated", "compiled", "fsdp2"), ("lightning",), ("transformers",)]  # of a launch each
MAIN = Path(observe_main.__file__)


def both_ways(rank: int, stacks: tuple[str, ...], folder: str) -> list[tuple[Any, Any]]:
    """What a rank has trained without and with being observed. Sleeps change no number."""
    told = []
    for stack in stacks:
        torch.use_deterministic_algorithms(False)
        if stack in ("lightning", "transformers"):
            as_under_torchrun(rank)
        plain = jobs.train(stack, {})
        watch = hooks.start(torch, f"{folder}/{stack}")
        observed = jobs.train(stack, {"data": 0.03} if rank == 1 else {})
        watch.stop()
        if dist.is_initialized():
            dist.barrier()
        told.append((plain, observed))
    return told


@pytest.mark.parametrize("stacks", STACKS, ids=", ".join)
def test_training_is_the_same_bit_by_bit(stacks: tuple[str, ...], tmp_path: Path) -> None:
    for stack in {"lightning", "transformers"} & {*stacks}:
        if importlib.util.find_spec(stack) is None:
            pytest.skip(f"{stack} is not installed")
    for told in run_ranks(both_ways, 2, stacks, str(tmp_path), timeout_s=120, frameworks=len(stacks) == 1):
        for stack, (plain, observed) in zip(stacks, told, strict=True):
            assert plain["losses"] == observed["losses"], stack
            assert plain["weights"].keys() == observed["weights"].keys()
            for name, weights in plain["weights"].items():
                assert torch.equal(weights, observed["weights"][name]), (stack, name)
    for stack in stacks:
        result = conclude(tmp_path / stack)
        assert (result["slow"]["rank"], result["slow"]["part"]) == (1, "data"), result["text"]
        assert result["steps"] == (jobs.STEPS // 2 if stack == "accumulated" else jobs.STEPS)
        told = json.loads((tmp_path / stack / "ranks/0/rank0.json").read_text())
        assert told["stack"] == ("FSDP2" if stack == "fsdp2" else "DDP")
        assert (told["host"], told["gpus"], told["controller"], told["note"]) == (socket.gethostname(), "", False, "")


def under_a_controller(rank: int, folder: str) -> None:
    watch = hooks.start(torch, folder)
    controller = dynamix.Controller("static", jobs.BATCH)
    data = jobs.Samples({"data": 0.01 * rank}, 20 * jobs.BATCH)
    net = torch.nn.Linear(20, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model = controller.wrap(torch.nn.parallel.DistributedDataParallel(net), optimizer)
    for x, y in torch.utils.data.DataLoader(data, batch_sampler=controller.batch_sampler(data, seed=0)):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)
    watch.stop()
    controller.close()


def test_a_job_under_a_controller_gets_no_advice_for_plain_ddp(tmp_path: Path) -> None:
    run_ranks(under_a_controller, 2, str(tmp_path))
    result = conclude(tmp_path)
    assert result["gains"]["best"] is None
    assert "This job uses dynamix.Controller already" in result["text"]
    assert not any(said in result["text"] for said in ("plain DDP,", "Predicted", "policy='goodput'"))
    assert result["rank"] == 1


def test_a_script_of_two_ranks_is_observed_from_its_command_line(tmp_path: Path) -> None:
    said = run_script(MAIN, ["--out", str(tmp_path / "run"), str(jobs.__file__), "ddp", "backward", "1"], ranks=2)
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
    assert again.output.split() == result["text"].split()
    assert all(len(line) <= 110 or line.startswith("    ") for line in again.output.splitlines())  # but commands


def test_a_command_that_trains_nothing_says_so(tmp_path: Path) -> None:
    said = io.StringIO()
    result = observe([sys.executable, "-c", "raise SystemExit(3)"], out=tmp_path / "run", echo=said)
    assert (result["exit_code"], result["text"]) == (3, "")
    assert "holds no observed steps" in said.getvalue()
    refused(ConfigError, "a program that can be started", observe, ["/no/such/program"], out=tmp_path / "other")
    refused(ConfigError, "every=0", observe, ["true"], every_s=0.0)


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
    (tmp_path / "both.py").write_text(
        "import os; from dynamix.observe.__main__ import main\n"
        "main(['--out', 'file/below', 'script.py'])\n"
        "os.environ['DYNAMIX_OBSERVE_STEPS'] = '1e6'\n"
        "main(['--out', 'run', 'script.py'])\n"
    )
    said = run_script(tmp_path / "both.py", folder=tmp_path)
    assert said.count("trained 1.0") == 2
    assert "runs unobserved" in said
    assert "is no whole number" in said

"""Live peers: the task they get is the workload's, plain DDP really runs on emulated hosts, absent ones are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn.utils import parameters_to_vector

from dynamix.errors import ConfigError
from dynamix.events.run_folder import RunFolder
from dynamix_lab.emulator import load_scenario
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.runs import AGAIN
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.peers import environments, suite
from dynamix_lab.peers.environments import Environment, prepare, requirements
from dynamix_lab.peers.jobs import job
from dynamix_lab.peers.kinds import KINDS, PEERS, Peer, rate_of, split_name, trials
from dynamix_lab.peers.launch import JOBS, Contender, Launch
from dynamix_lab.peers.portable import check_portable, described
from dynamix_lab.peers.report import best_of, ratios_between
from dynamix_lab.peers.suite import PeersPlan, PeersSuite
from dynamix_lab.tasks import make_workload
from tests.refused import refused

OURS = Environment(Path(sys.executable), {"torch": torch.__version__})


@pytest.fixture
def two_hosts(tmp_path: Path) -> str:
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump({"name": "two", "hosts": [{"cpu": 0.9}, {"cpu": 0.6}]}))
    return str(path)


class Stands:
    """As much of an emulation as a launch's settings need."""

    def __init__(self, run_dir: Path) -> None:
        self.scenario, self.run_dir = load_scenario("even"), run_dir


def test_a_peer_trains_the_workloads_model_from_its_weights_on_its_data(tmp_path, monkeypatch) -> None:
    workload = make_workload("mnist1d")
    settings = PeersPlan(quick=True).launch("ddp-256", 0)
    hosts, folder = Stands(tmp_path), RunFolder("x", tmp_path / "run")
    who = Contender.peer("ddp-256", OURS.python, hosts.scenario)
    launch = Launch(who, settings, 0, workload, hosts, folder, Display(target=1.0), [])
    (tmp_path / "config.json").write_text(json.dumps(launch.config(tmp_path)))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    task = job.Task(str(tmp_path / "config.json"))
    model, theirs = workload.make_model(0), task.model()
    assert repr(theirs) == repr(model)
    assert torch.equal(parameters_to_vector(theirs.parameters()), parameters_to_vector(model.parameters()))
    data = workload.make_data(0, train=settings.train_samples(), test=settings.test_samples()).train
    assert torch.equal(task.data.inputs, data.inputs)
    assert torch.equal(task.data.targets, data.targets)
    logits, targets = model(task.data.inputs[:8]), task.data.targets[:8]
    assert torch.equal(task.loss(logits, targets), workload.loss(logits, targets))
    assert task.share == 64
    ours, other = workload.make_optimizer(model.parameters()), task.optimizer(theirs.parameters())
    assert {k: v for k, v in other.param_groups[0].items() if k != "params"} == {
        k: v for k, v in ours.param_groups[0].items() if k != "params"
    }


@pytest.mark.parametrize("name", ["mnist1d", "teacher-classes"])
def test_a_network_is_made_again_from_its_description_and_its_weights(name: str) -> None:
    workload = make_workload(name)
    check_portable(workload)
    model = workload.make_model(3)
    again = job.built(json.loads(json.dumps(described(model))))
    assert repr(again) == repr(model)
    again.load_state_dict(model.state_dict())
    inputs = workload.make_data(0, train=20, test=10).train.inputs
    assert torch.equal(again(inputs), model(inputs))


def test_layers_keep_their_arguments_and_what_no_description_holds_is_refused() -> None:
    conv = nn.Conv2d(1, 2, (3, 5), padding="same")
    for layer in (nn.Linear(2, 3, bias=False), conv, nn.BatchNorm1d(4), nn.Dropout(0.3)):
        again = job.built(json.loads(json.dumps(described(layer))))
        assert repr(again) == repr(layer)
        assert again.state_dict().keys() == layer.state_dict().keys()
    named = nn.Sequential(OrderedDict(first=nn.Linear(2, 2)))
    workload = replace(make_workload("teacher"), make_model=lambda seed: named)
    refused(ConfigError, "cannot be read off", check_portable, workload)


def test_jobs_are_read_by_an_interpreter_that_has_no_dynamix() -> None:
    script = (
        "import importlib.abc, sys\n"
        "class No(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        assert not name.startswith('dynamix'), name\n"
        "sys.meta_path.insert(0, No())\n"
        "import jobs.ddp, jobs.adaptdl, jobs.hivemind, jobs.torchft\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(JOBS.parent)}
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=60, env=environment)


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ddp_trains_beside_static_an_absent_peer_and_a_failing_one_are_named_and_nothing_is_run_twice(
    two_hosts, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(suite, "commit", lambda: "one")  # a commit during the test is none of its business
    found = {"ddp": OURS, "adaptdl": "pip cannot install it: no network", "hivemind": OURS}
    rows = {"policies": ("static",), "peers": ("ddp", "adaptdl", "hivemind")}
    plan = PeersPlan(scenario=two_hosts, quick=True, mechanism="duty-cycle", **rows)
    folder = RunFolder("peers", tmp_path / "run")
    result = run_suite(PeersSuite(plan, folder, Display(target=0.15), found), folder)
    assert not result["arrived"]
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    ddp, static = result["policies"]["ddp"], result["policies"]["static"]
    assert ddp["steps"] == static["steps"] == [16]
    assert ddp["batch_sizes"] == [[256, 256]]
    assert len(ddp["curve"][0]) > 1
    assert all(0 <= score <= 1 for _, _, score in ddp["curve"][0])
    assert result["absent"] == {"adaptdl": "pip cannot install it: no network"}
    assert [f["peer"] for f in result["failures"]] == ["hivemind"], "it is not installed beside dynamix"
    assert "No module named 'hivemind'" in result["failures"][0]["reason"]
    assert result["ratios"]["hivemind/static"]["median"] > 1, "counts as censored, is not dropped"
    assert "| adaptdl | absent |" in (tmp_path / "run" / "table.md").read_text()
    folder = RunFolder("peers", tmp_path / "run", resume=True)
    again = run_suite(PeersSuite(replace(plan, peers=("ddp",)), folder, Display(target=0.15), found), folder)
    assert again["policies"] == {name: result["policies"][name] for name in ("static", "ddp")}


class Said:
    """A rank's line to the parent, which answers when it is told to."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.stops = False

    def send(self, kind: str, **fields: Any) -> None:
        self.said.append({"kind": kind, **fields})

    def receive(self, timeout_s: float | None = None) -> str | None:
        return "stop" if self.stops else None


def alone(folder: Path, rank: int, *, max_steps: int) -> Any:
    """As much of a task of two ranks as a run needs."""
    board = folder / "board"
    if not board.exists():
        board.write_bytes(bytes(8 * (1 + 2 * 2)))
    config = {"board": str(board), "snapshot_samples": 8, "max_steps": max_steps, "snapshots": str(folder)}
    return SimpleNamespace(config=config, rank=rank, world_size=2, name="x", line=None if rank else Said())


def test_static_comes_first_and_last_and_everybody_else_in_turn() -> None:
    plan = PeersPlan(seeds=4, policies=("static", "dynamix"), peers=("ddp", "adaptdl", "hivemind"))
    orders = [plan.order(seed, plan.peers) for seed in range(4)]
    assert all(order[0] == "static" and order[-1] == AGAIN for order in orders)
    assert {order[1] for order in orders} == {"dynamix", "ddp", "adaptdl", "hivemind"}


def test_ratios_count_who_did_not_arrive_as_twice_statics_time() -> None:
    times_s = {"static": [100.0, None], "dynamix": [50.0, 60.0], "hivemind": [None, 70.0]}
    policies = {name: {"time_to_target_s": taken} for name, taken in times_s.items()}
    found = ratios_between(policies, ["dynamix"])
    assert set(found) == {"dynamix/hivemind"}
    assert found["dynamix/hivemind"]["median"] == pytest.approx(50 / 200)
    assert best_of({}, PEERS) == {}


def test_requirements_are_pinned_and_pip_that_cannot_install_is_a_reason(tmp_path) -> None:
    for name in environments.IMPORTS:
        assert "torch" in requirements(name)
    python = tmp_path / "hivemind" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho ERROR: No matching distribution found for hivemind >&2; echo more; exit 1\n")
    python.chmod(0o755)
    said: list[str] = []
    why = prepare("hivemind", tmp_path, tell=said.append)
    assert isinstance(why, str)
    assert why.startswith("pip cannot install it: ERROR: No matching distribution found for hivemind")
    assert "making its environment" in said[0]


def test_ranks_that_meet_seldom_are_scored_and_end_where_they_have_met(tmp_path) -> None:
    found = {}
    for rank in (1, 0):  # the one ahead first: rank 0's stop must still reach it before the next meeting
        found[rank] = job.Run(alone(tmp_path, rank, max_steps=10), nn.Linear(2, 1), meets_every=4)
    assert found[0].limit == 12, "ends at a meeting"
    ahead, rank0 = found[1], found[0]
    assert all(ahead.goes_on(8 * step, 0.0, [4, 4]) for step in (1, 2, 3, 4, 5, 6, 7))
    assert all(rank0.goes_on(8 * step, 0.0, [4, 4]) for step in (1, 2, 3))
    rank0.line.stops = True
    assert rank0.goes_on(32, 0.0, [4, 4])
    assert [message["step"] for message in rank0.line.said if message["kind"] == "snapshot"] == [4]
    assert all(rank0.goes_on(8 * step, 0.0, [4, 4]) for step in (5, 6, 7))
    assert not rank0.goes_on(64, 0.0, [4, 4])
    assert not ahead.goes_on(64, 0.0, [4, 4])


def test_peers_names_are_those_that_are_written() -> None:
    assert [Peer.of(name).name for name in PEERS] == list(PEERS)
    for kind in KINDS:
        names = trials(kind)
        assert len(set(names)) == len(names) == 12, "as many for every kind"
        assert [Peer.of(name).name for name in names] == names
        assert {split_name(name)[0] for name in names} == {kind}
    refused(ConfigError, "ddp-256", Peer.of, "bagua")
    PeersPlan(policies=("static", "static-lr0.2", "dynamix-128-lr0.1")).check()
    assert rate_of("dynamix-128-lr0.1") == 0.1

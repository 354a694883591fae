"""A controller's state: one schema, checked as a whole before anything of it is applied."""

from __future__ import annotations

import copy
import io
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.stateful import Stateful

import dynamix
from dynamix.data import Allocations
from dynamix.errors import ConfigError, StateError
from dynamix.policies import make_policy
from dynamix.runtime.config import JobConfig
from dynamix.runtime.facts.job_facts import JobFacts
from dynamix.runtime.facts.progress import Progress
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.state.packing import checksum, pack, unpack
from dynamix.runtime.state.resume import Division
from dynamix.runtime.state.saving import JobState
from dynamix.window import Bounds, Window
from tests.ranks import run_ranks
from tests.refused import refused
from tests.runtime.jobs import Training, adaptive, classes

DATA = classes(300)


def job(policy: Any = "goodput", **options: Any) -> tuple[dynamix.Controller, Any, Any]:
    """A controller with its sampler and one step, `train(steps)`, that returns the indices trained on."""
    made = Training(adaptive(policy, **{"batch_size": 8, **options}), DATA)
    made.controller.scheduler(torch.optim.lr_scheduler.StepLR(made.optimizer, 5))

    def train(steps: int | None = None) -> list[int]:
        seen: list[int] = []
        for batch in itertools.islice(made.sampler, steps):
            made.train(*DATA[batch])
            seen += batch
        return seen

    return made.controller, made.sampler, train


def saved(policy: Any = "goodput", steps: int = 9, **options: Any) -> dict[str, Any]:
    controller, _, train = job(policy, **options)
    train(steps)
    return controller.state_dict()


def without_clock(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "ranks": None, "checksum": None}


@pytest.mark.parametrize("policy", ["static", "dynamix", "stigmergic", "lb_bsp", "pollux"])
def test_a_state_is_plain_has_the_same_keys_and_loads_to_an_equal_one(policy: str, tmp_path: Path) -> None:
    state = saved(policy)
    torch.save(state, tmp_path / "state.pt")
    back = torch.load(tmp_path / "state.pt", weights_only=True)
    controller, _, _ = job(policy)
    assert controller.state_dict().keys() == state.keys()
    controller.load_state_dict(back)
    again = controller.state_dict()
    for name in ("policy", "schedules", "hooks", "progress", "source", "ledger_sizes", "ledger_rounds"):
        assert checksum({"": again[name]}) == checksum({"": state[name]}), name
    assert "unused" not in state["source"]


def test_sizes_in_the_state_are_of_rounds() -> None:
    state = saved(accumulate=2, batch_size=4, policy="static")
    assert (state["accumulate"], state["ledger_sizes"], state["base_batch"]) == (2, [[8]], 8)
    assert (state["source"]["rounds"], state["source"]["position"]) == (4, 32)
    controller, sampler, train = job("static", accumulate=4, batch_size=2)
    controller.load_state_dict(state)
    assert (sampler.consumed, controller.batch_sizes.tolist()) == (16, [8])
    assert len(train()) == 300 - 32


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"schema": 1, "world_size": 1, "counters": [0, 0, 0, 0]}, r"schema 1; this version reads 2"),
        ({"schema": 3, "version": "9"}, "schema 3, saved by dynamix 9"),
        (None, "not a dict"),
    ],
)
def test_a_state_of_another_version_is_refused_by_name(state: Any, said: str) -> None:
    refused(StateError, said, job()[0].load_state_dict, state)


def with_cuda(ranks: Any, found: Any) -> Any:
    """The parts of ranks, with other random states of CUDA devices."""
    return {0: {**ranks[0], "rng": {**ranks[0]["rng"], "cuda": found}}}


def notebook(ranks: Any, before: list[float]) -> Any:
    """The parts of ranks, with other figures of the window before."""
    return {0: {**ranks[0], "recorder": {**ranks[0]["recorder"], "before": {"loss": before}}}}


CHANGES: list[tuple[str, Any]] = [
    ("source.taken", lambda s: s["source"].update(position=s["source"]["position"] - 7)),
    ("source.position", lambda s: s["source"].update(position=10**6)),
    ("source.taken", lambda s: s["source"].update(taken=[1, 2])),
    ("source.unused", lambda s: s["source"].update(unused=[-1])),
    (r"Averaging\(early=True\), removed", lambda s: s["source"].update(unused=[1])),
    ("ledger_sizes", lambda s: s.update(ledger_sizes=[[0]])),
    ("ledger_rounds", lambda s: s.update(ledger_rounds=[10**9])),
    ("base_batch", lambda s: s.update(base_batch="8")),
    ("progress.steps", lambda s: s["progress"].update(steps=-1)),
    ("noise_scale", lambda s: s["noise_scale"].update(mass=float("nan"))),
    ("policy", lambda s: s.update(policy=pack({"model": {}}))),
    ("policy", lambda s: s.update(policy=("{", (), ()))),
    ("schedules", lambda s: s.update(schedules=pack([{"samples": 1}]))),
    ("random", lambda s: s.update(ranks=pack({0: {**unpack(s["ranks"])[0], "rng": {}}}))),
    ("cuda", lambda s: s.update(ranks=pack(with_cuda(unpack(s["ranks"]), torch.zeros(3, 2))))),
    ("hooks", lambda s: s.update(hooks=pack([1]))),
    ("recorder.before.loss", lambda s: s.update(ranks=pack(notebook(unpack(s["ranks"]), [10**400, 1.0])))),
    ("missing or unknown keys", lambda s: s.update(extra=1)),
    ("seed=9", lambda s: s["source"].update(seed=9)),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_what_is_wrong_is_named_and_nothing_is_applied(name: str, change: Any) -> None:
    state = copy.deepcopy(saved())
    change(state)
    controller, _, train = job()
    train(3)
    before = without_clock(controller.state_dict())
    if name != "missing or unknown keys":
        refused(StateError, "checksum differs", controller.load_state_dict, state)
    state["checksum"] = checksum(state)
    refused(StateError, name, controller.load_state_dict, state)
    assert repr(without_clock(controller.state_dict())) == repr(before)


class Fragile:
    """A policy that cannot be copied, and one day fails in the middle of loading."""

    def __init__(self, name: str) -> None:
        self.lock, self.name, self.windows, self.fails = threading.Lock(), name, 0, False

    def decide(self, window: Window, bounds: Bounds) -> Any:
        self.windows += 1
        return window.batch_size

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "windows": self.windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.name = state["name"]
        if self.fails:
            raise RuntimeError("no room on its disk")
        self.windows = state["windows"]


def test_a_policy_that_fails_to_load_is_named_and_nothing_is_applied() -> None:
    state, policy = saved(Fragile("saved")), Fragile("mine")
    controller, _, train = job(policy)
    train(3)
    before = without_clock(controller.state_dict())
    policy.fails = True
    with pytest.raises(StateError, match=r"Fragile raised RuntimeError.*no room on its disk.*nothing"):
        controller.load_state_dict(state)
    assert repr(without_clock(controller.state_dict())) == repr(before)
    policy.fails = False
    controller.load_state_dict(state)
    assert (policy.name, policy.windows, controller.samples_seen) == ("saved", 4, 72)


@pytest.mark.parametrize("policy", ["goodput", "dynamix", "pollux"])
def test_what_a_policy_does_not_know_is_refused_also_by_those_of_the_lab(policy: str) -> None:
    controller, _, train = job(policy)
    train(5)
    state = controller.state_dict()
    state["policy"] = pack({**unpack(state["policy"]), "x": 1})
    state["checksum"] = checksum(state)
    with pytest.raises(StateError, match="has entries that the policy does not know"):
        controller.load_state_dict(state)


class Stubborn(Fragile):
    """One that cannot be put back either."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.name += "?"
        raise RuntimeError("never")


def test_what_cannot_be_put_back_is_said() -> None:
    state = saved(Fragile("saved"))
    controller, _, _ = job(Stubborn("mine"))
    with pytest.raises(StateError, match=r"Stubborn could not be put back.*make a new one"):
        controller.load_state_dict(state)
    assert controller.samples_seen == 0


class FragileSchedule(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict["last_epoch"]:
            raise RuntimeError("no room on its disk")


class Summing:
    """The state of a communication hook that fails to load where `fails` is set."""

    fails = False

    def __init__(self) -> None:
        self.calls, self.kept = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        self.kept.copy_(state["kept"])
        if self.fails and self.calls:
            raise RuntimeError("no room on its disk")


def _summing(state: Summing, bucket: Any) -> Any:
    state.calls += 1
    state.kept += 1
    return allreduce_hook(dist.group.WORLD, bucket)


def _hooked(rank: int, culprit: str) -> list[Any]:
    """A load that fails in the second of three objects of the user's, after which the job goes on."""

    def made() -> tuple[Training, Summing]:
        job, hook_state = Training(adaptive("goodput"), DATA, hook=_summing, hook_state=(state := Summing())), state
        kind = FragileSchedule if culprit == "FragileSchedule" else torch.optim.lr_scheduler.StepLR
        job.controller.scheduler(kind(job.optimizer, 2), nominal_batch_size=16)
        return job, hook_state

    def train(job: Training, steps: int) -> None:
        for _, batch in zip(range(steps), job.sampler, strict=False):
            job.backward(*DATA[batch])
            job.finish()

    first, _ = made()
    train(first, 5)
    state = first.controller.state_dict()
    job, hook_state = made()
    second = job.controller
    Summing.fails = culprit == "Summing"
    before = without_clock(second.state_dict())
    try:
        second.load_state_dict(state)
        said = "nothing"
    except StateError as error:
        said = str(error)
    same = repr(without_clock(second.state_dict())) == repr(before)
    Summing.fails = False
    train(job, 2)
    dist.barrier()  # the last step makes groups: a rank that ends meanwhile would break another's connecting
    return [said, same, hook_state.calls, hook_state.kept.tolist(), second.samples_seen]


CULPRITS = ("Summing", "FragileSchedule")


def _each_hooked(rank: int) -> list[list[Any]]:
    return [_hooked(rank, culprit) for culprit in CULPRITS]


@pytest.mark.multiproc
def test_an_object_that_fails_to_load_leaves_the_others_as_they_were() -> None:
    for told in run_ranks(_each_hooked, 2, timeout_s=90):
        for culprit, (said, same, calls, kept, samples) in zip(CULPRITS, told, strict=True):
            assert f"{culprit} raised RuntimeError('no room on its disk')" in said
            assert same
            assert (calls, kept, samples) == (0, [0.0, 0.0], 32)  # the hook is not called in the first two steps


def test_parts_nested_too_deeply_are_refused() -> None:
    deep: Any = 1
    for _ in range(2000):
        deep = [deep]
    refused(StateError, "containers in each other", pack, deep)
    refused(StateError, "damaged", unpack, ("[" * 100_000 + "]" * 100_000, (), ()))
    refused(StateError, "containers in each other", checksum, {"a": deep})
    for _ in range(100_000):
        deep = {"": deep}
    refused(StateError, "has schema", job()[0].load_state_dict, {"schema": deep})


def wide(policy: str, workers: int) -> JobState:
    """The state of a job of so many workers, its policy having seen windows."""
    made, rng = make_policy(policy), np.random.default_rng(0)
    bounds = Bounds.of(workers, 1, 512)
    sizes = np.full(workers, 64)
    for step in range(1, 9):
        compute = (0.05 + 0.001 * sizes * (1 + rng.random(workers))) * (1 + 0.05 * rng.random(workers))
        known = {"wait": compute.max() - compute, "communication": 0.02, "noise": 9e4, "signal": 1.0, "steps": 10.0}
        known |= {"loss_change": rng.normal(size=workers), "accuracy_change": rng.normal(size=workers)}
        sizes = np.asarray(made.decide(Window.of(sizes, compute=compute, compute_std=0.01, step=step, **known), bounds))
    division = Division(0, JobFacts(JobConfig(workers, "static", 64, "adaptive")), Allocations(sizes))
    return JobState(division, made, Progress(), Recorder(torch.device("cpu")), peers=False)


def test_a_state_of_1024_workers_is_at_most_1_mb() -> None:
    file = io.BytesIO()
    torch.save(wide("dynamix", 1024).save(), file)
    assert file.tell() <= 1_000_000


def _ranks(rank: int, folder: str) -> list[Any]:
    def made() -> Training:
        return Training(adaptive("static", interval=50), DATA)

    job = made()
    controller = job.controller
    torch.manual_seed(50 + rank)
    for batch in itertools.islice(job.sampler, 3):
        job.train(*DATA[batch])
    own, gathered, drawn = controller.state_dict(), controller.state_dict(gather=True), torch.get_rng_state()
    wanted, found = unpack(gathered["ranks"])[rank]["recorder"], list[Any]()
    for state in (own, gathered):
        given = [state]
        dist.broadcast_object_list(given, 0)  # frameworks that keep rank 0's state only
        fresh = made()
        fresh.controller.load_state_dict(given[0])
        mine = unpack(fresh.controller.state_dict()["ranks"])[rank]["recorder"]
        found.append((mine == wanted, mine["steps"], bool(mine["series"])))
        next(iter(fresh.loader))
        found.append(torch.equal(torch.get_rng_state(), drawn))
    assert isinstance(controller, Stateful)
    dcp.save({"controller": controller}, checkpoint_id=Path(folder) / "at")
    fresh = made().controller
    dcp.load({"controller": fresh}, checkpoint_id=Path(folder) / "at")
    return [*found, fresh.samples_seen]


def test_each_rank_gets_its_own_notebook(tmp_path: Path) -> None:
    first, second = run_ranks(_ranks, 2, str(tmp_path))
    assert first == [(True, 3, True), True, (True, 3, True), True, 48]
    assert second == [(False, 3, False), False, (True, 3, True), True, 48]


def test_a_replay_passes_the_projection(tmp_path: Path) -> None:
    controller, _, train = job("noise_scale", max_batch_size=64, events=tmp_path / "e.jsonl")
    train(3)
    controller.close()
    text = (tmp_path / "e.jsonl").read_text().splitlines()[0]
    event = json.loads(text) | {"decision": "new", "allocation": [200], "from_step": 4}
    (tmp_path / "r.jsonl").write_text(json.dumps(event) + "\n")
    controller, _, train = job("static", max_batch_size=16, replay=tmp_path / "r.jsonl")
    train()
    assert controller.batch_sizes.tolist() == [16]
    for broken in ({"allocation": [1.5]}, {"from_step": None}, {"decision": "often"}, {"window_index": "1"}):
        (tmp_path / "r.jsonl").write_text(json.dumps(event | broken) + "\n")
        with pytest.raises(StateError, match=next(iter(broken))):
            job("static", replay=tmp_path / "r.jsonl")
    (tmp_path / "r.jsonl").write_text(json.dumps(event | {"allocation": [8, 8]}) + "\n")
    refused(ConfigError, "2 workers", job, "static", replay=tmp_path / "r.jsonl")
    for foreign in (b"", b'{"schema":2,"window_index":0', b"\n\n", b'{"loss": 1.0}\n', b"a\n1 0.5\n", b"PK\x00\n\xff"):
        (tmp_path / "notes").write_bytes(foreign)
        refused(StateError, "notes", job, "static", replay=tmp_path / "notes")
    refused(ConfigError, "events=.*notes.*left as it is", job, "static", events=tmp_path / "notes")


@pytest.mark.parametrize(
    ("theirs", "mine", "said"),
    [
        (
            "lb_bsp",
            "goodput",
            r"is of the policy lb_bsp, and this job has goodput: write Controller\('lb_bsp', \.\.\.\)",
        ),
        ("guarded:goodput", "lb_bsp", r"is of the policy goodput, and this job has lb_bsp"),
        ("pollux", "goodput", r"is of the policy pollux, and this job has goodput"),
        ("lb_bsp", "static", r"is of the policy lb_bsp, and this job has Static"),
    ],
)
def test_a_state_of_another_policy_is_called_by_its_name(theirs: str, mine: str, said: str) -> None:
    state, (controller, _, _) = saved(theirs), job(mine)
    with pytest.raises(StateError, match=f"{said}.*policy=False\\) to begin with") as caught:
        controller.load_state_dict(state)
    assert "0.1" not in str(caught.value)
    controller.load_state_dict(state, policy=False)


@pytest.mark.parametrize("options", [{}, {"interval": "auto"}, {"guard": True}])
@pytest.mark.parametrize("mine", ["dynamix", "lb_bsp", "goodput"])
def test_a_job_saved_under_a_policy_that_remembers_nothing_goes_on_under_any(mine: str, options: Any) -> None:
    state, (controller, _, _) = saved("static", **options), job(mine)
    controller.load_state_dict(state)
    assert controller.samples_seen == state["progress"]["samples"] > 0


@pytest.mark.parametrize(
    ("theirs", "mine", "said"),
    [
        (
            {"batch_size": 8},
            {"batch_size": 32},
            r"batch of 8 samples.* asks for 32 \(batch_size=32.*Write batch_size=8,",
        ),
        ({"batch_size": 8}, {"batch_size": 8, "accumulate": 2}, r"asks for 16 \(batch_size=8, accumulate=2"),
        ({"batch_size": 4, "accumulate": 3}, {"batch_size": 4}, r"Write batch_size=4, accumulate=3"),
    ],
)
def test_a_state_that_overrides_the_batch_size_says_so(theirs: Any, mine: Any, said: str) -> None:
    state = dynamix.Controller("goodput", **theirs).state_dict()
    with pytest.warns(RuntimeWarning, match=said):
        dynamix.Controller("goodput", **mine).load_state_dict(state)


def test_a_state_of_the_same_batch_in_other_pieces_says_nothing() -> None:
    state = dynamix.Controller("goodput", 8).state_dict()
    dynamix.Controller("goodput", 4, accumulate=2).load_state_dict(state)

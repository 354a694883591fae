"""What suites share: runs and their scores, events, a channel, processes, and the reference of device hosts."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from dynamix.errors import ConfigError, StateError, WorkerLostError
from dynamix.events.records import EventLog, read_events
from dynamix.events.run_folder import RunFolder
from dynamix.policies import make_policy
from dynamix.window import Bounds, Window
from dynamix_lab.emulator import Scenario, host_speeds, load_scenario
from dynamix_lab.harness.channel import JobChannel, Listener
from dynamix_lab.harness.folder import adopt_events
from dynamix_lab.harness.processes import in_processes
from dynamix_lab.harness.reference import Reference, references
from dynamix_lab.harness.runs import PolicyRun, policy_facts, summarise
from dynamix_lab.harness.scoring import Scorer, WeightSnapshot, by_parameters
from dynamix_lab.harness.suite import Cell, Context, Suite, run_suite
from dynamix_lab.tasks import make_workload
from tests.refused import refused


def run(policy, seed, pace_s, *, reaches=True):
    made = PolicyRun(policy, seed, target=0.9)
    for i in range(1, 6):
        score = 0.2 * i if reaches else 0.1
        made.snapshots.append(WeightSnapshot(policy, pace_s * i, i, 100 * i, Path("x"), score))
    made.step_ends_s = [pace_s * i for i in range(1, 6)]
    window = Window.of([64, 64], compute=[1.0, 2.0], wait=[1.0, 0.0], communication=0.5, data=0.0, steps=5, step=5)
    made.events = [
        {"window": window.to_dict(), "allocation": [96, 32], "from_step": 3, "decision": "new"},
        {"window": window.to_dict(), "allocation": [96, 32], "from_step": 5, "decision": "keep"},
    ]
    made.time_s, made.step, made.samples, made.finished = pace_s * 5, 5, 500, True
    made.batch_sizes = [96, 32]
    made.snapshots.append(WeightSnapshot(policy, pace_s * 6, 6, 600, Path("x"), 0.95 if reaches else 0.1))
    return made


def test_pairs_are_matched_by_seed_and_lists_run_over_seeds():
    runs = [run("static", 1, 2.0), run("static", 0, 4.0), run("dynamix", 0, 2.0), run("dynamix", 1, 1.0)]
    summary = summarise(runs)
    assert summary["seeds"] == [0, 1]
    assert summary["policies"]["static"]["time_to_target_s"] == [18.0, 9.0]
    assert summary["ratios"]["dynamix/static"]["median"] == pytest.approx(0.5)
    assert summary["policies"]["static"]["wait_fraction"] == [pytest.approx(0.2)] * 2
    json.dumps(summary, allow_nan=False)


def test_a_run_that_never_arrives_is_null_and_counts_at_twice_statics_time():
    summary = summarise([run("static", 0, 1.0), run("dynamix", 0, 1.0, reaches=False)])
    assert summary["policies"]["dynamix"]["time_to_target_s"] == [None]
    assert summary["ratios"]["dynamix/static"]["median"] == pytest.approx(2.0)
    assert summarise([run("static", 0, 1.0, reaches=False), run("dynamix", 0, 1.0)])["ratios"] == {}


def test_snapshots_are_scored_in_order_and_their_files_removed(tmp_path):
    workload = make_workload("mnist1d")
    data = workload.make_data(0, train=80, test=20)
    seen = []
    scorer = Scorer(by_parameters(workload, data.test), seen.append)
    for step in (1, 2):
        path = tmp_path / str(step)
        flat = [p.detach().reshape(-1) for p in workload.make_model(step).parameters()]
        path.write_bytes(b"".join(f.numpy().tobytes() for f in flat))
        scorer.add(WeightSnapshot("static", 1.0, step, 10, path))
    scorer.wait()
    scorer.add(WeightSnapshot("static", 1.0, 3, 10, tmp_path / "missing"))
    refused(FileNotFoundError, "", scorer.wait)  # an error while scoring reaches the caller
    scorer.close()
    assert [s.step for s in seen] == [1, 2]
    assert all(0 <= s.score <= 1 for s in seen)
    assert list(tmp_path.iterdir()) == []


def test_results_name_the_policy_that_really_runs_as_dynamix(tmp_path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"other")
    shipped, rule, file = (policy_facts(name) for name in ("dynamix", "lb_bsp", str(other)))
    assert shipped["name"] == "shipped"
    assert rule == {"name": "lb_bsp"}
    assert file["sha256"] != shipped["sha256"]


@pytest.fixture
def ends(tmp_path):
    listener = Listener(tmp_path / "link")
    near = JobChannel.connect(tmp_path / "link")
    far = listener.accept(5.0)
    yield near, far
    near.close()
    far.close()
    listener.close()
    assert not (tmp_path / "link").exists()


def test_messages_arrive_whole_and_in_order_from_several_threads(ends):
    near, far = ends
    threads = [threading.Thread(target=lambda i=i: [near.send(str(i), n=n) for n in range(50)]) for i in range(4)]
    for thread in threads:
        thread.start()
    got = [far.receive(5.0) for _ in range(200)]
    for thread in threads:
        thread.join()
    for i in range(4):
        assert [m["n"] for m in got if m["kind"] == str(i)] == list(range(50))
    assert far.receive(0.0) is None


def test_a_vanished_other_end_is_an_error_after_its_last_words(ends):
    near, far = ends
    near.send("last")
    near.close()
    assert far.receive(1.0) == {"kind": "last"}
    with pytest.raises(WorkerLostError):
        far.receive(1.0)


def test_events_of_several_runs_are_gathered_and_labelled(tmp_path):
    folder = RunFolder("demo", tmp_path / "run")
    for name in ("static", "dbs"):
        with EventLog(tmp_path / name) as log:
            log.write(step=1)
        adopt_events(folder, tmp_path / name, policy=name, seed=0)
        assert not (tmp_path / name).exists()
    assert adopt_events(folder, tmp_path / "missing", policy="x") == []
    assert [e["policy"] for e in read_events(folder.path / "events.jsonl")] == ["static", "dbs"]


def test_a_piece_that_is_killed_ends_the_others() -> None:
    # The other piece, which began first, would take longer than a test may.
    refused(WorkerLostError, "killed", list, in_processes(_killed, {"b": (1e3,), "a": (0.0,)}, 2))
    assert not multiprocessing.active_children()


def _killed(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def test_pieces_end_with_whoever_asked_for_them() -> None:
    pieces = in_processes(time.sleep, {"short": (0.0,), "long": (1e3,)}, 2)
    assert next(pieces) == ("short", None)
    pieces.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()


def test_device_hosts_finish_together_with_their_fixed_time() -> None:
    speeds, fixed_ms = np.array([1.0, 0.5]), 20.0
    device = {"fixed_ms": fixed_ms, "per_sample_ms": 1.0}
    scenario = Scenario.model_validate({"hosts": [{"cpu": float(s)} for s in speeds], "device": device})
    window = Window.of([60, 60], compute=[0.1, 0.2], steps=5.0)
    sizes = Reference(scenario, seed=0, clock=lambda: 0.0).decide(window, Bounds.of(2, 1, 512))
    assert sizes.sum() == 120
    took = (fixed_ms + sizes) / speeds
    assert took[0] == pytest.approx(took[1], rel=0.03)


def test_the_reference_follows_the_scenario_at_a_constant_global_batch() -> None:
    now = {"s": 0.0}
    reference = Reference("demo", seed=3, clock=lambda: now["s"])
    window = Window.of([128] * 4, compute=0.2, steps=5)
    for time_s in (1.0, 16.0, 31.0, 46.0):
        now["s"] = time_s
        sizes = reference.decide(window, Bounds.of(4, 8, 512))
        speeds = host_speeds(load_scenario("demo"), time_s, 3)
        assert sizes.sum() == 512
        assert sizes.tolist() == pytest.approx([512 * v / sum(speeds) for v in speeds], abs=1)


def test_a_reference_may_hold_another_global_batch() -> None:
    window = Window.of([128] * 4, compute=0.2, steps=5)
    held = make_policy("reference:256", others=references("demo")).decide(window, Bounds.of(4))
    kept = make_policy("reference", others=references("demo")).decide(window, Bounds.of(4))
    assert (held.sum(), kept.sum()) == (256, 512)
    refused(ConfigError, "reference:NUMBER", make_policy, "reference:much", others=references("demo"))


@dataclass(frozen=True)
class CountPlan:
    names: tuple[str, ...] = ("a", "b", "c")
    factor: int = 2

    def check(self) -> None:
        if self.factor < 1:
            raise ConfigError("factor", self.factor, "1 or more", "choose another")


@dataclass(frozen=True)
class CountSuite(Suite):
    """A cell is the sum of those before it and the factor; cells called "x" are never final."""

    plan: CountPlan
    name: str = "count"
    grows: ClassVar[frozenset[str]] = frozenset({"names"})

    def facts(self) -> dict[str, Any]:
        return {"cluster": "none", "seeds": []}

    def cells(self) -> list[Cell]:
        return [Cell(name) for name in self.plan.names]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        return {"final": cell.key != "x", "value": sum(c["value"] for c in context.found.values()) + self.plan.factor}

    def keeps(self, found: Mapping[str, Any]) -> bool:
        return bool(found["final"])

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        return {"values": {key: cell["value"] for key, cell in cells.items()}}

    def table(self, result: Mapping[str, Any]) -> str:
        return f"{result['values']}\n"


def _resumed(path: Path, plan: CountPlan) -> tuple[dict[str, Any], list[str]]:
    told: list[str] = []
    result = run_suite(
        CountSuite(plan), RunFolder("count", path, resume=True), tell=lambda what, done: told.append(what)
    )
    return result, told


def test_a_result_names_its_command_and_its_plan(tmp_path: Path) -> None:
    result = run_suite(CountSuite(CountPlan()), RunFolder("count", tmp_path / "run"), command="dynamix bench count -x")
    assert result["values"] == {"a": 2, "b": 4, "c": 8}
    assert (result["command"], result["plan"]["factor"]) == ("dynamix bench count -x", 2)
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    host = json.loads((tmp_path / "run" / "run.json").read_text())["host"]
    assert host["memory_bytes"] > 0
    assert len(host["load_average"]) == 3


def test_what_is_final_is_not_run_again_and_cells_may_be_added(tmp_path: Path) -> None:
    run_suite(CountSuite(CountPlan(("a", "x"))), RunFolder("count", tmp_path / "run"))
    result, told = _resumed(tmp_path / "run", CountPlan(("a", "x", "c")))
    assert told == ["x", "c"]
    assert result["values"] == {"a": 2, "x": 4, "c": 8}


def test_another_plan_and_a_damaged_cell_are_refused_and_named(tmp_path: Path) -> None:
    run_suite(CountSuite(CountPlan()), RunFolder("count", tmp_path / "run"))
    refused(
        ConfigError, "plan: factor=3 is not possible: allowed is 2", _resumed, tmp_path / "run", CountPlan(factor=3)
    )
    refused(ConfigError, "factor=0", _resumed, tmp_path / "run", CountPlan(factor=0))
    (tmp_path / "run" / "cells" / "b.json").write_text("{")
    refused(StateError, r"b\.json is damaged", _resumed, tmp_path / "run", CountPlan())


def test_what_ended_before_an_interrupt_is_concluded(tmp_path: Path) -> None:
    def stop(what: str, done: float) -> None:
        if what == "c":
            raise KeyboardInterrupt

    refused(KeyboardInterrupt, "", run_suite, CountSuite(CountPlan()), RunFolder("count", tmp_path / "run"), tell=stop)
    partly = json.loads((tmp_path / "run" / "result.json").read_text())
    assert partly["interrupted"]
    assert partly["values"] == {"a": 2, "b": 4}
    assert "interrupted" not in _resumed(tmp_path / "run", CountPlan())[0]


@dataclass(frozen=True)
class Bound(CountSuite):
    """Bound to something that may change between calls."""

    to: str = "this machine"

    def bound_to(self) -> dict[str, Any]:
        return {"machine": self.to}


def test_a_suite_of_times_is_resumed_only_where_it_began(tmp_path: Path) -> None:
    first = Bound(CountPlan())
    run_suite(first, RunFolder("count", tmp_path / "run"))
    with pytest.raises(ConfigError, match="machine='another'"):
        run_suite(replace(first, to="another"), RunFolder("count", tmp_path / "run", resume=True))

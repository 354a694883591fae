import json
from pathlib import Path

import pytest

from dynamix.window import Window
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.runs import PolicyRun, policy_facts, summarise
from dynamix_lab.harness.scoring import Scorer, WeightSnapshot, by_parameters
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


def test_without_static_arriving_there_is_no_ratio():
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
    scorer.close()
    assert [s.step for s in seen] == [1, 2]
    assert all(0 <= s.score <= 1 for s in seen)
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_scoring_reaches_the_caller(tmp_path):
    workload = make_workload("mnist1d")
    test = workload.make_data(0, train=80, test=20).test
    scorer = Scorer(by_parameters(workload, test), lambda _: None)
    scorer.add(WeightSnapshot("static", 1.0, 1, 10, tmp_path / "missing"))
    refused(FileNotFoundError, "", scorer.wait)
    scorer.close()


def test_a_run_cut_before_its_first_window_can_still_be_shown():
    bare = PolicyRun("static", 0, target=0.9)
    bare.batch_sizes = [128, 128]
    assert summarise([bare])["policies"]["static"]["batch_sizes"] == [[128, 128]]
    Display(target=0.9).update([bare])


def test_results_name_the_policy_that_really_runs_as_dynamix(tmp_path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"other")
    shipped, rule, file = (policy_facts(name) for name in ("dynamix", "lb_bsp", str(other)))
    assert shipped["name"] == "shipped"
    assert rule == {"name": "lb_bsp"}
    assert file["sha256"] != shipped["sha256"]

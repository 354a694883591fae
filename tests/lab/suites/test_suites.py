"""The suites: simulated cells that resume, shares of the attainable cut, and the comparison with the emulator."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError, WorkerLostError
from dynamix.events.run_folder import RunFolder
from dynamix.policies import make_policy
from dynamix.window import Bounds, Window
from dynamix_lab.emulator import load_scenario
from dynamix_lab.harness.launch import Launch, LaunchSettings
from dynamix_lab.harness.processes import in_processes
from dynamix_lab.harness.reference import references
from dynamix_lab.harness.suite import run_suite
from dynamix_lab.suites.changecost import change_cost
from dynamix_lab.suites.fidelity.against import compare, forecast, same_ranking, silent
from dynamix_lab.suites.fidelity.live_costs import SIZES, LiveCosts, _computing, _holding, fit_costs
from dynamix_lab.suites.fidelity.predicted import Predicted, PredictedRun, predict, predict_all, train
from dynamix_lab.suites.fidelity.scenario_env import ScenarioEnv, scenario_world, simulated_hosts
from dynamix_lab.suites.fidelity.suite import lines, run_fidelity
from dynamix_lab.suites.simulated import SimulatedPlan, SimulatedSuite, run_cell, scaling_plan, tta_plan
from dynamix_lab.suites.tta import combine, page, table
from dynamix_lab.tasks import make_workload

SMALL = SimulatedPlan(
    (("affine-slowdowns", 4), ("pai-steady", 2)), ("dbs", "lb_bsp"), seeds=(1,), clusters=6, windows=25
)


def test_a_cell_holds_every_policy_reference_and_the_attainable_cut() -> None:
    cell = run_cell(SMALL, "affine-slowdowns", 4)
    assert set(cell["policies"]) == {"static", "dbs", "lb_bsp", "lagged", "greedy", "hedged"}
    assert cell["policies"]["lagged"]["lagged_over_time"] == 1.0
    assert 0.05 < cell["attainable_cut"] < 0.9
    assert cell["policies"][cell["attained_by"]]["fraction_of_cut"] == pytest.approx(1.0)
    assert 0 < cell["interior_share"] <= 1
    assert cell == run_cell(SMALL, "affine-slowdowns", 4)


def test_a_suite_goes_on_where_it_stopped_and_refuses_another_suites_folder(tmp_path) -> None:
    ran: list[str] = []

    def stop(what: str, done: float) -> None:
        if len(ran) == 1:
            raise KeyboardInterrupt
        ran.append(what)

    folder = RunFolder("test", tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run_suite(SimulatedSuite(SMALL), folder, tell=stop)
    again: list[str] = []
    folder = RunFolder("test", tmp_path / "run", resume=True)
    result = run_suite(SimulatedSuite(SMALL), folder, tell=lambda what, done: again.append(what))
    assert again == ["pai-steady-2"]
    assert result["pairs"] == ["affine-slowdowns-4", "pai-steady-2"]
    assert len(result["policies"]["dbs"]["time_to_target_s"]) == 2
    assert result["ratios"]["lagged/static"]["median"] < 1
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert "| pai-steady-2 |" in (tmp_path / "run" / "table.md").read_text()
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()
    with pytest.raises(ConfigError, match="plan: windows=30"):
        run_suite(SimulatedSuite(dataclasses.replace(SMALL, windows=30)), folder)


def test_suites_name_what_they_run_and_refuse_unknown_names() -> None:
    assert {w for _, w in tta_plan(quick=True).cells} == {8}
    assert max(w for _, w in scaling_plan(quick=False).cells) == 1024
    with pytest.raises(ConfigError, match="family"):
        dataclasses.replace(SMALL, cells=(("nonsense", 4),)).check()
    with pytest.raises(ConfigError, match="policy"):
        dataclasses.replace(SMALL, policies=("nonsense",)).check()


def test_fidelity_prints_held_out_errors_within_their_goal() -> None:
    result = run_fidelity()
    assert result["held_out_step_time"]["jabas"]["inside"]["mean_absolute"] <= result["goal"]["mean_absolute"]
    assert any("held out" in line for line in lines(result))


def _scenario(static: list[float], dbs: list[float], dynamix: list[float]) -> dict[str, object]:
    learned = dict.fromkeys(("dynamix", "dynamix-paper", "stigmergic", "guarded:dynamix"), dynamix)
    times = {"static": static, "dbs": dbs, **learned}  # what learned never says what is attainable
    means = {name: np.mean([2 * 100.0 if x is None else x for x in t]) for name, t in times.items()}
    return {
        "policies": {name: {"time_to_target_s": t} for name, t in times.items()},
        "a_a": None,
        "target": 0.9,
        "seeds": list(range(len(static))),
        "ratios": {f"{name}/static": {"median": means[name] / means["static"]} for name in times},
    }


def test_scenarios_weigh_the_same_and_a_share_above_one_is_reported() -> None:
    results = {"a": _scenario([100.0, 100.0], [80.0, 80.0], [60.0, 60.0]), "b": _scenario([50.0], [50.0], [49.0])}
    found = combine(results)
    assert found["ratios"]["dynamix/static"]["median"] == pytest.approx((0.6 * 0.98) ** 0.5)
    assert found["cuts"]["a"]["attainable_cut"] == pytest.approx(0.2)
    assert found["cuts"]["a"]["fraction_of_cut"]["dynamix"] == pytest.approx(2.0)
    assert found["cuts"]["b"]["fraction_of_cut"] == {}
    assert found["policies"]["dynamix"]["time_to_target_s"] == [60.0, 60.0, 49.0]
    assert (found["pairs"], found["target"], found["a_a"]) == ([["a", 0], ["a", 1], ["b", 0]], 0.9, None)
    assert "| a | static | 20 % (dbs)" in table({**found, "scenarios": results}).markdown()
    about = {
        "command": "bench tta",
        "commit": None,
        "seeds": [0],
        "cluster": "emulator",
        "machine": {"cores": 2, "cpu": ""},
    }
    shown = page({**found, **about, "scenarios": results})
    assert "<svg" in shown
    assert 'href="a/report.html"' in shown


def test_the_best_static_size_is_the_bar_and_the_a_a_pairs_are_judged_together() -> None:
    one = _scenario([100.0, 100.0], [80.0, 80.0], [60.0, 60.0])
    one["policies"] |= {
        "static:64": {"time_to_target_s": [75.0, 75.0]},
        "static-again": {"time_to_target_s": [102.0, 104.0]},
    }  # type: ignore[operator]
    found = combine({"a": one})
    cut = found["cuts"]["a"]
    assert (cut["best_static"], cut["attainable_cut"]) == ("static:64", pytest.approx(1 - 80 / 75, abs=1e-4))
    assert cut["over_best_static"]["dynamix"] == pytest.approx(0.8)
    assert found["ratios"]["dynamix/best_static"]["median"] == pytest.approx(0.8)
    assert found["a_a"]["each"] == [1.02, 1.04]
    assert found["a_a"]["within"]


def test_runs_that_never_arrive_count_as_twice_statics_time() -> None:
    found = combine({"a": _scenario([100.0], [None], [50.0])})  # type: ignore[list-item]
    assert found["ratios"]["dbs/static"]["median"] == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="never reached"):
        combine({"a": _scenario([None], [1.0], [1.0])})  # type: ignore[list-item]


COSTS = LiveCosts(
    alpha=0.004,
    beta=0.0002,
    small_share=0.1,
    exchange_s=0.002,
    exchange_per_speed=0.004,
    jitter_s=0.005,
    jitter_sd=0.05,
    together_sd=0.05,
    knots=tuple(np.log(np.linspace(60, 300, 9))),
    samples=200_000.0,
    needed=150_000.0,
    rho=0.3,
    noise_error=0.05,
)


def test_both_balanced_policies_are_predicted_ahead_of_static() -> None:
    times = {
        name: predict(PredictedRun("demo", name, 3), COSTS).time_to_target_s
        for name in ("static", "lb_bsp", "reference")
    }
    assert max(times["reference"], times["lb_bsp"]) < times["static"]


QUICK = LaunchSettings(quick=True)


def test_a_trained_prediction_repeats_itself_and_balance_shortens_its_steps() -> None:
    jobs = [PredictedRun("steady-uneven", name, 3) for name in ("static", "reference", "static")]
    jobs.append(PredictedRun("steady-uneven", "dynamix", 3))
    told: list[float] = []
    found = predict_all(jobs, COSTS, trained=True, tell=lambda what, done: told.append(done), settings=QUICK)
    assert list(found) == list(dict.fromkeys(jobs))
    assert told == sorted(told)
    assert told[-1] == 1.0
    static, reference, dynamix = found.values()
    again = predict_all(jobs[:1], COSTS, trained=True, tell=silent, settings=QUICK)
    assert again == {jobs[0]: static}
    assert reference.step_s < 0.9 * static.step_s
    assert all(3 <= p.steps <= 16 for p in (static, reference, dynamix))


def test_a_trained_prediction_is_configured_as_a_live_run(monkeypatch, tmp_path) -> None:
    made: dict[str, object] = {}

    class Stop(Exception):
        pass

    def cluster(*args: object, **given: object) -> None:
        made.update(given, data=args[3])
        raise Stop

    monkeypatch.setattr("dynamix_lab.suites.fidelity.predicted.VirtualCluster", cluster)
    with pytest.raises(Stop):
        train(PredictedRun("even", "static", 3), COSTS, QUICK)
    workload = make_workload("mnist1d")
    live = Launch(QUICK, 3, workload, None, None, None, [])._config(tmp_path)  # type: ignore[arg-type]
    for name in ("batch_size", "interval", "lr_rule", "seed"):
        assert made[name] == live[name], name
    bounds = made["bounds"]
    assert isinstance(bounds, Bounds)
    assert (bounds.low.tolist(), bounds.high.tolist()) == ([workload.min_batch] * 4, [workload.max_batch] * 4)
    world = made["clusters"]
    assert isinstance(world, ScenarioEnv)
    assert world.clock_s.tolist() == [0.0]
    assert len(made["data"]) == live["train_samples"]  # type: ignore[arg-type]


def test_a_piece_that_fails_or_is_killed_ends_the_others() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        predict_all(
            [PredictedRun("even", "nonsense", 3), PredictedRun("even", "static", 3)],
            COSTS,
            trained=True,
            tell=silent,
            settings=LaunchSettings(),
        )
    # The other piece would take longer than a test may.
    with pytest.raises(WorkerLostError, match="killed"):
        list(in_processes(_killed, {"a": (0.0,), "b": (1e3,)}, 2))
    with pytest.raises(WorkerLostError, match="killed"):
        list(in_processes(_killed, {"b": (1e3,), "a": (0.0,)}, 2))
    assert not multiprocessing.active_children()


def _killed(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def test_deciding_takes_time_of_the_first_host_in_the_step_after_it() -> None:
    env, _ = scenario_world(load_scenario("steady-uneven"), "dynamix", 3, COSTS, interval=1, delay=1)
    free, _ = scenario_world(load_scenario("steady-uneven"), "static", 3, COSTS, interval=1, delay=1)
    assert free.decision_s == 0 < env.decision_s
    env.decision_s = 1.0
    for world in (env, free):
        world.decided()
    assert float(env.advance()[1][0]) > float(free.advance()[1][0]) + 1.0
    assert env.advance()[1][0] < free.advance()[1][0] + 0.5


def test_a_run_is_compared_by_the_training_itself_when_asked(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("dynamix_lab.suites.fidelity.against.fit_costs", lambda folder, results: COSTS)
    asked: list[PredictedRun] = []

    def predicted(
        jobs: list[PredictedRun], costs: LiveCosts, *, trained: bool, tell: object
    ) -> dict[PredictedRun, Predicted]:
        assert trained
        asked.extend(jobs)
        return {job: Predicted(0.25 if job.policy == "static" else 0.20, 90.0, 400) for job in jobs}

    monkeypatch.setattr("dynamix_lab.suites.fidelity.against.predict_all", predicted)
    run = {"time_to_target_s": [90.0], "time_s": [100.0], "steps": [400]}
    never = {**run, "time_to_target_s": [None]}
    part = {"policies": {"static": run, "static-again": run, "dbs": run, "lb_bsp": never}, "seeds": [7]}
    (tmp_path / "result.json").write_text(json.dumps({"scenarios": {"even": part}, "seeds": [7]}))
    found = compare(tmp_path, trained=True, tell=silent)
    assert asked == [PredictedRun("even", "static", 7), PredictedRun("even", "dbs", 7)]
    assert found["scenarios"]["even"]["policies"]["dbs"]["step_error"] == pytest.approx(0.2)
    assert found["worst_step_error"] == pytest.approx(0.2)
    done = CliRunner().invoke(app, ["bench", "fidelity", "--against", str(tmp_path), "--trained"])
    assert "static +0 % +0 % +0 %, dbs -20 % +0 % +0 %; ranking same" in done.output


def test_pieces_end_with_whoever_asked_for_them() -> None:
    pieces = in_processes(time.sleep, {"short": (0.0,), "long": (1e3,)}, 2)
    assert next(pieces) == ("short", None)
    pieces.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()


def test_computing_bends_where_sizes_cost_other_than_a_line_and_nowhere_else() -> None:
    speed, batch = np.meshgrid([0.1, 0.2, 0.4], [16.0, 32.0, 64.0, 128.0, 256.0])
    bend = np.where(batch == 64, 0.9, 1.0)
    line = (0.004 + 0.0002 * batch) / speed**1.2
    _, _, small, left = _computing(batch.ravel(), (line * bend).ravel(), speed.ravel())
    assert np.exp(left)[SIZES == 64] == pytest.approx(0.93, abs=0.04)  # "no bend" has its say too
    assert np.abs(left[SIZES != 64]).max() < 0.05
    assert small == pytest.approx(0.2, abs=0.02)
    straight = _computing(batch.ravel(), line.ravel(), speed.ravel())
    assert straight[:3] == pytest.approx((0.004, 0.0002, 0.2), rel=1e-3)
    assert straight[3] == pytest.approx(np.zeros(len(SIZES)), abs=1e-3)


def test_costs_are_not_read_off_runs_that_choose_the_batch_or_windows_of_an_epoch() -> None:
    def of(policy: str, totals: list[int]) -> list[dict[str, object]]:
        return [{"policy": policy, "seed": 0, "window": {"batch_size": [t - 8, 8]}} for t in totals]

    kept = of("static", [512] * 4) + of("reference:256", [512, 256, 257, 255])
    assert _holding(kept + of("goodput", [512, 256, 200, 190]) + of("short", [512, 512]), 2) == kept


def test_costs_are_found_again_from_windows_of_static_runs(tmp_path) -> None:
    scenario = load_scenario("steady-uneven")
    lines_of: list[str] = []
    epoch: list[str] = []
    for name, size in (("static", 128), ("static:64", 64)):
        cores = np.array([host.cpu for host in scenario.hosts])
        env = ScenarioEnv(scenario, 1000, COSTS, simulated_hosts(COSTS, cores, np.array([512])))
        window = env.reset()
        for _ in range(40):
            window = env.step(np.full((1, 4), size))
            one = Window.from_dict({k: v[0] for k, v in window.to_dict().items()})
            event = {
                "schema": 1,
                "policy": name,
                "seed": 0,
                "time_s": float(env.clock_s[0]),
                "samples_seen": 4 * size * env.steps,
            }
            lines_of.append(json.dumps({**event, "window": one.to_dict()}))
            absurd = {**one.to_dict(), "compute": [9.0] * 4, "steps": 46}
            epoch.append(json.dumps({**event, "policy": "dbs", "window": absurd}))
    (tmp_path / "steady-uneven").mkdir()
    (tmp_path / "steady-uneven" / "events.jsonl").write_text("\n".join(lines_of + epoch[:40]) + "\n")
    static = {"time_to_target_s": [100.0], "samples_per_s": [1500.0]}
    result = {"policies": {"static": static}, "seeds": [0]}
    found = fit_costs(tmp_path, {"steady-uneven": result})
    assert found.seconds(np.array([100.0]), np.array([0.3])) == pytest.approx(
        COSTS.seconds(np.array([100.0]), np.array([0.3])), rel=0.05
    )
    assert found.small_share == pytest.approx(COSTS.small_share, abs=0.05)
    assert found.exchange_s + found.exchange_per_speed / 0.17 == pytest.approx(0.002 + 0.004 / 0.17, rel=0.1)
    assert found.needed == 150_000
    assert found.rho == pytest.approx(COSTS.rho, abs=0.1)
    assert found.noise_error == pytest.approx(COSTS.noise_error, rel=0.3)
    one_size = [line for line in lines_of if '"static"' in line]
    (tmp_path / "steady-uneven" / "events.jsonl").write_text("\n".join(one_size) + "\n")
    with pytest.raises(ConfigError, match="two different"):
        fit_costs(tmp_path, {"steady-uneven": result})


def test_policies_that_a_run_did_not_have_are_predicted_from_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("dynamix_lab.suites.fidelity.against.fit_costs", lambda folder, results: COSTS)
    part = {"policies": {"static": {"time_to_target_s": [90.0], "time_s": [100.0], "steps": [400]}}, "seeds": [0]}
    (tmp_path / "result.json").write_text(json.dumps({"scenarios": {"even": part, "demo": part}, "seeds": [0]}))
    found = forecast(tmp_path, ["static", "reference", "goodput"], seeds=2)
    assert found["ratio"]["static"] == 1.0
    assert found["scenarios"]["demo"]["reference"]["ratio"] < 0.8
    assert found["scenarios"]["even"]["reference"]["ratio"] == pytest.approx(1.0, abs=0.02)
    assert found["scenarios"]["demo"]["goodput"]["error"] >= 0
    with pytest.raises(ConfigError, match="nonsense"):
        forecast(tmp_path, ["nonsense"])
    done = CliRunner().invoke(
        app, ["bench", "fidelity", "--against", str(tmp_path), "--predict", "static,dbs", "--seeds", "1"]
    )
    assert done.exit_code == 0, done.output
    assert "all: static 1.000, dbs 0." in done.output


def test_what_a_size_costs_that_was_never_met_before_is_printed_in_seconds() -> None:
    cost = change_cost("mnist1d", sizes=range(40, 44))
    assert set(cost) >= {"first", "again", "later"}
    assert all(0 < seconds < 5 for seconds in cost.values())


def test_rankings_ignore_ties_only() -> None:
    def of(measured: float, predicted: float) -> dict[str, float]:
        return {"time_to_target_s": measured, "predicted_time_to_target_s": predicted}

    assert same_ranking({"a": of(10, 11), "b": of(20, 25)}, 0.05)
    assert not same_ranking({"a": of(10, 30), "b": of(20, 25)}, 0.05)
    assert same_ranking({"a": of(10, 30), "b": of(10.3, 25)}, 0.05)


def test_a_reference_may_hold_another_global_batch() -> None:
    window = Window.of([128] * 4, compute=0.2, steps=5)
    held = make_policy("reference:256", others=references("demo")).decide(window, Bounds.of(4))
    kept = make_policy("reference", others=references("demo")).decide(window, Bounds.of(4))
    assert (held.sum(), kept.sum()) == (256, 512)
    with pytest.raises(ConfigError, match="reference:NUMBER"):
        make_policy("reference:much", others=references("demo"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "tta", "--cluster", "moon"],
        ["bench", "tta", "--cluster", "simulator", "--scenarios", "nonsense"],
        ["bench", "tta", "--scenarios", "nonsense"],
        ["bench", "tta", "--policies", "dbs"],
        ["bench", "scaling", "--policies", "nonsense"],
        ["bench", "fidelity", "--against", "/nonexistent"],
        ["bench", "fidelity", "--predict", "dbs"],
        ["bench", "fidelity", "--trained"],
    ],
)
def test_bad_arguments_end_with_one_clear_line_and_no_folder(arguments: list[str], tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert done.output.strip().startswith("error: ")
    assert len(done.output.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_slow_link_is_predicted_to_cost_time_and_a_free_one_none() -> None:
    slow, free = (predict(PredictedRun(name, "static", 3), COSTS).step_s for name in ("slow-link", "even"))
    # A ring of four sends 1.5 times the 448,552 bytes of gradients over 40 Mbit/s.
    assert slow - free == pytest.approx(1.5 * 448_552 * 8e-6 / 40, rel=0.02)

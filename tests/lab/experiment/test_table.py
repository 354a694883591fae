"""What a table of an experiment says of readings."""

from __future__ import annotations

from typing import Any

import pytest

from dynamix_lab.experiment.table import cell, counts, described, markdown, over, page, sections
from dynamix_lab.experiment.verdict import verdict
from dynamix_lab.opponents.trial import Trial

TRIALS = {"single": None, "static": "static", "static, W r0": "static", "ours": "dynamix"}


def readings(name: str, seconds: list[float], scores: list[float], arrived: list[bool] | None = None) -> dict[str, Any]:
    trial = Trial(name, TRIALS[name], 32, 0.1).to_dict()
    many = len(seconds)
    return {
        **{"trial": trial, "at_edge": [], "seconds": seconds, "score": scores, "seed": list(range(many))},
        **{
            "arrived": arrived or [True] * many,
            "diverged": [False] * many,
            "samples": [9] * many,
            "steps": [9] * many,
            "overrun": [False] * many,
        },
    }


def case(place: str, ours: dict[str, Any], setting: str = "finish", **other: Any) -> dict[str, Any]:
    rows = {
        "single": readings("single", [9.0, 9.0], [0.90, 0.90]),
        "static": readings("static", [4.0, 4.0], [0.70, 0.70]),
        "static, W r0": readings("static, W r0", [4.0, 4.0], [0.89, 0.89]),
        "ours": ours,
    }
    return {
        "setting": setting,
        "place": place,
        "batch": 32,
        "budget": 9,
        "least_s": {"0": 2.0, "1": 2.0},
        "rows": rows,
        **other,
    }


def result(*cases: dict[str, Any]) -> dict[str, Any]:
    plan = {
        **{"title": "Small", "about": [], "against": ["static, W r0"], "beside": ["static", "static, W r0"]},
        **{"ours": ["ours"], "tuning": None},
    }
    about = {"command": "dynamix bench small", "cluster": "virtual", "commit": "abc", "seeds": [0, 1]}
    return {**about, "machine": {"cpu": "Example", "cores": 2}, "plan": plan, "cases": list(cases)}


KEEPS = readings("ours", [2.0, 2.0], [0.888, 0.888])
PAYS_WITH_SCORE = readings("ours", [1.0, 1.0], [0.80, 0.80])


def test_a_time_counts_only_at_the_score_of_the_best_plain_row() -> None:
    beside = ["static", "static, W r0"]
    assert counts(case("a/b", KEEPS), "ours", beside)
    assert not counts(case("a/b", PAYS_WITH_SCORE), "ours", beside)
    assert not counts(case("a/b", readings("ours", [2.0, 2.0], [0.9, 0.9], [True, False])), "ours", beside)
    together, best, *each = sections(result(case("a/b", KEEPS), case("c/b", PAYS_WITH_SCORE)))
    ours = together.table.rows[-1]
    assert ours[0] == "ours"
    assert ours[1].startswith("0.35")  # of a half and a quarter
    assert ours[2].startswith("-4.6")
    assert ours[3].startswith("-5.6")  # beside one worker, who has 90 %
    assert ours[4:] == ["1 of 2", "141 %"]
    assert [row[:2] for row in best.table.rows] == [["a/b", "static, W r0"], ["c/b", "static, W r0"]]
    assert "Distributing pays: static, W r0 is 2.25 times as fast as the fastest worker alone." in each[0].text
    assert "The devices need at least 2.0 s." in each[0].text
    assert each[1].table.rows[-1] == ["ours", "1.0", "80.00", "-9.00", "0.25 (0.25-0.25)"]


@pytest.mark.parametrize(
    ("mine", "theirs", "begins"), [(True, True, "0.50"), (False, True, "≥ 0.50"), (True, False, "≤ 0.50")]
)
def test_a_time_of_a_run_that_did_not_arrive_is_a_bound(mine: bool, theirs: bool, begins: str) -> None:
    made = case("a/b", readings("ours", [2.0, 2.0], [0.9, 0.9], [True, mine]), "reach")
    made["rows"]["static, W r0"]["arrived"] = [theirs, True]
    assert cell(over(made, "ours", "static, W r0")).startswith(begins)
    neither = case("c/b", readings("ours", [2.0, 2.0], [0.9, 0.9], [False, True]), "reach")
    neither["rows"]["static, W r0"]["arrived"] = [False, True]
    assert over(neither, "ours", "static, W r0") is None
    together = sections(result(made, neither))[0].table.rows[-1]
    assert together[1] == f"{begins}, 1 of 2 places"


def test_a_run_that_diverged_is_no_fast_run() -> None:
    broken = {**readings("ours", [0.1, 2.0], [0.0, 0.9], [False, True]), "diverged": [True, False]}
    together, best, first, _ = sections(result(case("a/b", broken), case("c/b", KEEPS)))
    assert together.table.rows[-1][1] == "0.50, 1 of 2 places"
    assert together.table.rows[-1][4] == "1 of 2"
    assert [row[2] for row in best.table.rows] == ["–", "0.50 (0.50-0.50)"]
    assert first.table.rows[-1][1] == "–"
    reached = sections(result(case("a/b", {**broken, "arrived": [False, False]}, "reach")))
    assert not any(text.startswith("First: ours") for section in reached for text in section.text)


def test_devices_that_came_late_are_no_measurement() -> None:
    late = {**KEEPS, "overrun": [True, False]}
    assert "No measurement, as this machine was too slow for the devices: ours." in markdown(result(case("a/b", late)))
    assert not counts(case("a/b", late), "ours", [])
    assert over(case("a/b", late), "ours", "static") is None


def test_a_place_says_how_far_the_same_training_scatters_and_who_trained_more() -> None:
    made = case("a/b", {**KEEPS, "samples": [9, 12]})
    made["rows"]["static, W r0"] |= {"score": [0.71, 0.69]}  # in this table its trial is that of static
    text = markdown(result(made))
    assert "static and static, W r0 train the same batches; their scores scatter by 0.71 points." in text
    assert "Trained beyond the budget, at most by: ours 33 %." in text


def test_a_page_shows_speed_beside_score() -> None:
    made = page(result(case("a/b", KEEPS), case("c/b", PAYS_WITH_SCORE)))
    assert "<svg" in made
    assert "speed is paid with score" in made


def test_a_trial_is_described_by_its_numbers() -> None:
    trial = Trial("static", "static", 32, 0.1, schedule="cosine", budget=9000)
    assert described(trial) == "rate 0.1, 32 a worker, cosine over 9000"


@pytest.mark.parametrize(
    ("times", "pays", "says"),
    [
        ({"single": [9.0], "static": [4.0], "local": [5.0]}, True, "Distributing pays: static is 2.25 times"),
        ({"single": [9.0], "static": [8.0], "local": [8.5]}, False, "Do not distribute this job"),
        ({"single": [9.0], "static": [8.0], "local": [3.0]}, False, "Do not meet after every step"),
        ({"single": [9.0], "static": [8.0], "dynamix": [1.0]}, False, "Do not distribute this job"),
    ],
)
def test_the_verdict_is_the_opponents_alone(times: dict[str, list[float]], pays: bool, says: str) -> None:
    found = verdict(times)
    assert found.pays is pays
    assert says in found.sentence

from __future__ import annotations

from pathlib import Path

import pytest

from dynamix.errors import ScenarioError
from dynamix_lab.emulator import host_speeds, load_scenario
from dynamix_lab.emulator.traces import parse_trace

GOOD = "# source: nobody\ntime_s,a,b\n0,1,0.5\n2.5, 1, 0.75\n\n"


def test_a_trace_is_read_with_comments_and_spaces() -> None:
    assert parse_trace(GOOD, "t.csv") == ((0.0, 2.5), ((1.0, 0.5), (1.0, 0.75)))


@pytest.mark.parametrize(
    ("text", "named", "allowed"),
    [
        ("time_s,a,b\n0,1,1\n1,,1\n", "t.csv line 3, a=''", "fill the gap"),
        ("time_s,a,b\n0,1,1\n1,1\n", "t.csv line 3='1,1'", "3 numbers"),
        ("# hello\ntime_s,a\n0,1\n\n1,1\n", "t.csv line 4=''", "empty line"),
        ("time_s,a\n0,1\n1,nan\n", "t.csv line 3, a=nan", "0.05 to 1"),
        ("time_s,a\n0,1\n1,1.5\n", "t.csv line 3, a=1.5", "full speed"),
        ("time_s,a\n0,1\n1,fast\n", "t.csv line 3, a='fast'", "0.05 to 1"),
        ("time_s,a\n0,1\n-1,1\n", "t.csv line 3, time_s=-1.0", "0 or more"),
        ("time_s,a\n0,1\n5,1\n3,1\n", "t.csv line 4, time_s=3.0", "more than 5"),
        ("time_s,a\n1,1\n", "t.csv line 2, time_s=1.0", "0 in the first row"),
        ("a,b\n0,1\n", "t.csv line 1='a,b'", "time_s"),
        ("time_s,a\n", "t.csv", "complete the trace"),
        ("", "t.csv", "time_s"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(text: str, named: str, allowed: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_trace(text, "t.csv")
    assert named in str(caught.value)
    assert allowed in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_traces_file_lies_beside_the_scenario_and_its_content_is_hashed(tmp_path: Path) -> None:
    (tmp_path / "slow.csv").write_text(GOOD)
    (tmp_path / "mine.yaml").write_text("hosts:\n- cpu: 0.4\n- cpu: 0.2\ntrace:\n  file: slow.csv\n")
    scenario = load_scenario(tmp_path / "mine.yaml")
    assert host_speeds(scenario, 2.0) == [0.4, 0.1]
    assert host_speeds(scenario, 1e6) == pytest.approx([0.4, 0.15])
    inline = {"times_s": [0, 2.5], "factors": [[1, 0.5], [1, 0.75]]}
    hosts = [{"cpu": 0.4}, {"cpu": 0.2}]
    assert scenario.sha256 == load_scenario({"hosts": hosts, "trace": inline}).sha256
    (tmp_path / "slow.csv").write_text(GOOD.replace("0.75", "0.8"))
    assert scenario.sha256 != load_scenario(tmp_path / "mine.yaml").sha256


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ({"file": "no-such.csv"}, r"trace.file='no-such.csv' .* a readable CSV file"),
        ({"file": "x.csv", "times_s": [0]}, "either file, or times_s"),
        ({}, "complete the trace"),
        ({"times_s": [0], "factors": [[0.5, 0.5]]}, "1, one per host"),
        ({"times_s": [0, 9], "factors": [[0.5], [1]], "repeat_s": 9}, r"trace.repeat_s=9.0 .* more than 9"),
        ({"times_s": [0], "factors": [[0.5]], "scales": "rate"}, r"hosts\[0\].rate_mbit_s=None"),
        ({"times_s": [0], "factors": [[0.5]], "every": 3}, "unknown key trace.every=3 .* repeat_s"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(trace: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        load_scenario({"hosts": [{"cpu": 0.5}], "trace": trace})

from __future__ import annotations

import json
import math
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from dynamix.errors import ScenarioError
from dynamix_lab.emulator.loading import load_scenario, scenario_schema, shipped_scenarios
from dynamix_lab.emulator.scenario import check_machine
from dynamix_lab.emulator.schedule import disturbed_hosts, host_speeds
from tests.refused import refused

NEIGHBOUR = {"kind": "neighbour", "every_s": 15, "factor": 0.5}

DEVICE = {"fixed_ms": 20, "per_sample_ms": 0.5}

LOAD = {"kind": "load", "factor": 0.5}


@pytest.mark.parametrize(
    ("content", "named", "allowed"),
    [
        ({"hosts": [{"cpu": 0}]}, "hosts[0].cpu=0", "0.02 or more"),
        ({"hosts": [{"cpu": 0.5}, {"cpu": math.nan}]}, "hosts[1].cpu=nan", "finite number"),
        ({"hosts": [{"cpu": "half"}]}, "hosts[0].cpu='half'", "number"),
        ({"hosts": [{"cpu": True}]}, "hosts[0].cpu=True", "number"),
        ({"hosts": [{"cpu": 0.5, "ram": 2}]}, "unknown key hosts[0].ram=2", "cpu, rate_mbit_s"),
        ({"hosts": [{}]}, "hosts[0].cpu", "missing"),
        ({"hosts": [{"cores": 0.5}]}, "unknown key hosts[0].cores=0.5", "did you mean 'cpu'?"),
        ({"hosts": [{}, {"cpu": 1, "latency": 5}]}, "unknown key hosts[1].latency=5", "did you mean 'latency_ms'?"),
        ({"hosts": [{"cpu": 0.5}], "hots": 1}, "unknown key hots=1", "hosts, disturbances"),
        ({"hosts": []}, "hosts=[]", "1 or more entries"),
        ({"hosts": [{"cpu": 0.02}] * 65}, "hosts=", "64 or fewer"),
        ({}, "hosts", "missing"),
        ({"hosts": [{"cpu": 1}], "disturbances": [{**NEIGHBOUR, "factor": 1.0}]}, "factor=1.0", "0.95 or less"),
        ({"hosts": [{"cpu": 1}], "disturbances": [{**NEIGHBOUR, "kind": "x"}]}, "kind='x'", "'neighbour'"),
        ({"hosts": [{"cpu": 1}], "disturbances": [{**NEIGHBOUR, "often": 1}]}, "often=1", "every_s, factor, seed"),
        ({"hosts": [{"cpu": 1}], "disturbances": [{**LOAD, "hosts": [1]}]}, "disturbances[0].hosts=1", "0 to 0"),
        ({"hosts": [{"cpu": 1}], "disturbances": [{"kind": "load"}]}, "disturbances[0].factor=1", "traffic_mbit_s"),
        ({"hosts": [{"cpu": 1}], "disturbances": [{**LOAD, "start_s": 5, "end_s": 5}]}, "end_s=5", "more than start_s"),
        ({"hosts": [{"cpu": 1, "loss": 0.7}]}, "hosts[0].loss=0.7", "0.5 or less"),
        ({"hosts": [{"cpu": 1}], "schedule": [{"at_s": -1}]}, "schedule[0].at_s=-1", "0 or more"),
        ({"hosts": [{"cpu": 1}], "schedule": [{"at_s": 1, "host": 1}]}, "schedule[0].host=1", "0 to 0"),
        ({"hosts": [{"cpu": 1}], "schedule": [{"at_s": 2}, {"at_s": 1}]}, "schedule[1].at_s=1", "sort"),
        ({"hosts": [{"cpu": 1}], "trace": 3}, "trace=3", "dictionary"),
        ({"hosts": [{"cpu": 1}], "device": {"fixed_ms": 0, "per_sample_ms": 1}}, "device.fixed_ms=0", "more than 0"),
        ({"hosts": [{"cpu": 1}, {"cpu": 1.5}], "device": DEVICE}, "hosts[1].cpu=1.5", "at most 1: with device"),
        (
            {"hosts": [{"cpu": 1}], "schedule": [{"at_s": 1, "cpu": 2}], "device": DEVICE},
            "schedule[0].cpu=2",
            "divide every cpu by 2",
        ),
        (
            {"hosts": [{"cpu": 1, "rate_mbit_s": 10}], "disturbances": [{**LOAD, "traffic_mbit_s": 9.5}]},
            "traffic_mbit_s on hosts[0]=9.5",
            "at most 9",
        ),
    ],
)
def test_a_bad_scenario_is_refused_with_value_range_and_fix(content: dict[str, Any], named: str, allowed: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(content)
    message = str(caught.value)
    assert named in message
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["hosts: [", "- 1\n- 2\n", "", "hosts: 3"])
def test_a_bad_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    refused(ScenarioError, "", load_scenario, path)


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    refused(ScenarioError, "demo, device-bursts, device-data", load_scenario, "dmeo")


def test_more_cores_than_the_machine_has_is_refused() -> None:
    refused(ScenarioError, r"hosts\[0\].cpu=3.0 .* at most 2", check_machine, load_scenario({"hosts": [{"cpu": 3}]}), 2)
    with pytest.raises(ScenarioError, match=r"sum of hosts' cpu=3.0 .* at most 2"):
        check_machine(load_scenario({"hosts": [{"cpu": 1.5}, {"cpu": 1.5}]}), 2)
    check_machine(load_scenario({"hosts": [{"cpu": 1}, {"cpu": 1}]}), 2)


def test_device_hosts_need_no_cores_of_the_machine() -> None:
    scenario = load_scenario({"hosts": [{"cpu": 1}] * 4, "device": DEVICE})
    check_machine(scenario, 1)
    assert scenario.device.per_cost_ms == 0
    assert host_speeds(scenario, 0.0) == [1.0] * 4


def test_the_demos_neighbour_comes_as_it_did() -> None:
    demo = load_scenario("demo")
    assert [disturbed_hosts(demo, 0, 15.0 * k, 1000)[0] for k in range(8)] == [0, 1, 0, 2, 0, 1, 2, 3]


def test_the_hash_is_of_what_is_emulated(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("disturbances: []\nhosts:\n - rate_mbit_s: 20\n   cpu: 0.5\n")
    from_file = load_scenario(path)
    assert from_file.name == "mine"
    assert from_file.sha256 == load_scenario({"hosts": [{"cpu": 0.5, "rate_mbit_s": 20.0}]}).sha256
    assert from_file.sha256 != load_scenario({"hosts": [{"cpu": 0.5}]}).sha256


def test_fields_of_later_versions_change_no_old_hash_and_count_when_used() -> None:
    plain = {"hosts": [{"cpu": 0.5, "rate_mbit_s": 20.0}], "disturbances": [NEIGHBOUR]}
    first = load_scenario(plain).sha256
    spelt = {
        **plain,
        "hosts": [{**plain["hosts"][0], "loss": 0.0, "latency_ms": 0, "rate_up_mbit_s": None}],
        "schedule": [],
        "trace": None,
        "device": None,
    }
    assert load_scenario(spelt).sha256 == first
    used: list[dict[str, Any]] = [
        {**plain, "hosts": [{**plain["hosts"][0], "loss": 0.01}]},
        {**plain, "device": DEVICE},
        {**plain, "device": {**DEVICE, "per_cost_ms": 1}},
        {**plain, "hosts": [{**plain["hosts"][0], "rate_up_mbit_s": 5}]},
        {**plain, "disturbances": [NEIGHBOUR, LOAD]},
        {**plain, "schedule": [{"at_s": 1, "cpu": 0.4}]},
        {**plain, "trace": {"times_s": [0], "factors": [[0.5]]}},
    ]
    assert len({first, *(load_scenario(content).sha256 for content in used)}) == 8


FROZEN = {
    "demo": "52d2ba5c23962cc7810a3df61eebeb357e92be46d50586cfdc04a6acc767cd19",
    "device-bursts": "3357ce1e5a993c6cc432ffba802197b5c3c13af2ffc7fe857a56a54d7b50c1a3",
    "device-data": "bddfe674c4dc03a13fb9005f018a214043c533ed3b9135cc5d268a14248781a8",
    "device-demo": "3f6b63550ee9fbc83da501b9b9b06d12473f428534ff27bd121ae4bbc9d97ebe",
    "device-even": "8c8a1f8af8a681dd328adf9ac1dcbc3368cdbd95a186334959e355c384092a37",
    "device-generations": "4fff02b14c468663615341d56354ac20b372dfe65b00af690447318350da6c76",
    "device-neighbours": "0ef786e34f62d79369046bfd86efa65f6b58967cfb843043791824b0dcf0fd6c",
    "device-pai": "aca93c63f328329d8b6385bc247d24b5ecdc91b668865c119e5133409385bdbb",
    "device-paper-like": "5849d54a5414afc2ee765e865b5d4f88e4db04407afda10c7bbf58c8fcf3c310",
    "device-replaced": "a4d9b411a65bcdf66f0ce694fa205252dfe18d7b6563df97ab7a25a4e64c2294",
    "device-slow-link": "f8ee2a1d3d008bd475cd0fd2ab46531d69933d3c353118539e62e1058d240b6e",
    "device-swapped": "be4ed7a593a4b12aaf4844129f08fa9698e9263fee98e49a541726fc89e40bb2",
    "device-uneven": "c06df65884cb8e34e2a435c0ff1e6084cacb57bc348500b0e27542f566cf53d9",
    "device-uneven-link": "43f5f409bb67ae773872567aee9f67cc953ebcb1dd57a0a317fe4e0450eb8dd6",
    "even": "e7f7caa0a1e67c99cae91fed6d2098937be453b249f704520e1b91530f0d19da",
    "moving-neighbour": "e9d4fea6d5d7ab6a9d76f9d0cd978d21f878a0edad9e73046c368e0bababc819",
    "pai-replay": "39bc1101b6ceef523e0e5a8f5746fb1b0267b9d69f38535e07d1b117297c46fd",
    "paper-like": "dd55e0f8e4677634fa8bafbed9177b122bde3707cd8438384fba7cefbad5c0a6",
    "slow-link": "e747bfbfe2610fcd93e490b4a61097c78796df32d0407c920afd473cdb1174b1",
    "steady-uneven": "79c4e21c5a747d30b7d1d30e45e75050b903fc79f9805cf02705cf6a6a601cdc",
}


def test_shipped_scenarios_are_frozen() -> None:
    """A scenario that results name is never edited: another one gets another name."""
    assert {name: load_scenario(name).sha256 for name in shipped_scenarios()} == FROZEN


def test_the_shipped_schema_is_the_models() -> None:
    shipped = resources.files("dynamix_lab.emulator") / "scenario.schema.json"
    assert json.loads(shipped.read_text("utf-8")) == scenario_schema(), "dynamix emulate --schema > that file"


def test_every_scenario_of_the_page_can_be_loaded(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "design" / "emulator.md"
    own, device = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "cluster.yaml").write_text(own)
    scenario = load_scenario(tmp_path / "cluster.yaml")
    check_machine(scenario, 2)
    assert [host.cpu for host in scenario.hosts] == [0.5, 0.2, 0.5]
    assert scenario.needs == {"rate": "hosts[2].rate_mbit_s=20"}
    (tmp_path / "device.yaml").write_text(device)
    assert load_scenario(tmp_path / "device.yaml").device


def test_the_example_uses_everything() -> None:
    scenario = load_scenario(Path(__file__).parents[3] / "examples" / "changing_cluster.yaml")
    assert set(scenario.needs) == {"rate", "loss", "traffic"}
    assert scenario.schedule
    assert scenario.trace
    assert scenario.total_cores < 2


def test_what_a_scenario_needs_names_the_place() -> None:
    content = {
        "hosts": [{"cpu": 0.5}, {"cpu": 0.5, "rate_down_mbit_s": 8}],
        "schedule": [{"at_s": 1, "loss": 0.02}, {"at_s": 2, "latency_ms": 5}],
        "disturbances": [{"kind": "load", "hosts": [0], "traffic_mbit_s": 3}],
    }
    assert load_scenario(content).needs == {
        "rate": "hosts[1].rate_down_mbit_s=8",
        "loss": "schedule[0].loss=0.02",
        "latency": "schedule[1].latency_ms=5",
        "traffic": "disturbances[0].traffic_mbit_s=3",
    }
    assert load_scenario("even").needs == {}

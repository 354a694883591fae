from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from dynamix.errors import ConfigError, EmulationError, ScenarioError, UsageError
from dynamix_lab.emulator import Emulation, host_speeds, keeper
from dynamix_lab.emulator.limits import find_cgroup
from tests.lab.emulator.conftest import PYTHON, owner, traces, wait_until_gone
from tests.refused import refused

SLEEP = [*PYTHON, "import time; time.sleep(600)"]
TWO = {"hosts": [{"cpu": 0.2}, {"cpu": 0.2}]}
# Both are measured by the clock, so neither runs beside other tests.
MECHANISMS = [pytest.param(name, marks=pytest.mark.emulator) for name in ("privileged", "duty-cycle")]


@pytest.fixture(params=MECHANISMS)
def mechanism(request: pytest.FixtureRequest) -> str:
    if request.param == "privileged":
        request.getfixturevalue("privileged")
    return str(request.param)


# Prints (time on the machine's monotonic clock, CPU time used) every 20 ms for as many seconds as asked.
METER = """
import time, sys
end = time.monotonic() + float(sys.argv[1])
while (now := time.monotonic()) < end:
    print(now, time.process_time())
    while time.monotonic() < now + 0.02: pass
"""


def cores_in(folder: Path, rank: int, slot: int, start: float) -> float:
    """The cores that a rank with the meter got in a slot of 1.5 s, less its ends."""
    rows, ends = np.loadtxt(folder / f"rank{rank}.out"), start + 1.5 * slot + np.array([0.2, 1.45])
    return float(np.diff(np.interp(ends, rows[:, 0], rows[:, 1]))[0] / 1.25)


@pytest.mark.long
def test_the_neighbour_halves_one_host_and_moves_on_schedule(tmp_path: Path, mechanism: str) -> None:
    scenario = {
        "hosts": [{"cpu": 0.25}, {"cpu": 0.2}],
        "disturbances": [{"kind": "neighbour", "every_s": 1.5, "factor": 0.5}],
    }
    with Emulation(scenario, seed=1, run_dir=tmp_path, mechanism=mechanism) as cluster:  # type: ignore[arg-type]
        cluster.launch([*PYTHON, METER, "7"])
        time.sleep(0.3)
        cluster.start_clock()
        elapsed = cluster.time_s()
        assert elapsed is not None
        start = time.monotonic() - elapsed
        assert cluster.wait(30) == [0, 0]
        noise = keeper.marked_processes()[cluster.name]
        assert len(noise) == 2
        used = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in noise)
        final = cluster.time_s()
        assert final is not None
        assert 0.5 * 0.1125 * final < used < 1.3 * 0.1125 * final  # the other half, by real processes
    for rank in range(2):
        for slot in range(4):
            got, want = cores_in(tmp_path, rank, slot, start), host_speeds(cluster.scenario, 1.5 * slot, 1)[rank]
            assert 0.65 * want < got < 1.2 * want, (rank, slot)  # a machine may take away, a limit never gives more


@pytest.mark.long
def test_a_trace_and_a_schedule_change_quotas_in_time(tmp_path: Path, mechanism: str) -> None:
    scenario = {
        "hosts": [{"cpu": 0.25}, {"cpu": 0.2}],
        "trace": {"times_s": [0, 1.5], "factors": [[1, 0.5], [0.4, 1]], "repeat_s": 3},
        "schedule": [{"at_s": 4.5, "host": 1, "cpu": 0.1}],
        "disturbances": [{"kind": "load", "hosts": [0], "factor": 0.5, "start_s": 3}],
    }
    with Emulation(scenario, run_dir=tmp_path, mechanism=mechanism) as cluster:  # type: ignore[arg-type]
        cluster.launch([*PYTHON, METER, "7"])
        time.sleep(0.3)
        cluster.start_clock()
        start = time.monotonic() - (cluster.time_s() or 0)
        assert cluster.wait(30) == [0, 0]
    expected = [[0.25, 0.1], [0.1, 0.2], [0.125, 0.1], [0.05, 0.1]]
    for slot in range(4):
        assert host_speeds(cluster.scenario, 1.5 * slot + 0.5) == pytest.approx(expected[slot])
        for rank in range(2):
            got, want = cores_in(tmp_path, rank, slot, start), expected[slot][rank]
            assert 0.6 * want < got < 1.2 * want + 0.01, (rank, slot)


def test_a_schedule_that_cannot_be_followed_is_no_longer_the_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = {**TWO, "schedule": [{"at_s": 1.5, "cpu": 0.1}]}
    with Emulation(scenario, run_dir=tmp_path, mechanism="duty-cycle") as cluster:
        cluster.launch(SLEEP)
        cluster.start_clock()
        monkeypatch.setattr(cluster._limiter, "limit", lambda group, cores: 1 / 0)
        refused(EmulationError, "schedule could not be followed: division by zero", cluster.wait, 10)
        monkeypatch.undo()


def test_ranks_get_torchruns_environment_and_output_goes_to_files(tmp_path: Path, mechanism: str) -> None:
    program = "import os, sys, json; print(json.dumps(dict(os.environ))); print('oops', file=sys.stderr)"
    with Emulation(TWO, run_dir=tmp_path, mechanism=mechanism) as cluster:  # type: ignore[arg-type]
        cluster.launch([*PYTHON, program], env={"MINE": "1"}, name="first")
        assert cluster.wait(30) == [0, 0]
        cluster.launch([*PYTHON, "import os; os._exit(3 * int(os.environ['RANK']))"], name="second")
        assert cluster.wait(30) == [0, 3]
    for rank in range(2):
        seen = json.loads((tmp_path / f"first.rank{rank}.out").read_text())
        assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"], seen["MINE"]) == (str(rank), "0", "2", "1")
        assert {"MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"} <= set(seen)
        assert (tmp_path / f"first.rank{rank}.err").read_text() == "oops\n"


def test_misuse_is_refused(tmp_path: Path) -> None:
    refused(ConfigError, "mechanism", Emulation, TWO, run_dir=tmp_path, mechanism="docker")
    refused(ScenarioError, "cores of this machine", Emulation, {"hosts": [{"cpu": 1000}]}, run_dir=tmp_path / "never")
    assert not (tmp_path / "never").exists()
    with Emulation(TWO, run_dir=tmp_path, mechanism="duty-cycle") as cluster:
        cluster.launch(SLEEP)
        refused(UsageError, "still run", cluster.launch, SLEEP)
        refused(ConfigError, "after --", cluster.launch, [])


def test_an_exception_leaves_nothing(tmp_path: Path, mechanism: str) -> None:
    def fail() -> None:
        with Emulation("demo", run_dir=tmp_path, mechanism=mechanism) as cluster:  # type: ignore[arg-type]
            cluster.launch(SLEEP)
            cluster.start_clock()
            assert cluster.name in traces()
            raise RuntimeError("user's")

    with pytest.raises(RuntimeError, match="user's"):
        fail()  # the fixture `nothing_left` looks


def test_wait_and_terminate_never_hang(tmp_path: Path, mechanism: str) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
    with Emulation(TWO, run_dir=tmp_path, mechanism=mechanism) as cluster:  # type: ignore[arg-type]
        cluster.launch([*PYTHON, stubborn])
        cluster.throttle()
        while not all((tmp_path / f"rank{r}.out").read_text() for r in range(2)):
            time.sleep(0.05)
        cluster.terminate(patience_s=0.3)
        assert cluster.wait() == [-9, -9]
        cluster.launch(SLEEP)
        began = time.monotonic()
        assert cluster.wait(0.5) == [-15, -15]
        assert time.monotonic() - began < 10


def test_when_a_rank_fails_the_others_get_their_grace_and_no_more(tmp_path: Path) -> None:
    program = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    with Emulation(TWO, run_dir=tmp_path, mechanism="duty-cycle") as cluster:
        cluster.launch([*PYTHON, program])
        began = time.monotonic()
        assert cluster.wait(grace_s=1.0) == [-15, 7]
        assert 1.0 < time.monotonic() - began < 15


def test_children_of_ranks_end_with_them(tmp_path: Path, mechanism: str) -> None:
    program = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("on", flush=True)
"""
    with Emulation(TWO, run_dir=tmp_path, mechanism=mechanism) as cluster:  # type: ignore[arg-type]
        cluster.launch([*PYTHON, program])
        assert cluster.wait(30) == [0, 0]
        assert len(keeper.marked_processes()[cluster.name]) == 2


# ---------------------------------------------------------------- the owner ends, in every way

OWNER = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a background shell starts ignores it
from dynamix_lab.emulator import Emulation
scenario, mechanism, folder = {"hosts": [{"cpu": 0.1}, {"cpu": 0.1}], "disturbances": [
    {"kind": "neighbour", "every_s": 1, "factor": 0.5}]}, sys.argv[2], sys.argv[3]
with Emulation(scenario, run_dir=folder, mechanism=mechanism) as cluster:
    cluster.launch([sys.executable, "-I", "-S", "-c", "while True: pass"])
    cluster.start_clock()
    print(cluster.name, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("mechanism", "number"),
    [
        ("privileged", signal.SIGTERM),
        ("privileged", signal.SIGKILL),
        ("duty-cycle", signal.SIGINT),
        ("duty-cycle", signal.SIGKILL),
    ],
    indirect=["mechanism"],
)
@pytest.mark.emulator
def test_a_signal_to_the_owner_leaves_nothing(tmp_path: Path, mechanism: str, number: signal.Signals) -> None:
    with owner(OWNER, mechanism, tmp_path) as (process, name):
        process.send_signal(number)
        code = process.wait(20)
        assert code == (143 if number == signal.SIGTERM else -number)
        assert wait_until_gone(name)


@pytest.mark.emulator
@pytest.mark.usefixtures("privileged")
def test_the_next_start_sweeps_what_is_provably_abandoned_and_nothing_else(tmp_path: Path) -> None:
    mechanism, found = "privileged", find_cgroup()
    roots = [] if isinstance(found, str) else [found[0]]
    folders = (tmp_path / "dead", tmp_path / "alive")
    with owner(OWNER, mechanism, folders[0]) as (dead, abandoned), owner(OWNER, mechanism, folders[1]) as (_, alive):
        keepers = [p for p in psutil.Process(dead.pid).children() if "keeper.py" in " ".join(p.cmdline())]
        assert len(keepers) == 1
        for victim in (*keepers, psutil.Process(dead.pid)):
            victim.kill()
        dead.wait(10)
        assert abandoned in traces()
        # Same pid, other start time: a name that this process's own pid does not protect.
        namespace = os.stat("/proc/self/ns/pid").st_ino
        assert keeper.is_abandoned(f"dynamix-{namespace}-{os.getpid()}-1-0")
        assert not keeper.is_abandoned(f"dynamix-{namespace + 1}-{os.getpid()}-1-0")
        assert not keeper.is_abandoned("dynamix-of-somebody-else")
        with Emulation(TWO, run_dir=tmp_path / "next", mechanism=mechanism):  # type: ignore[arg-type]
            assert abandoned not in traces()
            assert alive in traces()
            deadline = time.monotonic() + 10
            while len(keeper.marked_processes()[alive]) < 4 and time.monotonic() < deadline:
                time.sleep(0.05)  # on a busy machine the last one begins late
            assert len(keeper.marked_processes()[alive]) == 4  # two ranks and what is busy beside them
        assert keeper.sweep(roots) == []
        assert alive in traces()


def test_two_may_remove_the_same_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an emulation's keeper and the next start."""
    (tmp_path / "dynamix-gone" / "host0").mkdir(parents=True)
    scan = os.scandir

    def removed_by_another(folder: str) -> object:
        if Path(folder).name == "host0":
            os.rmdir(folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", removed_by_another)
    assert keeper.remove("dynamix-gone", [tmp_path])
    assert not list(tmp_path.iterdir())


def test_a_large_host_gets_as_many_busy_processes_as_its_neighbour_may_use(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    scenario = {"hosts": [{"cpu": 1.2}], "disturbances": [{"kind": "load", "factor": 0.9}]}
    with Emulation(scenario, run_dir=tmp_path, mechanism="duty-cycle") as cluster:
        cluster.start_clock()
        deadline = time.monotonic() + 10
        while len(keeper.marked_processes().get(cluster.name, [])) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(keeper.marked_processes()[cluster.name]) == 2

"""The SLURM recipe on a real slurmctld with two node daemons on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
needed = ("slurmctld", "slurmd", "sbatch", "srun")
pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, needed)), reason="SLURM is not installed (Debian: slurm-wlm)"),
    pytest.mark.skipif(os.getuid() != 0, reason="SLURM's daemons need root here"),
]
CONFIG = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Path]:
    """A folder with the log of each daemon; SLURM's commands find it by SLURM_CONF, which is its slurm.conf."""
    ports = [free_port() for _ in range(3)]
    for name in ("controller", "node1", "node2"):
        (tmp_path / name).mkdir()
    config = tmp_path / "slurm.conf"
    config.write_text(CONFIG.format(folder=tmp_path, ports=ports, host=socket.gethostname().partition(".")[0]))
    commands = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "node1"], ["slurmd", "-D", "-N", "node2"]]
    with (tmp_path / "daemons.log").open("wb") as log:
        daemons = [subprocess.Popen([*line, "-f", str(config)], stdout=log, stderr=log) for line in commands]
    try:
        _until(tmp_path, lambda: _slurm(config, "sinfo", "-h", "-o", "%T %D") == "idle 2")
        yield tmp_path
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait(timeout=30)


def _slurm(config: Path, *command: str) -> str:
    environment = {**os.environ, "SLURM_CONF": str(config)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()


def _until(folder: Path, what: object, patience_s: float = 120) -> None:
    assert callable(what)
    end = time.monotonic() + patience_s
    while not what():
        logs = [path.read_text(errors="replace")[-2000:] for path in (*folder.glob("*.log"), *folder.glob("*.out"))]
        assert time.monotonic() < end, "\n".join(logs)
        time.sleep(0.2)


def test_the_recipe_trains_on_two_nodes(cluster: Path) -> None:
    config, job = cluster / "slurm.conf", cluster / "job"
    job.mkdir()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    packages = os.pathsep.join([str(ROOT / "src"), *sys.path])
    told = f"ALL,PATH={path},PYTHONPATH={packages},GLOO_SOCKET_IFNAME=lo"
    recipe, script = str(ROOT / "examples/recipes/slurm.sbatch"), str(ROOT / "examples/elastic.py")
    out = ["--parsable", f"--export={told}", f"--output={cluster}/job.out"]
    number = _slurm(config, "sbatch", *out, recipe, script, "--folder", str(job), "--epochs", "2")
    assert number.isdigit(), number
    _until(cluster, lambda: not _slurm(config, "squeue", "-h", "-j", number))
    said = (cluster / "job.out").read_text()
    assert "JobState=COMPLETED" in _slurm(config, "scontrol", "show", "job", number), said
    assert "epoch done: sample 12000" in said
    names = torch.load(job / "checkpoint.pt", weights_only=True)["controller"]
    assert "node1" in str(names)
    assert "node2" in str(names)

"""torchft's replicas with unequal shares: the union batch's gradient, every sample once, also where one is lost."""

from __future__ import annotations

import importlib.util
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dynamix.errors import UsageError
from dynamix.integrations.replicas import ReplicaShares
from dynamix.integrations.torchft import WeightedManager
from tests.integrations.torchft_job import LR, MICRO, SAMPLES, data
from tests.ranks import start_script

JOB = Path(__file__).parent / "torchft_job.py"
installed = pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed")
pytestmark = pytest.mark.multiproc


def _start(folder: Path, *arguments: object) -> Any:
    task, *rest = map(str, arguments)
    return start_script(JOB, [task, str(folder), *rest], folder / f"{rest[0]}.log", env={})


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder with a lighthouse in it, at which so many replicas meet first."""
    lighthouse = _start(tmp_path, "lighthouse", request.param)
    try:
        _until(tmp_path, (tmp_path / "lighthouse").exists)
        yield tmp_path
    finally:
        lighthouse.kill()
        lighthouse.join()


def _until(folder: Path, what: Any, patience_s: float = 120) -> None:
    end = time.monotonic() + patience_s
    while not what():
        if time.monotonic() > end:
            raise AssertionError("\n".join(p.read_text(errors="replace")[-3000:] for p in folder.glob("*.log")))
        time.sleep(0.05)


def _finish(folder: Path, replicas: list[Any]) -> None:
    try:
        _until(folder, lambda: not any(replica.is_alive() for replica in replicas))
        logs = "\n".join(p.read_text(errors="replace")[-3000:] for p in folder.glob("*.log"))
        assert [replica.exitcode for replica in replicas] == [0] * len(replicas), logs
    finally:
        for replica in replicas:
            if replica.is_alive():
                replica.kill()
                replica.join()


def _steps(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["step"], line["at"]))


@installed
@pytest.mark.slow
@pytest.mark.parametrize("place", [1], indirect=True)
def test_one_of_two_is_killed_and_comes_back(place: Path) -> None:
    """Unequal shares, a kill, a join: every step is the union batch's, every sample comes once an epoch."""
    epochs = 8
    begin = [_start(place, "gradients", "r0", epochs, -1, 0.0005)]
    begin += [_start(place, "gradients", "r1", epochs, 30, 0.0015)]
    again = _start(place, "gradients", "r1-again", epochs, -1, 0.0015)  # waits
    _until(place, lambda: all((place / f"{name}.here").exists() for name in ("r0", "r1", "r1-again")))
    (place / "r0.go").touch()
    (place / "r1.go").touch()
    begin[1].join(120)
    assert begin[1].exitcode == -9
    (place / "r1-again.go").touch()
    _finish(place, [begin[0], again])

    steps = _steps(place)
    failed = [line for line in steps if not line["done"]]
    assert len(failed) <= 2, failed  # the step in which one was killed; perhaps that in which it came back
    union: dict[int, list[int]] = defaultdict(list)
    trained: Counter[tuple[int, int]] = Counter()
    for line in steps:
        if line["done"]:
            union[line["step"]] += line["picked"]
            trained.update((line["epoch"], sample) for sample in line["picked"])
    assert trained == Counter((epoch, sample) for epoch in range(epochs) for sample in range(SAMPLES))
    uneven = [[len(line["picked"]) for line in steps if line["step"] == s and line["done"]] for s in union]
    assert any(len(sizes) == 2 and max(sizes) > 2 * min(sizes) for sizes in uneven), uneven

    x, y, net = data()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    for step in sorted(union):
        optimizer.zero_grad()
        F.mse_loss(net(x[union[step]]), y[union[step]]).backward()
        optimizer.step()
    first, second = (torch.load(place / f"{name}.pt", weights_only=True) for name in ("r0", "r1-again"))
    for name, value in net.state_dict().items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], value, rtol=1e-9, atol=1e-10)


@installed
@pytest.mark.parametrize("place", [2], indirect=True)
@pytest.mark.parametrize("way", ["local", "diloco"])
def test_local_steps_in_proportion_to_speed(place: Path, way: str) -> None:
    """A faster replica takes more steps; where they meet, models become their mean by samples."""
    epochs = 1
    _finish(place, [_start(place, way, "r0", epochs, 0.002), _start(place, way, "r1", epochs, 0.008)])
    fast, slow = (torch.load(place / f"r{i}.pt", weights_only=True) for i in range(2))
    assert len(fast) == len(slow)
    trained: Counter[tuple[int, int]] = Counter()
    for a, b in zip(fast, slow, strict=True):
        assert torch.equal(a["met"], b["met"])
        trained.update((a["epoch"], sample) for sample in a["picked"] + b["picked"])
        n, m = len(a["picked"]), len(b["picked"])
        if n + m:
            assert torch.allclose(a["met"], (n * a["own"] + m * b["own"]) / (n + m), rtol=1e-9, atol=1e-10)
    assert trained == Counter((epoch, sample) for epoch in range(epochs) for sample in range(SAMPLES))
    steps = [sum(told["steps"] for told in replica) for replica in (fast, slow)]
    assert steps[0] > 1.5 * steps[1], steps  # four times as fast; a busy machine blurs that
    assert fast[-3]["steps"] == -(-len(fast[-3]["picked"]) // MICRO)


@installed
@pytest.mark.parametrize("place", [1], indirect=True)
def test_the_example_runs(place: Path) -> None:
    script, told = (
        JOB.parents[2] / "examples/torchft_replicas.py",
        {"TORCHFT_LIGHTHOUSE": (place / "lighthouse").read_text()},
    )
    _finish(place, [start_script(script, ["r0", "--epochs", "1"], place / "example.log", env=told)])
    assert "shares [96]" in (place / "example.log").read_text()


def test_managers_that_heal_in_the_background_are_refused() -> None:
    class Background:
        _use_async_quorum = True

    with pytest.raises(UsageError, match="use_async_quorum=False"):
        WeightedManager(Background(), ReplicaShares(100, 10))

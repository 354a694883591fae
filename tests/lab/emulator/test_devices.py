"""Device hosts: real ranks whose steps take the device's time. Times are bounded loosely, as machines are shared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dynamix.cli.app import app
from dynamix.errors import ConfigError
from dynamix.events.records import read_events
from dynamix_lab.emulator import Device, Emulation, emulate
from dynamix_lab.emulator.devices import DeviceSteps, SharedDevices, batch_cost
from dynamix_lab.emulator.run import summary
from tests.lab.emulator.conftest import PYTHON

EXAMPLE = Path(__file__).parents[3] / "examples/train.py"

DEVICE = {"fixed_ms": 20, "per_sample_ms": 0.5}
TWO = {"hosts": [{"cpu": 1.0}, {"cpu": 0.5}], "device": DEVICE}

# `least(step)` is the shortest of some steps, s. Without credit none is shorter than the device's; a busy machine adds.
PRELUDE = """
import json, os, sys, time
import torch
from torch import nn
from dynamix_lab.emulator import control
from dynamix_lab.emulator.devices import batch_cost

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.ones(32, 8)

def net(width=8):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

def sgd(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)

def least(step, count=8):
    times = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return min(times)

model = net()
optimizer = sgd(model)

def plain():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# Nobody asks for limits before everybody has measured without.
BEFORE_AND_AFTER = (
    PRELUDE
    + """
before = least(plain)
open(f"ready{os.environ['RANK']}", "w").close()
while not all(os.path.exists(f"ready{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)
control.request("throttle")
print(json.dumps([before, least(plain)]))
"""
)


def run(
    folder: Path, scenario: dict[str, Any], program: str, *, credit: bool = False, **options: Any
) -> tuple[list[Any], list[DeviceSteps]]:
    """What every rank printed last, and what its device did."""
    with Emulation(scenario, run_dir=folder, **options) as cluster:
        cluster.launch([sys.executable, "-c", program], cwd=folder, env={"DYNAMIX_DEVICE_CREDIT": str(int(credit))})
        codes = cluster.wait(90)
        steps = cluster.overruns()
    ranks = range(len(codes))
    assert not any(codes), [(folder / f"rank{rank}.err").read_text()[-2000:] for rank in ranks]
    return [json.loads((folder / f"rank{rank}.out").read_text().splitlines()[-1]) for rank in ranks], steps


@pytest.mark.emulator  # measured by the clock, so not beside other tests
def test_a_step_takes_the_devices_time_at_the_hosts_speed(tmp_path: Path) -> None:
    """And only once limits are in force."""
    times, steps = run(tmp_path, TWO, BEFORE_AND_AFTER, mechanism="duty-cycle")
    for (before, after), due in zip(times, (0.036, 0.072), strict=True):
        assert before < 0.015
        assert due <= after < 1.15 * due
    assert [rank.steps for rank in steps] == [8, 8]


# The pacer waits on a clock that the program moves, so that no busy machine is seen.
TOLD = (
    PRELUDE
    + """
class Told:
    now_s = time.monotonic()
    def monotonic(self):
        return self.now_s
    def sleep(self, seconds):
        self.now_s += max(seconds, 1e-9)

clock = sys.modules["dynamix_startup_pacer"].time = Told()

def took(step):
    began = clock.monotonic()
    step()
    return clock.monotonic() - began
"""
)
KINDS = (
    TOLD
    + """
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

encoder, decoder = net(), net()
both = sgd(encoder, decoder)

def ended(loss, *optimizers):
    loss.backward()
    for each in optimizers:
        each.step()
        each.zero_grad()

def accumulated():
    for _ in range(2):
        model(x).square().mean().backward()
    optimizer.step()

def evaluated():
    with torch.no_grad():
        model(x)

class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = net(), net()
    def forward(self, *, batch):
        return {"loss": checkpoint(self.used, batch["x"], use_reentrant=False).sum()}

keywords = Keywords()
criterion = nn.CrossEntropyLoss()
control.request("throttle")
times = {
    "plain": took(plain),
    "loss is a module": took(lambda: ended(criterion(model(x), torch.zeros(32, dtype=torch.long)), optimizer)),
    "accumulation": took(accumulated),
    "a model twice": took(lambda: ended((model(x) - model(2 * x)).square().mean(), optimizer)),
    "encoder and decoder": took(lambda: ended(decoder(encoder(x)).square().mean(), both)),
    "checkpoint, a dictionary, unused layers": took(lambda: ended(keywords(batch={"x": x})["loss"])),
    "no_grad": took(evaluated),
}

stepped = []
register_optimizer_step_pre_hook(lambda *_: stepped.append(clock.monotonic()))

def between(pause):
    for _ in range(3):
        clock.sleep(pause)
        plain()
    return stepped[-1] - stepped[-2]

times |= {"short pause": between(0.008), "long pause": between(0.1)}

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        clock.sleep(0.6)
        return gradient

whole = nn.Module()
whole.net = model
whole.forward = lambda x: model[2](model[1](Slow.apply(model[0](x))))
for _ in range(3):  # late: the first layer's gradient, which comes last
    ended(whole(x).square().mean(), optimizer)

bucket = []
def full(parameter):
    bucket.append(parameter)
    if len(bucket) % 2 == 0:
        clock.sleep(0.6)
for parameter in model[0].parameters():
    parameter.register_post_accumulate_grad_hook(full)
for _ in range(3):  # not late: what somebody does with the last bucket's gradients
    plain()

for parameter in model[0].parameters():
    parameter.requires_grad_(False)
times["frozen layer"] = took(plain)
control.request("unthrottle")
times["no limits"] = took(plain)
print(json.dumps(times))
"""
)


@pytest.mark.parametrize("credit", [True, False])
def test_every_kind_of_step_takes_its_time(tmp_path: Path, credit: bool) -> None:
    """A forward a third of a batch's time, a backward the rest; late is what computes, not what is done with it.

    What is done between steps is hidden up to a forward's time, as a device computes while its host prepares; benches
    of a policy's cost switch that off.
    """
    one = {"hosts": [{"cpu": 1.0}], "device": DEVICE}
    (times,), (steps,) = run(tmp_path, one, KINDS, credit=credit, mechanism="duty-cycle")
    due = dict.fromkeys(times, 0.036) | {"accumulation": 0.072, "a model twice": 0.072, "no_grad": 0, "no limits": 0}
    due |= {"short pause": 0.036, "long pause": 0.124} if credit else {"short pause": 0.044, "long pause": 0.136}
    assert times == pytest.approx(due, abs=1e-6)
    assert (steps.steps, steps.overruns) == (20, 3)


COSTS = (
    TOLD
    + """
tokens, table = torch.zeros(4, 25, dtype=torch.long), nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
counted = sgd(table)

def step(inputs, trained, told=None):
    if told is not None:
        batch_cost(told)
    trained(inputs).sum().backward()
    counted.step()

control.request("throttle")
times = [took(lambda: step(tokens, table)), took(lambda: step(tokens, table, 20)), took(lambda: step(x, model, 0))]
try:
    model(x)
except RuntimeError as error:
    print(json.dumps([times, str(error)]))
"""
)


def test_a_batch_costs_what_was_said_or_its_tokens(tmp_path: Path) -> None:
    device = {"fixed_ms": 10, "per_sample_ms": 0, "per_cost_ms": 0.5}
    (printed,), _ = run(tmp_path, {"hosts": [{"cpu": 1.0}], "device": device}, COSTS, mechanism="duty-cycle")
    times, error = printed
    assert times == pytest.approx([0.060, 0.020, 0.010], abs=1e-6)
    assert "batch_cost(cost) before every forward" in error


EXCHANGES = (
    PRELUDE
    + """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
x = torch.ones(32, 512)
flat = torch.zeros(sum(p.numel() for p in net(512).parameters()))
local, ddp, sharded = net(512), nn.parallel.DistributedDataParallel(net(512)), net(512)
mesh = init_device_mesh("cpu", (2,))
for layer in (sharded[0], sharded[2], sharded):
    fully_shard(layer, mesh=mesh)
normed = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(512, 8), nn.BatchNorm1d(8)))
optimizers = {model: sgd(model) for model in (local, ddp, sharded, normed)}

def train(model, before=lambda: None, after=lambda: None):
    def step():
        model(x).square().mean().backward()
        before()
        optimizers[model].step()
        optimizers[model].zero_grad()
        after()
    return step

if dist.get_rank() == 0:
    control.request("start-clock")
dist.barrier()
exchange = lambda: dist.all_reduce(flat)
cases = {"exchange": exchange, "before": train(local, before=exchange), "after": train(local, after=exchange)}
cases |= {"ddp": train(ddp), "fsdp": train(sharded)}
def late(step=train(normed)):
    time.sleep(0.06 if dist.get_rank() == 0 else 0.0)
    step()

for _ in range(2):
    late()  # DDP makes its buckets anew once, and waits in that
times = {name: least(step, 4) for name, step in cases.items()}
# The mean of some: if this machine delays a rank between two steps, the second one looks short.
times["buffers"] = least(lambda: [late() for _ in range(4)], 1) / 4
dist.barrier()  # a rank that ends while the other is in an exchange would break it
dist.destroy_process_group()
print(json.dumps(times))
"""
)


@pytest.mark.emulator
@pytest.mark.multiproc
@pytest.mark.usefixtures("privileged")
def test_no_exchange_is_hidden_that_a_device_would_not_hide(tmp_path: Path) -> None:
    """All-reduce of gradients or of parameters by hand, DDP with one bucket, FSDP2, and buffers that come late."""
    scenario = {"hosts": [{"cpu": 1.0, "rate_mbit_s": 200.0}] * 2, "device": DEVICE}
    times, _ = run(tmp_path, scenario, EXCHANGES)
    for rank in times:
        whole = 0.036 + rank["exchange"]
        assert rank["exchange"] > 0.07
        for name in ("before", "after"):
            assert rank[name] == pytest.approx(whole, rel=0.15), name
        # Half of DDP's bytes, the last layer's, are under way while the first is computed.
        assert whole - 0.016 < rank["ddp"] < 1.3 * whole
        assert rank["fsdp"] > whole
        # Rank 0 begins late and sends its buffers then: nobody computes before. Ranks begin milliseconds apart.
        assert rank["buffers"] > 0.036 + 0.06 - 0.006


@pytest.mark.emulator
@pytest.mark.multiproc
@pytest.mark.usefixtures("privileged")
def test_a_controller_sees_the_devices_time_and_the_folder_holds_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line that a person sees names what the folder holds, and the script need not name an events file.

    Without the credit, or a busy machine's data loader hides computing.
    """
    monkeypatch.setenv("DYNAMIX_DEVICE_CREDIT", "0")
    (tmp_path / "two.yaml").write_text(json.dumps(TWO))
    out, script = tmp_path / "run", [sys.executable, str(EXAMPLE), "--policy", "static", "--epochs", "1"]
    command = ["emulate", str(tmp_path / "two.yaml"), "--throttle-after", "0", "--out", str(out), "--", *script]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    result = json.loads((out / "result.json").read_text())
    assert (result["device"], result["mechanisms"]["cpu"]) == ({**DEVICE, "per_cost_ms": 0}, "device")
    assert [rank["steps"] for rank in result["device_steps"]] == [64, 64]
    events, said = read_events(out / "events.jsonl"), done.stdout.splitlines()[-1]
    took = f"{result['wall_s']:.1f} s (with the start of the processes)"
    assert said.startswith(f"2 ranks ended with 0 after {took}, limits from ")
    assert f"{out} holds run.json, result.json, events.jsonl ({len(events)} windows), report.html, ranks/0/" in said
    assert "; 128 device steps, on a rank at most " in said
    assert "epoch 0: loss" in (out / "ranks/0/rank0.out").read_text()
    windows = [event["window"]["compute"] for event in events if not event.get("short")]
    # The very first forward sets up as well, inside the device's time and before the controller begins to measure.
    for seen, due in zip(zip(*windows[1:], strict=True), (0.036, 0.072), strict=True):
        assert 0.98 * due < min(seen) < 1.1 * due


def test_a_summary_says_where_nothing_was_paced(tmp_path: Path) -> None:
    result = emulate(TWO, [*PYTHON, "pass"], out=tmp_path / "run", throttle_after_s=0, mechanism="duty-cycle")
    assert "NO DEVICE STEPS on rank 0, 1" in summary(result)
    late = {**result, "device_steps": [{"steps": 100, "overruns": 2, "overrun_s": 0.1}] * 2}
    assert "200 device steps, on a rank at most 2.0% overran (TOO MANY" in summary(late)


FOREVER = (
    PRELUDE
    + """
while True:
    began = time.perf_counter()
    plain()
    print(time.perf_counter() - began, flush=True)
"""
)


def test_the_speed_follows_the_schedule_and_counts_outlive_the_rank(tmp_path: Path) -> None:
    scenario = {
        "hosts": [{"cpu": 1.0}],
        "schedule": [{"at_s": 2.0, "cpu": 0.25}],
        "device": {"fixed_ms": 20, "per_sample_ms": 0},
    }

    def times() -> list[float]:
        return [float(line) for line in (tmp_path / "rank0.out").read_text().splitlines()]

    with Emulation(scenario, run_dir=tmp_path, mechanism="duty-cycle") as cluster:
        environment = {"DYNAMIX_DEVICE_CREDIT": "0"}
        (rank,) = cluster.launch([sys.executable, "-c", FOREVER], cwd=tmp_path, env=environment)
        while not times():
            time.sleep(0.05)
        cluster.start_clock()
        before = len(times())
        time.sleep(1.8)
        turns = len(times())
        time.sleep(0.4)
        assert cluster.speeds() == [0.25]
        turned = len(times())
        while len(times()) < turned + 8:
            time.sleep(0.05)
        os.killpg(rank.pid, signal.SIGKILL)
        cluster.wait(10)
        # The shortest, as a busy machine makes steps longer. The first of each part may have begun earlier.
        assert 0.020 <= min(times()[before + 1 : turns]) < 0.080 <= min(times()[turned + 1 :])
        (counted,) = cluster.overruns()
        assert abs(counted.steps - len(times()[before:])) <= 2
        cluster.start_clock()
        assert cluster.overruns() == [DeviceSteps()]


def test_another_sitecustomize_still_runs_and_torch_stays_away(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/sitecustomize.py").write_text("import sys; sys.theirs = True")
    shared = SharedDevices(tmp_path / "devices", 1, Device(fixed_ms=20, per_sample_ms=0))
    environment = {**os.environ, **shared.environment(0, {"PYTHONPATH": str(tmp_path / "theirs")})}
    program = """
import importlib.util, sys
assert sys.theirs and sys.modules["sitecustomize"].__file__.endswith("theirs/sitecustomize.py")
assert importlib.util.find_spec("torch") is None or "torch" not in sys.modules
assert not [path for path in sys.path if path.endswith("startup")]
"""
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    alone = {**os.environ, **shared.environment(0, {})}
    subprocess.run([sys.executable, "-c", "import sitecustomize"], env=alone, check=True, timeout=60)


def test_a_batch_cost_is_checked_and_does_nothing_outside() -> None:
    batch_cost(3)
    with pytest.raises(ConfigError, match="cost=nan"):
        batch_cost(float("nan"))

"""What a user reaches after `import dynamix`, and what need not be installed for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import dynamix
from dynamix import features
from dynamix.window import Window
from tests.processes import LAUNCH, ONE_HOST, call, run

SUBMODULES = ("compression", "data", "errors", "events", "integrations", "model", "policies", "probes", "runtime")
SUBMODULES += ("window",)
# What only the command line, the emulator, learning, compression and the laboratory need.
MISSING = (
    *("typer", "rich", "pydantic", "pydantic_core", "click", "pyroute2", "yaml", "gymnasium", "pettingzoo", "numba"),
    *("scipy", "sklearn", "pandas", "matplotlib", "jinja2", "pytest", "dynamix_lab"),
)
TRAIN = """
import torch, dynamix
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
controller = dynamix.Controller("dynamix", batch_size=8, interval=1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
sampler = controller.batch_sampler(data)
model = controller.wrap(torch.nn.parallel.DistributedDataParallel(net) if controller.group else net, optimizer)
for step, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_sampler=sampler)):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    controller.step(loss=loss)
    if step == 1:
        break
controller.close()
assert controller.samples_seen >= 16
"""
GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


def _without(names: tuple[str, ...]) -> str:
    return f"import sys; sys.modules.update(dict.fromkeys({names!r}))\n"


def test_importing_the_package_changes_nothing_and_leaves_the_rest_until_it_is_used() -> None:
    run(
        "-c",
        "import os, random, sys\n"
        "before, state = dict(os.environ), random.getstate()\n"
        "import dynamix\n"
        "own = [m for m in sys.modules if m in ('torch', 'numpy') or m[:8] == 'dynamix.']\n"
        "assert own == ['dynamix.errors', 'dynamix.removed'], own\n"
        "dynamix.Controller\n"
        "slow = {'torch.distributed.fsdp', 'psutil', 'sympy'} & set(sys.modules)\n"
        "assert not slow, slow\n"
        f"for name in {SUBMODULES!r}: assert getattr(dynamix, name).__name__ == 'dynamix.' + name\n"
        "for name in dynamix.__all__: assert getattr(dynamix, name) is not None, name\n"
        f"assert set(dir(dynamix)) >= {{*dynamix.__all__, *{SUBMODULES!r}}}\n"
        "assert dict(os.environ) == before and random.getstate() == state\n"
        "heavy = {'matplotlib', 'pyroute2', 'gymnasium', 'mnist1d', 'typer', 'fastapi', 'numba'} & set(sys.modules)\n"
        "assert not heavy, heavy\n",
    )


def test_a_script_without_a_function_ends_without_a_word(tmp_path: Path) -> None:
    """Its objects live until the interpreter takes modules apart: callbacks that ran then ended in a traceback."""
    (script := tmp_path / "train.py").write_text(
        f'import torch.distributed as dist\ndist.init_process_group("gloo")\n{TRAIN}dist.destroy_process_group()\n'
    )
    assert "ignored" not in run(*LAUNCH, 2, script, env=ONE_HOST).stderr


def test_the_public_names_are_these() -> None:
    """Taking one away breaks users: it needs a line in CHANGELOG."""
    assert set(dynamix.__all__) == {
        *("Averaging", "Bounds", "CompressionState", "ConfigError", "Controller", "DynamixError", "EmulationError"),
        *("Guard", "Limits", "MemoryLimitError", "Policy", "PolicyFileError", "ScenarioError", "Settings"),
        *("StateError", "UsageError", "weighted", "weighted_average"),
        *("Window", "WorkerLostError", "__version__", "features", "make_policy", "policy_names", "project"),
    }


def test_features_is_a_module_and_a_function() -> None:
    window = Window.of([16, 48], compute=[0.1, 0.2])
    assert np.array_equal(dynamix.features(window), features.features(window))


def test_training_needs_no_package_of_an_extra() -> None:
    """Alone, and then in a process group."""
    rooms = ("compression", "data", "events", "policies", "probes")
    reached = f"import dynamix\nfor name in {rooms!r}: getattr(dynamix, name)\nimport dynamix.runtime.memory.limits\n"
    run("-c", _without(MISSING) + reached + TRAIN + GROUP + TRAIN + "dist.destroy_process_group()")


def test_the_command_says_what_to_install() -> None:
    done = call("-c", _without(MISSING) + "sys.argv = ['dynamix', 'doctor']\nfrom dynamix.cli import main\nmain()")
    assert done.returncode == 1
    assert "pip install '.[cli]'" in done.stderr

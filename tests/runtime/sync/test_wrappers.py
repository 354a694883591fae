"""What `torch.compile`, Fabric and Accelerate put around a model or an optimizer is looked through."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.jobs import as_under_torchrun
from tests.ranks import run_ranks
from tests.runtime.jobs import adaptive, furthest
from tests.union import Deep, Script, larger

SAMPLES = 96


def _trained(rank: int, stack: str) -> float:
    """The largest difference of any gradient from the union batch's."""
    as_under_torchrun(rank)
    torch.manual_seed(1)
    x, y = torch.randn(SAMPLES, 6, dtype=torch.float64), torch.randn(SAMPLES, 6, dtype=torch.float64)
    net = Deep(depth=3).double()
    whole = copy.deepcopy(net)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.01)
    model, optimizer, backward = STACKS[stack](net, optimizer)
    controller = adaptive(Script([[4, 12], [12, 4]]), max_batch_size=16)
    loader = controller.loader(DataLoader(TensorDataset(x, y), batch_size=8))
    if stack == "compiled before":
        backward(model(x[:8]).mean())  # what was compiled then knows nothing of the controller
        optimizer.zero_grad()
    assert controller.wrap(model, optimizer) is model
    worst, sizes = 0.0, set()
    for bx, by in loader:
        plan = loader.batch_sampler.plan()  # type: ignore[union-attr]
        union = slice(plan.start, plan.start + int(plan.counts.sum()))
        loss = F.mse_loss(model(bx), by)
        backward(loss)
        want = torch.autograd.grad(F.mse_loss(whole(x[union]), y[union]), list(whole.parameters()))
        worst = larger(worst, furthest(net, want))
        optimizer.step()
        whole.load_state_dict(net.state_dict())
        optimizer.zero_grad()
        controller.step(loss=loss)
        sizes.add(len(bx))
    assert len(sizes) > 1
    controller.close()
    return worst


def _compiled(net: Any, optimizer: Any) -> Any:
    return torch.compile(DDP(net), backend="eager"), optimizer, torch.Tensor.backward


def _accelerated(net: Any, optimizer: Any) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, prepared = accelerator.prepare(net, optimizer)
    return model, prepared, accelerator.backward


def _fabric(net: Any, optimizer: Any) -> Any:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="64-true")
    fabric.launch()
    model, prepared = fabric.setup(net, optimizer)
    return model, prepared, fabric.backward


STACKS: dict[str, Any] = {
    "compiled": _compiled,
    "compiled before": _compiled,
    "accelerate": _accelerated,
    "fabric": _fabric,
}


@pytest.mark.multiproc
@pytest.mark.parametrize("stack", STACKS)
def test_gradients_are_the_unions_through_every_wrapper(stack: str) -> None:
    limit = 1e-7 if stack == "fabric" else 1e-12  # Fabric gives outputs in single precision
    assert max(run_ranks(_trained, 2, stack)) < limit

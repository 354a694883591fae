"""Several updates, or several passes for one update, of one batch: each has the gradient of the union of all batches.

The same code trains on a rank's share under DDP and, in one process, on the union of the shares.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from tests.ranks import run_ranks
from tests.runtime.sync.sharded_jobs import full
from tests.union import Script, larger

pytestmark = pytest.mark.multiproc
SHARES, TOTAL, BATCHES = [[12, 4], [4, 12]], 16, 4


class Alone:
    """A job of one process, whose losses are means over the union already.

    due   whether this batch is the last of an accumulation
    """

    due = True

    def __init__(self, net: Any, optimizers: list[Optimizer]) -> None:
        self.net, self.model, self.optimizers, self.optimizer = net, net, optimizers, optimizers[0]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def mean(self, loss: Tensor) -> float:
        """Of a loss over this rank's samples: its mean over those of all ranks."""
        return float(loss)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """Let parameters have that of this batch alone; its loss."""
        self.net.zero_grad()
        loss = self.loss(x, y)
        self.backward(loss)
        return loss

    def closure(self, x: Tensor, y: Tensor) -> Any:
        """For an optimizer; all ranks go the same way after it."""
        return lambda: self.mean(self.gradient(x, y).detach())


class Shared(Alone):
    """A rank's part of a job; `own` samples of the batch in hand are its."""

    def __init__(self, net: Any, model: Any, optimizers: list[Optimizer], controller: Any, weighting: str) -> None:
        super().__init__(net, optimizers)
        self.model, self.controller, self.weighting, self.own = model, controller, weighting, 0

    def mean(self, loss: Tensor) -> float:
        part = loss * self.own / TOTAL
        dist.all_reduce(part, group=self.controller.group)
        return float(part)

    def backward(self, loss: Tensor) -> None:
        if self.weighting in ("loss", "counts"):
            loss = self.controller.weight(loss, **({"count": self.own} if self.weighting == "counts" else {}))
        loss.backward()


def sharpness_aware(job: Alone, x: Tensor, y: Tensor) -> None:
    """SAM: the gradient is taken where the loss is highest nearby."""
    job.gradient(x, y)
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in job.net.parameters()]).norm()
        away = [0.05 * p.grad / norm for p in job.net.parameters()]
        for parameter, step in zip(job.net.parameters(), away, strict=True):
            parameter.add_(step)
    job.gradient(x, y)
    with torch.no_grad():
        for parameter, step in zip(job.net.parameters(), away, strict=True):
            parameter.sub_(step)
    job.optimizer.step()


def body_and_head_in_turn(job: Alone, x: Tensor, y: Tensor) -> None:
    for optimizer in job.optimizers:
        job.gradient(x, y)
        optimizer.step()


def body_and_head_in_closures(job: Alone, x: Tensor, y: Tensor) -> None:
    for optimizer in job.optimizers:
        optimizer.step(job.closure(x, y))


def body_and_head_by_batch(job: Alone, x: Tensor, y: Tensor) -> None:
    job.optimizers.reverse()
    job.gradient(x, y)
    job.optimizers[0].step()


def policy_for_some_epochs(job: Alone, x: Tensor, y: Tensor) -> None:
    """PPO: a batch is trained several times, on a ratio to what the model said before."""
    with torch.no_grad():
        before = F.log_softmax(job.model(x), 1)
    for _ in range(3):
        ratio = (F.log_softmax(job.model(x), 1) - before).exp().gather(1, y[:, None])
        job.optimizer.zero_grad()
        job.backward(-ratio.clamp(0.8, 1.2).mean())
        job.optimizer.step()


def inner_step_and_outer_step(job: Alone, x: Tensor, y: Tensor) -> None:
    """First-order MAML: the gradient after a step is applied before it."""
    before = copy.deepcopy(job.net.state_dict())
    job.gradient(x, y)
    job.optimizer.step()
    job.gradient(x, y)
    job.net.load_state_dict(before)
    job.optimizer.step()


def line_search_of_ones_own(job: Alone, x: Tensor, y: Tensor) -> None:
    """The rate is halved until the step makes the loss smaller; the gradient at the new place is kept for the next."""
    before, start = job.mean(job.gradient(x, y).detach()), copy.deepcopy(job.net.state_dict())
    slope = [p.grad for p in job.net.parameters()]
    for halved in range(5):
        job.net.load_state_dict(start)
        for parameter, gradient in zip(job.net.parameters(), slope, strict=True):
            parameter.grad = gradient.clone()
        job.optimizer.param_groups[0]["lr"] = 0.5**halved
        job.optimizer.step()
        if job.mean(job.gradient(x, y).detach()) < before:
            return


def newton(job: Alone, x: Tensor, y: Tensor) -> None:
    job.optimizer.step(job.closure(x, y))


def one_gradient_twice(job: Alone, x: Tensor, y: Tensor) -> None:
    job.gradient(x, y)
    job.optimizer.step()
    job.optimizer.step()


def two_losses_that_both_cross(job: Alone, x: Tensor, y: Tensor) -> None:
    job.gradient(x, y)
    job.backward(job.model(x).square().mean())
    job.optimizer.step()


def two_passes_of_one_forward(job: Alone, x: Tensor, y: Tensor) -> None:
    job.optimizer.zero_grad()
    logits = job.model(x)
    F.cross_entropy(logits, y).backward(retain_graph=True)
    logits.square().mean().backward()
    job.optimizer.step()


def parts_of_a_batch(job: Alone, x: Tensor, y: Tensor) -> None:
    """An update for each half of a batch, which is in proportion to the share."""
    for half in (0, 1, 0, 1):
        job.gradient(x[half::2], y[half::2])
        job.optimizer.step()


def against_each_other(job: Alone, x: Tensor, y: Tensor) -> None:
    """The body is trained for what the head is trained against, and each is frozen while the other is."""
    parts = [job.net[0], job.net[2]]
    for optimizer, mine, sign in zip(job.optimizers, parts, (1.0, -1.0), strict=True):
        job.net.requires_grad_(False)
        mine.requires_grad_(True)
        optimizer.zero_grad()
        job.backward(sign * job.loss(x, y))
        optimizer.step()
    job.net.requires_grad_(True)


def penalty_on_gradients(job: Alone, x: Tensor, y: Tensor) -> None:
    for _ in range(2):
        job.optimizer.zero_grad()
        x = x.detach().requires_grad_()
        logits = job.model(x)
        (slope,) = torch.autograd.grad(logits.logsumexp(1).sum(), x, create_graph=True)
        job.backward(F.cross_entropy(logits, y) + slope.square().sum(1).mean())
        job.optimizer.step()


def a_scaler_that_skips(job: Alone, x: Tensor, y: Tensor) -> None:
    for factor in (1.0, float("inf"), 1.0):
        job.optimizer.zero_grad(set_to_none=False)
        job.backward(job.scaler.scale(job.loss(x, y)) * factor)
        job.scaler.step(job.optimizer)
        job.scaler.update()


def two_losses_accumulated(job: Alone, x: Tensor, y: Tensor) -> None:
    """All of them cross."""
    job.backward(job.loss(x, y) / 2)
    job.backward(job.model(x).square().mean() / 2)
    if job.due:
        job.optimizer.step()
        job.optimizer.zero_grad()


def two_updates_after_an_accumulation(job: Alone, x: Tensor, y: Tensor) -> None:
    two_losses_accumulated(job, x, y)
    if job.due:
        job.gradient(x, y)
        job.optimizer.step()
        job.optimizer.zero_grad()


Recipe = Callable[[Any, Tensor, Tensor], None]  # for one batch


def _of_parts(net: Any) -> list[Optimizer]:
    return [SGD(part.parameters(), lr=0.1) for part in (net[0], net[2])]


# Where it is not SGD of the whole net.
OPTIMIZERS: dict[Recipe, Callable[[Any], list[Optimizer]]] = {
    newton: lambda net: [torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")],
    policy_for_some_epochs: lambda net: [torch.optim.Adam(net.parameters(), lr=0.01)],
    one_gradient_twice: lambda net: [SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)],
    **dict.fromkeys(
        (body_and_head_in_turn, body_and_head_in_closures, body_and_head_by_batch, against_each_other), _of_parts
    ),
}
ACCUMULATED = (two_losses_accumulated, two_updates_after_an_accumulation)  # they have one count for each batch
OTHERS = (
    sharpness_aware,
    inner_step_and_outer_step,
    line_search_of_ones_own,
    two_losses_that_both_cross,
    parts_of_a_batch,
    penalty_on_gradients,
    a_scaler_that_skips,
)
COUNTED = (sharpness_aware, policy_for_some_epochs, two_losses_that_both_cross, newton)
# Under FSDP2, where a second backward pass of one forward pass crosses ranks, too.
SHARDED = (sharpness_aware, two_losses_that_both_cross, two_passes_of_one_forward, policy_for_some_epochs)
CASES = [
    *((recipe, weighting) for recipe in (*OPTIMIZERS, *ACCUMULATED, *OTHERS) for weighting in ("hook", "loss")),
    *((recipe, "counts") for recipe in COUNTED),
    *((recipe, "sharded") for recipe in SHARDED),
]


def _trained(recipe: Recipe, weighting: str, *, fewer: int = 0) -> float | str:
    """How far parameters come from those of the union, or what the loop is refused with."""
    torch.manual_seed(1)
    samples, group = TOTAL * BATCHES - fewer, dist.new_group()
    dataset = TensorDataset(torch.randn(samples, 6, dtype=torch.float64), torch.randint(0, 3, (samples,)))
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizers_of = OPTIMIZERS.get(recipe, lambda net: [SGD(net.parameters(), lr=0.1)])
    whole, accumulate = copy.deepcopy(net), 2 if recipe in ACCUMULATED else 1
    options = {"max_batch_size": 12, "interval": 1, "accumulate": accumulate, "process_group": group}
    controller = dynamix.Controller(Script(SHARES, accumulate), TOTAL // 2, **options)
    sampler = controller.batch_sampler(dataset, shuffle=False)
    if weighting == "sharded":
        for part in (net[0], net):
            fully_shard(part, mesh=DeviceMesh.from_group(group, "cpu"))
    unused = recipe is against_each_other
    model = net if weighting == "sharded" else DDP(net, process_group=group, find_unused_parameters=unused)
    job = Shared(net, model, optimizers_of(net), controller, weighting)
    alone, worst = Alone(whole, optimizers_of(whole)), 0.0
    for optimizer in job.optimizers:
        controller.wrap(model, optimizer, weighting="loss" if weighting in ("loss", "counts") else "hook")
    try:
        for number, (x, y) in enumerate(DataLoader(dataset, batch_sampler=sampler)):
            job.own, job.due = len(x), controller.optimizer_due
            alone.due = job.due
            recipe(job, x, y)
            controller.step()
            recipe(alone, *dataset[TOTAL * number : TOTAL * (number + 1)])
            for mine, theirs in zip(net.parameters(), whole.parameters(), strict=True):
                worst = larger(worst, float((full(mine.detach()) - theirs.detach()).norm() / theirs.detach().norm()))
    except dynamix.DynamixError as error:
        return str(error)
    assert number == BATCHES - 1
    controller.close()
    return worst


def _all_trained(rank: int) -> list[float | str]:
    unlike = _trained(two_losses_accumulated, "hook", fewer=9)
    return [*(_trained(recipe, weighting) for recipe, weighting in CASES), unlike]


@pytest.fixture(scope="module")
def told() -> list[list[float | str]]:
    """Of each rank: of all cases, and of an accumulation over batches that are unlike in size."""
    return run_ranks(_all_trained, 2, timeout_s=200)


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda n: f"{CASES[n][0].__name__}-{CASES[n][1]}")
def test_its_gradients_are_those_of_the_union(case: int, told: list[list[float | str]]) -> None:
    for of_rank in told:
        furthest = of_rank[case]
        assert isinstance(furthest, float), furthest
        assert furthest < 1e-10


def test_what_has_crossed_is_not_scaled_by_a_second_loss_of_a_smaller_batch(told: list[list[float | str]]) -> None:
    for of_rank in told:
        assert "write (loss1 + loss2).backward()" in str(of_rank[-1])

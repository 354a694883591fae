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
SHARES, TOTAL, BATCHES = [[12, 4], [4, 12]], 16, 6
WEIGHTINGS = ("hook", "loss", "counts")


class Alone:
    """A job of one process, whose losses are means over the union already.

    due   whether this batch is the last of an accumulation
    """

    due = True

    def mean(self, loss: Tensor) -> Tensor:
        """Of a loss over this rank's samples: its mean over those of all ranks."""
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Shared(Alone):
    """A rank's part of a job."""

    def __init__(self, controller: dynamix.Controller, weighting: str) -> None:
        self.controller, self.weighting = controller, weighting
        self.own = 0  # samples of the batch in hand

    def mean(self, loss: Tensor) -> Tensor:
        part = loss * self.own / TOTAL
        dist.all_reduce(part, group=self.controller.group)
        return part

    def backward(self, loss: Tensor) -> None:
        if self.weighting == "loss":
            loss = self.controller.weight(loss)
        if self.weighting == "counts":
            loss = self.controller.weight(loss, count=self.own)
        loss.backward()


Train = Callable[[nn.Module, Tensor, Tensor, Alone], None]  # on one batch
Recipe = Callable[[nn.Module], tuple[list[Optimizer], Train]]


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _sharpness(net: nn.Module, optimizer: Optimizer, ascend: Callable[[], None], descend: Callable[[], None]) -> None:
    """SAM: the gradient is taken where the loss is highest nearby."""
    ascend()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
        away = [0.05 * p.grad / norm if p.grad is not None else torch.zeros_like(p) for p in net.parameters()]
        for parameter, step in zip(net.parameters(), away, strict=True):
            parameter.add_(step)
    optimizer.zero_grad()
    descend()
    with torch.no_grad():
        for parameter, step in zip(net.parameters(), away, strict=True):
            parameter.sub_(step)


def sharpness_aware(net: nn.Module) -> tuple[list[Optimizer], Train]:
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        _sharpness(net, optimizer, lambda: job.backward(_loss(model, x, y)), lambda: job.backward(_loss(model, x, y)))
        optimizer.step()
        optimizer.zero_grad()

    return [optimizer], train


def sharpness_aware_in_a_closure(net: nn.Module) -> tuple[list[Optimizer], Train]:
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        def closure() -> float:
            _sharpness(
                net, optimizer, lambda: job.backward(_loss(model, x, y)), lambda: job.backward(_loss(model, x, y))
            )
            return 0.0

        optimizer.zero_grad()
        optimizer.step(closure)

    return [optimizer], train


def body_and_head_in_turn(net: nn.Module) -> tuple[list[Optimizer], Train]:
    body, head = (SGD(part.parameters(), lr=0.1) for part in (net[0], net[2]))  # type: ignore[index]

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        for optimizer in (body, head):
            model.zero_grad()
            job.backward(_loss(model, x, y))
            optimizer.step()
        model.zero_grad()

    return [body, head], train


def body_and_head_by_batch(net: nn.Module) -> tuple[list[Optimizer], Train]:
    both: list[Optimizer] = [SGD(part.parameters(), lr=0.1) for part in (net[0], net[2])]  # type: ignore[index]

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        both.reverse()
        model.zero_grad()
        job.backward(_loss(model, x, y))
        both[0].step()
        model.zero_grad()

    return list(both), train


def one_optimizer_twice(net: nn.Module) -> tuple[list[Optimizer], Train]:
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            job.backward(_loss(model, x, y))
            optimizer.step()

    return [optimizer], train


def two_updates_in_closures(net: nn.Module) -> tuple[list[Optimizer], Train]:
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        for _ in range(2):
            optimizer.step(_closure(model, x, y, job))

    return [optimizer], train


def body_and_head_in_closures(net: nn.Module) -> tuple[list[Optimizer], Train]:
    both: list[Optimizer] = [SGD(part.parameters(), lr=0.1) for part in (net[0], net[2])]  # type: ignore[index]

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        for optimizer in both:
            optimizer.step(_closure(model, x, y, job))

    return both, train


def _closure(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> Callable[[], float]:
    def closure() -> float:
        model.zero_grad()
        loss = _loss(model, x, y)
        job.backward(loss)
        return float(loss.detach())

    return closure


def policy_for_some_epochs(net: nn.Module) -> tuple[list[Optimizer], Train]:
    """PPO: a batch is trained several times, on a ratio to what the model said before."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        with torch.no_grad():
            before = F.log_softmax(model(x), 1)
        for _ in range(3):
            ratio = (F.log_softmax(model(x), 1) - before).exp().gather(1, y[:, None])
            loss = -ratio.clamp(0.8, 1.2).mean()
            optimizer.zero_grad()
            job.backward(loss)
            optimizer.step()

    return [optimizer], train


def inner_step_and_outer_step(net: nn.Module) -> tuple[list[Optimizer], Train]:
    """First-order MAML: the gradient after a step is applied before it."""
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        before = copy.deepcopy(net.state_dict())
        for last in (False, True):
            optimizer.zero_grad()
            job.backward(_loss(model, x, y))
            if not last:
                optimizer.step()
        net.load_state_dict(before)
        optimizer.step()

    return [optimizer], train


def two_losses_of_one_pass(net: nn.Module) -> tuple[list[Optimizer], Train]:
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        optimizer.zero_grad()
        logits, again = model(x), model(x + 0.1)
        job.backward(F.cross_entropy(logits, y) + F.mse_loss(again, logits.detach()))
        optimizer.step()

    return [optimizer], train


def line_search_of_ones_own(net: nn.Module) -> tuple[list[Optimizer], Train]:
    """The rate is halved until the step makes the loss smaller; the gradient at the new place is kept for the next."""
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        optimizer.zero_grad()
        loss = _loss(model, x, y)
        job.backward(loss)
        before, start = float(job.mean(loss.detach())), copy.deepcopy(net.state_dict())
        slope = [p.grad for p in net.parameters()]
        for halved in range(5):
            net.load_state_dict(start)
            for parameter, gradient in zip(net.parameters(), slope, strict=True):
                parameter.grad = gradient.clone()  # type: ignore[union-attr]
            optimizer.param_groups[0]["lr"] = 0.5**halved
            optimizer.step()
            optimizer.zero_grad()
            loss = _loss(model, x, y)
            job.backward(loss)
            if float(job.mean(loss.detach())) < before:
                return

    return [optimizer], train


def _newton(net: nn.Module, **options: Any) -> tuple[list[Optimizer], Train]:
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3, **options)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = _loss(model, x, y)
            job.backward(loss)
            return float(job.mean(loss.detach()))  # so all ranks go the same way

        optimizer.step(closure)

    return [optimizer], train


def newton(net: nn.Module) -> tuple[list[Optimizer], Train]:
    return _newton(net)


def newton_with_a_line_search(net: nn.Module) -> tuple[list[Optimizer], Train]:
    return _newton(net, line_search_fn="strong_wolfe")


def one_gradient_twice(net: nn.Module) -> tuple[list[Optimizer], Train]:
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        optimizer.zero_grad()
        job.backward(_loss(model, x, y))
        optimizer.step()
        optimizer.step()

    return [optimizer], train


def rate_halved_until_the_loss_falls(net: nn.Module) -> tuple[list[Optimizer], Train]:
    """A line search that needs no gradient but the first."""
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        optimizer.zero_grad()
        loss = _loss(model, x, y)
        job.backward(loss)
        before, start = float(job.mean(loss.detach())), copy.deepcopy(net.state_dict())
        for halved in range(5):
            net.load_state_dict(start)
            optimizer.param_groups[0]["lr"] = 64 * 0.5**halved
            optimizer.step()
            with torch.no_grad():
                if float(job.mean(_loss(model, x, y))) < before:
                    return

    return [optimizer], train


def two_losses_that_both_cross(net: nn.Module) -> tuple[list[Optimizer], Train]:
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        optimizer.zero_grad()
        job.backward(_loss(model, x, y))
        job.backward(model(x).square().mean())
        optimizer.step()

    return [optimizer], train


def two_passes_of_one_forward(net: nn.Module) -> tuple[list[Optimizer], Train]:
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        optimizer.zero_grad()
        logits = model(x)
        F.cross_entropy(logits, y).backward(retain_graph=True)
        logits.square().mean().backward()
        optimizer.step()

    return [optimizer], train


def a_loss_for_each_update(net: nn.Module) -> tuple[list[Optimizer], Train]:
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        for loss in (lambda: _loss(model, x, y), lambda: model(x + 0.1).square().mean()):
            optimizer.zero_grad()
            job.backward(loss())
            optimizer.step()

    return [optimizer], train


def parts_of_a_batch(net: nn.Module) -> tuple[list[Optimizer], Train]:
    """An update for each half of a batch, which is in proportion to the share."""
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        for _ in range(2):
            for half in range(2):
                optimizer.zero_grad()
                job.backward(_loss(model, x[half::2], y[half::2]))
                optimizer.step()

    return [optimizer], train


def against_each_other(net: nn.Module) -> tuple[list[Optimizer], Train]:
    """The body is trained for what the head is trained against, and each is frozen while the other is."""
    parts = [(net[0], net[2], 1.0), (net[2], net[0], -1.0)]  # type: ignore[index]
    steps = [(SGD(mine.parameters(), lr=0.1), mine, other, sign) for mine, other, sign in parts]

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        for optimizer, mine, other, sign in steps:
            mine.requires_grad_(True)
            other.requires_grad_(False)
            optimizer.zero_grad()
            job.backward(sign * _loss(model, x, y))
            optimizer.step()
        net.requires_grad_(True)

    return [optimizer for optimizer, *_ in steps], train


def penalty_on_gradients(net: nn.Module) -> tuple[list[Optimizer], Train]:
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            x = x.detach().requires_grad_()
            logits = model(x)
            (slope,) = torch.autograd.grad(logits.logsumexp(1).sum(), x, create_graph=True)
            job.backward(F.cross_entropy(logits, y) + slope.square().sum(1).mean())
            optimizer.step()

    return [optimizer], train


def a_scaler_that_skips(net: nn.Module) -> tuple[list[Optimizer], Train]:
    optimizer, scaler = SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad(set_to_none=False)
            job.backward(scaler.scale(_loss(model, x, y)) * factor)
            scaler.step(optimizer)
            scaler.update()

    return [optimizer], train


def two_losses_accumulated(net: nn.Module) -> tuple[list[Optimizer], Train]:
    """All of them cross."""
    optimizer = SGD(net.parameters(), lr=0.1)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        job.backward(_loss(model, x, y) / 2)
        job.backward(model(x).square().mean() / 2)
        if job.due:
            optimizer.step()
            optimizer.zero_grad()

    return [optimizer], train


def two_updates_after_an_accumulation(net: nn.Module) -> tuple[list[Optimizer], Train]:
    optimizer, first = SGD(net.parameters(), lr=0.1), two_losses_accumulated(net)

    def train(model: nn.Module, x: Tensor, y: Tensor, job: Alone) -> None:
        first[1](model, x, y, job)
        if job.due:
            job.backward(_loss(model, x, y))
            optimizer.step()
            optimizer.zero_grad()

    return [optimizer, *first[0]], train


RECIPES: tuple[Recipe, ...] = (
    sharpness_aware,
    sharpness_aware_in_a_closure,
    body_and_head_in_turn,
    body_and_head_in_closures,
    body_and_head_by_batch,
    one_optimizer_twice,
    two_updates_in_closures,
    policy_for_some_epochs,
    inner_step_and_outer_step,
    two_losses_of_one_pass,
    line_search_of_ones_own,
    newton,
    newton_with_a_line_search,
    one_gradient_twice,
    rate_halved_until_the_loss_falls,
    two_losses_that_both_cross,
    a_loss_for_each_update,
    parts_of_a_batch,
    against_each_other,
    penalty_on_gradients,
    a_scaler_that_skips,
    two_losses_accumulated,
    two_updates_after_an_accumulation,
)
ACCUMULATED = (two_losses_accumulated, two_updates_after_an_accumulation)
# Under FSDP2, where a second backward pass of one forward pass crosses ranks, too.
SHARDED = (
    sharpness_aware,
    two_losses_that_both_cross,
    two_passes_of_one_forward,
    a_loss_for_each_update,
    one_optimizer_twice,
)
# Losses that accumulate have one count for each batch.
CASES = [
    (recipe, weighting)
    for recipe in RECIPES
    for weighting in WEIGHTINGS
    if not (recipe in ACCUMULATED and weighting == "counts")
] + [(recipe, "sharded") for recipe in SHARDED]


def _accumulated_unlike(rank: int) -> float | str:
    """What becomes of losses that all cross, where the batches of an optimizer step are unlike in size."""
    try:
        return _trained(two_losses_accumulated, "hook", dist.new_group(), fewer=9)
    except dynamix.UsageError as error:
        return str(error)


def test_what_has_crossed_is_not_scaled_by_a_second_loss_of_a_smaller_batch() -> None:
    for told in run_ranks(_accumulated_unlike, 2, timeout_s=60):
        assert isinstance(told, str), told
        assert "write (loss1 + loss2).backward()" in told


def _furthest(rank: int) -> dict[tuple[str, str], float | str]:
    """By recipe and weighting: how far parameters come from those of the union, or what the loop is refused with."""
    told: dict[tuple[str, str], float | str] = {}
    for recipe, weighting in CASES:
        try:
            told[recipe.__name__, weighting] = _trained(recipe, weighting, dist.new_group())
        except dynamix.DynamixError as error:
            told[recipe.__name__, weighting] = str(error)
    return told


def _trained(recipe: Recipe, weighting: str, group: Any, fewer: int = 0) -> float:
    torch.manual_seed(1)
    samples = TOTAL * BATCHES - fewer
    dataset = TensorDataset(torch.randn(samples, 6, dtype=torch.float64), torch.randint(0, 3, (samples,)))
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    whole = copy.deepcopy(net)
    _, train_whole = recipe(whole)
    accumulate = 2 if recipe in ACCUMULATED else 1
    controller = dynamix.Controller(
        Script(SHARES, accumulate),
        TOTAL // 2,
        max_batch_size=12,
        interval=1,
        accumulate=accumulate,
        process_group=group,
    )
    sampler = controller.batch_sampler(dataset, shuffle=False)
    if weighting == "sharded":
        for part in (net[0], net):
            fully_shard(part, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizers, train = recipe(net)
    unused = recipe is against_each_other
    model = net if weighting == "sharded" else DDP(net, process_group=group, find_unused_parameters=unused)
    for optimizer in optimizers:
        controller.wrap(model, optimizer, weighting="loss" if weighting in ("loss", "counts") else "hook")
    job, alone, worst = Shared(controller, weighting), Alone(), 0.0
    for number, (x, y) in enumerate(DataLoader(dataset, batch_sampler=sampler)):
        job.own, job.due = len(x), controller.optimizer_due
        alone.due = job.due
        train(model, x, y, job)
        controller.step()
        train_whole(whole, *dataset[TOTAL * number : TOTAL * (number + 1)], alone)
        for mine, theirs in zip(net.parameters(), whole.parameters(), strict=True):
            worst = larger(worst, float((full(mine.detach()) - theirs.detach()).norm() / theirs.detach().norm()))
    assert number == BATCHES - 1
    controller.close()
    return worst


Told = list[dict[tuple[str, str], float | str]]  # of each rank


@pytest.fixture(scope="module")
def told() -> Told:
    return run_ranks(_furthest, 2, timeout_s=200)


@pytest.mark.parametrize(("recipe", "weighting"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_its_gradients_are_those_of_the_union(recipe: Recipe, weighting: str, told: Told) -> None:
    for of_rank in told:
        furthest = of_rank[recipe.__name__, weighting]
        assert isinstance(furthest, float), furthest
        assert furthest < 1e-10

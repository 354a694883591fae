"""Ranks that part while they train: settings, the place in the data, parameters; and what only looks so."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamix
from dynamix.errors import UsageError
from dynamix.runtime.facts.parting import Parting
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, apart, classes
from tests.union import Script

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]
FROM, INTERVAL = 30, 5
Loop = Callable[[Training, int, int], None]  # what a user's loop does after an optimizer step, by step and rank


def _deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _train(
    rank: int,
    loop: Loop,
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    steps: int = 60,
    policy: str = "static",
) -> str:
    controller = dynamix.Controller(policy, 8, interval=INTERVAL)
    net = _deep()
    data, optimizer = classes(8 * steps * controller.world_size), kind(net.parameters(), **options)
    job = Training(controller, data, net, optimizer=optimizer)
    done = 0
    try:
        for x, y in job.loader:
            job.backward(x, y)
            if controller.optimizer_due:
                job.update()
            loop(job, done, rank)
            controller.step()
            done += 1
    except UsageError as error:
        return f"after {done}: {error}"
    controller.close()
    return "silent"


class _Set:
    """Rank 1 sets it from some step on."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def __call__(self, job: Training, step: int, rank: int) -> None:
        if step >= FROM and rank == 1:
            job.optimizer.param_groups[0][self.name] = self.value


def _group_on_one(job: Training, step: int, rank: int) -> None:
    if step == FROM and rank == 1:
        job.optimizer.add_param_group({"params": [job.optimizer.param_groups[0]["params"].pop()]})


def _scheduled_by_rank(job: Training, step: int, rank: int) -> None:
    job.optimizer.param_groups[0]["lr"] = 0.1 * (0.99 if rank else 0.98) ** step


SGD, ADAM = torch.optim.SGD, torch.optim.AdamW
PARTED = {
    "rate": (_Set("lr", 0.05), SGD, {"lr": 0.1}, "lr of parameter group 0 is 0.1 on rank 0, 0.05 on rank 1"),
    "rate as tensor": (_Set("lr", torch.tensor(0.5)), SGD, {"lr": 0.1}, "0.1 on rank 0, 0.5 on rank 1"),
    "decay": (_Set("weight_decay", 0.1), SGD, {"lr": 0.1}, "weight_decay of parameter group 0 is 0 on rank 0, 0.1 on"),
    "momentum": (_Set("momentum", 0.8), SGD, {"lr": 0.1, "momentum": 0.9}, "momentum of parameter group 0 is 0.9 on"),
    "betas": (
        _Set("betas", (0.9, 0.99)),
        ADAM,
        {},
        "betas of parameter group 0 is [0.9, 0.999] on rank 0, [0.9, 0.99]",
    ),
    "maximize": (_Set("maximize", True), ADAM, {}, "maximize of parameter group 0 is false on rank 0, true on rank 1"),
    "a group": (_group_on_one, SGD, {"lr": 0.1}, "each parameter group is [[4]] on rank 0, [[3, 1]] on rank 1"),
}


@pytest.mark.parametrize("case", PARTED)
def test_settings_that_differ_end_all_ranks_and_are_named(case: str) -> None:
    loop, kind, options, words = PARTED[case]
    for said in run_ranks(_train, 2, loop, kind, options):
        assert words in said
        assert FROM < int(said.split()[1].strip(":")) <= FROM + 2 * INTERVAL + 2


@pytest.mark.parametrize("policy", ["stigmergic", "lb_bsp"])
def test_every_policy_compares_settings(policy: str) -> None:
    for said in run_ranks(_train, 3, _scheduled_by_rank, SGD, {"lr": 0.1}, 60, policy):
        assert "lr of parameter group 0 is 0.0" in said


def _moved(job: Training, step: int, rank: int) -> None:
    if step == FROM and rank == 1:
        job.net[0].weight.data.add_(0.1)


def _moved_on_the_first(job: Training, step: int, rank: int) -> None:
    if step == FROM and rank == 0:
        job.net[2].bias.data.mul_(2.0)


def _begun_anew(job: Training, step: int, rank: int) -> None:
    if step == FROM:
        torch.manual_seed(rank)
        job.net[2].reset_parameters()


def _noise_by_rank(job: Training, step: int, rank: int) -> None:
    if step >= FROM:
        generator = torch.Generator().manual_seed(rank + 2 * step)
        for p in job.net.parameters():
            p.data.add_(1e-3 * torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("loop", [_moved, _moved_on_the_first, _begun_anew, _noise_by_rank])
def test_parameters_that_one_rank_moves_alone_end_all_ranks_within_two_windows(loop: Loop) -> None:
    for said in run_ranks(_train, 2, loop, SGD, {"lr": 0.1}):
        assert "the ranks' parameters have come to differ by optimizer step" in said
        assert "of rank 1 differs from rank 0's by" in said
        assert int(said.split()[1].strip(":")) <= FROM + 2 * INTERVAL + 1


def test_parameters_are_compared_where_every_rank_decides_for_itself() -> None:
    for said in run_ranks(_train, 3, _moved, ADAM, {"lr": 0.01}, 60, "stigmergic"):
        assert "0.weight of rank 1 differs" in said


def _nothing(job: Training, step: int, rank: int) -> None:
    pass


def _last_bits(job: Training, step: int, rank: int) -> None:
    """What a device that is not like the others may do to its parameters."""
    if rank == 1:
        for p in job.net.parameters():
            p.data.copy_(torch.nextafter(p.data, torch.full_like(p.data, math.inf)))


def _last_bits_and_a_rate_that_ends(job: Training, step: int, rank: int) -> None:
    _last_bits(job, step, rank)
    job.optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * min(step / 500, 1.0)))


def _rates_in_last_bits(job: Training, step: int, rank: int) -> None:
    """As math libraries that are not alike give them."""
    rate = 0.1 * 0.99**step
    job.optimizer.param_groups[0]["lr"] = math.nextafter(rate, 1.0) if rank else rate


def _frozen(job: Training, step: int, rank: int) -> None:
    _last_bits(job, step, rank) if step < FROM else None
    job.optimizer.param_groups[0]["lr"] = 0.1 if step < FROM else 0.0


def _best_again(job: Training, step: int, rank: int) -> None:
    if step % 40 == 20:
        _BEST.update({name: value.clone() for name, value in job.net.state_dict().items()})
    if step % 40 == 39:
        job.net.load_state_dict(_BEST)


_BEST: dict[str, Tensor] = {}
RIGHT = {
    "last bits": (_last_bits, SGD, {"lr": 0.01, "momentum": 0.9}, 1000),
    "last bits, Adam": (_last_bits, ADAM, {"lr": 1e-4}, 1000),
    "last bits, to rate 0": (_last_bits_and_a_rate_that_ends, SGD, {"lr": 0.1}, 1000),
    "last bits of rates": (_rates_in_last_bits, SGD, {"lr": 0.1}, 100),
    "rate 0": (_nothing, SGD, {"lr": 0.0}, 100),
    "tiny rate": (_last_bits, SGD, {"lr": 1e-12}, 200),
    "rate 0 later": (_frozen, SGD, {"lr": 0.1}, 200),
    "best weights again": (_best_again, SGD, {"lr": 0.1}, 200),
    "momentum": (_nothing, SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}, 100),
}


@pytest.mark.parametrize("case", RIGHT)
def test_ranks_that_differ_in_last_bits_or_not_at_all_train_on(case: str) -> None:
    loop, kind, options, steps = RIGHT[case]
    assert run_ranks(_train, 2, loop, kind, options, steps) == ["silent"] * 2


def _odd(rank: int, how: str) -> str:
    """Loops whose ranks do unlike things and hold the same all the same."""
    controller = dynamix.Controller(Script([[3, 13], [12, 4]]), 8, interval=INTERVAL)
    net: nn.Module = _deep()
    if how == "dropout":
        net = nn.Sequential(net, nn.Dropout(0.5))
        torch.manual_seed(rank)  # after the weights were drawn
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if how == "scaler" else None
    job = Training(controller, classes(16 * 100), net, lr=0.05, scaler=scaler)
    for step, (x, y) in enumerate(job.loader):
        loss = F.cross_entropy(job.model(x * (1 + rank) if how == "own scale" else x), y)
        if how == "infinite" and step % 7 == 3 and rank == 1:
            loss = loss * math.nan
        (loss if scaler is None else scaler.scale(loss * (math.inf if step == 50 else 1.0))).backward()
        if how == "clipped":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        if how == "infinite" and not all(p.grad is None or p.grad.isfinite().all() for p in net.parameters()):
            job.optimizer.zero_grad()
        if scaler is not None:
            scaler.step(job.optimizer)
            scaler.update()
        else:
            job.optimizer.step()
        job.optimizer.zero_grad()
        controller.step()
    controller.close()
    return "silent"


@pytest.mark.parametrize("how", ["dropout", "scaler", "own scale", "clipped", "infinite"])
def test_loops_whose_ranks_do_unlike_things_train_on(how: str) -> None:
    assert run_ranks(_odd, 2, how) == ["silent"] * 2


def _apart(rank: int) -> str:
    """Between meetings models differ, and a rate follows each worker's own steps."""
    controller = apart(Script([[20, 12], [8, 24]]), 16)
    job = Training(controller, classes(640))
    for x, y in job.loader:
        job.train(x, y)
        job.optimizer.param_groups[0]["lr"] *= 0.99
    controller.close()
    return "silent"


def test_workers_that_step_apart_need_no_settings_alike() -> None:
    assert run_ranks(_apart, 2) == ["silent"] * 2


# ---------------------------------------------------------------- what rows say, in one process


class Two:
    """The parts of two ranks, whose windows close together."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, layers: int = 2) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(4, 4, dtype=dtype) for _ in range(layers)))
        self.nets = [net, copy.deepcopy(net)]
        self.optimizers = [SGD(net.parameters(), lr=0.1) for net in self.nets]
        each = zip(self.optimizers, self.nets, strict=True)
        self.parts, self.steps = [Parting([optimizer], [net]) for optimizer, net in each], 0

    def move(self, by: float, more_on_one: float = 0.0) -> None:
        """What a window does to all elements."""
        with torch.no_grad():
            for net, more in zip(self.nets, (0.0, more_on_one), strict=True):
                for p in net.parameters():
                    p.add_(by + more)

    def close(self, steps: int = 10, **place_of_one: int) -> Parting:
        """A window ends; rank 0, which looks at the rows."""
        self.steps += steps
        place = {"optimizer steps": self.steps, "samples trained": 8 * self.steps, "position in the data": 7}
        places = place, place | {name.replace("_", " "): value for name, value in place_of_one.items()}
        rows = [part.row(where) for part, where in zip(self.parts, places, strict=True)]
        self.parts[0].look(np.array(rows))
        return self.parts[0]


def test_digests_are_of_settings_and_of_the_place() -> None:
    two = Two()
    assert not two.close().differ()
    assert two.close(samples_trained=3).differ()
    assert two.close(position_in_the_data=8).differ()
    assert not two.close().differ()
    two.optimizers[1].param_groups[0]["nesterov"] = True
    assert two.close().differ()


def test_settings_are_named_by_group_and_optimizer() -> None:
    two = Two()
    one, other, *_ = two.nets[0].parameters()
    of_bias = torch.optim.Adam([{"params": [one]}, {"params": [other], "eps": 1e-7}])
    facts, near = Parting([two.optimizers[0], of_bias]).facts({"samples trained": 3})
    assert facts["samples trained"] == 3
    assert (facts["lr of parameter group 0"], facts["eps of parameter group 1 of optimizer 1"]) == (0.1, 1e-7)
    assert near["lr of parameter group 0"] == 1e-9


def test_what_a_rank_may_have_as_it_likes_is_in_no_digest() -> None:
    two = Two()
    for rank, optimizer in enumerate(two.optimizers):
        optimizer.param_groups[0] |= {"foreach": bool(rank), "device": f"cuda:{rank}", "of": object()}
        optimizer.param_groups[0] |= {"norm that was logged": 0.5} if rank == 0 else {}
    assert not two.close().differ()


def test_parameters_that_one_rank_has_put_into_other_memory_are_followed_there() -> None:
    """As by code that saves a model from the host, or evaluates averaged weights, on the first rank."""
    two = Two()
    two.close()
    for _ in range(3):
        for p in two.nets[0].parameters():
            p.data = p.data.clone()
        two.move(0.1)
        assert two.close().wrong is None
    two.move(0.1, 0.01)
    assert "of rank 1 differs from rank 0's" in (two.close().wrong or "")


@pytest.mark.filterwarnings("ignore:the ranks' parameters have come to differ")
def test_a_small_difference_that_stays_ends_nothing_and_one_that_grows_does() -> None:
    two, said = Two(), list[str | None]()
    two.close()
    for extra in (0.0002, 0.0, 0.0, 0.0, 0.0002, 0.0002, 0.0002):
        two.move(0.1, extra)
        said.append(two.close().wrong)
    assert said[:-1] == [None] * 6
    assert "of rank 1 differs from rank 0's by 0.008 of what a window moves" in (said[-1] or "")


def test_a_small_difference_is_warned_of_once() -> None:
    two = Two()
    two.close()
    two.move(0.1, 0.0002)
    two.close()
    with pytest.warns(RuntimeWarning, match="differs from rank 0's by 0.002 of what a window moves"):
        two.close()
    assert two.close().wrong is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_last_bits_add_up_over_any_number_of_windows(dtype: torch.dtype) -> None:
    two = Two(dtype)
    for _ in range(200):
        two.move(1e-4)
        for p in two.nets[1].parameters():
            for _ in range(10):
                p.data.copy_(torch.nextafter(p.data, torch.full_like(p.data, math.inf)))
        part = two.close()
        assert part.wrong is None
        assert part._warning is None


def test_every_parameter_of_a_deep_model_is_looked_at_in_its_turn() -> None:
    two = Two(layers=40)
    last = list(two.nets[1].parameters())[-3]
    for _ in range(128 * 6):
        two.move(0.01)
        last.data.add_(0.01)
        if two.close().wrong is not None:
            return
    raise AssertionError("never seen")

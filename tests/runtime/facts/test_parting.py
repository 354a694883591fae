"""Ranks that part while they train: settings, the place in the data, parameters; and what only looks so."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

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
    kind: type[torch.optim.Optimizer] = torch.optim.SGD,
    options: dict[str, Any] | None = None,
    steps: int = 60,
    policy: str = "static",
) -> str:
    """What becomes of a job, in a group of its own: an error of an earlier one must not reach it."""
    controller = dynamix.Controller(policy, 8, interval=INTERVAL, process_group=dist.new_group())
    net = _deep()
    optimizer = kind(net.parameters(), **({"lr": 0.1} if options is None else options))
    job = Training(controller, classes(8 * steps * controller.world_size), net, optimizer=optimizer)
    done = 0
    try:
        for x, y in job.loader:
            job.backward(x, y)
            job.update()
            loop(job, done, rank)
            controller.step()
            done += 1
    except UsageError as error:
        return f"after {done}: {error}"
    controller.close()
    return "silent"


def _train_all(rank: int, cases: dict[str, tuple[Any, ...]]) -> dict[str, str]:
    return {name: _train(rank, *case) for name, case in cases.items()}


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
SETTINGS: dict[str, tuple[Any, ...]] = {
    "lr of parameter group 0 is 0.1 on rank 0, 0.05 on rank 1": (_Set("lr", 0.05),),
    "lr of parameter group 0 is 0.1 on rank 0, 0.5 on rank 1": (_Set("lr", torch.tensor(0.5)),),
    "betas of parameter group 0 is [0.9, 0.999] on rank 0, [0.9, 0.99]": (_Set("betas", (0.9, 0.99)), ADAM, {}),
    "maximize of parameter group 0 is false on rank 0, true on rank 1": (_Set("maximize", True), ADAM, {}),
    "each parameter group is [[4]] on rank 0, [[3, 1]] on rank 1": (_group_on_one,),
}


def test_settings_that_differ_end_all_ranks_and_are_named() -> None:
    for told in run_ranks(_train_all, 2, SETTINGS):
        for words, said in told.items():
            assert words in said
            assert FROM < int(said.split()[1].strip(":")) <= FROM + 2 * INTERVAL + 2


def _moved(job: Training, step: int, rank: int) -> None:
    if step == FROM and rank == 1:
        job.net[0].weight.data.add_(0.1)


def _noise_by_rank(job: Training, step: int, rank: int) -> None:
    if step >= FROM:
        generator = torch.Generator().manual_seed(rank + 2 * step)
        for p in job.net.parameters():
            p.data.add_(1e-3 * torch.randn(p.shape, generator=generator))


MOVED: dict[str, tuple[Any, ...]] = {"on rank 1": (_moved,), "on all ranks": (_noise_by_rank,)}


def test_parameters_that_one_rank_moves_alone_end_all_ranks_within_two_windows() -> None:
    for told in run_ranks(_train_all, 2, MOVED):
        for case, said in told.items():
            assert "parameters are no longer equal on all ranks at optimizer step" in said, case
            assert "of rank 1 differs from rank 0 by" in said, case
            assert int(said.split()[1].strip(":")) <= FROM + 2 * INTERVAL + 1, case


def _without_ddp(rank: int, *, averages: bool) -> str:
    """A net that no DDP reduces, whose loss is weighted as the loop may."""
    controller = dynamix.Controller("static", 8, interval=INTERVAL, process_group=dist.new_group())
    data = classes(8 * 30 * controller.world_size)
    loader = controller.loader(DataLoader(data, batch_size=8, shuffle=True))
    net = _deep()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"Sequential is no DDP model: write wrap\(DDP\(net\), optimizer\)"):
        controller.wrap(net, optimizer)
    controller.wrap(net, optimizer, weighting="loss")
    try:
        for x, y in loader:
            controller.weight(nn.functional.cross_entropy(net(x), y)).backward()
            for p in net.parameters() if averages else ():
                assert p.grad is not None
                dist.all_reduce(p.grad.div_(controller.world_size))
            optimizer.step()
            optimizer.zero_grad()
            controller.step()
    except UsageError as error:
        return str(error)
    controller.close()
    return "silent"


def _without_ddp_both(rank: int) -> list[str]:
    return [_without_ddp(rank, averages=averages) for averages in (True, False)]


def test_a_model_that_nothing_averages_ends_the_job_unless_the_loop_averages_it() -> None:
    for averaged, left in run_ranks(_without_ddp_both, 2):
        assert averaged == "silent"
        assert "parameters are no longer equal on all ranks" in left
        assert "nothing averages their gradients (write DDP(net)" in left


def test_every_policy_compares_settings_and_parameters() -> None:
    """The stigmergic one too, under which every rank decides for itself."""
    cases = {
        f"{policy}, {what}": (loop, SGD, {"lr": 0.1}, 60, policy)
        for policy in ("stigmergic", "lb_bsp")
        for what, loop in (("settings", _scheduled_by_rank), ("parameters", _moved))
    }
    for told in run_ranks(_train_all, 3, cases):
        for case, said in told.items():
            assert ("lr of parameter group 0 is 0.0" if "settings" in case else "0.weight of rank 1 differs") in said


def _last_bits(job: Training, step: int, rank: int) -> None:
    """What a device that is not like the others may do to its parameters."""
    if rank == 1:
        for p in job.net.parameters():
            p.data.copy_(torch.nextafter(p.data, torch.full_like(p.data, math.inf)))


def _rates_in_last_bits(job: Training, step: int, rank: int) -> None:
    """As math libraries that are not alike give them."""
    rate = 0.1 * 0.99**step
    job.optimizer.param_groups[0]["lr"] = math.nextafter(rate, 1.0) if rank else rate


def _best_again(job: Training, step: int, rank: int) -> None:
    if step % 40 == 20:
        _BEST.update({name: value.clone() for name, value in job.net.state_dict().items()})
    if step % 40 == 39:
        job.net.load_state_dict(_BEST)


_BEST: dict[str, Tensor] = {}
RIGHT: dict[str, tuple[Any, ...]] = {
    "last bits": (_last_bits, SGD, {"lr": 0.01, "momentum": 0.9}, 200),
    "last bits, Adam": (_last_bits, ADAM, {"lr": 1e-4}, 200),
    "last bits of rates": (_rates_in_last_bits, SGD, {"lr": 0.1}, 100),
    "best weights again": (_best_again, SGD, {"lr": 0.1}, 100),
}


def test_ranks_that_differ_in_last_bits_or_not_at_all_train_on() -> None:
    for told in run_ranks(_train_all, 2, RIGHT, timeout_s=100):
        assert told == dict.fromkeys(RIGHT, "silent")


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
    assert "of rank 1 differs from rank 0" in (two.close().wrong or "")


def test_a_small_difference_is_warned_of_once_and_one_that_grows_ends_the_job() -> None:
    two = Two()

    def said(*extra: float) -> list[str | None]:
        found = []
        for more in extra:
            two.move(0.1, more)
            found.append(two.close().wrong)
        return found

    two.close()
    with pytest.warns(RuntimeWarning, match="differs from rank 0 by 0.002 times the change of a window") as warned:
        *before, last = said(0.0002, 0.0, 0.0, 0.0, 0.0002, 0.0002, 0.0002)
    assert len(warned) == 1
    assert before == [None] * 6
    assert "of rank 1 differs from rank 0 by 0.008 times the change of a window" in (last or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("falls", [1.0, 0.5, 0.0], ids=lambda falls: f"falls to {falls}")
def test_last_bits_add_up_over_any_number_of_windows_also_where_the_rate_ends(dtype: torch.dtype, falls: float) -> None:
    two, moved = Two(dtype), 1e-4
    for window in range(60):
        two.move(moved)
        for p in two.nets[1].parameters() if window < 30 or falls else []:
            for _ in range(10):
                p.data.copy_(torch.nextafter(p.data, torch.full_like(p.data, math.inf)))
        assert two.close().wrong is None  # and no warning, which would be an error here
        moved *= 1.0 if window < 30 else falls


def test_every_parameter_of_a_deep_model_is_looked_at_in_its_turn() -> None:
    two = Two(layers=40)
    last = list(two.nets[1].parameters())[-3]
    for _ in range(128 * 6):
        two.move(0.01)
        last.data.add_(0.01)
        if two.close().wrong is not None:
            return
    raise AssertionError("never seen")

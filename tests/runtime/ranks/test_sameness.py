"""Ranks that hold unlike things are told so before they train, all with one message that names what and whose."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

import dynamix
from dynamix.errors import DynamixError, UsageError
from tests.ranks import run_ranks
from tests.runtime.jobs import classes
from tests.union import Script


class Count(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(classes(60))


class Job:
    """One training over a group of its own; what the last rank does otherwise is in the arguments."""

    def __init__(self, **given: Any) -> None:
        torch.manual_seed(0)
        self.group = dist.new_group()
        arguments = {"policy": Script([[3] * dist.get_world_size()]), "batch_size": 4, "interval": 2}
        arguments["global_batch"] = "adaptive"
        self.controller = dynamix.Controller(**(arguments | {"process_group": self.group} | given))
        self.net = nn.Linear(6, 3)
        self.steps = 0

    def train(
        self,
        source: Any,
        epochs: int = 1,
        *,
        state: Any = None,
        at: int = 0,
        save_at: int = 0,
        optimizer: Callable[..., Any] = torch.optim.SGD,
        ddp: dict[str, Any] | None = None,
        before: Callable[[Job, int], None] = lambda job, epoch: None,
        **wrap: Any,
    ) -> Any:
        """`before` is called at the beginning of every epoch."""
        steps = optimizer(self.net.parameters(), lr=0.1)
        model = self.controller.wrap(DDP(self.net, process_group=self.group, **(ddp or {})), steps, **wrap)
        saved = None
        if state is not None and not at:
            self.controller.load_state_dict(state)
        for epoch in range(epochs):
            before(self, epoch)
            for x, y in source:
                F.cross_entropy(model(x), y).backward()
                steps.step()
                steps.zero_grad()
                self.controller.step()
                self.steps += 1
                if self.steps == save_at:
                    saved = self.controller.state_dict()
                if self.steps == at and state is not None:
                    self.controller.load_state_dict(state)
                    break
        self.controller.close()
        return saved

    def sampled(self, samples: int = 60, **given: Any) -> DataLoader[Any]:
        return DataLoader(classes(samples), batch_sampler=self.controller.batch_sampler(classes(samples), **given))


def _states() -> tuple[Any, Any, Any]:
    """What a job saved after 2, after 3 optimizer steps, and at the end of its epoch."""
    states = []
    for step in (2, 3):
        job = Job()
        states.append(job.train(job.sampled(), save_at=step))
    return states[0], states[1], job.controller.state_dict()


def _version(version: str, **given: Any) -> Odd:
    """The odd rank runs this version, which may have other arguments, too."""

    def train(odd: bool) -> None:
        with patch.object(dynamix, "__version__", version if odd else dynamix.__version__):
            Job(**(given if odd else {}))

    return train


Odd = Callable[[bool], None]


def _loaded(state: int | None, odd_state: int | None, epochs: int = 1, **given: Any) -> Odd:
    """All ranks load one of three states, the odd one another, or none."""

    def train(odd: bool) -> None:
        states = _states()
        chosen = odd_state if odd else state
        job = Job()
        job.train(job.sampled(), epochs, state=None if chosen is None else states[chosen], **given)

    return train


def _odd(what: str, **given: Any) -> Odd:
    """The odd rank makes its job, its sampler or its training otherwise: with these arguments."""

    def train(odd: bool) -> None:
        mine = {what: given} if odd else {}
        job = Job(**mine.get("job", {}))
        job.train(job.sampled(**mine.get("sampler", {})), **mine.get("training", {}))

    return train


def _sharded(odd: bool) -> None:
    job = Job()
    job.train(job.controller.stream(Count(), sharded=odd))


def _stream_beside_sampler(odd: bool) -> None:
    job = Job()
    job.train(job.controller.stream(Count()) if odd else job.sampled())


def _later_epoch(odd: bool) -> None:
    job = Job()
    loader = job.sampled()
    sampler: Any = loader.batch_sampler
    job.train(loader, 3, before=lambda _, epoch: sampler.set_epoch(epoch + (odd and epoch > 0)))


def _momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def _loads(job: Job, epoch: int) -> None:
    """A checkpoint of the model, which DDP has already sent to all."""
    job.net.load_state_dict({name: value * 1.01 for name, value in job.net.state_dict().items()})


def _power(odd: bool) -> None:
    job = Job()
    state = PowerSGDState(job.group, matrix_approximation_rank=2 if odd else 1)
    job.train(job.sampled(), hook=powerSGD_hook, hook_state=state)


_UNLIKE = f'version of dynamix is "{dynamix.__version__}" on rank'
CASES: dict[str, tuple[Odd, list[str]]] = {
    "seed": (_odd("sampler", seed=7), ["seed is 0 on", "7 on rank {last}", "seed=0, not seed=rank"]),
    "sharded": (_sharded, ["sharded is false on", "true on rank {last}"]),
    "stream beside sampler": (_stream_beside_sampler, ['samples is "BatchSampler"', '"Stream" on rank {last}']),
    "one loads late": (_loaded(None, 0, epochs=2, at=3), ["load_state_dict(state) on every rank"]),
    "interval": (_odd("job", interval=3), ["interval is 2 on", "3 on rank {last}"]),
    "batch size": (_odd("job", batch_size=5), ["batch_size is 4 on", "5 on rank {last}"]),
    "highest": (_odd("job", max_batch_size=9), ["max_batch_size is [32", "[9, 9"]),
    "global batch": (_odd("job", global_batch="fixed"), ['"adaptive" on', '"fixed" on rank {last}']),
    "rule": (_odd("job", lr_rule="sqrt"), ['lr_rule is "auto"', '"sqrt" on rank {last}']),
    "most change": (_odd("job", max_change=2.0), ["max_change is Infinity", "2.0 on rank {last}"]),
    "policy": (_odd("job", policy="goodput"), ['policy is "Script"', '"goodput" on rank {last}']),
    "hook": (
        _odd("training", hook=fp16_compress_hook),
        ["exchange of gradients and buffers is", "all-reduce, buffers rank0", "fp16_compress_hook"],
    ),
    "power": (_power, ["exchange: matrix_approximation_rank is [1] on", "[2] on rank {last}"]),
    "option": (
        _odd("training", ddp={"find_unused_parameters": True}),
        ["exchange: find_unused_parameters is [false] on", "[true] on rank {last}"],
    ),
    "scaler": (_odd("training", scaler=torch.amp.GradScaler("cpu")), ["exchange: losses scaled is [false] on"]),
    "optimizer": (_odd("training", optimizer=torch.optim.Adam), ["optimizers is", "SGD of [2]", "Adam of [2]"]),
    "momentum": (_odd("training", optimizer=_momentum), ["optimizers: momentum is [0] on", "[0.9] on rank {last}"]),
    "weights": (_odd("training", before=_loads), ["parameters: weight is [", "Load weights on every rank"]),
    "later epoch": (_later_epoch, ["in different epochs: 1 on", "2 on rank {last}", "set_epoch() the same"]),
    "version": (_version("9.1"), [_UNLIKE, '"9.1" on rank {last}. Install one and the same version']),
    "version, arguments": (_version("9.1", interval=3), [_UNLIKE, '"9.1" on rank {last}. Install']),
    "version, impossible there": (_version("9.1", batch_size=0), [_UNLIKE, '"9.1" on rank {last}. Install']),
    "version, meets otherwise": (_version("9.1", meet="auto"), [_UNLIKE, '"9.1" on rank {last}. Install']),
    "impossible on one": (
        _odd("job", batch_size=0),
        ["on rank {last}: batch_size=0 is not possible: allowed is a whole number, 1 or more; give a larger one"],
    ),
}


def _last_bits(rank: int) -> int:
    """As devices that are not alike leave them."""
    job = Job()

    def differ(job: Job, epoch: int) -> None:
        with torch.no_grad():
            job.net.weight.mul_(1 + 1e-6 * rank)

    job.train(job.sampled(), before=differ)
    return job.steps


def _run(rank: int) -> dict[str, Any]:
    told: dict[str, Any] = {"steps": _last_bits(rank)}
    last = rank == dist.get_world_size() - 1
    for name, (train, _) in CASES.items():
        began = time.monotonic()
        try:
            train(last)
            told[name] = "accepted"
        except (DynamixError, RuntimeError) as error:
            told[name] = f"{type(error).__name__}: {error}"
        told[name] += f" [{time.monotonic() - began:.1f} s]"
    return told


@pytest.mark.multiproc
def test_what_differs_is_named_on_every_rank_with_its_values() -> None:
    results = run_ranks(_run, 2, timeout_s=150, group_timeout_s=40)
    for name, (_, says) in CASES.items():
        for rank, told in enumerate(results):
            assert told[name].startswith(UsageError.__name__), (name, rank, told[name])
            for part in says:
                assert part.format(last=1) in told[name], (name, rank, told[name])
    assert results[0]["steps"] == results[1]["steps"] > 5  # weights that differ in last bits are alike


def test_a_controller_made_too_early_in_a_launched_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match=r"move torch.distributed.init_process_group\(...\) above"):
        dynamix.Controller("static", 8, global_batch="adaptive")
    monkeypatch.setenv("WORLD_SIZE", "1")
    dynamix.Controller("static", 8, global_batch="adaptive")

"""Frameworks that get the controller's loader without an adapter: an error with the line to write, never silence."""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.integrations.jobs import (
    QUIET_LIGHTNING,
    QUIET_TRANSFORMERS,
    SAMPLES,
    Pairs,
    Row,
    as_under_torchrun,
    followed,
    sgd,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.multiproc


class Naive:
    """A controller as for a loop of one's own."""

    def __init__(self, shares: str, *, tokens: bool = False) -> None:
        self.row = Row(shares, tokens=tokens)
        self.controller = self.row.settings(process_group=dist.new_group()).bind(batch_size=8)
        data = Pairs(tokens=tokens)
        self.loader = DataLoader(data, batch_sampler=self.controller.batch_sampler(data))
        self.net = self.row.net()
        self.optimizer = sgd(self.net)
        self.trail = followed(self.net, self.optimizer)

    def loop(self, model: Any, optimizer: Any, batches: Any, backward: Any) -> None:
        self.controller.wrap(model, optimizer)
        for _ in range(2):
            for batch in batches:
                backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
                self.controller.step()


def accelerated(job: Naive) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    job.loop(*accelerator.prepare(job.net, job.optimizer, job.loader), accelerator.backward)


def second_hook(job: Naive) -> None:
    """Accelerate's own option for compressing gradients, beside the controller."""
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    job.controller.wrap(Accelerator(cpu=True, kwargs_handlers=[handler]).prepare(job.net), job.optimizer)


def lightning(job: Naive, *, sampler: bool = False) -> None:
    from lightning import pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = job.net

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return job.optimizer

        def on_train_start(self) -> None:
            job.controller.wrap(self.trainer.strategy.model, job.optimizer)

        def on_train_batch_end(self, *_: Any) -> None:
            job.controller.step()

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=pl.strategies.DDPStrategy(process_group_backend="gloo"),
        max_epochs=2,
        use_distributed_sampler=sampler,
        **QUIET_LIGHTNING,
    )
    trainer.fit(Module(), job.loader)


def lightning_sampler(job: Naive) -> None:
    lightning(job, sampler=True)


def trainer(job: Naive) -> None:
    import transformers

    known = {"num_train_epochs": 2, "per_device_train_batch_size": 8, **QUIET_TRANSFORMERS}
    args = transformers.TrainingArguments(tempfile.gettempdir(), **known)

    class Steps(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            job.controller.wrap(made.model_wrapped, made.optimizer)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            job.controller.step()

    made = transformers.Trainer(job.net, args, train_dataset=job.loader.dataset, optimizers=(job.optimizer, None))
    made.get_train_dataloader = lambda: job.loader
    made.add_callback(Steps())
    made.train()


LINES = {
    "accelerated": "leave it out of prepare()",
    "second_hook": "pass it as controller.wrap(model, optimizer, hook=hook, hook_state=state)",
    "lightning": "use the adapter in dynamix.integrations",
    "lightning_sampler": "use_distributed_sampler=False",
    "trainer": "wrap(..., weighting='given')",
}


def told(rank: int, stack: str) -> str:
    as_under_torchrun(rank)
    warnings.filterwarnings("ignore")
    job = Naive("shrink", tokens=stack == "trainer")
    try:
        globals()[stack](job)
        job.controller.close()
        return f"silent: {sum(map(len, job.trail.samples))} of {2 * SAMPLES}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def told_all(rank: int, stacks: list[str]) -> list[str]:
    return [told(rank, stack) for stack in stacks]


def test_a_framework_without_its_adapter_says_what_to_write() -> None:
    stacks = [stack for stack in LINES if stack != "trainer" or importlib.util.find_spec("transformers")]
    for rank in run_ranks(told_all, 2, stacks, timeout_s=250, group_timeout_s=100, frameworks=True):
        for stack, said in zip(stacks, rank, strict=True):
            assert LINES[stack] in said, (stack, said)

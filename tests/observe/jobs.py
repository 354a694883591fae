"""Training jobs that know nothing of dynamix: `jobs.py STACK PART RANK` in the environment of torchrun.

A sleep in its `forward`, `backward`, `data` or `between` is what makes a rank slow.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH, STEPS = 8, 30


class Slow(torch.autograd.Function):
    """The identity, whose backward pass takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Net(nn.Module):
    """Convolution, BatchNorm (buffers cross ranks) and dropout."""

    def __init__(self, sleeps: dict[str, float]) -> None:
        super().__init__()
        self.sleeps = sleeps
        self.body = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.sleeps.get("forward", 0.0))
        hidden = self.body(x)
        if seconds := self.sleeps.get("backward", 0.0):
            hidden = Slow.apply(hidden, seconds)
        return self.head(hidden)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, sleeps: dict[str, float], count: int) -> None:
        self.x = torch.randn(count, 20, generator=torch.Generator().manual_seed(0))
        self.sleep_s = sleeps.get("data", 0.0) / BATCH

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.sleep_s)
        return self.x[index], (self.x[index, :5].sum() > 0).long()


def loader_of(sleeps: dict[str, float]) -> DataLoader[Any]:
    data = Samples(sleeps, STEPS * BATCH * dist.get_world_size())
    return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, seed=0))


def ddp(sleeps: dict[str, float], *, accumulate: int = 1) -> tuple[nn.Module, list[float]]:
    net = Net(sleeps)
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for step, (x, y) in enumerate(loader_of(sleeps)):
        ends = (step + 1) % accumulate == 0
        with contextlib.nullcontext() if ends else model.no_sync():
            loss = F.cross_entropy(model(x), y) / accumulate
            loss.backward()
        losses.append(loss.item())
        if ends:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(sleeps.get("between", 0.0))
        if step == STEPS // 2:
            with torch.no_grad():
                model(x)  # an evaluation, with dropout: the random numbers go on
    return net, losses


def accumulated(sleeps: dict[str, float]) -> tuple[nn.Module, list[float]]:
    return ddp(sleeps, accumulate=2)


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, sleeps: dict[str, float]) -> list[float]:
    """The losses of an epoch of the shortest loop."""
    losses = []
    for x, y in loader_of(sleeps):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled(sleeps: dict[str, float]) -> tuple[nn.Module, list[float]]:
    net = Net(sleeps)
    model = torch.compile(nn.parallel.DistributedDataParallel(net), backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    return net, plainly(model, optimizer, sleeps)


def fsdp2(sleeps: dict[str, float]) -> tuple[nn.Module, list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = Net(sleeps)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net.body, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return net, plainly(net, optimizer, sleeps)


def lightning(sleeps: dict[str, float]) -> tuple[nn.Module, list[float]]:
    import lightning as L

    losses = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(sleeps)

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    module = Module()
    ranks: dict[str, Any] = {"accelerator": "cpu", "strategy": "ddp", "devices": dist.get_world_size()}
    trainer = L.Trainer(**ranks, max_epochs=1, barebones=True)
    trainer.fit(module, loader_of(sleeps))
    return module.net, losses


def transformers(sleeps: dict[str, float]) -> tuple[nn.Module, list[float]]:
    import transformers as hf

    losses = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(sleeps)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.net(x)
            loss = F.cross_entropy(logits, labels)
            losses.append(loss.item())
            return {"loss": loss, "logits": logits}

    class Named(Samples):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return {"x": x, "labels": y}

    quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    usual = {"remove_unused_columns": False, "dataloader_pin_memory": False, "num_train_epochs": 1}
    args = hf.TrainingArguments(tempfile.gettempdir(), per_device_train_batch_size=BATCH, **quiet, **usual)
    model = Model()
    trainer = hf.Trainer(model, args, train_dataset=Named(sleeps, STEPS * BATCH * dist.get_world_size()))
    trainer.train()
    return model.net, losses


def train(stack: str, sleeps: dict[str, float]) -> dict[str, Any]:
    """The weights and losses of a job of this process group."""
    torch.manual_seed(0)
    net, losses = globals()[stack](sleeps)
    state = net.state_dict()
    weights = {name: getattr(value, "_local_tensor", value).detach().clone() for name, value in state.items()}
    return {"weights": weights, "losses": losses}


def main() -> None:
    stack, part, slow = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(stack, {part: 0.1} if int(slow) == dist.get_rank() else {})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

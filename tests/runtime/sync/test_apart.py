"""Meeting over parameters: every piece is a worker's own step, and a round ends in the mean by samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

from dynamix.runtime.sync.parameter_averaging import Averaging
from tests.ranks import run_ranks
from tests.runtime.jobs import Training, apart
from tests.runtime.sync.test_apart_loops import nesterov
from tests.union import Script

SHARES = {1: [[24], [24]], 2: [[32, 4], [9, 27]], 3: [[32, 4, 0], [8, 5, 23]], 4: [[32, 4, 16, 4], [3, 40, 2, 11]]}
PIECE, SAMPLES = 4, 331


def net(kind: str) -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)]
    if kind == "batchnorm":
        layers.insert(1, nn.BatchNorm1d(8))
    return nn.Sequential(*layers).double()


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (SAMPLES,), generator=generator)


class Replay:
    """The same training in one process, in plain words: W models, each stepped on its pieces, then averaged."""

    def __init__(self, workers: int, kind: str, optimizer: str, how: Averaging) -> None:
        self.models = [net(kind) for _ in range(workers)]
        self.optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in self.models]
        self.how, self.workers = how, workers
        self.mean = [p.detach().clone() for p in self.models[0].parameters()]
        self.outer = None if how.outer is None else how.outer(self.mean)

    def round(self, batches: list[list[tuple[Tensor, Tensor]]]) -> None:
        """One round: the pieces of every worker."""
        counts = np.array([sum(len(x) for x, _ in pieces) for pieces in batches], dtype=float)
        for model, optimizer, pieces in zip(self.models, self.optimizers, batches, strict=True):
            for x, y in pieces:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                scale = len(x) / PIECE  # a part of a piece is a smaller step
                self._step(optimizer, scale if isinstance(optimizer, torch.optim.SGD) else scale**0.5)
        weights = counts / counts.sum()
        self._average(weights)

    def _step(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate

    def _average(self, weights: np.ndarray) -> None:
        for number, before in enumerate(self.mean):
            own = [list(m.parameters())[number] for m in self.models]
            move = sum(w * (p.detach() - before) for w, p in zip(weights, own, strict=True))
            if self.outer is None:
                self.mean[number] = before + move
            else:
                before.grad = -move
        if self.outer is not None:
            self.outer.step()
        with torch.no_grad():
            for model in self.models:
                for parameter, mean in zip(model.parameters(), self.mean, strict=True):
                    parameter.copy_(mean)
            for buffers in zip(*(m.buffers() for m in self.models), strict=True):
                floating = buffers[0].is_floating_point()
                agreed = sum(w * b for w, b in zip(weights, buffers, strict=True)) if floating else max(buffers)
                for buffer in buffers:
                    buffer.copy_(torch.as_tensor(agreed))
        self._average_state(weights)

    def _average_state(self, weights: np.ndarray) -> None:
        if self.how.optimizer_state == "reset":
            for optimizer in self.optimizers:
                optimizer.state.clear()
        if self.how.optimizer_state != "averaged":
            return
        every = [[o.state[p] for p in m.parameters()] for o, m in zip(self.optimizers, self.models, strict=True)]
        for states in zip(*every, strict=True):
            for name in {name for state in states for name in state}:
                known = [(w, s[name]) for w, s in zip(weights, states, strict=True) if name in s and w]
                product = name == "mu_product"
                values = [(w, v.double().log() if product else v.double()) for w, v in known]
                mean = sum(w * v for w, v in values) / sum(w for w, _ in known)
                mean = mean.exp() if product else mean
                for state in states:
                    state[name] = mean.to(known[0][1].dtype, copy=True)


def train(rank: int, workers: int, case: dict[str, Any]) -> dict[str, Any]:
    """A job as a user writes it; returns the model after every round, and the indices that were trained."""
    model = net(case.get("kind", "plain"))
    if rank and not case.get("ddp"):
        with torch.no_grad():
            next(model.parameters()).add_(1.0)  # all begin as the first rank's
    shares = SHARES[workers]
    controller = apart(Script(shares), sum(shares[0]) // workers, micro_batch=PIECE)
    given = {"optimizer": OPTIMIZERS[case.get("optimizer", "momentum")](model.parameters()), "sampling": {"seed": 1}}
    how, wrapped = Averaging(**case.get("how", {})), DDP(model) if case.get("ddp") else model
    dataset = TensorDataset(torch.arange(SAMPLES), *data())
    job = Training(controller, dataset, wrapped, **given, num_workers=case.get("num_workers", 0), averaging=how)
    rounds: list[list[list[int]]] = [[]]
    weights: list[list[Tensor]] = []
    for index, inputs, target in job.batches(2):
        mine = job.sampler.piece().samples
        with controller.piece():
            loss = job.backward(inputs, target)
        assert controller.optimizer_due
        job.finish(loss=loss)
        if mine:
            rounds[-1].append(index.tolist())
        if controller.met:
            rounds.append([])
            weights.append([t.detach().clone() for t in (*model.parameters(), *model.buffers())])
    controller.close()
    return {"rounds": rounds[:-1], "weights": weights}


CASES: list[dict[str, Any]] = [
    {},
    {"optimizer": "sgd"},
    {"optimizer": "adamw"},
    {"optimizer": "nadam"},
    {"optimizer": "adamw", "how": {"optimizer_state": "kept"}},
    {"optimizer": "adamw", "how": {"optimizer_state": "reset"}},
    {"kind": "batchnorm"},
    {"ddp": True, "kind": "batchnorm"},
    {"how": {"outer": nesterov}, "optimizer": "adamw"},
    {"num_workers": 2},
]


@pytest.mark.parametrize(
    ("workers", "case"),
    [*((workers, case) for workers in (2, 3) for case in CASES), (1, {}), (4, {})],
    ids=lambda of: str(of) if isinstance(of, int) else "-".join([*map(str, of), *of.get("how", {})]) or "plain",
)
def test_a_round_ends_in_the_mean_of_what_workers_trained_apart(workers: int, case: dict[str, Any]) -> None:
    ran = run_ranks(train, workers, workers, case)
    x, y = data()
    replay = Replay(
        workers, case.get("kind", "plain"), case.get("optimizer", "momentum"), Averaging(**case.get("how", {}))
    )
    lengths = {len(of_rank["rounds"]) for of_rank in ran}
    assert len(lengths) == 1
    seen: list[int] = []
    for number in range(lengths.pop()):
        pieces = [of_rank["rounds"][number] for of_rank in ran]
        seen += [i for of_rank in pieces for piece in of_rank for i in piece]
        replay.round([[(x[i], y[i]) for i in of_rank] for of_rank in pieces])
        expected = [*replay.models[0].parameters(), *replay.models[0].buffers()]
        for of_rank in ran:
            for one, other in zip(of_rank["weights"][number], expected, strict=True):
                torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-11)
    assert sorted(seen) == sorted([*range(SAMPLES)] * 2)

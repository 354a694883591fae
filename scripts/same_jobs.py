"""The jobs that `scripts/same` runs in either tree, through the public face, and what each rank writes down of them.

    python scripts/same_jobs.py FOLDER [CASE ...]      dynamix is the one on PYTHONPATH

FOLDER gets a file CASE.RANK.json for every rank of every case. One thing is not public: where a rank's row leaves it,
the times in it are replaced by those below, and deciding takes no time. So nothing that is decided depends on the
machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix

RANKS, SAMPLES = 3, 720
DECIDED = (
    "window_index",
    "decision",
    "allocation",
    "from_step",
    "interval",
    "piece",
    "noise",
    "signal",
    "samples_seen",
)

# Seconds of three devices: of a pass, and of each sample; from the sixth window on the first has a neighbour.
PASS_S, SAMPLE_S = (0.0041, 0.0052, 0.0060), (0.00101, 0.00187, 0.00312)
JITTER = (1.013, 0.984, 1.002, 1.027, 0.991, 0.978, 1.009, 1.018, 0.995, 0.989, 1.031)
NEIGHBOUR, FROM_WINDOW = 1.8, 6


@dataclass(frozen=True)
class Case:
    """A job: with which arguments, on how many ranks, over what data, and how the loop is written.

    order        "order", "lengths", "padded", "contiguous", "stream" or "sharded"
    tokens       samples count by their tokens: "loss" tells them to `controller.weight`, "given" weighs by itself
    averaging    of `dynamix.Averaging`
    exchange_s   what an exchange takes
    resume       save after `rounds`, and go on on so many ranks
    """

    ranks: int = 2
    policy: str = "lb_bsp"
    options: Mapping[str, Any] = field(default_factory=dict)
    order: str = "order"
    sharded: bool = False  # by FSDP2
    adam: bool = False
    tokens: str = ""
    averaging: Mapping[str, Any] = field(default_factory=dict)
    scheduled: bool = False
    exchange_s: float = 0.003
    rounds: int = 24
    resume: int = 0


ADAPTIVE = {"global_batch": "adaptive"}
PIECES = {"batch_size": 12, "micro_batch": 3}
APART, AUTO = {**PIECES, "meet": "parameters"}, {"meet": "auto"}

CASES: dict[str, Case] = {
    **{f"gradients-{name}": Case(policy=name) for name in ("static", "lb_bsp", "goodput", "dynamix")},
    "gradients-dbs": Case(policy="dbs", rounds=140),
    **{f"gradients-{name}-3": Case(3, name, ADAPTIVE) for name in ("goodput", "dynamix")},
    "gradients-lb_bsp-3": Case(3),
    "unguarded": Case(3, "dynamix", {**ADAPTIVE, "guard": False}),
    "guarded": Case(3, "goodput", {"guard": True}),
    "adascale": Case(2, "goodput", {**ADAPTIVE, "lr_rule": "adascale"}),
    "scheduled": Case(3, "goodput", ADAPTIVE, adam=True, scheduled=True),
    "bounds": Case(3, "lb_bsp", {"quantum": 2, "max_change": 1.3, "min_batch_size": 2, "max_batch_size": [8, 16, 16]}),
    "interval-auto": Case(2, "goodput", {"interval": "auto"}),
    "accumulate": Case(2, "lb_bsp", {"accumulate": 3}, rounds=14),
    "accumulate-3": Case(3, "goodput", {"accumulate": 2, **ADAPTIVE}, rounds=14),
    "pieces": Case(2, "dynamix", {**PIECES, "guard": False}),
    "pieces-3": Case(3, "goodput", {**PIECES, **ADAPTIVE}),
    "parameters-sgd": Case(2, "lb_bsp", APART),
    "parameters-adamw": Case(3, "goodput", APART, adam=True),
    "parameters-kept": Case(2, "dynamix", {**APART, "guard": False}, adam=True, averaging={"optimizer_state": "kept"}),
    "parameters-adaptive": Case(3, "goodput", {**APART, **ADAPTIVE}, exchange_s=0.05),
    "auto": Case(2, "goodput", AUTO, exchange_s=0.2),
    "auto-3": Case(3, "dynamix", {**AUTO, **ADAPTIVE}, adam=True, exchange_s=0.3),
    "auto-stays": Case(2, "lb_bsp", AUTO, exchange_s=0.0001),
    "stigmergic": Case(2, "stigmergic", {"batch_size": 24}),
    "stigmergic-3": Case(3, "stigmergic", ADAPTIVE),
    "fsdp2": Case(2, "lb_bsp", sharded=True),
    "fsdp2-3": Case(3, "goodput", {**PIECES, **ADAPTIVE}, sharded=True, adam=True),
    "tokens": Case(2, "goodput", tokens="loss"),
    "tokens-given": Case(3, "lb_bsp", tokens="given"),
    "lengths": Case(2, "goodput", order="lengths"),
    "padded": Case(3, "lb_bsp", order="padded"),
    "contiguous": Case(2, "lb_bsp", order="contiguous", rounds=120),
    "stream": Case(2, "lb_bsp", order="stream"),
    "stream-sharded": Case(3, "goodput", order="sharded"),
    "resume": Case(2, "dynamix", resume=2),
    "resume-3": Case(2, "goodput", ADAPTIVE, adam=True, resume=3),
    "resume-2": Case(3, "lb_bsp", {"accumulate": 2}, resume=2),
    "resume-stigmergic": Case(3, "stigmergic", {"batch_size": 24}, rounds=16, resume=2),
    "resume-parameters": Case(2, "lb_bsp", APART, adam=True, resume=3),
    "resume-auto": Case(3, "goodput", AUTO, exchange_s=0.2, resume=2),
    "resume-lengths": Case(2, "goodput", order="lengths", resume=3),
    "resume-stream": Case(2, "lb_bsp", order="stream", resume=3),
}


def recorded(row: Any, names: tuple[str, ...], rank: int, window: int, exchange_s: float) -> Any:
    """`row`, whose first values have `names` and whose others are each step's exchange, with recorded times."""
    jitter = JITTER[(window + 4 * rank) % len(JITTER)]
    busy = NEIGHBOUR if rank == 0 and window >= FROM_WINDOW else 1.0
    count = row[names.index("work")] if row[names.index("work")] > 0 else row[names.index("count")]
    compute = busy * jitter * (PASS_S[rank] + SAMPLE_S[rank] * count)
    times = {"compute": compute, "compute_std": 0.03 * compute, "data": 0.0002, "cpu": 0.5, "memory": 0.3}
    times |= dict.fromkeys(("bytes_per_s", "retransmits_per_s", "rtt_s", "device"), float("nan"))
    row = row.copy()
    for name, value in times.items():
        row[names.index(name)] = value
    steps = np.arange(len(row) - len(names))
    row[len(names) :] = exchange_s * (1 + 0.1 * rank) * np.take(JITTER, steps + window, mode="wrap")
    return row


def record_times(exchange_s: list[float]) -> None:
    """Let every row be `recorded`, no decision be late, and none take time.

    What is replaced is found by name, since modules move from tree to tree.
    """
    time.thread_time = lambda: 0.0  # what deciding takes is read by it
    _ = dynamix.Controller  # imports what is looked through below
    modules = [module for name, module in sys.modules.items() if name.startswith("dynamix.")]

    def homes(name: str) -> list[Any]:
        found = [module for module in modules if hasattr(module, name)]
        assert found, f"no module of this tree has {name}: say in scripts/same_jobs.py what it is called now"
        return found

    (home,) = (module for module in homes("Recorder") if module.Recorder.__module__ == module.__name__)
    names, row = home.ROW, home.Recorder.row

    def with_recorded_times(self: Any, **given: Any) -> Any:
        self.windows_told = getattr(self, "windows_told", -1) + 1
        return recorded(row(self, **given), names, dist.get_rank(), self.windows_told, exchange_s[0])

    home.Recorder.row = with_recorded_times
    for module in homes("PATIENCE_S"):
        module.PATIENCE_S = 60.0
    for module in homes("pause_in"):  # a step in which this machine paused would be left out of the window
        module.pause_in = lambda *_: None


class Job:
    """One rank of a case, and what it writes down."""

    def __init__(self, case: Case, folder: Path, name: str, saved: Mapping[str, Any] | None) -> None:
        self.case, self.events = case, folder / f"{name}.events"
        self.seen: dict[str, list[Any]] = {"samples": [], "losses": [], "allocations": [], "rates": []}
        generator = torch.Generator().manual_seed(2)
        x, y = torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
        self.data = TensorDataset(torch.arange(SAMPLES), x, y, torch.randint(1, 9, (SAMPLES,), generator=generator))
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
        options = {"batch_size": 6, "interval": 2, **case.options}
        self.accumulate = options.get("accumulate", 1)
        self.in_pieces = bool({"accumulate", "micro_batch", "meet"} & options.keys())
        self.controller = dynamix.Controller(case.policy, events=self.events, **options)
        self.batches, self.source = self._batches()
        if saved is not None:
            self.net.load_state_dict(saved["net"])
        self._wrap()
        if saved is not None:
            self.controller.load_state_dict(saved["controller"])
            self.optimizer.load_state_dict(saved["optimizer"])
        torch.manual_seed(dist.get_rank())

    def _batches(self) -> tuple[Any, Any]:
        order, costs = self.case.order, [1 + index * 5 % 23 for index in range(SAMPLES)]
        if order in ("stream", "sharded"):
            mine = range(dist.get_rank(), SAMPLES, dist.get_world_size()) if order == "sharded" else range(SAMPLES)
            stream = self.controller.stream([self.data[i] for i in mine], sharded=order == "sharded")
            return stream, stream
        how = {
            "lengths": {"lengths": costs},
            "padded": {"lengths": costs, "padded": True},
            "contiguous": {"partition": "contiguous"},
        }
        sampler = self.controller.batch_sampler(self.data, seed=1, **how.get(order, {}))  # type: ignore[arg-type]
        return DataLoader(self.data, batch_sampler=sampler, generator=torch.Generator().manual_seed(5)), sampler

    def _wrap(self) -> None:
        case = self.case
        if case.sharded:
            from torch.distributed.fsdp import fully_shard

            self.model: Any = fully_shard(self.net)
        else:
            self.model = DDP(self.net, bucket_cap_mb=1e-4)  # several buckets
        parameters = self.model.parameters()
        kind, how = (torch.optim.AdamW, {"lr": 0.01}) if case.adam else (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
        self.optimizer: Any = kind(parameters, **how)  # type: ignore[arg-type]
        given: dict[str, Any] = {"averaging": dynamix.Averaging(**case.averaging)} if case.averaging else {}
        self.controller.wrap(self.model, self.optimizer, weighting=case.tokens or "hook", **given)  # type: ignore
        if case.scheduled:
            self.controller.scheduler(torch.optim.lr_scheduler.StepLR(self.optimizer, 5, gamma=0.7))

    def train(self, rounds: int) -> None:
        """So many rounds, from where the job stands."""
        for epoch in itertools.count(getattr(self, "epoch", 0)):
            self.epoch = epoch
            self.source.set_epoch(epoch)
            for index, x, y, tokens in self.batches:
                self._step(index, x, y, tokens)
                if self.controller.met:
                    self.seen["allocations"].append(self.controller.batch_sizes.tolist())
                    rounds -= 1
                    if not rounds:
                        return

    def _step(self, index: Tensor, x: Tensor, y: Tensor, tokens: Tensor) -> None:
        controller, optimizer = self.controller, self.optimizer
        with controller.piece() if self.in_pieces else contextlib.nullcontext():
            logits = self.model(x)
            each = F.cross_entropy(logits, y, reduction="none")
            loss, backward = each.mean(), each.mean() / self.accumulate
            if self.case.tokens:
                total = tokens.sum().float()
                loss = backward = (each * tokens).sum() / total
            if self.case.tokens == "loss":
                backward = controller.weight(backward, count=float(total))
            elif self.case.tokens == "given":
                everyones = total.clone()
                dist.all_reduce(everyones)
                loss = backward = loss * total * dist.get_world_size() / everyones
            backward.backward()
        if not self.in_pieces or controller.optimizer_due:
            optimizer.step()
            optimizer.zero_grad()
        controller.step(loss=loss, logits=logits, target=y)
        self.seen["samples"].append(index.tolist())
        self.seen["losses"].append(loss.item())
        self.seen["rates"].append(optimizer.param_groups[0]["lr"])

    def save(self, path: Path) -> None:
        """As the first rank's state, which all that go on load."""
        state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"controller": self.controller.state_dict(gather=True), "epoch": self.epoch}
        if dist.get_rank() == 0:
            torch.save(state, path)

    def told(self) -> dict[str, Any]:
        """All that this rank saw, once the controller is closed."""
        full = {name: cast(Any, p).full_tensor() if self.case.sharded else p for name, p in self.net.named_parameters()}
        told: dict[str, Any] = {**self.seen, "samples_seen": self.controller.samples_seen}
        told["parameters"] = {name: parameter.detach().flatten().tolist() for name, parameter in full.items()}
        self.controller.close()
        if dist.get_rank() == 0 and self.events.exists():
            lines = map(json.loads, self.events.read_text().splitlines())
            told["decisions"] = [{name: line.get(name) for name in DECIDED} for line in lines if not line.get("short")]
        return told


@contextlib.contextmanager
def _group(store: Path, rank: int, ranks: int) -> Iterator[None]:
    """A process group of one part of a case: what goes wrong in it does not reach the next."""
    patience = timedelta(seconds=100)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=patience)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _run(case: Case, name: str, rank: int, folder: Path) -> dict[str, Any]:
    """Both parts of a case, if it has two; this rank may have a part in one of them only."""
    told, saved = dict[str, Any](), folder / f"{name}.pt"
    for part, ranks in (("", case.ranks), ("resumed ", case.resume)):
        if rank >= ranks:
            continue
        with _group(folder / f"{name}{part.strip()}.store", rank, ranks):
            state = torch.load(saved, weights_only=True) if part else None
            job = Job(case, folder, name + part.strip(), state)
            if state is not None:
                job.epoch = state["epoch"]
            job.train(case.rounds)
            if case.resume and not part:
                job.save(saved)
            told |= {part + what: value for what, value in job.told().items()}
    return told


def _rank(rank: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    exchange_s = [0.0]
    record_times(exchange_s)
    for name in names:
        case = CASES[name]
        exchange_s[0] = case.exchange_s
        if rank >= max(case.ranks, case.resume):
            continue
        try:
            told = _run(case, name, rank, folder)
        except Exception as error:  # a difference like any other
            told = {"error": f"{type(error).__name__}: {error}"}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)


def main(folder: Path, names: list[str]) -> None:
    """The `names`, or all cases, on as many processes as the largest has ranks; cases.json says what is to be there."""
    if unknown := set(names) - CASES.keys():
        sys.exit(f"no case {', '.join(sorted(unknown))}: there are {', '.join(CASES)}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    names = names or list(CASES)
    ranks_of = {name: max(CASES[name].ranks, CASES[name].resume) for name in names}
    (folder / "cases.json").write_text(json.dumps({"dynamix": dynamix.__file__, "ranks": ranks_of}))
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, folder, names)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
